package inspect

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strings"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/pools"
	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/sweep"
)

// Pool is a host-local pool as ipam --json prints it: the addresses of one network.
type Pool struct {
	Network string `json:"network"`
	Dir     string `json:"dir"`
	Plain   bool   `json:"plain"` // a runtime runs the chain itself, without unwind
	Full    bool   `json:"full"`  // a range set has no free address, so every ADD fails
	Counts
	// Unreserved contains live attachments' addresses that host-local counts as free, because the
	// addresses' files are gone (somebody may have emptied Dir).
	Unreserved []netip.Addr `json:"unreserved,omitempty"`

	Sets         []*Set        `json:"sets"`
	NoRanges     string        `json:"rangesUnknown,omitempty"` // why the ranges are unknown
	Reservations []reservation `json:"reservations"`
}

// Counts are the numbers of addresses that are not free, by state. Used is the sum of the states.
type Counts struct {
	Used    int `json:"used"`
	Live    int `json:"live"`
	Recent  int `json:"recent"` // too young to judge by the runtime's list
	Leaked  int `json:"leaked"`
	Empty   int `json:"empty"`
	Unknown int `json:"unknown"`
}

// Set is a range set of a pool, or the addresses of one family outside the chain's ranges. Each ADD
// takes one address from each range set.
type Set struct {
	// Number is host-local's number of the set, as in "failed to allocate for range 0". It is null
	// for addresses outside the ranges.
	Number *int     `json:"set"`
	Family string   `json:"family"`
	Ranges []string `json:"ranges"`
	// Size is the number of addresses that host-local can assign. It is less than 2^53, so JSON
	// readers represent it exactly. A set of 2^53 or more addresses is Unbounded: it never fills up.
	// For such a set, and for the addresses outside all ranges, Size and Free are null.
	Size      *int64 `json:"size"`
	Free      *int64 `json:"free"`
	Unbounded bool   `json:"unbounded"`
	Counts

	ranges pools.Set
}

type reservation struct {
	Address     netip.Addr   `json:"address"`
	ContainerID string       `json:"containerID,omitempty"`
	IfName      string       `json:"ifname,omitempty"`
	Pod         *journal.Pod `json:"pod,omitempty"`
	State       string       `json:"state"` // live, recent, leaked, empty, unknown
	Why         string       `json:"why"`
	Remedy      string       `json:"remedy,omitempty"`
}

// readPools reads pools. The error names the pools that cannot be read completely.
func (r *Report) readPools(found []sweep.Pool) (err error) {
	for _, one := range found {
		p, readErr := readPool(one, r)
		err = errors.Join(err, readErr)
		if p != nil {
			r.Pools = append(r.Pools, p)
		}
	}
	return err
}

// readPool reads a pool. If it returns both a pool and an error, the pool lacks the chain's ranges
// or some of the addresses.
func readPool(of sweep.Pool, n *Report) (*Pool, error) {
	p := &Pool{Network: of.Network, Dir: of.Dir, Plain: of.Plain, Sets: []*Set{},
		Reservations: []reservation{}}
	var sets []pools.Set
	config, rangesErr := pools.OfNode(of.Config)
	if rangesErr == nil {
		sets, rangesErr = pools.Ranges(config)
	} else {
		p.NoRanges, rangesErr = rangesErr.Error(), nil
	}
	found, scanErr := ipam.Scan(of.Dir)
	taken, err := pools.Taken(of.Dir)
	if errors.Is(scanErr, fs.ErrPermission) {
		err = scanErr
	}
	if err != nil { // addresses that cannot be read would count as free
		return nil, fmt.Errorf("network %s: %w", of.Network, err)
	}
	for i, ranges := range sets {
		p.Sets = append(p.Sets, newSet(i, ranges))
	}
	whole := map[netip.Addr]bool{}
	for _, r := range found {
		p.add(judgeOwner(of, r, n))
		whole[r.Address] = true
	}
	for _, a := range taken {
		if _, _, err := ipam.OwnerOf(of.Dir, a); err != nil && !whole[a] {
			p.add(reservation{Address: a, State: "unknown",
				Why: "the address's file is not a valid host-local file; as long as that file exists, " +
					"host-local cannot assign the address",
				Remedy: "If nothing needs that file, remove it from " + of.Dir})
		}
	}
	for _, a := range n.Attachments {
		for _, c := range a.of.Got.Claims {
			if c.Pool == of.Dir && a.Verdict == decide.Live && !a.finding.Busy &&
				!slices.Contains(taken, c.Address) {
				p.Unreserved = append(p.Unreserved, c.Address)
			}
		}
	}
	slices.SortFunc(p.Reservations, func(a, b reservation) int {
		return a.Address.Compare(b.Address)
	})
	for _, s := range p.Sets {
		if s.Size != nil {
			free := *s.Size - int64(s.Used)
			s.Free = &free
		}
		p.Full = p.Full || s.Full()
	}
	if err := errors.Join(rangesErr, scanErr); err != nil {
		return p, fmt.Errorf("network %s: %w", of.Network, err)
	}
	return p, nil
}

func newSet(number int, ranges pools.Set) *Set {
	s := &Set{Number: &number, Family: family(ranges[0].RangeStart.To4() != nil), ranges: ranges}
	for _, r := range ranges {
		s.Ranges = append(s.Ranges, r.String())
	}
	size := ranges.Size()
	if s.Unbounded = size == pools.Unbounded; !s.Unbounded {
		s.Size = &size
	}
	return s
}

func family(is4 bool) string {
	if is4 {
		return "IPv4"
	}
	return "IPv6"
}

// add adds a reservation to the pool, and counts it for the pool and for the set of its address.
func (p *Pool) add(r reservation) {
	p.Reservations = append(p.Reservations, r)
	p.count(r.State)
	p.setOf(r.Address).count(r.State)
}

// setOf returns the set that contains an address. For addresses outside the ranges, it adds a set
// of their family.
func (p *Pool) setOf(a netip.Addr) *Set {
	of := family(a.Is4())
	for _, s := range p.Sets {
		if s.ranges.Has(a) || s.Number == nil && s.Family == of {
			return s
		}
	}
	s := &Set{Family: of, Ranges: []string{}}
	p.Sets = append(p.Sets, s)
	return s
}

// ByState returns a pointer to the number of addresses in each state.
func (c *Counts) ByState() map[string]*int {
	return map[string]*int{"live": &c.Live, "recent": &c.Recent, "leaked": &c.Leaked,
		"empty": &c.Empty, "unknown": &c.Unknown}
}

func (c *Counts) count(state string) {
	c.Used++
	*c.ByState()[state]++
}

func (s *Set) Full() bool { return s.Free != nil && *s.Free <= 0 }

// NearlyFull reports whether less than a tenth of the set is free.
func (s *Set) NearlyFull() bool { return s.Free != nil && 10**s.Free < *s.Size }

// Lost describes the Unreserved addresses, and what to do about them.
func (p *Pool) Lost() (text, remedy string) {
	return fmt.Sprintf("%d live without a reservation (%s): their host-local files are gone, so "+
			"host-local can assign these addresses to other pods", len(p.Unreserved), few(p.Unreserved)),
		"Delete these pods one by one: their replacements get reserved addresses"
}

// few returns the first addresses of a list.
func few(addresses []netip.Addr) string {
	first := term.Join(term.Addresses(addresses[:min(4, len(addresses))]))
	if len(addresses) > 4 {
		first += ", …"
	}
	return first
}

func (s *Set) String() string {
	switch ranges := strings.Join(s.Ranges, ","); {
	case s.Number == nil:
		return fmt.Sprintf("%s, outside the chain's ranges: %d used", s.Family, s.Used)
	case s.Unbounded:
		return fmt.Sprintf("%s: 2^53 addresses or more, %d used", ranges, s.Used)
	case s.Full():
		return fmt.Sprintf("%s: %d addresses, %d used, none free, so every ADD fails", ranges,
			*s.Size, s.Used)
	default:
		return fmt.Sprintf("%s: %d addresses, %d used, %d free", ranges, *s.Size, s.Used, *s.Free)
	}
}

// judgeOwner returns a reservation with the sweep's verdict on its owner.
func judgeOwner(of sweep.Pool, r ipam.Reservation, n *Report) reservation {
	one := reservation{Address: r.Address, ContainerID: r.Owner.ContainerID, IfName: r.Owner.IfName}
	if pod := n.pods[r.Owner.ContainerID]; pod != (journal.Pod{}) {
		one.Pod = &pod
	}
	if r.Empty() {
		one.State, one.Why = "empty", ipam.WhyEmpty
		one.Remedy = "unwindctl sweep releases it"
		return one
	}
	for i := range n.Findings {
		f := &n.Findings[i]
		ofEntry := !reserved(f) && r.Owner.Is(f.ContainerID, f.IfName)
		if f.Network != of.Network || !ofEntry && !slices.Contains(f.Addresses, r.Address) {
			continue
		}
		states := map[decide.Verdict]string{decide.Live: "live", decide.Unknown: "unknown"}
		one.State, one.Why = states[f.Verdict], whyOf(f)
		if f.Verdict == decide.Unknown && len(f.Addresses) > 0 && n.NoRuntime {
			one.Remedy = "To query the runtime, set its socket with --cri"
		}
		if f.Recent() {
			one.State = "recent"
			one.Remedy = "To judge it sooner, run unwindctl sweep" + n.ListFlags() +
				" --grace-period 1m"
		}
		if f.Releasable() {
			command := "unwindctl sweep" + n.ListFlags()
			one.State, one.Remedy = "leaked", command+" releases it"
			if len(f.Addresses) > 0 {
				return one
			}
			var guard *sweep.MassReleaseError
			if errors.As(f.Err, &guard) {
				one.Remedy = "Implausibly many attachments seem dead, so sweeps keep them; check with " +
					command + " --dry-run --force"
			} else if len(f.Pending) > 0 && f.State != journal.Live && f.State != journal.Adding {
				one.Remedy = "unwindctl sweep releases it once the DELs of these plugins succeed: " +
					strings.Join(f.Pending, ", ")
			}
		}
		return one
	}
	if n.JournalErr != nil {
		one.State, one.Why = "unknown", "the journal cannot be read"
		return one
	}
	one.State, one.Why = "unknown",
		"its owner is not in the journal: its ADD was not recorded, or its record was lost or forgotten"
	return one
}
