package plugin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/plugintest/sandbox"
)

// input is what unwind gets from a runtime or another caller. Tests pass it to unwind directly,
// because libcni would reject some of these inputs.
type input struct {
	env   map[string]string
	stdin string
	more  []string // more variables, as name=value, after env; may contain duplicates
	first string   // shell commands to run before unwind, in a new mount namespace
	mute  bool     // nobody reads stdout
}

// input returns the input for a command on the pod. entry is unwind's entry, for stdin.
func (p *pod) input(command string, entry string) *input {
	return &input{
		env: map[string]string{
			"CNI_COMMAND": command, "CNI_CONTAINERID": p.ContainerID, "CNI_NETNS": p.NetNS, "CNI_IFNAME": p.IfName,
			"CNI_PATH": strings.Join(p.path, ":"),
		},
		stdin: entry,
	}
}

// outcome is what a runtime gets back. said is the CNI error on stdout, if there is one.
type outcome struct {
	code   int
	stdout string
	stderr string
	said   types.Error
	took   time.Duration
}

// err returns the CNI error, or nil.
func (o outcome) err() error {
	if o.code == 0 {
		return nil
	}
	return &o.said
}

// start runs unwind with an input. If unwind fails, stdout must be a CNI error of limited length.
func (n *node) start(in *input) (out outcome) {
	n.Helper()
	n.seeConfiguration([]byte(in.stdin))
	ctx, cancel := context.WithTimeout(context.Background(), sandbox.Patience)
	defer cancel()
	binary := filepath.Join(n.path[0], netconf.Name)
	cmd := exec.CommandContext(ctx, binary)
	if in.first != "" {
		cmd = exec.CommandContext(ctx, "/bin/sh", "-c", in.first+` && exec "$0"`, binary)
		cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	}
	// in.env may override both variables
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "GORACE=" + os.Getenv("GORACE")}
	for name, value := range in.env {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	cmd.Env = append(cmd.Env, in.more...)
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(in.stdin), &stdout, &stderr
	began := time.Now()
	err := cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() < 0 && (n.mayDie || in.mute) {
		return outcome{code: -1, stderr: stderr.String()}
	}
	if err != nil && (!errors.As(err, &exit) || exit.ExitCode() != 1) {
		n.Fatalf("%v\n%s", err, stderr.String())
	}
	out = outcome{code: cmd.ProcessState.ExitCode(), stdout: stdout.String(), stderr: stderr.String(), took: time.Since(began)}
	if out.code != 0 && !in.mute {
		if err := json.Unmarshal(stdout.Bytes(), &out.said); err != nil || out.said.Code == 0 || out.said.Msg == "" {
			n.Errorf("stdout is not a CNI error (%v): %q", err, out.stdout)
		}
		if text := out.said.Error(); len(text) > maxMessage {
			n.Errorf("the error has %d bytes", len(text))
		}
	}
	return out
}

// entryOf returns unwind's entry, as libcni passes it on stdin, with n.conf and changes added. A
// nil value removes its key.
func (n *node) entryOf(chain string, changes map[string]any) string {
	n.Helper()
	entry := map[string]any{
		"cniVersion": n.outer, "name": n.network, "type": netconf.Name, "stateDir": n.stateDir, "chain": json.RawMessage(chain),
	}
	maps.Copy(entry, n.conf)
	maps.Copy(entry, changes)
	maps.DeleteFunc(entry, func(_ string, v any) bool { return v == nil })
	return string(netconf.Marshal(entry))
}

// untouched checks that no plugin was started, and that stateDir does not exist.
func (n *node) untouched() {
	n.Helper()
	if calls := n.calls(); len(calls) > 0 {
		n.Errorf("delegates were started: %v", calls)
	}
	if _, err := os.Lstat(n.stateDir); !os.IsNotExist(err) {
		n.Errorf("stateDir was made (%v)", err)
	}
}

// awaitSweep waits for the end of the sweep that a STATUS started.
func (n *node) awaitSweep() {
	n.Helper()
	eventually(n, "the end of the sweep", func() bool { return !held(filepath.Join(n.stateDir, "sweep.lock")) })
}

// ask runs a GC or a STATUS with a chain of these plugins. After a STATUS, it waits for the sweep
// that the STATUS started. changes are keys of unwind's entry, such as a GC's list; a nil value
// removes its key.
func (n *node) ask(command string, changes map[string]any, plugins ...string) outcome {
	n.Helper()
	all := map[string]any{"cniVersion": "1.1.0"}
	maps.Copy(all, changes)
	out := n.start(&input{
		stdin: n.entryOf(n.chainOf(plugins...), all), more: n.env,
		env: map[string]string{"CNI_COMMAND": command, "CNI_PATH": strings.Join(n.path, ":")},
	})
	if command == "STATUS" {
		n.awaitSweep()
	}
	return out
}
