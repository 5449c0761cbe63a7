package plugin

import (
	"fmt"
	"strings"
)

// pluginConf is the configuration of a plugin in a chain. Parts of it depend on the network.
type pluginConf struct {
	instance string // of a faulty plugin
	text     func(n *node, extra string) string
	extra    string // more keys, each preceded by a comma
}

var (
	bridge   = pluginConf{text: (*node).bridgePlugin}
	portmap  = object(`{"type": "portmap", "capabilities": {"portMappings": true}}`)
	firewall = named("firewall")
	loopback = named("loopback")
	sbr      = named("sbr")

	// static is bridge with the IPAM plugin static, which stores no owner of its address.
	static = pluginConf{text: func(n *node, extra string) string {
		return fmt.Sprintf(`{"type": "bridge", "bridge": %q, "isGateway": true,
			"ipam": {"type": "static", "addresses": [{"address": "%s"}]}%s}`, n.bridge, n.prefix(4, 7), extra)
	}}

	// Faulty plugins (testdata/faulty) do what the test has set with node.plan. In a plan, the
	// variable everyone stands for all instances that the plan does not name.
	p0, p1, p2 = faulty("p0"), faulty("p1"), faulty("p2")
	p3, p4, p5 = faulty("p3"), faulty("p4"), faulty("p5")
	everyone   = faulty("*")
	// pooled is p0 with a host-local pool of two addresses. single is p0 with a pool of one.
	pooled, single = p0ofPool(2, 3), p0ofPool(2, 2)
)

// faulty returns the configuration of a faulty plugin. Tests identify the plugin by its instance.
func faulty(instance string) pluginConf {
	text := func(n *node, extra string) string { return n.faulty(instance, extra) }
	return pluginConf{instance: instance, text: text}
}

// p0ofPool returns p0 with a host-local pool. The parameters are the final bytes of the pool's
// first and last addresses.
func p0ofPool(first, last int) pluginConf {
	return pluginConf{instance: "p0", text: func(n *node, extra string) string {
		return strings.TrimSuffix(n.pooled("p0", first, last), "}") + extra + "}"
	}}
}

// named returns a plugin whose configuration has only a type.
func named(plugin string) pluginConf { return object(`{"type": %q}`, plugin) }

// object returns a plugin with this configuration, a JSON object.
func object(format string, a ...any) pluginConf {
	conf := fmt.Sprintf(format, a...)
	return pluginConf{text: func(_ *node, extra string) string { return strings.TrimSuffix(conf, "}") + extra + "}" }}
}

// masquerading returns bridge or ptp with ipMasq. families is "IPv4", "IPv6" or "dual".
func masquerading(plugin, families string) pluginConf {
	return pluginConf{text: func(n *node, extra string) string { return n.masquerading(plugin, families, extra) }}
}

// addressed returns a chain of four faulty plugins. Each plugin adds an address to the result, and
// has the given keys in its configuration.
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

// with adds keys in JSON, such as "mtu": 1400.
func (c pluginConf) with(format string, a ...any) pluginConf {
	c.extra += ", " + fmt.Sprintf(format, a...)
	return c
}

func (c pluginConf) masq() pluginConf { return c.with(`"ipMasq": true`) }

// delay sets how long a call of a faulty plugin takes in the modes "late" and "orphan".
func (c pluginConf) delay(ms int) pluginConf { return c.with(`"delayMS": %d`, ms) }

// code sets the code of a faulty plugin's errors.
func (c pluginConf) code(code int) pluginConf { return c.with(`"code": %d`, code) }

// address makes a faulty plugin add an address to the result.
func (c pluginConf) address(prefix string) pluginConf { return c.with(`"address": %q`, prefix) }

// rules makes a faulty plugin create a rule for each address in its prevResult.
func (c pluginConf) rules() pluginConf { return c.with(`"rules": true`) }

// failing makes a faulty plugin return an error for a verb, whatever the plan says.
func (c pluginConf) failing(verb string) pluginConf { return c.mode(verb, "fail") }

// mode sets a faulty plugin's mode for a verb, whatever the plan says.
func (c pluginConf) mode(verb, mode string) pluginConf {
	return c.with(`"modes": {%q: %q}`, verb, mode)
}

// fault is the mode of a faulty plugin for a verb: testdata/faulty lists the modes. A mode that is
// followed by "once" applies only to an attachment's first call of that verb.
type fault struct{ instance, verb, mode string }

func (c pluginConf) on(verb, mode string) fault { return fault{c.instance, verb, mode} }
func (c pluginConf) ADD(mode string) fault      { return c.on("ADD", mode) }
func (c pluginConf) DEL(mode string) fault      { return c.on("DEL", mode) }
func (c pluginConf) CHECK(mode string) fault    { return c.on("CHECK", mode) }
func (c pluginConf) GC(mode string) fault       { return c.on("GC", mode) }
func (c pluginConf) STATUS(mode string) fault   { return c.on("STATUS", mode) }

// inPod is for a plan: it stands for all faulty plugins of the pods whose names have this prefix.
func inPod(name string) pluginConf { return faulty("pod:" + name) }

// plan sets the faults of the faulty plugins, and replaces the previous plan. Without faults, all
// plugins work.
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

// chain sets the chain that unwind's configuration contains in later requests.
func (n *node) chain(plugins ...pluginConf) { n.present = plugins }

// plugins returns the configurations of the present chain's plugins for this network.
func (n *node) plugins() (all []string) {
	for _, p := range n.present {
		all = append(all, p.text(n, p.extra))
	}
	return all
}
