package install

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/durable"
)

// OffName is the file in the state directory that switches unwind off: while it exists, no agent
// installs unwind. Its time is since when, its text by whom. touch can create it, too.
const OffName = "off"

// OffState is since when unwind is switched off, and by whom.
type OffState struct {
	Since time.Time
	By    string
}

// String returns a sentence about it.
func (o *OffState) String() string {
	return fmt.Sprintf("unwind has been switched off since %s, by %s", term.Time(o.Since), o.By)
}

// ReadOff returns nil if unwind is not switched off. A file that cannot be read counts as switched
// off.
func ReadOff(stateDir string) *OffState {
	path := filepath.Join(stateDir, OffName)
	info, err := os.Lstat(path)
	if err != nil {
		return nil
	}
	text, _ := os.ReadFile(path)
	by := term.OneLine(strings.TrimSpace(string(text[:min(len(text), 256)])))
	return &OffState{info.ModTime(), cmp.Or(by, "somebody")}
}

// WriteOff switches unwind off for all agents. It keeps an existing record of who did so first.
func WriteOff(stateDir, by string) error {
	if ReadOff(stateDir) != nil {
		return nil
	}
	err := os.MkdirAll(stateDir, 0o700)
	if err == nil {
		err = durable.Replace(filepath.Join(stateDir, OffName), strings.NewReader(by+"\n"), 0o600)
	}
	if err != nil {
		err = fmt.Errorf("cannot keep unwind switched off: %w", err)
	}
	return err
}

// SwitchOn removes the files that keep agents from installing unwind: the off-switch, and our file
// if cilium has renamed it.
func (s Setup) SwitchOn(stateDir string) (err error) {
	if ReadOff(stateDir) != nil {
		err = durable.Remove(filepath.Join(stateDir, OffName))
	}
	if path := s.renamed(); path != "" {
		err = errors.Join(err, durable.Remove(path))
	}
	return err
}
