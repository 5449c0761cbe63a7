package inspect

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"
	"text/tabwriter"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/sweep"
	"cni-unwind/plugin/tristate"
)

type shown struct {
	Attachment
	Verdict  string `json:"verdict"` // live, dead, unknown, other-machine
	Why      string `json:"why"`
	Evidence []Fact `json:"evidence"`
	// Summary is a list of sentences about the attachment: its addresses, why it is kept, and how to
	// release it.
	Summary []string `json:"summary"`
}

// Show prints the attachments that an argument names. It then returns errors, which may be about
// other entries.
func Show(ctx context.Context, to term.Streams, arg string, of Scope,
	o *term.Output) error {
	s, readErr := ReadSnapshot(ctx, &journal.Store{Dir: of.StateDir}, nil)
	all, judgeErr := examine(ctx, to, arg, of, s.Attachments)
	err := errors.Join(errors.Join(s.Damaged...), readErr, judgeErr)
	var wrong term.UsageError
	var damaged *journal.DamagedError
	unread := err != nil && !errors.As(err, &damaged) && len(all) == 0 // an empty list would be wrong
	switch {
	case errors.As(judgeErr, &wrong):
		return judgeErr
	case unread && (o.IsObject() || errors.Is(err, fs.ErrPermission)):
		return err
	}
	for _, one := range s.Damaged {
		if len(all) == 0 && errors.As(one, &damaged) && damaged.Key.String() == arg {
			return explainDamaged(to.Out, damaged, o)
		}
	}
	switch {
	case len(all) == 0:
		return errors.Join(err, explainNothing(ctx, to, arg, of, s.Events, o))
	case o.IsObject():
		return errors.Join(err, o.PrintObject(to.Out, "attachments", all))
	case o.Format == term.Name:
		var found []Attachment
		for _, a := range all {
			found = append(found, a.Attachment)
		}
		return errors.Join(err, term.PrintNames(to.Out, names(found)))
	}
	return errors.Join(err, printShown(to.Out, all, o))
}

// examine judges the attachments that an argument names. The error may be about other attachments.
func examine(ctx context.Context, to term.Streams, arg string, of Scope,
	attachments []Attachment) (all []shown, err error) {
	found, err := Find(attachments, arg)
	if len(found) == 0 || err != nil {
		return nil, err
	}
	list, listErr := of.List(ctx, to.In)
	findings, judgeErr := Judge(ctx, Plugin(to.Err), of.StateDir, list)
	for _, a := range found {
		f := findings[a.Key]
		if f == nil { // it was released between the two reads
			continue
		}
		all = append(all, shown{a, string(f.Fate), term.OneLine(f.Reason.Text), factsOf(f),
			summary(&a, f, attachments)})
	}
	return all, errors.Join(listErr, judgeErr)
}

func printShown(out io.Writer, all []shown, o *term.Output) error {
	var text strings.Builder
	for i, a := range all {
		if i > 0 {
			text.WriteByte('\n')
		}
		w := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
		fmt.Fprintf(w, "attachment\t%s\n", a.Key)
		fmt.Fprintf(w, "pod\t%s\n", podName(a.Pod))
		fmt.Fprintf(w, "state\t%s for %s%s\n", a.State, term.Ago(a.Since), term.Because(a.Reason))
		fmt.Fprintf(w, "addresses\t%s\n", term.Join(term.Addresses(a.Addresses)))
		fmt.Fprintf(w, "netns\t%s\n", term.OrDash(a.NetNS))
		fmt.Fprintf(w, "verdict\t%s: %s\n", a.Verdict, a.Why)
		_ = w.Flush() // the evidence below has its own column widths
		for _, f := range a.Evidence {
			answer := f.Answer
			if f.NotLooked {
				answer = "not examined"
			}
			fmt.Fprintf(w, "  %s\t%s\n", f.Question, answer)
		}
		_ = w.Flush()
		if len(a.Steps) > 0 {
			text.WriteByte('\n')
			t := term.NewTable(term.Column{Name: "PLUGIN"}, term.Column{Name: "DEL"},
				term.Column{Name: "TRIES"}, term.Column{Name: "LAST ERROR"})
			for _, s := range a.Steps {
				t.Add(s.Plugin, s.state(a.PendingDEL()), fmt.Sprintf("%d×", s.Tries),
					term.OrDash(term.OneLine(s.Last)))
			}
			_ = t.Print(&text, o)
		}
		fmt.Fprintf(&text, "\n%s\n", strings.Join(a.Summary, "\n"))
	}
	_, err := io.WriteString(out, text.String())
	return err
}

func (s *Step) state(pending bool) string {
	switch {
	case !pending:
		return "not pending"
	case decide.Failing(&s.of):
		return fmt.Sprintf("failed (%s)", s.words())
	}
	return cmp.Or(s.words(), "pending")
}

// Fact is one piece of evidence in readable form: a question, and "yes", "no" or "unknown".
type Fact struct {
	Question  string `json:"question"`
	Answer    string `json:"answer"`
	NotLooked bool   `json:"notLooked,omitempty"` // unknown because it was not examined
}

// factsOf returns the evidence for a verdict. It marks facts that were not examined: other evidence
// was sufficient, or the fact means nothing, for example after a reboot.
func factsOf(f *sweep.Finding) []Fact {
	ev := f.Evidence
	fact := func(question string, of decide.Fact) Fact {
		answer, looked := facts.Known(of)
		return Fact{question, answer.String(), answer == tristate.Unknown && !looked}
	}
	return []Fact{
		fact("its lock is held", ev.Locked),
		fact("this process is in the namespaces of its ADD", ev.SameNamespaces),
		fact("it was added in this boot", ev.SameBoot),
		fact("it was added on another machine", ev.OtherHost),
		fact("its network namespace is at its path or mounted elsewhere", ev.NetNS),
		fact("a process is in its network namespace", ev.HasProcess),
		fact("the host end of its interface exists", ev.HostLink),
		fact("the runtime lists it", ev.Listed),
		fact("it is older than the grace period", ev.PastGracePeriod),
		fact("it was added again without a journal entry", ev.AddedUnseen),
	}
}
