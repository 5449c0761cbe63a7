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

// Bounds on what kubectl prints, which may be a node's own words.
const (
	mostOutput = 64 << 20
	mostErrors = 64 << 10
)

// mostKubectls run at once: each takes 50 MB, and 55 ms of a processor.
const mostKubectls = 16

// kubectl is how the user's kubectl is run.
type kubectl struct {
	flags     *pflag.FlagSet // with those of kubectl
	namespace string
	timeout   time.Duration
	turns     chan struct{} // of those that run at once
}

// handedOn are flags that another program gets as they are given, each with its help.
type handedOn [][2]string

// kubectlFlags are those of kubectl.
var kubectlFlags = handedOn{
	{"context", "the kubeconfig's context `NAME`"},
	{"kubeconfig", "the kubeconfig is `FILE`"},
	{"as", "act as this `USER`, if you may"},
	{"as-group", "act as a member of this `GROUP`; may be repeated"},
}

func (h handedOn) addTo(flags *pflag.FlagSet) {
	for _, f := range h {
		flags.StringArray(f[0], nil, f[1])
	}
}

// of returns what was given.
func (h handedOn) of(flags *pflag.FlagSet) (args []string) {
	for _, f := range h {
		values, _ := flags.GetStringArray(f[0])
		for _, value := range values {
			args = append(args, "--"+f[0]+"="+value)
		}
	}
	return args
}

// args returns arguments for kubectl, after the flags that say which cluster is meant, and as whom.
func (k *kubectl) args(args ...string) []string {
	return slices.Concat([]string{"--namespace=" + k.namespace}, kubectlFlags.of(k.flags), args)
}

// run runs kubectl and returns its output, which may be there although there is an error. An error
// has what kubectl, or the program that it ran, said.
func (k *kubectl) run(ctx context.Context, args ...string) ([]byte, error) {
	k.turns <- struct{}{}
	defer func() { <-k.turns }()
	ctx, cancel := context.WithTimeout(ctx, k.timeout)
	defer cancel()
	out := &bounded{left: mostOutput, full: cancel}
	said := &bounded{left: mostErrors, full: func() {}}
	cmd := exec.CommandContext(ctx, "kubectl", k.args(args...)...)
	cmd.Stdout, cmd.Stderr = out, said
	cmd.WaitDelay = time.Second // a program that kubectl asks for a token may hold stderr open
	err := cmd.Run()
	var exited *exec.ExitError
	switch {
	case errors.Is(err, exec.ErrNotFound):
		return nil, term.WithHint("kubectl unwind runs kubectl; add its directory to PATH",
			"kubectl is not in PATH")
	case out.isFull:
		return nil, fmt.Errorf("it printed more than %d MiB", mostOutput>>20)
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return nil, fmt.Errorf("no answer in %s", k.timeout)
	case errors.As(err, &exited):
		return out.buf.Bytes(), &refused{exited.ExitCode(), term.Printable(words(said.buf.String(), err))}
	case errors.Is(err, exec.ErrWaitDelay):
		err = nil
	}
	return out.buf.Bytes(), err
}

// refused is the exit of kubectl with a code other than 0. It is the code of the program that it
// ran, if it ran one.
type refused struct {
	code int
	said string
}

func (r *refused) Error() string { return r.said }

// klog is how a line of the log begins that kubectl writes to stderr, before it says the same.
var klog = regexp.MustCompile(`^[IWEF]\d{4} \d\d:\d\d:\d\d\.`)

// words returns the errors of a program's stderr, or all of it if it has no line of that kind.
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

// bounded keeps the first bytes that are written to it, and reports once that there are more.
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
