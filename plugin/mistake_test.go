package plugin

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/sweep"
)

// TestMistake: because of a mistake in its configuration or in the runtime's arguments, the last
// plugin of a chain fails its ADD and each DEL. In half of the cases, unwind is killed before it
// records the failed ADD. In the others, the runtime's DEL fails, as without unwind. If the
// configuration is then corrected, the runtime's first or second DEL uses it and leaves nothing.
func TestMistake(t *testing.T) {
	ptp := func(n *node, keys string) pluginConf {
		return object(`{"type": "ptp"%s, "ipMasq": true, "ipam": %s}`, keys, n.hostLocal(n.subnet))
	}
	tuning := func(mtu string) pluginConf { return object(`{"type": "tuning", "mtu": %s}`, mtu) }
	type mistake struct {
		name  string
		chain func(n *node) (wrong, right []pluginConf)
	}
	const inArgs = "CNI_ARGS"
	mistakes := []mistake{
		{"subnet", func(n *node) (wrong, right []pluginConf) {
			return []pluginConf{object(`{"type": "bridge", "bridge": %q,
					"ipam": {"type": "host-local", "dataDir": %q, "subnet": "10.1.2.0/33"}}`, n.bridge, n.dataDir())},
				[]pluginConf{bridge.masq()}
		}},
		{"MTU is a string", func(n *node) (wrong, right []pluginConf) {
			return []pluginConf{object(`{"type": "bridge", "bridge": %q, "mtu": "1500", "ipam": %s}`,
					n.bridge, n.hostLocal(n.subnet))},
				[]pluginConf{bridge.masq()}
		}},
		{"no IPAM", func(n *node) (wrong, right []pluginConf) {
			return []pluginConf{object(`{"type": "bridge", "bridge": %q, "mtu": "1500"}`, n.bridge)},
				[]pluginConf{bridge.masq()}
		}},
		{"ptp", func(n *node) (wrong, right []pluginConf) {
			return []pluginConf{ptp(n, `, "mtu": "1500"`)}, []pluginConf{ptp(n, ``)}
		}},
		{inArgs, func(*node) (wrong, right []pluginConf) {
			return []pluginConf{bridge.masq()}, nil
		}},
		{"after firewall", func(*node) (wrong, right []pluginConf) {
			return []pluginConf{bridge.masq(), firewall.with(`"firewalldZone": 5`)},
				[]pluginConf{bridge.masq(), firewall}
		}},
		{"after portmap", func(*node) (wrong, right []pluginConf) {
			return []pluginConf{bridge.masq(), portmap.with(`"markMasqBit": 40`)},
				[]pluginConf{bridge.masq(), portmap}
		}},
		{"after tuning", func(*node) (wrong, right []pluginConf) {
			return []pluginConf{bridge.masq(), tuning(`"1400"`)}, []pluginConf{bridge.masq(), tuning(`1400`)}
		}},
	}
	ends := oneOf("it fails", "it is cut off")
	each2(t, mistakes, ends, func(t *testing.T, mistake mistake, end choice) {
		n := newNode(t)
		wrong, right := mistake.chain(n)
		n.chain(wrong...)
		a := n.newPod("a")
		if mistake.name == inArgs {
			a.Args = [][2]string{{"FAST", "yes"}}
		}
		if end.is("it fails") {
			n.wantError(a.tryAdd())
			n.wantError(a.tryDel())
		} else {
			n.mustKill("added", len(wrong), a.tryAdd)
			state := journal.Adding
			if len(wrong) > 1 {
				state = journal.Live
			}
			a.wantRecord(state, len(wrong))
		}
		if mistake.name == inArgs {
			n.wantError(a.tryDel())
			return
		}
		n.chain(right...)
		_ = a.tryDel()
		a.del()
		n.wantClean()
	})
}

// TestTakenAndFailed: bridge's ADD gets an address, and then fails to create its rules. Each DEL of
// its IPAM plugin fails. So bridge's DEL stays pending, even if bridge's configuration changes or
// bridge leaves the chain. When the IPAM plugin works again, the DEL releases the address.
func TestTakenAndFailed(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	repairHostLocal := n.breakPlugin("host-local")
	n.chain(bridge.masq().with(`"ipMasqBackend": "bogus"`))
	a := n.newPod("a")
	n.wantError(a.tryAdd())
	n.wantLocks(1)
	n.chain(bridge)
	n.wantError(a.tryDel())
	a.wantRecord(journal.RollingBack, 1)
	n.wantReserved(1)
	n.chain(bridge.with(`"mtu": 1400`))
	n.wantError(a.tryDel())
	a.wantRecord(journal.RollingBack, 1)
	n.wantReserved(1)
	n.chain(loopback)
	a.del()
	a.wantRecord(journal.RollingBack, 1)
	n.wantReserved(1)
	repairHostLocal()
	n.chain(bridge)
	a.del()
	n.wantClean()
}

// staysPending is logged if the runtime's DEL succeeds although a plugin's DEL has failed.
const staysPending = "a DEL failed; the runtime gets no error, because the plugin has left the chain"

// TestMistakeThatCannotBeProven: a plugin fails its ADD after it has allocated something, and then
// fails its DEL, which stays pending. While the plugin's configuration in the chain is the same,
// the runtime's DEL fails, as without unwind. If that configuration changes, unwind retries the DEL
// with the new one. If the plugin has left the chain, the runtime's DEL succeeds, and unwind logs a
// warning.
func TestMistakeThatCannotBeProven(t *testing.T) {
	bad := p0.with(`"modes": {"ADD": "fail-effect", "DEL": "fail"}`)
	const refused, owed, done = "refused", "owed", "done"
	type test struct {
		name  string
		end   string
		chain []pluginConf // at the DEL
		plan  []fault
	}
	tests := []test{
		{"the mistake is there", refused, []pluginConf{bad}, nil},
		{"put right", done, []pluginConf{p0}, []fault{p0.DEL("ok")}},
		{"left the chain", owed, []pluginConf{loopback}, nil},
		{"two of them", refused, []pluginConf{p0, p1}, nil},
		{"put right, and fails", refused, []pluginConf{p0}, []fault{p0.DEL("fail")}},
		{"two of them, one with the mistake", refused, []pluginConf{bad, p1}, nil},
		{"the chain cannot be read", refused, []pluginConf{named("unwind")}, nil},
	}
	each1(t, tests, func(t *testing.T, tt test) {
		n := newNode(t)
		n.chain(bad)
		a := n.newPod("a")
		n.wantError(a.tryAdd())
		if tt.plan != nil {
			n.plan(tt.plan...)
		}
		n.chain(tt.chain...)
		switch tt.end {
		case refused:
			n.wantError(a.tryDel())
			n.wantError(a.tryDel())
			a.wantKept()
			n.wantTaken("a.eth0.p0")
			n.wantLoggedTimes(0, staysPending)
		case owed:
			a.del()
			a.del()
			a.wantKept()
			n.wantTaken("a.eth0.p0")
			n.wantLogged(staysPending)
		case done:
			a.del()
			a.del()
			a.wantGone()
			n.wantTaken()
			n.wantLoggedTimes(0, staysPending)
		}
		n.plan()
		n.chain(p0)
		n.status()
		n.gc()
		n.wantClean()
	})
}

// TestNeverRan: a plugin whose binary is missing or cannot be executed never runs, so it has no
// pending DEL. If the binary has the wrong format, the runtime's DEL fails, as without unwind,
// until the binary is replaced.
func TestNeverRan(t *testing.T) {
	binaries := oneOf("not executable", "of another format", "missing")
	each1(t, binaries, func(t *testing.T, binary choice) {
		n := newNode(t)
		n.chain(p0, named("broken"))
		install := func(mode os.FileMode, content string) {
			n.Helper()
			path := filepath.Join(n.path[0], "broken")
			n.write(path, content)
			must(n, os.Chmod(path, mode))
		}
		switch {
		case binary.is("not executable"):
			install(0o644, "#!/bin/sh")
		case binary.is("of another format"):
			install(0o755, "1234")
		}
		a := n.newPod("a")
		n.wantError(a.tryAdd())
		n.wantClean()
		if binary.is("of another format") {
			n.wantError(a.tryDel())
			install(0o755, "#!/bin/true")
		}
		a.del()
		n.wantClean()
	})
}

// TestBridgeFailsAtItsRules: bridge's first DEL removes the interface, and then fails to remove its
// rules. At the next DEL, the namespace exists without the interface. There, bridge would succeed
// without removing the rules, so unwind runs it in a scratch namespace.
func TestBridgeFailsAtItsRules(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.chain(bridge.masq())
	real, err := filepath.EvalSymlinks("/usr/sbin/iptables")
	must(n, err)
	fail, path := filepath.Join(n.dir, "fail"), filepath.Join(n.dir, "path")
	n.mkdir(fail)
	n.mkdir(path)
	must(n, os.WriteFile(filepath.Join(path, "iptables"), fmt.Appendf(nil, `#!/bin/bash
		for a; do if [ "$a" = -D ] && [ -e %s ]; then exit 4; fi; done
		exec -a iptables %s "$@"`, fail, real), 0o755))
	n.env = append(n.env, "PATH="+path+":"+os.Getenv("PATH"))
	a := n.add("a")
	n.wantError(a.tryDel())
	n.remove(fail)
	a.del()
	n.wantClean()
}

// In the tests below, a plugin's DEL rejects the configuration of the ADD, for example after an
// upgrade. Usually, the chain has a new configuration for the plugin by then.

// TestPresentConfigurationHasWhatTheADDHad: when unwind retries a DEL with the plugin's present
// configuration, it adds the data that the runtime and multus passed to the ADD, not the data that
// they pass to the DEL.
func TestPresentConfigurationHasWhatTheADDHad(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.versions("1.0.0", "0.4.0")
	n.conf["args"] = rawJSON(`{"cni":{"ips":["192.0.2.9"]}}`)
	n.conf["deviceID"] = "0000:03:00.1"
	n.chain(p0.failing("DEL").code(1).address("192.0.2.7/24").with(`"capabilities": {"ips": true}`))
	a := n.newPod("a")
	a.CapabilityArgs = keys{"ips": []string{"192.0.2.9/24"}, "mac": "02:00:00:00:00:07"}
	a.add()
	n.versions("1.0.0", "1.0.0")
	n.conf["args"] = rawJSON(`{"cni":{"ips":["192.0.2.10"]}}`)
	n.conf["deviceID"] = "0000:04:00.1"
	a.CapabilityArgs = keys{"ips": []string{"192.0.2.10/24"}}
	n.chain(p0.with(`"new": "key", "capabilities": {"ips": true, "mac": true}`))
	a.del()
	all := n.callLog()
	n.wantEqual("calls", n.calls(), []string{"ADD p0", "DEL p0", "DEL p0"})
	last := all[len(all)-1]
	for key, want := range map[string]string{
		"cniVersion": `"1.0.0"`, "new": `"key"`, "modes": ``, "deviceID": `"0000:03:00.1"`,
		"args":          `{"cni":{"ips":["192.0.2.9"]}}`,
		"runtimeConfig": `{"ips":["192.0.2.9/24"],"mac":"02:00:00:00:00:07"}`,
		"prevResult":    `{"cniVersion":"1.0.0","ips":[{"address":"192.0.2.7/24"}]}`,
	} {
		n.want(string(last.Stdin[key]) == want, "%s: %s, want %s", key, last.Stdin[key], want)
	}
	n.want(last.Args == all[0].Args, "CNI_ARGS %q, want %q", last.Args, all[0].Args)
	n.wantClean()
}

// TestGatewayOutsideOfTheSubnet: host-local 1.9 accepts a gateway outside the subnet, but
// host-local 1.10 rejects it. The ADD runs with 1.9 (a script stands in for it), and the DEL with
// 1.10, which fails. Then the operator corrects the conflist. The DEL succeeds with the present
// configuration and frees the address, even if the conflist now names another pool.
func TestGatewayOutsideOfTheSubnet(t *testing.T) {
	releases := oneOf("DEL", "DEL, another dataDir", "STATUS", "GC", "unwindctl sweep")
	each2(t, oneOf("chain", "chainFile"), releases, func(t *testing.T, in, release choice) {
		n := newNode(t)
		conf := func(ipam string) pluginConf {
			return object(`{"type": "bridge", "bridge": %q, "ipam": %s}`, n.bridge, ipam)
		}
		right := conf(n.hostLocal(n.subnet))
		wrong := conf(fmt.Sprintf(`{"type": "host-local", "dataDir": %q,
			"ranges": [[{"subnet": %q, "gateway": "192.0.2.1"}]]}`, n.dataDir(), n.subnet))
		elsewhere := conf(fmt.Sprintf(`{"type": "host-local", "dataDir": "%s/elsewhere", "subnet": %q}`, n.dir, n.subnet))
		setChain := n.chain
		if in.is("chainFile") {
			setChain = func(plugins ...pluginConf) { n.chainInFile(plugins...) }
		}
		n.script("host-local", `conf=$(cat); [ $CNI_COMMAND = DEL ] || conf=$(echo "$conf" | sed "s/\"gateway\"/\"ignored\"/")
			printf "%s" "$conf" | exec `+filepath.Join(n.path[1], "host-local"))
		setChain(wrong, p1)
		a := n.add("a")
		n.wantError(a.tryDel(), "bridge (code 999)")
		n.wantReserved(1)
		switch {
		case release.is("DEL"):
			setChain(right)
			a.del()
		case release.is("DEL, another dataDir"):
			setChain(elsewhere)
			a.del()
			n.wantReserved(0)
		case release.is("STATUS"):
			a.dropNetNS()
			setChain(right)
			n.until(0, func() { n.status() })
		case release.is("GC"):
			a.dropNetNS()
			setChain(right)
			n.until(0, func() { n.gc() })
		case release.is("unwindctl sweep"):
			a.dropNetNS()
			setChain(right)
			n.sweepPools()
		}
		n.wantClean()
	})
}

// sweepPools runs a sweep that knows the present chain and its pools, as unwindctl sweep does.
func (n *node) sweepPools() {
	n.Helper()
	conf, err := netconf.ParseConf([]byte(n.entryOf(n.chainOf(n.plugins()...), nil)))
	must(n, err)
	chain, err := conf.LoadChain()
	must(n, err)
	_, err = n.plugin().Sweep(n.Context(), n.stateDir, sweep.Options{
		Pools:    sweep.PoolsOf(chain, conf),
		Networks: []sweep.Network{{Chain: chain, Conf: conf}},
		Path:     strings.Join(n.path, ":"),
	})
	must(n, err)
}

// TestRejectedConfiguration: if a plugin's DEL fails with its recorded configuration, unwind
// retries the DEL with the plugin's present configuration. It does so whatever the error, but not
// if the plugin was killed, and never with another plugin's configuration. If the retry fails too,
// the step stays pending, with the recorded configuration and the first error.
func TestRejectedConfiguration(t *testing.T) {
	const accepted, refused = true, false
	const noChain = "no chain"
	type test struct {
		name     string
		accepted bool
		mode     string
		code     uint // the DEL's error code; 0: none
		now      []pluginConf
		dels     int
		mayPass  bool
	}
	present := []pluginConf{p0}
	tests := []test{
		{"incompatible version", accepted, "fail", 1, present, 2, false},
		{"invalid configuration", accepted, "fail", 7, present, 2, false},
		{"unknown container", accepted, "fail", 3, present, 2, false},
		{"no code", accepted, "fail", 0, present, 2, false},
		{"crash", refused, "crash", 999, present, 1, false},
		{"of two nobody can tell which", refused, "fail", 7, []pluginConf{p0, p1}, 1, false},
		{"not in the chain any more", refused, "fail", 7, []pluginConf{loopback}, 1, true},
		{noChain, refused, "fail", 7, []pluginConf{named("unwind")}, 1, false},
		{"the same configuration", refused, "fail", 7, []pluginConf{p0.failing("DEL").code(7)}, 1, false},
		{"another one that is rejected", refused, "fail", 7, []pluginConf{p0.failing("DEL").code(2)}, 2, false},
	}
	each2(t, tests, oneOf("DEL", "GC"), func(t *testing.T, tt test, by choice) {
		n := newNode(t)
		first := p0.mode("DEL", tt.mode).code(int(tt.code))
		n.chain(first)
		a := n.add("a")
		n.chain(tt.now...)
		wantOutcome := func(err error) {
			n.Helper()
			switch {
			case tt.accepted:
				must(n, err)
			case !tt.mayPass:
				n.wantError(err)
			}
		}
		dels := tt.dels
		if by.is("DEL") {
			wantOutcome(a.tryDel())
			times := 0
			if tt.accepted {
				times = 1
			}
			n.wantLoggedTimes(times, "DEL succeeded with the chain")
		} else {
			a.setState(journal.Deleting)
			wantOutcome(n.tryGC())
			if tt.name == noChain {
				dels = 0
			}
		}
		a.wantDELs(dels)
		if tt.accepted {
			n.wantClean()
			return
		}
		e := a.record()
		if e == nil || len(e.Steps) != 1 {
			n.Fatalf("the journal has %+v", e)
		}
		step := e.Steps[0]
		n.want(strings.Contains(string(step.Config), `"modes":`), "%+v", step)
		n.want(dels == 0 || step.Code == tt.code, "%+v", step)
		n.wantCount("taken", len(n.taken()), 1)
		n.chain(first)
		n.forgetCalls()
		_ = a.tryDel()
		a.wantDELs(1)
	})
}

// TestPresentConfigurationOfAnotherNetwork: a GC sweeps all networks, but it knows only its own
// network's chain. It doesn't retry another network's DEL with a configuration from that chain.
func TestPresentConfigurationOfAnotherNetwork(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.chain(p0.failing("DEL").code(7))
	a := n.add("a")
	a.dropNetNS()
	n.chain(p0)
	other := n.newNetwork("other")
	_ = other.tryGC()
	_ = other.tryGC()
	a.wantDELs(2)
	a.wantKept()
	n.gc()
	n.wantClean()
}
