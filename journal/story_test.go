package journal

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"cni-unwind/plugin/plugintest/sandbox"

	bolt "go.etcd.io/bbolt"
)

// A story is a test of several actors that use one journal. Its steps are separated by line feeds
// or semicolons:
//
//	p acquire a = taken    actor p runs a verb (see actor.act); its expected result
//	q put b -> FILE        actor q runs a verb, and waits for the flock of FILE
//	q = ok                 the expected result of q's last verb
//	p kill                 send a signal; also: stop, cont (SIGSTOP, SIGCONT)
//
// The actors "we", "other" and "link" are goroutines of the test's process, each with a Store of
// its own; "link" reaches the directory by a symbolic link. All other actors are processes. FILE is
// a file of the journal, or the name of an attachment for that attachment's lock. The result "*"
// matches anything, "error" any error, and "error: END" an error that ends with END.
type story struct{ name, steps string }

func tellStories(t *testing.T, stories []story) {
	t.Helper()
	for _, st := range stories {
		t.Run(st.name, func(t *testing.T) {
			t.Parallel()
			newCast(t, newStore(t)).tell(st.steps)
		})
	}
}

// cast holds the actors of a story.
type cast struct {
	*testing.T
	store  *Store
	actors map[string]*process
}

func newCast(t *testing.T, s *Store) *cast {
	return &cast{T: t, store: s, actors: map[string]*process{}}
}

func (c *cast) tell(steps string) {
	c.Helper()
	for _, step := range strings.FieldsFunc(steps, func(r rune) bool { return r == '\n' || r == ';' }) {
		if step = strings.TrimSpace(step); step != "" {
			c.play(step)
		}
	}
}

func (c *cast) actor(name string) *process {
	c.Helper()
	if c.actors[name] == nil {
		switch dir := c.store.Dir; name {
		case "we", "other":
			c.actors[name] = perform(c.T, dir)
		case "link":
			link := filepath.Join(c.TempDir(), "link")
			check(c, os.Symlink(filepath.Dir(dir), link))
			c.actors[name] = perform(c.T, filepath.Join(link, filepath.Base(dir)))
		default:
			c.actors[name] = start(c.T, "act", dir)
		}
	}
	return c.actors[name]
}

// play runs one step of a story.
func (c *cast) play(step string) {
	c.Helper()
	rest, want, answers := strings.Cut(step+" ", "= ")
	rest, file, waits := strings.Cut(rest, "-> ")
	name, does, _ := strings.Cut(strings.TrimSpace(rest), " ")
	p := c.actor(name)
	switch does {
	case "":
	case "kill":
		p.kill()
	case "stop":
		p.signal(syscall.SIGSTOP)
	case "cont":
		p.signal(syscall.SIGCONT)
	default:
		p.say(does)
	}
	if waits {
		if strings.HasPrefix(file, "journal.") {
			sandbox.AwaitWaiters(c, p.pid(), filepath.Join(c.store.Dir, strings.TrimSpace(file)), 1, math.MaxInt)
		} else { // waiters poll an attachment's lock, so the kernel doesn't show them
			time.Sleep(50 * time.Millisecond)
		}
	}
	if !answers {
		return
	}
	got := p.line()
	if text, ok := strings.CutPrefix(got, "spawned "); ok {
		pid, err := strconv.Atoi(text)
		check(c, err)
		c.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGKILL) })
		got = "spawned"
	}
	want = strings.TrimSpace(want)
	text, fails := strings.CutPrefix(want, "error")
	if fails = fails && strings.HasPrefix(got, "error"); want != "*" && got != want && (!fails || !strings.HasSuffix(got, text)) {
		c.Fatalf("%s: %s", step, got)
	}
}

// perform starts an actor in a goroutine of this process.
func perform(t *testing.T, dir string) *process {
	in, p := make(chan string), &process{t: t, lines: make(chan string, 16)}
	p.say = func(line string) { in <- line }
	s := &Store{Dir: dir, wait: shortWait}
	a := &actor{Store: s, tell: func(line string) { p.lines <- line }, await: func() string { return <-in }, locks: map[string]*Lock{}}
	go func() {
		for line := range in {
			a.tell(a.do(strings.Fields(line)))
		}
	}()
	t.Cleanup(func() {
		close(in)
		for _, l := range a.locks {
			l.Release()
		}
	})
	return p
}

// shortWait replaces maxWait in stories. It is long enough that a slow, loaded machine doesn't
// exceed it where nothing is meant to wait.
const shortWait = 15 * time.Second

// helpAct is a helper process that runs an actor.
func helpAct(s *Store, _ []string) error {
	a := &actor{Store: s, tell: tell, await: await, locks: map[string]*Lock{}}
	for {
		tell(a.do(strings.Fields(await())))
	}
}

// actor takes locks and runs transactions on request.
type actor struct {
	*Store
	tell  func(string)
	await func() string
	locks map[string]*Lock
}

// do runs one verb and returns its result. words are the verb, an attachment and, for verbs that
// wait, the longest time to wait.
func (a *actor) do(words []string) string {
	verb, id, limit := words[0], "", sandbox.Patience
	if len(words) > 1 {
		id = words[1]
	}
	bound := len(words) > 2
	if bound {
		limit, _ = time.ParseDuration(words[2])
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	if !bound && (verb == "put" || verb == "view") && a.wait > 0 {
		limit = a.wait
	}
	began := time.Now()
	said, err := a.act(ctx, verb, id)
	took := time.Since(began)
	switch {
	case errors.Is(err, ErrBusy) && took < shortWait/2 && (limit == 0 || took < limit/2):
		return "busy at once"
	case errors.Is(err, ErrBusy) && took > limit-10*time.Millisecond && took < limit+shortWait/2:
		return "busy"
	case errors.Is(err, ErrBusy):
		return fmt.Sprintf("busy after %v, not %v", took, limit)
	case errors.Is(err, fs.ErrNotExist):
		return "error: no file"
	case err != nil:
		return "error: " + strings.ReplaceAll(err.Error(), "\n", "; ")
	}
	return said
}

func (a *actor) act(ctx context.Context, verb, id string) (said string, err error) {
	k, l := keyOf(id), a.locks[id]
	switch verb {
	case "acquire", "inherit", "skip", "end", "takeover":
		return a.take(ctx, verb, id)
	case "release":
		delete(a.locks, id)
		l.Release()
	case "remove":
		err = l.Remove()
	case "spawn": // a process that inherits the lock, as a delegate does
		cmd := exec.Command("sleep", "600")
		cmd.ExtraFiles = []*os.File{l.File()}
		err = cmd.Start()
		return fmt.Sprint("spawned ", cmd.Process.Pid), err
	case "awaited": // a DEL waits for the lock
		return fmt.Sprint(l.Awaited()), nil
	case "look":
		return a.look(k)
	case "sweep":
		err = a.RemoveFreeLocks()
	case "rm":
		err = os.RemoveAll(a.Dir)
	case "put":
		err = a.Update(ctx, func(tx *Tx) error { return tx.Put(adding(id)) })
	case "fill": // put entries on several pages and leave no page free
		err = a.Update(ctx, func(tx *Tx) error { return putAll(tx, bigs(populated, 1)...) })
	case "spread": // change several of the pages that "fill" wrote
		err = a.Update(ctx, func(tx *Tx) error { return putAll(tx, bigs(populated, spread)...) })
	case "hold", "wreck":
		err = a.hold(verb == "wreck", id)
	case "list":
		return a.list(ctx)
	case "populate":
		err = populate(a.Store)
	case "aside":
		aside, err := filepath.Glob(a.Path() + ".damaged-*")
		return fmt.Sprint(len(aside)), err
	case "plant":
		err = os.Symlink(filepath.Join(a.Dir, "victim"), a.LockPath(k))
	case "planted":
		_, err = os.Lstat(filepath.Join(a.Dir, "victim"))
	case "umask":
		mask, _ := strconv.ParseUint(id, 8, 32)
		syscall.Umask(int(mask))
	case "die": // from now on, die at the point named
		a.Point = func(name string) {
			if name == id {
				_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
				select {}
			}
		}
	case "stranger": // open the journal as bbolt's own tool does
		db, err := bolt.Open(a.Path(), 0o600, nil)
		if err != nil {
			return "", err
		}
		a.tell("in")
		a.await()
		return "ok", db.Close()
	case "replace":
		other := &Store{Dir: a.Dir + ".other"}
		err = errors.Join(other.Update(ctx, func(tx *Tx) error { return tx.Put(adding(id)) }),
			os.Rename(a.Path(), a.Path()+".old"), os.Rename(other.Path(), a.Path()))
	case "touch": // as a writer does
		err = os.Chtimes(filepath.Join(a.Dir, queueName), time.Time{}, time.Now())
	case "sleep":
		time.Sleep(shortWait * 2 / 5)
	case "view":
		err = a.View(ctx, func(tx *Tx) error {
			a.tell("in")
			a.await()
			return look(tx)
		})
	default:
		err = fmt.Errorf("no verb %s", verb)
	}
	return "ok", err
}

func (a *actor) take(ctx context.Context, how, id string) (said string, err error) {
	var l *Lock
	if how == "takeover" {
		l, err = a.TakeOver(keyOf(id))
	} else {
		p := Patience{Orphans: sandbox.Patience, SkipOwned: how == "skip", EndADD: how == "end"}
		if how == "inherit" || how == "skip" {
			p.Orphans = 100 * time.Millisecond
		}
		l, err = a.Acquire(ctx, keyOf(id), p)
	}
	if err != nil {
		return "", err
	}
	a.locks[id] = l
	if !l.inPlace() {
		return "another file is at the lock's path", nil
	}
	return "taken", nil
}

// look returns the state of an attachment's lock, as a process that doesn't hold it sees it.
func (a *actor) look(k Key) (said string, err error) {
	lock, err := a.LookAtLock(k)
	switch said = "free"; {
	case lock.Owned:
		said = "owned"
	case lock.Held:
		said = "locked"
	}
	if _, err := os.Stat(a.LockPath(k)); os.IsNotExist(err) {
		said += ", no file"
	}
	return said, err
}

// list returns the container IDs of all entries.
func (a *actor) list(ctx context.Context) (said string, err error) {
	err = a.View(ctx, func(tx *Tx) error {
		return tx.All(func(e *Entry, err error) error {
			said = strings.TrimSpace(said + " " + e.ContainerID)
			return err
		})
	})
	return said, err
}

// hold puts an entry in a transaction, in which it first waits for a line from the test. If wreck
// is set, the first run of the transaction damages the file, and Update runs it again in a new one.
func (a *actor) hold(wreck bool, id string) error {
	return a.Update(context.Background(), func(tx *Tx) error {
		a.tell("in")
		a.await()
		if !wreck {
			return tx.Put(adding(id))
		}
		wreck = false
		return errors.Join(os.Truncate(a.Path(), 3*pageSize), look(tx))
	})
}
