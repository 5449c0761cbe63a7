package e2e

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// startTimeout bounds the time that a runtime needs to start.
const startTimeout = 30 * time.Second

// Daemon is a runtime on a node. It serves CRI at a socket.
type Daemon struct {
	*CRI
	node   *Node
	name   string // of the runtime, with its version
	socket string
	args   []string // the program and its arguments
	env    []string
	cmd    *exec.Cmd
	ended  chan struct{} // closed when the process has ended
}

func (n *Node) newDaemon(name, socket string, args []string, env ...string) *Daemon {
	return &Daemon{node: n, name: name, socket: socket, args: args, env: env}
}

// logFile returns the path of the daemon's log, which is on the node's disk and so survives a
// reboot.
func (d *Daemon) logFile() string {
	return filepath.Join(d.node.Dir, filepath.Base(d.args[0])+".log")
}

// Start starts the daemon, for the first time or after Kill or a reboot, and waits until it
// responds.
func (d *Daemon) Start() {
	n := d.node
	n.Helper()
	logFile, err := os.OpenFile(d.logFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		n.Fatal(err)
	}
	defer logFile.Close()
	d.cmd = exec.Command(d.args[0], d.args[1:]...)
	d.cmd.Stdout, d.cmd.Stderr, d.cmd.Env = logFile, logFile, d.env
	if err := n.Start(d.cmd); err != nil {
		n.Fatal(err)
	}
	d.ended = make(chan struct{})
	go func(cmd *exec.Cmd, ended chan<- struct{}) {
		_ = cmd.Wait()
		close(ended)
	}(d.cmd, d.ended)
	if d.CRI != nil {
		_ = d.conn.Close() // the old connection would wait before it connects again
	}
	d.CRI = dialCRI(n, d.socket)
	d.waitForAnswer()
}

func (d *Daemon) waitForAnswer() {
	d.node.Helper()
	for end := time.Now().Add(startTimeout); ; time.Sleep(50 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		err := d.ready(ctx)
		cancel()
		if err == nil {
			return
		}
		select {
		case <-d.ended:
			d.node.Fatalf("%s did not start:\n%s", d.name, d.Log())
		default:
		}
		if time.Now().After(end) {
			d.node.Fatalf("%s does not answer: %v\n%s", d.name, err, d.Log())
		}
	}
}

// Log returns the last lines of the daemon's log, except lines of level info.
func (d *Daemon) Log() string {
	data, err := os.ReadFile(d.logFile())
	if err != nil {
		return err.Error()
	}
	lines := slices.DeleteFunc(strings.SplitAfter(string(data), "\n"), func(l string) bool { return strings.Contains(l, "level=info") })
	return strings.Join(lines[max(0, len(lines)-20):], "")
}

// Kill kills the daemon, as the kernel does when memory runs out. The pods keep running.
func (d *Daemon) Kill() {
	d.node.Helper()
	if err := d.cmd.Process.Signal(unix.SIGKILL); err != nil {
		d.node.Fatal(err)
	}
	<-d.ended
}

// AwaitNetwork waits until the runtime reports that its network is ready.
func (d *Daemon) AwaitNetwork() {
	d.node.Helper()
	for end := time.Now().Add(startTimeout); ; time.Sleep(50 * time.Millisecond) {
		why := d.NetworkReady()
		if why == "" {
			return
		}
		if time.Now().After(end) {
			d.node.Fatalf("the network is not ready: %s\n%s", why, d.Log())
		}
	}
}
