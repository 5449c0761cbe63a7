package install

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/durable"
	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/journal"
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
	MeshInTheWay    Reason = "mesh-in-the-way"  // another program keeps changing unwind's conflist
	CiliumExclusive Reason = "cilium-exclusive" // cilium has renamed unwind's conflist
	PluginMissing   Reason = "plugin-missing"   // unwind was in use, but now lacks its plugin
	Refused         Reason = "refused"          // the install was refused, or failed
)

var Reasons = []Reason{On, Starting, AnotherAgent, Off, NoProvider, MeshInTheWay, CiliumExclusive,
	PluginMissing, Refused}

// Ready reports whether a node is in the wanted state: unwind is in use, or was switched off.
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

// ReasonOf returns the reason in an install's error. It returns On for nil, and Refused for an
// error that contains no reason.
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

// Obstacle returns the reason not to use unwind on this node, or nil. It does not check whether the
// provider's conflist can be used. While there is an obstacle, the agent keeps unwind's conflist
// out of use. If stateDir is "", Obstacle uses the setup's state directory. There are two
// obstacles:
//
//  1. Somebody has switched unwind off.
//  2. cilium has renamed unwind's conflist, as it renames all conflists but its own, unless
//     cni.exclusive is false. It would soon rename a new one, too, so the agent writes none.
func (s Setup) Obstacle(stateDir string) *Obstacle {
	stateDir = cmp.Or(stateDir, s.stateDir())
	if off := ReadOff(stateDir); off != nil {
		remedy := "run unwindctl on"
		if err := keptOff(stateDir); err != nil {
			remedy = term.HintOf(err)
		}
		return NewObstacle(Off, remedy, "%s", off)
	}
	if path := s.renamed(); path != "" {
		return NewObstacle(CiliumExclusive,
			"install cilium with cni.exclusive=false, then run unwindctl on; see "+
				"scripts/providers/cilium.md", "cilium has renamed unwind's file to %s, so pods do not go "+
				"through unwind", path)
	}
	return nil
}

// renamedBy is the suffix that cilium adds to other programs' conflists if cni.exclusive is true.
const renamedBy = ".cilium_bak"

// renamed returns the path of unwind's conflist if cilium has renamed it and there is no new one,
// or else "".
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
// installs unwind. Its modification time is the time when unwind was switched off, and its content
// says by whom. An administrator can also create it with touch.
const OffName = node.OffName

// somebody is the value of OffState.By if the file OffName names nobody.
const somebody = "somebody"

// OffState records when unwind was switched off, and by whom.
type OffState struct {
	Since time.Time
	By    string
}

func (o *OffState) String() string {
	text := "unwind has been off since " + term.Time(o.Since)
	if o.By != somebody {
		text += ", switched off by " + o.By
	}
	return text
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

// ByFlag is the value of OffState.By if an agent with --off has switched unwind off. The next agent
// without --off switches it on again.
const ByFlag = "run --off"

// keptOff returns an error if unwind is off because of a running agent's flag --off. If somebody
// switched unwind on, that agent would switch it off again.
func keptOff(stateDir string) error {
	off, pid := ReadOff(stateDir), AgentProcess(stateDir)
	if off == nil || off.By != ByFlag || pid == "" {
		return nil
	}
	return term.WithHint("start the agent without --off (chart value unwindOff: false)",
		"the agent (process %s) runs with --off, which keeps unwind off", pid)
}

// WriteOff switches unwind off for all agents. If unwind is already off, WriteOff keeps the file,
// unless only an agent's --off has switched unwind off. On a full disk, it creates an empty file,
// which switches unwind off but names nobody. For --off, it creates none, because no later agent
// would switch unwind on again.
func WriteOff(stateDir, by string) error {
	if was := ReadOff(stateDir); was != nil && (was.By != ByFlag || by == ByFlag) {
		return nil
	}
	path := filepath.Join(stateDir, OffName)
	err := os.MkdirAll(stateDir, 0o700)
	if err == nil {
		err = durable.Replace(path, strings.NewReader(by+"\n"), 0o600)
	}
	if err != nil && (by == ByFlag || durable.Create(path) != nil) {
		return fmt.Errorf("cannot record that unwind is switched off: %w", err)
	}
	return nil
}

// SwitchOn removes the files that prevent agents from installing unwind: the off switch, and
// unwind's conflist if cilium has renamed it.
func (s Setup) SwitchOn(stateDir string) (err error) {
	if ReadOff(stateDir) != nil {
		err = durable.Remove(filepath.Join(stateDir, OffName))
	}
	if path := s.renamed(); path != "" {
		err = errors.Join(err, durable.Remove(path))
	}
	return err
}

// AgentLockName is the name of the agent's lock file in the state directory.
const AgentLockName = "agent.lock"

// ErrAgentBusy means that another agent holds the lock.
var ErrAgentBusy = errors.New("busy")

// AgentLock is an flock on a file in the state directory, so that only one agent manages a node.
// This process holds the lock until it calls Release or exits.
type AgentLock struct{ file *os.File }

// TakeAgentLock takes the lock. If another agent holds it, TakeAgentLock returns ErrAgentBusy
// immediately. It creates the file if necessary; the file stays after Release.
func TakeAgentLock(stateDir string) (*AgentLock, error) {
	f, err := (*os.File)(nil), fs.ErrNotExist
	// retry, because a sweep that ends may remove the state directory while it is empty
	for tries := 0; tries < 10 && errors.Is(err, fs.ErrNotExist); tries++ {
		f, err = journal.OpenIn(stateDir, AgentLockName)
	}
	if err == nil {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}
	switch {
	case err == nil:
		return &AgentLock{f}, nil
	case errors.Is(err, unix.EISDIR):
		err = fmt.Errorf("%s is not a regular file; move it out of the way", AgentLockPath(stateDir))
	case errors.Is(err, unix.EWOULDBLOCK):
		err = ErrAgentBusy
	}
	_ = f.Close() // f may be nil, which Close accepts
	return nil, fmt.Errorf("the agent's lock: %w", err)
}

// AgentLockPath returns the path of the lock's file.
func AgentLockPath(stateDir string) string { return filepath.Join(stateDir, AgentLockName) }

// InPlace reports whether the locked file is still in the state directory. If it is not, another
// agent can create and lock a new file there.
func (l *AgentLock) InPlace(stateDir string) bool {
	ours, err := l.file.Stat()
	there, lstatErr := os.Lstat(AgentLockPath(stateDir))
	return err == nil && lstatErr == nil && os.SameFile(ours, there)
}

// Release releases the lock, even if a child process has inherited the file and not yet executed
// its program.
func (l *AgentLock) Release() {
	_ = unix.Flock(int(l.file.Fd()), unix.LOCK_UN)
	_ = l.file.Close()
}

// AgentProcess returns the process ID of the agent that holds the lock, or "" if there is none or
// it is not visible: the kernel omits processes of other PID namespaces. AgentProcess takes no lock
// and opens no file of the state directory. It reads /proc/locks (proc_locks(5)), which has lines
// like:
//
//	1: FLOCK  ADVISORY  WRITE 1234 fd:01:131090 0 EOF
func AgentProcess(stateDir string) string {
	var st unix.Stat_t
	if unix.Lstat(AgentLockPath(stateDir), &st) != nil {
		return ""
	}
	f, err := os.Open("/proc/locks")
	if err != nil {
		return ""
	}
	defer f.Close()
	file := fmt.Sprintf("%02x:%02x:%d", unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino)
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if part := strings.Fields(lines.Text()); len(part) == 8 && part[1] == "FLOCK" &&
			part[3] == "WRITE" && part[5] == file {
			return part[4]
		}
	}
	return ""
}
