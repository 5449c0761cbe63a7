package inspect

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/sweep"
)

// finding is one finding as sweep --json prints it, about an attachment or about an address without
// an attachment.
type finding struct {
	Network     string        `json:"network"`
	ContainerID string        `json:"containerID,omitempty"`
	IfName      string        `json:"ifname,omitempty"`
	Address     string        `json:"address,omitempty"`   // of a reservation without an attachment
	Cached      bool          `json:"cached,omitempty"`    // in libcni's cache, not in the journal
	Addresses   []netip.Addr  `json:"addresses,omitempty"` // of an attachment outside the journal
	Pod         *journal.Pod  `json:"pod,omitempty"`
	State       journal.State `json:"state,omitempty"`
	Verdict     decide.Fate   `json:"verdict"`
	Result      string        `json:"result"` // as in the table
	Why         string        `json:"why"`
	Pending     []string      `json:"pending,omitempty"` // the plugins with a pending DEL
	Error       string        `json:"error,omitempty"`
}

func JSONFindings(findings []sweep.Finding, dryRun bool) []finding {
	all := []finding{}
	for i := range findings {
		f := &findings[i]
		word, _ := Result(f, dryRun)
		one := finding{
			Network: f.Network, ContainerID: f.ContainerID, IfName: f.IfName, State: f.State,
			Verdict: f.Fate, Result: word,
			Why: whyOf(f), Pending: f.Pending, Cached: f.Cached, Addresses: f.Addresses,
		}
		if reserved(f) {
			one.Address = f.Addresses[0].String()
		}
		if f.Pod != (journal.Pod{}) {
			one.Pod = &f.Pod
		}
		if f.Err != nil {
			one.Error = f.Err.Error()
		}
		all = append(all, one)
	}
	return all
}

// reserved reports whether a finding is about addresses whose owner is neither in the journal nor
// in libcni's cache.
func reserved(f *sweep.Finding) bool { return len(f.Addresses) > 0 && !f.Cached }

// PrintNoFindings prints that there are no attachments, in the selected network or at all.
func (r *Report) PrintNoFindings(out io.Writer) error {
	err := PrintNoAttachments(out, &journal.Store{Dir: r.StateDir}, r.Network)
	if err == nil && r.Network != "" && len(r.Pools) == 0 {
		err = term.Print(out, fmt.Sprintf("No conflist of network %s uses host-local.\n", r.Network))
	}
	return err
}

// Results are the words that Result returns, and "not tried", in the order of PrintFindings.
var Results = []string{"released", "partly released", "to be released", "pending", "waits",
	"kept", "unknown", "busy", "recent", "live", "not tried"}

// PrintFindings prints a table of the findings and their counts. It leaves out live attachments,
// unless all is set or the runtime does not list them, and attachments that were not tried.
func PrintFindings(out io.Writer, findings []sweep.Finding, dryRun, all bool,
	o *term.Output) error {
	t := term.NewTable(
		term.Column{Name: "NETWORK", Optional: true}, term.Column{Name: "CONTAINER", Least: 11},
		term.Column{Name: "IFNAME", Optional: true}, term.Column{Name: "POD", Least: 36},
		term.Column{Name: "STATE", Optional: true}, term.Column{Name: "RESULT"},
		term.Column{Name: "REASON", Least: 13})
	count, addresses, cached := map[string]int{}, 0, 0
	var names []string
	for i := range findings {
		f := &findings[i]
		word, why := Result(f, dryRun)
		if f.Cached {
			cached++
		} else if reserved(f) {
			addresses++
		}
		if errors.Is(f.Err, sweep.ErrNotTried) {
			count["not tried"]++
			continue
		}
		if count[word]++; word == "live" && !all && !f.Warn {
			continue
		}
		name := f.Key.String()
		if reserved(f) {
			name = f.Addresses[0].String()
		}
		names = append(names, name)
		t.Add(f.Network, term.OrDash(term.Short(f.ContainerID, o.Format)), term.OrDash(f.IfName),
			podName(&f.Pod), term.State(out, term.OrDash(status(f.State, f.Verdict))),
			term.State(out, word), why)
	}
	if o.Format == term.Name {
		return term.PrintNames(out, names)
	}
	if len(names) > 0 && o.Format != term.Line {
		if err := t.Print(out, o); err != nil || o.NoHeaders {
			return err
		}
	}
	var words []string
	for _, word := range Results {
		if count[word] > 0 {
			words = append(words, fmt.Sprintf("%d %s", count[word], word))
		}
	}
	total := term.Attachments(len(findings) - addresses - cached)
	if cached+addresses > 0 {
		total += " in the journal"
	}
	if cached > 0 {
		total += fmt.Sprintf(", %d only in libcni's cache", cached)
	}
	if addresses > 0 {
		total += fmt.Sprintf("; %s without an attachment in the journal",
			term.Plural(addresses, "address", "addresses"))
	}
	return term.Print(out, fmt.Sprintf("%s: %s.\n", total, strings.Join(words, ", ")))
}

// Result returns the word for the outcome of a finding, and the reason.
func Result(f *sweep.Finding, dryRun bool) (word, why string) {
	why = term.OneLine(whyOf(f))
	if len(f.Addresses) > 0 {
		why = fmt.Sprintf("%s: %s", term.Join(term.Addresses(f.Addresses)), why)
	}
	var guard *sweep.MassReleaseError
	switch {
	case f.Fate == decide.Unknown:
		word = "unknown"
	case f.Busy:
		word = "busy"
	case f.Recent():
		word = "recent"
	case !f.Releasable():
		word = "live"
	case errors.As(f.Err, &guard):
		word = "kept"
	case f.Deferred:
		word = "waits"
	case dryRun:
		word = "to be released"
	case f.Released && f.Err != nil:
		word = "partly released"
	case f.Released:
		return "released", why
	case f.Err == nil:
		word = "waits" // its pending DELs cannot run yet
	default:
		word = "pending"
	}
	// unwind runs no DELs for another machine's attachment (decide.Foreign)
	if f.Fate == decide.Dead && len(f.Pending) > 0 && word != "partly released" {
		why += "; pending DEL: " + strings.Join(f.Pending, ", ")
	}
	if word == "pending" || word == "partly released" {
		why += "; " + term.OneLine(f.Err.Error())
	}
	return word, why
}

// whyOf returns the reason for a verdict, with the rest of a grace period, if it is known.
func whyOf(f *sweep.Finding) string {
	if !f.Recent() || f.Left <= 0 {
		return f.Reason.Text
	}
	return fmt.Sprintf("%s (%s left)", f.Reason.Text, term.Roughly(f.Left))
}

// Remaining returns an error if a sweep left attachments that it should have released.
func Remaining(findings []sweep.Finding, dryRun bool) error {
	count := map[string]int{}
	var errs []error
	var failure *delegate.Failure
	for i := range findings {
		f := &findings[i]
		switch word, _ := Result(f, dryRun); {
		case errors.Is(f.Err, sweep.ErrNotTried):
			count["not tried"]++
		// not in the journal, or the journal cannot be written
		case word == "pending" && (f.State == "" || !errors.As(f.Err, &failure)):
			count["partly released"]++
		case word == "unknown":
			errs = append(errs, f.Err) // nil, or about a damaged entry
			fallthrough
		default:
			count[word]++
		}
	}
	const incomplete = "%s could not be released completely; "
	for _, one := range [][2]string{
		{"pending", incomplete + "the next sweep retries the pending DELs"},
		{"partly released", incomplete + "see the REASON column"},
		{"not tried", "%s not tried; run unwindctl sweep again"},
		{"unknown", "kept %s whose state is unknown; see the REASON column"},
	} {
		if n := count[one[0]]; n > 0 {
			errs = append(errs, fmt.Errorf(one[1], term.Attachments(n)))
		}
	}
	return errors.Join(errs...)
}
