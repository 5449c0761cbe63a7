package plugin

import (
	"bytes"
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
	"in a PID namespace":    `unshare --pid --fork sh -c '"$0"; true' "$0"; true`,
	"by a parent that ends": `exec 3<&0; ("$0" <&3 &)`,
}

// abandoned are statements about an ADD whose runtime does not wait for it.
func abandoned() acts {
	var reader *os.File
	var cmd *exec.Cmd
	return acts{
		// starts POD PARENT: the runtime starts the pod's ADD
		"starts": func(s *story, w []string) {
			p := s.who(w[0])
			in := p.input("ADD", s.entryOf(s.chainOf(s.plugins(s.node)...), nil))
			cmd = exec.Command(filepath.Join(s.path[0], netconf.Name))
			if by := parents[strings.Join(w[1:], " ")]; by != "" {
				cmd = exec.Command("sh", "-c", by, cmd.Path)
			}
			cmd.Env = append(os.Environ(), s.env...)
			for name, value := range in.env {
				cmd.Env = append(cmd.Env, name+"="+value)
			}
			r, out, err := os.Pipe()
			s.must(err)
			defer out.Close()
			stdin, err := os.CreateTemp(s.dir, "stdin")
			s.must(err)
			defer stdin.Close()
			_, err = stdin.WriteString(in.stdin)
			s.must(err)
			_, err = stdin.Seek(0, io.SeekStart)
			s.must(err)
			reader, cmd.Stdin, cmd.Stdout = r, stdin, out
			cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
			s.must(cmd.Start())
			go func() { _, _ = io.Copy(io.Discard, r) }()
			go func() { _ = cmd.Wait() }()
			s.Cleanup(func() {
				_ = r.Close()
				for _, pid := range processesOf(s) { // also the plugins' children
					_ = syscall.Kill(pid, syscall.SIGKILL)
				}
			})
		},
		// dies: the runtime does, and with it the shell if it is one that dies
		"dies": func(s *story, _ []string) {
			s.must(reader.Close())
			if strings.HasSuffix(s.vars["parent"], "dies") {
				s.must(cmd.Process.Kill())
			}
		},
		// unwind-killed, unwind-ends: the unwind of the ADD
		"unwind-killed": func(s *story, _ []string) {
			for _, pid := range processesOf(s, netconf.Name) {
				s.must(syscall.Kill(pid, syscall.SIGKILL))
			}
			verbs["unwind-ends"](s, nil)
		},
		"unwind-ends": func(s *story, _ []string) {
			eventually(s, "unwind ends", func() bool { return len(processesOf(s, netconf.Name)) == 0 })
		},
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
