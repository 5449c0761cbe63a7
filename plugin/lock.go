package plugin

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/journal"
	"cni-unwind/plugin/internal/delegate"
	"cni-unwind/plugin/internal/host"
)

// lock takes the lock of an attachment. If another unwind works on it, lock waits as long as ctx
// allows. If only delegates hold it, which outlived a killed unwind, lock waits a while and then
// kills them, and returns the names of their programs. It treats the delegates of a CHECK the same
// way, unless it spares them.
func (o *op) lock(ctx context.Context, key journal.Key) (lock *journal.Lock, killed []string, err error) {
	patience := time.Now().Add(o.Budgets.Orphans)
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline)/2 < o.Budgets.Orphans {
		patience = time.Now().Add(time.Until(deadline) / 2)
	}
	for {
		slice, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
		lock, err = o.store.Acquire(slice, key)
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
		pid, ownerErr := o.store.Owner(key)
		switch {
		case ownerErr != nil:
			return nil, killed, ownerErr
		case pid == 0 && o.spares(ctx, key):
			return nil, killed, err
		case pid == 0:
			killed = append(killed, o.endOrphans(key)...)
		}
	}
}

// lockOurs takes the lock of the verb's own attachment.
func (o *op) lockOurs(ctx context.Context) (lock *journal.Lock, killed []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, o.Budgets.Undo)
	defer cancel()
	lock, killed, err = o.lock(ctx, o.key)
	if errors.Is(err, journal.ErrBusy) {
		err = cniError(types.ErrTryAgainLater, fmt.Sprintf("unwind: %s is being worked on by another unwind, "+
			"which did not end in %s", o.key, o.Budgets.Undo), "")
	}
	return lock, killed, err
}

// spares says whether a CHECK that holds the lock may go on: it is of another attachment than the
// verb's, and that attachment is not dead.
func (o *op) spares(ctx context.Context, key journal.Key) bool {
	if key == o.key || !o.checked(key) {
		return false
	}
	var e *journal.Entry
	o.read(context.WithoutCancel(ctx), func(tx *journal.Tx) (err error) {
		e, err = readable(tx.Get(key))
		return err
	})
	return e != nil && !o.judge(ctx, e).Releasable()
}

// checked says whether only CHECKs hold an attachment's lock, which is not free.
func (o *op) checked(key journal.Key) bool {
	locked, _, err := o.store.Locked(key)
	return !locked && err == nil
}

// endOrphans kills the processes that hold an attachment's lock, and returns the names of their
// programs if they ran an ADD or a DEL. None of them is an unwind.
func (o *op) endOrphans(key journal.Key) (killed []string) {
	f, err := os.OpenFile(o.store.LockPath(key), os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil
	}
	defer f.Close()
	pids, err := host.HoldersOf(f, delegate.LockFD)
	if err != nil {
		o.log.Warn("looking for delegates that outlived their unwind", "attachment", key.String(), "err", err)
	}
	for _, pid := range pids {
		o.log.Warn("ending a delegate that outlived its unwind", "attachment", key.String(), "pid", pid)
		programs, command := host.ProgramsOf(pid), host.Environ(pid, "CNI_COMMAND")
		if syscall.Kill(pid, syscall.SIGKILL) == nil && (command == "ADD" || command == "DEL") {
			killed = append(killed, programs...)
		}
	}
	return killed
}
