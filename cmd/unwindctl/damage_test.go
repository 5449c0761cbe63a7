package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"cni-unwind/journal"
	"cni-unwind/journal/journaltest"
	"cni-unwind/plugin/plugintest/nodetest"
	"cni-unwind/plugin/plugintest/sandbox"
)

// reads contains the commands that read the journal.
var reads = [][]string{
	{"list", "-o", "wide"}, {"show", "podnet/c007/eth0"}, {"history", "c007"}, {"doctor"}, {"ipam", "-o", "wide"},
	{"sweep", "--dry-run"}, {"metrics"},
}

// most is the maximum memory of a command that reads the journal, in bytes.
const most = 200 << 20

// putThree makes three writes to a journal, as verbs do. The first adds a record that sorts just
// after the record of the container near. The others write the record that sorts just before that
// container's. A separate process runs putThree, because bbolt may overflow the stack when it reads
// a damaged file.
func putThree(dir, near string) {
	s := &journal.Store{Dir: dir, Trusting: true}
	put := func(id string, state journal.State) {
		_ = s.Update(context.Background(), func(tx *journal.Tx) error {
			e, err := tx.Get(journaltest.KeyOf(network + "/" + id + "/eth0"))
			if e == nil || err != nil {
				e = deadEntry(id)
			}
			e.State = state
			return tx.Put(e)
		})
	}
	var i int
	_, _ = fmt.Sscanf(near, "c%d", &i)
	put(near+"-new", journal.Adding)
	put(containerID(i-1), journal.Live)
	put(containerID(i-1), journal.Live)
}

func containerID(i int) string { return fmt.Sprintf("c%03d", i) }

// deadEntry returns the record of a dead attachment. Its grace period of 1 ns is over immediately,
// so the output of commands about the attachment never changes.
func deadEntry(id string) *journal.Record {
	return nodetest.Here(&journal.Record{
		Key: journaltest.KeyOf(network + "/" + id + "/eth0"), State: journal.Adding, Steps: []journal.Step{{Type: "bridge", Config: []byte(`{"padding": "` + strings.Repeat("x", 400) + `"}`)}}, Added: journal.Added{CNIVersion: "1.0.0", GracePeriod: 1, NetNS: journal.NetNS{Path: "/none", Dev: 4, Ino: 1}},
	})
}

// TestFlipped flips one bit of a journal, and then makes three writes, as verbs do. After that, no
// command that reads the journal hangs, uses too much memory, or prints a wrong result without an
// error. If a command reports that the file is damaged, the next ADD sets the file aside. Verbs
// don't verify the file, so the three writes may succeed in a damaged file.
//
// `make proof` covers 2,000 random bytes, and each byte in the first key of each leaf page, because
// damage to such a key can make bbolt read forever. Shorter runs take a sample of these bytes. Only
// "list" and one other command run for random bytes and, in `make test`, for all bytes. No bit of a
// meta page is flipped: if the newest one is damaged, bbolt silently uses the previous transaction.
func TestFlipped(t *testing.T) {
	n := newMachine(t)
	n.netns("add")
	confDir := n.crowd(0)
	n.chain = fmt.Sprintf(`{"type": "faulty", "dir": %q, "instance": "p"}`, n.dir) // the ADD needs no address
	err := os.RemoveAll(n.state)
	for i := range 5 {
		pool := filepath.Join(n.dir, "ipam", network, fmt.Sprintf("10.9.0.%d", 10+i))
		err = errors.Join(err, os.WriteFile(pool, []byte(containerID(i)+"\r\neth0"), 0o600))
	}
	err = errors.Join(err, n.store.Update(context.Background(), func(tx *journal.Tx) (err error) {
		for i := range 40 {
			err = errors.Join(err, tx.Put(deadEntry(containerID(i))))
		}
		return err
	}))
	check(t, err)
	whole := n.file()
	lock := filepath.Join(n.state, "journal.lock")
	queue, err := os.ReadFile(lock)
	check(t, err)
	begin := func(data []byte, near string) {
		check(t, os.RemoveAll(n.state))
		check(t, os.Mkdir(n.state, 0o700))
		check(t, errors.Join(os.WriteFile(n.store.Path(), data, 0o600), os.WriteFile(lock, queue, 0o600)))
		n.run(home.command(n, filepath.Join(n.bin, "puts"), n.state, near))
	}
	right := map[string]string{} // the correct output, by command and flip.near
	for i, f := range flips(whole) {
		readers := reads
		if turn := 1 + i%(len(reads)-1); f.random || sandbox.Rounds(1, 0, 0) == 1 {
			readers = [][]string{reads[0], reads[turn]}
		}
		if unread := slices.DeleteFunc(slices.Clone(readers), func(args []string) bool {
			return right[args[0]+f.near] != ""
		}); len(unread) > 0 {
			begin(whole, f.near)
			for _, args := range unread {
				right[args[0]+f.near] = timeless(n.bounded(confDir, args...).stdout)
			}
		}
		data := bytes.Clone(whole)
		data[f.at] ^= 1 << (f.at % 8)
		begin(data, f.near)
		damaged := len(n.aside()) > 0 // a verb detected the damage
		for _, args := range readers {
			out := n.bounded(confDir, args...)
			says := out.code != 0 || strings.Contains(out.stdout, "its journal entry cannot be read")
			if !says && !damaged && timeless(out.stdout) != right[args[0]+f.near] {
				t.Errorf("%s: %v is wrong without an error:\n%s\nwant\n%s", f.name, args, out.stdout, right[args[0]+f.near])
			}
			damaged = damaged || strings.Contains(out.stderr+out.stdout, journal.ErrDamaged.Error())
		}
		n.add(home, "add", n.pin("add"))
		if aside := n.aside(); damaged != (len(aside) == 1) {
			t.Errorf("%s: a command found damage: %t; set aside: %v", f.name, damaged, aside)
		}
	}
}

// aside returns the journals that were set aside.
func (n *machine) aside() []string {
	n.Helper()
	files, err := filepath.Glob(n.store.Path() + ".damaged-*")
	check(n, err)
	return files
}

var times = regexp.MustCompile(`\b\d+(\.\d+)?(h|m|s|ms)\b`)

// timeless replaces all durations in a text with "…".
func timeless(text string) string { return times.ReplaceAllString(text, "…") }

// bounded runs a command, and checks that it ends by itself, without a panic, and within the memory
// limit.
func (n *machine) bounded(confDir string, args ...string) outcome {
	n.Helper()
	ctl := n.ctl(confDir, args...)
	cmd := home.command(n, "prlimit", append([]string{"--as=4294967296", "--"}, ctl.Args...)...)
	out := n.run(cmd)
	usage := cmd.ProcessState.SysUsage().(*syscall.Rusage)
	if usage.Maxrss<<10 > most || out.code < 0 || strings.Contains(out.stderr, "goroutine ") {
		n.Errorf("%v: exit code %d, %d MiB\n%s", args, out.code, usage.Maxrss>>10, out.stderr)
	}
	return out
}

// flip is a byte of a journal in which the test flips a bit.
type flip struct {
	at     int
	name   string
	near   string // a container whose record is near the byte
	random bool
}

func flips(whole []byte) (all []flip) {
	const page, leaf = 4096, 2
	u16, u32, u64 := binary.NativeEndian.Uint16, binary.NativeEndian.Uint32, binary.NativeEndian.Uint64
	every, some := sandbox.Rounds(64, 16, 1), sandbox.Rounds(8, 16, 2000)
	for start := 2 * page; start < len(whole); start += page {
		header, element := whole[start:], whole[start+16:]
		if u64(header) != uint64(start/page) || u16(header[8:]) != leaf || u16(header[10:]) == 0 {
			continue
		}
		key := element[u32(element[4:]):][:u32(element[8:])]
		near := "c020"
		if parts := strings.Split(string(key), "\x00"); parts[0] == network {
			near = parts[1]
		}
		for i := 0; i < len(key); i += every {
			all = append(all, flip{start + 16 + int(u32(element[4:])) + i,
				fmt.Sprintf("byte %d of the first key of page %d", i, start/page), near, false})
		}
	}
	random := rand.New(rand.NewPCG(1, 0))
	for range some {
		at := 2*page + random.IntN(len(whole)-2*page)
		all = append(all, flip{at, fmt.Sprintf("byte %d of page %d", at%page, at/page), "c020", true})
	}
	return all
}
