// Package term prints the output of a command: tables, JSON, errors with hints, and text
// that is safe on a terminal.
package term

import (
	"cmp"
	"fmt"
	"io"
	"net/netip"
	"regexp"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
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

// Ago formats the time since t as Roughly does, or returns "-" for the zero time.
func Ago(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return Roughly(max(0, time.Since(t)))
}

// Roughly formats a duration in one unit: days from 2d up, hours from 2h, minutes from 2m, or
// seconds.
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

// Because returns ": " and the reason, as the end of a sentence, or "" if the reason is empty.
func Because(reason string) string {
	if reason == "" {
		return ""
	}
	return ": " + OneLine(reason)
}

func Attachments(n int) string { return Plural(n, "attachment", "attachments") }

// OrDash returns a text, or "-" for an empty one.
func OrDash(s string) string { return cmp.Or(s, "-") }

// OneLine is like Printable, but cuts a text that is too long for a table.
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

// Print prints text. On a terminal, it wraps lines that are too long (see Wrap).
func Print(out io.Writer, text string) error {
	if width := Width(out); width > 0 {
		text = Wrap(text, width)
	}
	_, err := io.WriteString(out, text)
	return err
}

// Wrap breaks each line that is wider than width, at blanks. It indents each continuation to the
// second column of the line, if there is one, or else to the line's first word.
func Wrap(text string, width int) string {
	var wrapped strings.Builder
	for line := range strings.Lines(text) {
		first, rest := split(line, width)
		hang := strings.Repeat(" ", hangOf(line, width))
		for rest != "" {
			wrapped.WriteString(first + "\n")
			first, rest = split(hang+rest, width)
		}
		wrapped.WriteString(first)
	}
	return wrapped.String()
}

// column matches the first column of a line, which ends at two blanks or a colon.
var column = regexp.MustCompile(`^ *(\S+( \S+)*  +|[a-z]+: +)?`)

func hangOf(line string, width int) int {
	if hang := columns(column.FindString(line)); hang <= width/2 {
		return hang
	}
	return columns(line) - columns(strings.TrimLeft(line, " "))
}

// split breaks a line at the last blank that keeps the first part within width, or else after the
// first word. rest is "" if the whole line fits.
func split(line string, width int) (first, rest string) {
	if columns(strings.TrimRight(line, "\n")) <= width {
		return line, ""
	}
	end := len(line)
	for at := len(line) - len(strings.TrimLeft(line, " ")); at < len(line); at++ {
		if line[at] != ' ' {
			continue
		}
		if columns(line[:at]) > width && end < len(line) {
			break
		}
		if end = at; columns(line[:at]) > width {
			break
		}
	}
	return strings.TrimRight(line[:end], " "), strings.TrimLeft(line[end:], " ")
}

// escapes matches the escape sequences that Colour adds.
var escapes = regexp.MustCompile("\x1b\\[[0-9]*m")

// columns returns the width of a text on a terminal.
func columns(text string) int { return utf8.RuneCountInString(escapes.ReplaceAllString(text, "")) }

// colours maps severities and states to color codes (ECMA-48 SGR).
var colours = map[string]string{"error": "31", "warning": "33", "ok": "32", "✗": "31", "!": "33",
	"✓": "32", "dead": "31", "leaked": "31", "empty": "31", "rolling-back": "33", "deleting": "33",
	"pending": "33", "live": "32"}

// Colour returns a text in the color of a state or severity, if the output is a terminal.
func Colour(out io.Writer, state, text string) string {
	coloured, _ := OnTerminal(out)
	if code := colours[state]; coloured && code != "" && text != "" {
		return "\x1b[" + code + "m" + text + "\x1b[0m"
	}
	return text
}

// State returns the name of a state in its color (see Colour).
func State(out io.Writer, state string) string { return Colour(out, state, state) }

// reflow joins the lines of each paragraph, except for indented lines.
func reflow(text string) (joined string) {
	isText := func(line string) bool { return strings.TrimLeft(line, " ") == line && line != "" }
	before := ""
	for line := range strings.SplitSeq(text, "\n") {
		switch {
		case isText(before) && isText(line):
			joined += " "
		case joined != "" || before != "":
			joined += "\n"
		}
		joined, before = joined+line, line
	}
	return joined
}
