package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"cni-unwind/cmd/internal/term"
)

// Limits on the output of kubectl. A node can control this output.
const (
	mostOutput = 64 << 20
	mostErrors = 64 << 10
)

// mostKubectls is the maximum number of simultaneous kubectl processes. Each takes 50 MB of memory
// and 55 ms of CPU time.
const mostKubectls = 16

type kubectl struct {
	flags     *pflag.FlagSet // including kubectlFlags
	namespace string
	timeout   time.Duration
	turns     chan struct{} // limits the number of simultaneous processes
}

// handedOn are the names and help texts of flags that are passed to another program unchanged.
type handedOn [][2]string

// kubectlFlags are the flags that are passed to kubectl.
var kubectlFlags = handedOn{
	{"context", "use the kubeconfig context `NAME`"},
	{"kubeconfig", "use the kubeconfig `FILE`"},
	{"as", "impersonate `USER`"},
	{"as-group", "impersonate `GROUP`; may be repeated"},
}

func (h handedOn) addTo(flags *pflag.FlagSet) {
	for _, f := range h {
		flags.StringArray(f[0], nil, f[1])
	}
}

func (h handedOn) of(flags *pflag.FlagSet) (args []string) {
	for _, f := range h {
		values, _ := flags.GetStringArray(f[0])
		for _, value := range values {
			args = append(args, "--"+f[0]+"="+value)
		}
	}
	return args
}

// args returns arguments for kubectl, preceded by the namespace and the flags of kubectlFlags.
func (k *kubectl) args(args ...string) []string {
	return slices.Concat([]string{"--namespace=" + k.namespace}, kubectlFlags.of(k.flags), args)
}

// run runs kubectl and returns its output, possibly together with an error. The error contains the
// message from kubectl or from the program that it ran.
func (k *kubectl) run(ctx context.Context, args ...string) ([]byte, error) {
	k.turns <- struct{}{}
	defer func() { <-k.turns }()
	ctx, cancel := context.WithTimeout(ctx, k.timeout)
	defer cancel()
	out := &bounded{left: mostOutput, full: cancel}
	said := &bounded{left: mostErrors, full: func() {}}
	cmd := exec.CommandContext(ctx, "kubectl", k.args(args...)...)
	cmd.Stdout, cmd.Stderr = out, said
	cmd.WaitDelay = time.Second // a credential plugin of kubectl may keep stderr open
	err := cmd.Run()
	var exited *exec.ExitError
	switch {
	case errors.Is(err, exec.ErrNotFound):
		return nil, term.WithHint("add the directory of kubectl to PATH",
			"kubectl not found in PATH")
	case out.isFull:
		return nil, fmt.Errorf("kubectl printed more than %d MiB", mostOutput>>20)
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return nil, fmt.Errorf("no answer within %s (--timeout)", k.timeout)
	case errors.As(err, &exited):
		return out.buf.Bytes(), &refused{exited.ExitCode(), term.Printable(words(said.buf.String(), err))}
	case errors.Is(err, exec.ErrWaitDelay):
		err = nil
	}
	return out.buf.Bytes(), err
}

// refused means that kubectl, or the program that it ran, exited with a code other than 0.
type refused struct {
	code int
	said string
}

func (r *refused) Error() string { return r.said }

// klog matches the log lines that kubectl writes to stderr before the error itself.
var klog = regexp.MustCompile(`^[IWEF]\d{4} \d\d:\d\d:\d\d\.`)

// words returns the errors in a program's stderr, or all of stderr if no line is an error, or
// otherwise's text if stderr is empty.
func words(stderr string, otherwise error) string {
	var errs, all []string
	for line := range strings.Lines(stderr) {
		line = strings.TrimSpace(line)
		if text, is := strings.CutPrefix(line, "error: "); is {
			errs = append(errs, text)
		}
		if line != "" && !klog.MatchString(line) && !strings.HasPrefix(line, "command terminated with") {
			all = append(all, line)
		}
	}
	switch {
	case len(errs) > 0:
		return strings.Join(errs, "; ")
	case len(all) > 0:
		return strings.Join(all, " ")
	}
	return otherwise.Error()
}

// bounded keeps the first bytes that are written to it, and calls full once when it drops the rest.
type bounded struct {
	buf    bytes.Buffer
	left   int
	isFull bool
	full   func()
}

func (b *bounded) Write(p []byte) (int, error) {
	keep := min(len(p), b.left)
	b.buf.Write(p[:keep])
	if b.left -= keep; keep < len(p) && !b.isFull {
		b.isFull = true
		b.full()
	}
	return len(p), nil
}
