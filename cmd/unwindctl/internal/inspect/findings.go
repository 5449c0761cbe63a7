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
	"cni-unwind/plugin/sweep"
)

// finding is one finding as sweep --json prints it, about an attachment or about an address without
// an attachment.
type finding struct {
	Network     string         `json:"network"`
	ContainerID string         `json:"containerID,omitempty"`
	IfName      string         `json:"ifname,omitempty"`
	Address     string         `json:"address,omitempty"`   // of a reservation without an attachment
	Cached      bool           `json:"cached,omitempty"`    // in libcni's cache, not in the journal
	Addresses   []netip.Addr   `json:"addresses,omitempty"` // of an attachment outside the journal
	Pod         *journal.Pod   `json:"pod,omitempty"`
	State       journal.State  `json:"state,omitempty"`
	Verdict     decide.Verdict `json:"verdict"`
	Result      string         `json:"result"` // one of Results
	Why         string         `json:"why"`
	Pending     []string       `json:"pending,omitempty"` // the plugins with a pending DEL
	Error       string         `json:"error,omitempty"`
}

func JSONFindings(findings []sweep.Finding, dryRun bool) []finding {
	all := []finding{}
	for i := range findings {
		f := &findings[i]
		word, _ := Result(f, dryRun)
		one := finding{
			Network: f.Network, ContainerID: f.ContainerID, IfName: f.IfName, State: f.State,
			Verdict: f.Verdict, Result: word,
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

// The results of a sweep, in the order in which PrintFindings prints their counts. The column
// REASON explains them.
const (
	Released        = "released"
	WouldBeReleased = "would be released"
	Pending         = "pending"
	Kept            = "kept"
)

var Results = []string{Released, WouldBeReleased, Pending, Kept}

// PrintFindings prints a table of the findings, and their counts (see Counted). The table shows a
// live attachment only if it is recent, if its Warn or Busy is set, or if the argument all is true.
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
		if f.Cached {
			cached++
		} else if reserved(f) {
			addresses++
		}
		count[Counted(f, dryRun)]++
		if f.Verdict == decide.Live && !f.Recent() && !f.Busy && !all && !f.Warn {
			continue
		}
		name := f.Key.String()
		if reserved(f) {
			name = f.Addresses[0].String()
		}
		names = append(names, name)
		result, why := Result(f, dryRun)
		t.Add(f.Network, term.OrDash(term.Short(f.ContainerID, o.Format)), term.OrDash(f.IfName),
			podName(&f.Pod), term.State(out, status(f.State, f.Judgment)), term.State(out, result), why)
	}
	if o.Format == term.Name {
		return term.PrintNames(out, names)
	}
	if len(names) > 0 && o.Format != term.Line {
		if err := t.Print(out, o); err != nil {
			return err
		}
	}
	var words []string
	for _, word := range append(Results, "unknown", "recent", "busy", "live") {
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

// guarded reports whether the mass-release guard keeps an attachment that seems dead.
func guarded(f *sweep.Finding) bool {
	var guard *sweep.MassReleaseError
	return errors.As(f.Err, &guard)
}

// Result returns the result of a finding, and the reason.
func Result(f *sweep.Finding, dryRun bool) (result, why string) {
	why = term.OneLine(whyOf(f))
	if len(f.Addresses) > 0 {
		why = fmt.Sprintf("%s: %s", term.Join(term.Addresses(f.Addresses)), why)
	}
	switch {
	case !f.Releasable():
		return Kept, why
	case guarded(f):
		return Kept, why + "; implausibly many others seem dead too; if they really are dead, use " +
			"--force"
	case f.Released:
		result = Released
	case dryRun && !f.Deferred:
		result = WouldBeReleased
	default:
		result = Pending
	}
	// not for decide.Foreign, because unwind runs no DELs for another machine's attachment
	if f.Verdict == decide.Dead && len(f.Pending) > 0 && !f.Released {
		why += "; pending DEL: " + strings.Join(f.Pending, ", ")
	}
	if f.Err != nil {
		why += "; " + term.OneLine(f.Err.Error())
	}
	return result, why
}

// Counted returns the word under which a finding is counted: "recent", "busy", the verdict "live"
// or "unknown", or else the result.
func Counted(f *sweep.Finding, dryRun bool) string {
	switch {
	case f.Recent():
		return "recent"
	case f.Busy:
		return "busy"
	case !f.Releasable():
		return string(f.Verdict)
	}
	result, _ := Result(f, dryRun)
	return result
}

// whyOf returns the reason for a verdict and, for a Recent one, the rest of the grace period.
func whyOf(f *sweep.Finding) string {
	if !f.Recent() || f.Left <= 0 {
		return f.Reason.Text
	}
	return fmt.Sprintf("%s (%s left)", f.Reason.Text, term.Roughly(f.Left))
}

// Remaining returns an error if attachments remain that a sweep should have released, or that it
// could not judge.
func Remaining(findings []sweep.Finding) error {
	failed, untried, unknown := 0, 0, 0
	var errs []error
	for i := range findings {
		switch f := &findings[i]; {
		case f.Verdict == decide.Unknown:
			unknown++
			errs = append(errs, f.Err) // nil, or about a damaged record
		case f.Err == nil, guarded(f):
		case errors.Is(f.Err, sweep.ErrNotTried):
			untried++
		default:
			failed++
		}
	}
	for _, left := range []struct {
		n    int
		text string
	}{
		{failed, "%s could not be released completely"},
		{untried, "did not try to release %s; run unwindctl sweep again"},
		{unknown, "kept %s in state unknown"},
	} {
		if left.n > 0 {
			errs = append(errs, fmt.Errorf(left.text, term.Attachments(left.n)))
		}
	}
	return errors.Join(errs...)
}
