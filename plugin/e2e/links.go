package e2e

import (
	"errors"
	"fmt"
	"net"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// nodeLink is the name of a worker's interface in the nodes' network.
const nodeLink = "eth0"

// connect links a worker to the nodes' network.
func (w *Worker) connect() {
	w.Helper()
	control := w.cluster.control
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", w.first.Pid))
	if err != nil {
		w.Fatal(err)
	}
	defer ns.Close()
	control.do(func() error { return addPort("port-"+w.NodeName, w.mac(), ns) })
	w.do(func() error { return setUp(nodeLink, w.address) })
}

// mac returns the MAC address of the worker's interface. It must stay the same after a reboot,
// because the other nodes have cached it.
func (w *Worker) mac() net.HardwareAddr {
	return append(net.HardwareAddr{0x02, 0}, net.ParseIP(w.address).To4()...)
}

// routes adds routes between the pods of this worker and the pods of every other worker.
func (w *Worker) routes() {
	w.Helper()
	for _, other := range w.cluster.Workers {
		if other != w {
			other.do(func() error { return addRoute(w.network.Subnet, w.address) })
			w.do(func() error { return addRoute(other.network.Subnet, other.address) })
		}
	}
}

func addBridge(name, address string) error {
	if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: name}}); err != nil {
		return err
	}
	return setUp(name, address)
}

// addPort creates a veth pair, with one end on the bridge and the other in the network namespace.
// It first removes an older pair of the same name, which may still exist shortly after a reboot,
// because the kernel removes a network namespace with a delay.
func addPort(name string, mac net.HardwareAddr, ns *os.File) error {
	if err := removeLink(name); err != nil {
		return err
	}
	bridge, err := netlink.LinkByName(nodesBridge)
	if err != nil {
		return err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MasterIndex = name, bridge.Attrs().Index
	port := &netlink.Veth{LinkAttrs: attrs, PeerName: nodeLink, PeerHardwareAddr: mac, PeerNamespace: netlink.NsFd(int(ns.Fd()))}
	if err := netlink.LinkAdd(port); err != nil {
		return err
	}
	return netlink.LinkSetUp(port)
}

// setUp gives an interface its address in the nodes' network, and a default route through an unused
// address, because the API server needs a default route.
func setUp(name, address string) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	addr, err := netlink.ParseAddr(address + "/24")
	if err != nil {
		return err
	}
	if err := netlink.AddrAdd(link, addr); err != nil {
		return err
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return err
	}
	return netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: net.ParseIP("172.31.0.254")})
}

func addRoute(subnet, via string) error {
	dst, err := netlink.ParseIPNet(subnet)
	if err != nil {
		return err
	}
	return netlink.RouteReplace(&netlink.Route{Dst: dst, Gw: net.ParseIP(via)})
}

func removeLink(name string) error {
	link, err := netlink.LinkByName(name)
	if _, ok := errors.AsType[netlink.LinkNotFoundError](err); ok {
		return nil
	}
	if err != nil {
		return err
	}
	if err := netlink.LinkDel(link); !errors.Is(err, unix.ENODEV) { // ENODEV: it no longer exists
		return err
	}
	return nil
}
