package inspect

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

	"cni-unwind/cmd/unwindctl/internal/term"
	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/alive"
	"cni-unwind/plugin/sweep"
)

// Pool is what ipam --json prints of a pool: the addresses of one network of host-local.
type Pool struct {
	Network string `json:"network"`
	Dir     string `json:"dir"`
	// addresses that can be given out; null, as is Free, if the chain does not say
	Size         *big.Int      `json:"size"`
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

// Node is a dry run of a sweep, and the pools as it leaves them.
type Node struct {
	Findings []sweep.Finding
	SweepErr error                   // there may be findings nevertheless
	Guard    *sweep.MassReleaseError // a sweep would keep what seems dead; nil if not
	Pools    []*Pool
	PoolErr  error // of those that are not among the pools
}

// Look judges every attachment as a sweep would, without a list of pods, and reads the pools. It
// changes nothing.
func Look(ctx context.Context, stderr io.Writer, of Scope) *Node {
	return look(ctx, stderr, of, nil)
}

func look(ctx context.Context, stderr io.Writer, of Scope, list *alive.List) *Node {
	found, err := of.Pools()
	n := &Node{Pools: []*Pool{}}
	n.Findings, n.SweepErr = Plugin(stderr).Sweep(ctx, of.StateDir,
		sweep.Job{List: list, Pools: found, DryRun: true})
	if errors.As(n.SweepErr, &n.Guard) { // it is said of each
		n.SweepErr = nil
	}
	errs := []error{err}
	for _, one := range found {
		p, err := readPool(one, n)
		errs = append(errs, err)
		if p != nil {
			n.Pools = append(n.Pools, p)
		}
	}
	n.PoolErr = errors.Join(errs...)
	return n
}

// ReadPools reads every pool, and judges who has its addresses as a sweep would.
func ReadPools(ctx context.Context, from term.Streams, of Scope) ([]*Pool, error) {
	list, listErr := of.List(ctx, from.In)
	n := look(ctx, from.Err, of, list)
	return n.Pools, errors.Join(n.PoolErr, listErr, n.SweepErr)
}

func readPool(of sweep.Pool, n *Node) (*Pool, error) {
	p := &Pool{Network: of.Network, Dir: of.Dir, Size: new(big.Int), Free: new(big.Int),
		Reservations: []reservation{}}
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
	count := map[string]*int{"live": &p.Live, "leaked": &p.Leaked, "ownerless": &p.Ownerless,
		"unknown": &p.Unknown}
	for _, r := range found {
		one := judgeOwner(of, r, n)
		p.Reservations = append(p.Reservations, one)
		p.Used++
		*count[one.State]++
		if slices.ContainsFunc(slices.Concat(p.sets...), func(s ipam.Range) bool {
			return s.Has(r.Address)
		}) {
			p.Free.Sub(p.Free, big.NewInt(1))
		}
	}
	return p, nil
}

// judgeOwner returns what the findings of a sweep say of the owner of a reservation.
func judgeOwner(of sweep.Pool, r ipam.Reservation, n *Node) reservation {
	one := reservation{Address: r.Address, ContainerID: r.Owner.ContainerID, IfName: r.Owner.IfName}
	if r.Ownerless() {
		one.State, one.Why = "ownerless",
			"host-local died before it wrote an owner: no DEL can release it"
		one.Remedy = "unwindctl sweep releases it"
		return one
	}
	for i := range n.Findings {
		f := &n.Findings[i]
		ofEntry := !f.Address.IsValid() && r.Owner.Is(f.ContainerID, f.IfName)
		if f.Network != of.Network || !ofEntry && f.Address != r.Address {
			continue
		}
		states := map[alive.Fate]string{alive.Live: "live", alive.Unknown: "unknown"}
		one.State, one.Why = states[f.Fate], f.Reason.Text
		if f.Releasable() {
			one.State, one.Remedy = "leaked", "unwindctl sweep releases it"
			var guard *sweep.MassReleaseError
			if errors.As(f.Err, &guard) {
				one.Remedy = "so many seem dead that no sweep believes it; if they are: unwindctl " +
					"sweep --force"
			} else if len(f.Pending) > 0 && f.State != journal.Live && f.State != journal.Adding {
				one.Remedy = "unwindctl sweep releases it, once these can DEL: " +
					strings.Join(f.Pending, ", ")
			}
		}
		return one
	}
	if n.Findings == nil && n.SweepErr != nil {
		one.State, one.Why = "unknown", "the journal cannot be read"
		return one
	}
	one.State, one.Why = "unknown", "the journal does not know its owner: a pod from before the "+
		"install, or the journal was lost"
	one.Remedy = "unwindctl sweep --cri SOCKET asks the runtime"
	return one
}

// PrintPools prints the pools, on a terminal with a map of each. In the format Wide it prints each
// address that is given out.
func PrintPools(out io.Writer, pools []*Pool, of Scope, format term.Format) error {
	if len(pools) > 0 && format == term.Wide || format == term.Name {
		return printReservations(out, pools, format)
	}
	var text strings.Builder
	if len(pools) == 0 {
		network := ""
		if of.Network != "" {
			network = " of network " + of.Network
		}
		fmt.Fprintf(&text, "No pools: no conflist%s in %s has unwind, with its journal in %s, and "+
			"host-local in its chain.\n", network, of.ConfDir, of.StateDir)
	}
	colours, terminal := term.OnTerminal(out)
	for i, p := range pools {
		if i > 0 {
			text.WriteByte('\n')
		}
		fmt.Fprintf(&text, "%s (%s): %s addresses, %d used (%d live, %d leaked, %d ownerless, %d "+
			"unknown), %s free\n",
			p.Network, p.Dir, Count(p.Size), p.Used, p.Live, p.Leaked, p.Ownerless, p.Unknown,
			Count(p.Free))
		if terminal && p.Size != nil {
			drawMap(&text, p.sets, p.states(), colours, term.Width(out))
		}
		p.explain(&text)
	}
	_, err := io.WriteString(out, text.String())
	return err
}

func printReservations(out io.Writer, pools []*Pool, format term.Format) error {
	t := term.NewTable(term.Column{Name: "NETWORK"}, term.Column{Name: "ADDRESS"},
		term.Column{Name: "STATE"}, term.Column{Name: "CONTAINER"}, term.Column{Name: "IFNAME"},
		term.Column{Name: "WHY"})
	var addresses []string
	for _, p := range pools {
		for _, r := range p.Reservations {
			addresses = append(addresses, r.Address.String())
			t.Add(p.Network, r.Address.String(), r.State, term.OrDash(term.OneLine(r.ContainerID)),
				term.OrDash(term.OneLine(r.IfName)), term.OneLine(r.Why))
		}
	}
	if format == term.Name {
		return term.PrintNames(out, addresses)
	}
	return t.Print(out, format)
}

// states returns the states of the addresses that are given out.
func (p *Pool) states() map[netip.Addr]string {
	states := map[netip.Addr]string{}
	for _, r := range p.Reservations {
		states[r.Address.Unmap()] = r.State
	}
	return states
}

// Count returns a number of addresses as text, "?" if it is not known.
func Count(n *big.Int) string {
	if n == nil {
		return "?"
	}
	return n.String()
}

// explain prints which addresses are not live, and what would free them.
func (p *Pool) explain(out io.Writer) {
	groups := map[reservation][]string{}
	for _, r := range p.Reservations {
		if r.State != "live" {
			kind := reservation{State: r.State, Why: r.Why, Remedy: r.Remedy}
			groups[kind] = append(groups[kind], r.Address.String())
		}
	}
	kinds := slices.SortedFunc(maps.Keys(groups), func(a, b reservation) int {
		return cmp.Or(cmp.Compare(a.State, b.State), cmp.Compare(a.Why, b.Why),
			cmp.Compare(a.Remedy, b.Remedy))
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
