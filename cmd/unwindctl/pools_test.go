package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestPoolsAsHostLocal fills pools by host-local itself until it has no address left. After each ADD,
// the fewest free addresses that ipam shows of a set are as many as further ADDs succeed; the pool is
// full, for ipam, doctor and the metrics, from the ADD on after which the next one fails.
func TestPoolsAsHostLocal(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, ipam string
		adds       int
		sizes      []string // of the sets
		full       int      // the number of the set that is full then
	}{
		{"a /30", `"subnet": "10.1.0.0/30"`, 1, []string{"1"}, 0},
		{"a /126", `"subnet": "fd00::/126"`, 2, []string{"2"}, 0},
		{"from and to", `"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.250", "rangeEnd": "10.1.0.253"`, 4, []string{"4"}, 0},
		{"a set of three", `"ranges": [[{"subnet": "10.1.0.0/30"}, {"subnet": "10.2.0.0/29", "rangeEnd": "10.2.0.3"},
			{"subnet": "10.3.0.0/30", "gateway": "10.3.0.2"}]]`, 4, []string{"4"}, 0},
		{"IPv4 and a /64", `"ranges": [[{"subnet": "10.1.0.0/29"}], [{"subnet": "fd00::/64"}]]`, 5, []string{"5", "null"}, 0},
		{"a /72 and IPv4", `"ranges": [[{"subnet": "fd00::/72"}], [{"subnet": "10.1.0.0/29"}]]`, 5, []string{"null", "5"}, 1},
		{"IPv6 smaller", `"ranges": [[{"subnet": "10.1.0.0/24"}], [{"subnet": "fd00::/126"}]]`, 2, []string{"253", "2"}, 1},
		{"two of IPv4", `"ranges": [[{"subnet": "10.1.0.0/28"}], [{"subnet": "10.2.0.0/30"}]]`, 1, []string{"13", "1"}, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n := newMachine(t)
			p := n.pool(tt.ipam)
			for added := 0; ; added++ {
				seen := p.look()
				if diff := cmp.Diff(tt.sizes, seen.sizes); diff != "" {
					t.Fatalf("sizes, -want +got:\n%s", diff)
				}
				if full := added == tt.adds; seen.full != full || seen.free != tt.adds-added {
					t.Fatalf("after %d of %d ADDs: %+v", added, tt.adds, seen)
				}
				if want := len(tt.sizes) * added; seen.used != want {
					t.Errorf("after %d ADDs: %d used, want %d", added, seen.used, want)
				}
				out := p.add(fmt.Sprint(added))
				if (out.code != 0) != (added == tt.adds) {
					t.Fatalf("host-local, ADD %d of %d: %+v", added+1, tt.adds, out)
				}
				if out.code != 0 {
					if want := fmt.Sprintf("failed to allocate for range %d: no IP addresses available", tt.full); !strings.Contains(out.stdout, want) {
						t.Errorf("host-local: %s, want %q", out.stdout, want)
					}
					break
				}
			}
			p.wantFull(tt.full, len(tt.sizes))
		})
	}
}

// hostLocalPool is a network of unwind's whose addresses host-local gives out.
type hostLocalPool struct {
	*machine
	confDir, config string
}

func (n *machine) pool(ipam string) *hostLocalPool {
	n.Helper()
	p := &hostLocalPool{machine: n, confDir: filepath.Join(n.dir, "net.d")}
	chain := fmt.Sprintf(`{"type": "bridge", "ipam": {"type": "host-local", "dataDir": %q, %s}}`, filepath.Join(n.dir, "ipam"), ipam)
	p.config = fmt.Sprintf(`{"cniVersion": "1.0.0", "name": %q, %s`, network, chain[1:])
	if err := os.Mkdir(p.confDir, 0o755); err != nil {
		n.Fatal(err)
	}
	list := fmt.Sprintf(`{"cniVersion": "1.0.0", "name": %q, "plugins": [{"type": "unwind", "stateDir": %q, "chain": {"plugins": [%s]}}]}`,
		network, n.state, chain)
	if err := os.WriteFile(filepath.Join(p.confDir, "10-podnet.conflist"), []byte(list), 0o600); err != nil {
		n.Fatal(err)
	}
	return p
}

// add has host-local give out addresses.
func (p *hostLocalPool) add(id string) outcome {
	p.Helper()
	cmd := home.command(p.machine, filepath.Join(p.tools, "cni", "host-local"))
	cmd.Env = append(os.Environ(), "CNI_COMMAND=ADD", "CNI_CONTAINERID="+id, "CNI_IFNAME=eth0", "CNI_NETNS=/run/netns/none",
		"CNI_NETNS_OVERRIDE=1", "CNI_PATH="+filepath.Join(p.tools, "cni"))
	cmd.Stdin = strings.NewReader(p.config)
	return p.run(cmd)
}

// shownPool is what ipam --json says of a pool.
type shownPool struct {
	full  bool
	used  int
	free  int // the fewest of a set that has a number
	sizes []string
}

func (p *hostLocalPool) look() (seen shownPool) {
	p.Helper()
	text := p.must(p.ctl(p.confDir, "ipam", "--json"))
	for _, number := range regexp.MustCompile(`: (\d+)`).FindAllStringSubmatch(text, -1) {
		if n, err := strconv.ParseInt(number[1], 10, 64); err != nil || n >= 1<<53 {
			p.Errorf("%s is not exact in every reader of JSON", number[1])
		}
	}
	var object struct {
		Pools []struct {
			Full bool
			Used int
			Sets []struct {
				Size      json.RawMessage
				Free      *int
				Unbounded bool
				Used      int
			}
		}
	}
	if err := json.Unmarshal([]byte(text), &object); err != nil || len(object.Pools) != 1 {
		p.Fatalf("%v\n%s", err, text)
	}
	one, used := object.Pools[0], 0
	seen = shownPool{full: one.Full, used: one.Used, free: 1 << 53}
	for _, s := range one.Sets {
		seen.sizes = append(seen.sizes, string(s.Size))
		if s.Free != nil {
			seen.free = min(seen.free, *s.Free)
		}
		if s.Unbounded != bytes.Equal(s.Size, []byte("null")) {
			p.Errorf("unbounded and a size, or neither: %s", text)
		}
		used += s.Used
	}
	if used != one.Used {
		p.Errorf("%d used in the sets, %d in the pool", used, one.Used)
	}
	return seen
}

// wantFull: ipam, doctor and the metrics say of one set that it is full, and of no other.
func (p *hostLocalPool) wantFull(full, sets int) {
	p.Helper()
	if text := p.must(p.ctl(p.confDir, "ipam")); strings.Count(text, "none free, so every ADD fails\n") != 1 {
		p.Errorf("ipam:\n%s", text)
	}
	doctor := p.run(home.command(p.machine, filepath.Join(p.bin, "unwindctl"), "doctor", "--conf-dir", p.confDir, "--state-dir", p.state,
		"--bin-dir", filepath.Join(p.tools, "cni")))
	var severities []string
	for _, line := range regexp.MustCompile(`(?m)^(\w+) +pools`).FindAllStringSubmatch(doctor.stdout, -1) {
		severities = append(severities, line[1])
	}
	want := slices.Repeat([]string{"ok"}, sets)
	want[full] = "error"
	if diff := cmp.Diff(want, severities); diff != "" {
		p.Errorf("doctor, -want +got:\n%s\n%s", diff, doctor.stdout)
	}
	metrics := p.must(p.ctl(p.confDir, "metrics"))
	for set := range sets {
		none := regexp.MustCompile(fmt.Sprintf(`(?m)^unwind_ipam_addresses\{.*set="%d",state="free"\} 0$`, set)).MatchString(metrics)
		if none != (set == full) {
			p.Errorf("set %d has no free address: %t\n%s", set, none, metrics)
		}
	}
}
