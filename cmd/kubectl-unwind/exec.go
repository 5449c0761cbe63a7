package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync/atomic"
	"unicode"

	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
)

const (
	mostAtOnce        = 20
	mostAtOnceCareful = 10
	mostOutput        = 64 << 20 // bytes of one node's output, which could be endless
)

// careful lists the unwindctl commands that take unwind out of use.
var careful = []string{"off", "uninstall"}

// outcome is the output of a command on a node and, if it failed, the reason and the exit code.
type outcome struct {
	text, reason string
	code         int
}

// exec runs an unwindctl command on the selected nodes, and prints the outputs in the nodes' order.
// Without --yes, it asks the user for confirmation of a careful command on several nodes. Without
// --keep-going, once a careful command has failed on one node, exec starts it on no further nodes.
func (o *options) exec(cmd *cobra.Command, args []string) error {
	ctx := cmd.Context()
	nodes, err := o.findNodes(ctx, cmd.ErrOrStderr())
	if err != nil {
		return err
	}
	atOnce, stops := mostAtOnce, false
	i := slices.IndexFunc(args, func(arg string) bool { return slices.Contains(careful, arg) })
	if i > 0 && !strings.HasPrefix(args[0], "-") { // args[0] is the command: "history --kind off"
		i = -1
	}
	if i >= 0 && !slices.Contains(args, "--dry-run") {
		if len(nodes) > 1 && !o.yes {
			if err := ask(ctx, cmd.ErrOrStderr(), args[i], nodes); err != nil {
				return err
			}
		}
		atOnce, stops = mostAtOnceCareful, !o.keepGoing
		args = slices.Insert(args, i+1, "--by=kubectl unwind as "+operator()) // the user's own --by wins
	}
	failed, code := map[string][]string{}, 0
	for i, running := range o.start(ctx, nodes, args, atOnce, stops) {
		done := <-running
		if done.reason != "" {
			failed[done.reason] = append(failed[done.reason], nodes[i].name)
			code = max(code, done.code)
		}
		if err == nil && (done.reason == "" || done.text != "") {
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s:%s\n", nodes[i].name, indent(done.text))
		}
	}
	return errors.Join(err, summarize(ctx, failed, code, len(nodes)))
}

// ask returns nil if the user confirms a command on the terminal.
func ask(ctx context.Context, stderr io.Writer, command string, nodes []node) error {
	const hint = "to run it without being asked, add --yes"
	if _, terminal := term.OnTerminal(os.Stdin); !terminal {
		return term.WithHint(hint, "%w", term.Usage("%s on %d nodes requires confirmation, but stdin "+
			"is not a terminal", command, len(nodes)))
	}
	fmt.Fprintf(stderr, "%s takes unwind out of use on %d nodes: %s to %s.\nContinue? [y/N] ",
		command, len(nodes), nodes[0].name, nodes[len(nodes)-1].name)
	answer := make(chan string, 1)
	go func() {
		line, _ := bufio.NewReader(os.Stdin).ReadString('\n')
		answer <- strings.ToLower(strings.TrimSpace(line))
	}()
	select {
	case <-ctx.Done():
		return errors.New("interrupted")
	case line := <-answer:
		if line != "y" && line != "yes" {
			return term.WithHint(hint, "%w", term.Usage("not confirmed; nothing was done"))
		}
		return nil
	}
}

// operator returns USER@HOST, the name under which unwind records who switched it off.
func operator() string {
	host, _ := os.Hostname()
	return cmp.Or(os.Getenv("USER"), os.Getenv("USERNAME"), "somebody") + "@" + cmp.Or(host, "?")
}

// start runs a command on all nodes, on at most atOnce at a time, and returns a channel for each
// node's outcome. If stops is true, a failure on one node prevents the command from starting on
// further nodes.
func (o *options) start(ctx context.Context, nodes []node, args []string, atOnce int,
	stops bool) []chan outcome {
	outcomes := make([]chan outcome, len(nodes))
	for i := range outcomes {
		outcomes[i] = make(chan outcome, 1)
	}
	slots := make(chan struct{}, atOnce)
	var failed atomic.Bool
	go func() {
		for i, n := range nodes {
			slots <- struct{}{}
			go func() {
				switch {
				case n.pod == "":
					outcomes[i] <- outcome{reason: "no agent", code: term.ExitError}
				case ctx.Err() != nil, stops && failed.Load():
					outcomes[i] <- outcome{reason: notRun, code: term.ExitError}
				default:
					done := o.runUnwindctl(ctx, n.pod, args)
					if done.reason != "" {
						failed.Store(true)
					}
					outcomes[i] <- done
				}
				<-slots
			}()
		}
	}()
	return outcomes
}

const notRun = "not run"

// runUnwindctl runs unwindctl in an agent's pod.
func (o *options) runUnwindctl(ctx context.Context, pod string, args []string) outcome {
	out := &bounded{}
	err := o.kubectl(ctx, out, out, slices.Concat(
		[]string{"exec", "pod/" + pod, "--container=agent", "--", "/unwindctl", "--host"}, args)...)
	done := outcome{text: out.text.String()}
	var exited *exec.ExitError
	switch {
	case out.full:
		done.reason, done.code = errFull.Error(), term.ExitError
	case errors.As(err, &exited) && exited.ExitCode() > 0:
		done.code = exited.ExitCode()
		done.reason = fmt.Sprintf("exit code %d", done.code)
		done.text = strings.TrimSuffix(done.text, "command terminated with "+done.reason+"\n")
	case err != nil:
		done.reason, done.code = err.Error(), term.ExitError
	}
	done.text = strings.TrimRight(done.text, "\n")
	return done
}

// indent formats a node's output to follow the node's name: a single line on the same line, several
// lines indented below it. It replaces control characters.
func indent(text string) string {
	text = strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' || unicode.IsPrint(r) {
			return r
		}
		return '?'
	}, cmp.Or(text, "no output"))
	if strings.Contains(text, "\n") {
		return "\n  " + strings.ReplaceAll(text, "\n", "\n  ")
	}
	return " " + text
}

// summarize returns an error with a line for each reason why nodes failed, or nil if none failed.
func summarize(ctx context.Context, failed map[string][]string, code, nodes int) error {
	var lines []string
	for _, reason := range slices.Sorted(maps.Keys(failed)) {
		names := failed[reason]
		lines = append(lines, fmt.Sprintf("%s on %d of %s: %s", reason, len(names),
			term.Plural(nodes, "node", "nodes"), strings.Join(names, ", ")))
	}
	text := strings.Join(lines, "\n")
	switch {
	case len(failed) == 0:
		return nil
	case ctx.Err() != nil:
		return errors.New(text + "\ninterrupted")
	case failed[notRun] != nil:
		return term.WithHint("to continue, select the remaining nodes with --nodes, or add "+
			"--keep-going", "%w", term.Coded{Code: code, Text: text})
	}
	return term.Coded{Code: code, Text: text}
}

// bounded is a buffer for output. Write returns errFull if there are more than mostOutput bytes.
type bounded struct {
	text strings.Builder
	full bool
}

var errFull = fmt.Errorf("output cut off after %d MiB", mostOutput>>20)

func (b *bounded) Write(p []byte) (int, error) {
	if b.full = b.full || b.text.Len()+len(p) > mostOutput; b.full {
		return 0, errFull
	}
	return b.text.Write(p)
}
