package undo

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/netconf"
)

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
