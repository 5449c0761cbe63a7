package inspect

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"slices"
	"strings"
	"time"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/sweep"
)

type shown struct {
	Attachment
	Evidence []Fact `json:"evidence"`
	// Summary is a list of sentences about the attachment: its addresses, why it is kept, and how to
	// release it.
	Summary []string `json:"summary"`
}

// Show prints the attachments that an argument names. It prints them even if other records or the
// history cannot be read, but then returns an error.
func (r *Report) Show(out io.Writer, arg string, o *term.Output) error {
	found, err := Find(r.Attachments, arg)
	if err != nil {
		return err
	}
	err = cmp.Or(r.Err(), r.HistoryErr)
	unread := r.JournalErr != nil && len(found) == 0 // an empty list would be wrong
	if unread && (o.IsObject() || errors.Is(err, fs.ErrPermission)) {
		return err
	}
	switch {
	case len(found) == 0:
		return errors.Join(err, r.explainNothing(out, arg, o))
	case o.Format == term.Name:
		return errors.Join(err, term.PrintNames(out, names(found)))
	}
	var all []shown
	for i := range found {
		a := &found[i]
		all = append(all, shown{*a, factsOf(a.finding), r.summary(a)})
	}
	if o.IsObject() {
		return errors.Join(err, o.PrintObject(out, "attachments", all))
	}
	return errors.Join(err, printShown(out, all, o))
}

func printShown(out io.Writer, all []shown, o *term.Output) error {
	for i, a := range all {
		blank := ""
		if i > 0 {
			blank = "\n"
		}
		about := term.NewTable(term.Column{}, term.Column{Least: 20, Wrap: true})
		about.Add("attachment", a.Key.String())
		about.Add("pod", podName(a.Pod))
		about.Add("state", a.stateFor(out))
		about.Add("addresses", term.Join(term.Addresses(a.Addresses)))
		about.Add("netns", term.OrDash(a.NetNS))
		about.Add("verdict", term.State(out, string(a.Verdict))+": "+a.Why)
		evidence := term.NewTable(term.Column{Least: 20, Wrap: true}, term.Column{})
		for _, f := range a.Evidence {
			answer := f.Answer
			if f.NotLooked {
				answer = "not examined"
			}
			evidence.Add("  "+f.Question, answer)
		}
		steps := term.NewTable(term.Column{Name: "PLUGIN"},
			term.Column{Name: "DEL", Least: 8, Wrap: true}, term.Column{Name: "TRIES"},
			term.Column{Name: "LAST ERROR", Least: 20, Wrap: true})
		for _, s := range a.Steps {
			steps.Add(s.Plugin, s.state(a.needsDELs()), fmt.Sprintf("%d×", s.Tries),
				term.OrDash(term.OneLine(s.Last)))
		}
		err := errors.Join(term.Print(out, blank), about.Print(out, o), evidence.Print(out, o))
		if len(a.Steps) > 0 {
			err = errors.Join(err, term.Print(out, "\n"), steps.Print(out, o))
		}
		err = cmp.Or(err, term.Print(out, "\n"+strings.Join(a.Summary, "\n")+"\n"))
		if err != nil {
			return err
		}
	}
	return nil
}

// stateFor describes an attachment's status, and for how long its state in the journal has lasted.
func (a *Attachment) stateFor(out io.Writer) string {
	status, lasted := term.State(out, a.Status), " for "+term.Ago(a.Since)
	if a.Status == string(a.State) {
		return status + lasted
	}
	return fmt.Sprintf("%s (in the journal: %s%s)", status, a.State, lasted)
}

// state describes the state of a step's DEL, and when unwind tries it next.
func (s *Step) state(pending bool) (text string) {
	switch {
	case !pending:
		return "not pending"
	case s.WaitsFor.Blocked():
		return decide.Words(&s.of)
	case s.Last != "":
		text = fmt.Sprintf("failed (%s)", decide.Words(&s.of))
	case s.Tries > 0:
		text = "killed, or still running"
	default:
		return "pending"
	}
	left := decide.Left(s.of.Next, decide.Pass{Now: journal.BootNanos()})
	if left >= time.Second {
		text += "; next try in " + term.Roughly(left)
	}
	return text
}

// Fact is one piece of evidence in readable form: a question, and "yes", "no" or "unknown".
type Fact struct {
	Question  string `json:"question"`
	Answer    string `json:"answer"`
	NotLooked bool   `json:"notLooked,omitempty"` // unknown because it was not examined
}

// factsOf returns the evidence for a verdict, and marks facts that were not examined. A fact is not
// examined if other evidence is sufficient, or if it means nothing, for example after a reboot.
func factsOf(f *sweep.Finding) []Fact {
	ev := f.Evidence
	fact := func(question string, of decide.Fact) Fact {
		answer, looked := facts.Known(of)
		return Fact{question, answer.String(), answer == decide.Unclear && !looked}
	}
	return []Fact{
		fact("its lock is held", ev.Locked),
		fact("unwindctl runs in the namespaces of its ADD", ev.SameNamespaces),
		fact("it was added since the last boot", ev.SameBoot),
		fact("it was added on another machine", ev.OtherHost),
		fact("its network namespace is at its path or mounted elsewhere", ev.NetNS),
		fact("a process is in its network namespace", ev.HasProcess),
		fact("the host end of its interface exists", ev.HostLink),
		fact("the runtime lists it", ev.Listed),
		fact("it is older than the grace period", ev.PastGracePeriod),
		fact("a later ADD, which is not in the journal, added it again", ev.AddedUnseen),
	}
}

// summary describes an attachment's addresses, why it is kept or will be released, and how to
// release it. It omits the DELs, which printShown prints as a table of steps.
func (r *Report) summary(a *Attachment) []string {
	f, except := a.finding, ""
	assignedAgain, owners := r.assignedAgain(a)
	freed := slices.DeleteFunc(slices.Clone(a.freed),
		func(one netip.Addr) bool { return slices.Contains(assignedAgain, one) })
	lines := []string{fmt.Sprintf("%s, interface %s in network %s, has no recorded address.",
		capital(whose(a)), a.IfName, a.Network)}
	if n := len(a.Addresses); n > 0 {
		one, many, when := "has been", "have been", "since "+since(a.Created)
		if len(freed)+len(owners) > 0 {
			one, many, when = "was", "were", "at "+since(a.Created)
		}
		is := many
		if n == 1 {
			is = one
		}
		lines[0] = fmt.Sprintf("%s %s assigned to %s, interface %s in network %s, %s.",
			and(a.Addresses), is, whose(a), a.IfName, a.Network, when)
	}
	if lines = append(lines, owners...); len(owners) > 0 {
		except = ", except for " + and(assignedAgain)
	}
	if len(freed) > 0 {
		lines = append(lines, fmt.Sprintf("The IPAM plugin has released %s, which another pod may now "+
			"have.", and(freed)))
	}
	var guard *sweep.MassReleaseError
	switch ev := f.Evidence; {
	case !f.Releasable() && decide.Yes(ev.Locked):
		return append(lines, "The attachment is kept because an ADD, a DEL or a sweep is working "+
			"on it. If that takes minutes, look for a hung plugin with ps axf.")
	case f.Verdict == decide.Unknown && !decide.Yes(ev.SameNamespaces):
		return append(lines, "The attachment is kept because unwindctl may not be in the "+
			"namespaces where its ADD ran.",
			"Run unwindctl show in the runtime's namespaces: on the host, or with --host in a container "+
				"with hostPID.")
	case f.Verdict == decide.Unknown:
		return append(lines, fmt.Sprintf("The attachment is kept because unwind cannot tell "+
			"whether it is live: %s.", a.Why))
	case !f.Releasable():
		return append(lines, fmt.Sprintf("The attachment is kept because it is live: %s.", a.Why),
			"The runtime's DEL releases it. Without that DEL, a sweep releases it once its network "+
				"namespace, every process in it and the host end of its interface are gone.")
	case errors.As(f.Err, &guard):
		return append(lines, fmt.Sprintf("The attachment seems dead (%s), but so do too many "+
			"others: %s", a.Why, guard))
	case f.Verdict == decide.Foreign:
		return append(lines, fmt.Sprintf("The attachment may be from another machine: %s. unwind "+
			"runs no DEL for it, because a DEL could harm that machine's pods.", a.Why),
			fmt.Sprintf("A sweep releases its host-local addresses on this disk%s. To release them "+
				"now, run unwindctl sweep %s", except, a.Key))
	default:
		lines = append(lines, fmt.Sprintf("The attachment is dead and will be released%s: %s.",
			except, a.Why))
		if slices.ContainsFunc(a.Steps, func(s Step) bool { return !s.WaitsFor.Blocked() }) {
			lines = append(lines, "To run the pending DELs now, run unwindctl sweep "+a.Key.String())
		}
		for _, s := range a.Steps {
			if s.LeftChain {
				lines = append(lines, "Plugin "+s.Plugin+" has left the chain: its DEL delays no pod, and "+
					"unwind drops it once it has failed for about a day.")
			}
		}
		fails := func(s Step) bool { return !s.LeftChain && decide.Failing(&s.of) }
		if slices.ContainsFunc(a.Steps, fails) {
			lines = append(lines, "If a DEL can never succeed, for example because the plugin is gone for "+
				"good, run unwindctl forget "+a.Key.String())
		}
		return lines
	}
}

func and(addresses []netip.Addr) string { return strings.Join(term.Addresses(addresses), " and ") }

// assignedAgain returns the addresses of an attachment that host-local has assigned again, and a
// sentence about the new owner of each.
func (r *Report) assignedAgain(a *Attachment) (addresses []netip.Addr, owners []string) {
	for _, c := range a.of.Got.Claims {
		if c.Pool == "" {
			continue
		}
		own, _ := ipam.HasFileOf(c.Pool, ipam.Owner{ContainerID: a.ContainerID, IfName: a.IfName},
			c.Address)
		owner, named, err := ipam.OwnerOf(c.Pool, c.Address)
		if own || !named || err != nil {
			continue
		}
		pod := r.pods[owner.ContainerID]
		addresses = append(addresses, c.Address)
		owners = append(owners, fmt.Sprintf("host-local's file of %s now names %s.", c.Address,
			ownerText(owner.ContainerID, owner.IfName, &pod)))
	}
	return addresses, owners
}

func whose(a *Attachment) string {
	if a.Pod == nil || a.Pod.Name == "" {
		return "container " + a.ContainerID
	}
	return fmt.Sprintf("pod %s (container %s)", podName(a.Pod),
		term.Short(a.ContainerID, term.Plain))
}

func since(t time.Time) string {
	if t.IsZero() {
		return "an unknown time"
	}
	return fmt.Sprintf("%s (%s ago)", term.Time(t), term.Ago(t))
}

// capital returns a text with a capital first letter.
func capital(text string) string { return strings.ToUpper(text[:1]) + text[1:] }
