package nodetest

import (
	"bytes"
	"fmt"
	"os"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// Terminal records what a program writes to a pseudo-terminal.
type Terminal struct {
	mu   sync.Mutex
	text bytes.Buffer
}

// String returns the output so far.
func (term *Terminal) String() string {
	term.mu.Lock()
	defer term.mu.Unlock()
	return term.text.String()
}

// NewTerminal creates a pseudo-terminal of 24 lines. A program under test writes to program.
func NewTerminal(t testing.TB, columns uint16) (term *Terminal, program *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { _ = master.Close() })
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0)
	}
	if err == nil {
		program, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	}
	if err == nil {
		err = unix.IoctlSetWinsize(int(program.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: columns})
	}
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { _ = program.Close() })
	term = &Terminal{}
	go func() {
		data := make([]byte, 4096)
		for {
			n, err := master.Read(data)
			term.mu.Lock()
			term.text.Write(data[:n])
			term.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	return term, program
}
