package inspect

import (
	"fmt"
	"strings"

	"cni-unwind/cmd/internal/term"
)

// next returns the commands to run next: to judge the owners of addresses, to free leaked addresses
// and to prevent leaks. It returns "" if there are no pools.
func next(pools []*Pool, of Scope) string {
	if len(pools) == 0 {
		return ""
	}
	leaked, undecided, unknown, plain, full := 0, 0, 0, false, ""
	for _, p := range pools {
		leaked, unknown, plain = leaked+p.Leaked+p.Empty, unknown+p.Unknown, plain || p.Plain
		undecided += p.Unknown + p.Recent
		if p.Full && p.Live == p.Used {
			full = p.Network
		}
	}
	var text strings.Builder
	switch {
	case leaked > 0:
		fmt.Fprintf(&text, "\n%s leaked. To see what a sweep would free, run unwindctl sweep "+
			"--dry-run%s\n",
			term.Plural(leaked, "address is", "addresses are"), of.ListFlags())
	case undecided == 0:
		text.WriteString("\nNo address is leaked.\n")
	}
	if full != "" {
		fmt.Fprintf(&text, "The pool of network %s is too small: all its addresses are in use.\n", full)
	}
	if unknown > 0 && !of.asks() {
		fmt.Fprintf(&text, "\nOnly the runtime knows whether the owners of %s are live. To query it, "+
			"run unwindctl ipam%s\n",
			term.Plural(unknown, "address", "addresses"), of.ListFlags())
	}
	if plain {
		fmt.Fprintf(&text, "unwind can prevent leaks. To see what it would install, run unwindctl "+
			"install --dry-run\n")
	}
	return text.String()
}
