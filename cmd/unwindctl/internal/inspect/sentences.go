package inspect

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"cni-unwind/cmd/unwindctl/internal/term"
	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin"
)

// summary returns sentences about who holds what, why it is kept, and what would release it. all is
// the whole journal.
func summary(a *Attachment, f *plugin.Finding, all []Attachment) []string {
	holds, when := "No address that the journal knows of is held by", "since "+since(a.Created)
	if n := len(a.Addresses); n > 0 {
		is := map[bool]string{true: " is held by", false: " are held by"}[n == 1]
		if len(a.freed) > 0 {
			is = map[bool]string{true: " was given to", false: " were given to"}[n == 1]
			when = since(a.Created)
		}
		holds = strings.Join(term.Addresses(a.Addresses), " and ") + is
	}
	lines := []string{fmt.Sprintf("%s %s, interface %s in network %s, %s.", holds, whose(a),
		a.IfName, a.Network, when)}
	if len(a.freed) > 0 {
		lines = append(lines, fmt.Sprintf("The IPAM plugin has %s back, so another pod may have it.",
			strings.Join(term.Addresses(a.freed), " and ")))
	}
	reason := term.OneLine(f.Reason.Text)
	if f.Releasable() && a.State == journal.Unwinding && a.Reason != "" {
		reason = term.OneLine(a.Reason)
	}
	switch ev := f.Evidence; {
	case !f.Releasable() && ev.Locked == plugin.Yes:
		return append(lines, "It is kept, for an ADD, a DEL or a sweep is working on it. Look "+
			"again in a minute.")
	case f.Fate == plugin.Unknown && ev.SameNamespaces != plugin.Yes:
		return append(lines, "It is kept, for whether it lives cannot be told from here: its ADD "+
			"ran in other namespaces than this program.",
			"Look from the host; in a container that has its hostPID: unwindctl --host show.")
	case f.Fate == plugin.Unknown:
		return append(lines, fmt.Sprintf("It is kept, for whether it lives cannot be told: %s.",
			reason))
	case !f.Releasable():
		return append(lines, fmt.Sprintf("It is kept, for it lives: %s.", reason),
			"The runtime's DEL releases it. Without that, any sweep does, once its network "+
				"namespace, every process in it and the host's end of its interface are gone.")
	case f.Fate == plugin.Foreign:
		return append(lines, fmt.Sprintf("It is dead here: %s. No DEL is run for it, for that "+
			"could harm the original.", reason),
			fmt.Sprintf("Each sweep releases what host-local keeps for it on this disk; unwindctl "+
				"sweep %s does it now.", a.Key()))
	default:
		lines = append(lines, fmt.Sprintf("It is dead, and to be released: %s.", reason))
		return append(lines, pendingSentences(a, ev.SameBoot == plugin.Yes, all)...)
	}
}

// whose returns the name of the container of an attachment, with its pod.
func whose(a *Attachment) string {
	if a.Pod == nil || a.Pod.Name == "" {
		return "container " + a.ContainerID
	}
	return fmt.Sprintf("pod %s (container %s)", term.PodName(a.Pod),
		term.Short(a.ContainerID, term.Plain))
}

// since returns a time, and how long ago that was.
func since(t time.Time) string {
	if t.IsZero() {
		return "some time"
	}
	return fmt.Sprintf("%s (%s ago)", term.Time(t), term.Ago(t))
}

// pendingSentences returns what each pending DEL waits for, and what to do.
func pendingSentences(a *Attachment, thisBoot bool, all []Attachment) (lines []string) {
	var untried []string
	failed, ready := false, false
	for _, s := range a.Steps {
		wait := s.wait(thisBoot)
		next := "The next sweep tries it again."
		if wait > 0 {
			next = fmt.Sprintf("It is tried again in %s.", term.Roughly(wait))
		}
		switch {
		case s.LastError != "":
			failed, ready = true, true
			lines = append(lines, fmt.Sprintf("The DEL of %s has failed %s, the last time with "+
				"code %d: %s. %s",
				s.Plugin, term.Plural(s.Attempts, "time", "times"), s.LastCode,
				strings.TrimSuffix(term.OneLine(s.LastError), "."), next))
		case s.Unproven != "" && ipam.Queues(s.Plugin):
			lines = append(lines, fmt.Sprintf("The DEL of %s has passed, but %s: it is unproven. "+
				"It does not run again while that file is there.", s.Plugin, s.Unproven))
		case s.Unproven != "":
			ready = true
			lines = append(lines, fmt.Sprintf("The DEL of %s has passed, but %s: it is unproven. %s",
				s.Plugin, s.Unproven, next))
		case s.Parked:
			lines = append(lines, fmt.Sprintf("The DEL of %s waits, for it would take the rules "+
				"of the address's new owner%s. It is run once that one is gone.",
				s.Plugin, newOwner(a, all)))
		case s.onceMore() != "" && wait > 0:
			lines = append(lines, fmt.Sprintf("%s: its DEL runs once more in %s. No sweep runs it "+
				"sooner.", s.whyOnceMore(), term.Roughly(wait)))
		case s.onceMore() != "":
			ready = true
			lines = append(lines, s.whyOnceMore()+": the next sweep runs its DEL once more.")
		default:
			ready = true
			untried = append(untried, s.Plugin)
		}
	}
	if len(untried) > 0 {
		lines = append(lines, fmt.Sprintf("Pending DEL, not tried yet: %s.",
			strings.Join(untried, ", ")))
	}
	if ready {
		lines = append(lines, fmt.Sprintf("To try it now: unwindctl sweep %s", a.Key()))
	}
	if failed {
		lines = append(lines, fmt.Sprintf("If it can never pass, such as for a plugin that is "+
			"gone for good, give it up: unwindctl forget %s", a.Key()))
	}
	return lines
}

// newOwner returns another attachment that has one of the addresses, as the end of a sentence.
func newOwner(a *Attachment, all []Attachment) string {
	for _, other := range all {
		for _, address := range other.Addresses {
			if other.Key() != a.Key() && slices.Contains(a.Addresses, address) {
				return fmt.Sprintf(": %s has %s by now", whose(&other), address)
			}
		}
	}
	return ""
}

// whyOnceMore returns why a DEL that passed runs once more.
func (s *Step) whyOnceMore() string {
	const (
		killed = "%s was killed while it worked, so that something behind it may have gone on"
		proves = "the DEL of %s also passes where it frees nothing, and no store could be asked"
	)
	switch {
	case s.Killed && s.ProvesNothing:
		return fmt.Sprintf(killed+", and "+proves, s.Plugin, s.Plugin)
	case s.Killed:
		return fmt.Sprintf(killed, s.Plugin)
	}
	return fmt.Sprintf("T"+proves[1:], s.Plugin)
}

// wait returns how long no sweep of the runtime or the timer tries the DEL. Times of another boot
// mean nothing.
func (s *Step) wait(thisBoot bool) time.Duration {
	const longest = 30 * time.Second // between two tries of a DEL that fails, see the plugin
	switch {
	case (s.LastError != "" || s.Unproven != "") && s.retry > 0 && s.retry <= longest:
		return s.retry
	case s.LastError != "", s.Unproven != "":
		return 0
	case s.Killed && thisBoot:
		return max(s.repeat, s.prove, 0)
	}
	return max(s.prove, 0)
}

func interfaceOf(ifname string) string {
	if ifname == "" {
		return ""
	}
	return ", interface " + ifname
}
