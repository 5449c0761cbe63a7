package install

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/journal"
)

// checkPurge returns an error if the state directory is still needed by attachments, or for the
// off-switch of a running agent.
func checkPurge(ctx context.Context, stateDir string) error {
	store := &journal.Store{Dir: stateDir}
	if pid := store.AgentProcess(); pid != "" {
		return term.WithHint("stop it first; uninstall without --purge leaves unwind switched off "+
			"while it runs",
			"--purge: nothing was changed: an agent is running (process %s) and would install again", pid)
	}
	attachments, err := inspect.ReadJournal(ctx, store)
	if err != nil {
		return fmt.Errorf("--purge: nothing was changed: %w", err)
	}
	if len(attachments) > 0 {
		return term.WithHint("run uninstall without --purge, and again with it once unwindctl list is "+
			"empty; unwindctl sweep releases dead attachments",
			"--purge: nothing was changed: the journal in %s has %s, which nothing would release",
			stateDir, term.Attachments(len(attachments)))
	}
	return nil
}

// purge removes unwind's files in the state directory, and the directory if it is then empty. It
// does not follow links.
func purge(stateDir string) error {
	files, err := filepath.Glob(filepath.Join(stateDir, "journal.*"))
	for _, path := range append(files, filepath.Join(stateDir, "locks"),
		filepath.Join(stateDir, journal.AgentLockName), filepath.Join(stateDir, OffName)) {
		err = errors.Join(err, os.RemoveAll(path))
	}
	if removeErr := os.Remove(stateDir); removeErr != nil && !errors.Is(removeErr, fs.ErrNotExist) {
		err = errors.Join(err, removeErr)
	}
	return err
}
