package journal

import (
	"cmp"
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

// story is a test in which several actors (processes or goroutines) use one journal. An actor runs
// a verb, such as acquire, and answers with the verb's result. An actor that waits for a lock
// answers later (see reply and waitsFor).
type story struct {
	name string
	tell func(c *cast)
}

func tellStories(t *testing.T, stories []story) {
	t.Helper()
	for _, st := range stories {
		t.Run(st.name, func(t *testing.T) {
			t.Parallel()
			st.tell(&cast{T: t, store: newStore(t)})
		})
	}
}

// cast starts the actors of a story.
type cast struct {
	*testing.T
	store *Store
}

// here returns an actor in this process, with a Store of its own.
func (c *cast) here() *process { return perform(c.T, c.store.Dir) }

// byLink returns an actor in this process that reaches the directory through a symbolic link.
func (c *cast) byLink() *process {
	c.Helper()
	link := filepath.Join(c.TempDir(), "link")
	check(c, os.Symlink(filepath.Dir(c.store.Dir), link))
	return perform(c.T, filepath.Join(link, filepath.Base(c.store.Dir)))
}

// elsewhere returns an actor in a process of its own.
func (c *cast) elsewhere() *process {
	c.Helper()
	return start(c.T, "act", c.store.Dir)
}

// answer is the result of a verb that an actor runs. The methods of answer wait for that result.
type answer struct {
	*process
	verb string
}

// ask makes an actor run a verb (see actor.act). The arguments are an attachment's container ID and
// the longest time to wait.
func (p *process) ask(verb, id string, limit ...time.Duration) answer {
	words := []string{verb, cmp.Or(id, "-")}
	for _, l := range limit {
		words = append(words, l.String())
	}
	p.say(strings.Join(words, " "))
	return answer{p, strings.Join(words, " ")}
}

// reply returns the answer of an actor that was waiting.
func (p *process) reply() answer { return answer{p, "its last verb"} }

func (p *process) stop()   { p.t.Helper(); p.signal(syscall.SIGSTOP) }
func (p *process) resume() { p.t.Helper(); p.signal(syscall.SIGCONT) }

// The verbs. actor.act implements them.

func (p *process) acquire(id string, limit ...time.Duration) answer {
	return p.ask("acquire", id, limit...)
}

func (p *process) endADD(id string, limit ...time.Duration) answer { return p.ask("end", id, limit...) }
func (p *process) put(id string, limit ...time.Duration) answer    { return p.ask("put", id, limit...) }
func (p *process) view(limit ...time.Duration) answer              { return p.ask("view", "", limit...) }
func (p *process) inherit(id string) answer                        { return p.ask("inherit", id) }
func (p *process) skipOwned(id string) answer                      { return p.ask("skip", id) }
func (p *process) takeOver(id string) answer                       { return p.ask("takeover", id) }
func (p *process) release(id string) answer                        { return p.ask("release", id) }
func (p *process) removeFile(id string) answer                     { return p.ask("remove", id) }
func (p *process) spawn(id string) answer                          { return p.ask("spawn", id) }
func (p *process) awaited(id string) answer                        { return p.ask("awaited", id) }
func (p *process) look(id string) answer                           { return p.ask("look", id) }
func (p *process) hold(id string) answer                           { return p.ask("hold", id) }
func (p *process) wreck(id string) answer                          { return p.ask("wreck", id) }
func (p *process) plantLink(id string) answer                      { return p.ask("plant", id) }
func (p *process) replace(id string) answer                        { return p.ask("replace", id) }
func (p *process) umask(mask string) answer                        { return p.ask("umask", mask) }
func (p *process) dieAt(point string) answer                       { return p.ask("die", point) }
func (p *process) planted() answer                                 { return p.ask("planted", "") }
func (p *process) sweep() answer                                   { return p.ask("sweep", "") }
func (p *process) removeAll() answer                               { return p.ask("rm", "") }
func (p *process) fill() answer                                    { return p.ask("fill", "") }
func (p *process) spread() answer                                  { return p.ask("spread", "") }
func (p *process) list() answer                                    { return p.ask("list", "") }
func (p *process) populate() answer                                { return p.ask("populate", "") }
func (p *process) setAside() answer                                { return p.ask("aside", "") }
func (p *process) openWithBbolt() answer                           { return p.ask("stranger", "") }
func (p *process) sleep() answer                                   { return p.ask("sleep", "") }

// goOn continues a verb that has answered "in" and now waits with the journal open.
func (p *process) goOn() answer { return p.ask("go", "") }

func (a answer) is(want string) {
	a.t.Helper()
	if got := a.text(); got != want {
		a.t.Fatalf("%s: %s, want %s", a.verb, got, want)
	}
}

func (a answer) ok() { a.t.Helper(); a.is("ok") }

// isAnything waits for an actor's answer, and ignores it.
func (a answer) isAnything() { a.t.Helper(); _ = a.text() }

// fails checks that an actor's answer is an error whose text ends with end.
func (a answer) fails(end string) {
	a.t.Helper()
	if got := a.text(); !strings.HasPrefix(got, "error") || !strings.HasSuffix(got, end) {
		a.t.Fatalf("%s: %s, want an error that ends with %q", a.verb, got, end)
	}
}

// text returns an actor's answer.
func (a answer) text() string {
	a.t.Helper()
	got := a.line()
	text, spawned := strings.CutPrefix(got, "spawned ")
	if !spawned {
		return got
	}
	pid, err := strconv.Atoi(text)
	check(a.t, err)
	a.t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGKILL) })
	return "spawned"
}

// eitherIs checks the answer of the actor that answers first. It returns that actor, and then the
// other actor.
func eitherIs(want string, one, other *process) (first, second *process) {
	one.t.Helper()
	var got string
	select {
	case got = <-one.lines:
		first, second = one, other
	case got = <-other.lines:
		first, second = other, one
	case <-time.After(sandbox.Patience):
	}
	if got != want {
		one.t.Fatalf("the first answer is %q, want %q", got, want)
	}
	return first, second
}

// waitsFor waits until the actor is blocked on the flock of a journal file.
func (p *process) waitsFor(file string) {
	p.t.Helper()
	sandbox.AwaitWaiters(p.t, p.pid(), filepath.Join(p.dir, file), 1, math.MaxInt)
}

// noLongerAwaits polls until no DEL waits for a lock. One look is not enough: a process that
// another test starts inherits a DEL's lock on the third byte (see Lock) and keeps it until exec.
func (p *process) noLongerAwaits(id string) {
	p.t.Helper()
	for end := time.Now().Add(sandbox.Patience); p.awaited(id).text() != "false"; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			p.t.Fatalf("a DEL still waits for %s", id)
		}
	}
}

// waits gives the actor time to begin to wait for an attachment's lock. The actor polls that lock,
// so /proc/locks does not show that the actor waits.
func (p *process) waits() { time.Sleep(50 * time.Millisecond) }

// perform starts an actor in a goroutine of this process.
func perform(t *testing.T, dir string) *process {
	in, p := make(chan string), &process{t: t, dir: dir, lines: make(chan string, 16)}
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

// shortWait replaces maxWait in stories. It is so long that even on a slow, loaded machine, a verb
// that does not wait takes less time.
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

// do runs one verb and returns its result. words are the verb, an attachment's container ID and,
// for verbs that wait, the longest time to wait.
func (a *actor) do(words []string) string {
	verb, id, limit := words[0], "", sandbox.Patience
	if len(words) > 1 && words[1] != "-" {
		id = words[1]
	}
	bound := len(words) > 2
	if bound {
		limit, _ = time.ParseDuration(words[2])
	}
	began := time.Now() // before the limit begins, because a busy machine may delay what follows
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	if !bound && (verb == "put" || verb == "view") && a.wait > 0 {
		limit = a.wait
	}
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
	case "awaited": // whether a DEL waits for the lock
		return fmt.Sprint(l.Awaited()), nil
	case "look":
		return a.look(k)
	case "sweep":
		err = a.RemoveFreeLocks()
	case "rm":
		err = os.RemoveAll(a.Dir)
	case "put":
		err = a.Update(ctx, func(tx *Tx) error { return tx.Put(adding(id)) })
	case "fill": // put records on several pages and leave no page free
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
	case "die": // from now on, die at the named crash point
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
		p := Patience{Children: sandbox.Patience, SkipOwned: how == "skip", EndADD: how == "end"}
		if how == "inherit" || how == "skip" {
			p.Children = 100 * time.Millisecond
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

// look returns the state of an attachment's lock, from LookAtLock and the lock's file.
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

// list returns the container IDs of all records.
func (a *actor) list(ctx context.Context) (said string, err error) {
	err = a.View(ctx, func(tx *Tx) error {
		return tx.All(func(e *Record, err error) error {
			said = strings.TrimSpace(said + " " + e.ContainerID)
			return err
		})
	})
	return said, err
}

// hold runs a transaction that waits for a line from the test, and then puts a record. If wreck is
// set, the first run damages the journal file instead, and Update runs the transaction again in a
// new file.
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
