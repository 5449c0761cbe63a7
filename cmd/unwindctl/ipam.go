package main

import (
	"errors"
	"io/fs"

	"github.com/spf13/cobra"

	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/cmd/unwindctl/internal/term"
)

func ipamCommand() *cobra.Command {
	var format term.Format
	var flags inspect.Scope
	cmd := &cobra.Command{
		Use:        "ipam",
		SuggestFor: []string{"pools", "addresses"},
		Short:      "Show the pools of host-local, and who has the addresses",
		Long: "Show the pools of host-local of the networks that unwind runs: how many\n" +
			"addresses are given out, how many of them are leaked, and what would free those.\n" +
			"An ADD takes an address out of each range set of a pool, such as one of\n" +
			"IPv4 and one of IPv6, so the pool is full once one set is. In JSON, the size\n" +
			"of a set and what is free of it are exact and below 2^53, or null: the chain\n" +
			"does not give the ranges, or the set is larger (unbounded).\n" +
			"On a terminal, with a map. Nothing is changed.",
		Example: "  unwindctl ipam\n" +
			"  unwindctl ipam --cri auto\n" +
			"  unwindctl ipam --network podnet -o wide",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := flags.Resolve(); err != nil {
				return err
			}
			pools, err := inspect.ReadPools(cmd.Context(), streams(cmd), flags)
			if len(pools) == 0 && errors.Is(err, fs.ErrPermission) {
				return term.WithHint("the conflists, the journal and the pools are root's; run "+
					"this as root", "the pools may not be looked at: %w", err)
			}
			if len(pools) == 0 && err != nil && format != term.JSON {
				return err
			}
			out := cmd.OutOrStdout()
			if format == term.JSON {
				return errors.Join(term.PrintJSON(out, "pools", pools), err)
			}
			return errors.Join(inspect.PrintPools(out, pools, flags, format), err)
		},
	}
	addOutputFlags(cmd, &format, "pools", lookFormats...)
	cmd.Flags().StringVar(&flags.Network, "network", "", "only the pools of this `NETWORK`")
	_ = cmd.RegisterFlagCompletionFunc("network", completeNetworks(&flags.Directories))
	addScopeFlags(cmd, &flags)
	return cmd
}
