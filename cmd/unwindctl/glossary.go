package main

import "fmt"

// glossary explains the words in the output of commands. It is part of the help texts.
var glossary = []struct{ kind, word, meaning string }{
	{"state", "adding", "its ADD is running and has no result yet"},
	{"state", "live", "in use; only the runtime's DEL releases it"},
	{"state", "recent", "not on the runtime's list, but the list may be older than the attachment"},
	{"state", "dead", "gone for good; the next sweep releases it"},
	{"state", "rolling-back", "its ADD failed, and it has pending DELs"},
	{"state", "deleting", "the runtime or a sweep has begun to release it, and it has pending DELs"},
	{"state", "unknown", "unwind cannot tell whether it is live, and keeps it"},
	{"state", "other-machine", "added before the last boot, possibly on another machine whose disk " +
		"was copied; a sweep releases its host-local addresses on this disk and runs no DEL"},
	{"result", "released", "released as far as possible; if REASON contains an error, rules and " +
		"devices may remain, and nothing retries the DEL"},
	{"result", "would be released", "with --dry-run: sweep would release it"},
	{"result", "pending", "dead, but not released yet; the next sweep tries again"},
	{"result", "kept", "live, busy, recent or unknown; or one of too many that seem dead: more than " +
		"10, and more than 30 % of the attachments of this boot"},
	{"address", "live", "its owner is live"},
	{"address", "recent", "its owner is not on the runtime's list, but the list may be older " +
		"than the owner"},
	{"address", "leaked", "its owner is gone; unwindctl sweep releases it"},
	{"address", "empty", "an empty reservation: host-local was killed before it wrote the owner; " +
		"unwindctl sweep releases it"},
	{"address", "unknown", "unwind cannot tell whether its owner is live, and keeps it"},
	{"address", "free", "not allocated"},
	{"event", "rolled-back", "an ADD failed and was undone as far as possible; REASON shows the " +
		"plugin's own error"},
	{"event", "swept", "an attachment was released without a DEL from the runtime"},
	{"event", "released", "a host-local address was released; no attachment in the journal " +
		"owned it"},
	{"event", "waiting", "a DEL was postponed, because rules or host ports may still use the address"},
	{"event", "superseded", "an ADD of the same container ID came before the DEL of the " +
		"earlier ADD"},
	{"event", "forgotten", "unwindctl forget dropped an attachment with pending DELs"},
	{"event", "dropped", "a DEL failed 300 times over about a day, and unwind dropped it; what its " +
		"plugin created may remain"},
	{"event", "no-op", "the runtime's DEL succeeded without running a plugin; see REASON"},
	{"event", "install", "unwind was installed or updated; REASON shows by whom"},
	{"event", "on", "unwind was switched on"},
	{"event", "off", "unwind was switched off"},
	{"event", "uninstall", "unwind was removed, except for what is still needed"},
	{"status", "on", "pods start through unwind"},
	{"status", "starting", "the agent has not finished its first check"},
	{"status", "another-agent", "another agent manages this node; this one waits until it exits"},
	{"status", "off", "somebody switched unwind off; unwindctl on switches it on again"},
	{"status", "no-provider", "there is no conflist of a CNI provider; install the provider"},
	{"status", "mesh-in-the-way", "another program keeps copying or changing unwind's conflist"},
	{"status", "cilium-exclusive", "cilium has renamed unwind's conflist"},
	{"status", "plugin-missing", "unwind's plugin is missing and cannot be copied; pods start " +
		"without unwind once its conflist is out of use"},
	{"status", "refused", "the install was refused or failed; see unwindctl doctor"},
}

// describe returns all words of a kind, with their meanings, as lines of a help text.
func describe(kind string) (lines string) {
	left := 16
	for _, g := range glossary {
		if g.kind == kind {
			left = max(left, len(g.word)+2)
		}
	}
	for _, g := range glossary {
		if g.kind == kind {
			lines += fmt.Sprintf("  %-*s%s\n", left, g.word, g.meaning)
		}
	}
	return lines
}
