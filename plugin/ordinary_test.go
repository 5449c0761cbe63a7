package plugin

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"cni-unwind/journal"
	"cni-unwind/plugin/sweep"
)

// In the tests of this file an operator, or the machine, does something ordinary. The plain chain's answer
// is the measure: where its DEL passes, unwind's passes too, and what unwind still has to do has an end.

// tired makes the next failure of each pending DEL of a pod the last one before it is dropped: 300 that came
// after their pause, at each of which the chain lacked the plugin.
var tired = acts{
	"tired": each(func(p *pod) {
		p.edit(func(e *journal.Entry) {
			for i := range e.Undo.Steps {
				s := &e.Undo.Steps[i]
				s.Failures, s.Absent, s.Next = 299, min(s.Absent, 1)*299, journal.Next{}
			}
		})
	}),
	// ended PLUGIN PODS: the DELs of the plugin were dropped, as the history says
	"ended": func(s *story, w []string) {
		var got []string
		for _, e := range s.node.recorded() {
			if e.Kind == journal.Dropped && slices.Equal(e.Plugins, w[:1]) {
				got = append(got, e.ContainerID)
			}
		}
		slices.Sort(got)
		s.want(slices.Equal(got, w[1:]), "%q", got)
	},
	// leak: the rules that the plain chain leaves too go at the end
	"leak": func(s *story, _ []string) {
		s.Cleanup(func() {
			chains := map[string]bool{}
			for _, rule := range s.rules(fmt.Sprintf(`name: \"%s\"`, s.network)) {
				run(s, "sh", "-c", "iptables -w -t nat "+strings.Replace(rule, "-A", "-D", 1))
				chains[rule[strings.LastIndex(rule, " ")+1:]] = true
			}
			for chain := range chains {
				if strings.HasPrefix(chain, "CNI-") {
					run(s, "sh", "-c", "iptables -w -t nat -F "+chain+"; iptables -w -t nat -X "+chain)
				}
			}
		})
	},
}

// TestOneIDOnePath: a container is added again under its ID and at its path, after a DEL that failed once, and that ADD
// is killed. The runtime's DEL has the first ADD's result. It undoes both, and leaves nothing.
func TestOneIDOnePath(t *testing.T) {
	stories(t, `
	chain bridge, "ipMasq": true | p1; add a
	either bridge's DEL fails: lose $dir/bin/bridge; fails del a; shell 'ln -s $cni/bridge $dir/bin/bridge'
	or the last plugin's: plan p1 DEL fail; fails del a; plan
	drop a; move a a; kill added 1 add a; was-killed
	del a; gone a; reserved 0; taken`)
}

// TestMeshUninstalled: a chained plugin leaves the conflist, and its binary or its daemon goes. The DELs of
// older pods pass, as without unwind. The plugin's own DELs stay pending for sweeps, and end.
func TestMeshUninstalled(t *testing.T) {
	stories(t, `
	script mesh 'exec $cni/../test/faulty'
	let mesh {"type": "mesh", "dir": "$dir/faulty", "instance": "mesh"}
	either the list is in chain: let in chain
	or the list is in chainFile: let in chainfile
	$in bridge | $mesh; add a; add b; add c; add d
	either its binary is deleted: lose $dir/bin/mesh
	or its daemon is gone: plan mesh DEL fail
	or it crashes: plan mesh DEL crash
	fails del a mesh; entry a deleting 2
	$in bridge
	either containerd deletes, then the namespace goes: del a; entry a deleting 1; drop a; names a; del a
		del b; drop b; names b; del b
	or the namespaces go first: drop a; names a; del a; drop b; names b; del b
	entry a deleting 1; entry b deleting 1; reserved 2
	logged 'stays pending, but the runtime gets no error'
	either it comes back: script mesh 'exec $cni/../test/faulty'; plan; until 2 sweep
	or it stays away: status; tries gc; entries 4; tired a b; tries gc; entries 2; ended mesh a b
		lose $dir/faulty/taken/a.eth0.mesh; lose $dir/faulty/taken/b.eth0.mesh
	plan; $in bridge | $mesh; script mesh 'exec $cni/../test/faulty'; del c; del d`, tired, chainFiles)
}

// TestPluginChanged: a chained plugin's configuration changes, and the plugin refuses, with any error, the one
// that the ADD had: a kubeconfig's path, an expired token, a key that a new version needs. The present one
// counts, from any sweep that knows the chain.
func TestPluginChanged(t *testing.T) {
	stories(t, `
	each code 1 4 7 11 100 999
	chain bridge | p1, "modes": {"DEL": "fail"}, "code": $code; add a
	chain bridge | p1, "code": $code
	either DEL: del a; logged 'DEL succeeded with the chain'
	or STATUS: drop a; until 0 status
	or it left the chain, its binary is there: chain bridge; del a; entry a deleting 1; chain bridge | p1; until 0 gc
	clean`)
}

// TestCheckAfterChanges: CHECK of an older pod does not fail for a plugin that has left the chain, nor for a
// configuration that its plugin refuses by now. Nomad, for one, removes the network of a container whose
// CHECK fails.
func TestCheckAfterChanges(t *testing.T) {
	stories(t, `
	chain bridge | p1, "modes": {"CHECK": "fail"}; add a
	fails check a
	either it left the chain: chain bridge
	or its configuration changed: chain bridge | p1
	or the version, too: versions 1.0.0 0.4.0; chain bridge | p1
	check a; chain bridge | p1; del a`)
}

// TestVersionCorrected: portmap refuses the version of the chain, which is corrected while a pod has a host
// port. Its rules are those of the recorded configuration, so that is what it gets, in the present version.
func TestVersionCorrected(t *testing.T) {
	stories(t, `
	script portmap 'conf=$(cat); if [ -e $dir/old ] && ! echo "$conf" | grep -q "\"cniVersion\":\"0.4.0\""; then
		echo "{\"code\": 1, \"msg\": \"incompatible CNI versions\"}"; exit 1; fi; printf "%s" "$conf" | exec $cni/portmap'
	chain bridge | portmap; add a; file $dir/old
	fails del a portmap; port $a
	versions 1.0.0 0.4.0
	either DEL: del a
	or sweep: drop a; until 0 status`)
}

// TestHostPortRenewed: portmap rejects its recorded configuration, and succeeds with the present one.
func TestHostPortRenewed(t *testing.T) {
	stories(t, `
	script portmap 'conf=$(cat); if [ -e $dir/down ] && ! echo "$conf" | grep -q markMasqBit; then
		echo "{\"code\": 999, \"msg\": \"down\"}"; exit 1; fi; printf "%s" "$conf" | exec $cni/portmap'
	chain bridge | portmap; add a; file $dir/down
	let port $a; fails del a portmap; chain bridge | portmap, "markMasqBit": 14; del a; gone a; reserved 0`)
}

// TestIPAMReplaced: the IPAM plugin is replaced, and its binary goes. The DEL passes with the present one, and
// unwind removes host-local's file itself.
func TestIPAMReplaced(t *testing.T) {
	stories(t, `
	chain bridge; add a; add b
	script host-local 'exit 1'; chain static
	del a; reserved 1; drop b; until 0 sweep-of-chain; reserved 0`, acts{"sweep-of-chain": func(s *story, _ []string) {
		verbs["status"](s, nil)
	}})
}

// TestRestartedWhileOff: nerdctl restarts a container while unwind is off, with DELs without a path. Its last
// DEL goes through unwind. In a scratch namespace bridge would remove a chain that the leaked rule of the
// first start still names.
func TestRestartedWhileOff(t *testing.T) {
	stories(t, `
	leak; chain bridge, "ipMasq": true
	past add a; drop a; names a; past del a
	move a second; past add a; drop a; names a
	del a; entries 0; reserved 0; leaves`, tired)
}

// TestScratchTwice: a DEL that fails in a scratch namespace runs there once more. If it then fails in other
// words, it does not run without one.
func TestScratchTwice(t *testing.T) {
	stories(t, `
	chain bridge; add a; drop a; names a
	either the same words: script bridge 'echo x >>$dir/runs; [ -z "$CNI_NETNS" ] && exec $cni/bridge; echo "{\"code\": 5, \"msg\": \"busy\"}"; exit 1'
		del a; shell 'test $(wc -l <$dir/runs) = 3'
	or other words: script bridge 'echo x >>$dir/runs; [ -z "$CNI_NETNS" ] && exec $cni/bridge; echo "{\"code\": 5, \"msg\": \"busy $$\"}"; exit 1'
		fails del a; shell 'test $(wc -l <$dir/runs) = 2'
	or it works again: script bridge 'echo x >>$dir/runs; [ $(wc -l <$dir/runs) = 2 ] && exec $cni/bridge; echo "{\"code\": 5, \"msg\": \"busy\"}"; exit 1'
		del a; shell 'test $(wc -l <$dir/runs) = 2'
	or without one it fails too: script bridge 'echo x >>$dir/runs; echo "{\"code\": 5, \"msg\": \"busy\"}"; exit 1'
		fails del a 'bridge (code 5)'; shell 'test $(wc -l <$dir/runs) = 3'; fails del a; shell 'test $(wc -l <$dir/runs) = 5'
	lose $dir/bin/bridge; until 0 sweep`)
}

// TestNeverRanAPlugin: the DELs of an ADD that was cut off before its first delegate fail. They end like
// those of any other, unless an address may depend on them.
func TestNeverRanAPlugin(t *testing.T) {
	stories(t, `
	either after the address: chain bridge | p1; plan p1 DEL fail
	or before the address: chain p1 | bridge; plan p1 DEL fail
	or with a port: chain bridge | portmap
	add a; cutoff a; drop a; lose $dir/faulty/taken
	if with a port: breaks portmap
	sweep; sweep; entry a rolling-back; tired a; tries gc
	if after the address: entries 0; reserved 0; ended faulty a
	unless after the address: entries 1
	if with a port: works portmap; gc; entries 0
	if before the address: chain bridge; tired a; tries gc; entries 1; tired a; tries gc; entries 0; ended faulty a`, tired)
}

// TestEarlierBoot: an attachment of an earlier boot gets no DEL unless the machine is proven to be the same.
// Its host-local files go, for all of its records alike, and nothing answers the runtime's own DEL.
func TestEarlierBoot(t *testing.T) {
	boot := func(machine string) func(p *pod) {
		return func(p *pod) {
			all := p.records()
			must(p, p.store.Update(context.Background(), func(tx *journal.Tx) error {
				for _, e := range slices.Backward(all) { // the older one first
					must(p, tx.Delete(e))
					e.Added.Host.BootID, e.Added.Host.Machine = earlier, machine
					e.Number = 0
					for _, e.Undo.State = range []journal.State{journal.Adding, e.Undo.State} {
						must(p, tx.Put(e))
					}
				}
				return nil
			}))
		}
	}
	stories(t, `
	chain pooled | p1; let dels DEL p1, DEL p0
	either one record: add a; drop a; let records 1
	or two records: plan p1 DEL fail; add a; drop a; again a a; add a; drop a; entry a live 3 2; plan; let records 2
	forgets
	either the machine has no ID: nameless a
	or its ID changed: another a
	either sweep: sweep
	or GC: gc
	or STATUS: status
	entries 0; reserved 0; calls
	del a; calls $dels; leaves`, acts{
		"nameless": each(boot("")),
		"another":  each(boot("machine-id:another")),
	})
}

// TestObservingInAnotherNetwork: a network with disableGC and without sweepOnStatus is not swept by the verbs
// of another network, but by a person.
func TestObservingInAnotherNetwork(t *testing.T) {
	stories(t, `
	chain p0; conf disableGC true; conf sweepOnStatus false; add a; drop a
	conf disableGC; conf sweepOnStatus; network other; add b; drop b
	status; until 1 status; gc; entry a
	person; network; status; entries 0`, acts{"person": func(s *story, _ []string) {
		w := s.worker()
		w.Invoked = false
		s.want(!w.Spares(s.entries()[0]), "it is spared")
	}})
}

// TestStatusOfOldChain: before CNI 1.1.0, no runtime asks a chain for its STATUS. So a missing plugin leaves the
// node ready: only new pods fail, as without unwind.
func TestStatusOfOldChain(t *testing.T) {
	stories(t, `
	versions 1.1.0 1.0.0; chain p0 | {"type": "gone"}
	status; warned 'plugins are missing; new pods fail" missing=gone'
	versions 1.1.0 1.1.0; fails status code=50`)
}

// TestGuardAfterOff: unwind was off while many pods were deleted. What holds nothing is released without a
// guard. What the guard kept once does not keep what dies later, nor owners, nor GC.
func TestGuardAfterOff(t *testing.T) {
	stories(t, `
	chain bridge; crowd 20; crowd 12 gone
	either deleted while off: past del $gone; drop $gone; gc; entries 20
	or gone without a DEL: drop $gone; fails gc 'seem dead'; entries 32; gc list $all $gone; entries 32; past add x; let kept 1
		drop all00 all01; tries gc; entries 30; tries status; entries 30
		forced; entries 18; del all00 all01; past del x
	del $all`, acts{"forced": func(s *story, _ []string) {
		_, err := s.plugin().Sweep(s.Context(), s.stateDir, sweep.Job{Force: true})
		s.must(err)
	}})
}
