package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"path/filepath"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin"
)

// shown is an attachment with what is to be said of it.
type shown struct {
	attachment
	Verdict  string        `json:"verdict"` // live, dead, unknown, foreign
	Why      string        `json:"why"`
	Evidence []plugin.Fact `json:"evidence"`
	Summary  []string      `json:"summary"` // sentences: who holds what, why it is kept, what would release it
}

func showCommand() *cobra.Command {
	var asJSON bool
	var flags sweepFlags
	cmd := &cobra.Command{
		Use:   "show ATTACHMENT|POD|ADDRESS",
		Short: "Show an attachment: what it holds, why it is kept, and what would release it",
		Long: "Show an attachment: what it holds, which DELs are owed and why they fail, on what evidence it is judged, and what would\n" +
			"release it. Nothing is changed, and nothing is locked while it prints.\n\n" +
			"It is named by NETWORK/CONTAINER/IFNAME, a container ID, a pod (NAMESPACE/NAME, or the name), or an address. Of a container\n" +
			"ID the beginning is enough.",
		Example: "  unwindctl show 10.22.0.5\n  unwindctl show default/web-0\n  unwindctl show 4ac0",
		Args:    oneArg,
		RunE: func(cmd *cobra.Command, args []string) error {
			var err error
			if flags.stateDir, err = filepath.Abs(flags.stateDir); err != nil {
				return err
			}
			all, err := show(cmd, args[0], flags)
			if len(all) == 0 {
				return errors.Join(err, explainNothing(cmd.Context(), cmd.OutOrStdout(), args[0], flags, asJSON))
			}
			if asJSON {
				return errors.Join(err, printJSON(cmd.OutOrStdout(), "attachments", all))
			}
			return errors.Join(err, printShown(cmd.OutOrStdout(), all))
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON: version, attachments")
	addCommonFlags(cmd, &flags)
	return cmd
}

// show looks at the attachments that an argument names. Those that could be shown come with an error about others.
func show(cmd *cobra.Command, arg string, flags sweepFlags) ([]shown, error) {
	ctx := cmd.Context()
	attachments, err := readJournal(ctx, &journal.Store{Dir: flags.stateDir})
	found, findErr := find(attachments, arg)
	if findErr != nil || len(found) == 0 {
		return nil, errors.Join(findErr, err)
	}
	list, listErr := listFor(ctx, flags, cmd.InOrStdin())
	p := &plugin.Plugin{Stdout: io.Discard, Stderr: cmd.ErrOrStderr(), Budgets: plugin.DefaultBudgets}
	findings, judgeErr := judgeAll(ctx, p, flags.stateDir, list)
	var all []shown
	for _, a := range found {
		f := findings[a.key()]
		if f == nil { // it went between the two looks
			continue
		}
		all = append(all, shown{a, string(f.Fate), oneLine(f.Reason), f.Facts(), summary(&a, f)})
	}
	return all, errors.Join(err, listErr, judgeErr)
}

// summary says in sentences who holds what, why it is kept, and what would release it.
func summary(a *attachment, f *plugin.Finding) []string {
	who := "container " + a.ContainerID
	if a.Pod != nil {
		who = fmt.Sprintf("pod %s (container %s)", podName(a.Pod), short(a.ContainerID))
	}
	has := "No address is known of"
	if len(a.Addresses) > 0 {
		has = strings.Join(addressTexts(a.Addresses), " and ") + map[bool]string{true: " was", false: " were"}[len(a.Addresses) == 1] + " given to"
	}
	lines := []string{fmt.Sprintf("%s %s, for interface %s in network %s, %s ago.", has, who, a.IfName, a.Network, ago(a.Created))}
	if len(a.freed) > 0 {
		lines = append(lines, fmt.Sprintf("What gave out %s has taken it back: another pod may have it.", strings.Join(addressTexts(a.freed), " and ")))
	}
	reason := oneLine(f.Reason)
	switch {
	case f.Fate == plugin.Unknown:
		lines = append(lines, fmt.Sprintf("It is kept, for whether it lives cannot be told: %s.", reason))
	case !f.Ends():
		return append(lines, fmt.Sprintf("It is kept, for it lives: %s.", reason),
			"Its runtime's DEL releases it. Without one, any sweep does once its network namespace, every process in it and the host's end of its interface are gone.")
	case f.Fate == plugin.Foreign:
		lines = append(lines, fmt.Sprintf("It is dead here: %s. No DEL is run for it; unwindctl sweep %s releases what host-local keeps on this disk.", reason, a.key()))
		return lines
	default:
		lines = append(lines, fmt.Sprintf("It is dead and to be released: %s.", reason))
	}
	for _, s := range a.Steps {
		if text := s.sentence(); text != "" {
			lines = append(lines, text)
		}
	}
	if f.Ends() {
		lines = append(lines, fmt.Sprintf("Each sweep tries again; unwindctl sweep %s does it now. What can never be undone can be given up: unwindctl forget %s.", a.key(), a.key()))
	}
	return lines
}

// sentence says what a DEL that is owed waits for.
func (s *step) sentence() string {
	next := "It is tried again by the next sweep."
	if s.wait > 0 {
		next = fmt.Sprintf("It is tried again after %s.", roughly(s.wait))
	}
	switch {
	case s.LastError != "":
		return fmt.Sprintf("The DEL of %s failed, %s so far, at last with code %d: %s. %s",
			s.Plugin, plural(s.Attempts, "time", "times"), s.LastCode, oneLine(s.LastError), next)
	case s.Parked:
		return fmt.Sprintf("The DEL of %s waits until the address has no other owner: it would take that one's rules.", s.Plugin)
	case s.Again:
		return fmt.Sprintf("The DEL of %s is run once more, for it was killed while it worked. %s", s.Plugin, next)
	case s.Attempts == 0:
		return fmt.Sprintf("The DEL of %s was not tried yet.", s.Plugin)
	}
	return ""
}

func printShown(out io.Writer, all []shown) error {
	var text strings.Builder
	for i, a := range all {
		if i > 0 {
			text.WriteByte('\n')
		}
		w := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
		fmt.Fprintf(w, "attachment\t%s\n", a.key())
		fmt.Fprintf(w, "pod\t%s\n", podName(a.Pod))
		fmt.Fprintf(w, "state\t%s for %s%s\n", a.State, ago(a.Since), because(a.Reason))
		fmt.Fprintf(w, "addresses\t%s\n", orDash(addressTexts(a.Addresses)))
		fmt.Fprintf(w, "netns\t%s\n", orNone(a.NetNS))
		fmt.Fprintf(w, "verdict\t%s: %s\n", a.Verdict, a.Why)
		for _, f := range a.Evidence {
			fmt.Fprintf(w, "  %s\t%s\n", f.Question, f.Answer)
		}
		_ = w.Flush()
		if len(a.Steps) > 0 {
			w = tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
			fmt.Fprintln(w, "\nPLUGIN\tDEL\tTRIED\tLAST ERROR")
			for _, s := range a.Steps {
				fmt.Fprintf(w, "%s\t%s\t%d×\t%s\n", s.Plugin, s.state(a.owed()), s.Attempts, orNone(oneLine(s.LastError)))
			}
			_ = w.Flush()
		}
		fmt.Fprintf(&text, "\n%s\n", strings.Join(a.Summary, "\n"))
	}
	_, err := io.WriteString(out, text.String())
	return err
}

func because(reason string) string {
	if reason == "" {
		return ""
	}
	return ": " + oneLine(reason)
}

func (s *step) state(owed bool) string {
	switch {
	case !owed:
		return "when it goes"
	case s.LastError != "":
		return fmt.Sprintf("failed (code %d)", s.LastCode)
	case s.Parked:
		return "parked"
	case s.Again:
		return "once more"
	}
	return "owed"
}

// explainNothing says what there is to say of an argument that no attachment in the journal answers to.
func explainNothing(ctx context.Context, out io.Writer, arg string, flags sweepFlags, asJSON bool) error {
	if asJSON {
		return errors.Join(printJSON(out, "attachments", []shown{}), nothing(arg, flags))
	}
	var text strings.Builder
	if address, err := netip.ParseAddr(arg); err == nil {
		pools, _ := poolsOf(flags)
		for _, p := range pools {
			if owner, given, err := ipam.OwnerOf(p.Dir, address); err == nil && given {
				fmt.Fprintf(&text, "%s is reserved in %s for container %s, interface %s, whom the journal does not know: a pod from before the install, or the journal was lost.\nunwindctl sweep --cri SOCKET asks the runtime, and releases it if nothing has it.\n",
					address, p.Dir, owner.ContainerID, orNone(owner.IfName))
			}
		}
	}
	events, err := readHistory(ctx, flags.stateDir)
	for _, e := range lastOf(events, arg, 3) {
		fmt.Fprintf(&text, "%s: %s %s ago%s\n", e.Key, e.Kind, ago(e.At.Wall), because(e.Reason))
	}
	if text.Len() == 0 {
		return errors.Join(err, nothing(arg, flags))
	}
	_, writeErr := io.WriteString(out, text.String())
	return errors.Join(err, writeErr)
}

func nothing(arg string, flags sweepFlags) error {
	return fmt.Errorf("no attachment %s in the journal of %s; unwindctl list shows them", arg, flags.stateDir)
}
