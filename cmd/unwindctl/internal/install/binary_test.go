package install

import (
	"strings"
	"testing"
)

// TestKeepsInstalled: versions as make builds them are compared, and others not at all: the agent of
// version b keeps a plugin of version a that is newer, or of which it cannot tell.
func TestKeepsInstalled(t *testing.T) {
	t.Parallel()
	const untagged = "v0.0.0-20261123003115-93d26977894e"
	for _, c := range []struct {
		a, b  string
		order int
		known bool
	}{
		{"v1.2.3", "v1.2.3", 0, true},
		{"v1.10.0", "v1.9.9", 1, true},
		{"v1.2.3-rc.1", "v1.2.3", -1, true},
		{"v1.2.3-rc.2", "v1.2.3-rc.10", -1, true},
		{"v1.2.3-rc.2", "v1.2.2", 1, true},
		{untagged, untagged, 0, true},
		{untagged, "v0.0.0-20261123003116-03d26977894e", -1, true},
		{untagged + "-dirty", untagged, 1, true},
		{untagged + "-dirty", "v0.0.0-20261123003116-03d26977894e", -1, true},
		{untagged, "v0.0.1", -1, true},
		{"v1.2.4-0.20261123003115-93d26977894e", "v1.2.3", 1, true},
		{"v1.2.4-0.20261123003115-93d26977894e", "v1.2.4-rc.1", -1, true},
		{"v1.2.4-0.20261123003115-93d26977894e", "v1.2.4", -1, true},
		{"v1.2.4-rc.1.0.20261123003115-93d26977894e", "v1.2.4-rc.1", 1, true},
		{"v1.2.4-rc.1.0.20261123003115-93d26977894e", "v1.2.4-rc.2", -1, true},
		{"dev", "v1.2.3", 0, false},
		{"v1.2.3", "dev", 0, false},
		{"dev", "dev", 0, false},
		{"1.2.3", "v2.0.0", 0, false},
		{"4355857", "4355858", 0, false},
		{"", "v1.2.4", 0, false},
	} {
		want := map[bool]string{true: " is newer than this agent "}[c.order > 0]
		if !c.known && c.a != c.b && c.a != "" {
			want = "cannot compare "
		}
		got := Setup{}.KeepsInstalled(c.a, "CNI plugin unwind "+c.b+": under test")
		if !strings.Contains(got, want) || (got == "") != (want == "") {
			t.Errorf("%s, %s: %q, want %q", c.a, c.b, got, want)
		}
	}
}
