package sweep

import (
	"slices"
	"testing"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/netconf"
)

// TestSortByAge: a sweep begins with the record whose last change is the oldest by the boot clock.
// The wall clock is ignored, because it can be changed. A boot time in the future is from an
// earlier boot, so its record comes first.
func TestSortByAge(t *testing.T) {
	t.Parallel()
	var records [][]*journal.Record
	for _, e := range []struct {
		id   string
		boot int64
		wall int
	}{{"last", 90, 1}, {"first", 10, 3}, {"second", 20, 2}, {"earlier boot", 101, 4}} {
		records = append(records, []*journal.Record{{Key: journal.Key{ContainerID: e.id},
			Updated: journal.Time{Boot: e.boot, Wall: time.Unix(int64(e.wall), 0)}}})
	}
	sortByAge(records, 100)
	var got []string
	for _, e := range records {
		got = append(got, e[0].ContainerID)
	}
	if !slices.Equal(got, []string{"earlier boot", "first", "second", "last"}) {
		t.Errorf("%q", got)
	}
}

// TestChainOf: several files may configure a network. If their chains differ, chainOf returns no
// chain, because it cannot know which one the runtime uses.
func TestChainOf(t *testing.T) {
	network := func(name, plugin string) Network {
		conf, err := netconf.ParseConf([]byte(`{"cniVersion": "1.0.0", "name": "` + name + `", "type": "unwind",
			"chain": {"cniVersion": "1.0.0", "name": "` + name + `", "plugins": [{"type": "` + plugin + `"}]}}`))
		if err != nil {
			t.Fatal(err)
		}
		chain, err := conf.LoadChain()
		if err != nil {
			t.Fatal(err)
		}
		return Network{Chain: chain, Conf: conf}
	}
	for _, tt := range []struct {
		name     string
		networks []Network
		want     string // the plugin, or "" if there is no chain
	}{
		{"none", []Network{network("other", "p0")}, ""},
		{"one", []Network{network("net", "p0"), network("other", "p1")}, "p0"},
		{"one, configured twice", []Network{network("net", "p0"), network("net", "p0")}, "p0"},
		{"two", []Network{network("net", "p0"), network("net", "p1")}, ""},
		{"two, one of them configured twice", []Network{network("net", "p0"), network("net", "p1"), network("net", "p0")}, ""},
	} {
		got := ""
		if chain, _ := (Options{Networks: tt.networks}).chainOf("net"); chain != nil {
			got = chain.Delegates[0].Type
		}
		if got != tt.want {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
}

// TestMassReleaseGuard: if more than 10 attachments seem dead, and they are also more than 30 % of
// this boot's attachments in state live, the mass-release guard keeps them.
func TestMassReleaseGuard(t *testing.T) {
	t.Parallel()
	// The guard counts dead, live and unknown attachments. It does not count attachments that are
	// being deleted or are from an earlier boot.
	type counts struct{ dead, live, deleting, earlier, unknown int }
	for _, c := range []struct {
		name   string
		counts counts
		force  bool
		kept   bool
	}{
		{"none", counts{}, false, false},
		{"ten of ten", counts{dead: 10}, false, false},
		{"eleven of eleven", counts{dead: 11}, false, true},
		{"eleven, forced", counts{dead: 11}, true, false},
		{"eleven of 36", counts{dead: 11, live: 25}, false, true},
		{"eleven of 37", counts{dead: 11, live: 26}, false, false},
		{"thirty of a hundred", counts{dead: 30, live: 70}, false, false},
		{"thirty of 99", counts{dead: 30, live: 69}, false, true},
		{"eleven of 37, some of them unknown", counts{dead: 11, live: 20, unknown: 6}, false,
			false},
		{"ten, and many that don't count", counts{dead: 10, deleting: 50, earlier: 50}, false, false},
		{"eleven of 36, and many of an earlier boot", counts{dead: 11, live: 25, earlier: 50}, false,
			true},
		{"eleven of 36, and many that are being deleted", counts{dead: 11, live: 25, deleting: 50}, false,
			true},
	} {
		t.Run(c.name, func(t *testing.T) {
			var findings []Finding
			add := func(many int, f Finding) {
				findings = append(findings, slices.Repeat([]Finding{f}, many)...)
			}
			add(c.counts.earlier, Finding{State: journal.Live, Judgment: decide.Judgment{Verdict: decide.Dead}})
			add(c.counts.dead, Finding{State: journal.Live, Judgment: decide.Judgment{Verdict: decide.Dead}, counts: true, Records: []*journal.Record{{}}})
			add(c.counts.deleting, Finding{State: journal.Deleting, Judgment: decide.Judgment{Verdict: decide.Dead}})
			add(c.counts.live, Finding{State: journal.Live, Judgment: decide.Judgment{Verdict: decide.Live}, counts: true})
			add(c.counts.unknown, Finding{State: journal.Live, Judgment: decide.Judgment{Verdict: decide.Unknown}, counts: true})
			s := &Sweep{Options: Options{Force: c.force}}
			err := s.guardMassRelease(findings)
			if (err != nil) != c.kept {
				t.Errorf("the guard returned %v", err)
			}
			for i, f := range findings {
				live := f.counts && f.Verdict == decide.Dead
				if kept := f.Err != nil; kept != (live && c.kept) {
					t.Errorf("finding %d, %+v: kept %t", i, f, kept)
				}
			}
		})
	}
}
