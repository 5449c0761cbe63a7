package plugin

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"cni-unwind/journal"
)

// TestJournalFailsInTheMiddle: a journal that fails in the middle of an ADD knows a part of its
// chain. The DEL takes the rest from the runtime. Before this, the DEL succeeded and the later
// delegates never got theirs.
func TestJournalFailsInTheMiddle(t *testing.T) {
	t.Parallel()
	n := newNode(t).hasty()
	list := n.unwind(n.faulty("p0", ""), n.faulty("p1", `, "delayMS": 1000, "address": "192.0.2.7/32"`), n.faulty("p2", ""))
	n.plan(map[string]map[string]string{"p1": {"ADD": "late"}})
	p := n.pod("a")
	done := make(chan error)
	go func() {
		_, err := p.add(list)
		done <- err
	}()
	eventually(t, "p1 runs", func() bool { return slices.Contains(n.calls(), "ADD p1") })
	if err := os.Chmod(n.stateDir, 0o777); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(n.stateDir, 0o700); err != nil {
		t.Fatal(err)
	}
	if e := p.entry(); e == nil || e.State != journal.Live || len(e.Newest().Claims) > 0 {
		t.Fatalf("the journal has %+v", e)
	}
	p.mustDel(list)
	n.nothingLeft()
}

// TestBridgeFailsAtItsRules: bridge removes the interface and then fails at its rules. The next DEL
// finds no interface in an existing namespace, and would pass without a look at the rules.
func TestBridgeFailsAtItsRules(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	list := n.unwind(n.bridgePlugin(`, "ipMasq": true`))
	p := n.pod("a")
	p.mustAdd(list)

	fail, bin := filepath.Join(n.dir, "fail"), filepath.Join(n.dir, "path")
	n.mkdir(bin)
	n.mkdir(fail)
	real, err := filepath.EvalSymlinks("/usr/sbin/iptables")
	if err != nil {
		t.Fatal(err)
	}
	script := fmt.Sprintf("#!/bin/bash\nfor a; do if [ \"$a\" = -D ] && [ -e %s ]; then exit 4; fi; done\n"+
		"exec -a iptables %s \"$@\"\n", fail, real)
	if err := os.WriteFile(filepath.Join(bin, "iptables"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	n.env = append(n.env, "PATH="+bin+":"+os.Getenv("PATH"))
	if err := p.del(list); err == nil {
		t.Fatal("the DEL passed although iptables failed")
	}
	if err := os.Remove(fail); err != nil {
		t.Fatal(err)
	}
	p.mustDel(list)
	n.nothingLeft()
}

// TestNeverRan: a delegate that never ran has no pending DEL: a binary that is missing or cannot be
// executed.
func TestNeverRan(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		file func(path string) error
	}{
		{"not executable", func(path string) error { return os.WriteFile(path, []byte("#!/bin/sh\n"), 0o644) }},
		{"of another format", func(path string) error { return os.WriteFile(path, []byte{1, 2, 3, 4}, 0o755) }},
		{"missing", func(string) error { return nil }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t).hasty()
			if err := tt.file(filepath.Join(n.dir, "bin", "broken")); err != nil {
				t.Fatal(err)
			}
			list := n.unwind(n.faulty("p0", ""), `{"type": "broken"}`)
			p := n.pod("a")
			if _, err := p.add(list); err == nil {
				t.Fatal("the ADD passed")
			}
			n.nothingLeft()
			p.mustDel(list)
			n.nothingLeft()
		})
	}
}
