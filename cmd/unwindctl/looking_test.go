package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"cni-unwind/journal"
	"cni-unwind/journal/journaltest"
	"cni-unwind/plugin/plugintest/nodetest"
)

// secret is part of each configuration, and of CNI_ARGS. No output or log may contain it.
const secret = nodetest.Secret

// looks contains commands that change nothing.
var looks = [][]string{
	{"list"}, {"list", "--json"}, {"list", "--network", network},
	{"show", "stuck"}, {"show", "live", "--json"}, {"show", "10.9.0.99"}, {"show", "default/many"}, {"show", "nobody"},
	{"history"}, {"history", "--json"}, {"ipam"}, {"ipam", "--json"}, {"metrics"},
	{"sweep", "--dry-run"}, {"sweep", "--dry-run", "--json"}, {"sweep", "--dry-run", "--force", "stuck"},
	{"forget", "stuck"}, {"forget", "live"},
}

// crowd fills a node with data: a live attachment, an attachment whose DEL fails, a pool with a
// reservation of an unknown owner, and a history. It also adds the given number of copies of the
// live attachment's record, for a pod called "many". It returns the directory of conflists.
func (n *machine) crowd(many int) (confDir string) {
	n.Helper()
	n.chain = fmt.Sprintf(`{"type": "faulty", "dir": %q, "instance": "p", "password": %q, "ipam": {"type": "host-local",
		"subnet": "10.9.0.0/24", "dataDir": %q}}`, n.dir, secret, filepath.Join(n.dir, "ipam"))
	confDir = filepath.Join(n.dir, "net.d")
	err := errors.Join(os.Mkdir(confDir, 0o755), os.WriteFile(filepath.Join(confDir, "10-podnet.conflist"), fmt.Appendf(nil,
		`{"cniVersion": "1.0.0", "name": %q, "plugins": [{"type": "unwind", "stateDir": %q, "token": %q, "chain": {"plugins": [%s]}}]}`,
		network, n.state, secret, n.chain), 0o600))
	n.netns("live", "stuck", "rolledback", "damaged")
	n.add(home, "live", n.pin("live"))
	n.plan(map[string]string{"ADD": "garbage"})
	n.verb(home, "ADD", "rolledback", n.pin("rolledback"))
	n.plan(map[string]string{"ADD": "fail-effect", "DEL": "fail"})
	n.verb(home, "ADD", "stuck", n.pin("stuck"))
	n.plan(nil)
	if e := n.entry("stuck"); e == nil || e.State != journal.RollingBack {
		n.Fatalf("the journal has %+v, want one with a pending DEL", e)
	}
	err = errors.Join(err, os.WriteFile(filepath.Join(n.dir, "ipam", network, "10.9.0.99"), []byte("stranger"), 0o600))
	err = errors.Join(err, n.store.Update(context.Background(), func(tx *journal.Tx) error {
		live, err := tx.Get(journal.Key{Network: network, ContainerID: "live", IfName: "eth0"})
		if err != nil {
			return err
		}
		live.Added.Pod.Name = "many"
		live.Added.Args += ";TOKEN=" + secret
		for i := range many {
			live.ContainerID, live.Number = fmt.Sprintf("many-%d", i), 0
			if err := journaltest.PutIn(tx, live); err != nil {
				return err
			}
			if err := n.store.Record(journal.Event{Key: live.Key, Kind: journal.Swept, Pod: live.Added.Pod, Reason: strings.Repeat("why ", 40),
				Addresses: []netip.Addr{netip.MustParseAddr("10.9.0.98")}}); err != nil {
				return err
			}
		}
		return nil
	}))
	check(n, err)
	return confDir
}

// ctl returns an unwindctl command with the directories of the node.
func (n *machine) ctl(confDir string, args ...string) *exec.Cmd {
	args = append(slices.Clone(args), "--state-dir", n.state)
	if confDir != "" && slices.Contains([]string{"show", "ipam", "metrics", "sweep"}, args[0]) {
		args = append(args, "--conf-dir", confDir)
	}
	return n.unwindctl(args...)
}

// snapshot returns the names, modes, sizes, times and contents of all files in some directories.
func (n *machine) snapshot(dirs ...string) string {
	n.Helper()
	var text strings.Builder
	for _, dir := range dirs {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			info, err := d.Info()
			if err != nil {
				return err
			}
			fmt.Fprintf(&text, "%s %v %d %v\n", path, info.Mode(), info.Size(), info.ModTime().UnixNano())
			if info.Mode().IsRegular() {
				data, err := os.ReadFile(path)
				fmt.Fprintf(&text, "%x\n", data)
				return err
			}
			return nil
		})
		check(n, err)
	}
	return text.String()
}

// TestLooking: read-only commands change no byte, time or name of a file. No command prints a
// secret.
func TestLooking(t *testing.T) {
	t.Parallel()
	n := newMachine(t)
	confDir := n.crowd(3)
	damaged := journal.Key{Network: network, ContainerID: "damaged", IfName: "eth0"}
	n.add(home, "damaged", n.pin("damaged"))
	check(t, journaltest.InFile(n.store, "records", strings.Join([]string{damaged.Network, damaged.ContainerID, damaged.IfName}, "\x00"),
		journaltest.Become(`{"password": "`+secret+`", "network":`)))
	before := n.snapshot(n.state, filepath.Join(n.dir, "ipam"), confDir)
	for _, args := range append(looks, []string{"show", damaged.String()}, []string{"forget", damaged.String()}) {
		out := n.run(n.ctl(confDir, args...))
		if n.snapshot(n.state, filepath.Join(n.dir, "ipam"), confDir) != before {
			t.Fatalf("%v has changed something", args)
		}
		if strings.Contains(out.stdout+out.stderr, secret) {
			t.Errorf("%v shows a secret:\n%s%s", args, out.stdout, out.stderr)
		}
		if out.code > 1 || strings.Contains(out.stderr, "panic") {
			t.Errorf("%v: exit code %d\n%s", args, out.code, out.stderr)
		}
		if slices.Contains(args, "--json") {
			wantDocument(t, args, out.stdout)
		}
	}
	for _, args := range [][]string{{"sweep"}, {"sweep", "--json"}, {"forget", "stuck", "--yes"}, {"history"}, {"history", "--json"}, {"list", "--json"}} {
		out := n.run(n.ctl(confDir, args...))
		if strings.Contains(out.stdout+out.stderr, secret) {
			t.Errorf("%v shows a secret:\n%s%s", args, out.stdout, out.stderr)
		}
	}
}

// wantDocument checks that a text is a JSON object with "version": 1 and one other key, whose value
// is a list.
func wantDocument(t *testing.T, args []string, text string) {
	t.Helper()
	var document map[string]json.RawMessage
	if err := json.Unmarshal([]byte(text), &document); err != nil {
		t.Errorf("%v: %v\n%s", args, err, text)
		return
	}
	if string(document["version"]) != "1" || len(document) != 2 {
		t.Errorf("%v: version %s and %d keys", args, document["version"], len(document))
	}
	delete(document, "version")
	for key, value := range document {
		if !bytes.HasPrefix(value, []byte("[")) {
			t.Errorf("%v: %s is no list", args, key)
		}
	}
}

// TestNoLockWhilePrinting: a command whose output goes to a full pipe holds no lock of the journal
// while it waits for the reader, so an ADD does not wait.
func TestNoLockWhilePrinting(t *testing.T) {
	t.Parallel()
	n := newMachine(t)
	confDir := n.crowd(300)
	plans := [][]string{
		{"list"}, {"list", "--json"}, {"show", "default/many"}, {"history"}, {"history", "--json"}, {"ipam", "--json"},
		{"sweep", "--dry-run", "--json"}, {"metrics"},
	}
	for i, args := range plans {
		t.Run(strings.Join(args, " "), func(t *testing.T) {
			reader, writer, err := os.Pipe()
			check(t, err)
			defer reader.Close()
			fill(t, writer)
			cmd := n.ctl(confDir, args...)
			cmd.Stdout = writer
			check(t, cmd.Start())
			_ = writer.Close()
			defer func() {
				_ = cmd.Process.Kill()
				_ = cmd.Wait()
			}()
			eventually(t, "it waits for its reader", func() bool {
				wchan, _ := os.ReadFile(fmt.Sprintf("/proc/%d/wchan", cmd.Process.Pid))
				return strings.Contains(string(wchan), "pipe") || writing(cmd.Process.Pid)
			})
			id := fmt.Sprintf("new-%d", i)
			n.netns(id)
			n.add(home, id, n.pin(id))
			if n.entry(id) == nil { // because the ADD could not lock the journal in time
				t.Error("the ADD continued without the journal")
			}
		})
	}
}

// fill writes to a pipe until it is full.
func fill(t *testing.T, pipe *os.File) {
	t.Helper()
	check(t, pipe.SetWriteDeadline(time.Now().Add(100*time.Millisecond)))
	for {
		if _, err := pipe.Write(make([]byte, 1)); err != nil {
			return
		}
		if _, err := pipe.Write(make([]byte, 4096)); err != nil {
			continue
		}
	}
}

// writing reports whether a thread of a process is in a write to stdout.
func writing(pid int) bool {
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/syscall", pid))
	for _, path := range threads {
		if call, err := os.ReadFile(path); err == nil && strings.HasPrefix(string(call), "1 0x1 ") {
			return true
		}
	}
	return false
}

// entry returns a container's record, or nil.
func (n *machine) entry(id string) *journal.Record {
	n.Helper()
	for _, e := range n.entries() {
		if e.ContainerID == id {
			return e
		}
	}
	return nil
}
