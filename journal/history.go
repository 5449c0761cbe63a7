package journal

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

type EventKind string

const (
	RolledBack EventKind = "rolled-back" // an ADD failed and was undone as far as possible
	Swept      EventKind = "swept"       // an attachment was released without a DEL from the runtime
	Released   EventKind = "released"    // an address whose owner is not in the journal was released
	Waiting    EventKind = "waiting"     // a DEL waits for a later plugin's DEL (see decide.Due)
	Superseded EventKind = "superseded"  // a second ADD of a container ID came before the first DEL
	Forgotten  EventKind = "forgotten"   // an operator dropped the pending DELs
	Dropped    EventKind = "dropped"     // a DEL failed too often, and was dropped (see decide.After)
	NoOp       EventKind = "no-op"       // the runtime's DEL succeeded and ran no delegate

	// These events have no attachment. Their reason names who changed the installation.
	Install   EventKind = "install"
	On        EventKind = "on"
	Off       EventKind = "off"
	Uninstall EventKind = "uninstall"
)

// Event is something unusual that happened to an attachment, or a change of the installation.
type Event struct {
	Key
	Kind      EventKind    `json:"kind"`
	Pod       Pod          `json:"pod,omitzero"`
	Reason    string       `json:"reason"`
	Addresses []netip.Addr `json:"addresses,omitempty"`
	Plugins   []string     `json:"plugins,omitempty"` // the plugins that failed or have a pending DEL
	At        Time         `json:"at"`
	// Count is the name of a counter that the event increments, followed by its labels. An event
	// without a kind only increments that counter.
	Count []string `json:"count,omitempty"`
}

const (
	historyName = "history.jsonl"
	maxHistory  = 256 << 10 // bytes, about 500 events; a larger file is renamed to historyName.1
	sweptName   = "last-sweep"
)

// Record appends events to the history, in one write that is not synced. No decision depends on
// them, so a power loss may lose them.
func (s *Store) Record(events ...Event) error {
	var lines bytes.Buffer
	for _, e := range events {
		e.At = cmp.Or(e.At, Now())
		if err := json.NewEncoder(&lines).Encode(e); err != nil {
			return fmt.Errorf("journal: cannot encode an event: %w", err)
		}
	}
	if err := s.makeDir(); err != nil {
		return err
	}
	path := filepath.Join(s.Dir, historyName)
	f, err := openFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND)
	if err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	defer f.Close()
	if _, err := f.Write(lines.Bytes()); err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	// The flock ensures that only one process renames the file.
	size, err := f.Seek(0, io.SeekCurrent)
	if err == nil && size > maxHistory &&
		unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil && samePath(path, f) {
		err = os.Rename(path, path+".1")
	}
	return err
}

func (s *Store) History() ([]Event, error) { return (&Tail{Store: s}).Next() }

// Tail reads the history, and follows it as it grows.
type Tail struct {
	Store *Store
	last  []byte // the last line that Next has read
}

// Next returns the events since the last call, oldest first. The first call returns the whole
// history. Next skips lines that cannot be read.
func (t *Tail) Next() (events []Event, err error) {
	data, err := t.Store.readHistory()
	if err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	data = data[:bytes.LastIndexByte(data, '\n')+1]
	if at := bytes.LastIndex(data, t.last); t.last != nil && at >= 0 {
		data = data[at+len(t.last):]
	}
	for line := range bytes.Lines(data) {
		var e Event
		if json.Unmarshal(line, &e) == nil {
			events, t.last = append(events, e), line
		}
	}
	return events, nil
}

// readHistory returns the content of both history files. It reads the newer file first. If a writer
// renames the newer file to the older one's name before the second read, that read begins with the
// same content, so readHistory drops the first copy.
func (s *Store) readHistory() ([]byte, error) {
	path := filepath.Join(s.Dir, historyName)
	newer, err := readFile(path)
	older, olderErr := readFile(path + ".1")
	if bytes.HasPrefix(older, newer) {
		newer = nil
	}
	return append(older, newer...), cmp.Or(err, olderErr)
}

// readFile returns the content of a file, or nothing if it is missing.
func readFile(path string) ([]byte, error) {
	f, err := openFile(path, os.O_RDONLY)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(f)
}

// NoteSweep records that a sweep of all networks has just ended. It stores the time as the
// modification time of a file.
func (s *Store) NoteSweep() error {
	return os.WriteFile(filepath.Join(s.Dir, sweptName), []byte("\n"), 0o600)
}

// LastSweep returns when the last sweep of all networks ended, or the zero time if none has.
func (s *Store) LastSweep() time.Time {
	info, err := os.Lstat(filepath.Join(s.Dir, sweptName))
	if err != nil {
		return time.Time{}
	}
	return info.ModTime()
}
