package plugin

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/containernetworking/cni/pkg/types"
)

const (
	// lockFD is where a delegate finds the descriptor of the attachment's lock. It only has to hold it; the number is
	// out of the way of shell scripts, which use 3 to 9 by hand and from 10 on by themselves.
	lockFD = 20
	// maxStdout and maxStderr bound what is kept of a delegate's output, in bytes. The rest is read and dropped, so that
	// the delegate does not block.
	maxStdout = 4 << 20
	maxStderr = 64 << 10
	// pipeDelay is how long the output of a delegate that has exited is waited for: a daemon it left may hold the pipe.
	pipeDelay = 500 * time.Millisecond
	// groupDelay is how long the processes of a killed delegate are waited for.
	groupDelay = time.Second
	// busyDelay is how long a binary that is being written ("text file busy") is tried again.
	busyDelay = 2 * time.Second
)

// call is one execution of a delegate.
type call struct {
	command     string
	plugin      string // type
	path        string // CNI_PATH
	containerID string
	netns       string
	ifname      string
	args        string // CNI_ARGS
	stdin       []byte
	lock        *os.File // inherited as lockFD; nil without a journal
}

// failure is what went wrong with a call. Code, Msg and Details are the delegate's own if it printed a CNI error.
type failure struct {
	plugin  string
	command string
	code    uint
	msg     string
	details string
	// killed is set if the delegate did not end by itself: on our deadline, or by a signal. What it was doing may go on
	// in an agent behind it.
	killed bool
	// unstarted is set if the delegate never ran: it has taken nothing, and given back nothing.
	unstarted bool
}

// said is what the delegate said, with the details of its error.
func (f *failure) said() string {
	if f.details == "" {
		return f.msg
	}
	return f.msg + "; " + f.details
}

func (f *failure) Error() string {
	return f.inWords(f.msg)
}

// words is the error with the delegate's details, for people.
func (f *failure) words() string { return f.inWords(f.said()) }

func (f *failure) inWords(said string) string {
	words := map[string]string{"ADD": "add", "DEL": "delete", "CHECK": "check", "STATUS": "status", "GC": "gc"}[f.command]
	return fmt.Sprintf("plugin type=%q failed (%s): %s", f.plugin, words, said) // libcni's words
}

// run executes a delegate in a process group of its own and returns its standard output. It returns once the process
// has ended; if ctx ended it, once its whole group has. nil means that the process ran and exited with 0.
func (c *call) run(ctx context.Context, stderr io.Writer) ([]byte, *failure) {
	binary, err := findPlugin(c.plugin, c.path)
	if err != nil {
		return nil, c.notStarted(types.ErrPluginNotAvailable, err)
	}
	stdout, errout := &capped{max: maxStdout}, &capped{max: maxStderr}
	cmd, err := c.start(ctx, binary, stdout, errout)
	if err != nil {
		return nil, c.notStarted(types.ErrInternal, err)
	}
	err = cmd.Wait()
	if ctx.Err() != nil {
		awaitGroup(cmd.Process.Pid)
	}
	_, _ = stderr.Write(errout.kept.Bytes())
	if cmd.ProcessState.Success() && ctx.Err() == nil {
		if stdout.dropped {
			return nil, c.failed(types.ErrDecodingFailure, fmt.Sprintf("it printed more than %d bytes", maxStdout))
		}
		return stdout.kept.Bytes(), nil
	}
	return nil, c.explain(ctx, cmd.ProcessState, err, stdout.kept.Bytes(), errout.kept.Bytes())
}

// start starts the binary, again for a while if it is being written. Where RLIMIT_NOFILE leaves no room for lockFD it starts
// without: a delegate that outlives us is not waited for then.
func (c *call) start(ctx context.Context, binary string, stdout, stderr io.Writer) (*exec.Cmd, error) {
	giveUp := time.Now().Add(busyDelay)
	for {
		cmd := exec.CommandContext(ctx, binary)
		cmd.Env = c.environ()
		cmd.Stdin = bytes.NewReader(c.stdin)
		cmd.Stdout, cmd.Stderr = stdout, stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
		cmd.WaitDelay = pipeDelay
		if c.lock != nil {
			cmd.ExtraFiles = make([]*os.File, lockFD-3+1)
			cmd.ExtraFiles[lockFD-3] = c.lock
		}
		err := cmd.Start()
		if err == nil {
			return cmd, nil
		}
		if c.lock != nil && (errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.EBADF)) {
			c.lock = nil
			continue
		}
		if !errors.Is(err, syscall.ETXTBSY) || time.Now().After(giveUp) || ctx.Err() != nil {
			return nil, err
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// environ is our own environment, with the CNI variables of this call.
func (c *call) environ() []string {
	env := make([]string, 0, 32)
	for _, kv := range os.Environ() {
		switch name, _, _ := strings.Cut(kv, "="); name {
		case "CNI_COMMAND", "CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_ARGS", "CNI_PATH":
		default:
			env = append(env, kv)
		}
	}
	return append(env, "CNI_COMMAND="+c.command, "CNI_CONTAINERID="+c.containerID, "CNI_NETNS="+c.netns,
		"CNI_IFNAME="+c.ifname, "CNI_ARGS="+c.args, "CNI_PATH="+c.path)
}

// explain tells what a delegate that did not succeed said, in libcni's words where it said nothing.
func (c *call) explain(ctx context.Context, state *os.ProcessState, err error, stdout, stderr []byte) *failure {
	f := c.failed(types.ErrInternal, "")
	status, _ := state.Sys().(syscall.WaitStatus)
	f.killed = ctx.Err() != nil || status.Signaled()
	var said types.Error
	parseErr := json.Unmarshal(stdout, &said)
	wordless := fmt.Sprintf("netplugin failed with no error message: %v", err)
	switch {
	case ctx.Err() != nil:
		f.msg = "it did not end in time and was killed"
		if errors.Is(ctx.Err(), context.Canceled) {
			f.msg = "it was killed because unwind was asked to stop"
		}
	case len(bytes.TrimSpace(stdout)) == 0 && len(stderr) == 0:
		f.msg = wordless
	case len(bytes.TrimSpace(stdout)) == 0:
		f.msg = fmt.Sprintf("netplugin failed: %q: %v", shorten(string(stderr), 500), err)
	case parseErr != nil:
		f.msg = fmt.Sprintf("netplugin failed but error parsing its diagnostic message %q: %v", shorten(string(stdout), 500), parseErr)
	default:
		f.code, f.msg, f.details = said.Code, cmp.Or(said.Msg, wordless), said.Details
	}
	return f
}

func (c *call) failed(code uint, msg string) *failure {
	return &failure{plugin: c.plugin, command: c.command, code: code, msg: msg}
}

func (c *call) notStarted(code uint, err error) *failure {
	f := c.failed(code, err.Error())
	f.unstarted = true
	return f
}

// awaitGroup waits, bounded, until no process of a killed group is left: a child of a delegate could otherwise still
// finish an ADD beside the DEL that comes next.
func awaitGroup(pgid int) {
	for end := time.Now().Add(groupDelay); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if errors.Is(syscall.Kill(-pgid, syscall.SIGKILL), syscall.ESRCH) {
			return
		}
	}
}

// findPlugin returns the path of a plugin's binary in the first folder of a path list that has it.
func findPlugin(plugin, path string) (string, error) {
	folders := filepath.SplitList(path)
	for _, folder := range folders {
		file := filepath.Join(folder, plugin)
		if info, err := os.Stat(file); err == nil && info.Mode().IsRegular() {
			return file, nil
		}
	}
	return "", fmt.Errorf("failed to find plugin %q in path %s", plugin, folders) // libcni's words
}

// capped keeps the first max bytes that are written to it.
type capped struct {
	kept    bytes.Buffer
	max     int
	dropped bool
}

func (b *capped) Write(p []byte) (int, error) {
	room := b.max - b.kept.Len()
	if len(p) > room {
		b.dropped = true
		b.kept.Write(p[:room])
		return len(p), nil
	}
	return b.kept.Write(p)
}

// shorten cuts a text to at most n bytes, at a rune, and says so.
func shorten(s string, n int) string {
	if len(s) <= n {
		return s
	}
	if n < len("…") {
		return ""
	}
	return strings.ToValidUTF8(s[:n-len("…")], "") + "…"
}
