//go:build e2e

package e2e_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"cni-unwind/plugin/e2e"
)

// TestE2ECrioLeak: a plugin is broken for a while, so pods cannot start or stop. With unwind, no
// address leaks during that time. Once the plugin works again, each of these makes unwind retry the
// pending DELs: a STATUS, a restart of CRI-O, the next ADD, the agent.
func TestE2ECrioLeak(t *testing.T) {
	table := e2e.NewTable(t, fmt.Sprintf("CRI-O: %d sandboxes of a pod on a /28; addresses/netns/veths/rules", e2e.Tries),
		"CHAIN", "TROUBLE", "THEN", "MEANWHILE", "PENDING", "FIRST WITHOUT ADDRESS", "STOPS THAT FAIL", "AFTER", "PENDING", "NEXT POD")
	next := func(c *e2e.CrioNode) error {
		id, err := c.RT.RunPod(e2e.Pod{Name: "crashing", Attempt: e2e.Tries + 1})
		if err == nil {
			err = errors.Join(c.RT.StopPod(id), c.RT.RemovePod(id))
		}
		return err
	}
	for _, one := range []struct {
		trouble     e2e.Trouble
		unwind      bool
		how         string
		statusGrace string
		then        func(c *e2e.CrioNode) error
	}{
		{e2e.Troubles[0], false, "STATUS, a restart, the next ADD", "1s", func(c *e2e.CrioNode) error { c.Restart(); _ = next(c); return nil }},
		{e2e.Troubles[0], true, "STATUS", "1s", func(*e2e.CrioNode) error { return nil }},
		{e2e.Troubles[0], true, "a restart", "", func(c *e2e.CrioNode) error { c.Restart(); return nil }},
		{e2e.Troubles[0], true, "the next ADD", "", next},
		{e2e.Troubles[0], true, "the agent", "", func(c *e2e.CrioNode) error { c.StartAgent(); return nil }},
		{e2e.Troubles[1], false, "a restart", "", func(c *e2e.CrioNode) error { c.Restart(); return nil }},
		{e2e.Troubles[1], true, "nothing", "", func(*e2e.CrioNode) error { return nil }},
		{e2e.Troubles[2], false, "a restart", "", func(c *e2e.CrioNode) error { c.Restart(); return nil }},
		{e2e.Troubles[2], true, "a restart", "", func(c *e2e.CrioNode) error { c.Restart(); return nil }},
	} {
		chain := e2e.ChainOf(one.unwind)
		t.Run(chain+"/"+one.trouble.Name+"/"+one.how, func(t *testing.T) {
			if one.trouble.Name != e2e.Troubles[2].Name {
				e2e.Long(t)
			}
			t.Parallel()
			c := e2e.NewCrioNode(t, one.unwind, one.statusGrace)
			one.trouble.Begin(c.Node)
			without, stops := 0, 0
			for i := range e2e.Tries {
				id, err := c.RT.RunPod(e2e.Pod{Name: "crashing", Attempt: uint32(i)})
				switch {
				case err == nil:
					if c.RT.StopPod(id) != nil {
						stops++
					}
					_ = c.RT.StopPod(id)
					_ = c.RT.RemovePod(id)
				case without == 0 && strings.Contains(err.Error(), "no IP addresses available"):
					without = i + 1
				}
			}
			during, pending := c.Settled(), c.Pending()
			one.trouble.End(c.Node)
			check(t, one.then(c))
			if one.unwind {
				e2e.Eventually(t, 2*time.Minute, "nothing is pending", func() bool { // unwind pauses between retries
					if c.Pending() > 0 && one.how == "the next ADD" {
						check(t, next(c))
					}
					return c.Pending() == 0
				})
			}
			after := c.Settled()
			_, starts := c.RT.RunPod(e2e.Pod{Name: "next"})
			table.Row(chain, one.trouble.Name, one.how, during, pending, without, stops, after, c.Pending(), word(starts))
			if !one.unwind {
				// CRI-O watches the plugin directory. If a plugin's binary is missing, CRI-O may run no
				// plugin, and so leak nothing.
				missing := one.trouble.Name == e2e.Troubles[1].Name
				if !missing && (during.Addresses+during.Rules == 0 || after.Addresses+after.Rules == 0) {
					t.Errorf("without unwind %s leaks, later %s, so the test proves nothing", during, after)
				}
				return
			}
			// If a sandbox's DEL fails, CRI-O sends no second DEL. So the last sandbox's address stays
			// reserved until the next ADD, a sweep or the agent retries the DEL of the plugin that failed.
			waits := one.trouble.Name == e2e.Troubles[2].Name && during.Addresses == 1
			if !during.HasNothing() && !waits || without != 0 {
				t.Errorf("meanwhile unwind leaves %s; sandbox %d got no address", during, without)
			}
			if after != (e2e.Left{}) || starts != nil {
				t.Errorf("later unwind leaves %s; the next pod: %v", after, starts)
			}
		})
	}
}

// TestE2ECrioKill: CRI-O and its plugins are killed during an ADD, while three other pods run.
// CRI-O forgets the sandbox of this ADD. It sends its only GC at its next start, before the grace
// period ends. So the agent or a sweep must release the sandbox's resources. The three other pods
// must keep theirs.
func TestE2ECrioKill(t *testing.T) {
	e2e.Long(t)
	table := e2e.NewTable(t, "CRI-O and its plugins are killed during an ADD while three pods run; addresses/netns/veths/rules",
		"CHAIN", "THEN", "LIVE", "KILLED", "RESTARTED", "AFTER", "RECORDS")
	for _, how := range []string{"plain", "the agent", "unwindctl sweep --cri auto"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			c := e2e.NewCrioNode(t, how != "plain", "")
			live := c.RT.RunPods(e2e.SomePods(3))
			before := c.Settled()
			c.Plan(map[string]string{"ADD": "hold"})
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				_, _ = c.RT.RunPod(e2e.Pod{Name: "victim"})
			}()
			c.AwaitHeld("ADD", 1)
			c.RT.Kill()
			c.KillPlugins()
			<-ended
			c.Plan(nil)
			c.LetGo()
			killed := c.Settled()
			c.RT.Start()
			c.RT.AwaitNetwork()
			restarted := c.Settled()
			switch how {
			case "the agent":
				c.StartAgent()
				e2e.Eventually(t, time.Minute, "the victim's address is free", func() bool { return len(c.Reserved()) == len(live) })
			case "unwindctl sweep --cri auto":
				e2e.Eventually(t, time.Minute, "the victim's address is free", func() bool {
					c.Unwindctl("sweep", "--cri", "auto")
					return len(c.Reserved()) == len(live)
				})
			}
			after := c.Settled()
			records := 0
			if c.Unwind {
				records = len(c.Journal())
			}
			table.Row(e2e.ChainOf(c.Unwind), how, before, killed, restarted, after, records)
			for _, id := range live {
				c.CheckPod(c.RT.CRI, id)
			}
			if killed.Addresses != len(live)+1 {
				t.Errorf("%d addresses when CRI-O is killed, want %d, so the test proves nothing", killed.Addresses, len(live)+1)
			}
			if c.Unwind && (after.Addresses != before.Addresses || after.Veths != before.Veths || after.Rules != before.Rules || records != len(live)) {
				t.Errorf("left: %s, %d records; the live pods had %s", after, records, before)
			}
		})
	}
}

// TestE2ECrioReboot: the machine reboots, or it reboots without CRI-O's storage, or only /run is
// emptied. With unwind, the old pods' resources are available to the new pods.
func TestE2ECrioReboot(t *testing.T) {
	e2e.Long(t)
	table := e2e.NewTable(t, "CRI-O: 10 pods on a /28; then the same pods are started; addresses/netns/veths/rules when they run, and when they are gone",
		"CHAIN", "EVENT", "BEFORE", "RUNNING", "NOT STARTED", "GONE", "PENDING")
	for _, unwind := range []bool{false, true} {
		for _, event := range []string{"reboot", "reboot without CRI-O's storage", "/run is emptied"} {
			chain := e2e.ChainOf(unwind)
			t.Run(chain+"/"+event, func(t *testing.T) {
				t.Parallel()
				c := e2e.NewCrioNode(t, unwind, "1s")
				pods := e2e.SomePods(10)
				old := c.RT.RunPods(pods)
				before := c.Settled()
				switch event {
				case "/run is emptied":
					c.RT.Stop()
					c.EmptyRun()
				case "reboot":
					c.Reboot()
				default:
					c.Reboot()
					c.EmptyDisk("containers")
				}
				c.RT.LoadPause()
				c.RT.Start()
				c.RT.AwaitNetwork()
				failed := c.RT.RunAgain(pods, old, func() {})
				if unwind {
					e2e.Eventually(t, time.Minute, "nothing is pending", func() bool { return c.Pending() == 0 })
				}
				running := c.Settled()
				c.CheckLive(c.RT.CRI)
				if errs := c.RT.RemovePods(); len(errs) > 0 {
					t.Errorf("at the end: %v", errs)
				}
				gone := c.Settled()
				table.Row(chain, event, before, running, failed, gone, c.Pending())
				if unwind && (running != before || failed > 0 || gone != (e2e.Left{}) || c.Pending() > 0) {
					t.Errorf("running %s, before %s; %d did not start; left %s, %d records", running, before, failed, gone, c.Pending())
				}
			})
		}
	}
}

// TestE2ECrioHostPort: CRI-O itself sets up a pod's host ports, in its own nftables table, and
// sends no port mappings to plugins. It removes the host ports when it removes the pod.
func TestE2ECrioHostPort(t *testing.T) {
	e2e.Long(t)
	const port = 8080
	for _, unwind := range []bool{false, true} {
		t.Run(fmt.Sprintf("unwind %t", unwind), func(t *testing.T) {
			t.Parallel()
			c := e2e.NewCrioNode(t, unwind, "")
			id := c.RT.MustRunPod(e2e.Pod{Name: "port", HostPorts: []int32{port}})
			address := c.RT.IP(id)
			rules, forwards := c.Run("nft", "list", "ruleset"), fmt.Sprintf(": %s . %d", address, port)
			if !strings.Contains(rules, forwards) {
				t.Fatalf("CRI-O's rules don't contain %q:\n%s", forwards, rules)
			}
			if unwind && strings.Contains(c.Unwindctl("show", id, "-o", "json"), "portMappings") {
				t.Error("CRI-O sends port mappings to plugins")
			}
			if errs := c.RT.RemovePods(); len(errs) > 0 {
				t.Error(errs)
			}
			if left := c.Settled(); left != (e2e.Left{}) {
				t.Errorf("left %s", left)
			}
			if rules := c.Run("nft", "list", "ruleset"); strings.Contains(rules, forwards) {
				t.Errorf("left:\n%s", rules)
			}
		})
	}
}

// TestE2ECrioInstall runs the unwindctl commands "install", "doctor", "off", "on" and "uninstall",
// with CRI-O's default CNI directories and with OpenShift's. Pods can start after "install", "off"
// and "uninstall". A pod that started before "install" can be deleted after it.
func TestE2ECrioInstall(t *testing.T) {
	e2e.Long(t)
	for _, dirs := range []e2e.CrioNetwork{
		{ConfDir: e2e.ConfDir, PluginDir: e2e.PluginDir},
		{ConfDir: "/etc/kubernetes/cni/net.d", PluginDir: "/var/lib/cni/bin"},
	} {
		t.Run(dirs.ConfDir, func(t *testing.T) {
			t.Parallel()
			n := e2e.NewNode(t)
			n.Configure(e2e.Network{Subnet: e2e.Small, Plugins: []string{e2e.Firewall}})
			if dirs.ConfDir != e2e.ConfDir {
				n.Run("mkdir", "-p", "/etc/kubernetes/cni")
				n.Run("mv", e2e.ConfDir, dirs.ConfDir)
				n.Run("cp", "-r", e2e.PluginDir, dirs.PluginDir)
			}
			n.Run("rm", dirs.PluginDir+"/unwind")
			rt := n.StartCrio(dirs)
			rt.AwaitNetwork()
			if dirs.ConfDir != e2e.ConfDir {
				n.Run("rm", "-r", e2e.PluginDir)
			}
			before := rt.MustRunPod(e2e.Pod{Name: "before"})
			n.Unwindctl("install")
			out, stderr, err := n.Try(e2e.Path(t, "bin/unwindctl"), "doctor", "-v")
			t.Logf("doctor: %v\n%s%s", err, out, stderr)
			if err != nil || !strings.Contains(out, dirs.ConfDir) {
				t.Errorf("doctor: %v\n%s%s", err, out, stderr)
			}
			t.Log(n.Unwindctl("check"), n.Unwindctl("check", "--plain"))
			e2e.Eventually(t, time.Minute, "unwind starts the pods", func() bool {
				id, err := rt.RunPod(e2e.Pod{Name: "through"})
				if err != nil {
					return false
				}
				if len(n.Journal()) > 0 {
					return true
				}
				check(t, errors.Join(rt.StopPod(id), rt.RemovePod(id)))
				return false
			})
			check(t, errors.Join(rt.StopPod(before), rt.RemovePod(before)))
			rt.Stop()
			rt.Start() // CRI-O remembers a failed STATUS, and sends GC only at its start
			rt.AwaitNetwork()
			t.Log(n.Unwindctl("off"))
			e2e.Eventually(t, time.Minute, "pods start without unwind", func() bool {
				was := len(n.Journal())
				id, err := rt.RunPod(e2e.Pod{Name: "off"})
				if err != nil {
					return false
				}
				now := len(n.Journal())
				check(t, errors.Join(rt.StopPod(id), rt.RemovePod(id)))
				return now == was
			})
			t.Log(n.Unwindctl("on"))
			if errs := rt.RemovePods(); len(errs) > 0 {
				t.Error(errs)
			}
			n.Unwindctl("sweep", "--cri", "auto")
			t.Log(n.Unwindctl("uninstall"))
			if left := n.Settled(); left != (e2e.Left{}) {
				t.Errorf("left %s", left)
			}
			if _, _, err := n.Try("test", "-e", dirs.PluginDir+"/unwind"); err == nil {
				t.Error("uninstall does not remove the plugin")
			}
			if _, err := rt.RunPod(e2e.Pod{Name: "after"}); err != nil {
				t.Errorf("after uninstall: %v", err)
			}
		})
	}
}
