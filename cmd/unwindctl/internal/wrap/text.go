package wrap

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"cni-unwind/plugin/netconf"
)

// jsonText is the text of a JSON value. Each edit leaves all other bytes unchanged.
type jsonText []byte

// part is a member of an object, or an element of an array, in a jsonText. Its text is
// text[start:end], and its value is text[value:end].
type part struct {
	key               string // "" in an array
	start, value, end int
	raw               json.RawMessage
}

// parts returns the members or elements of the object or array at an offset of a valid JSON text.
// White space may precede it. encoding/json finds the end of each key and value. Between them are
// only white space and one separator.
func (text jsonText) parts(at int) ([]part, error) {
	dec := json.NewDecoder(bytes.NewReader(text[at:]))
	open, err := dec.Token()
	if err != nil {
		return nil, err
	}
	if open != json.Delim('{') && open != json.Delim('[') {
		return nil, errors.New("expected a JSON object or list")
	}
	var all []part
	for end := at + int(dec.InputOffset()); dec.More(); {
		p := part{start: text.past(end, ',')}
		p.value = p.start
		if open == json.Delim('{') {
			key, err := dec.Token()
			if err != nil {
				return nil, err
			}
			p.key, _ = key.(string)
			p.value = text.past(at+int(dec.InputOffset()), ':')
		}
		if err := dec.Decode(&p.raw); err != nil {
			return nil, err
		}
		p.end = p.value + len(p.raw)
		end = p.end
		all = append(all, p)
	}
	return all, nil
}

// past returns the offset after white space and, if present, a separator.
func (text jsonText) past(at int, separator byte) int {
	at = text.space(at)
	if at < len(text) && text[at] == separator {
		at = text.space(at + 1)
	}
	return at
}

func (text jsonText) space(at int) int {
	for at < len(text) && bytes.IndexByte([]byte(" \t\r\n"), text[at]) >= 0 {
		at++
	}
	return at
}

func (text jsonText) insert(at int, more ...byte) jsonText {
	return slices.Concat(text[:at], more, text[at:])
}

func (text jsonText) cut(from, to int) jsonText {
	return slices.Concat(text[:from], text[to:])
}

// member returns the member with a key. If there are several, it returns the last one, as
// encoding/json does.
func member(members []part, key string) (part, bool) {
	for _, m := range slices.Backward(members) {
		if m.key == key {
			return m, true
		}
	}
	return part{}, false
}

// Restore returns the chain in unwind's entry, or nil if the source has no such entry. It accepts
// errors in unwind's other keys, so that a broken file can be unwrapped.
func Restore(src Source) ([]byte, error) {
	if !slices.Contains(src.Types, netconf.Name) {
		return nil, nil
	}
	return restore(src.Data)
}

// restore returns the text of the chain in a list whose only plugin is unwind: everything between
// the colon and the next separator.
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
				`the entry sets "chainFile" instead of "chain", so there is nothing to unwrap; ` +
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
		return nil, fmt.Errorf("key %q is not a number of plugins", netconf.FoldedKey)
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
