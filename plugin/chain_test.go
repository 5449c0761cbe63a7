package plugin

import (
	"fmt"
	"strings"
)

// pluginConf is the configuration of a plugin in a chain. Parts of it depend on the network.
type pluginConf struct {
	instance string // of a faulty plugin
	text     func(n *node, extra string) string
	extra    string // more keys, each behind a comma
}

var (
	bridge   = pluginConf{text: (*node).bridgePlugin}
	portmap  = object(`{"type": "portmap", "capabilities": {"portMappings": true}}`)
	firewall = named("firewall")
	loopback = named("loopback")
	sbr      = named("sbr")

	// static is a bridge with an IPAM plugin that names no owner of the address.
	static = pluginConf{text: func(n *node, extra string) string {
		return fmt.Sprintf(`{"type": "bridge", "bridge": %q, "isGateway": true,
			"ipam": {"type": "static", "addresses": [{"address": "%s"}]}%s}`, n.bridge, n.prefix(4, 7), extra)
	}}

	// Faulty plugins (testdata/faulty) do as a test plans: see node.plan. everyone is all of them in
	// a plan.
	p0, p1, p2 = faulty("p0"), faulty("p1"), faulty("p2")
	p3, p4, p5 = faulty("p3"), faulty("p4"), faulty("p5")
	everyone   = faulty("*")
	// pooled is a p0 with host-local addresses from the second to the third of the subnet; single
	// has one address.
	pooled, single = p0ofPool(2, 3), p0ofPool(2, 2)
)

// faulty is a plugin of testdata/faulty. plan and calls know it by its instance.
func faulty(instance string) pluginConf {
	text := func(n *node, extra string) string { return n.faulty(instance, extra) }
	return pluginConf{instance: instance, text: text}
}

// p0ofPool is a p0 with the addresses of host-local from first to last.
func p0ofPool(first, last int) pluginConf {
	return pluginConf{instance: "p0", text: func(n *node, extra string) string {
		return strings.TrimSuffix(n.pooled("p0", first, last), "}") + extra + "}"
	}}
}

// named is a plugin whose configuration has only a type.
func named(plugin string) pluginConf { return object(`{"type": %q}`, plugin) }

// object is a plugin with this configuration.
func object(format string, a ...any) pluginConf {
	conf := fmt.Sprintf(format, a...)
	return pluginConf{text: func(_ *node, extra string) string { return strings.TrimSuffix(conf, "}") + extra + "}" }}
}

// masquerading is bridge or ptp with IPv4, IPv6 or dual.
func masquerading(plugin, families string) pluginConf {
	return pluginConf{text: func(n *node, extra string) string { return n.masquerading(plugin, families, extra) }}
}

// addressed is a chain of four, each of which adds an address to the result. All have these keys.
func addressed(keys ...string) (chain []pluginConf) {
	for i := range 4 {
		conf := faulty(fmt.Sprint("p", i)).address(fmt.Sprintf("198.51.100.%d/32", i))
		for _, key := range keys {
			conf = conf.with("%s", key)
		}
		chain = append(chain, conf)
	}
	return chain
}

// with adds keys, in JSON: `"mtu": 1400`.
func (c pluginConf) with(format string, a ...any) pluginConf {
	c.extra += ", " + fmt.Sprintf(format, a...)
	return c
}

// masq makes a bridge masquerade.
func (c pluginConf) masq() pluginConf { return c.with(`"ipMasq": true`) }

// delay makes each call of a faulty plugin that its plan says is late take this long.
func (c pluginConf) delay(ms int) pluginConf { return c.with(`"delayMS": %d`, ms) }

// code is that of a faulty plugin's errors.
func (c pluginConf) code(code int) pluginConf { return c.with(`"code": %d`, code) }

// address makes a faulty plugin add an address to the result.
func (c pluginConf) address(prefix string) pluginConf { return c.with(`"address": %q`, prefix) }

// rules makes a faulty plugin make a rule of the address of its prevResult.
func (c pluginConf) rules() pluginConf { return c.with(`"rules": true`) }

// failing makes a faulty plugin fail a verb by its configuration, whatever its plan is.
func (c pluginConf) failing(verb string) pluginConf { return c.mode(verb, "fail") }

// mode makes a faulty plugin fail a verb in this manner by its configuration.
func (c pluginConf) mode(verb, mode string) pluginConf {
	return c.with(`"modes": {%q: %q}`, verb, mode)
}

// fault is a mode of a faulty plugin for a verb: testdata/faulty lists them. "once" behind a mode
// means the next call alone.
type fault struct{ instance, verb, mode string }

func (c pluginConf) on(verb, mode string) fault { return fault{c.instance, verb, mode} }
func (c pluginConf) ADD(mode string) fault      { return c.on("ADD", mode) }
func (c pluginConf) DEL(mode string) fault      { return c.on("DEL", mode) }
func (c pluginConf) CHECK(mode string) fault    { return c.on("CHECK", mode) }
func (c pluginConf) GC(mode string) fault       { return c.on("GC", mode) }
func (c pluginConf) STATUS(mode string) fault   { return c.on("STATUS", mode) }

// inPod stands for all faulty plugins in a chain of this pod.
func inPod(name string) pluginConf { return faulty("pod:" + name) }

// plan sets the faults of faulty plugins, in place of those before. Without any, all plugins work.
func (n *node) plan(faults ...fault) {
	n.Helper()
	plan := map[string]map[string]string{}
	for _, f := range faults {
		if plan[f.instance] == nil {
			plan[f.instance] = map[string]string{}
		}
		plan[f.instance][f.verb] = f.mode
	}
	n.setModes(plan)
}

// chain sets the chain of the next requests: an ADD runs it, and a DEL finds it in the
// configuration.
func (n *node) chain(plugins ...pluginConf) { n.present = plugins }

// plugins returns the configurations of the present chain in this network.
func (n *node) plugins() (all []string) {
	for _, p := range n.present {
		all = append(all, p.text(n, p.extra))
	}
	return all
}
