package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"unicode"

	"github.com/spf13/cobra"

	"cni-unwind/journal"
	"cni-unwind/plugin"
)

// sweepFlags are those of the command, as given.
type sweepFlags struct {
	where
	network, cri, valid   string
	dryRun, force, asJSON bool
}

func sweepCommand() *cobra.Command {
	var flags sweepFlags
	cmd := &cobra.Command{
		Use:   "sweep [ATTACHMENT]",
		Short: "Release the attachments that are dead",
		Long: "Release the attachments that are dead, and try again every DEL that is owed.\n\n" +
			"An attachment is dead if its ADD failed, if the runtime asked for its DEL, if it was made before this boot, or if its\n" +
			"network namespace is gone, with every process in it and its interface on the host. With a list of what is attached\n" +
			"(--cri, --valid) also if the list does not have it, no process is in its namespace and its grace period is over.\n" +
			"Everything else is kept. Run it where the runtime runs, on the host: from a container nothing can be told, and\n" +
			"nothing is done. It can be cut off at any time, and be run again.\n\n" +
			"ATTACHMENT is NETWORK/CONTAINER/IFNAME, as unwindctl list shows them, or a container ID, a pod or an address, if it has one\n" +
			"attachment; of a container ID, the beginning is enough.\n\n" +
			"The results:\n" +
			"  released        nothing of it is left\n" +
			"  to be released  with --dry-run: it would be tried\n" +
			"  pending         it is dead, and the DELs that failed are tried again by the next sweep\n" +
			"  waits           it is dead, and nothing can be done yet: WHY says what for\n" +
			"  kept            it seems dead, but so do over 10, and over 30 %, of those that live by the journal: see --force\n" +
			"  unknown         whether it lives cannot be told from here; it is kept\n" +
			"  busy            an ADD, a DEL or another sweep works on it\n" +
			"  live            counted, and shown only where ATTACHMENT names it\n\n" +
			"The exit code is 0 if each is released (or to be), waits, is busy or lives, and 1 if not.",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 1 {
				return usageError{fmt.Errorf("one attachment at most, not %d", len(args))}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error { return sweep(cmd, args, flags) },
	}
	cmd.Flags().StringVar(&flags.network, "network", "", "only the attachments of this `NETWORK`")
	cmd.Flags().BoolVar(&flags.dryRun, "dry-run", false, "say what would be released, and release nothing")
	cmd.Flags().BoolVar(&flags.force, "force", false, "release also what is kept since too much seems dead")
	cmd.Flags().StringVar(&flags.valid, "valid", "",
		"a `FILE` with all that is attached to --network, - for stdin: [{\"containerID\": \"…\", \"ifname\": \"…\"}, …]")
	cmd.Flags().BoolVar(&flags.asJSON, "json", false, "print JSON: version, findings; live ones too")
	addCommonFlags(cmd, &flags)
	return cmd
}

// addCommonFlags adds those of every command that judges attachments.
func addCommonFlags(cmd *cobra.Command, flags *sweepFlags) {
	cmd.Flags().StringVar(&flags.cri, "cri", "", "ask the runtime at `SOCKET` for its pods, such as /run/containerd/containerd.sock; auto finds it")
	flags.addFlags(cmd)
}

func sweep(cmd *cobra.Command, args []string, flags sweepFlags) error {
	ctx := cmd.Context()
	if err := flags.resolve(); err != nil {
		return err
	}
	s := plugin.Sweep{Network: flags.network, DryRun: flags.dryRun, Force: flags.force, Progress: progress(cmd.ErrOrStderr())}
	if len(args) == 1 {
		key, err := findOne(ctx, flags.stateDir, args[0])
		if err != nil {
			return err
		}
		if flags.network != "" && flags.network != key.Network {
			return usageError{fmt.Errorf("%s is not an attachment of --network %s", key, flags.network)}
		}
		s.Attachment = &key
	}
	list, listErr := listFor(ctx, flags, cmd.InOrStdin())
	var wrong usageError
	if errors.As(listErr, &wrong) {
		return listErr
	}
	s.List = list
	var poolErr error
	if s.Attachment == nil {
		s.Pools, poolErr = poolsOf(flags)
	}
	p := &plugin.Plugin{Stdout: io.Discard, Stderr: cmd.ErrOrStderr(), Budgets: plugin.DefaultBudgets}
	if s.Progress != nil {
		defer context.AfterFunc(ctx, func() {
			fmt.Fprintln(cmd.ErrOrStderr(), "\x1b[Kinterrupted: the DELs that run are finished first; once more ends at once")
		})()
	}
	findings, err := p.Sweep(ctx, flags.stateDir, s)
	listErr = errors.Join(listErr, poolErr)
	if findings == nil && err != nil {
		return errors.Join(listErr, err)
	}
	if len(findings) == 0 && !flags.asJSON {
		return errors.Join(listErr, err, printNothing(cmd.OutOrStdout(), flags))
	}
	slices.SortFunc(findings, func(a, b plugin.Finding) int { return cmp.Compare(a.Key.String(), b.Key.String()) })
	var printErr error
	if flags.asJSON {
		printErr = printJSON(cmd.OutOrStdout(), "findings", jsonFindings(findings, flags.dryRun))
	} else {
		printErr = printFindings(cmd.OutOrStdout(), findings, flags.dryRun, s.Attachment != nil)
	}
	return errors.Join(listErr, err, left(findings, flags.dryRun), printErr)
}

// finding is what sweep --json prints of an attachment, or of an address that no attachment has.
type finding struct {
	Network     string        `json:"network"`
	ContainerID string        `json:"containerID,omitempty"`
	IfName      string        `json:"ifname,omitempty"`
	Address     string        `json:"address,omitempty"`
	Pod         *journal.Pod  `json:"pod,omitempty"`
	State       journal.State `json:"state,omitempty"`
	Verdict     plugin.Fate   `json:"verdict"`
	Result      string        `json:"result"` // as the table has it
	Why         string        `json:"why"`
	Pending     []string      `json:"pending,omitempty"` // delegates
	Error       string        `json:"error,omitempty"`
}

func jsonFindings(findings []plugin.Finding, dryRun bool) []finding {
	all := []finding{}
	for i := range findings {
		f := &findings[i]
		word, _ := result(f, dryRun)
		one := finding{
			Network: f.Network, ContainerID: f.ContainerID, IfName: f.IfName, State: f.State, Verdict: f.Fate, Result: word,
			Why: f.Reason, Pending: f.Pending,
		}
		if f.Address.IsValid() {
			one.Address = f.Address.String()
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

// progress returns what shows on a terminal how far a sweep has come; nil where there is none.
func progress(out io.Writer) func(done, of int) {
	if _, terminal := onTerminal(out); !terminal {
		return nil
	}
	return func(done, of int) {
		text := fmt.Sprintf("%d of %s tried\r", done, attachmentsOf(of)) // what is logged meanwhile is written over it
		if done == of {
			text = "" // the table has it all
		}
		fmt.Fprint(out, "\x1b[K", text)
	}
}

// poolsOf returns the pools of host-local that the flags cover.
func poolsOf(flags sweepFlags) ([]plugin.Pool, error) {
	pools, err := plugin.ReadPools(flags.confDir, flags.stateDir)
	return slices.DeleteFunc(pools, func(p plugin.Pool) bool { return flags.network != "" && p.Network != flags.network }), err
}

// printNothing tells a network without attachments, whose name may be wrong, from a journal without any.
func printNothing(out io.Writer, flags sweepFlags) error {
	store := &journal.Store{Dir: flags.stateDir}
	if _, err := os.Lstat(store.Path()); err != nil || flags.network == "" {
		return printNone(out, store)
	}
	_, err := fmt.Fprintf(out, "No attachments of network %s.\n", flags.network)
	return err
}

// listFor returns the list of what is attached, nil if none is given. An error that is no usageError means that the runtime
// did not answer: there is no list then, which is not an empty one.
func listFor(ctx context.Context, flags sweepFlags, stdin io.Reader) (*plugin.List, error) {
	switch {
	case flags.cri != "" && flags.valid != "":
		return nil, usageError{errors.New("--cri and --valid: one list at most")}
	case flags.cri == "auto":
		return findPodSandboxes(ctx, criSockets)
	case flags.cri != "" && flags.cri != "none":
		list, err := podSandboxes(ctx, flags.cri)
		if err != nil {
			return nil, fmt.Errorf("the runtime at %s gave no list, so attachments are judged without one: %w", flags.cri, err)
		}
		return list, nil
	case flags.valid != "" && flags.network == "":
		return nil, usageError{errors.New("--valid needs --network: a list speaks of one network")}
	case flags.valid != "":
		return readValid(flags.valid, flags.network, stdin)
	}
	return nil, nil
}

func readValid(path, network string, stdin io.Reader) (*plugin.List, error) {
	var data []byte
	var err error
	if path == "-" {
		data, err = io.ReadAll(stdin)
	} else {
		data, err = os.ReadFile(path)
	}
	if err != nil {
		return nil, usageError{err}
	}
	valid, err := plugin.ParseValid(data)
	if err != nil {
		return nil, usageError{fmt.Errorf("%s: %w", path, err)}
	}
	return plugin.NewList(network, valid), nil
}

// printFindings prints all that does not simply live, and how many of each there are.
func printFindings(out io.Writer, findings []plugin.Finding, dryRun, all bool) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	count := map[string]int{}
	for i := range findings {
		f := &findings[i]
		word, more := result(f, dryRun)
		if count[word]++; word == "live" && !all {
			continue
		}
		if count["shown"]++; count["shown"] == 1 {
			fmt.Fprintln(w, "NETWORK\tCONTAINER\tIFNAME\tPOD\tSTATE\tRESULT\tWHY")
		}
		pod := &f.Pod
		if *pod == (journal.Pod{}) {
			pod = nil
		}
		fmt.Fprintln(w, strings.Join([]string{
			f.Network, orNone(short(f.ContainerID)), orNone(f.IfName), podName(pod), orNone(string(f.State)), word, more,
		}, "\t"))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	var words []string
	for _, word := range []string{"released", "to be released", "pending", "waits", "kept", "unknown", "busy", "live"} {
		if count[word] > 0 {
			words = append(words, fmt.Sprintf("%d %s", count[word], word))
		}
	}
	addresses := 0
	for i := range findings {
		if findings[i].Address.IsValid() {
			addresses++
		}
	}
	total := attachmentsOf(len(findings) - addresses)
	if addresses > 0 {
		total += fmt.Sprintf(", and %d reserved for none that the journal knows", addresses)
	}
	_, err := fmt.Fprintf(out, "%s: %s.\n", total, strings.Join(words, ", "))
	return err
}

func attachmentsOf(n int) string {
	if n == 1 {
		return "1 attachment"
	}
	return fmt.Sprintf("%d attachments", n)
}

func orNone(s string) string { return cmp.Or(s, "-") }

// result says in a word what came of an attachment, and why.
func result(f *plugin.Finding, dryRun bool) (word, why string) {
	why = oneLine(f.Reason)
	if f.Address.IsValid() {
		why = fmt.Sprintf("%s: %s", f.Address, why)
	}
	var brake *plugin.BrakeError
	switch {
	case f.Fate == plugin.Unknown:
		word = "unknown"
	case f.Busy:
		word = "busy"
	case !f.Ends():
		word = "live"
	case errors.As(f.Err, &brake):
		word = "kept"
	case f.Waits:
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
	if f.Fate == plugin.Dead && len(f.Pending) > 0 { // of a foreign one no DEL is run
		why += "; DEL owed: " + strings.Join(f.Pending, ", ")
	}
	if word == "pending" {
		why += "; " + oneLine(f.Err.Error())
	}
	return word, why
}

// oneLine is a text as it fits into a table. It may be a delegate's.
func oneLine(text string) string {
	const most = 200
	runes := []rune(strings.Join(strings.Fields(text), " "))
	for i, r := range runes {
		if !unicode.IsPrint(r) {
			runes[i] = '?'
		}
	}
	if len(runes) > most {
		runes = append(runes[:most], '…')
	}
	return string(runes)
}

// left is the error of a sweep that leaves something that it should not.
func left(findings []plugin.Finding, dryRun bool) error {
	pending, unknown := 0, 0
	var errs []error
	for i := range findings {
		switch word, _ := result(&findings[i], dryRun); word {
		case "pending":
			pending++
		case "unknown":
			unknown++
			errs = append(errs, findings[i].Err) // an entry that is damaged, or nil
		}
	}
	if pending > 0 {
		errs = append(errs, fmt.Errorf("%s could not be released in full; the next sweep tries again what is owed",
			attachmentsOf(pending)))
	}
	if unknown > 0 {
		errs = append(errs, fmt.Errorf("nothing can be told of %s: left alone, see WHY", attachmentsOf(unknown)))
	}
	return errors.Join(errs...)
}
