package plugin

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// TestJournalFailsInTheMiddle: a journal that fails in the middle of an ADD knows a part of its
// chain. The DEL takes the rest from the runtime. Before this, the DEL succeeded and the later
// delegates never got theirs.
func TestJournalFailsInTheMiddle(t *testing.T) {
	stories(t, `
	hasty; chain p0 | p1, "delayMS": 1000, "address": "$ip7/32" | p2
	plan p1 ADD late; start add a; awaits ADD p1
	mode 777; wait add a; mode 700
	entry a live; unclaimed a
	del a`, acts{
		"mode": func(s *story, w []string) { run(s, "chmod", w[0], s.stateDir) },
		"unclaimed": func(s *story, w []string) {
			claims := s.who(w[0]).entry().Newest().Claims
			s.want(len(claims) == 0, "%v", claims)
		},
	})
}

// TestNeverRan: a delegate that never ran has no pending DEL: a binary that is missing or cannot be
// executed.
func TestNeverRan(t *testing.T) {
	stories(t, `
	hasty; chain p0 | {"type": "broken"}
	either not executable: file 0644 '#!/bin/sh'
	or of another format: file 0755 '1234'
	or missing:
	fails add a; left
	del a`, acts{"file": func(s *story, w []string) {
		s.write(filepath.Join(s.path[0], "broken"), w[1])
		run(s, "chmod", w[0], filepath.Join(s.path[0], "broken"))
	}})
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
