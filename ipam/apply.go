package ipam

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Planned is a reservation that is to go, and why.
type Planned struct {
	Reservation
	Reason string
}

// Plan returns what is to be released of the reservations that a scan found. Of those with an owner, judge says whether it
// is dead, and why. An ownerless one is released whatever else: host-local writes a file under the lock under which it
// made it, so under that lock nobody is about to.
func Plan(found []Reservation, judge func(Reservation) (dead bool, reason string)) []Planned {
	var plan []Planned
	for _, r := range found {
		dead, reason := true, "host-local died before it wrote an owner: no DEL can release it"
		if !r.Ownerless() {
			dead, reason = judge(r)
		}
		if dead {
			plan = append(plan, Planned{r, reason})
		}
	}
	return plan
}

// Apply carries out what was planned for a pool, under host-local's own lock: what is not as it was when it was scanned
// stays. It returns what it released, and all errors. The wait for the lock is bounded by ctx. A crash leaves each file
// released or not.
func Apply(ctx context.Context, pool string, plan []Planned) (released []Planned, err error) {
	if len(plan) == 0 {
		return nil, nil
	}
	unlock, err := lock(ctx, pool)
	if err != nil {
		return nil, err
	}
	defer unlock()
	dir, err := os.OpenFile(pool, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	var errs []error
	buf := make([]byte, maxOwner+1)
	for _, r := range plan {
		owner, there, err := readOwner(int(dir.Fd()), r.file, buf)
		if err == nil && there && owner == r.Owner {
			err = unix.Unlinkat(int(dir.Fd()), r.file, 0)
			if err == nil {
				released = append(released, r)
			}
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("%s: %w", filepath.Join(pool, r.file), err))
		}
	}
	return released, errors.Join(errs...)
}
