package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/big"
	"net/netip"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin"
)

// pool is what ipam --json prints of a pool: the addresses of one network of host-local.
type pool struct {
	Network      string        `json:"network"`
	Dir          string        `json:"dir"`
	Size         *big.Int      `json:"size"` // addresses that can be given out; null, as is Free, where the chain does not say
	Used         int           `json:"used"`
	Live         int           `json:"live"`
	Leaked       int           `json:"leaked"`
	Ownerless    int           `json:"ownerless"`
	Unknown      int           `json:"unknown"`
	Free         *big.Int      `json:"free"`
	Reservations []reservation `json:"reservations"`

	sets [][]ipam.Range
}

// reservation is an address that is given out.
type reservation struct {
	Address     netip.Addr `json:"address"`
	ContainerID string     `json:"containerID,omitempty"`
	IfName      string     `json:"ifname,omitempty"`
	State       string     `json:"state"` // live, leaked, ownerless, unknown
	Why         string     `json:"why"`
	Remedy      string     `json:"remedy,omitempty"`
}

func ipamCommand() *cobra.Command {
	var asJSON bool
	var flags sweepFlags
	cmd := &cobra.Command{
		Use:   "ipam",
		Short: "Show the pools of host-local, and who has the addresses",
		Long: "Show the pools of host-local of the networks that unwind runs: how many addresses are given out, how many of them are\n" +
			"leaked, and what would free those. On a terminal, with a map. Nothing is changed.",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := flags.resolve(); err != nil {
				return err
			}
			pools, err := readPools(cmd.Context(), cmd.ErrOrStderr(), cmd.InOrStdin(), flags)
			if pools == nil && err != nil {
				return err
			}
			out := cmd.OutOrStdout()
			if asJSON {
				return errors.Join(printJSON(out, "pools", pools), err)
			}
			return errors.Join(printPools(out, pools, flags), err)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON: version, pools")
	cmd.Flags().StringVar(&flags.network, "network", "", "only the pools of this network")
	addCommonFlags(cmd, &flags)
	return cmd
}

// readPools looks at every pool, and judges who has its addresses as a sweep would.
func readPools(ctx context.Context, stderr io.Writer, stdin io.Reader, flags sweepFlags) ([]*pool, error) {
	found, err := poolsOf(flags)
	list, listErr := listFor(ctx, flags, stdin)
	p := &plugin.Plugin{Stdout: io.Discard, Stderr: stderr, Budgets: plugin.DefaultBudgets}
	findings, sweepErr := p.Sweep(ctx, flags.stateDir, plugin.Sweep{List: list, Pools: found, DryRun: true})
	var brake *plugin.BrakeError
	if errors.As(sweepErr, &brake) { // it is said of each
		sweepErr = nil
	}
	errs := []error{err, listErr, sweepErr}
	pools := []*pool{}
	for _, one := range found {
		p, err := readPool(one, findings)
		errs = append(errs, err)
		if p != nil {
			pools = append(pools, p)
		}
	}
	return pools, errors.Join(errs...)
}

func readPool(of plugin.Pool, findings []plugin.Finding) (*pool, error) {
	p := &pool{Network: of.Network, Dir: of.Dir, Size: new(big.Int), Free: new(big.Int), Reservations: []reservation{}}
	var err error
	if p.sets, err = ipam.Ranges(of.Config); err != nil {
		return nil, fmt.Errorf("network %s: %w", of.Network, err)
	}
	found, err := ipam.Scan(of.Dir)
	if err != nil { // what of it cannot be read is not free
		return nil, fmt.Errorf("network %s: %w", of.Network, err)
	}
	for _, set := range p.sets {
		p.Size.Add(p.Size, ipam.Size(set))
	}
	if len(p.sets) == 0 {
		p.Size, p.Free = nil, nil
	} else {
		p.Free.Set(p.Size)
	}
	count := map[string]*int{"live": &p.Live, "leaked": &p.Leaked, "ownerless": &p.Ownerless, "unknown": &p.Unknown}
	for _, r := range found {
		one := judge(of, r, findings)
		p.Reservations = append(p.Reservations, one)
		p.Used++
		*count[one.State]++
		if slices.ContainsFunc(slices.Concat(p.sets...), func(s ipam.Range) bool { return s.Has(r.Address) }) {
			p.Free.Sub(p.Free, big.NewInt(1))
		}
	}
	return p, nil
}

// judge says of a reservation what the findings of a sweep say of its owner.
func judge(of plugin.Pool, r ipam.Reservation, findings []plugin.Finding) reservation {
	one := reservation{Address: r.Address, ContainerID: r.Owner.ContainerID, IfName: r.Owner.IfName}
	if r.Ownerless() {
		one.State, one.Why = "ownerless", "host-local died before it wrote an owner: no DEL can release it"
		one.Remedy = "unwindctl sweep releases it"
		return one
	}
	for i := range findings {
		f := &findings[i]
		ofEntry := !f.Address.IsValid() && r.Owner.Is(f.ContainerID, f.IfName)
		if f.Network != of.Network || !ofEntry && f.Address != r.Address {
			continue
		}
		one.State, one.Why = map[plugin.Fate]string{plugin.Live: "live", plugin.Unknown: "unknown"}[f.Fate], f.Reason
		if f.Ends() {
			one.State, one.Remedy = "leaked", "unwindctl sweep releases it"
			var brake *plugin.BrakeError
			if errors.As(f.Err, &brake) {
				one.Remedy = "so many seem dead that no sweep believes it; if they are: unwindctl sweep --force"
			} else if len(f.Pending) > 0 && f.State != journal.Live && f.State != journal.Adding {
				one.Remedy = "unwindctl sweep releases it, once these can DEL: " + strings.Join(f.Pending, ", ")
			}
		}
		return one
	}
	one.State, one.Why = "unknown", "the journal does not know its owner: a pod from before the install, or the journal was lost"
	one.Remedy = "unwindctl sweep --cri SOCKET asks the runtime"
	return one
}

func printPools(out io.Writer, pools []*pool, flags sweepFlags) error {
	var text strings.Builder
	if len(pools) == 0 {
		of := ""
		if flags.network != "" {
			of = " of network " + flags.network
		}
		fmt.Fprintf(&text, "No pools: no conflist%s in %s has unwind, with its journal in %s, and host-local in its chain.\n", of, flags.confDir, flags.stateDir)
	}
	colours, terminal := onTerminal(out)
	for i, p := range pools {
		if i > 0 {
			text.WriteByte('\n')
		}
		fmt.Fprintf(&text, "%s (%s): %s addresses, %d used (%d live, %d leaked, %d ownerless, %d unknown), %s free\n",
			p.Network, p.Dir, orMany(p.Size), p.Used, p.Live, p.Leaked, p.Ownerless, p.Unknown, orMany(p.Free))
		if terminal && p.Size != nil {
			p.draw(&text, colours)
		}
		p.explain(&text)
	}
	_, err := io.WriteString(out, text.String())
	return err
}

// orMany is a number of addresses that may not be known.
func orMany(n *big.Int) string {
	if n == nil {
		return "?"
	}
	return n.String()
}

// explain says in words what is not live, with what would free it.
func (p *pool) explain(out io.Writer) {
	groups := map[reservation][]string{}
	for _, r := range p.Reservations {
		if r.State != "live" {
			kind := reservation{State: r.State, Why: r.Why, Remedy: r.Remedy}
			groups[kind] = append(groups[kind], r.Address.String())
		}
	}
	kinds := slices.SortedFunc(maps.Keys(groups), func(a, b reservation) int {
		return cmp.Or(cmp.Compare(a.State, b.State), cmp.Compare(a.Why, b.Why), cmp.Compare(a.Remedy, b.Remedy))
	})
	for _, k := range kinds {
		addresses := groups[k]
		few := strings.Join(addresses[:min(4, len(addresses))], ", ")
		if len(addresses) > 4 {
			few += ", …"
		}
		fmt.Fprintf(out, "  %d %s (%s): %s", len(addresses), k.State, few, k.Why)
		if k.Remedy != "" {
			fmt.Fprintf(out, ". %s", k.Remedy)
		}
		fmt.Fprintln(out, ".")
	}
}
