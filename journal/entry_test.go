package journal

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	bolt "go.etcd.io/bbolt"
)

// byMeaning compares what the journal holds: JSON by its meaning, with numbers as they are written, addresses by value.
var byMeaning = cmp.Options{
	cmpopts.EquateComparable(netip.Addr{}),
	cmp.Transformer("JSON", func(m json.RawMessage) (v any) {
		d := json.NewDecoder(bytes.NewReader(m))
		d.UseNumber()
		if len(m) > 0 && d.Decode(&v) != nil {
			return string(m)
		}
		return v
	}),
}

// everything returns an entry in which no field is empty.
func everything() *Entry {
	generation := func(n int) Generation {
		return Generation{
			NetNS:         NetNS{Path: "/var/run/netns/a b", Dev: 4, Ino: 4026532281, Cookie: 1<<64 - 1},
			Args:          "IgnoreUnknown=1;K8S_POD_NAMESPACE=ns;K8S_POD_NAME=pod;X=\"<&>\\\t\u2028é",
			Path:          "/opt/cni/bin:/usr/lib/cni",
			CNIVersion:    "1.1.0",
			RuntimeConfig: json.RawMessage(`{"portMappings":[{"hostPort":8080}]}`),
			Result:        json.RawMessage(`{"cniVersion":"1.0.0","ips":[{"address":"10.0.0.7/24"}]}`),
			Claims: []Claim{
				{netip.MustParseAddr("10.0.0.7"), 0, "host-local:/var/lib/cni/networks/podnet"},
				{netip.MustParseAddr("::ffff:10.0.0.8"), 1, ""},
				{netip.MustParseAddr("fe80::1%eth0"), 1, ""},
			},
			HostLinks: []HostLink{{"veth0a1b2c3d", "02:42:ac:11:00:02"}},
			Host:      Host{"b007", "4c4c4544", "mnt:[4026531841]", "pid:[4026531836]"},
			Created:   Time{Boot: 123456789, Wall: time.Date(2026, 2, 3, 4, 5, 6, 7e6, time.UTC)},
			Steps: []Step{{
				Index: n, Type: "bridge",
				Config:   json.RawMessage(`{"type":"bridge", "big":9007199254740993, "e":1.10, "s":"<&>\u0000 \\/"}`),
				Attempts: 3, LastError: "exit status 1", LastCode: 999, Parked: true, RepeatAt: 1 << 62,
			}},
			Undo: Undo{Began: 2, Ended: 1},
		}
	}
	return &Entry{
		Key:         Key{"podnet", "c0ffee", "eth0"},
		State:       Unwinding,
		Pod:         Pod{"ns", "pod", "1234-uid"},
		Generations: []Generation{generation(1), generation(2)},
		Reason:      "delegate portmap: ADD: \"no\"",
	}
}

// empty returns the paths of all values within v that are zero, to see that a test value has none.
func empty(v any) (paths []string) {
	var walk func(path string, v any)
	walk = func(path string, v any) {
		switch v := v.(type) {
		case map[string]any:
			for k, e := range v {
				walk(path+"."+k, e)
			}
		case []any:
			for i, e := range v {
				walk(fmt.Sprintf("%s.%d", path, i), e)
			}
		case nil:
			paths = append(paths, path)
		}
	}
	data, _ := json.Marshal(v)
	var decoded any
	_ = json.Unmarshal(data, &decoded)
	walk("", decoded)
	return paths
}
