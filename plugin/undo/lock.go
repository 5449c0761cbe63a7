package undo

import (
	"context"
	"errors"
	"os"
	"syscall"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/internal/delegate"
	"cni-unwind/plugin/internal/host"
	"cni-unwind/plugin/record"
)

// Lock takes the lock of an attachment. If another unwind holds it, Lock waits as long as ctx
// allows. If only orphaned delegates of a killed unwind hold it, Lock waits a while, then kills
// them and returns the names of their programs. It treats the delegates of a CHECK the same way,
// unless it spares them.
func (w *Worker) Lock(
	ctx context.Context, key journal.Key,
) (lock *journal.Lock, killed []string, err error) {
	patience := time.Now().Add(w.Budgets.Orphans)
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline)/2 < w.Budgets.Orphans {
		patience = time.Now().Add(time.Until(deadline) / 2)
	}
	for {
		slice, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
		lock, err = w.Journal.Store.Acquire(slice, key)
		if errors.Is(err, journal.ErrBusy) {
			<-slice.Done() // Acquire returns at once if another worker of this process has the lock
		}
		cancel()
		if !errors.Is(err, journal.ErrBusy) || ctx.Err() != nil {
			return lock, killed, err
		}
		if time.Now().Before(patience) {
			continue
		}
		pid, ownerErr := w.Journal.Store.Owner(key)
		switch {
		case ownerErr != nil:
			return nil, killed, ownerErr
		case pid == 0 && w.spares(ctx, key):
			return nil, killed, err
		case pid == 0:
			killed = append(killed, w.EndOrphans(key)...)
		}
	}
}

// spares reports whether a CHECK that holds the lock may continue: it belongs to another attachment
// than the verb's, and that attachment is not dead.
func (w *Worker) spares(ctx context.Context, key journal.Key) bool {
	if key == w.Verb.Key || !w.Checked(key) {
		return false
	}
	var e *journal.Entry
	w.Journal.Read(context.WithoutCancel(ctx), func(tx *journal.Tx) (err error) {
		e, err = record.Readable(tx.Get(key))
		return err
	})
	return e != nil && !w.Node.Judge(ctx, e).Releasable()
}

// Checked reports whether only CHECKs hold an attachment's lock. The lock must not be free.
func (w *Worker) Checked(key journal.Key) bool {
	locked, _, err := w.Journal.Store.Locked(key)
	return !locked && err == nil
}

// EndOrphans kills the delegates that hold an attachment's lock, and returns the names of their
// programs if they ran an ADD or a DEL. It never kills an unwind.
func (w *Worker) EndOrphans(key journal.Key) (killed []string) {
	f, err := os.OpenFile(w.Journal.Store.LockPath(key),
		os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil
	}
	defer f.Close()
	pids, err := host.HoldersOf(f, delegate.LockFD)
	if err != nil {
		w.Log.Warn("cannot list orphaned delegates", "attachment", key.String(), "err", err)
	}
	for _, pid := range pids {
		w.Log.Warn("killing orphaned delegate", "attachment", key.String(), "pid", pid)
		programs, command := host.ProgramsOf(pid), host.Environ(pid, "CNI_COMMAND")
		if syscall.Kill(pid, syscall.SIGKILL) == nil && (command == "ADD" || command == "DEL") {
			killed = append(killed, programs...)
		}
	}
	return killed
}
