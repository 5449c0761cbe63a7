package main

import (
	"fmt"
	"regexp"
	"strconv"
	"testing"

	"cni-unwind/journal"
)

// TestWallClock: how old an attachment is does not go by the wall clock. A test cannot set the
// clock, so here it is the times in the journal that are a year off.
func TestWallClock(t *testing.T) {
	t.Parallel()
	for _, years := range []int{-1, 1} {
		t.Run(fmt.Sprintf("%+d years", years), func(t *testing.T) {
			t.Parallel()
			n := newMachine(t)
			n.netns("young", "old", "gone", "there")
			for _, id := range []string{"young", "old", "gone", "there"} {
				n.add(home, id, n.pin(id))
			}
			n.edit("old", func(e *journal.Entry) { e.GracePeriod = 1 })
			n.drop("gone")
			n.shiftYears(years)
			out := n.sweep(home, "--network", network, "--valid-attachments", n.listOf("there"))
			if got := fmt.Sprint(n.ids()); got != "[there young]" || out.code != 0 {
				t.Errorf("the journal has %v, want [there young]; exit code %d\n%s%s", got, out.code, out.stdout, out.stderr)
			}
		})
	}
}

// shiftYears moves the wall times of all entries: of the ADD, of the state, and of the last change.
func (n *machine) shiftYears(years int) {
	n.Helper()
	wall := regexp.MustCompile(`"wall":"\d{4}`)
	for _, id := range n.ids() {
		moved := 0
		err := inFile(n.store, "entries", network+"\x00"+id+"\x00eth0", func(entry []byte) []byte {
			return wall.ReplaceAllFunc(entry, func(b []byte) []byte {
				moved++
				year, _ := strconv.Atoi(string(b[len(b)-4:]))
				return fmt.Appendf(nil, `"wall":"%d`, year+years)
			})
		})
		if err != nil || moved != 3 {
			n.Fatalf("%d times moved (%v)", moved, err)
		}
	}
}
