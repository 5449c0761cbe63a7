package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"cni-unwind/journal"
	"cni-unwind/plugin"
)

// sweepFlags are those of the command, as given.
type sweepFlags struct {
	network, cri, valid, confDir, stateDir string
	dryRun, force                 bool
}

func sweepCommand() *cobra.Command {
	var flags sweepFlags
	cmd := &cobra.Command{
		Use:   "sweep [ATTACHMENT]",
		Short: "Release the attachments that are dead",
		Long: "Release the attachments that are dead, and try again every DEL that is owed.\n\n" +
			"An attachment is dead if its ADD failed, if the runtime asked for its DEL, if it was made before this boot, or if its\n" +
			"network namespace is gone, with every process in it and its interface on the host. With a list of what is attached\n" +
			"(--cri, --valid) also if the list does not have it, no process is in its namespace and its grace period is over.\n" +
			"Everything else is kept. Run it on the host: from a container nothing can be told, and nothing is done.\n\n" +
			"ATTACHMENT is NETWORK/CONTAINER/IFNAME; of the container ID, the beginning is enough.\n\n" +
			"The exit code is 0 if all that is dead was released, or waits for its time, and of everything else it is known that it lives.",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 1 {
				return usageError{fmt.Errorf("one attachment at most, not %d", len(args))}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error { return sweep(cmd, args, flags) },
	}
	cmd.Flags().StringVar(&flags.network, "network", "", "only the attachments of this network")
	cmd.Flags().BoolVar(&flags.dryRun, "dry-run", false, "say what would be released, and release nothing")
	cmd.Flags().BoolVar(&flags.force, "force", false, "release also where so many seem dead that it is not to be believed")
	cmd.Flags().StringVar(&flags.valid, "valid", "",
		`a file with what is attached to --network: [{"containerID": "…", "ifname": "…"}, …]; - is the standard input`)
	addCommonFlags(cmd, &flags)
	cmd.MarkFlagsMutuallyExclusive("cri", "valid")
	return cmd
}

// addCommonFlags adds those of every command that judges attachments.
func addCommonFlags(cmd *cobra.Command, flags *sweepFlags) {
	cmd.Flags().StringVar(&flags.cri, "cri", "", "ask the runtime at this socket for its pods, such as /run/containerd/containerd.sock")
	cmd.Flags().StringVar(&flags.confDir, "conf-dir", "/etc/cni/net.d", "the folder of the conflists, which name the pools of host-local")
	cmd.Flags().StringVar(&flags.stateDir, "state-dir", plugin.DefaultStateDir, "the folder of the journal")
}

func sweep(cmd *cobra.Command, args []string, flags sweepFlags) error {
	ctx := cmd.Context()
	s := plugin.Sweep{Network: flags.network, DryRun: flags.dryRun, Force: flags.force}
	if len(args) == 1 {
		key, err := findAttachment(ctx, flags.stateDir, args[0])
		if err != nil {
			return err
		}
		s.Attachment = &key
	}
	list, listErr := listFor(ctx, flags, cmd.InOrStdin())
	var wrong usageError
	if errors.As(listErr, &wrong) {
		return listErr
	}
	s.List = list
	p := &plugin.Plugin{Stdout: io.Discard, Stderr: cmd.ErrOrStderr(), Budgets: plugin.DefaultBudgets}
	findings, err := p.Sweep(ctx, flags.stateDir, s)
	if findings == nil && err != nil {
		return errors.Join(listErr, err)
	}
	if len(findings) == 0 {
		return errors.Join(listErr, err, printNone(cmd.OutOrStdout(), &journal.Store{Dir: flags.stateDir}))
	}
	slices.SortFunc(findings, func(a, b plugin.Finding) int { return cmp.Compare(a.Key.String(), b.Key.String()) })
	printErr := printFindings(cmd.OutOrStdout(), findings, flags.dryRun, s.Attachment != nil)
	return errors.Join(listErr, err, left(findings, flags.dryRun), printErr)
}

// listFor returns the list of what is attached, nil if none is given. An error that is no usageError means that the runtime
// did not answer: there is no list then, which is not an empty one.
func listFor(ctx context.Context, flags sweepFlags, stdin io.Reader) (*plugin.List, error) {
	switch {
	case flags.cri != "":
		list, err := podSandboxes(ctx, flags.cri)
		if err != nil {
			return nil, fmt.Errorf("the runtime at %s gave no list, so attachments are judged without one: %w", flags.cri, err)
		}
		return list, nil
	case flags.valid != "" && flags.network == "":
		return nil, usageError{errors.New("--valid needs --network: a list speaks of one network")}
	case flags.valid != "":
		return readValid(flags.valid, flags.network, stdin)
	}
	return nil, nil
}

func readValid(path, network string, stdin io.Reader) (*plugin.List, error) {
	data, err := []byte(nil), error(nil)
	if path == "-" {
		data, err = io.ReadAll(stdin)
	} else {
		data, err = os.ReadFile(path)
	}
	if err != nil {
		return nil, usageError{err}
	}
	valid, err := plugin.ParseValid(data)
	if err != nil {
		return nil, usageError{fmt.Errorf("%s: %w", path, err)}
	}
	return plugin.NewList(network, valid), nil
}

// findAttachment returns the attachment that an argument names.
func findAttachment(ctx context.Context, stateDir, name string) (key journal.Key, err error) {
	parts := strings.Split(name, "/")
	if len(parts) != 3 || slices.Contains(parts, "") {
		return key, usageError{fmt.Errorf("%q is not NETWORK/CONTAINER/IFNAME", name)}
	}
	attachments, err := readJournal(ctx, &journal.Store{Dir: stateDir})
	var found []journal.Key
	for _, a := range attachments {
		if a.Network == parts[0] && a.IfName == parts[2] && strings.HasPrefix(a.ContainerID, parts[1]) {
			found = append(found, journal.Key{Network: a.Network, ContainerID: a.ContainerID, IfName: a.IfName})
		}
	}
	switch {
	case len(found) == 1:
		return found[0], nil
	case err != nil:
		return key, err
	case len(found) == 0:
		return key, usageError{fmt.Errorf("no attachment %s in the journal of %s; unwindctl list shows them", name, stateDir)}
	}
	return key, usageError{fmt.Errorf("%s are %d attachments; write more of the container ID", name, len(found))}
}

// printFindings prints all that does not simply live, and how many of each there are.
func printFindings(out io.Writer, findings []plugin.Finding, dryRun, all bool) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	count := map[string]int{}
	for i := range findings {
		f := &findings[i]
		word, more := result(f, dryRun)
		if count[word]++; word == "live" && !all {
			continue
		}
		if count["shown"]++; count["shown"] == 1 {
			fmt.Fprintln(w, "NETWORK\tCONTAINER\tIFNAME\tPOD\tSTATE\tRESULT\tWHY")
		}
		pod := &f.Pod
		if *pod == (journal.Pod{}) {
			pod = nil
		}
		fmt.Fprintln(w, strings.Join([]string{
			f.Network, short(f.ContainerID), f.IfName, podName(pod), orNone(string(f.State)), word, more,
		}, "\t"))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	var words []string
	for _, word := range []string{"released", "to be released", "pending", "waits", "kept", "unknown", "live"} {
		if count[word] > 0 {
			words = append(words, fmt.Sprintf("%d %s", count[word], word))
		}
	}
	_, err := fmt.Fprintf(out, "%d attachments: %s.\n", len(findings), strings.Join(words, ", "))
	return err
}

func orNone(s string) string { return cmp.Or(s, "-") }

// result says in a word what came of an attachment, and why.
func result(f *plugin.Finding, dryRun bool) (word, why string) {
	why = f.Reason
	var brake *plugin.BrakeError
	switch {
	case f.Fate == plugin.Unknown:
		word = "unknown"
	case !f.Ends():
		word = "live"
	case errors.As(f.Err, &brake):
		word = "kept"
	case f.Waits:
		word = "waits"
	case dryRun:
		word = "to be released"
	case f.Released:
		word = "released"
	case f.Err != nil && len(f.Pending) == 0:
		return "pending", fmt.Sprintf("%s; %v", why, f.Err)
	default:
		word = "pending"
	}
	if f.Ends() && len(f.Pending) > 0 && !f.Released {
		why += "; DEL owed: " + strings.Join(f.Pending, ", ")
	}
	return word, why
}

// left is the error of a sweep that leaves something that it should not.
func left(findings []plugin.Finding, dryRun bool) error {
	pending, unknown := 0, 0
	for i := range findings {
		switch word, _ := result(&findings[i], dryRun); word {
		case "pending":
			pending++
		case "unknown":
			unknown++
		}
	}
	var errs []error
	if pending > 0 {
		errs = append(errs, fmt.Errorf("%d attachments could not be released whole; what is owed is tried again by the next sweep", pending))
	}
	if unknown > 0 {
		errs = append(errs, fmt.Errorf("of %d attachments nothing can be told; they are kept", unknown))
	}
	return errors.Join(errs...)
}
