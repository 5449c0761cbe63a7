package install

import (
	"reflect"
	"regexp"
	"testing"
)

// TestProviders: each plugin has one row, a provider's name, a source with a version, and a fact.
func TestProviders(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, p := range providers {
		facts := p
		facts.Plugin, facts.Name, facts.Source = "", "", ""
		if p.Plugin == "" || p.Name == "" || seen[p.Plugin] || reflect.ValueOf(facts).IsZero() ||
			!regexp.MustCompile(`^[\w-]+/[\w-]+ .*\d`).MatchString(p.Source) {
			t.Errorf("%+v", p)
		}
		seen[p.Plugin] = true
		if providerOf(p.Plugin) != p {
			t.Errorf("%s: %+v", p.Plugin, providerOf(p.Plugin))
		}
	}
	if got := providerOf("own"); got != (provider{Plugin: "own"}) {
		t.Errorf("unknown: %+v", got)
	}
}
