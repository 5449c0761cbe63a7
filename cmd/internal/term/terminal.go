package term

import (
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// OnTerminal reports whether the output is a terminal, and whether to colour it
// (https://no-color.org).
func OnTerminal(out io.Writer) (colours, terminal bool) {
	f, ok := out.(*os.File)
	if !ok {
		return false, false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb", err == nil
}

// Width returns the number of columns of a terminal, 0 if the output is none.
func Width(out io.Writer) int {
	f, ok := out.(*os.File)
	if !ok {
		return 0
	}
	size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return 0
	}
	return int(size.Col)
}
