// Package term has the words of a command: texts for tables and sentences, errors with hints, and
// the terminal.
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

// PrintNames prints texts, each once, one a line.
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

// Short shortens a container ID as the runtimes' own programs do, but for the format Wide.
func Short(id string, format Format) string {
	if len(id) > 20 && format != Wide {
		return id[:20]
	}
	return id
}

// Addresses returns addresses as texts.
func Addresses(addresses []netip.Addr) []string {
	texts := []string{}
	for _, a := range addresses {
		texts = append(texts, a.String())
	}
	return texts
}

// Join joins texts, and returns "-" for none.
func Join(texts []string) string {
	if len(texts) == 0 {
		return "-"
	}
	return strings.Join(texts, ", ")
}

// Time returns a time with its zone (RFC 3339), "-" for none.
func Time(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.Local().Format(time.RFC3339)
}

// Ago returns how long ago something was, in the largest unit.
func Ago(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return Roughly(max(0, time.Since(t)))
}

// Roughly returns a duration in the largest unit of which there are two.
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

// Plural returns a number with the noun that fits it.
func Plural(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

// ErrorText returns the text of an error, "" for none.
func ErrorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// Because returns a reason as the end of a sentence, "" for none.
func Because(reason string) string {
	if reason == "" {
		return ""
	}
	return ": " + OneLine(reason)
}

// Attachments returns a number of attachments.
func Attachments(n int) string { return Plural(n, "attachment", "attachments") }

// OrDash returns a text, or "-" for an empty one.
func OrDash(s string) string { return cmp.Or(s, "-") }

// OneLine returns a text, perhaps a delegate's, as it fits into a table.
func OneLine(text string) string {
	const most = 200
	runes := []rune(Printable(text))
	if len(runes) > most {
		runes = append(runes[:most], '…')
	}
	return string(runes)
}

// Printable returns a text, perhaps a delegate's, in one line without control characters.
func Printable(text string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, strings.Join(strings.Fields(text), " "))
}
