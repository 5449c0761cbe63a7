package undo

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cni-unwind/plugin/facts"
)

// scratchNetNS creates a network namespace with one interface that has the given name and
// addresses, or without one if ifname is "". It is for plugins that find what to remove by the
// container's interface, when the container's namespace is gone. Only a thread of this process
// keeps the namespace, so a crash leaves nothing behind.
func scratchNetNS(ifname string, addresses []netip.Prefix) (path string, remove func(), err error) {
	ready, done := make(chan error), make(chan struct{})
	go facts.OnThread(func() {
		path = fmt.Sprintf("/proc/%d/task/%d/ns/net", os.Getpid(), unix.Gettid())
		err := unix.Unshare(unix.CLONE_NEWNET)
		switch {
		case err != nil:
			err = fmt.Errorf("scratch network namespace: %w", err)
		case ifname != "":
			err = fillScratch(ifname, addresses)
		}
		ready <- err
		<-done
	})
	if err := <-ready; err != nil {
		close(done)
		return "", nil, err
	}
	return path, func() { close(done) }, nil
}

// peerName is the other end of an interface in a scratch namespace.
const peerName = "unwind-peer"

// fillScratch creates the interface in the current network namespace, and its other end there or in
// another namespace.
func fillScratch(ifname string, addresses []netip.Prefix) error {
	link := &netlink.Veth{LinkAttrs: netlink.NewLinkAttrs(), PeerName: peerName}
	link.Name = ifname
	if err := netlink.LinkAdd(link); err != nil {
		return fmt.Errorf("scratch interface %s: %w", ifname, err)
	}
	// The container's interface had IPv6 on even where it is off by default. Without IPv6 there is
	// no such file.
	_ = os.WriteFile("/proc/sys/net/ipv6/conf/"+ifname+"/disable_ipv6", []byte("0"), 0)
	for _, prefix := range addresses {
		addr, err := netlink.ParseAddr(prefix.String())
		if err != nil {
			return err
		}
		addr.Flags = unix.IFA_F_NODAD
		if err := netlink.AddrAdd(link, addr); err != nil && !errors.Is(err, syscall.EEXIST) {
			return fmt.Errorf("scratch address %s: %w", prefix, err)
		}
	}
	return nil
}
