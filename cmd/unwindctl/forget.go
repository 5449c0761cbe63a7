package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"

	"github.com/containernetworking/plugins/pkg/utils"
	"github.com/spf13/cobra"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin"
)

// forgetFlags are those of the command, as given.
type forgetFlags struct {
	where
	network   string
	dead, yes bool
}

func forgetCommand() *cobra.Command {
	var flags forgetFlags
	cmd := &cobra.Command{
		Use:   "forget ATTACHMENT | --network NETWORK --dead",
		Short: "Give up dead attachments whose DELs can never pass",
		Long: "Give up attachments that are dead and whose DELs can never pass, since their plugin is gone for good. No DEL is run: what the\n" +
			"plugins took stays where it is, and what may be left is printed. The runtime's DEL, if it still comes, succeeds. The history\n" +
			"keeps what was forgotten.\n\n" +
			"What is not dead is refused. Try unwindctl sweep first, and see unwindctl show for what keeps it.\n" +
			"Without --yes nothing is forgotten, and the exit code is 1.",
		Args: func(_ *cobra.Command, args []string) error {
			switch {
			case len(args) > 1:
				return usageError{fmt.Errorf("one attachment, not %d", len(args))}
			case len(args) == 1 && (flags.network != "" || flags.dead):
				return usageError{errors.New("name an attachment, or all dead ones with --network NETWORK --dead, not both")}
			case len(args) == 0 && (flags.network == "" || !flags.dead):
				return usageError{errors.New("name an attachment, or all dead ones with --network NETWORK --dead")}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := flags.resolve(); err != nil {
				return err
			}
			keys, err := forgettable(cmd, args, flags)
			if err != nil {
				return err
			}
			return forget(cmd, keys, flags)
		},
	}
	cmd.Flags().StringVar(&flags.network, "network", "", "all of this `NETWORK`, with --dead")
	cmd.Flags().BoolVar(&flags.dead, "dead", false, "those that are dead, with --network")
	cmd.Flags().BoolVar(&flags.yes, "yes", false, "forget them; without it they are only shown")
	flags.addStateFlag(cmd)
	return cmd
}

// forgettable returns the attachments that the command names.
func forgettable(cmd *cobra.Command, args []string, flags forgetFlags) ([]journal.Key, error) {
	p := &plugin.Plugin{Stdout: io.Discard, Stderr: cmd.ErrOrStderr(), Budgets: plugin.DefaultBudgets}
	findings, err := judgeAll(cmd.Context(), p, flags.stateDir, nil)
	if len(args) == 1 {
		key, findErr := findOne(cmd.Context(), flags.stateDir, args[0])
		for k, f := range findings { // one that is damaged is found by its full name alone
			if k.String() == args[0] && f.Err != nil {
				key, findErr = k, nil
			}
		}
		if f := findings[key]; findErr == nil && f != nil && f.Err == nil && !f.Ends() {
			findErr = fmt.Errorf("%s is not dead but %s (%s); only what is dead can be forgotten", key, f.Fate, f.Reason)
		}
		return []journal.Key{key}, findErr
	}
	var keys []journal.Key
	for k, f := range findings {
		if k.Network == flags.network && f.Ends() {
			keys = append(keys, k)
		}
	}
	slices.SortFunc(keys, func(a, b journal.Key) int { return cmp.Compare(a.String(), b.String()) })
	return keys, err
}

func forget(cmd *cobra.Command, keys []journal.Key, flags forgetFlags) error {
	out := cmd.OutOrStdout()
	if len(keys) == 0 {
		_, err := fmt.Fprintf(out, "No dead attachments of network %s.\n", flags.network)
		return err
	}
	store := &journal.Store{Dir: flags.stateDir}
	p := &plugin.Plugin{Stdout: io.Discard, Stderr: cmd.ErrOrStderr(), Budgets: plugin.DefaultBudgets}
	var errs []error
	for _, key := range keys {
		leaks, err := leaksOf(cmd.Context(), store, key)
		if flags.yes && err == nil {
			err = p.Forget(cmd.Context(), flags.stateDir, key)
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		word := map[bool]string{true: "forgotten", false: "to be forgotten"}[flags.yes]
		if len(leaks) == 0 {
			leaks = []string{"nothing that is known"}
		}
		fmt.Fprintf(out, "%s: %s; what may be left:\n", key, word)
		for _, leak := range leaks {
			fmt.Fprintf(out, "  %s\n", leak)
		}
	}
	if !flags.yes {
		errs = append(errs, errors.New("nothing is forgotten without --yes"))
	}
	return errors.Join(errs...)
}

// leaksOf says what the delegates of an attachment may leave on this machine if none of them gets its DEL.
func leaksOf(ctx context.Context, store *journal.Store, key journal.Key) (leaks []string, err error) {
	var e *journal.Entry
	err = store.View(ctx, func(tx *journal.Tx) error {
		e, err = tx.Get(key)
		return err
	})
	var damaged *journal.DamagedError
	if errors.As(err, &damaged) {
		return []string{"whatever its plugins took: its entry cannot be read"}, nil
	}
	if err != nil || e == nil {
		return nil, err
	}
	for _, g := range e.Generations {
		for _, l := range g.HostLinks {
			leaks = append(leaks, fmt.Sprintf("interface %s (%s) on the host", l.Name, l.MAC))
		}
		for _, s := range g.Steps {
			leaks = append(leaks, leaksOfStep(e, &s)...)
		}
	}
	slices.Sort(leaks)
	return slices.Compact(leaks), nil
}

// leaksOfStep says it of one delegate. The names are those that the reference plugins v1.9 give.
func leaksOfStep(e *journal.Entry, s *journal.Step) (leaks []string) {
	var conf struct {
		IPMasq bool `json:"ipMasq"`
		IPAM   struct {
			Type string `json:"type"`
		} `json:"ipam"`
	}
	_ = json.Unmarshal(s.Config, &conf)
	if pool := ipam.Pool(s.Config, e.Network); pool != "" {
		held, _ := ipam.HeldBy(pool, e.ContainerID, e.IfName)
		for _, a := range held {
			leaks = append(leaks, fmt.Sprintf("%s: the address of host-local", filepath.Join(pool, a.String())))
		}
	} else if conf.IPAM.Type != "" {
		leaks = append(leaks, fmt.Sprintf("%s: what it keeps for container %s, such as %s", conf.IPAM.Type, e.ContainerID,
			orDash(addressTexts(e.Addresses()))))
	}
	switch s.Type {
	case "bridge", "ptp":
		if conf.IPMasq {
			leaks = append(leaks, fmt.Sprintf("%s: chain %s in table nat, and the rules that jump to it", s.Type, utils.FormatChainName(e.Network, e.ContainerID)))
		}
	case "portmap":
		leaks = append(leaks, fmt.Sprintf("portmap: chain %s in table nat, and the rules that jump to it",
			utils.MustFormatChainNameWithPrefix(e.Network, e.ContainerID, "DN-")))
	case "firewall":
		leaks = append(leaks, fmt.Sprintf("firewall: rules for %s in chain CNI-FORWARD of table filter", orDash(addressTexts(e.Addresses()))))
	case "loopback":
	default:
		leaks = append(leaks, fmt.Sprintf("%s: whatever it took for container %s, interface %s", s.Type, e.ContainerID, e.IfName))
	}
	return leaks
}
