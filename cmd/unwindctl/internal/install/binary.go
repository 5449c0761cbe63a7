package install

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/durable"
	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
)

func (s Setup) binary() (string, error) {
	if given := cmp.Or(s.Binary, os.Getenv(binaryEnv)); given != "" {
		return filepath.Abs(given)
	}
	self, err := os.Executable()
	return filepath.Join(filepath.Dir(self), netconf.Name), err
}

// verifyTimeout limits how long a program may take to report its version.
const verifyTimeout = 10 * time.Second

// VerifyBinary runs the plugin that is to be installed. It returns an error if the file is for
// another architecture, or is another program. It is called before an install changes anything.
func (s Setup) VerifyBinary(ctx context.Context) error {
	path, err := s.binary()
	if err != nil {
		return err
	}
	const hint = "set --binary to the path of unwind's plugin; make build puts it next to unwindctl"
	about, versions, err := AskVersion(ctx, path)
	switch {
	case ctx.Err() != nil:
		return errors.New("interrupted; nothing was changed")
	case err != nil:
		return term.WithHint(hint, "plugin %s: %w", path, err)
	case !strings.Contains(about, netconf.Name) || !slices.Contains(versions, "1.0.0"):
		return term.WithHint(hint, "plugin %s is not unwind; it reports: %s", path,
			term.OneLine(about))
	}
	return nil
}

// SupportedVersions runs a plugin to get its supported CNI versions (SPEC 1.1 §2 VERSION).
func SupportedVersions(ctx context.Context, path string) ([]string, error) {
	answer, _, err := ask(ctx, []string{path}, "CNI_COMMAND=VERSION")
	if err != nil {
		return nil, fmt.Errorf("cannot run it: %w", err)
	}
	var version struct {
		Versions []string `json:"supportedVersions"`
	}
	if err := json.Unmarshal(answer.Bytes(), &version); err != nil {
		return nil, errors.New("not a CNI plugin: its output for VERSION is not JSON")
	}
	return version.Versions, nil
}

// AskVersion calls SupportedVersions, and then runs the plugin without CNI_COMMAND to get its
// version line.
func AskVersion(ctx context.Context, path string) (about string, versions []string, err error) {
	if versions, err = SupportedVersions(ctx, path); err != nil {
		return "", nil, err
	}
	_, words, _ := ask(ctx, []string{path}) // some releases of skel return an error here
	about, _, _ = strings.Cut(strings.TrimSpace(words.String()), "\n")
	return about, versions, nil
}

// ask runs a program with arguments for at most verifyTimeout. The environment is this program's
// without CNI's variables, plus env.
func ask(ctx context.Context, command []string, env ...string) (
	stdout, stderr bytes.Buffer, err error,
) {
	ctx, cancel := context.WithTimeout(ctx, verifyTimeout)
	defer cancel()
	for {
		stdout, stderr, err = run(ctx, command, env)
		// Retry while the file is open for writing: a child of this process may hold the inherited
		// descriptor until the child executes its program.
		if !errors.Is(err, syscall.ETXTBSY) || ctx.Err() != nil {
			return stdout, stderr, err
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func run(ctx context.Context, command, env []string) (stdout, stderr bytes.Buffer, err error) {
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Env = append(slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, "CNI_")
	}), env...)
	cmd.Stdin = strings.NewReader(`{"cniVersion": "1.0.0"}`)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.WaitDelay = time.Second
	// In its own process group, the program does not receive the terminal's signals.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	err = cmd.Run()
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		err = fmt.Errorf("no answer within %s", verifyTimeout)
	}
	var at *fs.PathError
	if errors.As(err, &at) {
		err = at.Err
	}
	return stdout, stderr, err
}

// versionOf returns the version in a plugin's version line, or "" if the plugin is not unwind.
func versionOf(about string) string {
	_, rest, _ := strings.Cut(about, "CNI plugin "+netconf.Name+" ")
	version, _, _ := strings.Cut(rest, ":")
	return version
}

// PluginVersion returns the version of the installed plugin, or "" if it is unknown.
func (s Setup) PluginVersion(ctx context.Context) string {
	about, _, _ := AskVersion(ctx, s.plugin())
	return versionOf(about)
}

func (s Setup) plugin() string { return filepath.Join(s.BinDir, netconf.Name) }

// PluginMissing reports whether the installed plugin is missing, not a regular file or not
// executable, so that no pod can start.
func (s Setup) PluginMissing() bool {
	info, err := os.Stat(s.plugin())
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) ||
		err == nil && (!info.Mode().IsRegular() || info.Mode().Perm()&0o111 == 0)
}

// PluginRemedy returns what to do if a conflist runs unwind, but the plugin is missing. install
// refuses a wrapped conflist.
func PluginRemedy(c *netconf.Conflist, binDir string) string {
	if Wrapped(c) {
		return "copy the plugin unwind into " + binDir + ", or run unwindctl unwrap --in-place " + c.Path
	}
	return "run unwindctl install, or unwindctl off"
}

// MakeRoom is the remedy if the plugin cannot be written.
const MakeRoom = "make that directory writable and free space there, or set --cni-bin-dir to " +
	"another of the runtime's plugin directories"

// InstallBinary is the step that installs the plugin atomically. A running instance of the previous
// plugin is not affected. The step returns an error if a newer release has written the journal,
// because the plugin could not read it.
func (s Setup) InstallBinary(ctx context.Context) ([]*Change, error) {
	from, err := s.binary()
	if err != nil {
		return nil, err
	}
	if err := s.checkBinDir(); err != nil {
		return nil, err
	}
	nothing := func(*journal.Tx) error { return nil }
	store := &journal.Store{Dir: s.stateDir()}
	if err := store.View(ctx, nothing); errors.Is(err, journal.ErrNewer) {
		return nil, term.WithHint("install the newer release, or run that release's unwindctl sweep "+
			"until the journal is empty and then remove "+store.Path(),
			"the plugin stays unchanged: %w", err)
	}
	one, err := put(s.plugin(), 0o755, func() (io.ReadCloser, error) { return os.Open(from) })
	changes := []*Change{one}
	if err == nil { // run the plugin in the directory where the runtime will run it
		changes = append(changes, &Change{apply: func(*Change) error {
			if _, _, err := AskVersion(ctx, s.plugin()); err != nil {
				return term.WithHint("set --binary to a plugin that runs in that directory",
					"the plugin was installed, but does not run: %s: %w", s.plugin(), err)
			}
			return nil
		}})
	}
	return changes, err
}

// sameContent reports whether a reader and a file have the same content. It reads both in pieces to
// save memory in the agent. It returns false if either cannot be read.
func sameContent(a io.Reader, path string) bool {
	b, err := os.Open(path)
	if err != nil {
		return false
	}
	defer b.Close()
	var pieces [2][64 << 10]byte
	for {
		n, errA := io.ReadFull(a, pieces[0][:])
		m, errB := io.ReadFull(b, pieces[1][:])
		if !bytes.Equal(pieces[0][:n], pieces[1][:m]) {
			return false
		}
		if errA != nil || errB != nil { // both end here, or one cannot be read
			return errors.Is(errB, errA) &&
				(errors.Is(errA, io.EOF) || errors.Is(errA, io.ErrUnexpectedEOF))
		}
	}
}

func (s Setup) checkBinDir() error {
	if problem := durable.NotDirectory(s.BinDir); problem != "" {
		return term.WithHint("set --cni-bin-dir to the runtime's plugin directory",
			"plugin directory %s: %s", s.BinDir, problem)
	}
	if NoExec(s.BinDir) {
		return term.WithHint("remount it without noexec, or set --cni-bin-dir to the runtime's plugin "+
			"directory", "plugin directory %s is mounted noexec, so no pod could start", s.BinDir)
	}
	return nil
}

// NoExec reports whether a mount option prevents programs in a directory from running.
func NoExec(dir string) bool {
	var st unix.Statfs_t
	return unix.Statfs(dir, &st) == nil && st.Flags&unix.ST_NOEXEC != 0
}
