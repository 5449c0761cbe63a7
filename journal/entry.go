// Package journal durably records every delegated ADD with a pending DEL, before the ADD happens.
//
// It knows nothing of plugins: it stores entries, finds them by attachment, pod and address, and
// hands out the lock of an attachment. Each type and function says what a crash leaves.
package journal

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// Key names an attachment: one interface of one container in one network.
type Key struct {
	Network     string `json:"network"`
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifname"`
}

// String returns network/containerID/ifname. None of the three can hold a slash (SPEC 1.1 §2
// "Parameters").
func (k Key) String() string { return k.Network + "/" + k.ContainerID + "/" + k.IfName }

// State is the place of an attachment between its ADD and its last DEL.
type State string

// The states. An attachment that is Gone has no entry.
const (
	Gone State = ""
	// an ADD runs; if the lock is free, it died before it printed success
	Adding    State = "adding"
	Live      State = "live"      // the ADD has a result; it succeeded, unless it still holds the lock
	Unwinding State = "unwinding" // the ADD failed; it has pending DELs
	Removing  State = "removing"  // the runtime asked for a DEL; it has pending DELs
)

// edges holds every legal change of state. From Gone to Removing goes a DEL of an attachment that
// was added before unwind was installed, or whose entry was lost. Back to Adding goes a new
// generation over an old one that could not be undone completely.
var edges = map[State][]State{
	Gone:      {Adding, Removing},
	Adding:    {Adding, Live, Unwinding, Removing, Gone},
	Live:      {Live, Unwinding, Removing, Gone},
	Unwinding: {Unwinding, Gone, Adding},
	Removing:  {Removing, Gone, Adding},
}

// CheckEdge returns an error for an illegal change of state.
func CheckEdge(from, to State) error {
	if !slices.Contains(edges[from], to) {
		return fmt.Errorf("journal: illegal change of state from %q to %q", from, to)
	}
	return nil
}

// Entry is the journal's record of one attachment.
//
// A runtime may use a container ID again (nerdctl, podman and Nomad do) before the earlier ADD got
// its DEL. So an entry has one Generation for each ADD that is not undone yet, oldest first. State
// is that of the newest; all others are being undone.
type Entry struct {
	Key
	State       State        `json:"state"`
	Pod         Pod          `json:"pod,omitzero"`
	Generations []Generation `json:"generations"`
	Undone      []Interface  `json:"undone,omitempty"` // of ADDs undone while another one is pending
	Cause       string       `json:"cause,omitempty"`  // why it is in its state: alive.Reason.Code
	Reason      string       `json:"reason,omitempty"` // the same in words
	Since       Time         `json:"since"`            // in this state
	Updated     Time         `json:"updated"`

	file os.FileInfo // that a transaction wrote it to, see Store.Holds
}

// Clone returns a copy of the entry with its own generations and steps.
func (e *Entry) Clone() *Entry {
	c := *e
	c.Generations, c.Undone = slices.Clone(e.Generations), slices.Clone(e.Undone)
	for i := range c.Generations {
		g := &c.Generations[i]
		g.Claims, g.Steps = slices.Clone(g.Claims), slices.Clone(g.Steps)
	}
	return &c
}

// Outline is the part of an entry that can be read without decoding it.
type Outline struct {
	Key
	State  State
	BootID string // of the newest generation, as is NetNS, which lacks Cookie and NetDev
	NetNS  NetNS
}

// Newest returns the newest generation, which State is about, or nil.
func (e *Entry) Newest() *Generation {
	if len(e.Generations) == 0 {
		return nil
	}
	return &e.Generations[len(e.Generations)-1]
}

// Addresses returns every address that any generation of the entry claims, without duplicates,
// sorted.
func (e *Entry) Addresses() []netip.Addr {
	var all []netip.Addr
	for _, g := range e.Generations {
		for _, c := range g.Claims {
			all = append(all, c.Address)
		}
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return slices.Compact(all)
}

// Pending returns the number of steps with a pending DEL.
func (e *Entry) Pending() int {
	n := 0
	for _, g := range e.Generations {
		n += len(g.Steps)
	}
	return n
}

// Pod is the pod of an attachment as CNI_ARGS names it; empty outside Kubernetes.
type Pod struct {
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`
	UID       string `json:"uid,omitempty"`
}

// Generation is one ADD, with all that its DELs need.
type Generation struct {
	Number        uint64          `json:"number"` // grows with every ADD in this journal
	NetNS         NetNS           `json:"netns"`
	Args          string          `json:"args,omitempty"` // CNI_ARGS, as the runtime gave it
	Path          string          `json:"path"`           // CNI_PATH
	CNIVersion    string          `json:"cniVersion"`     // the chain's
	RuntimeConfig json.RawMessage `json:"runtimeConfig,omitempty"`
	Result        json.RawMessage `json:"result,omitempty"` // the best known, in its own version
	Claims        []Claim         `json:"claims,omitempty"`
	HostLinks     []HostLink      `json:"hostLinks,omitempty"`
	Host          Host            `json:"host"`
	Created       Time            `json:"created"`
	GracePeriod   time.Duration   `json:"gracePeriod,omitempty"` // of the ADD's configuration
	// Stores are the paths of plugins' stores that are not at their default, by plugin, of the ADD's
	// configuration.
	Stores map[string]string `json:"stores,omitempty"`
	Steps  []Step            `json:"steps"` // started, with a pending DEL, in chain order
	// Begun is set while a pass over the steps runs, and stays if the pass was cut off.
	Begun bool `json:"begun,omitempty"`
	// Occupant is the interface (index and MAC) that had the interface name in the namespace before
	// the ADD, or "". It does not belong to the ADD, and no DEL of the ADD may see it.
	Occupant string `json:"occupant,omitempty"`
}

// NetNS identifies a network namespace and says where the runtime put it. All numbers are zero if
// ADD could not open it. The kernel reuses inode numbers, but within one boot never a cookie.
// Cookie is zero on kernels before 5.14.
type NetNS struct {
	Path   string `json:"path,omitempty"`
	Dev    uint64 `json:"dev,omitempty"`
	Ino    uint64 `json:"ino,omitempty"`
	Cookie uint64 `json:"cookie,omitempty"`
	// NetDev is the inode of net/dev below the /proc entry of any process in the namespace. Each
	// namespace has another one, and it is visible even for processes that may not be inspected.
	// The kernel reuses it once the namespace is gone. It is zero where /proc has none.
	NetDev uint64 `json:"netDev,omitempty"`
}

// Known reports whether ADD identified the namespace.
func (n NetNS) Known() bool { return n.Ino != 0 }

// Same reports whether both are the same network namespace. An unknown one is the same as no other.
func (n NetNS) Same(o NetNS) bool {
	if !n.Known() || !o.Known() {
		return false
	}
	if n.Cookie != 0 && o.Cookie != 0 {
		return n.Cookie == o.Cookie
	}
	return n.Dev == o.Dev && n.Ino == o.Ino
}

// HostLink is the host's end of a container's interface.
type HostLink struct {
	Name string `json:"name"`
	MAC  string `json:"mac"`
}

// Interface identifies the container's interface of one ADD.
type Interface struct {
	MAC       string       `json:"mac,omitempty"` // lower case; "" if it identifies nothing
	Addresses []netip.Addr `json:"addresses,omitempty"`
}

// Known reports whether there is anything to compare.
func (i Interface) Known() bool { return i.MAC != "" || len(i.Addresses) > 0 }

// Host names the machine, the boot and the namespaces in which an ADD was seen.
type Host struct {
	BootID  string `json:"bootID"`
	Machine string `json:"machine"` // DMI product UUID, else machine-id
	MountNS string `json:"mountNS"` // as readlink of /proc/self/ns/mnt prints it
	PIDNS   string `json:"pidNS"`
	NetNS   string `json:"netNS,omitempty"`  // the namespace of the host's ends, chains and bridges
	TimeNS  string `json:"timeNS,omitempty"` // of CLOCK_BOOTTIME; "" on kernels before 5.6
}

// Time is an instant. Decisions use Boot, CLOCK_BOOTTIME in nanoseconds, which counts only within
// one boot; Wall is for people.
type Time struct {
	Boot int64     `json:"boot"`
	Wall time.Time `json:"wall"`
}

// Now returns the current time.
func Now() Time {
	return Time{Boot: BootNanos(), Wall: time.Now().UTC().Truncate(time.Millisecond)}
}

// BootNanos returns CLOCK_BOOTTIME in nanoseconds. It counts suspended time, and nobody can set it.
func BootNanos() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return 0
	}
	return ts.Nano()
}
