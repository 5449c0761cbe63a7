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

type sweepFlags struct {
	inspect.Scope
	job    sweep.Job
	output term.Output
}

func sweepCommand() *cobra.Command {
	var flags sweepFlags
	cmd := &cobra.Command{
		Use:        "sweep [ATTACHMENT]",
		SuggestFor: []string{"gc", "clean", "prune"},
		Short:      "Release dead attachments",
		Long: "Release dead attachments, and retry every pending DEL.\n\n" +
			"An attachment is dead if its ADD failed, if the runtime asked for its DEL, if it\n" +
			"was added before this boot, or if its network namespace, all processes in it and\n" +
			"its interface on the host are gone. With a list of attachments (--cri, --valid),\n" +
			"it is also dead if it is not listed, no process is in its namespace and its grace\n" +
			"period is over. sweep keeps everything else.\n\n" +
			"With a list, sweep also works on a node without unwind. It undoes attachments that\n" +
			"only libcni's cache has, with the DELs of the cached chain, and releases the\n" +
			"addresses of other dead owners in the pools of host-local. Both need all evidence\n" +
			"to agree. sweep does not create a journal.\n\n" +
			"Run sweep where the runtime runs: on the host, or in a node that is a container\n" +
			"(kind, k3d, LXC), where only --cri covers attachments outside the journal. In any\n" +
			"other container it cannot judge attachments and does nothing. It can be\n" +
			"interrupted and repeated at any time.\n\n" +
			"ATTACHMENT is NETWORK/CONTAINER/IFNAME, as in unwindctl list, or a container ID,\n" +
			"pod or address that has one attachment. A prefix of a container ID is enough.\n\n" +
			"The results:\n" +
			"  released        nothing of it remains\n" +
			"  to be released  with --dry-run: sweep would release it\n" +
			"  pending         dead; the next sweep retries its failed DELs\n" +
			"  waits           dead, but cannot be released yet; WHY has the reason\n" +
			"  kept            seems dead, but so do more than 10 and more than 30 % of the live\n" +
			"                  attachments in the journal; see --force\n" +
			"  unknown         cannot be judged from here, and is kept\n" +
			"  busy            an ADD, a DEL or another sweep is working on it\n" +
			"  live            in use; counted, and shown only if it is ATTACHMENT\n" +
			"  left            a dead container left something that no DEL removes, such as\n" +
			"                  firewall rules; counted, and listed at the end with the commands\n" +
			"                  that remove it\n\n" +
			"The exit code is 0 if every result is released, to be released, waits, busy or\n" +
			"live, else 1.",
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
	addNetworkFlag(cmd, &flags.Directories, &flags.Network, "only attachments of this `NETWORK`")
	cmd.Flags().BoolVar(&flags.job.DryRun, "dry-run", false,
		"print what would be released, and release nothing")
	cmd.Flags().BoolVar(&flags.job.Force, "force", false,
		"also release attachments that are kept because too many seem dead")
	cmd.Flags().StringVar(&flags.Valid, "valid", "",
		"read the attachments that --network should have from `FILE`, - for stdin: "+
			"[{\"containerID\": \"…\", \"ifname\": \"…\"}, …]")
	cmd.Flags().StringVar(&flags.job.Path, "bin-dir", "",
		"find the plugins for DELs from libcni's cache in `DIR` (default: the runtimes')")
	_ = cmd.MarkFlagDirname("bin-dir")
	flags.output.AddFlags(cmd, cmd.Flags(), "findings, including live ones", lookFormats...)
	addScopeFlags(cmd, &flags.Scope)
	return cmd
}

func runSweep(cmd *cobra.Command, args []string, flags sweepFlags) error {
	ctx := cmd.Context()
	s := flags.job
	s.Network, s.Progress = flags.Network, progress(ctx, cmd.ErrOrStderr())
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
	s.Cache, s.Leftovers, s.Path = true, sweep.Leftovers, cmp.Or(s.Path, node.BinPath())
	if s.Attachment == nil {
		s.Pools, poolErr = flags.Pools()
	}
	p := inspect.Plugin(cmd.ErrOrStderr())
	if s.Progress != nil {
		defer context.AfterFunc(ctx, func() {
			fmt.Fprintln(cmd.ErrOrStderr(),
				"\ninterrupted: waiting for running DELs; interrupt again to exit immediately")
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
			inspect.JSONFindings(findings, s.DryRun))
	} else {
		printErr = inspect.PrintFindings(cmd.OutOrStdout(), findings, s.DryRun,
			s.Attachment != nil, &flags.output)
	}
	return errors.Join(listErr, err, inspect.Remaining(findings, s.DryRun), printErr)
}

// progress shows a sweep's progress until it is interrupted. It is nil without a terminal.
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
