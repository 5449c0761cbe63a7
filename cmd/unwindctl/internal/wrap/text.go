package wrap

import (
	"bytes"
	"encoding/json"
	"errors"
	"slices"
)

// jsonText is a JSON value as it is written. A change leaves all its other bytes as they are.
type jsonText []byte

// part is a member of an object or an element of an array in a jsonText: text[start:end], of which
// text[value:end] is the value.
type part struct {
	key               string // "" in an array
	start, value, end int
	raw               json.RawMessage
}

// parts returns the members or elements of the object or array that begins at an offset of a valid
// JSON text, past white space. encoding/json finds where a key ends and what a value is; the rest
// is white space and one separator.
func (text jsonText) parts(at int) ([]part, error) {
	dec := json.NewDecoder(bytes.NewReader(text[at:]))
	open, err := dec.Token()
	if err != nil {
		return nil, err
	}
	if open != json.Delim('{') && open != json.Delim('[') {
		return nil, errors.New("it is neither an object nor a list")
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

// past returns the offset after white space and, if it is there, a separator.
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

// member returns the member with a key. The last of several counts, as for encoding/json.
func member(members []part, key string) (part, bool) {
	for _, m := range slices.Backward(members) {
		if m.key == key {
			return m, true
		}
	}
	return part{}, false
}
