package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
)

// Left counts the resources of containers on a node, both live and leaked.
type Left struct {
	Addresses int // reserved by host-local
	NetNS     int // pinned in /run/netns
	Veths     int // on the host
	Rules     int // iptables rules and chains of containers
}

func (l Left) String() string {
	return fmt.Sprintf("%d/%d/%d/%d", l.Addresses, l.NetNS, l.Veths, l.Rules)
}

// HasNothing reports whether nothing is left except network namespaces, which the runtime keeps for
// the sandboxes that it lists.
func (l Left) HasNothing() bool { return l.Addresses+l.Veths+l.Rules == 0 }

// Left counts the current resources of containers on the node.
func (n *Node) Left() Left {
	n.Helper()
	pins, err := os.ReadDir(n.File("/run/netns"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		n.Fatal(err)
	}
	return Left{Addresses: len(n.Reserved()), NetNS: len(pins), Veths: n.veths(), Rules: len(n.Rules())}
}

// Settled waits until the numbers of resources no longer change, and returns them. After a network
// namespace is deleted, the kernel takes some time to remove its interfaces.
func (n *Node) Settled() Left {
	n.Helper()
	const reads, pause = 3, 200 * time.Millisecond
	left := n.Left()
	for same := 0; same < reads; same++ {
		time.Sleep(pause)
		now := n.Left()
		if now != left {
			left, same = now, 0
		}
	}
	return left
}

func (n *Node) veths() (count int) {
	n.Helper()
	n.do(func() error {
		links, err := netlink.LinkList()
		for errors.Is(err, netlink.ErrDumpInterrupted) { // an interface was added or removed meanwhile
			links, err = netlink.LinkList()
		}
		for _, link := range links {
			if link.Type() == "veth" && link.Attrs().Name != nodeLink {
				count++
			}
		}
		return err
	})
	return count
}

// ofContainer matches the iptables rules and chains of containers, but not the node's own. Bridge's
// chains are named CNI-HASH, portmap's chains are named CNI-DN-HASH, and firewall's rules contain
// an address with /32.
var ofContainer = regexp.MustCompile(`\bCNI-(DN-)?[0-9a-f]{20,}|\d/32\b`)

// Rules returns the iptables rules and chains of containers.
func (n *Node) Rules() (rules []string) {
	n.Helper()
	for line := range strings.Lines(n.Run("iptables-save")) {
		if ofContainer.MatchString(line) {
			rules = append(rules, strings.TrimSpace(line))
		}
	}
	return rules
}

// Attachment is a record in the journal, as "unwindctl list --json" prints it.
type Attachment struct {
	ContainerID string
	State       string
	Addresses   []string
	Reason      string
	Steps       []struct{ Plugin, LastError string }
}

// Journal returns the records of unwind's journal.
func (n *Node) Journal() []Attachment {
	n.Helper()
	var list struct{ Attachments []Attachment }
	if err := json.Unmarshal([]byte(n.Unwindctl("list", "--json")), &list); err != nil {
		n.Fatal(err)
	}
	return list.Attachments
}
