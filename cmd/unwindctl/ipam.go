package main

import (
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/inspect"
)

func ipamCommand() *cobra.Command {
	var format term.Format
	var flags inspect.Scope
	var watch bool
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
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := flags.Resolve(); err != nil {
				return err
			}
			if watch {
				return watchPools(cmd, flags, format)
			}
			return showPools(cmd, flags, format)
		},
	}
	cmd.Flags().StringVar(&flags.Valid, "valid", "",
		"a `FILE` with all that is attached to --network, as unwindctl sweep takes it")
	cmd.Flags().BoolVar(&watch, "watch", false, "show them again every two seconds, until interrupted")
	addOutputFlags(cmd, &format, "pools", lookFormats...)
	cmd.Flags().StringVar(&flags.Network, "network", "", "only the pools of this `NETWORK`")
	_ = cmd.RegisterFlagCompletionFunc("network", completeNetworks(&flags.Directories))
	addScopeFlags(cmd, &flags)
	return cmd
}

func showPools(cmd *cobra.Command, of inspect.Scope, format term.Format) error {
	pools, err := inspect.ReadPools(cmd.Context(), streams(cmd), of)
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
	return errors.Join(inspect.PrintPools(out, pools, of, format), err)
}

// watchInterval is the time between two looks.
const watchInterval = 2 * time.Second

// watchPools shows the pools until it is interrupted, on a terminal each time in the same place.
func watchPools(cmd *cobra.Command, of inspect.Scope, format term.Format) error {
	if of.Valid == "-" {
		return term.Usage("--watch reads the list again each time: --valid - cannot be")
	}
	out := cmd.OutOrStdout()
	for {
		if _, terminal := term.OnTerminal(out); terminal {
			fmt.Fprint(out, "\x1b[H\x1b[2J")
		}
		if err := showPools(cmd, of, format); err != nil && cmd.Context().Err() == nil {
			fmt.Fprintf(cmd.ErrOrStderr(), "error: %v\n", err)
		}
		select {
		case <-cmd.Context().Done():
			return nil
		case <-time.After(watchInterval):
		}
	}
}
