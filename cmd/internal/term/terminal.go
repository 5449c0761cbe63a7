package term

import (
	"io"
	"os"

	"golang.org/x/term"
)

// descriptor is a file, or a writer to one.
type descriptor interface{ Fd() uintptr }

// OnTerminal reports whether the output is a terminal, and to be coloured (https://no-color.org).
func OnTerminal(out io.Writer) (colours, terminal bool) {
	f, ok := out.(descriptor)
	terminal = ok && term.IsTerminal(int(f.Fd()))
	return terminal && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb", terminal
}

// Width returns the width of a terminal in columns, or 0 if the output is not a terminal.
func Width(out io.Writer) int {
	f, ok := out.(descriptor)
	if !ok {
		return 0
	}
	width, _, _ := term.GetSize(int(f.Fd()))
	return width
}
