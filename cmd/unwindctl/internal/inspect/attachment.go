// Package inspect describes the journal and the host-local pools. Only Sweep can change them.
package inspect

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/sweep"
)

// Attachment is a journal record as the JSON output shows it. It omits the plugins' configurations,
// which may contain secrets.
type Attachment struct {
	journal.Key
	State     journal.State  `json:"state"`  // in the journal
	Status    string         `json:"status"` // for tables and metrics; see status
	Reason    string         `json:"reason,omitempty"`
	Verdict   decide.Verdict `json:"verdict,omitempty"`
	Why       string         `json:"why,omitempty"` // the reason for the verdict
	Pod       *journal.Pod   `json:"pod,omitempty"`
	NetNS     string         `json:"netns,omitempty"`
	Addresses []netip.Addr   `json:"addresses"`
	Created   time.Time      `json:"created"`
	Since     time.Time      `json:"since"` // when it entered this state
	Updated   time.Time      `json:"updated"`
	Steps     []Step         `json:"steps"`

	freed   []netip.Addr // addresses that may have another owner by now
	of      *journal.Record
	finding *sweep.Finding // nil without a verdict
}

// Step is a plugin whose DEL has not succeeded yet. A live attachment has a step for each plugin of
// its chain.
type Step struct {
	Plugin string `json:"plugin"`
	Tries  int    `json:"tries"`               // the number of times that its DEL has run
	Last   string `json:"lastError,omitempty"` // the error of the last attempt
	Code   uint   `json:"code,omitempty"`      // the error's code
	// WaitsFor says what the DEL waits for (see journal.Why). It is absent if the DEL does not wait.
	WaitsFor journal.Why `json:"waitsFor,omitempty"`
	// LeftChain is set if the plugin has left the network's chain. Nobody needs to act then: the
	// runtime gets no error, and unwind drops the DEL after it has failed for about a day.
	LeftChain bool `json:"leftChain,omitempty"`

	of journal.Step
}

// Due reports whether the DEL waits for nothing but a retry, and its plugin is still in the chain.
func (s Step) Due() bool { return !s.WaitsFor.Blocked() && !s.LeftChain }

// PendingDEL reports whether the attachment has pending DELs, according to the journal's state.
func (a *Attachment) PendingDEL() bool {
	return a.State == journal.RollingBack || a.State == journal.Deleting
}

// needsDELs reports whether the DELs of the attachment's steps are pending, according to the
// journal's state or the verdict.
func (a *Attachment) needsDELs() bool { return a.PendingDEL() || a.Verdict == decide.Dead }

// Dead reports whether pending DELs or the verdict mean that a sweep should release the attachment.
func (a *Attachment) Dead() bool {
	return a.PendingDEL() || a.Verdict == decide.Dead || a.Verdict == decide.Foreign
}

// Busy reports whether a running operation holds the attachment's lock.
func (a *Attachment) Busy() bool { return a.finding != nil && a.finding.Busy }

// status returns an attachment's state for tables and metrics. It is "recent" for a recent
// attachment, "unknown" or "other-machine" if that is the verdict, and "dead" for a dead attachment
// whose state in the journal is adding or live. Otherwise, it is the state in the journal. For an
// attachment that is not in the journal, state is "", and the status is "recent" or the verdict.
func status(state journal.State, v decide.Judgment) string {
	switch {
	case v.Recent():
		return "recent"
	case state == "", v.Verdict == decide.Unknown, v.Verdict == decide.Foreign,
		v.Verdict == decide.Dead && decide.KeepsContainer(state):
		return string(v.Verdict)
	}
	return string(state)
}

// Sort sorts attachments: first those with a failing DEL, then dead ones, then those whose state is
// unknown, then the rest.
func Sort(attachments []Attachment) {
	order := func(a *Attachment) int {
		switch fails := func(s Step) bool { return decide.Failing(&s.of) }; {
		case a.PendingDEL() && slices.ContainsFunc(a.Steps, fails):
			return 0
		case a.Dead():
			return 1
		case a.Verdict == decide.Unknown:
			return 2
		}
		return 3
	}
	slices.SortStableFunc(attachments, func(a, b Attachment) int { return order(&a) - order(&b) })
}

// HasStep reports whether any step's WaitsFor is one of the given reasons.
func (a *Attachment) HasStep(reasons ...journal.Why) bool {
	return slices.ContainsFunc(a.Steps,
		func(s Step) bool { return slices.Contains(reasons, s.WaitsFor) })
}

// podName returns a pod's name as NAMESPACE/NAME, or "-" if it has none.
func podName(p *journal.Pod) string {
	switch {
	case p == nil || p.Name == "":
		return "-"
	case p.Namespace == "":
		return term.OneLine(p.Name)
	}
	return term.OneLine(p.Namespace + "/" + p.Name)
}

func describe(e *journal.Record) Attachment {
	a := Attachment{
		Key: e.Key, State: e.State, Status: string(e.State), Reason: e.Reason, NetNS: e.Added.NetNS.Path,
		Addresses: e.Addresses(),
		Created:   e.Added.At.Wall, Since: e.Since.Wall, Updated: e.Updated.Wall, Steps: []Step{},
		of: e,
	}
	if a.Addresses == nil {
		a.Addresses = []netip.Addr{}
	}
	if e.Added.Pod != (journal.Pod{}) {
		a.Pod = &e.Added.Pod
	}
	for _, c := range e.Got.Claims {
		if e.Freed(c) && a.PendingDEL() {
			a.freed = append(a.freed, c.Address)
		}
	}
	for _, s := range e.Steps {
		a.Steps = append(a.Steps, Step{
			Plugin: s.Type, Tries: s.Tries, Last: s.Last, Code: s.Code, WaitsFor: s.Next.Why,
			of: s,
		})
	}
	return a
}

// judged returns a record of the journal with the verdict on its attachment.
func judged(e *journal.Record, f *sweep.Finding) Attachment {
	a := describe(e)
	a.finding, a.Verdict, a.Why = f, f.Verdict, term.OneLine(whyOf(f))
	a.Status = status(a.State, f.Judgment)
	for i := range a.Steps {
		a.Steps[i].LeftChain = slices.Contains(f.Removed, a.Steps[i].Plugin)
	}
	if a.PendingDEL() && f.Verdict == decide.Dead && a.Reason != "" {
		a.Why = term.OneLine(a.Reason) // the record's reason may contain more details
	}
	return a
}

// PrintNoAttachments prints that the journal does not exist, or contains no attachment of the
// network.
func PrintNoAttachments(out io.Writer, store *journal.Store, network string) error {
	text := "No attachments."
	if network != "" {
		text = fmt.Sprintf("No attachments in network %s.", network)
	}
	if _, err := os.Lstat(store.Path()); errors.Is(err, fs.ErrNotExist) {
		text = fmt.Sprintf("No attachments: there is no journal in %s.", store.Dir)
	}
	return term.Print(out, text+"\n")
}

func PrintAttachments(out io.Writer, attachments []Attachment, o *term.Output) error {
	if o.Format == term.Name {
		return term.PrintNames(out, names(attachments))
	}
	t := term.NewTable(
		term.Column{Name: "NETWORK", Optional: true}, term.Column{Name: "CONTAINER", Least: 11},
		term.Column{Name: "IFNAME", Optional: true}, term.Column{Name: "STATE"},
		term.Column{Name: "AGE"}, term.Column{Name: "POD", Least: 16},
		term.Column{Name: "ADDRESSES", Least: 10, Optional: true},
		term.Column{Name: "PENDING DELS", Least: 22, Wrap: true},
		term.Column{Name: "CREATED", Wide: true}, term.Column{Name: "NETNS", Wide: true},
		term.Column{Name: "REASON", Wide: true})
	for _, a := range attachments {
		t.Add(a.Network, term.Short(a.ContainerID, o.Format), a.IfName, term.State(out, a.Status),
			term.Ago(a.Created), podName(a.Pod), term.Join(term.Addresses(a.Addresses)),
			pending(a), term.Time(a.Created), term.OrDash(a.NetNS),
			term.OrDash(a.Why))
	}
	return t.Print(out, o)
}

// names returns arguments that name the attachments (see Find): an attachment's key or, if it has
// no container ID, its addresses.
func names(attachments []Attachment) (names []string) {
	for _, a := range attachments {
		if a.ContainerID == "" {
			names = append(names, term.Addresses(a.Addresses)...)
			continue
		}
		names = append(names, a.Key.String())
	}
	return names
}

// pending lists the plugins of an attachment whose DELs are pending. For each plugin, it says
// what the DEL waits for, or how often the DEL was tried and how it failed.
func pending(a Attachment) string {
	texts := []string{}
	if a.needsDELs() {
		for _, s := range a.Steps {
			why := fmt.Sprintf("tried %d×", s.Tries)
			switch {
			case s.WaitsFor.Blocked():
				why = decide.Words(&s.of)
			case s.Last != "":
				why += ", " + decide.Words(&s.of)
			}
			texts = append(texts, fmt.Sprintf("%s (%s)", s.Plugin, why))
		}
	}
	return term.Join(texts)
}

// Leaks describes the resources that may remain on this machine if an attachment's DELs never run.
func Leaks(f *sweep.Finding) (leaks []string) {
	if len(f.Records) == 0 {
		return []string{"unknown: the attachment's journal record cannot be read"}
	}
	e := f.Records[0]
	for _, l := range e.Got.HostLinks {
		if is, err := net.InterfaceByName(l.Name); err != nil || is.HardwareAddr.String() != l.MAC {
			continue // the interface is gone, or another one has its name
		}
		leaks = append(leaks, fmt.Sprintf("interface %s (%s) on the host", l.Name, l.MAC))
	}
	for _, s := range e.Steps {
		leaks = append(leaks, leaksOfStep(e, &s)...)
	}
	slices.Sort(leaks)
	return slices.Compact(leaks)
}

func leaksOfStep(e *journal.Record, s *journal.Step) (leaks []string) {
	addresses := term.Join(term.Addresses(e.Addresses()))
	plugin := known.IPAMOf(s.Config).Name
	if pool := ipam.Pool(plugin, s.Config, e.Network); pool != "" {
		held, _ := ipam.HeldBy(pool, e.ContainerID, e.IfName)
		for _, a := range held {
			leaks = append(leaks, fmt.Sprintf("%s: a host-local reservation",
				filepath.Join(pool, a.String())))
		}
	} else if plugin != "" {
		leaks = append(leaks, fmt.Sprintf("reserved by %s for container %s: %s",
			plugin, e.ContainerID, addresses))
	}
	if s.Type != "loopback" && s.Type != "static" { // these leave nothing behind
		leaks = append(leaks, fmt.Sprintf("anything that %s created for container %s, interface %s",
			s.Type, e.ContainerID, e.IfName))
	}
	return leaks
}
