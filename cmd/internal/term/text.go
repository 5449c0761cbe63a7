// Package term prints the output of a command: tables, JSON, errors with hints, and text
// that is safe on a terminal.
package term

import (
	"cmp"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"time"
	"unicode"
)

// PrintNames prints texts without duplicates, one per line.
func PrintNames(out io.Writer, names []string) error {
	var text strings.Builder
	printed := map[string]bool{}
	for _, name := range names {
		if !printed[name] {
			fmt.Fprintln(&text, name)
		}
		printed[name] = true
	}
	_, err := io.WriteString(out, text.String())
	return err
}

// Short cuts a container ID to 20 characters, except in the format Wide.
func Short(id string, format Format) string {
	if len(id) > 20 && format != Wide {
		return id[:20]
	}
	return id
}

func Addresses(addresses []netip.Addr) []string {
	texts := []string{}
	for _, a := range addresses {
		texts = append(texts, a.String())
	}
	return texts
}

// Join joins texts with commas. It returns "-" if there are none.
func Join(texts []string) string {
	if len(texts) == 0 {
		return "-"
	}
	return strings.Join(texts, ", ")
}

// Time formats a time with its zone (RFC 3339), or returns "-" for the zero time.
func Time(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.Local().Format(time.RFC3339)
}

// Ago returns the time since t, as Roughly does.
func Ago(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return Roughly(max(0, time.Since(t)))
}

// Roughly formats a duration in the largest unit that gives at least 2.
func Roughly(d time.Duration) string {
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

func Plural(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

// Because returns a reason as the end of a sentence, or "" if the reason is empty.
func Because(reason string) string {
	if reason == "" {
		return ""
	}
	return ": " + OneLine(reason)
}

func Attachments(n int) string { return Plural(n, "attachment", "attachments") }

// OrDash returns a text, or "-" for an empty one.
func OrDash(s string) string { return cmp.Or(s, "-") }

// OneLine returns a text, such as a plugin's error, short enough for a table.
func OneLine(text string) string {
	const most = 200
	runes := []rune(Printable(text))
	if len(runes) > most {
		runes = append(runes[:most], '…')
	}
	return string(runes)
}

// Printable returns a text, such as a plugin's error, on one line without control characters.
func Printable(text string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, strings.Join(strings.Fields(text), " "))
}
