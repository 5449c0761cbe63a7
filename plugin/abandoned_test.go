package plugin

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/netconf"
)

// parents are a shell's commands that start unwind, which is $0, as a child of a runtime that does
// not wait for it itself.
var parents = map[string]string{
	"directly":              ``,
	"by a shell":            `"$0"; true`,
	"by a shell that dies":  `"$0"; true`,
	"in a PID namespace":    `unshare --pid --fork --mount-proc sh -c '"$0"; true' "$0"; true`,
	"by a parent that ends": `exec 3<&0; ("$0" <&3 &)`,
}

// abandoned are statements about an ADD whose runtime does not wait for it.
var abandoned = acts{
	// starts POD PARENT: the runtime starts the pod's ADD
	"starts": func(s *story, w []string) {
		p, parent := s.who(w[0]), strings.Join(w[1:], " ")
		in := p.input("ADD", s.entryOf(s.chainOf(s.plugins(s.node)...), nil))
		cmd := exec.Command(filepath.Join(s.path[0], netconf.Name))
		if by := parents[parent]; by != "" {
			cmd = exec.Command("sh", "-c", by, cmd.Path)
		}
		cmd.Env = append(os.Environ(), s.env...)
		for name, value := range in.env {
			cmd.Env = append(cmd.Env, name+"="+value)
		}
		s.write(filepath.Join(s.dir, "stdin"), in.stdin)
		stdin, err := os.Open(filepath.Join(s.dir, "stdin"))
		s.must(err)
		reader, stdout, err := os.Pipe()
		s.must(err)
		cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, stdout, s.stderr()
		s.must(cmd.Start())
		s.must(errors.Join(stdin.Close(), stdout.Close()))
		go func() { _, _ = io.Copy(io.Discard, reader) }()
		go func() { _ = cmd.Wait() }()
		s.Cleanup(func() { // also the plugins' children
			s.kill()
			_ = reader.Close()
		})
		s.undo["dies"] = func() {
			s.must(reader.Close())
			if strings.HasSuffix(parent, "dies") {
				s.must(cmd.Process.Kill())
			}
		}
	},
	// dies: the runtime does, and with it the shell if it is one that dies
	"dies": func(s *story, _ []string) { s.undo["dies"]() },
	// unwind-killed: that of the ADD
	"unwind-killed": func(s *story, _ []string) {
		s.kill(netconf.Name)
		s.processesEnd(netconf.Name)
	},
	// processes-end NAME: the ADD's
	"processes-end": func(s *story, w []string) { s.processesEnd(w[0]) },
	// within TIME STATEMENT
	"within": func(s *story, w []string) {
		began := time.Now()
		s.verb(w[1])(s, w[2:])
		s.Logf("%q took %s", w[1:], time.Since(began))
		s.want(time.Since(began) < s.duration(w[0]), "it took %s", time.Since(began))
	},
}

func (s *story) processesEnd(name string) {
	s.Helper()
	eventually(s, name+" ends", func() bool { return len(processesOf(s, name)) == 0 })
}

// kill kills the processes of the node's ADDs, or only those with a name.
func (s *story) kill(names ...string) {
	for _, pid := range processesOf(s, names...) {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
}

// processesOf returns the processes of the node's ADDs, or only those with a name.
func processesOf(s *story, names ...string) (pids []int) {
	s.Helper()
	all, err := facts.Processes()
	s.must(err)
	for _, pid := range all {
		environ, _ := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
		if bytes.Contains(environ, []byte("CNI_COMMAND=ADD")) && bytes.Contains(environ, []byte("CNI_PATH="+s.path[0])) &&
			(len(names) == 0 || strings.TrimSpace(string(name)) == names[0]) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// TestNobodyWaits: a runtime starts an ADD, directly or not. Then its unwind is killed, or the DEL comes although the
// ADD runs, or the runtime dies, and its unwind ends by itself. Whatever the plugin does, the DEL soon succeeds, and no
// address is left, also once the plugin's children have ended. Only a daemon outlives the DEL.
func TestNobodyWaits(t *testing.T) {
	const plugin = `{"type": "sub", "ipam": $hostlocal}`
	stories(t, `
	budget Orphans 3s; budget Stop 2s; budget Unread 1s; let before 0; let after 0; let rest wait; let began $dir/began
	each parent directly 'by a shell' 'by a shell that dies' 'in a PID namespace' 'by a parent that ends'
	either a plugin without children: let chain pooled, "delayMS": 2000; plan p0 ADD late; let began $dir/faulty/log
	or its child is slow: let before 2; let chain `+plugin+`
	or its child works on: let after 5; let chain `+plugin+`
	or it leaves a daemon: let rest 'setsid sleep 600 & wait'; let chain `+plugin+`
	or it hangs: let chain pooled; plan p0 ADD hang-effect; let began $dir/faulty/taken/a.eth0.p0
	either unwind is killed: let then unwind-killed
	or the DEL comes: let then pause 0s
	or the runtime dies: let then dies
	script sub '[ $CNI_COMMAND = ADD ] || exec $cni/host-local;
		conf=$(cat); touch $dir/began;
		(sleep $before; printf %s "$conf" | $cni/host-local; sleep $after) & $rest'
	chain $chain; starts a $parent; appears $began; $then
	if the runtime dies: processes-end unwind
	within 20s del a; reserved 0; gone a
	processes-end sub; reserved 0`, abandoned)
}

// TestHungADD: an ADD hangs, and its parent lives, as multus does. The runtime's DEL does not wait for the ADD.
func TestHungADD(t *testing.T) {
	stories(t, `
	budget Stop 2s; chain pooled | p1
	either in ADD: plan p1 ADD hang-effect
	or in the DEL of its rollback: plan p1 ADD fail-effect, p1 DEL hang once
	or in both: plan p1 ADD hang-effect, p1 DEL hang once
	start add a; awaits ADD p1
	if DEL: awaits DEL p1
	within 20s del a; fails wait add a; reserved 0; gone a`, abandoned)
}

// TestSweepKillsNobody: 60 healthy delegates of a sweep's workers live until they end.
func TestSweepKillsNobody(t *testing.T) {
	stories(t, `
	let ms , "delayMS": 50
	chain p0$ms | p1$ms | p2$ms | p3$ms | p4$ms | p5$ms; crowd 10; forgets; plan * DEL late
	drop $all; sweep; entries 0; clean; times 10 DEL p0; times 10 DEL p5`)
}
