package undo

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/tristate"
)

// addressesOfOthers returns the addresses of a record that have another owner: a live attachment in
// the journal, or the owner in host-local's own file. A DEL does not get these addresses in its
// prevResult (cni#924). If the file cannot be read, or if the other attachment may be live, the
// address counts as having another owner. A DEL without the address can be repeated later, but a
// DEL with it cannot be undone. An ADD that has just got the address, and undoes this record for
// that reason, does not count as another owner. The result is never nil.
func (u *undoing) addressesOfOthers(ctx context.Context) []netip.Addr {
	othersOwn := []netip.Addr{}
	claimants, _ := u.Journal.Snapshot(ctx).Others(u.Entry.Key, u.Entry.Addresses())
	for _, c := range u.Entry.Got.Claims {
		if u.hasOtherOwner(ctx, c, claimants) {
			othersOwn = append(othersOwn, c.Address)
		}
	}
	return othersOwn
}

func (u *undoing) hasOtherOwner(
	ctx context.Context, c journal.Claim, claimants []*journal.Entry,
) bool {
	own, owners := []journal.Key{u.Entry.Key}, []ipam.Owner{ownerOf(u.Entry.Key)}
	assigned := slices.Contains(u.Assigned, c.Address)
	if assigned {
		own, owners = append(own, u.Verb.Key), append(owners, ownerOf(u.Verb.Key))
	}
	named := tristate.No // whether host-local's file names another owner
	if c.Pool != "" {
		named = tristate.Of(ipam.OwnedByOther(c.Pool, c.Address, owners...))
	}
	switch {
	case named != tristate.No, slices.ContainsFunc(claimants, func(o *journal.Entry) bool {
		undone := o.Undo.State == journal.Deleting || o.Undo.State == journal.RollingBack
		return o.ClaimsAddress(c.Address) && !slices.Contains(own, o.Key) &&
			decide.Owns(undone && u.SameNamespaces(o) == tristate.Yes, u.Judge(ctx, o).Fate)
	}):
		return true
	case c.Pool != "" || assigned:
		return false
	}
	return u.CachedOwner(c.Address, func(one facts.Cached) bool { // the journal is more precise
		return one.Key() == u.Entry.Key || one.Key() == u.Verb.Key || u.hasADD(ctx, one)
	})
}

func ownerOf(k journal.Key) ipam.Owner {
	return ipam.Owner{ContainerID: k.ContainerID, IfName: k.IfName}
}

// reassigned reports whether the ADD that undoes this record has just got each address of a step,
// in the same network. Another network may use the same addresses. The claim of another record
// would prove nothing: it may be from before.
func (u *undoing) reassigned(s *journal.Step) (is bool) {
	for _, c := range u.Entry.Got.Claims {
		if c.Step != s.Index {
			continue
		}
		if is = slices.Contains(u.Assigned, c.Address); !is {
			return false
		}
	}
	return is && u.Verb.Key.Network == u.Entry.Network
}

// errLate is the cause of the time limit for a late DEL.
var errLate = errors.New("its address is free, so another pod may get it")

// The problem: a delegate that knows an address only from prevResult removes rules by the address
// alone. If the address is free, a new pod could get it during the DEL, and lose its rules. So late
// prepares each such DEL (see decide.IsLate):
//
//  1. It reads the claims in the journal and host-local's files again, and withholds an address
//     that has another owner by now.
//  2. It ends the DEL Budgets.LateDel after it began to read. An ADD that gets the address later
//     finds this record when it commits its own claim. Before its next delegate makes a rule, that
//     ADD waits longer than LateDel for the attachment's lock, which the DEL holds.
//
// A DEL that reached this limit twice, or whose record no ADD can find, runs without the address
// (see decide.DropsAddress). After SIGKILL, the delegate still holds the lock; the ADD kills it.
func (u *undoing) late(
	ctx context.Context, s *journal.Step,
) (bounded context.Context, cancel context.CancelFunc) {
	end := time.Now().Add(u.Budgets.LateDel)
	var free []netip.Addr
	for _, c := range u.Entry.Got.Claims {
		if !slices.Contains(slices.Concat(u.withheld, u.Assigned), c.Address) &&
			decide.IsLate(s, c, u.isFree(c)) {
			free = append(free, c.Address)
		}
	}
	u.dropped = nil
	switch {
	case len(free) == 0:
		return context.WithCancel(ctx)
	case decide.DropsAddress(s, u.recorded()):
		u.dropped = free
		return context.WithCancel(ctx)
	}
	err := u.Journal.Renew(ctx)
	if u.withheld = u.addressesOfOthers(ctx); err != nil {
		u.Log.Warn("cannot read the journal; the DEL runs without its address", "err", err)
		u.withheld = slices.Concat(u.withheld, free)
	}
	if !slices.ContainsFunc(free,
		func(a netip.Addr) bool { return !slices.Contains(u.withheld, a) }) {
		return context.WithCancel(ctx)
	}
	return context.WithDeadlineCause(ctx, end, errLate)
}

// isFree reports whether the attachment no longer has a claimed address. If host-local assigned it,
// the file shows that. Otherwise it counts as free once the DEL of the delegate that allocated it
// is done. That delegate is unknown in some reconstructed records.
func (u *undoing) isFree(c journal.Claim) bool {
	if c.Pool == "" {
		return c.Step >= 0 && u.Entry.Freed(c)
	}
	owner, given, err := ipam.OwnerOf(c.Pool, c.Address)
	return err != nil || !given || !owner.Is(u.Entry.ContainerID, u.Entry.IfName)
}

// recorded reports whether the record is in the journal, where other processes find it.
func (u *undoing) recorded() bool {
	return u.Journal.Lost == nil && u.Entry.Number != 0
}

// hasADD reports whether the ADD in libcni's cache is in the journal. A record of an earlier ADD of
// the container does not count, because that ADD is being undone.
func (w *Worker) hasADD(ctx context.Context, one facts.Cached) bool {
	records, _ := w.Journal.Snapshot(ctx).Records(one.Key())
	seen, _ := facts.Look(one.NetNS, "")
	return slices.ContainsFunc(records, func(e *journal.Entry) bool {
		return one.NetNS == "" || w.Names(e, seen)
	})
}

// show returns the CNI_NETNS for a step's DEL, and a function to call after the DEL. It verifies
// the path of the namespace before each delegate, because the runtime may have mounted another
// namespace there.
func (u *undoing) show(s *journal.Step, shown decide.Shown) (netns string, remove func()) {
	switch shown {
	case decide.ShowPinned:
		netns = u.place.Pinned()
	case decide.ShowPath:
		if u.place.IsAt(u.place.Path) {
			netns = u.place.Path
		}
	case decide.ShowScratch:
		return u.scratch(s, u.Entry.IfName)
	case decide.ShowEmpty:
		return u.scratch(s, "")
	case decide.ShowSent:
		netns = u.sentPath()
	case decide.ShowNowhere:
		netns = "/proc/0/ns/net" // no process has the ID 0
	}
	return netns, func() {}
}

// netns returns the facts about the namespace for a step's DEL.
func (u *undoing) netns(ctx context.Context, s *journal.Step) decide.NetNS {
	sent := u.sentPath()
	n := decide.NetNS{Found: u.state == there, Sent: sent != ""}
	switch {
	case n.Found && known.Of(s.Type).NetNS == known.Scratch:
		seen, err := facts.Look(u.place.Pinned(), u.Entry.IfName)
		n.Interface = tristate.Of(seen.There(), err)
	case !n.Found && n.Sent:
		seen, err := facts.Look(sent, u.Entry.IfName)
		n.Anothers = err == nil && (u.Node.IsHost(seen.Netns) || u.isAnothers(ctx, seen))
	}
	return n
}

// sentPath returns the path that a delegate gets, as without unwind, if the ADD's namespace cannot
// be found: the path in the runtime's DEL if that is the DEL of this ADD, or the ADD's own path if
// the runtime's verb also undoes this earlier ADD and nothing is at the path. Otherwise, sentPath
// returns "".
func (u *undoing) sentPath() string {
	switch path := u.Entry.Added.NetNS.Path; {
	case !u.Mode.ofVerb() || u.Verb.Netns == "":
		return ""
	case u.Job.Netns == "" && isMissing(path):
		return path
	}
	return u.Job.Netns
}

// located is the result of the search for the network namespace of a record's ADD.
type located int

const (
	hidden   located = iota // it may exist, but was not found
	there                   // it was found
	gone                    // it is proven gone
	anothers                // it was found, but its interface belongs to another attachment
)

// locate finds the record's network namespace: at the path in the runtime's DEL, at its recorded
// path, at its other mounts, and by its processes. It never returns a different namespace at one of
// these paths. where is empty unless the namespace is there.
func (u *undoing) locate(ctx context.Context) (where facts.Place, state located) {
	e := u.Entry
	var err error
	switch {
	case u.SameBoot(e) == tristate.No:
		return where, gone // inodes and cookies of an earlier boot mean nothing in this one
	case e.Added.NetNS.Known():
		where, err = facts.Find(e.Added.NetNS, e.IfName, u.Job.Netns)
		if !where.There() {
			var processErr error
			where, processErr = u.View.OpenByProcess(e.Added.NetNS, e.IfName, len(e.Got.HostLinks) == 0)
			err = errors.Join(err, processErr)
		}
	}
	switch {
	case where.There() && !u.isAnothers(ctx, where.Seen):
		return where, there
	case where.There():
		u.Log.Warn("the interface belongs to another attachment; running the DEL without the namespace",
			"netns", where.Path)
		where.Close()
		return facts.Place{}, anothers
	case u.provenGone(err):
		return where, gone
	}
	return where, hidden
}

// provenGone reports whether a namespace that was not found is gone. err is the error of the
// search. The host end of the interface must be gone, too: the kernel destroys a namespace some
// time after its last user is gone. In addition, either there was a host end, or the search had no
// error. If the ADD did not identify the namespace, its path replaces the search.
func (u *undoing) provenGone(err error) bool {
	if added := u.Entry.Added.NetNS; !added.Known() {
		_, pathErr := facts.Look(added.Path, "")
		return pathErr != nil && u.awaitHostLinkGone()
	}
	return u.awaitHostLinkGone() && (len(u.Entry.Got.HostLinks) > 0 || err == nil)
}

// isAnothers reports whether the interface in a namespace was there before the ADD, or the
// namespace belongs to another attachment in the journal.
func (u *undoing) isAnothers(ctx context.Context, seen facts.Interface) bool {
	return u.Entry.Added.Occupant != "" && seen.Occupant() == u.Entry.Added.Occupant ||
		u.Node.Anothers(ctx, u.Entry.Key, seen.Netns)
}

// awaitHostLinkGone reports whether the host end of the container's interface is gone, or
// disappears within Budgets.HostLink.
func (u *undoing) awaitHostLinkGone() bool {
	for end := time.Now().Add(u.Budgets.HostLink); ; time.Sleep(5 * time.Millisecond) {
		there, err := facts.LinkThere(u.Entry.Got.HostLinks)
		if err != nil || !there || time.Now().After(end) {
			return err == nil && !there
		}
	}
}

func isMissing(path string) bool {
	_, err := os.Lstat(path)
	return errors.Is(err, fs.ErrNotExist)
}

// Some plugins find their resources by the container's interface. When the container's namespace is
// gone, their DELs leave these resources behind. For such a DEL, scratch creates a scratch network
// namespace. It contains an interface with the given name and the ADD's addresses, or no interface
// if ifname is "". Only a thread of this process keeps the namespace alive, so a crash leaves
// nothing behind.
func (u *undoing) scratch(s *journal.Step, ifname string) (path string, remove func()) {
	ready, done := make(chan error), make(chan struct{})
	go facts.OnThread(func() {
		path = fmt.Sprintf("/proc/%d/task/%d/ns/net", os.Getpid(), unix.Gettid())
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil && ifname != "" {
			err = addInterface(ifname, u.addressesHad())
		}
		ready <- err
		<-done
	})
	remove = func() { close(done) }
	if err := <-ready; err != nil {
		u.Log.Warn("cannot create a scratch network namespace; the plugin's DEL may leave rules behind",
			"plugin", s.Type, "err", err)
		return "", remove
	}
	return path, remove
}

// addressesHad returns the addresses that the container's interface had, from the last known
// result, or else from the claims.
func (u *undoing) addressesHad() []netip.Prefix {
	if r, err := netconf.ParseResult(u.Entry.Got.Result); err == nil && len(r.Prefixes()) > 0 {
		return r.Prefixes()
	}
	var prefixes []netip.Prefix
	for _, c := range u.Entry.Got.Claims {
		prefixes = append(prefixes, netip.PrefixFrom(c.Address, c.Address.BitLen()))
	}
	return prefixes
}

// addInterface creates an interface with addresses in the network namespace of this thread.
func addInterface(ifname string, addresses []netip.Prefix) error {
	link := &netlink.Veth{LinkAttrs: netlink.NewLinkAttrs(), PeerName: "unwind-peer"}
	link.Name = ifname
	if err := netlink.LinkAdd(link); err != nil {
		return fmt.Errorf("cannot create scratch interface %s: %w", ifname, err)
	}
	// The container's interface had IPv6 enabled, even if it is disabled by default. In a kernel
	// without IPv6, this file does not exist.
	_ = os.WriteFile("/proc/sys/net/ipv6/conf/"+ifname+"/disable_ipv6", []byte("0"), 0)
	for _, prefix := range addresses {
		addr, err := netlink.ParseAddr(prefix.String())
		if err != nil {
			return err
		}
		addr.Flags = unix.IFA_F_NODAD
		if err := netlink.AddrAdd(link, addr); err != nil && !errors.Is(err, syscall.EEXIST) {
			return fmt.Errorf("cannot add address %s to the scratch interface: %w", prefix, err)
		}
	}
	return nil
}
