package inspect

import (
	"errors"
	"io/fs"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/journal"
)

// HintFor returns the remedy for an error, or "".
func HintFor(err error) string {
	var damaged *journal.DamagedError
	switch hint := term.HintOf(err); {
	case hint != "":
		return hint
	case errors.Is(err, fs.ErrPermission):
		return "only root can read the journal; run this as root"
	case errors.Is(err, journal.ErrDamaged):
		return "the next ADD, DEL or sweep sets the file aside and starts a new one; running pods are " +
			"not affected"
	case errors.Is(err, journal.ErrBusy):
		return "another process holds the journal; try again"
	case errors.As(err, &damaged):
		return "its next ADD or DEL replaces it; the DEL uses what the runtime sends"
	}
	return ""
}
