package install

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/durable"
	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/plugin/netconf"
)

// Reason is the reason why pods of a node do not go through unwind, or On.
type Reason string

const (
	On              Reason = "on"
	Starting        Reason = "starting"         // the agent has not finished its first check
	AnotherAgent    Reason = "another-agent"    // this agent waits until another one exits
	Off             Reason = "off"              // somebody has switched unwind off
	NoProvider      Reason = "no-provider"      // no provider's conflist exists
	MeshInTheWay    Reason = "mesh-in-the-way"  // a program keeps using unwind's file
	CiliumExclusive Reason = "cilium-exclusive" // cilium has renamed unwind's file
	PluginMissing   Reason = "plugin-missing"   // unwind's conflist exists, but the plugin does not
	Refused         Reason = "refused"          // the install was refused, or failed
)

var Reasons = []Reason{On, Starting, AnotherAgent, Off, NoProvider, MeshInTheWay, CiliumExclusive,
	PluginMissing, Refused}

// Ready reports whether a node is in the wanted state. A node that was switched off is ready.
func (r Reason) Ready() bool { return r == On || r == Off }

// Obstacle is an error with the reason why pods do not go through unwind.
type Obstacle struct {
	Reason Reason
	Err    error
}

func NewObstacle(reason Reason, remedy, format string, args ...any) *Obstacle {
	return &Obstacle{reason, term.WithHint(remedy, format, args...)}
}

func (o *Obstacle) Error() string { return o.Err.Error() }

func (o *Obstacle) Unwrap() error { return o.Err }

// ReasonOf returns the reason that an install's error contains, or On if err is nil.
func ReasonOf(err error) Reason {
	var o *Obstacle
	switch {
	case err == nil:
		return On
	case errors.As(err, &o):
		return o.Reason
	}
	return Refused
}

// Obstacle returns the reason, or nil, why unwind must not be used on this node with any provider's
// file. While there is an obstacle, our file must not exist. If stateDir is "", the directory in
// our conflist applies.
//
//  1. Somebody has switched unwind off.
//  2. cilium has renamed our file, as it does with all others unless cni.exclusive is false. It
//     would do so again immediately, so the file is written again only after unwindctl on.
func (s Setup) Obstacle(stateDir string) *Obstacle {
	if off := ReadOff(cmp.Or(stateDir, s.stateDir())); off != nil {
		return NewObstacle(Off, "run unwindctl on", "%s", off)
	}
	if path := s.renamed(); path != "" {
		return NewObstacle(CiliumExclusive,
			"install cilium with cni.exclusive=false, then run unwindctl on; see "+
				"scripts/providers/cilium.md", "cilium has renamed unwind's file to %s, so pods do not go "+
				"through unwind", path)
	}
	return nil
}

// renamedBy is the suffix that cilium adds to the names of other files if cni.exclusive is set.
const renamedBy = ".cilium_bak"

// renamed returns the path of our file if cilium has renamed it and there is no new one, else "".
func (s Setup) renamed() string {
	paths, _ := filepath.Glob(filepath.Join(s.ConfDir, "*"+renamedBy))
	for _, path := range paths {
		if c, _ := netconf.ReadConflist(path); ours(c) && !durable.Exists(s.Path()) {
			return path
		}
	}
	return ""
}

// OffName is the file in the state directory that switches unwind off: while it exists, no agent
// installs unwind. Its modification time shows since when, and its text by whom. An administrator
// can also create it with touch.
const OffName = node.OffName

// somebody is the value of OffState.By if the file names nobody.
const somebody = "somebody"

// OffState records since when unwind is switched off, and by whom.
type OffState struct {
	Since time.Time
	By    string
}

func (o *OffState) String() string {
	return fmt.Sprintf("unwind has been off since %s, switched off by %s", term.Time(o.Since), o.By)
}

// ReadOff returns the record of the off switch, or nil if unwind is not switched off. A file that
// cannot be read also switches unwind off.
func ReadOff(stateDir string) *OffState {
	path := filepath.Join(stateDir, OffName)
	info, err := os.Lstat(path)
	if err != nil {
		return nil
	}
	text, _ := netconf.ReadFile(path)
	by := term.OneLine(strings.TrimSpace(string(text[:min(len(text), 256)])))
	return &OffState{info.ModTime(), cmp.Or(by, somebody)}
}

// WriteOff switches unwind off for all agents. It keeps an existing record of who did so first. On
// a full disk it writes an empty file, which also switches unwind off but does not name anybody.
func WriteOff(stateDir, by string) error {
	if ReadOff(stateDir) != nil {
		return nil
	}
	path := filepath.Join(stateDir, OffName)
	err := os.MkdirAll(stateDir, 0o700)
	if err == nil {
		err = durable.Replace(path, strings.NewReader(by+"\n"), 0o600)
	}
	if err != nil && durable.Create(path) != nil {
		return fmt.Errorf("cannot record that unwind is switched off: %w", err)
	}
	return nil
}

// SwitchOn removes the files that keep agents from installing unwind: the off switch, and our file
// if cilium has renamed it.
func (s Setup) SwitchOn(stateDir string) (err error) {
	if ReadOff(stateDir) != nil {
		err = durable.Remove(filepath.Join(stateDir, OffName))
	}
	if path := s.renamed(); path != "" {
		err = errors.Join(err, durable.Remove(path))
	}
	return err
}
