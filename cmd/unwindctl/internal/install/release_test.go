package install

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"cni-unwind/cmd/unwindctl/internal/nodetest"
)

// TestCompareReleases: versions as make builds them are compared, and others not at all.
func TestCompareReleases(t *testing.T) {
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
		if order, known := CompareReleases(c.a, c.b); order != c.order || known != c.known {
			t.Errorf("%s, %s: %d, %t", c.a, c.b, order, known)
		}
	}
}

// TestDescribeAgent has the agent that runs be found, asked for its version, and be said to do what
// it does.
func TestDescribeAgent(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte("# TYPE unwind_build_info gauge\nunwind_build_info{goversion=\"go1\",version=\"v1.2.0\"} 1\n"))
	}))
	t.Cleanup(server.Close)
	_, port, _ := strings.Cut(strings.TrimPrefix(server.URL, "http://"), ":")
	for _, c := range []struct{ name, args, version, want string }{
		{"none", "sleep 1", "v1.0.0", ""},
		{"another command", "unwindctl sweep", "v1.0.0", ""},
		{"one that installs nothing", "unwindctl run --no-install", "v1.0.0", ""},
		{"older", "/unwindctl --host run --listen=:" + port, "v1.3.0", "process 12, v1.2.0), which is older: it leaves"},
		{"newer", "unwindctl run --listen 127.0.0.1:" + port, "v1.1.0", "process 12, v1.2.0), which is newer: it puts its own"},
		{"the same", "unwindctl run --listen 127.0.0.1:" + port, "v1.2.0", "process 12, v1.2.0): it keeps"},
		{"of a plugin of no release", "unwindctl run --listen 127.0.0.1:" + port, "dev", "process 12, v1.2.0): it leaves"},
		{"that does not tell", "unwindctl run --listen ", "v1.2.0", "process 12, version not known): it leaves"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			proc := nodetest.Root(t, map[string]string{"11/cmdline": "sh\x00-c\x00unwindctl run\x00",
				"12/cmdline": strings.ReplaceAll(c.args, " ", "\x00") + "\x00"})
			got := describeAgent(t.Context(), proc, "CNI plugin unwind "+c.version+": runs")
			if (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
				t.Error(got)
			}
		})
	}
}
