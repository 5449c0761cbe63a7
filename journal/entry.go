// Package journal records, durably and before it happens, every delegated ADD that is owed a DEL.
//
// It knows nothing of plugins: it stores entries, finds them by attachment, pod and address, and hands out the lock of
// an attachment. What a crash leaves behind is said at each type and function.
package journal

import (
	"encoding/json"
	"fmt"
	"net/netip"
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

// String returns network/containerID/ifname. None of the three can hold a slash (SPEC 1.1 §2 "Parameters").
func (k Key) String() string { return k.Network + "/" + k.ContainerID + "/" + k.IfName }

// State says where an attachment is between its ADD and its last DEL.
type State string

// The states. An attachment that is Gone has no entry.
const (
	Gone      State = ""
	Adding    State = "adding"    // an ADD runs; with the attachment's lock free it died before it printed success
	Live      State = "live"      // the ADD succeeded
	Unwinding State = "unwinding" // the ADD failed, DELs are owed
	Removing  State = "removing"  // the runtime asked for a DEL, some are owed
)

// edges holds every legal change of state. Gone to Removing is a DEL of an attachment that was added before unwind was
// installed, or whose entry was lost. Back to Adding is a new generation over an old one that could not be undone whole.
var edges = map[State][]State{
	Gone:      {Adding, Removing},
	Adding:    {Adding, Live, Unwinding, Removing, Gone},
	Live:      {Removing, Gone},
	Unwinding: {Unwinding, Gone, Adding},
	Removing:  {Removing, Gone, Adding},
}

// CheckEdge returns an error unless an attachment may go from one state to the other.
func CheckEdge(from, to State) error {
	if !slices.Contains(edges[from], to) {
		return fmt.Errorf("journal: an attachment cannot go from state %q to %q", from, to)
	}
	return nil
}

// Entry is what the journal holds of one attachment.
//
// A runtime may use a container ID again (nerdctl, podman and Nomad do) while an earlier ADD of it still waits for its
// DEL, so an entry has one Generation for each ADD that is not yet undone, oldest first. State is that of the newest;
// all the others are being undone.
type Entry struct {
	Key
	State       State        `json:"state"`
	Pod         Pod          `json:"pod,omitzero"`
	Generations []Generation `json:"generations"`
	Reason      string       `json:"reason,omitempty"` // why the entry is as it is, in words
	Since       Time         `json:"since,omitzero"`   // in this state; zero in entries of the first release
	Updated     Time         `json:"updated"`
}

// Outline is what is known of an attachment without decoding its entry.
type Outline struct {
	Key
	State  State
	BootID string // of the newest generation, as is NetNS, whose Cookie is left out
	NetNS  NetNS
}

// Newest returns the generation that State speaks of, or nil.
func (e *Entry) Newest() *Generation {
	if len(e.Generations) == 0 {
		return nil
	}
	return &e.Generations[len(e.Generations)-1]
}

// Addresses returns every address that any generation of the entry claims, without duplicates, sorted.
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

// Pending returns the number of steps that are owed a DEL.
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
	Result        json.RawMessage `json:"result,omitempty"` // the best known, in CNIVersion
	Claims        []Claim         `json:"claims,omitempty"`
	HostLinks     []HostLink      `json:"hostLinks,omitempty"`
	Host          Host            `json:"host"`
	Created       Time            `json:"created"`
	GracePeriod   time.Duration   `json:"gracePeriod,omitempty"` // of the ADD's configuration
	Steps         []Step          `json:"steps"`                 // those that were started and are owed a DEL, in the chain's order
	Undo          Undo            `json:"undo,omitzero"`
}

// Step is one delegate that was started.
type Step struct {
	Index  int             `json:"index"` // in the chain
	Type   string          `json:"type"`
	Config json.RawMessage `json:"config"` // its stdin, without prevResult

	Attempts  int    `json:"attempts,omitempty"` // DELs tried
	LastError string `json:"lastError,omitempty"`
	LastCode  uint   `json:"lastCode,omitempty"` // CNI error code
	RetryAt   int64  `json:"retryAt,omitempty"`  // no sweep tries a DEL that failed before (CLOCK_BOOTTIME, nanoseconds)
	Parked    bool   `json:"parked,omitempty"`   // undone but for an address that another attachment owns
	// Replaced is set if Config is that of the chain as it was at a DEL: the delegate had rejected its own of the ADD.
	Replaced bool `json:"replaced,omitempty"`
	// RepeatAt is set if the delegate was killed: an agent behind it may still work on what it was asked, so it gets
	// another DEL after this time (CLOCK_BOOTTIME, nanoseconds), also if one passed.
	RepeatAt int64 `json:"repeatAt,omitempty"`
}

// Claim is an address that a delegate's result had and the one before had not. That delegate keeps it under the
// container's ID; those after it know it from prevResult alone, so what they did is keyed by the address.
type Claim struct {
	Address netip.Addr `json:"address"`
	Step    int        `json:"step"` // index in the chain
	// Pool names the store of the node-local IPAM that gave the address, or is "". Only within one pool is an address
	// that two attachments have an error.
	Pool string `json:"pool,omitempty"`
}

// Receives says whether the delegate at an index of the chain was given the address in its prevResult.
func (c Claim) Receives(index int) bool { return index > c.Step }

// Freed says whether the delegate that brought a claimed address is undone: it may have another owner from then on.
func (g *Generation) Freed(c Claim) bool {
	return !slices.ContainsFunc(g.Steps, func(s Step) bool { return s.Index == c.Step })
}

// Undo counts the passes over the steps of a generation. A pass that Began and did not End was cut off: some step
// took more time than the runtime gave us.
type Undo struct {
	Began int `json:"began,omitempty"`
	Ended int `json:"ended,omitempty"`
}

// NetNS is a network namespace: where the runtime put it, and which one it is. All numbers are zero if it could not be
// opened at ADD. Inode numbers are used again by the kernel, a cookie never is within one boot; it is zero on kernels
// before 5.14.
type NetNS struct {
	Path   string `json:"path,omitempty"`
	Dev    uint64 `json:"dev,omitempty"`
	Ino    uint64 `json:"ino,omitempty"`
	Cookie uint64 `json:"cookie,omitempty"`
}

// Known says whether the namespace was identified.
func (n NetNS) Known() bool { return n.Ino != 0 }

// Same says whether both are the same network namespace. Unknown ones are the same as none.
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

// Host says on which machine, in which boot and from which namespaces an ADD was seen.
type Host struct {
	BootID  string `json:"bootID"`
	Machine string `json:"machine"` // DMI product UUID, else machine-id
	MountNS string `json:"mountNS"` // as readlink of /proc/self/ns/mnt prints it
	PIDNS   string `json:"pidNS"`
	NetNS   string `json:"netNS,omitempty"`  // of the host's ends, chains and bridges
	TimeNS  string `json:"timeNS,omitempty"` // of CLOCK_BOOTTIME; "" on kernels before 5.6
}

// Time is an instant: Boot, CLOCK_BOOTTIME in nanoseconds, is what decisions use, and counts only within one boot;
// Wall is for people.
type Time struct {
	Boot int64     `json:"boot"`
	Wall time.Time `json:"wall"`
}

// Now returns the current time.
func Now() Time {
	return Time{Boot: BootNanos(), Wall: time.Now().UTC().Truncate(time.Millisecond)}
}

// BootNanos returns CLOCK_BOOTTIME in nanoseconds: it counts suspended time and no one can set it.
func BootNanos() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return 0
	}
	return ts.Nano()
}

// Tombstone stays where an entry was settled without the runtime's own DEL, so that this DEL, when it comes late, runs
// nothing: its addresses may have another owner by then.
type Tombstone struct {
	Key
	NetNS  NetNS  `json:"netns"` // of the newest generation
	Reason string `json:"reason"`
	BootID string `json:"bootID"`
	Buried Time   `json:"buried"`
}
