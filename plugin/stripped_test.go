package plugin

import (
	"path/filepath"
	"strings"
	"testing"

	"cni-unwind/journal"
)

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
	either a tombstone: give add a; drop a; sweep; let edit 'prevResult=$result'
		let why its network namespace is gone
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
