package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"strconv"

	"github.com/spf13/cobra"
)

// pools is what unwindctl ipam prints of a node.
type pools []struct {
	Network, Dir                           string
	Size, Free                             json.Number // "" if the chain does not say
	Used, Live, Leaked, Ownerless, Unknown int
	Reservations                           []struct{ Address, ContainerID, IfName, State, Why string }
}

func ipamCommand(o *options) *cobra.Command {
	v := &view{
		unwindctl: []string{"ipam", "--cri", "auto"}, key: "pools",
		report: func() report { return &pools{} },
		words:  []string{"live", "leaked", "ownerless", "unknown"},
		none:   "no pools",
		columns: []string{"NETWORK", "USE", "SIZE", "LIVE", "LEAKED", "OWNERLESS", "UNKNOWN", "FREE",
			"POOL"},
		wide: []string{"NETWORK", "ADDRESS", "STATE", "CONTAINER", "IFNAME", "WHY"},
	}
	return v.command(o, &cobra.Command{
		Use:   "ipam",
		Short: "Show the pools of host-local of each node, the fullest first",
		Long: "Show the pools of host-local of each node, the fullest first: how many addresses are\n" +
			"given out, and how many of them are leaked. Each node asks its runtime for its pods.\n" +
			"With -o wide there is each address that is given out.",
		Example: "  kubectl unwind ipam\n" +
			"  kubectl unwind ipam -o wide --node worker-2",
	})
}

func (all *pools) count() map[string]int {
	count := map[string]int{}
	for _, p := range *all {
		count["live"] += p.Live
		count["leaked"] += p.Leaked
		count["ownerless"] += p.Ownerless
		count["unknown"] += p.Unknown
	}
	return count
}

func (all *pools) rows(wide bool) (rows []row) {
	for _, p := range *all {
		use, percent := 0.0, "?"
		if size, err := strconv.ParseFloat(p.Size.String(), 64); err == nil && size > 0 {
			use = float64(p.Used) / size
			percent = fmt.Sprintf("%.0f%%", 100*use)
		}
		if !wide {
			rows = append(rows, row{use, []string{p.Network, percent, known(p.Size),
				strconv.Itoa(p.Live), strconv.Itoa(p.Leaked), strconv.Itoa(p.Ownerless),
				strconv.Itoa(p.Unknown), known(p.Free), p.Dir}})
			continue
		}
		for _, r := range p.Reservations {
			rows = append(rows, row{use, []string{p.Network, r.Address, r.State,
				cmp.Or(r.ContainerID, "-"), cmp.Or(r.IfName, "-"), r.Why}})
		}
	}
	return rows
}

// known returns a number, "?" if it is not known.
func known(n json.Number) string { return cmp.Or(short(n.String()), "?") }
