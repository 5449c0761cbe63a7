package journal

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// EventKind is the kind of an event.
type EventKind string

// The kinds of events.
const (
	RolledBack EventKind = "rolled-back" // an ADD failed and was undone as far as possible
	Swept      EventKind = "swept"       // released without the runtime's DEL
	Released   EventKind = "released"    // a host-local address of no recorded attachment
	Waiting    EventKind = "waiting"     // a DEL waits because another attachment has the address
	Superseded EventKind = "superseded"  // another ADD of the same container ID came before the DEL
	Forgotten  EventKind = "forgotten"   // forgotten by an operator, with pending DELs
	Unverified EventKind = "unverified"  // a DEL succeeded, but its address is not free
	Untaken    EventKind = "untaken"     // a DEL of a failed ADD was given up, see decide.After
	NoOp       EventKind = "no-op"       // the runtime's DEL succeeded and ran no delegate
)

// Event is something out of the ordinary that happened to an attachment, kept for people.
type Event struct {
	Key
	Kind      EventKind    `json:"kind"`
	Pod       Pod          `json:"pod,omitzero"`
	Reason    string       `json:"reason"`
	Addresses []netip.Addr `json:"addresses,omitempty"`
	Plugins   []string     `json:"plugins,omitempty"` // that failed, or have a pending DEL
	At        Time         `json:"at"`
	// Count has the name of a counter that the event increments, and its labels. An event without a
	// kind only increments that counter.
	Count []string `json:"count,omitempty"`
}

const (
	historyName = "history.jsonl"
	// maxHistory limits the history file, in bytes. A file that has grown larger is renamed to
	// historyName.1, so the last 500 to 2,000 events are kept.
	maxHistory = 256 << 10
	sweptName  = "last-sweep"
)

// Record appends events to the history, in one write that is not synced. A power loss or a full
// disk can lose events, but no decision depends on them. An interrupted write leaves part of a
// line, so every write begins on a new line.
func (s *Store) Record(events ...Event) error {
	lines := []byte{'\n'} // left out unless the last write was cut off
	for _, e := range events {
		if e.At == (Time{}) {
			e.At = Now()
		}
		line, err := json.Marshal(e)
		if err != nil {
			return fmt.Errorf("journal: event: %w", err)
		}
		lines = append(append(lines, line...), '\n')
	}
	if err := s.makeDir(); err != nil {
		return err
	}
	path := filepath.Join(s.Dir, historyName)
	f, err := openFile(path, os.O_RDWR|os.O_CREATE|os.O_APPEND)
	if err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	defer f.Close()
	last := []byte{'\n'}
	if size, err := f.Seek(0, io.SeekEnd); err == nil {
		_, _ = f.ReadAt(last, size-1) // fails in an empty file
	}
	if last[0] == '\n' {
		lines = lines[1:]
	}
	if _, err := f.Write(lines); err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	// Only one process renames a file.
	size, err := f.Seek(0, io.SeekCurrent)
	if err == nil && size > maxHistory &&
		unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil && samePath(path, f) {
		err = os.Rename(path, path+".1")
	}
	return err
}

// History returns the events that the history still has, the oldest first.
func (s *Store) History() ([]Event, error) {
	t := &Tail{Store: s}
	defer func() { _ = t.file.Close() }()
	return t.Next()
}

// Tail reads the history, and follows it as it grows.
type Tail struct {
	Store *Store
	file  *os.File // nil before the first event
	read  int64    // bytes of the file
}

// Next returns the events since the last call, the oldest first; the first call returns the whole
// history. It skips lines that cannot be read.
func (t *Tail) Next() (events []Event, err error) {
	path := filepath.Join(t.Store.Dir, historyName)
	next := []string{path}
	if t.file == nil {
		next = []string{path + ".1", path}
	}
	events, err = t.rest()
	for _, path := range next {
		if err != nil || t.file != nil && samePath(path, t.file) {
			break
		}
		var more []Event
		if err = t.open(path); err == nil {
			more, err = t.rest()
		}
		events = append(events, more...)
	}
	return events, err
}

// open continues with another file, if that file exists.
func (t *Tail) open(path string) error {
	f, err := openFile(path, os.O_RDONLY)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	_ = t.file.Close()
	t.file, t.read = f, 0
	return nil
}

// rest returns the events in the complete lines of the file that have not been read yet.
func (t *Tail) rest() (events []Event, err error) {
	if t.file == nil {
		return nil, nil
	}
	data, err := io.ReadAll(io.NewSectionReader(t.file, t.read, math.MaxInt64-t.read))
	if err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	data = data[:bytes.LastIndexByte(data, '\n')+1]
	t.read += int64(len(data))
	for line := range bytes.Lines(data) {
		var e Event
		if json.Unmarshal(line, &e) == nil {
			events = append(events, e)
		}
	}
	return events, nil
}

// NoteSweep records that a sweep of all networks has just ended, as the modification time of a
// file that is not synced.
func (s *Store) NoteSweep() error {
	now := fmt.Appendln(nil, time.Now().UTC().Format(time.RFC3339))
	return os.WriteFile(filepath.Join(s.Dir, sweptName), now, 0o600)
}

// LastSweep returns when the last sweep of all networks ended, or the zero time if none has.
func (s *Store) LastSweep() time.Time {
	info, err := os.Lstat(filepath.Join(s.Dir, sweptName))
	if err != nil {
		return time.Time{}
	}
	return info.ModTime()
}
