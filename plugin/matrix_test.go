package plugin

import (
	"fmt"
	"strings"
	"testing"
)

func chainOfFour(n *node) []string {
	return []string{n.faulty("p0", ""), n.faulty("p1", ""), n.faulty("p2", ""), n.faulty("p3", "")}
}

// TestFaultMatrixAdd has each delegate of a chain of four fail its ADD in every way, with every one of the four failing
// its DEL too, or none. Then unwind and the plugins are well again, and one of three things happens: the runtime's DEL,
// an ADD of the same container ID, the pod's next sandbox. Nothing may be left.
func TestFaultMatrixAdd(t *testing.T) {
	t.Parallel()
	modes := []string{"fail", "fail-effect", "hang", "hang-effect", "crash", "crash-effect", "kill-parent",
		"kill-parent-effect", "orphan", "empty", "garbage", "stderr"}
	for _, mode := range modes {
		for at := range 4 {
			for _, delMode := range []string{"ok", "fail-effect"} {
				for _, recovery := range []string{"DEL", "ADD", "next sandbox"} {
					t.Run(fmt.Sprintf("%s at %d, DEL %s, then %s", mode, at, delMode, recovery), func(t *testing.T) {
						t.Parallel()
						addFails(t, mode, at, delMode, recovery)
					})
				}
			}
		}
	}
}

func addFails(t *testing.T, mode string, at int, delMode, recovery string) {
	n := newNode(t)
	if strings.HasPrefix(mode, "hang") || mode == "ignore-term" {
		n.hasty()
	}
	list := n.unwind(chainOfFour(n)...)
	p := n.pod("a")
	n.plan(map[string]map[string]string{
		fmt.Sprintf("p%d", at): {"ADD": mode, "DEL": delMode},
		"*":                    {"DEL": delMode},
	})
	if _, err := p.add(list); err == nil {
		t.Fatal("the ADD succeeded")
	}
	n.plan(nil)
	switch recovery {
	case "DEL":
		p.mustDel(list)
	case "ADD":
		p.mustAdd(list)
		p.mustDel(list)
	case "next sandbox":
		next := n.pod("b")
		next.Args = p.Args
		next.mustAdd(list)
		if e := p.entry(); e != nil {
			t.Errorf("the old sandbox is still in the journal: %s, %v", e.State, pendingSteps(e))
		}
		next.mustDel(list)
		p.mustDel(list) // the runtime's own DEL of the old one comes late
	}
	n.nothingLeft()
}
