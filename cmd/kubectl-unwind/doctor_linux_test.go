package main

import (
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/testdata/nodetest"
)

// TestDoctorOnTerminal: the table fits 80 columns, whatever the names of nodes and versions are, and
// begins with the nodes' whole names.
func TestDoctorOnTerminal(t *testing.T) {
	t.Setenv("NO_COLOR", "1")
	for _, node := range []string{"worker-2", "gke-production-default-pool-1b2c3d4e-abcd"} {
		d := &diagnosis{Plugin: "v1.2.3-14-gabcdef0123-dirty"}
		d.Checks = append(d.Checks, struct{ What, Severity, Text, Remedy string }{"pools", "warning", strings.Repeat("podnet is full ", 9), ""})
		screen, out := nodetest.NewTerminal(t, 80)
		nodetest.Check(t, doctorView().print(out, []answer{{Node: node, report: d}, {Node: "lost", Error: strings.Repeat("why ", 30)}}, &term.Output{Format: term.Plain}))
		for end := time.Now().Add(patience); strings.Count(screen.String(), "\n") < 4 && time.Now().Before(end); {
			time.Sleep(10 * time.Millisecond)
		}
		for line := range strings.Lines(screen.String()) {
			if n := utf8.RuneCountInString(strings.TrimSpace(line)); n > 80 {
				t.Errorf("%d characters on 80 columns: %s", n, line)
			}
		}
		if !strings.Contains(screen.String(), node+"  warning") || strings.Contains(screen.String(), "gabcdef") {
			t.Errorf("\n%s", screen)
		}
	}
}
