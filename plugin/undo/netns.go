package undo

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/netconf"
)

// show returns the CNI_NETNS for a step's DEL, and a function to call after the DEL. Before each
// DEL, it checks again that the path leads to the ADD's namespace, because the runtime may have
// mounted another namespace there.
func (u *undoing) show(s *journal.Step, shown decide.Shown) (netns string, remove func()) {
	switch shown {
	case decide.ShowPinned:
		netns = u.place.Pinned()
	case decide.ShowPath:
		if u.place.IsAt(u.place.Path) {
			netns = u.place.Path
		}
	case decide.ShowScratch:
		return u.scratch(s)
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
	n := decide.NetNS{Found: u.state == there, Sent: sent != "",
		Unknown: u.Record.Got.Result == nil && len(u.Record.Got.Claims) == 0}
	switch {
	case n.Found && known.ByType(s.Type).NetNS == known.Scratch:
		seen, err := u.place.Interface(u.Record.IfName)
		n.Interface = decide.TruthOf(seen.There(), err)
	case !n.Found && n.Sent:
		seen, err := facts.InterfaceAt(sent, u.Record.IfName)
		n.Anothers = err == nil && (u.Node.IsHost(seen.Netns) || u.isAnothers(ctx, seen))
		if n.Anothers {
			u.Log.Warn("the namespace belongs to another attachment or the host; running the DEL without it",
				"netns", sent)
		}
	}
	return n
}

// sentPath returns the path that a delegate gets if the ADD's namespace cannot be found. If the
// runtime's verb is for this ADD, this is the path that the runtime sent, as without unwind. If the
// verb is for another ADD of the attachment, this is the recorded path, provided that nothing
// exists there. In all other cases, it is "".
func (u *undoing) sentPath() string {
	switch path := u.Record.Added.NetNS.Path; {
	case !u.Mode.ofVerb() || u.Verb.Netns == "":
		return ""
	case u.Request.Netns == "" && isMissing(path):
		return path
	}
	return u.Request.Netns
}

// located is the result of the search for the network namespace of a record's ADD.
type located int

const (
	hidden   located = iota // it may exist, but was not found
	there                   // it was found
	gone                    // it is proven gone
	anothers                // it was found, but it or its interface belongs to another attachment
)

// locate finds the record's network namespace: at the path in the runtime's DEL, at its recorded
// path, at its other mounts, and by its processes. It never returns a different namespace at one of
// these paths. where is empty unless state == there.
func (u *undoing) locate(ctx context.Context) (where facts.Place, state located) {
	e := u.Record
	var err error
	switch {
	case u.Node.SameBoot(e) == decide.False:
		return where, gone // inodes and cookies of an earlier boot mean nothing in this one
	case e.Added.NetNS.Known():
		where, err = facts.Find(e.Added.NetNS, e.IfName, u.Request.Netns)
		if !where.There() {
			var processErr error
			where, processErr = u.Node.View.OpenByProcess(e.Added.NetNS, e.IfName, len(e.Got.HostLinks) == 0)
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

// provenGone reports whether the namespace, which locate did not find, is gone. It returns false
// while the host end of the interface exists: the kernel destroys a namespace, and the host end
// with it, only some time after the namespace's last user has ended. If the record names no host
// end, provenGone also returns false after an error in the search (err). If the ADD did not
// identify the namespace, locate has not searched for it. So provenGone ignores err, but requires
// that no namespace is at the recorded path.
func (u *undoing) provenGone(err error) bool {
	if added := u.Record.Added.NetNS; !added.Known() {
		_, pathErr := facts.InterfaceAt(added.Path, "")
		return facts.IsNoNetNS(pathErr) && u.awaitHostLinkGone()
	}
	return u.awaitHostLinkGone() && (len(u.Record.Got.HostLinks) > 0 || err == nil)
}

// isAnothers reports whether the interface in a namespace existed before the ADD, or the
// namespace belongs to another attachment in the journal.
func (u *undoing) isAnothers(ctx context.Context, seen facts.Interface) bool {
	return u.Record.Added.Occupant != "" && seen.Occupant() == u.Record.Added.Occupant ||
		u.Node.Anothers(ctx, u.Record, seen.Netns)
}

// awaitHostLinkGone reports whether the host end of the container's interface is gone, or
// disappears within Budgets.HostLink.
func (u *undoing) awaitHostLinkGone() bool {
	for end := time.Now().Add(u.Env.Budgets.HostLink); ; time.Sleep(5 * time.Millisecond) {
		there, err := facts.LinkThere(u.Record.Got.HostLinks)
		if err != nil || !there || time.Now().After(end) {
			return err == nil && !there
		}
	}
}

func isMissing(path string) bool {
	_, err := os.Lstat(path)
	return errors.Is(err, fs.ErrNotExist)
}

// scratch creates a scratch network namespace for a step's DEL. Some plugins find their resources
// by the container's interface, so their DELs leave these resources behind once that interface is
// gone. The scratch namespace contains an interface with the same name and addresses. Only a thread
// of this process keeps the namespace alive, so a crash leaves nothing behind.
func (u *undoing) scratch(s *journal.Step) (path string, remove func()) {
	ready, done := make(chan error), make(chan struct{})
	go facts.OnThread(func() {
		path = fmt.Sprintf("/proc/%d/task/%d/ns/net", os.Getpid(), unix.Gettid())
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			err = addInterface(u.Record.IfName, u.addressesHad())
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
	if r, err := netconf.ParseResult(u.Record.Got.Result); err == nil && len(r.Prefixes()) > 0 {
		return r.Prefixes()
	}
	var prefixes []netip.Prefix
	for _, c := range u.Record.Got.Claims {
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
	// Enable IPv6, as on the container's interface, even if it is disabled by default. In a kernel
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
