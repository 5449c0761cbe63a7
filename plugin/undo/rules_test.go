package undo

import (
	"net/netip"
	"testing"
)

// TestMasqueradedBy: a rule counts as bridge's only if it is exactly as bridge makes it.
func TestMasqueradedBy(t *testing.T) {
	t.Parallel()
	const ours = `-m comment --comment "name: \"net\" id: \"id\"" -j CNI-x`
	for _, c := range []struct {
		rule string
		want string
	}{
		{"-A POSTROUTING -s 10.1.2.3/32 " + ours, "10.1.2.3/32"},
		{"-A POSTROUTING -s fd00::3/128 " + ours + "\n", "fd00::3/128"},
		{"-A POSTROUTING -s 10.1.2.0/24 " + ours, ""},
		{"-A POSTROUTING -s 10.1.2.3 " + ours, ""},
		{"-A POSTROUTING ! -s 10.1.2.3/32 " + ours, ""},
		{"-A POSTROUTING -s 10.1.2.3/32 -d 10.1.2.4/32 " + ours, ""},
		{"-A OTHER -s 10.1.2.3/32 " + ours, ""},
		{"-A POSTROUTING -s 10.1.2.3/32 " + ours + "y", ""},
		{`-A POSTROUTING -s 10.1.2.3/32 -m comment --comment "name: \"net\" id: \"other\"" -j CNI-x`, ""},
		{"", ""},
	} {
		got := masqueradedBy([]string{c.rule}, "CNI-x", "net", "id")
		if len(got) > 1 || (len(got) == 1) != (c.want != "") || len(got) == 1 && got[0].String() != c.want {
			t.Errorf("%s: %v, want %q", c.rule, got, c.want)
		}
	}
}

// TestAnyOf: a longer number is a different address.
func TestAnyOf(t *testing.T) {
	t.Parallel()
	for line, want := range map[string]bool{
		"-s 10.1.2.3/32 -j": true, "to 10.1.2.3:80": true, "10.1.2.3": true,
		"110.1.2.3 10.1.2.3": true, "10.1.2.30 10.1.2.3": true,
		"-s fd00::1/128": true, "fd00::10": false, "10a1.2.3": false,
		"110.1.2.3": false, "10.1.2.30": false, "": false, "10.1.2.": false,
	} {
		if anyOf([]netip.Addr{netip.MustParseAddr("fd00::1"), netip.MustParseAddr("10.1.2.3")}).MatchString(line) != want {
			t.Errorf("%q: %t", line, !want)
		}
	}
}
