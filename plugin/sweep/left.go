package sweep

import (
	"cmp"
	"context"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"

	"cni-unwind/journal"
	"cni-unwind/plugin/alive"
	"cni-unwind/plugin/internal/host"
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/netconf"
)

// A runtime that never sends a DEL leaks more than addresses: rules, ifb devices, and files in
// libcni's cache. If the cache has the DEL, the sweep runs it, see cached.go. Otherwise the sweep
// changes nothing, and lists these leftovers with the commands that remove them:
//
//  1. Read the ifb devices and the rules before the evidence, so that the evidence is newer.
//  2. Skip each container in the list, in the journal, or in a finding that is not dead or has
//     pending DELs.
//  3. Judge the others like owners of addresses that the journal does not know. A rule has no age.
//     It needs none: an ADD makes its rules when an interface already has the address.
//  4. firewall's rules name no container. They are left if nothing else has their address. Their
//     commands ask the pools of host-local again, since the next pod has the same rules.

// leftover is everything that one container left in one network. Its key has no interface.
type leftover struct {
	journal.Key
	addresses []netip.Addr
	idle      bool // it has an idle ifb device
	cut       bool // the container ID is truncated
	commands  []string
	chains    []string // the commands for its chains, which come last
}

// leftovers are the leftovers of all containers, and the evidence of which containers are live.
type leftovers struct {
	of       map[journal.Key]*leftover
	firewall map[netip.Addr][]string // the commands for firewall's rules, by address
	live     map[string]bool         // container IDs
	files    map[string][]alive.Cached
	near     map[netip.Addr][]alive.Cached // cache files, by address
	used     map[netip.Addr]bool           // addresses of containers that are not dead
}

func (l *leftovers) by(network, containerID string) *leftover {
	key := journal.Key{Network: network, ContainerID: containerID}
	if l.of[key] == nil {
		l.of[key] = &leftover{Key: key}
	}
	return l.of[key]
}

// Leftovers adds the leftovers of dead containers to their findings, and new findings for dead
// containers without one. See Job.Leftovers.
func Leftovers(ctx context.Context, s *Sweep, findings []Finding) ([]Finding, error) {
	if s.w.Node.List == nil || s.Attachment != nil {
		return findings, nil
	}
	ifbs := s.idleIFBs()
	l := s.readRules(ctx)
	if err := s.addKnown(ctx, l, findings); err != nil {
		return findings, err
	}
	cacheErr := s.addFiles(l) // planCached has already returned this error
	l.complete()
	s.assign(l, ifbs)
	owners := map[netip.Addr]journal.Key{}
	for _, key := range slices.SortedFunc(maps.Keys(l.of), func(a, b journal.Key) int {
		return cmp.Compare(b.String(), a.String()) // those without a network last
	}) {
		o := l.of[key]
		isDead := (o.Network != "" || cacheErr == nil) && s.judgeLeft(l, o, &findings)
		for _, a := range o.addresses {
			l.used[a] = l.used[a] || !isDead
			owners[a] = key
		}
	}
	for _, a := range slices.SortedFunc(maps.Keys(l.firewall), netip.Addr.Compare) {
		claimed := l.used[a] || cacheErr != nil
		s.w.Journal.Read(ctx, func(tx *journal.Tx) error {
			entries, err := tx.ByAddress(a)
			claimed = claimed || len(entries) > 0 || err != nil
			return nil
		})
		if !claimed {
			o := &leftover{Key: owners[a], addresses: []netip.Addr{a},
				commands: s.ifFree(a, l.firewall[a])}
			s.judgeLeft(l, o, &findings)
		}
	}
	return findings, nil
}

// ifFree makes commands do nothing once a pool of host-local has given an address out again: people
// run them later than the sweep that has just freed it, and the next pod gets equal rules. A pool
// whose path a shell does not read as it is allows none.
func (s *Sweep) ifFree(a netip.Addr, commands []string) []string {
	guard := ""
	for _, p := range s.Pools {
		path := filepath.Join(p.Dir, a.String())
		if !plainPath.regexp().MatchString(path) {
			return nil
		}
		guard += "[ -e " + path + " ] || "
	}
	guarded := make([]string, len(commands))
	for i, command := range commands {
		guarded[i] = guard + command
	}
	return guarded
}

// judgeLeft judges the container of a leftover. If the container is dead, judgeLeft adds the
// commands to a finding. A container without an address, cache file or device cannot be judged and
// is not dead.
func (s *Sweep) judgeLeft(l *leftovers, o *leftover, findings *[]Finding) (isDead bool) {
	files := l.files[o.ContainerID]
	if l.live[o.ContainerID] || s.Network != "" && s.Network != o.Network ||
		len(o.addresses)+len(files) == 0 && !o.idle {
		return false
	}
	var others []alive.Cached
	for _, a := range o.addresses {
		others = append(others, l.near[a]...)
	}
	v := s.w.Node.JudgeLeft(o.Key, o.addresses, s.graceOf(o.Network), files, others)
	if v.Fate != alive.Dead || len(o.commands)+len(o.chains) == 0 {
		return v.Fate == alive.Dead
	}
	i := slices.IndexFunc(*findings, func(f Finding) bool {
		return f.ContainerID == o.ContainerID &&
			(f.Network == o.Network || o.Network == "" && o.ContainerID != "")
	})
	if i < 0 {
		i = len(*findings)
		*findings = append(*findings,
			Finding{Key: o.Key, Verdict: v, LeftOnly: true})
	}
	f := &(*findings)[i]
	f.Left = slices.Concat(f.Left, o.commands, o.chains)
	return true
}

// addKnown adds the containers and addresses of the list, the journal and the findings.
func (s *Sweep) addKnown(ctx context.Context, l *leftovers, findings []Finding) (err error) {
	if l.live, err = s.containers(ctx); err != nil {
		return err
	}
	for a := range s.List.Valid {
		l.live[a.ContainerID] = true
	}
	for _, f := range findings {
		o := l.by(f.Network, f.ContainerID)
		if f.Address.IsValid() {
			o.addresses = append(o.addresses, f.Address)
		}
		if f.Fate != alive.Dead || f.cached != nil && !f.Released {
			l.live[f.ContainerID] = true
		}
	}
	return nil
}

// addFiles adds the files of libcni's cache.
func (s *Sweep) addFiles(l *leftovers) error {
	cache, err := s.w.Node.Cache()
	for _, c := range cache {
		l.files[c.ContainerID] = append(l.files[c.ContainerID], c)
		o := l.by(c.Network, c.ContainerID)
		if plainPath.regexp().MatchString(c.Path) {
			o.commands = append(o.commands, "rm "+c.Path)
		}
		for _, a := range netconf.InterfaceOf(c.Result, c.IfName).Addresses {
			o.addresses, l.near[a] = append(o.addresses, a), append(l.near[a], c)
		}
	}
	return err
}

// complete assigns leftovers with a truncated container ID to a known container whose ID begins so,
// and prefers a live one.
func (l *leftovers) complete() {
	ids := slices.Collect(maps.Keys(l.live))
	for key := range l.of {
		ids = append(ids, key.ContainerID)
	}
	for _, o := range slices.Collect(maps.Values(l.of)) {
		i := slices.IndexFunc(ids, func(id string) bool {
			return o.cut && len(id) > len(o.ContainerID) && strings.HasPrefix(id, o.ContainerID)
		})
		if i >= 0 {
			to := l.by(o.Network, ids[i])
			to.addresses = append(to.addresses, o.addresses...)
			to.commands = append(to.commands, o.commands...)
			delete(l.of, o.Key)
		}
	}
}

// idleIFBs returns bandwidth's ifb devices that get packets from no interface, such as devices
// whose interface is gone.
func (s *Sweep) idleIFBs() []string {
	idle, err := host.IdleIFBs()
	if err != nil {
		s.w.Log.Warn("cannot list ifb devices", "err", err)
	}
	return idle
}

// assign adds the ifb devices that are idle at both readings to their containers. One reading is
// not enough, because an ADD makes a device just before its filter. The names are digests, so a
// device of an unknown container gets an empty key.
func (s *Sweep) assign(l *leftovers, ifbs []string) {
	networks, owners := map[string]bool{}, map[string]journal.Key{}
	for _, p := range s.Pools {
		networks[p.Network] = true
	}
	for key := range l.of {
		networks[key.Network] = true
		owners[known.IFBName(key.Network, key.ContainerID)] = key
	}
	for id := range l.live {
		for network := range networks {
			owners[known.IFBName(network, id)] = journal.Key{Network: network, ContainerID: id}
		}
	}
	for _, name := range s.idleIFBs() {
		if slices.Contains(ifbs, name) {
			o := l.by(owners[name].Network, owners[name].ContainerID)
			o.idle, o.commands = true, append(o.commands, "ip link delete "+name)
		}
	}
}
