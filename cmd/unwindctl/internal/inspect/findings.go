package inspect

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"strings"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/probe"
	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin"
	"cni-unwind/plugin/alive"
	"cni-unwind/plugin/sweep"
	"cni-unwind/plugin/undo"
)

// finding is an attachment, or an address without one, as sweep --json prints it.
type finding struct {
	Network     string        `json:"network"`
	ContainerID string        `json:"containerID,omitempty"`
	IfName      string        `json:"ifname,omitempty"`
	Address     string        `json:"address,omitempty"`   // of a reservation without an attachment
	Cached      bool          `json:"cached,omitempty"`    // in libcni's cache, not in the journal
	Addresses   []netip.Addr  `json:"addresses,omitempty"` // of one that is cached
	Pod         *journal.Pod  `json:"pod,omitempty"`
	State       journal.State `json:"state,omitempty"`
	Verdict     alive.Fate    `json:"verdict"`
	Result      string        `json:"result"` // as the table has it
	Why         string        `json:"why"`
	Pending     []string      `json:"pending,omitempty"` // delegates
	Error       string        `json:"error,omitempty"`
	// Left are commands that remove what a dead container has left.
	Left []string `json:"left,omitempty"`
}

func JSONFindings(findings []sweep.Finding, dryRun bool) []finding {
	all := []finding{}
	for i := range findings {
		f := &findings[i]
		word, _ := Result(f, dryRun)
		one := finding{
			Network: f.Network, ContainerID: f.ContainerID, IfName: f.IfName, State: f.State,
			Verdict: f.Fate, Result: word,
			Why: f.Reason.Text, Pending: f.Pending, Left: f.Left,
		}
		if f.Address.IsValid() {
			one.Address = f.Address.String()
		}
		one.Addresses, one.Cached = f.Cached()
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

// PrintNoFindings prints that there are no attachments: none in that network, whose name may be
// wrong, or none at all. Without a list, it also prints how many addresses were not judged.
func PrintNoFindings(out io.Writer, of Scope, job sweep.Job) error {
	store := &journal.Store{Dir: of.StateDir}
	var err error
	if _, statErr := os.Lstat(store.Path()); statErr != nil || of.Network == "" {
		err = PrintNoAttachments(out, store)
	} else {
		_, err = fmt.Fprintf(out, "No attachments in network %s.\n", of.Network)
	}
	given := 0
	for _, p := range job.Pools {
		taken, _ := ipam.Taken(p.Dir)
		given += len(taken)
	}
	switch {
	case err != nil:
	case of.Network != "" && len(job.Pools) == 0:
		_, err = fmt.Fprintf(out, "No conflist of network %s has host-local in its chain.\n", of.Network)
	case job.List == nil && given > 0 && of.asks():
		_, err = fmt.Fprintf(out, "%s allocated. Only the runtime knows whether their owners are live, "+
			"and it gave no list.\n", term.Plural(given, "address is", "addresses are"))
	case job.List == nil && given > 0:
		_, err = fmt.Fprintf(out, "%s allocated. Only the runtime knows whether their owners are live: "+
			"unwindctl sweep --dry-run%s\n", term.Plural(given, "address is", "addresses are"),
			of.ListFlags())
	}
	return err
}

// PrintFindings prints a table of the findings and their counts. It leaves out live attachments,
// unless all is set, and attachments that were not tried.
func PrintFindings(out io.Writer, findings []sweep.Finding, dryRun, all bool,
	o *term.Output) error {
	t := term.NewTable(
		term.Column{Name: "NETWORK", Optional: true}, term.Column{Name: "CONTAINER", Least: 11},
		term.Column{Name: "IFNAME", Optional: true}, term.Column{Name: "POD", Least: 36},
		term.Column{Name: "STATE", Optional: true}, term.Column{Name: "RESULT"},
		term.Column{Name: "WHY", Least: 13})
	count, young, addresses, cached := map[string]int{}, 0, 0, 0
	var names []string
	for i := range findings {
		f := &findings[i]
		word, why := Result(f, dryRun)
		if _, is := f.Cached(); is {
			cached++
		} else if f.Address.IsValid() {
			addresses++
		}
		if errors.Is(f.Err, sweep.ErrNotTried) {
			count["not tried"]++
			continue
		}
		if word == "live" && f.Reason.Is(alive.WithinGrace) {
			young++
		}
		if count[word]++; word == "left" || word == "live" && !all {
			continue
		}
		name := f.Key.String()
		if f.Address.IsValid() {
			name = f.Address.String()
		}
		names = append(names, name)
		t.Add(f.Network, term.OrDash(term.Short(f.ContainerID, o.Format)), term.OrDash(f.IfName),
			podName(&f.Pod), term.OrDash(string(f.State)), word, why)
	}
	if o.Format == term.Name {
		return term.PrintNames(out, names)
	}
	if len(names) > 0 {
		if err := t.Print(out, o); err != nil || o.NoHeaders {
			return err
		}
	}
	var words []string
	for _, word := range []string{"released", "to be released", "pending", "waits", "kept",
		"unknown", "busy", "live", "left", "not tried"} {
		if count[word] > 0 {
			words = append(words, fmt.Sprintf("%d %s", count[word], word))
		}
	}
	total := term.Attachments(len(findings) - addresses - cached - count["left"])
	if cached > 0 {
		total += fmt.Sprintf(", %d only in libcni's cache", cached)
	}
	if addresses > 0 {
		total += fmt.Sprintf(", and %d with an owner that is not in the journal", addresses)
	}
	total += ": " + strings.Join(words, ", ") + "."
	if young > 0 {
		total += "\n" + notListed(young)
	}
	_, err := fmt.Fprintf(out, "%s\n%s", total, left(findings))
	return err
}

// left returns the shell commands that remove the leftovers of containers that are gone.
func left(findings []sweep.Finding) string {
	var text strings.Builder
	for _, f := range findings {
		if len(f.Left) > 0 && text.Len() == 0 {
			text.WriteString("\nLeft by containers that are gone. To remove it, run:\n")
		}
		if len(f.Left) > 0 {
			fmt.Fprintf(&text, "# container %s\n%s\n",
				cmp.Or(term.OneLine(f.ContainerID), "unknown"), strings.Join(f.Left, "\n"))
		}
	}
	return text.String()
}

// Result returns the word for the outcome of a finding, and the reason.
func Result(f *sweep.Finding, dryRun bool) (word, why string) {
	why = term.OneLine(f.Reason.Text)
	if f.Address.IsValid() {
		why = fmt.Sprintf("%s: %s", f.Address, why)
	}
	if addresses, _ := f.Cached(); len(addresses) > 0 {
		why = fmt.Sprintf("%s: %s", term.Join(term.Addresses(addresses)), why)
	}
	var guard *sweep.MassReleaseError
	switch {
	case f.LeftOnly:
		word = "left"
	case f.Fate == alive.Unknown:
		word = "unknown"
	case f.Busy:
		word = "busy"
	case !f.Releasable():
		word = "live"
	case errors.As(f.Err, &guard):
		word = "kept"
	case f.Deferred:
		word = "waits"
	case dryRun:
		word = "to be released"
	case f.Released:
		return "released", why
	case f.Err == nil:
		word = "waits" // what could be done now is done
	default:
		word = "pending"
	}
	if f.Fate == alive.Dead && len(f.Pending) > 0 { // of a foreign one no DEL is run
		why += "; pending DEL: " + strings.Join(f.Pending, ", ")
	}
	if word == "pending" {
		why += "; " + term.OneLine(f.Err.Error())
	}
	return word, why
}

// Remaining returns an error if a sweep left attachments that it should have released.
func Remaining(findings []sweep.Finding, dryRun bool) error {
	pending, unknown, untried := 0, 0, 0
	var errs []error
	for i := range findings {
		switch word, _ := Result(&findings[i], dryRun); {
		case errors.Is(findings[i].Err, sweep.ErrNotTried):
			untried++
		case word == "pending":
			pending++
		case word == "unknown":
			unknown++
			errs = append(errs, findings[i].Err) // an entry that is damaged, or nil
		}
	}
	if pending > 0 {
		errs = append(errs, fmt.Errorf("%s could not be released completely; the next sweep retries "+
			"the pending DELs", term.Attachments(pending)))
	}
	if untried > 0 {
		errs = append(errs, fmt.Errorf("%s not tried; run unwindctl sweep again",
			term.Attachments(untried)))
	}
	if unknown > 0 {
		errs = append(errs, fmt.Errorf("the state of %s is unknown: kept, see WHY",
			term.Attachments(unknown)))
	}
	return errors.Join(errs...)
}

// Plugin returns the plugin that sweeps, judges and forgets for a command. It writes no CNI result.
func Plugin(stderr io.Writer) *plugin.Plugin {
	probes := ipam.OnNode()
	probes["whereabouts"] = &probe.Prober{}
	return &plugin.Plugin{Stdout: io.Discard, Stderr: stderr, Budgets: undo.DefaultBudgets,
		Probes: probes}
}

// Judge returns the findings of a dry run of a sweep.
func Judge(
	ctx context.Context, p *plugin.Plugin, stateDir string, list *alive.List,
) (map[journal.Key]*sweep.Finding, error) {
	findings, err := p.Sweep(ctx, stateDir, sweep.Job{DryRun: true, Force: true, List: list})
	byKey := map[journal.Key]*sweep.Finding{}
	for i := range findings {
		byKey[findings[i].Key] = &findings[i]
	}
	return byKey, err
}
