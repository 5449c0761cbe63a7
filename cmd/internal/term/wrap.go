package term

import (
	"io"
	"regexp"
	"strings"
	"unicode/utf8"
)

// Print prints text. On a terminal, it wraps lines that are wider (see Wrap).
func Print(out io.Writer, text string) error {
	if width := Width(out); width > 0 {
		text = Wrap(text, width)
	}
	_, err := io.WriteString(out, text)
	return err
}

// Wrap breaks the lines of a text that are wider than width, between words. A line goes on below
// its second column if it has one, and else below its first word.
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

// split breaks a line at its last blank at which the first part is at most width wide, or else
// after its first word. rest is "" if the line need not be broken.
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

// escapes matches what Colour adds.
var escapes = regexp.MustCompile("\x1b\\[[0-9]*m")

// columns returns the width of a text on a terminal.
func columns(text string) int { return utf8.RuneCountInString(escapes.ReplaceAllString(text, "")) }

// colours are the colours of severities and states (ECMA-48 SGR).
var colours = map[string]string{"error": "31", "warning": "33", "ok": "32", "✗": "31", "!": "33",
	"✓": "32", "dead": "31", "leaked": "31", "empty": "31", "rolling-back": "33", "deleting": "33",
	"pending": "33", "live": "32"}

// Colour returns a text in the colour of a state or severity, if the output is a terminal.
func Colour(out io.Writer, state, text string) string {
	coloured, _ := OnTerminal(out)
	if code := colours[state]; coloured && code != "" && text != "" {
		return "\x1b[" + code + "m" + text + "\x1b[0m"
	}
	return text
}

// State is Colour for a state itself.
func State(out io.Writer, state string) string { return Colour(out, state, state) }

// reflow joins the lines of each paragraph. Indented lines stay lines.
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
