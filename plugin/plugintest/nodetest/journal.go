package nodetest

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/journal/journaltest"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/netconf"
)

// writer writes a journal that looks as if the plugin had written it.
type writer struct {
	*testscript.TestScript
	*journal.Store
}

// WriteJournal is a command of script tests: journal VERB DIR ARG…. The verbs are:
//
//	attachment KEY STATE [NAME=VALUE…] PLUGIN [STEP]…   puts a record
//	put FILE…      puts records, each a JSON file
//	bury KEY…      changes records to the state abandoned, as unwindctl forget does
//	years N        adds N years to all three wall times (ADD, state, last change) of all records
//	damage KEY…    makes records unreadable
//	newer          marks the journal as readable by newer releases only
//	record FILE…   records events, each a JSON file, in which "ago" is the event's age
//	count N NAME LABEL…   adds N to a counter
func WriteJournal(ts *testscript.TestScript, _ bool, args []string) {
	ts.Check(journalVerbs[args[0]](writer{ts, &journal.Store{Dir: ts.MkAbs(args[1])}}, args[2:]))
}

var journalVerbs = map[string]func(writer, []string) error{
	"put": writer.put, "attachment": writer.attachment, "bury": writer.bury, "damage": writer.damage, "newer": writer.newer,
	"years":  writer.years,
	"record": writer.recordEvents, "count": writer.count,
}

// put reads a record from each file, and puts it. In a file, $MACHINE stands for the kind of this
// machine's ID, and any other $NAME for a variable of the script.
func (w writer) put(files []string) error {
	for _, file := range files {
		e := &journal.Record{}
		err := json.Unmarshal([]byte(os.Expand(w.ReadFile(file), func(name string) string {
			if name == "MACHINE" {
				kind, _, _ := strings.Cut(facts.This().Machine, ":")
				return kind
			}
			return w.Getenv(name)
		})), e)
		if err == nil {
			err = putRecord(w.Store, Here(e))
		}
		if err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
	}
	return nil
}

func putRecord(s *journal.Store, e *journal.Record) error {
	return s.Update(context.Background(), func(tx *journal.Tx) error { return journaltest.PutIn(tx, e) })
}

// attachment puts a record. Its arguments are KEY STATE [NAME=VALUE…] PLUGIN [STEP]…. The value of
// netns is a path, or "gone" for a namespace that no longer exists. The value of copies is the
// number of records to put, with container IDs ID-1, ID-2, …. Any NAME that the switch below does
// not handle is a key of the next plugin's configuration. STEP is a JSON object with fields of the
// preceding plugin's step.
func (w writer) attachment(args []string) error {
	e := &journal.Record{Key: journaltest.KeyOf(args[0]), State: journal.State(args[1]), Added: journal.Added{CNIVersion: "1.0.0"}}
	g, config, copies := e, map[string]string{"name": e.Network}, 0
	g.Added.Path = filepath.Join(w.Getenv("TOOLS"), "test")
	for _, arg := range args[2:] {
		name, value, has := strings.Cut(arg, "=")
		var err error
		switch {
		case strings.HasPrefix(arg, "{"):
			err = json.Unmarshal([]byte(arg), &g.Steps[len(g.Steps)-1])
		case !has:
			if name == "faulty" {
				config["dir"] = cmp.Or(config["dir"], w.Getenv("WORK"))
			}
			g.Steps = append(g.Steps, journal.Step{Index: len(g.Steps), Type: name, Config: netconf.Marshal(config)})
			config = map[string]string{"name": e.Network}
		case arg == "netns=gone":
			g.Added.NetNS = journal.NetNS{Path: "/none", Dev: 4, Ino: 1}
		case name == "netns":
			g.Added.NetNS.Path = value
		case name == "grace":
			g.Added.GracePeriod, err = time.ParseDuration(value)
		case name == "pod":
			e.Added.Pod.Namespace, e.Added.Pod.Name, _ = strings.Cut(value, "/")
		case name == "address":
			address, pool, _ := strings.Cut(value, "@")
			g.Got.Claims = append(g.Got.Claims, journal.Claim{Address: netip.MustParseAddr(address), Pool: pool})
		case name == "reason":
			e.Reason = value
		case name == "boot":
			g.Added.Host.BootID = value
		case name == "path":
			g.Added.Path = value
		case name == "copies":
			copies, err = strconv.Atoi(value)
		default:
			config[name] = value
		}
		if err != nil {
			return fmt.Errorf("%s: %w", arg, err)
		}
	}
	Here(e)
	if copies == 0 {
		return putRecord(w.Store, e)
	}
	id := e.ContainerID
	for i := range copies {
		e.ContainerID, g.Number = fmt.Sprintf("%s-%d", id, i+1), 0
		if err := putRecord(w.Store, e); err != nil {
			return err
		}
	}
	return nil
}

func (w writer) bury(keys []string) error {
	return w.Update(context.Background(), func(tx *journal.Tx) error {
		for _, text := range keys {
			key := journaltest.KeyOf(text)
			e, err := tx.Get(key)
			if err != nil {
				return err
			}
			if e == nil {
				e = &journal.Record{Key: key}
			}
			e.Abandon("forgotten by an operator")
			e.Reason = "settled"
			if err := tx.Put(e); err != nil {
				return err
			}
		}
		return nil
	})
}

func (w writer) damage(keys []string) error {
	for _, key := range keys {
		if err := journaltest.InFile(w.Store, "records", strings.ReplaceAll(key, "/", "\x00"), journaltest.Become(`{"network":`)); err != nil {
			return err
		}
	}
	return nil
}

var wallYear = regexp.MustCompile(`"wall":"\d{4}`)

func (w writer) years(args []string) error {
	years, err := strconv.Atoi(args[0])
	records, moved := 0, 0
	err = errors.Join(err, journaltest.InFile(w.Store, "records", "", func(key, record []byte) []byte {
		records++
		const sum = 4
		return journal.Seal(key, wallYear.ReplaceAllFunc(record[sum:], func(b []byte) []byte {
			moved++
			year, _ := strconv.Atoi(string(b[len(b)-4:]))
			return fmt.Appendf(nil, `"wall":"%d`, year+years)
		}))
	}))
	if err == nil && (records == 0 || moved != 3*records) {
		err = fmt.Errorf("moved %d times of %d records, want 3 of each", moved, records)
	}
	return err
}

func (w writer) newer([]string) error { return journaltest.MakeNewer(w.Store) }

func (w writer) recordEvents(files []string) error {
	for _, file := range files {
		var e journal.Event
		var when struct{ Ago string }
		data := []byte(w.ReadFile(file))
		err := errors.Join(json.Unmarshal(data, &e), json.Unmarshal(data, &when))
		ago, durationErr := time.ParseDuration(when.Ago)
		if err = errors.Join(err, durationErr); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		e.At = journal.Now()
		e.At.Wall = e.At.Wall.Add(-ago)
		if err := w.Record(e); err != nil {
			return err
		}
	}
	return nil
}

func (w writer) count(args []string) error {
	n, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	return w.Record(slices.Repeat([]journal.Event{{Count: args[1:]}}, n)...)
}

// Here fills the empty fields of a record as if the record's ADD had run on this host, in the
// network namespace that is now at the recorded path.
func Here(e *journal.Record) *journal.Record {
	g, host := e, facts.This()
	given := g.Added.Host
	g.Added.Host = journal.Host{
		BootID: cmp.Or(given.BootID, host.BootID), Machine: cmp.Or(given.Machine, host.Machine),
		MountNS: cmp.Or(given.MountNS, host.MountNS), PIDNS: cmp.Or(given.PIDNS, host.PIDNS),
		NetNS: cmp.Or(given.NetNS, host.NetNS), TimeNS: cmp.Or(given.TimeNS, host.TimeNS),
	}
	var there unix.Stat_t
	if !g.Added.NetNS.Known() && unix.Stat(g.Added.NetNS.Path, &there) == nil {
		g.Added.NetNS.Dev, g.Added.NetNS.Ino = there.Dev, there.Ino
	}
	soon := journal.BootNanos() + int64(4*time.Minute)
	for i := range e.Steps { // a later time would count as a time of another boot
		e.Steps[i].Next.At = min(e.Steps[i].Next.At, soon)
	}
	return e
}
