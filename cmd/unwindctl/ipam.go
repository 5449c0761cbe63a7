package main

import (
	"errors"
	"io/fs"

	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/inspect"
)

func ipamCommand() *cobra.Command {
	var o term.Output
	var flags inspect.Scope
	cmd := &cobra.Command{
		Use:        "ipam",
		SuggestFor: []string{"pools", "addresses"},
		Short:      "Show the pools of host-local, and who has the addresses",
		Long: "Show the pools of host-local on this node, with or without unwind: how many\n" +
			"addresses are given out, how many of them are leaked, and what would free those.\n" +
			"-o wide shows each address, its container, as crictl pods has it, and why it\n" +
			"is kept or lost.\n" +
			"An ADD takes an address out of each range set of a pool, such as one of\n" +
			"IPv4 and one of IPv6, so the pool is full once one set is. In JSON, the size\n" +
			"of a set and what is free of it are exact and below 2^53, or null: the chain\n" +
			"does not give the ranges, or the set is larger (unbounded).\n" +
			"On a terminal, with a map. Nothing is changed.",
		Example: "  unwindctl ipam\n" +
			"  unwindctl ipam --cri auto\n" +
			"  unwindctl ipam --network podnet -o wide",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if flags.Valid == "-" && cmd.Flags().Changed("watch") {
				return term.Usage("--watch reads the list again each time: --valid - cannot be")
			}
			return showPools(cmd, flags, &o)
		},
	}
	cmd.Flags().StringVar(&flags.Valid, "valid", "",
		"a `FILE` with all that is attached to --network, as unwindctl sweep takes it")
	o.AddFlags(cmd, cmd.Flags(), "pools", lookFormats...)
	term.AddWatch(cmd)
	addNetworkFlag(cmd, &flags.Directories, &flags.Network, "only the pools of this `NETWORK`")
	addScopeFlags(cmd, &flags)
	return cmd
}

func showPools(cmd *cobra.Command, of inspect.Scope, o *term.Output) error {
	pools, err := inspect.ReadPools(cmd.Context(), streams(cmd), of)
	var wrong term.UsageError
	if errors.As(err, &wrong) {
		return err
	}
	if len(pools) == 0 && errors.Is(err, fs.ErrPermission) {
		return term.WithHint("the conflists, the journal and the pools are root's; run "+
			"this as root", "the pools may not be looked at: %w", err)
	}
	if len(pools) == 0 && err != nil && !o.IsObject() {
		return err
	}
	out := cmd.OutOrStdout()
	if o.IsObject() {
		return errors.Join(o.PrintObject(out, "pools", pools), err)
	}
	return errors.Join(inspect.PrintPools(out, pools, of, o), err)
}
