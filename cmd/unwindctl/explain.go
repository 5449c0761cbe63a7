package main

import (
	"strings"

	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
)

// glossary explains the terms in the documents, and each word that a table prints.
var glossary = []struct{ kind, word, meaning string }{
	{"term", "chain", "the plugins in a conflist; the runtime calls each of them for each pod"},
	{"term", "attachment", "one interface of one container in one network: the result of one ADD"},
	{"term", "provider", "the project that writes the node's conflist, such as Flannel or Calico"},
	{"term", "sweep", "a pass over the node that releases dead attachments and retries pending DELs"},
	{"term", "pending DEL", "a DEL that failed or has not run yet; unwind retries it"},
	{"term", "journal", "unwind's on-disk record of each attachment, with everything that its DELs " +
		"need"},
	{"term", "agent", "the program unwindctl run: it keeps unwind installed, sweeps, and serves " +
		"metrics"},
	{"term", "grace period", "the age that an attachment must reach before the runtime's list can " +
		"prove it dead"},
	{"term", "mass-release guard", "a safeguard that keeps all attachments while implausibly many " +
		"seem dead; see the result kept"},
	{"state", "adding", "its ADD is running, or was killed, and has no result yet"},
	{"state", "live", "its ADD succeeded, or has a result and is still running"},
	{"state", "rolling-back", "its ADD failed, and it has pending DELs"},
	{"state", "deleting", "the runtime sent a DEL, or a sweep found it dead, and it has pending DELs"},
	{"verdict", "live", "in use; only the runtime's DEL releases it"},
	{"verdict", "dead", "gone for good; a sweep releases it"},
	{"verdict", "unknown", "cannot be judged from here, and is kept"},
	{"verdict", "other-machine", "from another machine, of which this disk is a copy; a sweep " +
		"releases its addresses on this disk and runs no DEL"},
	{"result", "released", "nothing of it remains"},
	{"result", "to be released", "with --dry-run: sweep would release it"},
	{"result", "pending", "dead; the next sweep retries its failed DELs"},
	{"result", "waits", "dead, but cannot be released yet; see REASON"},
	{"result", "kept", "seems dead, as do too many others: more than 10, and more than 30 % of the " +
		"live attachments in the journal; see --force"},
	{"result", "unknown", "cannot be judged from here, and is kept"},
	{"result", "busy", "an ADD, a DEL or another sweep is working on it"},
	{"result", "recent", "not on the runtime's list, but too young to be judged by that list; " +
		"REASON shows the time left; see --grace-period"},
	{"result", "live", "in use; counted, but shown only if ATTACHMENT names it"},
	{"result", "not tried", "the sweep ran out of time; run unwindctl sweep again"},
	{"address", "live", "its owner is live"},
	{"address", "recent", "its owner is not on the runtime's list, but too young to be judged by " +
		"that list"},
	{"address", "leaked", "its owner is gone; unwindctl sweep releases it"},
	{"address", "empty", "an empty reservation: host-local was killed before it wrote the owner; " +
		"unwindctl sweep releases it"},
	{"address", "unknown", "its owner cannot be judged; see unwindctl ipam --cri auto"},
	{"address", "free", "not allocated"},
	{"address", "gateway", "the gateway of the range, which no pod gets"},
	{"event", "rolled-back", "an ADD failed and was undone as far as possible; REASON shows the " +
		"plugin's own error"},
	{"event", "swept", "an attachment was released without the runtime's DEL"},
	{"event", "released", "an address was released in a host-local pool; no attachment in the " +
		"journal owned it"},
	{"event", "waiting", "a DEL was postponed, because its address has a new owner"},
	{"event", "superseded", "the same container ID was added again before its DEL"},
	{"event", "forgotten", "unwindctl forget dropped an attachment with pending DELs"},
	{"event", "untaken", "unwind forgot a DEL after 20 tries: its ADD failed too, and its plugin " +
		"is no longer in the chain, or every DEL failed with the ADD's error for an hour"},
	{"event", "no-op", "the runtime's DEL succeeded without running a plugin; see REASON"},
	{"status", "on", "pods start through unwind"},
	{"status", "starting", "the agent has not finished its first check"},
	{"status", "another-agent", "another agent manages this node; this one waits until it exits"},
	{"status", "off", "somebody switched unwind off; unwindctl on switches it on again"},
	{"status", "no-provider", "the directory contains no provider's conflist to use; install the " +
		"network's provider"},
	{"status", "mesh-in-the-way", "another program keeps adding its plugin after unwind's entry"},
	{"status", "cilium-chaining", "cilium copies the directory's first conflist, which would be " +
		"unwind's, into its own"},
	{"status", "cilium-exclusive", "cilium has renamed unwind's conflist"},
	{"status", "plugin-missing", "unwind's conflist exists, but its plugin does not: no pod can " +
		"start"},
	{"status", "refused", "the install was refused or failed; see unwindctl doctor"},
}

// describe returns all words of a kind, with their meanings, as lines of a help text.
func describe(kind string) (lines string) {
	const left, width = 18, 80
	for _, g := range glossary {
		if g.kind != kind {
			continue
		}
		line := "  " + g.word + strings.Repeat(" ", left-2-len(g.word))
		for i, word := range strings.Fields(g.meaning) {
			switch {
			case i == 0:
			case len(line)+1+len(word) > width:
				lines += line + "\n"
				line = strings.Repeat(" ", left)
			default:
				line += " "
			}
			line += word
		}
		lines += line + "\n"
	}
	return lines
}

func explainCommand() *cobra.Command {
	var o term.Output
	var words []cobra.Completion
	for _, g := range glossary {
		words = append(words, g.word)
	}
	cmd := &cobra.Command{
		Use:        "explain [WORD]",
		SuggestFor: []string{"glossary"},
		Short:      "Explain a word that unwindctl prints",
		Long: "Explain a word that unwindctl prints, or all of them: the terms, the states and\n" +
			"verdicts of attachments, the results of sweep, the states of addresses, the events\n" +
			"of history, and the states of the metric unwind_status.",
		Example:   "  unwindctl explain\n  unwindctl explain to be released",
		ValidArgs: words,
		Args:      cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			word, found := strings.Join(args, " "), false
			t := term.NewTable(term.Column{}, term.Column{}, term.Column{Least: 20, Wrap: true})
			for _, g := range glossary {
				if word == "" || g.word == word {
					found = true
					t.Add(g.word, g.kind, g.meaning)
				}
			}
			if !found {
				return term.WithHint("unwindctl explain lists all words", "no such word: %s", word)
			}
			return t.Print(cmd.OutOrStdout(), &o)
		},
	}
	return cmd
}
