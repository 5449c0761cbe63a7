package doctor

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"cni-unwind/cmd/unwindctl/internal/durable"
	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/journal"
)

// The least free space on the disk of the journal, which is some MiB large, without a report.
const (
	leastFree  = 64 << 20
	leastNodes = 100
)

const noJournal = "no journal in %s yet: no pod was added through unwind"

// directory examines the state directory, and reports whether it has a journal to examine.
func (e *examination) directory() bool {
	info, err := os.Stat(e.StateDir)
	if errors.Is(err, fs.ErrNotExist) {
		parent := filepath.Dir(e.StateDir)
		for !durable.Exists(parent) {
			parent = filepath.Dir(parent)
		}
		// the plugin runs as root; what another user may not write says nothing
		if info, err := os.Stat(parent); err != nil || !info.IsDir() ||
			os.Geteuid() == 0 && unix.Access(parent, unix.W_OK) != nil {
			e.add("journal", Failure, "set stateDir to a directory that can be created",
				"%s does not exist and cannot be created in %s", e.StateDir, parent)
			return false
		}
		e.add("journal", OK, "", noJournal, e.StateDir)
		return false
	}
	if err != nil {
		e.add("journal", Failure, inspect.HintFor(err), "%v", err)
		return false
	}
	if info.Mode().Perm()&0o077 != 0 {
		e.add("journal", Failure, "chmod 0700 "+e.StateDir,
			"%s has mode %04o: other users can read or write it", e.StateDir, info.Mode().Perm())
	}
	e.disk()
	for _, part := range []struct {
		name string
		dir  bool
	}{{"journal.db", false}, {"journal.lock", false}, {"locks", true},
		{journal.AgentLockName, false}} {
		path := filepath.Join(e.StateDir, part.name)
		info, err := os.Lstat(path)
		if err == nil && (info.IsDir() != part.dir || !info.IsDir() && !info.Mode().IsRegular()) {
			e.add("journal", Failure, "move it away", "%s is not the file that unwind created there", path)
		}
	}
	aside, _ := filepath.Glob(filepath.Join(e.StateDir, "journal.db.damaged-*"))
	if len(aside) > 0 {
		e.add("journal", Warning, "keep it until the cause is known, then remove it",
			"a damaged journal was set aside: %s", strings.Join(aside, ", "))
	}
	if pid := (&journal.Store{Dir: e.StateDir}).AgentProcess(); pid != "" {
		e.add("agent", OK, "", "process %s keeps unwind installed", pid)
	}
	_, err = os.Stat(filepath.Join(e.StateDir, "journal.db"))
	if errors.Is(err, fs.ErrNotExist) {
		e.add("journal", OK, "", noJournal, e.StateDir)
		return false
	}
	if err != nil {
		e.add("journal", Failure, inspect.HintFor(err), "%v", err)
		return false
	}
	return true
}

func (e *examination) disk() {
	var st unix.Statfs_t
	if err := unix.Statfs(e.StateDir, &st); err != nil {
		return
	}
	free := st.Bavail * uint64(st.Bsize)
	switch {
	case st.Flags&unix.ST_RDONLY != 0:
		e.add("journal", Failure, "remount it read-write", "%s is on a read-only file system",
			e.StateDir)
	case free < leastFree || st.Files > 0 && st.Ffree < leastNodes:
		e.add("journal", Failure, "free disk space", "the disk of %s has %d MiB and %d files left",
			e.StateDir, free>>20, st.Ffree)
	case st.Type == unix.TMPFS_MAGIC:
		e.add("journal", Warning, "set stateDir to a directory on a disk",
			"%s is on tmpfs: after a reboot unwind does not find what stays on the disk, such as "+
				"host-local's files", e.StateDir)
	}
}
