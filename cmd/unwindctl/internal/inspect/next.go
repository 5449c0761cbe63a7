package inspect

import (
	"fmt"
	"strings"

	"cni-unwind/cmd/internal/term"
)

// notListed says that some of what counts as live may be dead, and is only young.
func notListed(young int) string {
	return fmt.Sprintf("The runtime does not list %d of the live ones: they are kept until their "+
		"grace period (10 minutes, unless set) is over. Look again then.", young)
}

// next says what to do about the pools of this node: who tells whether the owners live, what frees
// the addresses that are leaked, what prevents it. It says nothing of no pools.
func next(pools []*Pool, of Scope) string {
	if len(pools) == 0 {
		return ""
	}
	leaked, unknown, young, plain := 0, 0, 0, false
	for _, p := range pools {
		leaked, unknown, plain = leaked+p.Leaked+p.Ownerless, unknown+p.Unknown, plain || p.Plain
		for _, r := range p.Reservations {
			if r.young {
				young++
			}
		}
	}
	var text strings.Builder
	switch {
	case leaked > 0:
		fmt.Fprintf(&text, "\n%s leaked. To see what would be freed: unwindctl sweep --dry-run%s\n",
			term.Plural(leaked, "address is", "addresses are"), of.ListFlags())
	case unknown == 0 && young == 0:
		text.WriteString("\nNo address is leaked.\n")
	}
	if young > 0 {
		fmt.Fprintf(&text, "\n%s\n", notListed(young))
	}
	if unknown > 0 && !of.asks() {
		fmt.Fprintf(&text, "\nOnly the runtime knows whether the owners of %s are live: unwindctl "+
			"ipam%s\n",
			term.Plural(unknown, "address", "addresses"), of.ListFlags())
	}
	if plain {
		fmt.Fprintf(&text, "To prevent leaks: unwindctl install --dry-run\n")
	}
	return text.String()
}
