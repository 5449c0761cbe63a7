package plugin

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"cni-unwind/plugin/plugintest/sandbox"
)

// Many tests have variants: for example, the journal breaks in one of six ways, and then an ADD or
// a DEL follows. each1 to each4 run such a test for the combinations of its choices.
//
//	each2(t, breakages, oneOf("ADD", "DEL"), func(t *testing.T, b breakage, verb choice) {
//		n := newNode(t)
//		…
//		n.wantClean()
//	})
//
// A choice is a string, a number, a struct with a name, or one of the values that oneOf returns. A
// run may omit combinations: see told.

// choice is one of several named alternatives. The test's code asks which one it is.
type choice struct {
	name string
	all  []string
}

// oneOf returns alternatives with these names.
func oneOf(names ...string) (all []choice) {
	for _, name := range names {
		all = append(all, choice{name, names})
	}
	return all
}

// is reports whether this alternative has the name. It panics if no alternative of the set has it.
func (c choice) is(name string) bool {
	if !slices.Contains(c.all, name) {
		panic(fmt.Sprintf("no alternative is named %q", name))
	}
	return c.name == name
}

// has reports whether this alternative's name contains the text. It panics if no alternative's name
// does.
func (c choice) has(text string) bool {
	with := func(name string) bool { return strings.Contains(name, text) }
	if !slices.ContainsFunc(c.all, with) {
		panic(fmt.Sprintf("no alternative has %q in its name", text))
	}
	return with(c.name)
}

// each1 runs a test for each choice that told selects, in parallel.
func each1[A any](t *testing.T, as []A, tell func(t *testing.T, a A)) {
	t.Helper()
	eachWay(t, [][]string{namesOf(as)}, func(t *testing.T, i []int) { tell(t, as[i[0]]) })
}

// each2 runs a test for the combinations of two choices.
func each2[A, B any](t *testing.T, as []A, bs []B, tell func(t *testing.T, a A, b B)) {
	t.Helper()
	eachWay(t, [][]string{namesOf(as), namesOf(bs)}, func(t *testing.T, i []int) {
		tell(t, as[i[0]], bs[i[1]])
	})
}

// each3 runs a test for the combinations of three choices.
func each3[A, B, C any](t *testing.T, as []A, bs []B, cs []C, tell func(t *testing.T, a A, b B, c C)) {
	t.Helper()
	eachWay(t, [][]string{namesOf(as), namesOf(bs), namesOf(cs)}, func(t *testing.T, i []int) {
		tell(t, as[i[0]], bs[i[1]], cs[i[2]])
	})
}

// each4 runs a test for the combinations of four choices.
func each4[A, B, C, D any](
	t *testing.T, as []A, bs []B, cs []C, ds []D, tell func(t *testing.T, a A, b B, c C, d D),
) {
	t.Helper()
	names := [][]string{namesOf(as), namesOf(bs), namesOf(cs), namesOf(ds)}
	eachWay(t, names, func(t *testing.T, i []int) {
		tell(t, as[i[0]], bs[i[1]], cs[i[2]], ds[i[3]])
	})
}

// eachWay runs a subtest for each way that told selects. A way is one combination: it contains the
// index of each choice.
func eachWay(t *testing.T, names [][]string, tell func(t *testing.T, way []int)) {
	t.Helper()
	t.Parallel()
	for _, way := range product(names) {
		if !told(t.Name(), way, names) {
			continue
		}
		var name []string
		for i, at := range way {
			name = append(name, names[i][at])
		}
		t.Run(strings.Join(name, ", "), func(t *testing.T) {
			t.Parallel()
			tell(t, way)
		})
	}
}

// product returns all ways. The index of the last choice changes fastest.
func product(names [][]string) [][]int {
	ways := [][]int{{}}
	for _, choices := range names {
		var longer [][]int
		for _, way := range ways {
			for at := range choices {
				longer = append(longer, append(slices.Clone(way), at))
			}
		}
		ways = longer
	}
	return ways
}

// told reports whether this run includes a way. `make test` includes one way of each test, which it
// picks by the length of the test's name. `make matrix` includes enough ways that each alternative
// occurs at least once. `make proof` includes all ways.
func told(test string, way []int, names [][]string) bool {
	first, most := 0, 0
	for _, choices := range names {
		most = max(most, len(choices))
	}
	if sandbox.Rounds(1, 0, 0) == 1 {
		first = len(test) % most
		most = first + 1
	}
	for n := first; n < most; n++ {
		is := true
		for i, at := range way {
			is = is && at == n%len(names[i])
		}
		if is {
			return true
		}
	}
	return sandbox.Long()
}

// inTurn runs a test at one crash point. `make proof` runs it with all ways. Otherwise, each point
// gets one way, and successive points use the ways in turn. killed reports whether unwind was
// killed in one of the runs.
func inTurn[W any](t *testing.T, at int, ways []W, tell func(t *testing.T, way W) (killed bool)) (killed bool) {
	t.Helper()
	for i, way := range ways {
		if sandbox.Sampled(sandbox.Rounds(len(ways), len(ways), 1), at/pointsApart(), i) {
			t.Run(nameOf(way), func(t *testing.T) { killed = tell(t, way) || killed })
		}
	}
	return killed
}

func namesOf[A any](choices []A) (names []string) {
	for _, c := range choices {
		names = append(names, nameOf(c))
	}
	return names
}

// nameOf returns the field "name" of a struct, or any other choice as text.
func nameOf(choice any) string {
	if v := reflect.ValueOf(choice); v.Kind() == reflect.Struct {
		return v.FieldByName("name").String()
	}
	return fmt.Sprint(choice)
}
