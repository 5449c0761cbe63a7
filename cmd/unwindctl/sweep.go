package main

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/cmd/unwindctl/internal/install"
	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/sweep"
)

type sweepFlags struct {
	inspect.Scope
	opts   sweep.Options
	output term.Output
}

func sweepCommand() *cobra.Command {
	var flags sweepFlags
	cmd := &cobra.Command{
		Use:        "sweep [ATTACHMENT]",
		SuggestFor: []string{"gc", "clean", "prune"},
		Short:      "Release dead attachments",
		Long: "Release dead attachments, and retry every pending DEL.\n\n" +
			"An attachment is dead if its ADD failed, if the runtime sent its DEL, or if it was\n" +
			"added before this boot. It is also dead if its network namespace, all processes in\n" +
			"it and its interface on the host are gone, unless the runtime's list of pods (--cri)\n" +
			"or another list (--valid-attachments) contains it. If such a list lacks it, it is\n" +
			"dead once its grace period is over and no process is in its namespace. sweep keeps\n" +
			"everything else.\n\n" +
			"With a list, sweep also releases dead attachments that are not in the journal, even\n" +
			"on a node without unwind. It runs the DELs of the chain in libcni's cache, or else\n" +
			"those of the conflist whose pool contains the addresses. It releases such an\n" +
			"attachment only if the list is not empty and all evidence agrees that it is dead.\n\n" +
			"An empty list in the FILE of --valid-attachments is an error, because the program\n" +
			"that wrote FILE has probably failed. An empty list from --cri is not: the runtime of\n" +
			"a drained node has no pods.\n\n" +
			"Run sweep where the runtime runs: on the host, or in a node that is itself a\n" +
			"container (kind, k3d, LXC). In such a node, only --cri covers attachments that are\n" +
			"not in the journal. You can interrupt and repeat sweep at any time.\n\n" +
			"ATTACHMENT is NETWORK/CONTAINER/IFNAME, as in unwindctl list, or a container ID,\n" +
			"pod or address with only one attachment. A prefix of a container ID is enough.\n\n" +
			"The results:\n" +
			describe("result") + "\n" +
			describeExits("sweep"),
		Example: "  unwindctl sweep --dry-run\n" +
			"  unwindctl sweep\n" +
			"  unwindctl sweep default/web-0\n" +
			"  unwindctl sweep --network podnet --valid-attachments attached.json",
		Args:              term.OneArg,
		ValidArgsFunction: completeNames(&flags.Directories, false),
		RunE: func(cmd *cobra.Command, args []string) error {
			given := flags.opts.GracePeriod
			if cmd.Flags().Changed("grace-period") && given < time.Minute {
				return term.Usage("--grace-period %s: must be at least 1m, because a pod that has just "+
					"started may not be on the list yet", given)
			}
			return runSweep(cmd, args, flags)
		},
	}
	addNetworkFlag(cmd, &flags.Directories, &flags.Network, "only attachments of this `NETWORK`")
	cmd.Flags().BoolVar(&flags.opts.DryRun, "dry-run", false,
		"print what would be released, and release nothing")
	cmd.Flags().BoolVar(&flags.Force, "force", false,
		"also release attachments that are kept because too many seem dead, the list is empty or a "+
			"record is damaged")
	cmd.Flags().DurationVar(&flags.opts.GracePeriod, "grace-period", 0,
		"with a list of attachments (--cri, --valid-attachments), use the grace period `DURATION` (at "+
			"least 1m) instead of each network's own, and treat addresses of unknown age as older")
	cmd.Flags().StringVar(&flags.Valid, "valid-attachments", "",
		"read the list of valid attachments of the --network from `FILE` (- for stdin): "+
			"[{\"containerID\": \"…\", \"ifname\": \"…\"}, …], with full container IDs")
	cmd.Flags().StringVar(&flags.opts.Path, "cni-bin-dir", "",
		"look in `DIR`, or in a list like CNI_PATH, for the plugins of attachments that are not in the "+
			"journal (default: the runtimes' directories)")
	_ = cmd.MarkFlagDirname("cni-bin-dir")
	flags.output.AddFlags(cmd, cmd.Flags(), "findings, including live ones",
		slices.Concat(lookFormats, []term.Format{term.Line})...)
	addScopeFlags(cmd, &flags.Scope)
	return cmd
}

func runSweep(cmd *cobra.Command, args []string, flags sweepFlags) error {
	ctx := cmd.Context()
	s := flags.opts
	if len(args) == 1 {
		key, err := inspect.FindKey(ctx, flags.StateDir, args[0])
		if err != nil {
			return err
		}
		if flags.Network != "" && flags.Network != key.Network {
			return term.Usage("%s is not an attachment of --network %s", key, flags.Network)
		}
		s.Attachment = &key
	}
	if err := inspect.CheckNetwork(ctx, flags.Directories, flags.Network); err != nil {
		return err
	}
	s.Cache = true
	if !s.DryRun && s.Path == "" {
		s.Path = node.BinPath(ctx)
	}
	defer context.AfterFunc(ctx, func() {
		_ = term.Print(cmd.ErrOrStderr(),
			"interrupted: waiting for running DELs; interrupt again to exit immediately\n")
	})()
	r, err := inspect.Sweep(ctx, inspect.Plugin(cmd.ErrOrStderr()), cmd.InOrStdin(), flags.Scope, s)
	if err != nil {
		return err
	}
	unjudged := slices.ContainsFunc(r.Findings, func(f sweep.Finding) bool {
		return f.Verdict == decide.Unknown && len(f.Addresses) > 0
	})
	if r.NoRuntime && (unjudged || cmd.Flags().Changed("cri")) { // Nomad, for one, has no CRI socket
		_ = term.Print(cmd.ErrOrStderr(), node.WithoutRuntime+"\n")
	}
	err = errors.Join(r.ListErr, r.SweepErr, r.JournalErr)
	// don't check if only one of --conf-dir and --cni-bin-dir is set: the runtimes may differ
	if set := cmd.Flags().Changed; !s.DryRun && set("conf-dir") == set("cni-bin-dir") {
		err = errors.Join(err, pluginMissing(flags.ConfDir, s.Path))
	}
	if r.Guard != nil {
		err = errors.Join(err, r.Guard)
	}
	out := cmd.OutOrStdout()
	switch {
	case r.JournalErr != nil:
		return err
	case flags.output.IsObject():
		return errors.Join(err, inspect.Remaining(r.Findings), flags.output.PrintObject(out,
			"findings", inspect.JSONFindings(r.Findings, s.DryRun)))
	case len(r.Findings) == 0 && flags.output.Format != term.Name:
		return errors.Join(err, r.PrintNoFindings(out))
	}
	return errors.Join(err, inspect.Remaining(r.Findings),
		inspect.PrintFindings(out, r.Findings, s.DryRun, s.Attachment != nil, &flags.output))
}

// pluginMissing returns an error if the runtime loads unwind's conflist, but unwind's plugin is
// missing. On a node without an agent, no other regular check detects this.
func pluginMissing(confDir, path string) error {
	paths, _ := netconf.Conflists(confDir)
	for _, first := range paths[:min(1, len(paths))] {
		c, _ := netconf.ReadConflist(first)
		if _, err := netconf.FindPlugin(netconf.Name, path); c != nil && c.Unwind != nil && err != nil {
			binDir, _, _ := strings.Cut(path, string(filepath.ListSeparator))
			return term.WithHint(install.PluginRemedy(c, binDir), "no pod can start: %s needs a plugin "+
				"that is missing: %w", first, err)
		}
	}
	return nil
}
