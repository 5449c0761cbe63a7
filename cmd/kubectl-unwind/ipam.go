package main

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
)

// pools is the output of unwindctl ipam on a node.
type pools []struct {
	Network, Dir string
	counts
	Sets         []set
	Reservations []item
}

type counts struct{ Used, Live, Recent, Leaked, Empty, Unknown int }

// set is a range set. Each ADD takes one address from it.
type set struct {
	Family     string
	Ranges     []string
	Size, Free *int64 // nil if the chain does not define the ranges, or if the set is Unbounded
	Unbounded  bool
	counts
}

func ipamCommand(o *options) *cobra.Command {
	v := &view{
		unwindctl: []string{"ipam", "--cri", "auto"}, key: "pools",
		report: func() report { return &pools{} },
		words:  []string{"live", "recent", "leaked", "empty", "unknown"},
		none:   "no pools",
		columns: []string{"NETWORK", "RANGES", "USED", "SIZE", "LIVE", "RECENT", "LEAKED",
			"EMPTY", "UNKNOWN", "FREE", "POOL"},
		wide: []string{"NETWORK", "ADDRESS", "STATE", "POD", "CONTAINER", "IFNAME", "REASON"},
	}
	return term.AddWatch(v.command(o, &cobra.Command{
		Use:   "ipam",
		Short: "Show the host-local pools on each node, fullest first",
		Long: "Show the host-local pools on each node, fullest first: how many addresses are\n" +
			"allocated, and how many of them are leaked. Each node gets the list of pods from its\n" +
			"runtime. A pool has a row for each range set, such as one for IPv4 and one for IPv6:\n" +
			"an ADD takes an address from each set, and fails if one of them is full.\n" +
			"-o wide shows every allocated address.",
		Example: "  kubectl unwind ipam\n" +
			"  kubectl unwind ipam -o wide --nodes worker-2",
	}))
}

func (all *pools) count() map[string]int {
	count := map[string]int{}
	for _, p := range *all {
		count["live"] += p.Live
		count["recent"] += p.Recent
		count["leaked"] += p.Leaked
		count["empty"] += p.Empty
		count["unknown"] += p.Unknown
	}
	return count
}

func (all *pools) rows(v *view, wide bool) (rows []row) {
	for _, p := range *all {
		fullest := 0.0
		sets := p.Sets
		if len(sets) == 0 { // no allocated addresses, and the chain does not define the ranges
			sets = []set{{}}
		}
		for _, s := range sets {
			use, percent := s.use()
			fullest = max(fullest, use)
			if !wide {
				rows = append(rows, row{use, []string{p.Network,
					cmp.Or(strings.Join(s.Ranges, ","), s.Family, "-"), percent,
					s.number(s.Size), strconv.Itoa(s.Live), strconv.Itoa(s.Recent),
					strconv.Itoa(s.Leaked), strconv.Itoa(s.Empty), strconv.Itoa(s.Unknown),
					s.number(s.Free), p.Dir}})
			}
		}
		for _, r := range p.Reservations {
			if r.Network = p.Network; wide {
				rows = append(rows, r.rows(v.wide, fullest)...)
			}
		}
	}
	return rows
}

// use returns the used fraction of the set, also in percent. 100 % means that the set is full.
func (s set) use() (part float64, percent string) {
	switch {
	case s.Unbounded:
		return 0, "0%"
	case s.Size == nil || s.Free == nil || *s.Size < *s.Free:
		return 0, "?"
	case *s.Free <= 0:
		return 1, "100%"
	}
	used := *s.Size - *s.Free
	return float64(used) / float64(*s.Size), fmt.Sprintf("%d%%", 100*used / *s.Size)
}

func (s set) number(n *int64) string {
	switch {
	case n != nil:
		return strconv.FormatInt(*n, 10)
	case s.Unbounded:
		return "2^53 or more"
	}
	return "?"
}
