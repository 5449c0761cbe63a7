package undo

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"cni-unwind/journal"
	"cni-unwind/plugin/internal/host"
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/tristate"
)

// TestPlaces: unwind can look in each place where a plugin leaves something.
func TestPlaces(t *testing.T) {
	for _, plugin := range known.Names(func(p *known.Plugin) bool { return p.Traces != nil }) {
		for _, place := range known.Of(plugin).Traces {
			if looks[place] == nil {
				t.Errorf("%s: no way to look for its %s", plugin, place)
			}
		}
	}
}

// TestTakenUnknown: if unwind cannot look, it is unknown whether something is taken, and the DEL
// stays pending.
func TestTakenUnknown(t *testing.T) {
	hostLocal, path := `"ipam": {"type": "host-local", "dataDir": "/nonexistent"}`, os.Getenv("PATH")
	for _, c := range []struct {
		name   string
		plugin string
		config string
		place  delNetNS
		path   string // PATH
		want   tristate.Value
	}{
		{"all can be looked at", "bridge", "{" + hostLocal + "}", delNetNS{gone: true}, path, tristate.No},
		{"another plugin", "calico", "{" + hostLocal + "}", delNetNS{gone: true}, path, tristate.Unknown},
		{"another IPAM plugin", "bridge", `{"ipam": {"type": "whereabouts"}}`, delNetNS{gone: true}, path, tristate.Unknown},
		{"a daemon's leases", "bridge", `{"ipam": {"type": "dhcp"}}`, delNetNS{gone: true}, path, tristate.Unknown},
		{"a store that is not named", "bridge", `{"ipam": {"type": "host-local", "dataDir": 5}}`, delNetNS{gone: true},
			path, tristate.Unknown},
		{"the namespace is not found", "bridge", "{" + hostLocal + "}", delNetNS{}, path, tristate.Unknown},
		{"the namespace cannot be entered", "macvlan", "{" + hostLocal + "}", delNetNS{Place: host.Place{Path: "/nonexistent"}}, path, tristate.Unknown},
		{"no program for rules", "bridge", "{" + hostLocal + "}", delNetNS{gone: true}, "/nonexistent", tristate.Unknown},
		{"a program that fails", "bridge", "{" + hostLocal + "}", delNetNS{gone: true}, "failing", tristate.Unknown},
		{"a program that lists none", "bridge", "{" + hostLocal + "}", delNetNS{gone: true}, "empty", tristate.No},
		{"an address that is not known", "firewall", "{}", delNetNS{gone: true}, path, tristate.Unknown},
		{"sbr without a namespace", "sbr", "{}", delNetNS{gone: true}, path, tristate.No},
		{"sbr with one that is not found", "sbr", "{}", delNetNS{}, path, tristate.Unknown},
		{"a plugin that leaves nothing", "loopback", "{}", delNetNS{}, path, tristate.No},
		{"no configuration", "macvlan", "[", delNetNS{gone: true}, path, tristate.Unknown},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			if exit := map[string]string{"failing": "exit 1", "empty": "exit 0"}[c.path]; exit != "" {
				c.path = filepath.Join(dir, "programs")
				err := errors.Join(os.Mkdir(c.path, 0o700),
					os.WriteFile(filepath.Join(c.path, "iptables-save"), []byte("#!/bin/sh\n"+exit), 0o700))
				if err != nil {
					t.Fatal(err)
				}
			}
			t.Setenv("PATH", c.path)
			e := &journal.Entry{Key: journal.Key{Network: "net", ContainerID: "nobody", IfName: "eth0"}}
			step := &journal.Step{Type: c.plugin, Config: []byte(c.config)}
			if got := testWorker().Taken(t.Context(), e, &journal.Generation{}, step, c.place.Path, c.place.gone); got != c.want {
				t.Errorf("%v, want %v", got, c.want)
			}
			if _, err := os.Lstat("/nonexistent"); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("looking made something: %v", err)
			}
		})
	}
}
