// Package journal durably records the pending DEL of every delegate before that delegate's ADD
// runs. It knows nothing about plugins.
package journal

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// Key is the name of an attachment: one interface of one container in one network.
type Key struct {
	Network     string `json:"network"`
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifname"`
}

// Malformed reports whether k names no attachment, because a record's key in the journal file is
// damaged. If so, k.Network is the whole damaged key.
func (k Key) Malformed() bool { return k.ContainerID == "" && k.IfName == "" }

// String returns network/containerID/ifname. No part may contain a slash (SPEC 1.1 §2
// "Parameters").
func (k Key) String() string {
	if k.Malformed() {
		return shorten(k.Network)
	}
	return shorten(k.Network + "/" + k.ContainerID + "/" + k.IfName)
}

// shorten cuts a text to at most 200 bytes. If the text is not printable, shorten escapes it as in
// a URL, because a damaged key may contain any byte.
func shorten(text string) string {
	const longest, mark = 200, "…"
	if strings.ContainsFunc(text, func(r rune) bool {
		return r == utf8.RuneError || !unicode.IsPrint(r)
	}) {
		var safe []byte
		for _, c := range []byte(text) {
			if c > ' ' && c <= '~' {
				safe = append(safe, c)
			} else {
				safe = fmt.Appendf(safe, "%%%02X", c)
			}
		}
		text = string(safe)
	}
	if len(text) <= longest {
		return text
	}
	return strings.ToValidUTF8(text[:longest-len(mark)], "") + mark
}

// State is the stage of an attachment between its ADD and its last DEL.
type State string

// The states. An attachment that is Gone has no record.
const (
	Gone State = ""
	// an ADD is running; if the attachment's lock is free, the ADD ended without printing a result
	Adding State = "adding"
	// a delegate's result is recorded; the ADD has succeeded, unless it still runs or was killed
	Live        State = "live"
	RollingBack State = "rolling-back" // the ADD failed; it has pending DELs
	Deleting    State = "deleting"     // the runtime or a sweep deletes it; it has pending DELs
	Abandoned   State = "abandoned"    // dropped by "unwindctl forget"; the runtime's DEL will succeed
)

// edges lists every legal change of state. Gone changes to Deleting at a DEL without a record, to
// Live or RollingBack if the journal lost the record of a running ADD, and to Abandoned if an
// operator forgets an attachment whose record is damaged.
var edges = map[State][]State{
	Gone:        {Adding, Live, RollingBack, Deleting, Abandoned},
	Adding:      {Adding, Live, RollingBack, Deleting, Abandoned, Gone},
	Live:        {Live, RollingBack, Deleting, Abandoned, Gone},
	RollingBack: {RollingBack, Abandoned, Gone},
	Deleting:    {Deleting, Abandoned, Gone},
	Abandoned:   {Abandoned, Gone},
}

func CheckEdge(from, to State) error {
	if slices.Contains(edges[from], to) {
		return nil
	}
	return fmt.Errorf("journal: illegal change of state from %q to %q; please report this bug in "+
		"unwind", from, to)
}

// Record contains all that the journal stores about one ADD, including everything that its DELs
// need. If a runtime reuses a container ID before it sends the DEL (nerdctl, podman and Nomad do),
// the attachment has several records.
type Record struct {
	Key
	Number uint64 `json:"number"` // grows with every ADD in this journal
	Added  Added  `json:"added"`
	Got    Got    `json:"got,omitzero"`

	State  State  `json:"state"`
	Cause  string `json:"cause,omitempty"`  // why it is in its state (decide.Reason.Code)
	Reason string `json:"reason,omitempty"` // the cause in words
	Since  Time   `json:"since"`            // when the record entered this state
	Steps  []Step `json:"steps,omitempty"`  // pending DELs, in chain order
	// Guarded is set if the mass-release guard has kept the attachment (see sweep.MassReleaseError).
	Guarded bool `json:"guarded,omitempty"`

	Updated Time `json:"updated"`
}

// Added is the input of the ADD. It never changes.
type Added struct {
	Pod        Pod    `json:"pod,omitzero"`
	NetNS      NetNS  `json:"netns"`
	Args       string `json:"args,omitempty"`       // CNI_ARGS, as the runtime set it
	Path       string `json:"path,omitempty"`       // CNI_PATH
	CNIVersion string `json:"cniVersion,omitempty"` // the chain's version
	// Plugins contains the types of the chain's delegates.
	Plugins []string `json:"plugins,omitempty"`
	// Env contains PATH, LD_LIBRARY_PATH and XTABLES_LIBDIR of the ADD's process, each with only the
	// absolute directories that existed. It is nil if it is unknown.
	Env           map[string]string `json:"env,omitempty"`
	RuntimeConfig json.RawMessage   `json:"runtimeConfig,omitempty"`
	Host          Host              `json:"host"`
	At            Time              `json:"at"`
	GracePeriod   time.Duration     `json:"gracePeriod,omitempty"` // from the configuration
	// Observed is set if the network's configuration allowed no sweep (see netconf.Conf.Observes).
	Observed bool `json:"observed,omitempty"`
	// Occupant is the interface (index and MAC) that already had the ADD's interface name in the
	// namespace before the ADD, or "". No DEL of this ADD may touch it.
	Occupant string `json:"occupant,omitempty"`
}

// Got records the outcome of the ADD so far.
type Got struct {
	Result    json.RawMessage `json:"result,omitempty"` // the last known result
	Claims    []Claim         `json:"claims,omitempty"`
	HostLinks []HostLink      `json:"hostLinks,omitempty"`
}

// Clone returns a copy with its own claims and steps.
func (e *Record) Clone() *Record {
	c := *e
	c.Got.Claims, c.Steps = slices.Clone(e.Got.Claims), slices.Clone(e.Steps)
	return &c
}

// Addresses returns every address that the record claims, sorted.
func (e *Record) Addresses() []netip.Addr {
	var all []netip.Addr
	for _, c := range e.Got.Claims {
		all = append(all, c.Address)
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return slices.Compact(all)
}

// ClaimsAddress reports whether the record claims an address, as IPv4 or mapped to IPv6.
func (e *Record) ClaimsAddress(address netip.Addr) bool {
	return slices.ContainsFunc(e.Got.Claims,
		func(c Claim) bool { return c.Address.Unmap() == address.Unmap() })
}

// Freed reports whether the DEL of the delegate that allocated a claimed address is done.
func (e *Record) Freed(c Claim) bool {
	return !slices.ContainsFunc(e.Steps, func(s Step) bool { return s.Index == c.Step })
}

// Abandon changes the record's state to Abandoned, and drops the data for its DELs. The record then
// only lets the runtime's later DEL succeed.
func (e *Record) Abandon(reason string) {
	*e = Record{
		Key: e.Key, Number: e.Number, Updated: e.Updated,
		Added: Added{Pod: e.Added.Pod, NetNS: e.Added.NetNS, At: e.Added.At,
			Host: Host{BootID: e.Added.Host.BootID}},
		State: Abandoned, Cause: e.Cause, Reason: reason, Since: e.Since,
	}
}

// Step is a delegate that may have allocated or created something, and whose DEL is pending.
type Step struct {
	Index int    `json:"index"` // position in the chain, from 0
	Type  string `json:"type"`
	// Config is the delegate's stdin, without prevResult. It is from the ADD or, if the journal did
	// not record the ADD, from the chain at the time of the DEL.
	Config json.RawMessage `json:"config"`
	ADD    Outcome         `json:"add,omitempty"`
	// MayAllocate is set if the delegate may hold an address that no claim names: its IPAM plugin is
	// not host-local, or unwind does not know the delegate (see netconf.Chain.Steps).
	MayAllocate bool `json:"mayAllocate,omitempty"`
	// Tries counts the attempts at the delegate's DEL. The DELs with the fewest tries run first.
	Tries int `json:"tries,omitempty"`
	// Failures counts the failed attempts, except those during a pause. Absent counts the failed
	// attempts while the network's chain lacks the delegate: the first one always, and later ones
	// except those during a pause. A failure while the chain contains the delegate resets Absent to
	// 0. A failure while the chain is unknown leaves Absent unchanged.
	Failures int    `json:"failures,omitempty"`
	Absent   int    `json:"absent,omitempty"`
	Last     string `json:"last,omitempty"` // the error, if the last attempt failed
	Code     uint   `json:"code,omitempty"` // the error code, never 0, if the last attempt failed
	Next     Next   `json:"next,omitzero"`
	// Started is set once the step's DEL has started. Its address may then be free (see decide.Gets).
	Started bool `json:"started,omitempty"`
}

// Next says what the next attempt of a step's DEL waits for. The zero value waits for nothing.
type Next struct {
	Why Why   `json:"why,omitempty"`
	At  int64 `json:"at,omitempty"` // when the wait is over, if it has an end (CLOCK_BOOTTIME, ns)
}

// Why says in one word what a DEL waits for, in the journal, unwindctl's output and metrics.
type Why string

const (
	RunNow       Why = ""          // nothing: the DEL can run now
	ForBackoff   Why = "backoff"   // the pause after a failed attempt
	ForContainer Why = "container" // it could release what another ADD of the container or pod uses
	ForRules     Why = "rules"     // a later plugin's rules or host ports may still use its address
)

// Blocked reports whether a DEL waits for something other than the end of a pause.
func (w Why) Blocked() bool { return w != RunNow && w != ForBackoff }

type Outcome string

const (
	AddPassed  Outcome = ""        // the ADD succeeded, or has not run yet
	AddUnknown Outcome = "unknown" // unwind or the delegate was killed, so the ADD may have failed
	AddFailed  Outcome = "failed"  // the delegate returned an error by itself
)

// Claim is an address that a delegate added to the result. The later delegates of the chain get the
// address in prevResult, and may create rules for it.
type Claim struct {
	Address netip.Addr `json:"address"`
	Step    int        `json:"step"` // the Index of the step whose delegate added the address
	// Pool is the directory in which host-local keeps the address, or "" for any other IPAM plugin.
	// netconf.SharedAddresses says when two attachments must not have the same address.
	Pool string `json:"pool,omitempty"`
}

// Pod is from CNI_ARGS, as Kubernetes runtimes set them. podman sets only the name.
type Pod struct {
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`
	UID       string `json:"uid,omitempty"`
}

// NetNS identifies a network namespace. Path is where the runtime mounted it. All numbers are zero
// if the ADD could not open the namespace. Within a boot, the kernel may reuse an inode, but never
// a cookie.
type NetNS struct {
	Path   string `json:"path,omitempty"`
	Dev    uint64 `json:"dev,omitempty"`
	Ino    uint64 `json:"ino,omitempty"`
	Cookie uint64 `json:"cookie,omitempty"` // 0 on kernels before 5.14
}

// Known reports whether the ADD identified the namespace.
func (n NetNS) Known() bool { return n.Ino != 0 }

// Same reports whether both network namespaces are known, and are the same.
func (n NetNS) Same(o NetNS) bool {
	if n.Known() && n.Cookie != 0 && o.Cookie != 0 {
		return n.Cookie == o.Cookie
	}
	return n.Known() && n.Dev == o.Dev && n.Ino == o.Ino
}

// HostLink is the host end of a container's interface.
type HostLink struct {
	Name string `json:"name"`
	MAC  string `json:"mac"`
}

// Host names the machine, the boot and the namespaces in which an ADD ran.
type Host struct {
	BootID  string `json:"bootID"`
	Machine string `json:"machine"` // DMI product UUID, else machine-id
	MountNS string `json:"mountNS"` // the link text of /proc/self/ns/mnt
	PIDNS   string `json:"pidNS"`
	NetNS   string `json:"netNS,omitempty"`  // contains the host's bridges and firewall rules
	TimeNS  string `json:"timeNS,omitempty"` // can shift CLOCK_BOOTTIME; "" on kernels before 5.6
}

// Time is an instant on two clocks. Decisions use Boot, which is valid only within one boot. Wall
// is for people to read.
type Time struct {
	Boot int64     `json:"boot"`
	Wall time.Time `json:"wall"`
}

func Now() Time {
	return Time{Boot: BootNanos(), Wall: time.Now().UTC().Truncate(time.Millisecond)}
}

// BootNanos returns the time of CLOCK_BOOTTIME in nanoseconds. This clock counts suspended time and
// cannot be set.
func BootNanos() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return 0
	}
	return ts.Nano()
}
