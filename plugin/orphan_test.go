package plugin

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/plugin/internal/host"
)

// history returns the starts and ends of the faulty plugins' calls in order, as "start VERB
// instance" and "end VERB instance".
func (n *node) history() []string {
	n.Helper()
	data, err := os.ReadFile(filepath.Join(n.faultyDir(), "log"))
	if err != nil && !os.IsNotExist(err) {
		n.Fatal(err)
	}
	var lines []string
	for _, line := range strings.Split(strings.TrimSpace(string(data)), "\n") {
		var l logged
		if err := json.Unmarshal([]byte(line), &l); err != nil {
			n.Fatal(err)
		}
		lines = append(lines, fmt.Sprintf("%s %s %s", l.Phase, l.Command, l.Instance))
	}
	return lines
}

// running waits until a delegate has started, and returns its call.
func (n *node) running(call string) logged {
	n.Helper()
	var found logged
	eventually(n, call, func() bool {
		log := n.callLog()
		i := slices.IndexFunc(log, func(l logged) bool { return l.Command+" "+l.Instance == call })
		if i >= 0 {
			found = log[i]
		}
		return i >= 0
	})
	return found
}

// TestOrphanIsWaitedFor: a delegate that outlives its unwind and soon ends is not killed, and what
// it takes late is released.
func TestOrphanIsWaitedFor(t *testing.T) {
	t.Parallel()
	for _, next := range []string{"DEL", "ADD", "next sandbox"} {
		t.Run(next, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			list := n.unwind(n.faulty("p0", ""), n.faulty("p1", `, "delayMS": 1000`))
			p := n.pod("a")
			n.plan(map[string]map[string]string{"p1": {"ADD": "orphan"}})
			if _, err := p.add(list); !wasKilled(err) {
				t.Fatalf("ADD: %v", err)
			}
			n.plan(nil)
			if next == "next sandbox" {
				p.dropNetNS()
			}
			recoverBy(p, list, next)
			n.nothingLeft()
			history := n.history()
			want := []string{"start ADD p0", "end ADD p0", "start ADD p1", "end ADD p1", "start DEL p1", "end DEL p1", "start DEL p0"}
			if len(history) < len(want) || !slices.Equal(history[:len(want)], want) {
				t.Errorf("%q, want %q first", history, want)
			}
		})
	}
}

// TestOrphanIsEnded: a delegate that outlives its unwind for too long is killed, with its children,
// before anything else happens to the attachment.
func TestOrphanIsEnded(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"orphan", "kill-parent", "kill-parent-effect"} {
		for _, verb := range []string{"ADD", "DEL"} {
			for _, next := range []string{"DEL", "ADD", "next sandbox"} {
				t.Run(fmt.Sprintf("%s in %s, then %s", mode, verb, next), func(t *testing.T) {
					t.Parallel()
					n := newNode(t).hasty()
					list := n.unwind(n.faulty("p0", ""), n.faulty("p1", `, "delayMS": 1500`))
					p := n.pod("a")
					n.plan(map[string]map[string]string{"p1": {verb: mode}})
					_, err := p.add(list)
					if verb == "DEL" {
						err = p.del(list)
					}
					if !wasKilled(err) {
						t.Fatalf("%s: %v", verb, err)
					}
					late := time.After(1500 * time.Millisecond)
					n.plan(nil)
					recoverBy(p, list, next)
					n.nothingLeft()
					if mode == "orphan" {
						<-late // it would have taken effect by now
						n.nothingLeft()
					}
					pid := n.callLog()[slices.Index(n.calls(), verb+" p1")].PID
					if err := syscall.Kill(pid, 0); !errors.Is(err, syscall.ESRCH) {
						t.Errorf("the delegate is still there: %v", err)
					}
				})
			}
		}
	}
}

// TestDaemonDoesNotPin: a delegate leaves a daemon that has all its descriptors. The daemon delays
// neither its own verb nor the next, and lives on.
func TestDaemonDoesNotPin(t *testing.T) {
	t.Parallel()
	n := newNode(t).hasty()
	list := n.unwind(n.faulty("p0", ""), n.faulty("p1", ""))
	p := n.pod("a")
	n.plan(map[string]map[string]string{"p0": {"ADD": "daemon", "DEL": "daemon"}})
	p.mustAdd(list)
	if locked, _, err := n.store.Locked(p.key()); locked || err != nil {
		t.Errorf("locked after the ADD: %t, %v", locked, err)
	}
	p.mustDel(list)
	n.nothingLeft()
	if daemons := daemonsOf(t, n.callLog()[0].Path); len(daemons) != 2 {
		t.Errorf("%d daemons live, want the one of the ADD and the one of the DEL", len(daemons))
	}
}

// daemonsOf returns the daemons left by faulty plugins with this CNI_PATH.
func daemonsOf(t *testing.T, path string) []int {
	t.Helper()
	var pids []int
	err := host.EachProcess(func(pid int, proc string) (bool, error) {
		cmdline, err := os.ReadFile(proc + "/cmdline")
		if err != nil || !bytes.HasSuffix(cmdline, []byte("\x00daemon\x00")) {
			return false, nil
		}
		environ, err := os.ReadFile(proc + "/environ")
		if err == nil && bytes.Contains(environ, []byte("CNI_PATH="+path)) {
			pids = append(pids, pid)
		}
		return false, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return pids
}

// TestDelDuringAdd: a DEL waits for an ADD of the same attachment by an unwind that lives. If that
// takes too long, the DEL is refused, for the runtime to retry, and no process is killed.
func TestDelDuringAdd(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		delayMS int
		code    uint
	}{
		{"soon over", 1500, 0},
		{"not in time", 6500, types.ErrTryAgainLater},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t).hasty()
			n.conf["delegateTimeout"] = "20s"
			list := n.unwind(n.faulty("p0", ""), n.faulty("p1", fmt.Sprintf(`, "delayMS": %d`, c.delayMS)))
			p := n.pod("a")
			n.plan(map[string]map[string]string{"p1": {"ADD": "late"}})
			added := make(chan error)
			go func() {
				_, err := p.add(list)
				added <- err
			}()
			n.running("ADD p1")
			err := p.del(list)
			var refused *types.Error
			if errors.As(err, &refused); (refused == nil) != (c.code == 0) || refused != nil && refused.Code != c.code {
				t.Errorf("DEL: %v, want code %d", err, c.code)
			}
			if slices.Contains(n.calls(), "DEL p1") == (c.code != 0) {
				t.Errorf("calls: %v", n.calls())
			}
			if err := <-added; err != nil {
				t.Errorf("ADD: %v", err)
			}
			p.mustDel(list)
			n.nothingLeft()
		})
	}
}

// TestTwoAdds: of two ADDs of one container ID at once exactly one succeeds, and no delegate runs
// for both at once.
func TestTwoAdds(t *testing.T) {
	t.Parallel()
	n := newNode(t).hasty()
	list := n.unwind(n.faulty("p0", `, "delayMS": 100`), n.faulty("p1", `, "delayMS": 100`))
	p := n.pod("a")
	n.plan(map[string]map[string]string{"*": {"ADD": "late"}})
	errs := make(chan error)
	for range 2 {
		go func() {
			_, err := p.add(list)
			errs <- err
		}()
	}
	var refused []error
	for range 2 {
		if err := <-errs; err != nil {
			refused = append(refused, err)
		}
	}
	if len(refused) != 1 || !strings.Contains(refused[0].Error(), "is added already, in the same network namespace; DEL it first") {
		t.Errorf("refused: %v; want one", refused)
	}
	if got, want := strings.Join(n.history(), ", "), "start ADD p0, end ADD p0, start ADD p1, end ADD p1"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if all := n.entries(); len(all) != 1 || len(all[0].Generations) != 1 {
		t.Errorf("the journal has %+v, want one entry with one generation", all)
	}
	p.mustDel(list)
	n.nothingLeft()
}

// TestStopped: an unwind that gets SIGTERM rolls its ADD back and says so.
func TestStopped(t *testing.T) {
	t.Parallel()
	n := newNode(t).hasty()
	n.conf["delegateTimeout"] = nil
	list := n.unwind(chainOfFour(n)...)
	p := n.pod("a")
	n.plan(map[string]map[string]string{"p2": {"ADD": "hang-effect"}})
	added := make(chan error)
	go func() {
		_, err := p.add(list)
		added <- err
	}()
	n.running("ADD p2")
	pid, err := n.store.Owner(p.key())
	if err != nil || pid <= 1 {
		t.Fatalf("the unwind at work: %d, %v", pid, err)
	}
	if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	want := `plugin type="faulty" failed (add): it was killed because unwind was asked to stop`
	if err := <-added; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("ADD: %v, want %s", err, want)
	}
	n.nothingLeft()
}
