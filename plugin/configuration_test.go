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

// chainFile names the file from which unwind reads its chain, and makes it unless the content is "".
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

// chainFiles are statements about this file.
var chainFiles = acts{
	// chainfile [PLUGIN | PLUGIN …]: $file has these; without them it is not there
	"chainfile": func(s *story, w []string) {
		content := ""
		if len(w) > 0 {
			s.chain = strings.Split(strings.Join(w, " "), " | ")
			content = s.chainOf(s.plugins(s.node)...)
		}
		s.vars["file"] = s.chainFile(content)
	},
	"back": func(s *story, _ []string) { // soon
		back := time.AfterFunc(200*time.Millisecond, func() { _ = os.Rename(s.vars["file"]+".new", s.vars["file"]) })
		s.Cleanup(func() { back.Stop() })
	},
}

func (n *node) write(path, content string) {
	n.Helper()
	must(n, os.WriteFile(path, []byte(content), 0o600))
}

// TestChainFileIsReadAtEachADD: after the file's owner rewrites it, the next ADD uses the new
// chain. The DEL of the first pod uses its own, even when the file is gone.
func TestChainFileIsReadAtEachADD(t *testing.T) {
	stories(t, `
	chainfile old; add a; chainfile new; add b; calls ADD old, ADD new
	del a; calls DEL old
	lose $file; check b; del b; calls CHECK new, DEL new`, chainFiles)
}

// TestChainFileUnusable: ADD refuses a file that is no chain, names it and the fault, and starts
// nothing (netconf's tests have each fault). A DEL of a pod that the journal does not know succeeds if the runtime has no result of
// an ADD either; otherwise, as after an ADD by the plain chain, it is an error too.
func TestChainFileUnusable(t *testing.T) {
	stories(t, `
	chainfile; let one "plugins": [{"type": "faulty"}]}
	either gone: let says no such file or directory
	or truncated: file $file '{"cniVersion": "1.0.0", "plugins": [{"type": "fau'; let says not valid JSON
	or a plugin's file broken: shell 'mkdir -p $dir/net.d/$network/10.conf'; file $dir/net.d/$network/20.conf {"type"
		file $file '{"cniVersion": "1.0.0", $one'; let says plugins[1]: not valid JSON
	fails add a 'unwind: ' 'chainFile $file: ' '$says'; del a
	chain p0; past add a; forgets
	fails del a 'unwind: ' 'chainFile $file: ' '$says'; calls
	past del a`, chainFiles)
}

// TestChainFileIsLookedForAgain: an ADD and a STATUS wait for a provider that is just rewriting its
// file.
func TestChainFileIsLookedForAgain(t *testing.T) {
	stories(t, `
	budget Exchange 3m; versions 1.1.0 1.0.0; chainfile p0; shell 'mv $file $file.new'
	either away:
	or half written: file $file '{"cniVersion": "1.0.0", "plug'
	or empty: file $file ' '
	back
	either ADD: add a; del a
	or STATUS: libcni-status`, chainFiles)
}

// TestChainFileHangs: a DEL that the journal knows does without the file. A verb that looks into it
// gives up in time, and says which file it is; the DEL of a delegate that rejects its configuration
// stays pending.
func TestChainFileHangs(t *testing.T) {
	stories(t, `
	budget Status 2s; versions 1.1.0 1.0.0; chainfile p0, "code": 7; plan pod:rejected DEL fail
	add known rejected looked; past add unknown; hang; del known
	start add new; start del unknown; start del rejected; start check looked
	let hangs 'unwind: STATUS timed out: a plugin does not respond, or a configuration file cannot be read; check the plugins and the file system'
	fails libcni-status code=50 '$hangs'
	fails wait add new 'unwind: ' 'chainFile $file: ' 'not read within 10s'
	fails wait del unknown 'unwind: ' 'chainFile $file: ' 'not read within 10s'
	fails wait del rejected 'code 7'; wait check looked
	entry rejected deleting 1; leaves`, chainFiles, acts{"hang": func(s *story, _ []string) {
		// The file is on a file system whose server never answers.
		server, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			s.Skip(err)
		}
		s.Cleanup(func() { _ = unix.Close(server) }) // ends all that wait for it
		options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", server)
		s.mount("hangs", filepath.Dir(s.vars["file"]), "fuse", unix.MS_NODEV|unix.MS_NOSUID, options)
	}})
}

// bare makes a DEL as multus up to 4.3 gives it to the plugin of a clusterNetwork: with the keys of
// libcni's PluginConf alone (multus 6597fa65f). The default stateDir is below $lib.
const bare = `
	let lib $dir/varlib
	let bare chain= stateDir= logLevel= gracePeriod= ipam={} capabilities={"portMappings":true} varLib=$lib`

// TestStrippedDEL: a DEL without chain and stateDir undoes what the journal in the default stateDir
// has, of an ADD that succeeded and of one that failed.
func TestStrippedDEL(t *testing.T) {
	stories(t, bare+`
	default-dir; chain bridge, "ipMasq": true | portmap | p2
	let to stateDir= capabilities={"portMappings":true} varLib=$lib
	let to $to runtimeConfig={"portMappings":[{"hostPort":18090,"containerPort":80,"protocol":"tcp"}]}
	give add live $to; reserved 1; port $ip2; taken live.eth0.p2
	give del live $bare 'prevResult=$result'; warned 'is not known' 0; clean
	plan p2 ADD fail-effect, p2 DEL fail; fails give add failed $to; entry failed rolling-back; plan
	give del failed $bare prevResult=null; clean
	shell '! { iptables-save; ip6tables-save; } | grep 18090'`, acts{"default-dir": func(s *story, _ []string) {
		s.stateDir = filepath.Join(s.vars["lib"], "cni", "unwind")
		s.store = &journal.Store{Dir: s.stateDir}
	}})
}

// TestStrippedDELOfNothing: a DEL without chain and stateDir of an attachment that the journal in
// the default stateDir does not know starts nothing, passes and warns: a retry would know no more.
// An entry in another stateDir stays live, for a DEL that names it or a sweep.
func TestStrippedDELOfNothing(t *testing.T) {
	stories(t, bare+`
	either 0.3.1: versions 0.3.1 0.3.1
	or 1.0.0: versions 1.0.0 1.0.0
	chain bridge; give add a
	give del a $bare 'prevResult=$result'; warned 'level=WARN msg="DEL ran no plugin'
	entry a live; reserved 1; shell 'test -z "$(ls $lib/cni/unwind/locks)"'
	give del a`)
}

// TestNoChainIsStillAnError: a DEL of an unknown attachment fails if another key is wrong, or the
// journal cannot be read: a retry may know more then. An ADD is refused.
func TestNoChainIsStillAnError(t *testing.T) {
	stories(t, `
	let was prevResult={"cniVersion":"1.0.0","ips":[{"address":"10.9.8.7/24"}]}; chain p0
	fails give del a $was chain= chainFile=5 code=7
	fails give del a $was chain= stateDir=/proc/none code=7
	fails give add a chain= code=7`)
}

// TestDELThatRunsNothing: a DEL that succeeds although no delegate runs says why, in one line at the
// default log level and in the history.
func TestDELThatRunsNothing(t *testing.T) {
	stories(t, `
	conf logLevel info; chain p0, "address": "$ip7/24"
	either forgotten: plan p0 DEL fail; give add a; drop a; sweep; giveup a; let edit 'prevResult=$result'
		let why forgotten by an operator
	or no binary: let edit CNI_PATH=$dir/bin
		let why no plugin of the chain is in CNI_PATH, and the runtime has no ADD result
	forgets; give del a '$edit'; calls
	said 'level=INFO msg="DEL ran no plugin" attachment=$network/a/eth0' '$why'; leaves`, acts{"said": func(s *story, w []string) {
		log, events := s.said.stderr, s.node.events()
		s.want(strings.Count(log, "\n") == 1 && strings.Contains(log, w[0]) && strings.Contains(log, w[1]), "log: %s", log)
		last := events[len(events)-1]
		s.want(strings.HasPrefix(last, "no-op a ") && strings.Contains(last, w[1]), "history: %q", events)
	}})
}

// environment is a statement: env NAME=VALUE …: the runtime's environment from now on. $path is what it
// was.
var environment = acts{"env": func(s *story, w []string) {
	s.vars["path"] = os.Getenv("PATH")
	s.env = append(s.env, w...)
}}

// TestSweepHasTheADDsPATH: the PATH of a sweep has no iptables, or only what portmap cannot use and then
// passes without effect. portmap's and firewall's DELs remove the rules, since they get the ADD's PATH.
func TestSweepHasTheADDsPATH(t *testing.T) {
	sandbox.Concurrent(t)
	stories(t, `
	shell 'mkdir $dir/none $dir/six; ln -s $(command -v ip6tables) $dir/six'
	chain masquerading bridge IPv4 | portmap | firewall; add a; remember a; drop a
	each of none six
	env PATH=$dir/$of; ruleless; env PATH=$path; until 0 status; vanished a`, environment, acts{
		"ruleless": func(s *story, _ []string) { // by STATUS
			eventually(s, "the rules are gone", func() bool {
				s.passes([]string{"status"})
				return len(s.node.rules("--to-destination "+s.value("$a")+":80", "-d "+s.value("$a")+"/32")) == 0
			})
		},
	})
}

// TestSearchPaths: a sweep's DEL gets the search paths of the ADD, if the directories that existed then
// are there and the ADD was in this boot. The runtime's DEL gets the runtime's.
func TestSearchPaths(t *testing.T) {
	stories(t, `
	shell 'mkdir $dir/one $dir/two $dir/three'
	script p1 'echo $CNI_COMMAND $PATH,$LD_LIBRARY_PATH,$XTABLES_LIBDIR >> $dir/paths; [ $CNI_COMMAND != ADD ] || echo "{\"cniVersion\": \"1.0.0\"}"'
	chain {"type": "p1"}; let now DEL $dir/three,$dir/three,
	env PATH=$dir/one:.:$dir/never:$dir/two LD_LIBRARY_PATH= XTABLES_LIBDIR=$dir/two; add a
	env PATH=$dir/three LD_LIBRARY_PATH=$dir/three XTABLES_LIBDIR=
	either a sweep: drop a; status; saw DEL $dir/one:$dir/two,,$dir/two
	or the runtime: drop a; del a; saw $now
	or a directory is gone: drop a; lose $dir/two; status; saw $now
	or another boot: reboot a; status; saw $now`, environment, acts{
		"saw": func(s *story, w []string) {
			lines := strings.Split(strings.TrimSpace(read(s, filepath.Join(s.dir, "paths"))), "\n")
			s.want(len(lines) == 2 && lines[1] == strings.Join(w, " "), "%q", lines)
		},
	})
}

// TestVersions runs every outer version with every inner one: the runtime gets its own, delegates
// get theirs, and the DEL passes. The last delegate logs what it gets.
func TestVersions(t *testing.T) {
	const all = "0.3.0 0.3.1 0.4.0 1.0.0 1.1.0" // since results have interfaces
	stories(t, `
	each outer `+all+`
	each inner `+all+`
	versions $outer $inner; chain bridge | {"type": "tuning"} | p0
	add a; del a; got $outer; given $inner`, acts{
		"got": func(s *story, w []string) {
			r := s.added["a"]
			result := s.who("a").result(r)
			s.want(r.Version() == w[0] && len(result.IPs) == 1 && len(result.Interfaces) == 3, "%s: %v", r.Version(), result)
		},
		"given": func(s *story, w []string) {
			s.want(len(s.callLog()) == 2, "%v", s.node.calls())
			for _, l := range s.callLog() {
				var prev struct{ CNIVersion string }
				raw, there := l.Stdin["prevResult"]
				s.want(string(l.Stdin["cniVersion"]) == fmt.Sprintf("%q", w[0]) && there == (l.Command == "ADD" || w[0] >= "0.4.0") &&
					(!there || json.Unmarshal(raw, &prev) == nil && prev.CNIVersion == w[0]), "%s: %s, prevResult %s", l.Command, l.Stdin["cniVersion"], raw)
			}
		},
	})
}

// script makes a plugin that is a shell script.
func (n *node) script(plugin, body string) {
	n.Helper()
	file := filepath.Join(n.path[0], plugin)
	syscall.ForkLock.RLock() // a child of another test would keep the file open, which is then "text file busy"
	defer syscall.ForkLock.RUnlock()
	must(n, os.WriteFile(file, []byte("#!/bin/sh\n"+body+"\n"), 0o700))
}
