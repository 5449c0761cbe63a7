package journal

import (
	"fmt"
	"hash/maphash"
	"math/rand/v2"
	"strings"

	"cni-unwind/plugin/plugintest/sandbox"
)

// lost is a disk after a power loss.
type lost struct {
	name    string
	image   *image
	at      mark
	damaged []string // names of the steps that damaged the journal file
}

// disksOf calls yield once for each disk that a power loss may leave, until yield returns false.
func (p *power) disksOf(yield func(lost) bool) {
	var pending []change
	kept := newImage()
	state := lost{at: mark{-1, true}}
	seen, seed := map[string]bool{}, maphash.MakeSeed()
	random := rand.New(rand.NewPCG(p.seed, 0))
	db := p.databases()
	for i, c := range append(p.log, change{kind: marked, mark: mark{len(p.steps) - 1, true}}) {
		if c.kind != synced && c.kind != failed && c.kind != marked {
			pending = append(pending, c)
			continue
		}
		for _, keep := range choices(pending, db, random) {
			l := state
			l.image = kept.clone()
			l.name = fmt.Sprintf("change %d: %s", i, keep.apply(l.image, pending, db, random))
			if key := fmt.Sprint(l.at, l.image.sum(seed)); !seen[key] {
				seen[key] = true
				if !yield(l) {
					return
				}
			}
		}
		switch c.kind {
		case marked:
			state.at = c.mark
			if c.mark.done && p.steps[c.mark.step].damages {
				state.damaged = append(state.damaged[:len(state.damaged):len(state.damaged)], p.steps[c.mark.step].name)
			}
		case failed:
			for i, p := range pending {
				pending[i].lost = p.lost || p.file == c.file && p.kind == wrote
			}
		case synced:
			pending = kept.sync(pending, c.file)
		}
	}
}

// sync applies the pending changes of a file to the image, except those that are lost, and returns
// the changes that are still pending. A lost page remains lost until the page is written again, or
// until the file has no name any more.
func (i *image) sync(pending []change, file int) (rest []change) {
	again, named := map[int64]bool{}, map[int]bool{}
	for _, c := range pending {
		if c.file == file && !c.lost {
			i.apply(c)
			again[c.at] = again[c.at] || c.kind == wrote
		}
		named[c.target] = true
	}
	for _, names := range i.folders {
		for _, target := range names {
			named[target] = true
		}
	}
	for _, c := range pending {
		if c.file != file || c.lost && !again[c.at] && named[file] {
			rest = append(rest, c)
		}
	}
	return rest
}

// databases returns the inode numbers of all directories except locks/, and of all files whose name
// ever began with the journal file's name. It omits lock files and the queue file. They are never
// synced, because nothing relies on their content after a power loss.
func (p *power) databases() map[int]bool {
	db := map[int]bool{rootFolder: true}
	for _, c := range p.log {
		if c.kind == renamed && (strings.HasPrefix(c.name, fileName) || c.folder && c.name != locksName) {
			db[c.target] = true
		}
	}
	return db
}

// ours reports whether a change can affect the content of a journal.
func ours(c change, db map[int]bool) bool {
	return db[c.file] && (c.kind != renamed || c.folder || strings.HasPrefix(c.name+c.old, fileName))
}

// way is one possible outcome of a power loss. It has a byte for each pending change that can affect
// a journal (the function ours selects them). In the byte, a bit is set for each sector that isn't
// lost.
type way []uint8

const whole = 0xff

// choices returns the combinations of pending changes to try (see TestPowerLoss).
func choices(pending []change, db map[int]bool, random *rand.Rand) (all []way) {
	var units []change
	for _, c := range pending {
		if ours(c, db) {
			units = append(units, c)
		}
	}
	n := len(units)
	add := func(sectors func(i int) uint8) {
		w := make(way, n)
		for i := range w {
			w[i] = sectors(i)
		}
		all = append(all, w)
	}
	where := func(yes func(i int) bool) {
		add(func(i int) uint8 {
			if yes(i) {
				return whole
			}
			return 0
		})
	}
	where(func(int) bool { return true })
	for k := range n {
		where(func(i int) bool { return i < k })
	}
	sure := len(all)
	if n <= 8 {
		for mask := range 1 << n {
			where(func(i int) bool { return mask>>i&1 != 0 })
		}
		if n <= 4 {
			sure = len(all)
		}
	} else {
		for k := range n {
			where(func(i int) bool { return i != k })
			where(func(i int) bool { return i == k })
		}
		for range 256 {
			where(func(int) bool { return random.IntN(2) == 0 })
		}
	}
	for u, c := range units {
		if c.kind != wrote {
			continue
		}
		for k := 1; k < page/sector; k++ {
			for _, sectors := range []uint8{1<<k - 1, whole << k} {
				for _, others := range []int{n, u} { // with all other changes, or only with the earlier ones
					add(func(i int) uint8 {
						switch {
						case i == u:
							return sectors
						case i < others:
							return whole
						}
						return 0
					})
				}
			}
		}
	}
	for range min(n, 1) * 64 {
		add(func(int) uint8 { return uint8(random.Uint32()) })
	}
	if few := 8; !sandbox.Long() && len(all) > sure+few {
		some := all[sure:]
		random.Shuffle(len(some), func(i, j int) { some[i], some[j] = some[j], some[i] })
		all = all[:sure+few]
	}
	return all
}

// apply applies the selected changes to a disk, and returns a description of the selection. The
// selection ignores changes that cannot affect the journal; apply applies a random half of these.
func (w way) apply(i *image, pending []change, db map[int]bool, random *rand.Rand) string {
	var name strings.Builder
	unit := 0
	for _, c := range pending {
		if !ours(c, db) {
			if random.IntN(2) == 0 {
				i.apply(c)
			}
			continue
		}
		sectors := w[unit]
		unit++
		fmt.Fprintf(&name, "%s %02x; ", c, sectors)
		switch {
		case c.kind != wrote && sectors != 0, sectors == whole:
			i.apply(c)
		case c.kind == wrote:
			for s := range min(page/sector, (len(c.data)+sector-1)/sector) {
				if sectors>>s&1 != 0 {
					part := c
					part.at, part.data = c.at+int64(s)*sector, c.data[s*sector:min(len(c.data), (s+1)*sector)]
					i.apply(part)
				}
			}
		}
	}
	return name.String()
}

func (c change) String() string {
	switch c.kind {
	case wrote:
		return fmt.Sprintf("file %d, page %d", c.file, c.at/page)
	case resized:
		return fmt.Sprintf("file %d, size %d", c.file, c.size)
	}
	return fmt.Sprintf("directory %d, %q to %q (file %d)", c.file, c.old, c.name, c.target)
}
