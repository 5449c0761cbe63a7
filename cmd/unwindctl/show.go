package main

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

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
			if err := flags.resolve(); err != nil {
				return err
			}
			all, err := show(cmd, args[0], flags)
			var wrong usageError
			if errors.As(err, &wrong) {
				return err
			}
			if len(all) == 0 {
				if damaged := damagedOf(err, args[0]); damaged != nil {
					return explainDamaged(cmd.OutOrStdout(), damaged, asJSON)
				}
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
	if findErr != nil {
		return nil, findErr
	}
	if len(found) == 0 {
		return nil, err
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
		all = append(all, shown{a, string(f.Fate), oneLine(f.Reason), f.Facts(), summary(&a, f, attachments)})
	}
	return all, errors.Join(err, listErr, judgeErr)
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

func nothing(arg string, flags sweepFlags) error {
	return fmt.Errorf("no attachment %s in the journal of %s; unwindctl list shows them", arg, flags.stateDir)
}
