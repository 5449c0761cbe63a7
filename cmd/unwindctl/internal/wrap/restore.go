package wrap

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"cni-unwind/plugin/netconf"
)

// Restore returns the chain in unwind's entry, or nil if the source has no such entry. It accepts
// errors in unwind's other keys, so that a broken file can be unwrapped.
func Restore(src Source) ([]byte, error) {
	if !slices.Contains(src.Types, netconf.Name) {
		return nil, nil
	}
	return restore(src.Data)
}

// restore returns the text of the chain in a list of which unwind is the only plugin: everything
// between the colon and the next separator.
func restore(list []byte) ([]byte, error) {
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
			return nil, errors.New(
				`it has "chainFile" and no "chain", so there is nothing to unwrap; ` +
					`to switch unwind off, remove the file`)
		}
		return nil, errors.New(`key "chain" is missing`)
	}
	if chain.raw[0] != '{' {
		return nil, errors.New(`key "chain" is not an object`)
	}
	from := bytes.LastIndexByte(text[:chain.value], ':') + 1
	x := text[from:text.space(chain.end)]
	return unfold(slices.Clone(x), entry)
}

func unfold(x jsonText, entry []part) ([]byte, error) {
	folded, ok := member(entry, netconf.FoldedKey)
	if !ok {
		return x, nil
	}
	var n int
	if err := json.Unmarshal(folded.raw, &n); err != nil || n < 0 {
		return nil, fmt.Errorf("key %q is not a plugin count", netconf.FoldedKey)
	}
	members, err := x.parts(0)
	if err != nil {
		return nil, err
	}
	at := -1
	var all []part
	for i, m := range members {
		if m.key == "plugins" {
			at = i
		}
	}
	if at >= 0 {
		if all, err = x.parts(members[at].value); err != nil {
			return nil, err
		}
	}
	own := len(all) - n
	switch {
	case own < 0:
		return nil, fmt.Errorf("key %q: the chain has %d plugins, fewer than %d", netconf.FoldedKey,
			len(all), n)
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
