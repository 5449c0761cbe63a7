package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// CacheDir is libcni's cache of results.
const CacheDir = "/var/lib/cni/results"

// Cached returns the files of libcni's cache for a container, or, with "", for all containers.
func (n *Node) Cached(id string) []string {
	n.Helper()
	files, err := filepath.Glob(n.File(CacheDir, n.netName+"-"+id+"*"))
	if err != nil {
		n.Fatal(err)
	}
	return files
}

// Age makes all files of host-local and of libcni's cache older than 10 minutes, a sweep's default
// grace period.
func (n *Node) Age() {
	n.Helper()
	files := n.Cached("")
	for address := range n.Reserved() {
		files = append(files, n.File(n.pool, address))
	}
	then := time.Now().Add(-15 * time.Minute)
	for _, path := range files {
		if err := os.Chtimes(path, then, then); err != nil && !errors.Is(err, fs.ErrNotExist) {
			n.Fatal(err)
		}
	}
}

// PlainNode is a node without unwind. Its chain is bridge, firewall and faulty. Of unwind's
// programs, it has only a copy of unwindctl.
type PlainNode struct {
	*Node
	RT   *Containerd
	Live []string // the sandboxes of the live pods
}

// Copied is the path of unwindctl on a PlainNode.
const Copied = "/usr/local/bin/unwindctl"

// NewPlainNode creates a PlainNode with this number of live pods. last is the last address of the
// node's pool.
func NewPlainNode(t *testing.T, v Version, last string, live int) *PlainNode {
	n := &PlainNode{Node: NewLongUpNode(t)}
	check(t, os.Remove(n.File(PluginDir, "unwind")))
	n.Run("cp", Path(t, "bin/unwindctl"), Copied)
	n.Configure(Network{Subnet: "10.22.0.0/27", Last: last, Plugins: []string{Firewall, n.Faulty()}})
	n.RT = n.StartContainerd(v)
	n.RT.AwaitNetwork()
	for i := range live {
		n.Live = append(n.Live, n.RT.MustRunPod(Pod{Name: fmt.Sprintf("live-%d", i)}))
	}
	return n
}

// Ctl runs unwindctl, and fails the test unless unwindctl exits with this code.
func (n *PlainNode) Ctl(code int, args ...string) string {
	n.Helper()
	stdout, stderr, err := n.Try(Copied, args...)
	var ended *exec.ExitError
	if errors.As(err, &ended); (err != nil || code != 0) && (ended == nil || ended.ExitCode() != code) {
		n.Errorf("unwindctl %v: %v, want exit code %d\n%s%s", args, err, code, stdout, stderr)
	}
	return stdout
}

// Found is a finding in the output of "unwindctl sweep --json".
type Found struct {
	ContainerID, Address, Verdict, Result, Why string
	Cached                                     bool
	Addresses, Pending                         []string
}

// Sweep runs a sweep, and returns the finding for each address.
func (n *PlainNode) Sweep(code int, args ...string) map[string]Found {
	n.Helper()
	var object struct{ Findings []Found }
	out := n.Ctl(code, append([]string{"sweep", "--json", "--cri", Socket}, args...)...)
	check(n, json.Unmarshal([]byte(out), &object))
	byAddress := map[string]Found{}
	for _, f := range object.Findings {
		for _, a := range append(f.Addresses, f.Address) {
			if a != "" {
				byAddress[a] = f
			}
		}
	}
	return byAddress
}

// Results counts the findings: kept findings by their verdict, and all others by their result.
func Results(of map[string]Found) map[string]int {
	count := map[string]int{}
	for _, f := range of {
		if f.Result == "kept" {
			f.Result = f.Verdict
		}
		count[f.Result]++
	}
	return count
}

// Has lists host-local's reservations, the rules of containers, and libcni's cache files.
type Has struct {
	Reserved map[string]string
	Rules    []string
	Cached   []string
}

func (n *PlainNode) Look() Has {
	n.Helper()
	h := Has{n.Reserved(), n.Rules(), n.Cached("")}
	slices.Sort(h.Rules)
	return h
}

// Unchanged checks that Look returns the same as before.
func (n *PlainNode) Unchanged(what string, before Has) {
	n.Helper()
	if diff := cmp.Diff(before, n.Look()); diff != "" {
		n.Errorf("%s, -want +got:\n%s", what, diff)
	}
}

func (n *PlainNode) CheckLive() {
	n.Helper()
	for _, id := range n.Live {
		n.CheckPod(n.RT.CRI, id)
	}
}

// FailPods tries to start new pods while the plugin faulty fails their ADDs and DELs. Then, as
// kubelet does, FailPods stops and removes the pods that the runtime lists.
func (n *PlainNode) FailPods(prefix string, count int) {
	n.Helper()
	n.PlanPods(prefix, map[string]string{"ADD": "fail", "DEL": "fail"})
	for i := range count {
		if _, err := n.RT.RunPod(Pod{Name: fmt.Sprintf("%s-%d", prefix, i)}); err == nil {
			n.Fatalf("pod %d started although faulty fails", i)
		}
	}
	n.RemovePods(nil)
	n.Plan(nil)
}

// RemovePods stops and removes all pods except those in n.Live and in but.
func (n *PlainNode) RemovePods(but []string) {
	n.Helper()
	for id := range n.RT.Pods() {
		if !slices.Contains(n.Live, id) && !slices.Contains(but, id) {
			if err := errors.Join(n.RT.StopPod(id), n.RT.RemovePod(id)); err != nil {
				n.Logf("pod %.12s: %v", id, err)
			}
		}
	}
}

// ForgetPods starts pods, kills them, makes the runtime forget them without a DEL, and removes
// their network namespaces.
func (n *PlainNode) ForgetPods(prefix string, count int) {
	n.Helper()
	before := n.pins()
	pods := make([]Pod, count)
	for i := range pods {
		pods[i].Name = fmt.Sprintf("%s-%d", prefix, i)
	}
	ids := slices.Collect(maps.Values(n.RT.RunPods(pods)))
	for _, id := range ids {
		n.RT.KillPod(id)
	}
	n.RT.Forget(ids...)
	for _, pin := range n.pins() {
		if !slices.Contains(before, pin) {
			n.RemoveNetNS(pin)
		}
	}
	n.Settled()
}

func (n *PlainNode) pins() (names []string) {
	n.Helper()
	entries, err := os.ReadDir(n.File("/run/netns"))
	check(n, err)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}
