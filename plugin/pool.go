package plugin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"cni-unwind/ipam"
	"cni-unwind/journal"
)

// Pool is where host-local keeps the addresses of a network.
type Pool struct {
	Network string
	Dir     string
	Config  json.RawMessage // of the delegate that calls host-local
}

// Pools returns those of the chain.
func (ch *Chain) Pools(c *Conf) []Pool {
	var pools []Pool
	for i := range ch.Delegates {
		config := ch.Config(i, c)
		dir := ipam.Pool(config, c.Name)
		if dir != "" && !slices.ContainsFunc(pools, func(p Pool) bool { return p.Dir == dir }) {
			pools = append(pools, Pool{c.Name, dir, config})
		}
	}
	return pools
}

// full says whether the pool has no address left.
func (p Pool) full(o *op) bool {
	full, err := ipam.Exhausted(p.Config, p.Network)
	if err != nil {
		o.log.Warn("looking for free addresses", "pool", p.Dir, "err", err)
	}
	return full
}

// orphan is what is known of a reservation whose owner the journal does not know.
type orphan struct {
	observer answer // this process sees what the runtime sees
	listed   answer // the runtime's list has the container, with whatever interface; unknown without a list that speaks of it
	aged     answer // the reservation is older than the grace period
	cached   answer // libcni's cache has it with a network namespace that is there
	inUse    answer // an interface in some network namespace has the address
}

// decideOrphan gives the verdict on a reservation whose owner the journal does not know: that of a pod from before the
// install, or, after the journal was lost, of every pod (antrea#8239). It takes all of this to call it dead.
func decideOrphan(o orphan) verdict {
	for _, doubt := range []struct {
		doubt  bool
		fate   Fate
		reason string
	}{
		{o.observer != yes, Unknown, "this process does not see what the runtime sees; look from the host"},
		{o.listed == unknown, Unknown, "no list of the runtime speaks of its owner, whom the journal does not know"},
		{o.listed == yes, Live, "the runtime lists its owner"},
		{o.aged == unknown, Unknown, "its age cannot be told"},
		{o.aged == no, Live, "the runtime does not list its owner, but the grace period is not over"},
		{o.cached == unknown, Unknown, "libcni's cache cannot be looked at"},
		{o.cached == yes, Live, "libcni's cache has its owner with a network namespace that is there"},
		{o.inUse == unknown, Unknown, "not every network namespace can be looked at"},
		{o.inUse == yes, Live, "an interface has the address"},
	} {
		if doubt.doubt {
			return verdict{fate: doubt.fate, reason: doubt.reason}
		}
	}
	return verdict{fate: Dead, reason: "the runtime does not list its owner, whom the journal does not know; nothing has the address"}
}

// reconcile compares the reservations in a pool with the journal, and releases those that are dead. Those whose owner the
// journal knows follow its entry, and are passed over.
func (s *sweeping) reconcile(ctx context.Context, pool Pool) (findings []Finding, err error) {
	found, err := ipam.Scan(pool.Dir)
	if len(found) == 0 {
		return nil, err
	}
	known, knownErr := s.containers(ctx)
	if knownErr != nil {
		return nil, errors.Join(err, knownErr)
	}
	look := onceInUse{op: s.op}
	plan := ipam.Plan(found, func(r ipam.Reservation) (bool, string) {
		if known[r.Owner.ContainerID] || s.list == nil {
			return false, "" // without a list nothing can be held against an owner
		}
		v := decideOrphan(s.lookAtOrphan(pool.Network, r, &look))
		if v.fate != Dead {
			findings = append(findings, strayFinding(pool, r, v))
		}
		return v.fate == Dead, v.reason
	})
	var released []ipam.Planned
	if !s.DryRun {
		var applyErr error
		released, applyErr = ipam.Apply(ctx, pool.Dir, plan)
		err = errors.Join(err, applyErr)
	}
	gone := map[netip.Addr]bool{}
	for _, r := range released {
		gone[r.Address] = true
		s.tell(journal.Event{Kind: journal.Released, Key: strayFinding(pool, r.Reservation, verdict{}).Key,
			Addresses: []netip.Addr{r.Address}, Reason: r.Reason})
		s.log.Info("address released", "network", pool.Network, "address", r.Address, "owner", r.Owner.ContainerID, "reason", r.Reason)
	}
	for _, r := range plan {
		f := strayFinding(pool, r.Reservation, verdict{fate: Dead, reason: r.Reason})
		f.Released = gone[r.Address]
		findings = append(findings, f)
	}
	return findings, err
}

func strayFinding(pool Pool, r ipam.Reservation, v verdict) Finding {
	key := journal.Key{Network: pool.Network, ContainerID: r.Owner.ContainerID, IfName: r.Owner.IfName}
	return Finding{Key: key, Address: r.Address, Fate: v.fate, Reason: v.reason}
}

// containers returns the IDs that the journal knows, in whatever network: a reservation of theirs follows their entries.
func (s *sweeping) containers(ctx context.Context) (map[string]bool, error) {
	known := map[string]bool{}
	err := s.store.View(ctx, func(tx *journal.Tx) error {
		return tx.Outlines(func(o journal.Outline, _ error) error {
			known[o.ContainerID] = true
			return nil
		})
	})
	return known, err
}

func (s *sweeping) lookAtOrphan(network string, r ipam.Reservation, look *onceInUse) orphan {
	o := orphan{observer: s.atHome()}
	cache, err := cachedAttachments(network, r.Owner)
	o.listed = s.list.hasContainer(network, r.Owner.ContainerID, cache)
	if o.listed != no {
		return o
	}
	if changed, err := r.Changed(); err == nil {
		// The wall clock may have been set since, but not before the machine was started.
		age := min(time.Since(changed), time.Duration(journal.BootNanos()))
		o.aged = answerOf(age > s.conf.GracePeriod, nil)
	}
	o.cached = answerOf(false, err)
	for _, c := range cache {
		if _, err := identify(c.NetNS); c.NetNS == "" || err == nil || !isNoNetNS(err) {
			o.cached = yes
		}
	}
	if o.aged == yes && o.cached == no {
		o.inUse = look.has(r.Address)
	}
	return o
}

// hasContainer says whether a list has a container, with whatever interface. Of one that is no pod a list of pods says
// nothing; libcni's cache tells.
func (l *List) hasContainer(network, id string, cache []cached) answer {
	if l == nil || l.Network != "" && l.Network != network {
		return unknown
	}
	for a := range l.Valid {
		if a.ContainerID == id {
			return yes
		}
	}
	for _, c := range cache {
		if l.Pods && !c.isPod() {
			return unknown
		}
	}
	return no
}

// atHome says whether this process sees what the runtime sees, where no ADD is on record to compare with: in the first PID
// namespace, and where its first process is. In a container the first process is its own, but not its PID namespace.
func (o *op) atHome() answer {
	if o.invoked {
		return yes
	}
	first := namespaces("/proc/1/ns/")
	first.PIDNS = firstPIDNS
	g := &journal.Generation{Host: first}
	g.Host.BootID = o.host.BootID
	return o.sees(g)
}

// firstPIDNS is the number that the kernel gives to its first PID namespace (PROC_PID_INIT_INO in include/linux/proc_ns.h).
const firstPIDNS = "pid:[4026531836]"

// cacheDir is where libcni keeps the results of its ADDs; containerd and CRI-O leave it there.
const cacheDir = "/var/lib/cni/results"

// cached is what libcni keeps of an ADD, as far as it matters here.
type cached struct {
	ContainerID string      `json:"containerId"`
	NetNS       string      `json:"netns"` // "" with libcni before 1.1
	Args        [][2]string `json:"cniArgs"`
}

func (c cached) isPod() bool {
	for _, a := range c.Args {
		if a[0] == "K8S_POD_NAME" && a[1] != "" {
			return true
		}
	}
	return false
}

// cachedAttachments returns what libcni's cache has of a container in a network.
func cachedAttachments(network string, owner ipam.Owner) (found []cached, err error) {
	files, err := os.ReadDir(cacheDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	prefix := network + "-" + owner.ContainerID + "-"
	for _, f := range files {
		if !strings.HasPrefix(f.Name(), prefix) {
			continue
		}
		data, err := readFile(filepath.Join(cacheDir, f.Name()))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		var c cached
		if err == nil {
			err = json.Unmarshal(data, &c)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", f.Name(), err)
		}
		found = append(found, c)
	}
	return found, nil
}

// ReadPools returns the pools of the networks in a folder of conflists (/etc/cni/net.d) that unwind runs with the given state
// folder. Files that cannot be read, or a chain that cannot, are told by the error; the others' pools are returned with it.
func ReadPools(confDir, stateDir string) ([]Pool, error) {
	paths, err := Conflists(confDir)
	errs := []error{err}
	var pools []Pool
	for _, path := range paths {
		found, err := readPools(path, stateDir)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", path, err))
		}
		for _, p := range found {
			if !slices.ContainsFunc(pools, func(o Pool) bool { return o.Dir == p.Dir }) {
				pools = append(pools, p)
			}
		}
	}
	return pools, errors.Join(errs...)
}

func readPools(path, stateDir string) ([]Pool, error) {
	data, err := readFile(path)
	if err != nil || !bytes.Contains(data, []byte(Name)) {
		return nil, err
	}
	list, err := ReadConflist(path)
	if err != nil || list.Unwind == nil || list.Unwind.StateDir != filepath.Clean(stateDir) {
		return nil, err
	}
	chain, err := list.Unwind.LoadChain()
	if err != nil {
		return nil, err
	}
	return chain.Pools(list.Unwind), nil
}
