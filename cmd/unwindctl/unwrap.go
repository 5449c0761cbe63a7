package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"cni-unwind/plugin"
)

func unwrapCommand() *cobra.Command {
	return rewriteCommand(&cobra.Command{
		Use:   "unwrap FILE",
		Short: "Return the conflist that wrap has put into unwind's entry",
		Long: "Return the conflist that unwindctl wrap has put into unwind's entry: print the value of \"chain\", byte for byte. What was\n" +
			"changed in the chain since is returned changed; all else in FILE goes. FILE - is the standard input. A file that is not\n" +
			"wrapped is left as it is.",
	}, "not wrapped", unwrapFile)
}

// unwrapFile returns the chain that the source has inside unwind's entry. Without a result there is no such entry. Other keys
// of unwind's may be wrong: this is the way out.
func unwrapFile(src source) ([]byte, error) {
	if !slices.Contains(src.Types, plugin.Name) {
		return nil, nil
	}
	return unwrap(src.Data)
}

// unwrap returns the text of the chain in a list of which unwind is the only plugin: all between the colon and what follows.
func unwrap(list []byte) ([]byte, error) {
	text := jsonText(list)
	entry, err := text.parts(0)
	if err != nil {
		return nil, err
	}
	if plugins, ok := member(entry, "plugins"); ok {
		elements, err := text.parts(plugins.value)
		if err != nil {
			return nil, err
		}
		if len(elements) != 1 {
			return nil, errNotAlone
		}
		if entry, err = text.parts(elements[0].value); err != nil {
			return nil, err
		}
	}
	chain, ok := member(entry, "chain")
	if !ok || string(chain.raw) == "null" {
		if _, ok := member(entry, "chainFile"); ok {
			return nil, errors.New(`it has "chainFile" and no "chain", so there is nothing to unwrap; remove the file to switch unwind off`)
		}
		return nil, errors.New(`key "chain" is missing`)
	}
	if chain.raw[0] != '{' {
		return nil, errors.New(`key "chain" is not an object`)
	}
	x := text[text.colon(chain)+1 : text.space(chain.end)]
	return unfold(slices.Clone(x), entry)
}

// colon returns the offset of the colon of a member.
func (text jsonText) colon(m part) int {
	at := m.value - 1
	for text[at] != ':' {
		at--
	}
	return at
}

// unfold takes out what fold has put in.
func unfold(x jsonText, entry []part) ([]byte, error) {
	folded, ok := member(entry, plugin.FoldedKey)
	if !ok {
		return x, nil
	}
	var n int
	if err := json.Unmarshal(folded.raw, &n); err != nil || n < 0 {
		return nil, fmt.Errorf("key %q is not a number of plugins", plugin.FoldedKey)
	}
	members, err := x.parts(0)
	if err != nil {
		return nil, err
	}
	at := -1
	for i, m := range members {
		if m.key == "plugins" {
			at = i
		}
	}
	var all []part
	if at >= 0 {
		if all, err = x.parts(members[at].value); err != nil {
			return nil, err
		}
	}
	own := len(all) - n
	switch {
	case own < 0:
		return nil, fmt.Errorf("key %q: the chain has %d plugins, fewer than %d", plugin.FoldedKey, len(all), n)
	case n == 0:
		return x, nil
	case own > 0:
		return x.cut(all[own-1].end, all[len(all)-1].end), nil
	case at+1 < len(members):
		return x.cut(members[at].start, members[at+1].start), nil
	case at > 0: // moved there by hand
		return x.cut(members[at-1].end, members[at].end), nil
	}
	return x.cut(members[at].start, members[at].end), nil
}
