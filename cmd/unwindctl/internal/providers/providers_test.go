package providers

import (
	"reflect"
	"regexp"
	"testing"
)

// TestRows: each plugin has one row, a provider's name, a source with a version, and a fact.
func TestRows(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, p := range table {
		facts := p
		facts.Plugin, facts.Name, facts.Source = "", "", ""
		if p.Plugin == "" || p.Name == "" || seen[p.Plugin] || reflect.ValueOf(facts).IsZero() ||
			!regexp.MustCompile(`^[\w-]+/[\w-]+ .*\d`).MatchString(p.Source) {
			t.Errorf("%+v", p)
		}
		seen[p.Plugin] = true
		if Of(p.Plugin) != p {
			t.Errorf("%s: %+v", p.Plugin, Of(p.Plugin))
		}
	}
	if got := Of("own"); got != (Provider{Plugin: "own"}) {
		t.Errorf("unknown: %+v", got)
	}
}
