package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"time"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin"
)

// summary says in sentences who holds what, why it is kept, and what would release it. all is the whole journal.
func summary(a *attachment, f *plugin.Finding, all []attachment) []string {
	holds, when := "No address that the journal knows of is held by", "since "+since(a.Created)
	if n := len(a.Addresses); n > 0 {
		is := map[bool]string{true: " is held by", false: " are held by"}[n == 1]
		if len(a.freed) > 0 {
			is = map[bool]string{true: " was given to", false: " were given to"}[n == 1]
			when = since(a.Created)
		}
		holds = strings.Join(addressTexts(a.Addresses), " and ") + is
	}
	lines := []string{fmt.Sprintf("%s %s, interface %s in network %s, %s.", holds, whose(a), a.IfName, a.Network, when)}
	if len(a.freed) > 0 {
		lines = append(lines, fmt.Sprintf("What gave out %s has it back, so that another pod may have it.", strings.Join(addressTexts(a.freed), " and ")))
	}
	reason := oneLine(f.Reason)
	if a.State == journal.Unwinding && a.Reason != "" {
		reason = oneLine(a.Reason)
	}
	switch facts := factsOf(f); {
	case !f.Ends() && facts[factLocked] == "yes":
		return append(lines, "It is kept, for an ADD, a DEL or a sweep is working on it. Look again in a minute.")
	case f.Fate == plugin.Unknown && facts[factObserver] != "yes":
		return append(lines, "It is kept, for whether it lives cannot be told from here: its ADD ran in other namespaces than this program.",
			"Look from the host; in a container that has its hostPID: unwindctl --host show.")
	case f.Fate == plugin.Unknown:
		return append(lines, fmt.Sprintf("It is kept, for whether it lives cannot be told: %s.", reason))
	case !f.Ends():
		return append(lines, fmt.Sprintf("It is kept, for it lives: %s.", reason),
			"The runtime's DEL releases it. Without that, any sweep does, once its network namespace, every process in it and the host's end of its interface are gone.")
	case f.Fate == plugin.Foreign:
		return append(lines, fmt.Sprintf("It is dead here: %s. No DEL is run for it, for that could harm the original.", reason),
			fmt.Sprintf("Each sweep releases what host-local keeps for it on this disk; unwindctl sweep %s does it now.", a.key()))
	default:
		lines = append(lines, fmt.Sprintf("It is dead, and to be released: %s.", reason))
		return append(lines, owedSentences(a, facts[factThisBoot] == "yes", all)...)
	}
}

// The questions of plugin.Finding.Facts that summary asks.
const (
	factLocked   = "its lock is held"
	factObserver = "this process sees what its ADD saw"
	factThisBoot = "made in this boot"
)

func factsOf(f *plugin.Finding) map[string]string {
	facts := map[string]string{}
	for _, fact := range f.Facts() {
		facts[fact.Question] = fact.Answer
	}
	return facts
}

// whose names the container of an attachment, with its pod.
func whose(a *attachment) string {
	if a.Pod == nil || a.Pod.Name == "" {
		return "container " + a.ContainerID
	}
	return fmt.Sprintf("pod %s (container %s)", podName(a.Pod), short(a.ContainerID))
}

// since is a time with how long ago that was.
func since(t time.Time) string {
	if t.IsZero() {
		return "some time"
	}
	return fmt.Sprintf("%s (%s ago)", t.Local().Format(time.DateTime), ago(t))
}

// owedSentences say what each DEL that is owed waits for, and what to do.
func owedSentences(a *attachment, thisBoot bool, all []attachment) (lines []string) {
	var untried []string
	failed, due := false, false
	for _, s := range a.Steps {
		wait := s.wait(thisBoot)
		next := "The next sweep tries it again."
		if wait > 0 {
			next = fmt.Sprintf("It is tried again in %s.", roughly(wait))
		}
		switch {
		case s.LastError != "":
			failed, due = true, true
			lines = append(lines, fmt.Sprintf("The DEL of %s has failed %s, the last time with code %d: %s. %s",
				s.Plugin, plural(s.Attempts, "time", "times"), s.LastCode, strings.TrimSuffix(oneLine(s.LastError), "."), next))
		case s.Parked:
			lines = append(lines, fmt.Sprintf("The DEL of %s waits, for it would take the rules of the address's new owner%s. It is run once that one is gone.",
				s.Plugin, newOwner(a, all)))
		case s.Again && wait > 0:
			lines = append(lines, fmt.Sprintf("%s was killed while it worked, and something behind it may have gone on: its DEL is run once more, in %s. No sweep does it sooner.",
				s.Plugin, roughly(wait)))
		case s.Again:
			due = true
			lines = append(lines, fmt.Sprintf("%s was killed while it worked, and something behind it may have gone on: the next sweep runs its DEL once more.", s.Plugin))
		default:
			due = true
			untried = append(untried, s.Plugin)
		}
	}
	if len(untried) > 0 {
		lines = append(lines, fmt.Sprintf("Still to be run: the DEL of %s.", strings.Join(untried, ", ")))
	}
	if due {
		lines = append(lines, fmt.Sprintf("To try it now: unwindctl sweep %s", a.key()))
	}
	if failed {
		lines = append(lines, fmt.Sprintf("If it can never pass, such as for a plugin that is gone for good, give it up: unwindctl forget %s", a.key()))
	}
	return lines
}

// newOwner names another attachment that has one of the addresses.
func newOwner(a *attachment, all []attachment) string {
	for _, other := range all {
		for _, address := range other.Addresses {
			if other.key() != a.key() && slices.Contains(a.Addresses, address) {
				return fmt.Sprintf(": %s has %s by now", whose(&other), address)
			}
		}
	}
	return ""
}

// wait returns how long no sweep of the runtime's or the timer's tries the DEL. Times of another boot mean nothing.
func (s *step) wait(thisBoot bool) time.Duration {
	const longest = 30 * time.Second // between two tries of a DEL that fails, see the plugin
	switch {
	case s.LastError != "" && s.retry > 0 && s.retry <= longest:
		return s.retry
	case s.LastError == "" && s.Again && s.repeat > 0 && thisBoot:
		return s.repeat
	}
	return 0
}

// explainNothing says what there is to say of an argument that no attachment in the journal answers to.
func explainNothing(ctx context.Context, out io.Writer, arg string, flags sweepFlags, asJSON bool) error {
	if asJSON {
		return errors.Join(printJSON(out, "attachments", []shown{}), nothing(arg, flags))
	}
	var text strings.Builder
	if address, err := netip.ParseAddr(arg); err == nil {
		explainAddress(&text, address.Unmap(), flags)
	}
	events, err := readHistory(ctx, flags.stateDir)
	for _, e := range lastOf(events, arg, 3) {
		text.WriteString(eventSentence(e))
	}
	if text.Len() == 0 {
		return errors.Join(err, nothing(arg, flags))
	}
	_, writeErr := io.WriteString(out, text.String())
	return errors.Join(err, writeErr)
}

// explainAddress says who has an address that no attachment in the journal has.
func explainAddress(text *strings.Builder, address netip.Addr, flags sweepFlags) {
	pools, _ := poolsOf(flags)
	for _, p := range pools {
		found, _ := ipam.Scan(p.Dir)
		for _, r := range found {
			switch {
			case r.Address != address:
			case r.Ownerless():
				fmt.Fprintf(text, "%s is reserved in %s for nobody: host-local died before it wrote an owner, and no DEL can release it.\n"+
					"unwindctl sweep releases it.\n", address, p.Dir)
			default:
				fmt.Fprintf(text, "%s is reserved in %s for container %s%s, which the journal does not know: a pod from before the install, or the journal was lost.\n"+
					"unwindctl sweep --cri auto asks the runtime, and releases it if nothing has it.\n", address, p.Dir, oneLine(r.Owner.ContainerID), interfaceOf(oneLine(r.Owner.IfName)))
			}
		}
	}
}

func interfaceOf(ifname string) string {
	if ifname == "" {
		return ""
	}
	return ", interface " + ifname
}

// eventSentence says in a line what happened to something that is not in the journal any more.
func eventSentence(e journal.Event) string {
	what := map[journal.EventKind]string{
		journal.RolledBack: "its ADD was rolled back", journal.Swept: "it was released by a sweep", journal.Released: "its address was released",
		journal.Parked: "a DEL was parked", journal.Superseded: "another ADD took its place", journal.Forgotten: "it was given up",
	}[e.Kind]
	a := &attachment{Network: e.Network, ContainerID: cmp.Or(e.ContainerID, "unknown"), IfName: e.IfName, Pod: &e.Pod}
	with := ""
	if len(e.Addresses) > 0 {
		with = " with " + strings.Join(addressTexts(e.Addresses), " and ")
	}
	return fmt.Sprintf("%s%s in network %s%s: %s %s ago%s.\n", whose(a), interfaceOf(e.IfName), e.Network, with, cmp.Or(what, string(e.Kind)), ago(e.At.Wall), because(e.Reason))
}

// damagedOf returns what an error of readJournal says of one attachment, given by its full name, or nil.
func damagedOf(err error, name string) *journal.DamagedError {
	if several, ok := err.(interface{ Unwrap() []error }); ok {
		for _, one := range several.Unwrap() {
			if found := damagedOf(one, name); found != nil {
				return found
			}
		}
		return nil
	}
	var damaged *journal.DamagedError
	if errors.As(err, &damaged) && damaged.Key.String() == name {
		return damaged
	}
	return nil
}

func explainDamaged(out io.Writer, damaged *journal.DamagedError, asJSON bool) (err error) {
	if asJSON {
		err = printJSON(out, "attachments", []shown{})
	} else {
		_, err = fmt.Fprintf(out, "The entry of %s cannot be read. It is kept, and no sweep touches it.\n"+
			"Its next ADD or DEL writes over it; a DEL goes by what the runtime sends. To give it up: unwindctl forget %s\n", damaged.Key, damaged.Key)
	}
	return errors.Join(damaged, err)
}
