//go:build e2e

package e2e_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"cni-unwind/plugin/e2e"
)

// TestE2ELeak: a plugin is broken for a while, so pods cannot start or stop. With unwind, no
// address leaks during that time, and nothing is left once the plugin works again. Without unwind,
// addresses must leak on the same runtime: otherwise the test proves nothing.
func TestE2ELeak(t *testing.T) {
	table := e2e.NewTable(t, fmt.Sprintf("%d sandboxes of a pod on a /28; addresses/netns/veths/rules left", e2e.Tries),
		"RUNTIME", "TROUBLE", "PLAIN DURING", "AFTER", "NEXT POD", "UNWIND DURING", "OWED", "AFTER", "JOURNAL", "NEXT POD", "HEALED IN")
	for _, v := range e2e.Containerds(t) {
		for _, trouble := range e2e.Troubles {
			t.Run(v.Name+"/"+trouble.Name, func(t *testing.T) {
				t.Parallel()
				plain, unwind := e2e.Suffer(t, v, trouble, false, nil), e2e.Suffer(t, v, trouble, true, nil)
				table.Row(v.Name, trouble.Name, plain.During, plain.After, word(plain.Starts), unwind.During, unwind.Owed, unwind.After,
					len(unwind.Records), word(unwind.Starts), unwind.Healed.Round(100*time.Millisecond))
				t.Logf("plain: %+v\nunwind: %+v", plain, unwind)
				if plain.During.Addresses == 0 {
					t.Errorf("without unwind nothing leaks, so the test proves nothing: %+v", plain)
				}
				if !unwind.During.HasNothing() {
					t.Errorf("during the trouble unwind leaves %s", unwind.During)
				}
				if unwind.After != (e2e.Left{}) || len(unwind.Records) > 0 {
					t.Errorf("after the trouble unwind leaves %s, and %+v", unwind.After, unwind.Records)
				}
				if unwind.Starts != nil {
					t.Errorf("with unwind no pod starts after the trouble: %v", unwind.Starts)
				}
			})
		}
	}
}

func word(err error) string {
	switch {
	case err == nil:
		return "starts"
	case strings.Contains(err.Error(), "no IP addresses available"):
		return "no address"
	}
	return "fails"
}
