package inspect

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/plugin/decide"
)

// Sort sorts attachments: first those with a failing DEL, then those with a DEL that waits or has
// not run, then the rest. If by is not "", it names a field of their JSON objects in kubectl's
// notation, such as {.pod.name} or .created, and Sort sorts by that field instead.
func Sort(attachments []Attachment, by string) error {
	path := strings.Split(strings.Trim(by, "{.}"), ".")
	if by != "" && slices.Contains(path, "") {
		return term.Usage("--sort-by %s: expected a field in kubectl's notation, such as .created", by)
	}
	found := by == "" || len(attachments) == 0
	for i := range attachments {
		a := &attachments[i]
		a.order = a.urgency()
		if by != "" {
			var object any
			if data, err := json.Marshal(a); err != nil || json.Unmarshal(data, &object) != nil {
				return err
			}
			a.order = sortKey(object, path)
			found = found || a.order != ""
		}
	}
	if !found {
		return term.Usage("--sort-by %s: no attachment has this field; -o json shows the fields", by)
	}
	slices.SortStableFunc(attachments, func(a, b Attachment) int {
		return cmp.Compare(a.order, b.order)
	})
	return nil
}

// urgency returns the default sort key: "0" sorts first.
func (a *Attachment) urgency() string {
	switch {
	case !a.PendingDEL():
		return "2"
	case slices.ContainsFunc(a.Steps, func(s Step) bool { return decide.Failing(&s.of) }):
		return "0"
	}
	return "1"
}

// sortKey returns the value at a path as a string that sorts in the value's order, or "" if there
// is no such value. A list sorts by its first element.
func sortKey(value any, path []string) string {
	switch v := value.(type) {
	case []any:
		if len(v) > 0 {
			return sortKey(v[0], path)
		}
	case map[string]any:
		if len(path) > 0 {
			return sortKey(v[path[0]], path[1:])
		}
	case float64:
		return fmt.Sprintf("%020.0f", v)
	case string:
		if address, err := netip.ParseAddr(v); err == nil {
			bytes := address.As16()
			return string(bytes[:])
		}
		return v
	}
	return ""
}
