package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/plugin/sweep"
)

// sweepFlags are the command's.
type sweepFlags struct {
	inspect.Scope
	dryRun, force bool
	binDir        string
	output        term.Output
}

func sweepCommand() *cobra.Command {
	var flags sweepFlags
	cmd := &cobra.Command{
		Use:        "sweep [ATTACHMENT]",
		SuggestFor: []string{"gc", "clean", "prune"},
		Short:      "Release the attachments that are dead",
		Long: "Release the attachments that are dead, and try every pending DEL again.\n\n" +
			"An attachment is dead if its ADD failed, if the runtime asked for its DEL, if it\n" +
			"was made before this boot, or if its network namespace is gone, with every\n" +
			"process in it and its interface on the host. With a list of what is attached\n" +
			"(--cri, --valid) it is also dead if it is not on the list, no process is in its\n" +
			"namespace and its grace period is over. Everything else is kept.\n\n" +
			"With such a list sweep also works on a node without unwind: it undoes the\n" +
			"attachments that libcni's cache has and the journal does not, by the DELs of the\n" +
			"chain in that cache, and releases the addresses of other dead owners in the pools\n" +
			"of host-local. Both are dead only if all evidence says so. It makes no journal.\n\n" +
			"Run sweep where the runtime runs: on the host, or in a node that is a container\n" +
			"(kind, k3d, LXC), where only --cri covers what the journal does not have. In\n" +
			"another container it cannot judge anything, and does nothing. It can be\n" +
			"interrupted and repeated at any time.\n\n" +
			"ATTACHMENT is NETWORK/CONTAINER/IFNAME, as unwindctl list shows it, or a\n" +
			"container ID, a pod or an address with one attachment. The beginning of a\n" +
			"container ID is enough.\n\n" +
			"The results:\n" +
			"  released        nothing of it is left\n" +
			"  to be released  with --dry-run: sweep would try it\n" +
			"  pending         it is dead; the next sweep tries the DELs that failed again\n" +
			"  waits           it is dead, and nothing can be done yet: WHY says what for\n" +
			"  kept            it seems dead, but so do more than 10 and more than 30 % of the\n" +
			"                  attachments that are live in the journal: see --force\n" +
			"  unknown         nothing here shows whether it lives; it is kept\n" +
			"  busy            an ADD, a DEL or another sweep works on it\n" +
			"  live            counted, and shown only if ATTACHMENT names it\n" +
			"  left            counted: a dead container has left something that no DEL removes,\n" +
			"                  such as rules. It is named at the end, with the commands that do\n\n" +
			"The exit code is 0 if each is released (or to be), waits, is busy or lives, and\n" +
			"1 if not.",
		Example: "  unwindctl sweep --dry-run\n" +
			"  unwindctl sweep --cri auto\n" +
			"  unwindctl sweep default/web-0\n" +
			"  unwindctl sweep --network podnet --valid attached.json",
		Args:              term.OneArg,
		ValidArgsFunction: completeNames(&flags.Directories, false),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runSweep(cmd, args, flags)
		},
	}
	addNetworkFlag(cmd, &flags.Directories, &flags.Network, "only the attachments of this `NETWORK`")
	cmd.Flags().BoolVar(&flags.dryRun, "dry-run", false,
		"say what would be released, and release nothing")
	cmd.Flags().BoolVar(&flags.force, "force", false,
		"release also what is kept since too much seems dead")
	cmd.Flags().StringVar(&flags.Valid, "valid", "",
		"a `FILE` with all that is attached to --network, - for stdin: [{\"containerID\": \"…\", "+
			"\"ifname\": \"…\"}, …]")
	cmd.Flags().StringVar(&flags.binDir, "bin-dir", "",
		"the plugins are in `DIR` (default: the runtimes'); for DELs by libcni's cache")
	_ = cmd.MarkFlagDirname("bin-dir")
	flags.output.AddFlags(cmd, cmd.Flags(), "findings; live ones too", lookFormats...)
	addScopeFlags(cmd, &flags.Scope)
	return cmd
}

func runSweep(cmd *cobra.Command, args []string, flags sweepFlags) error {
	ctx := cmd.Context()
	s := sweep.Job{Network: flags.Network, DryRun: flags.dryRun, Force: flags.force,
		Progress: progress(ctx, cmd.ErrOrStderr())}
	if len(args) == 1 {
		key, err := inspect.FindOne(ctx, flags.StateDir, args[0])
		if err != nil {
			return err
		}
		if flags.Network != "" && flags.Network != key.Network {
			return term.Usage("%s is not an attachment of --network %s", key, flags.Network)
		}
		s.Attachment = &key
	}
	list, listErr := flags.List(ctx, cmd.InOrStdin())
	var wrong term.UsageError
	if errors.As(listErr, &wrong) {
		return listErr
	}
	s.List = list
	var poolErr error
	s.Cache, s.Path = true, cmp.Or(flags.binDir, node.BinPath())
	if s.Attachment == nil {
		s.Pools, poolErr = flags.Pools()
	}
	p := inspect.Plugin(cmd.ErrOrStderr())
	if s.Progress != nil {
		defer context.AfterFunc(ctx, func() {
			fmt.Fprintln(cmd.ErrOrStderr(),
				"\ninterrupted: the DELs that run are finished first; once more ends at once")
		})()
	}
	findings, err := p.Sweep(ctx, flags.StateDir, s)
	listErr = errors.Join(listErr, poolErr)
	if findings == nil && err != nil {
		return errors.Join(listErr, err)
	}
	if len(findings) == 0 && !flags.output.IsObject() && flags.output.Format != term.Name {
		return errors.Join(listErr, err, inspect.PrintNoFindings(cmd.OutOrStdout(), flags.Scope, s))
	}
	slices.SortFunc(findings, func(a, b sweep.Finding) int {
		return cmp.Compare(a.Key.String(), b.Key.String())
	})
	var printErr error
	if flags.output.IsObject() {
		printErr = flags.output.PrintObject(cmd.OutOrStdout(), "findings",
			inspect.JSONFindings(findings, flags.dryRun))
	} else {
		printErr = inspect.PrintFindings(cmd.OutOrStdout(), findings, flags.dryRun,
			s.Attachment != nil, &flags.output)
	}
	return errors.Join(listErr, err, inspect.Remaining(findings, flags.dryRun), printErr)
}

// progress returns a function that shows on a terminal how far a sweep has come, until it is
// interrupted; nil without a terminal.
func progress(ctx context.Context, out io.Writer) func(done, of int) {
	if _, terminal := term.OnTerminal(out); !terminal {
		return nil
	}
	return func(done, of int) {
		if ctx.Err() != nil {
			return
		}
		// a log line overwrites it
		text := fmt.Sprintf("%d of %s tried\r", done, term.Attachments(of))
		if done == of {
			text = "" // the table has it all
		}
		fmt.Fprint(out, "\x1b[K", text)
	}
}
