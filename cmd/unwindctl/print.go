package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"time"

	"cni-unwind/journal"
)

// formatVersion is the version of what --json prints: an object with it as "version", and the rest under one key. Keys may be
// added within a version; none is removed or changes its meaning.
const formatVersion = 1

// printJSON prints a document of one key.
func printJSON(out io.Writer, key string, value any) error {
	enc := json.NewEncoder(out)
	enc.SetIndent("", "  ")
	return enc.Encode(map[string]any{"version": formatVersion, key: value})
}

// podName is a pod as people write it.
func podName(p *journal.Pod) string {
	switch {
	case p == nil || p.Name == "":
		return "-"
	case p.Namespace == "":
		return oneLine(p.Name)
	}
	return oneLine(p.Namespace + "/" + p.Name)
}

// short cuts container IDs as the runtimes' own programs do.
func short(id string) string {
	if len(id) > 20 {
		return id[:20]
	}
	return id
}

func addressTexts(addresses []netip.Addr) []string {
	texts := []string{}
	for _, a := range addresses {
		texts = append(texts, a.String())
	}
	return texts
}

func orDash(texts []string) string {
	if len(texts) == 0 {
		return "-"
	}
	return strings.Join(texts, ", ")
}

// ago says how long ago something was, in the largest unit.
func ago(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return roughly(max(0, time.Since(t)))
}

func roughly(d time.Duration) string {
	for _, u := range []struct {
		unit time.Duration
		name string
	}{{24 * time.Hour, "d"}, {time.Hour, "h"}, {time.Minute, "m"}} {
		if d >= 2*u.unit {
			return fmt.Sprintf("%d%s", d/u.unit, u.name)
		}
	}
	return fmt.Sprintf("%ds", d/time.Second)
}

func plural(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}
