package plugin

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/plugintest/sandbox"
)

// chainFile configures unwind with a chainFile that has this content, and returns the file's path.
// If the content is "", no file is created.
func (n *node) chainFile(content string) string {
	n.Helper()
	path := filepath.Join(n.dir, "net.d", "net.conflist")
	n.mkdir(filepath.Dir(path))
	if content != "" {
		n.write(path, content)
	}
	n.conf["chain"], n.conf["chainFile"] = nil, path
	return path
}

// chainInFile writes a chain of these plugins to a chainFile, and configures unwind with that file.
func (n *node) chainInFile(plugins ...pluginConf) (path string) {
	n.Helper()
	n.chain(plugins...)
	return n.chainFile(n.chainOf(n.plugins()...))
}

func (n *node) write(path, content string) {
	n.Helper()
	must(n, os.WriteFile(path, []byte(content), 0o600))
}

// TestChainFileIsReadAtEachADD: after the provider rewrites the chainFile, the next ADD uses the
// new chain. CHECK and DEL use the chain of their pod's ADD, even if the file has changed or is
// missing.
func TestChainFileIsReadAtEachADD(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.chainInFile(faulty("old"))
	a := n.add("a")
	file := n.chainInFile(faulty("new"))
	b := n.add("b")
	n.wantCalls("ADD old", "ADD new")
	a.del()
	n.wantCalls("DEL old")
	n.remove(file)
	b.check()
	b.del()
	n.wantCalls("CHECK new", "DEL new")
	n.wantClean()
}

// TestChainFileUnusable: if the chainFile contains no valid chain, an ADD starts no plugin, and its
// error names the file and the problem (netconf's tests cover each problem). The DEL of a pod that
// is not in the journal succeeds if the runtime has no result of an ADD. If the runtime has one,
// for example of an ADD without unwind, the DEL fails.
func TestChainFileUnusable(t *testing.T) {
	files := []struct{ name, content, says string }{
		{"gone", ``, "no such file or directory"},
		{"truncated", `{"cniVersion": "1.0.0", "plugins": [{"type": "fau`, "not valid JSON"},
		{"a plugin's file broken", `{"cniVersion": "1.0.0", "plugins": [{"type": "faulty"}]}`, "plugins[1]: not valid JSON"},
	}
	each1(t, files, func(t *testing.T, tt struct{ name, content, says string }) {
		n := newNode(t)
		file := n.chainFile(tt.content)
		if tt.name == "a plugin's file broken" {
			dir := filepath.Join(n.dir, "net.d", n.network)
			n.mkdir(filepath.Join(dir, "10.conf"))
			n.write(filepath.Join(dir, "20.conf"), `{"type"`)
		}
		a := n.newPod("a")
		n.wantError(a.tryAdd(), "unwind: ", "chainFile "+file+": ", tt.says)
		a.del()
		n.chain(p0)
		a.addPast()
		n.forgetCalls()
		n.wantError(a.tryDel(), "unwind: ", "chainFile "+file+": ", tt.says)
		n.wantCalls()
		a.delPast()
		n.wantClean()
	})
}

// TestChainFileIsLookedForAgain: an ADD and a STATUS wait while the provider rewrites its file.
func TestChainFileIsLookedForAgain(t *testing.T) {
	contents := oneOf("away", "half written", "empty")
	each2(t, contents, oneOf("ADD", "STATUS"), func(t *testing.T, content, verb choice) {
		n := newNode(t)
		n.budget("Exchange=3m")
		n.versions("1.1.0", "1.0.0")
		file := n.chainInFile(p0)
		must(n, os.Rename(file, file+".new"))
		switch {
		case content.is("half written"):
			n.write(file, `{"cniVersion": "1.0.0", "plug`)
		case content.is("empty"):
			n.write(file, " ")
		}
		back := time.AfterFunc(200*time.Millisecond, func() { _ = os.Rename(file+".new", file) })
		n.Cleanup(func() { back.Stop() })
		if verb.is("ADD") {
			a := n.add("a")
			a.del()
		} else {
			n.libcniStatus()
		}
		n.wantClean()
	})
}

// TestChainFileHangs: reading the chainFile hangs. CHECK and DEL of a pod in the journal don't need
// the file. An ADD, and the DEL of a pod that is not in the journal, fail after 10 s and name the
// file. A STATUS times out. A plugin's DEL that fails stays pending, as its retry needs the file.
func TestChainFileHangs(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.budget("Status=2s")
	n.versions("1.1.0", "1.0.0")
	file := n.chainInFile(p0.code(7))
	n.plan(inPod("rejected").DEL("fail"))
	known, rejected, looked := n.add("known"), n.add("rejected"), n.add("looked")
	unknown := n.addPast("unknown")
	n.makeHang(filepath.Dir(file))
	known.del()
	fresh := n.newPod("new")
	adding := fresh.beginAdd()
	deletingUnknown := unknown.beginDel()
	deletingRejected := rejected.beginDel()
	checking := looked.beginCheck()
	n.wantCode(n.tryLibcniStatus(), 50, "unwind: STATUS timed out: a plugin does not respond, "+
		"or a configuration file cannot be read; check the plugins and the file system")
	n.wantError(adding.wait(), "unwind: ", "chainFile "+file+": ", "not read within 10s")
	n.wantError(deletingUnknown.wait(), "unwind: ", "chainFile "+file+": ", "not read within 10s")
	n.wantError(deletingRejected.wait(), "code 7")
	checking.passes()
	rejected.wantRecord(journal.Deleting, 1)
}

// makeHang mounts a file system whose server never responds.
func (n *node) makeHang(dir string) {
	n.Helper()
	server, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		n.Skip(err)
	}
	n.Cleanup(func() { _ = unix.Close(server) }) // all pending accesses then fail
	options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", server)
	n.mount("hangs", dir, "fuse", unix.MS_NODEV|unix.MS_NOSUID, options)
}

// bare returns the input of a DEL as multus up to 4.3 sends it to the plugin of a clusterNetwork:
// it has only the keys of libcni's PluginConf (multus 6597fa65f). varLib replaces /var/lib,
// which contains the default stateDir.
func (n *node) bare(prevResult any) given {
	return given{varLib: n.varLib(), keys: keys{
		"chain": nil, "stateDir": nil, "logLevel": nil, "gracePeriod": nil,
		"ipam": rawJSON(`{}`), "capabilities": rawJSON(`{"portMappings":true}`), "prevResult": prevResult,
	}}
}

// varLib is the directory that replaces /var/lib.
func (n *node) varLib() string { return filepath.Join(n.dir, "varlib") }

// TestStrippedDEL: a DEL without chain and stateDir undoes the record in the default stateDir,
// whether the ADD succeeded or failed.
func TestStrippedDEL(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.stateDir = filepath.Join(n.varLib(), "cni", "unwind")
	n.store = &journal.Store{Dir: n.stateDir}
	n.chain(bridge.masq(), portmap, p2)
	add := given{varLib: n.varLib(), keys: keys{
		"stateDir": nil, "capabilities": rawJSON(`{"portMappings":true}`),
		"runtimeConfig": rawJSON(`{"portMappings":[{"hostPort":18090,"containerPort":80,"protocol":"tcp"}]}`),
	}}
	live := n.newPod("live")
	live.give("ADD", add)
	n.wantReserved(1)
	n.wantHostPorts(n.ip(2), 1)
	n.wantTaken("live.eth0.p2")
	live.give("DEL", n.bare(live.prevResult()))
	n.wantNotWarned("is not known")
	n.wantClean()
	n.plan(p2.ADD("fail-effect"), p2.DEL("fail"))
	failed := n.newPod("failed")
	n.wantError(failed.tryGive("ADD", add))
	failed.wantRecord(journal.RollingBack)
	n.plan()
	failed.give("DEL", n.bare(rawJSON(`null`)))
	n.wantClean()
	n.shell("! { iptables-save; ip6tables-save; } | grep 18090")
	n.wantClean()
}

// TestStrippedDELOfNothing: a DEL has no chain and no stateDir, and the journal in the default
// stateDir doesn't contain the attachment. The DEL starts no plugin, logs a warning and succeeds,
// because a retry could do no more. A record in another stateDir stays live until a DEL with that
// stateDir, or a sweep.
func TestStrippedDELOfNothing(t *testing.T) {
	each1(t, []string{"0.3.1", "1.0.0"}, func(t *testing.T, version string) {
		n := newNode(t)
		n.versions(version, version)
		n.chain(bridge)
		a := n.newPod("a")
		a.give("ADD", given{})
		a.give("DEL", n.bare(a.prevResult()))
		n.wantWarned(`level=WARN msg="DEL ran no plugin`)
		a.wantRecord(journal.Live)
		n.wantReserved(1)
		n.shell(`test -z "$(ls %s/cni/unwind/locks)"`, n.varLib())
		a.give("DEL", given{})
		n.wantClean()
	})
}

// TestNoChainIsStillAnError: a DEL has no chain, and its attachment is not in the journal. The DEL
// fails if another key is invalid or the journal cannot be read, because a retry may succeed. An
// ADD without a chain always fails.
func TestNoChainIsStillAnError(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	prevResult := rawJSON(`{"cniVersion":"1.0.0","ips":[{"address":"10.9.8.7/24"}]}`)
	n.chain(p0)
	a := n.newPod("a")
	wrongKey := keys{"prevResult": prevResult, "chain": nil, "chainFile": 5}
	n.wantCode(a.tryGive("DEL", given{keys: wrongKey}), 7)
	wrongDir := keys{"prevResult": prevResult, "chain": nil, "stateDir": "/proc/none"}
	n.wantCode(a.tryGive("DEL", given{keys: wrongDir}), 7)
	n.wantCode(a.tryGive("ADD", given{keys: keys{"chain": nil}}), 7)
	n.wantClean()
}

// TestDELThatRunsNothing: a DEL that succeeds without running a plugin reports the reason in one
// line at the default log level, and in the history.
func TestDELThatRunsNothing(t *testing.T) {
	each1(t, oneOf("forgotten", "no binary"), func(t *testing.T, reason choice) {
		n := newNode(t)
		n.conf["logLevel"] = "info"
		n.chain(p0.address(n.ip(7) + "/24"))
		a := n.newPod("a")
		var edit given
		var why string
		if reason.is("forgotten") {
			n.plan(p0.DEL("fail"))
			a.give("ADD", given{})
			a.dropNetNS()
			n.sweep()
			a.giveUp()
			edit.keys = keys{"prevResult": a.prevResult()}
			why = "dropped from the journal with unwindctl forget"
		} else {
			edit.env = map[string]string{"CNI_PATH": n.path[0]}
			why = "no plugin of the chain is in CNI_PATH, and the runtime has no ADD result"
		}
		n.forgetCalls()
		a.give("DEL", edit)
		n.wantCalls()
		said := fmt.Sprintf(`level=INFO msg="DEL ran no plugin" attachment=%s/a/eth0`, n.network)
		log, events := n.said.stderr, n.events()
		n.want(strings.Count(log, "\n") == 1 && strings.Contains(log, said) && strings.Contains(log, why),
			"log: %s", log)
		last := events[len(events)-1]
		n.want(strings.HasPrefix(last, "no-op a ") && strings.Contains(last, why), "history: %q", events)
	})
}

// TestSweepHasTheADDsPATH: the PATH of a sweep contains no iptables, or only ip6tables. With such a
// PATH, portmap's DEL would succeed without effect. But the DELs of portmap and firewall get the
// PATH of the ADD, so they remove the rules.
func TestSweepHasTheADDsPATH(t *testing.T) {
	sandbox.Concurrent(t)
	each1(t, []string{"none", "six"}, func(t *testing.T, of string) {
		n := newNode(t)
		none, six := filepath.Join(n.dir, "none"), filepath.Join(n.dir, "six")
		n.shell("mkdir %s %[2]s; ln -s $(command -v ip6tables) %[2]s", none, six)
		n.chain(masquerading("bridge", "IPv4"), portmap, firewall)
		a := n.add("a")
		a.remember()
		a.dropNetNS()
		n.env = append(n.env, "PATH="+filepath.Join(n.dir, of))
		eventually(n, "the rules are gone", func() bool {
			n.status()
			return len(n.rules("--to-destination "+a.address+":80", "-d "+a.address+"/32")) == 0
		})
		n.env = append(n.env, "PATH="+os.Getenv("PATH"))
		n.until(0, func() { n.status() })
		a.wantVanished()
		n.wantClean()
	})
}

// TestSearchPaths: a sweep's DEL gets the ADD's search paths (such as PATH) if both hold: the ADD
// ran in this boot, and none of the directories in these paths has been removed since. If not, the
// DEL gets the sweep's own search paths. The runtime's DEL gets the runtime's search paths.
func TestSearchPaths(t *testing.T) {
	dels := oneOf("a sweep", "the runtime", "a directory is gone", "another boot")
	each1(t, dels, func(t *testing.T, del choice) {
		n := newNode(t)
		one, two, three := filepath.Join(n.dir, "one"), filepath.Join(n.dir, "two"), filepath.Join(n.dir, "three")
		n.mkdir(one)
		n.mkdir(two)
		n.mkdir(three)
		paths := filepath.Join(n.dir, "paths")
		n.script("p1", `echo $CNI_COMMAND $PATH,$LD_LIBRARY_PATH,$XTABLES_LIBDIR >> `+paths+`
			[ $CNI_COMMAND != ADD ] || echo "{\"cniVersion\": \"1.0.0\"}"`)
		n.chain(named("p1"))
		never := filepath.Join(n.dir, "never")
		n.env = append(n.env, "PATH="+one+":.:"+never+":"+two, "LD_LIBRARY_PATH=", "XTABLES_LIBDIR="+two)
		a := n.add("a")
		n.env = append(n.env, "PATH="+three, "LD_LIBRARY_PATH="+three, "XTABLES_LIBDIR=")
		want := "DEL " + three + "," + three + ","
		switch {
		case del.is("a sweep"):
			a.dropNetNS()
			n.status()
			want = "DEL " + one + ":" + two + ",," + two
		case del.is("the runtime"):
			a.dropNetNS()
			a.del()
		case del.is("a directory is gone"):
			a.dropNetNS()
			n.remove(two)
			n.status()
		case del.is("another boot"):
			a.reboot()
			n.status()
		}
		lines := strings.Split(strings.TrimSpace(read(n, paths)), "\n")
		n.want(len(lines) == 2 && lines[1] == want, "%q, not %s", lines, want)
		n.wantClean()
	})
}

// TestVersions combines each CNI version of unwind's conflist (outer) with each version of the
// chain (inner). The runtime gets a result in the outer version, the plugins get the inner version,
// and the DEL succeeds. The last plugin logs its input.
func TestVersions(t *testing.T) {
	all := []string{"0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"} // older results have no interfaces
	each2(t, all, all, func(t *testing.T, outer, inner string) {
		n := newNode(t)
		n.versions(outer, inner)
		n.chain(bridge, named("tuning"), p0)
		a := n.add("a")
		a.del()
		result := a.result(a.added)
		n.want(a.added.Version() == outer && len(result.IPs) == 1 && len(result.Interfaces) == 3,
			"%s: %v", a.added.Version(), result)
		n.wantCount("calls", len(n.callLog()), 2)
		for _, l := range n.callLog() {
			var prev struct{ CNIVersion string }
			raw, there := l.Stdin["prevResult"]
			n.want(string(l.Stdin["cniVersion"]) == fmt.Sprintf("%q", inner), "%s: %s", l.Command, l.Stdin["cniVersion"])
			n.want(there == (l.Command == "ADD" || inner >= "0.4.0"), "%s: prevResult %s", l.Command, raw)
			n.want(!there || json.Unmarshal(raw, &prev) == nil && prev.CNIVersion == inner,
				"%s: prevResult %s", l.Command, raw)
		}
		n.wantClean()
	})
}

// script creates a plugin that is a shell script.
func (n *node) script(plugin, body string) {
	n.Helper()
	file := filepath.Join(n.path[0], plugin)
	syscall.ForkLock.RLock() // a process forked now would keep the file open: ETXTBSY
	defer syscall.ForkLock.RUnlock()
	must(n, os.WriteFile(file, []byte("#!/bin/sh\n"+body+"\n"), 0o700))
}
