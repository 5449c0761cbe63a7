// Package env names the environment variables that configure a plugin under test. It is separate
// from the other test helpers because tests of package plugin cannot import a package that imports
// plugin.
package env

import (
	"reflect"
	"strings"
	"time"

	"cni-unwind/plugin/undo"
)

const (
	// KillAt makes the plugin kill itself with SIGKILL at a crash point (see undo.Env). "2" means the
	// second of all crash points, and "added 2" means the second crash point named "added".
	KillAt = "UNWIND_TEST_KILL_AT"
	// FailAt makes a commit of the journal fail. With "commit 1", the first commit fails before it
	// writes anything. With "committed 1", the first commit fails after it has written everything.
	FailAt = "UNWIND_TEST_FAIL_AT"
	// Budgets changes some of the time budgets in Long. An example is "Children=500ms Stop=1s".
	Budgets = "UNWIND_TEST_BUDGETS"
	// Hangs is a directory. A delegate that hangs creates the file COMMAND.CONTAINER.IFNAME.PLUGIN
	// there. If the delegate has a deadline, unwind then behaves as if the deadline had passed. PLUGIN
	// is the configured "instance" of testdata/faulty, or the type of any other plugin.
	Hangs = "UNWIND_TEST_HANGS"
	// Killed is the path of a file that the plugin creates before it kills itself.
	Killed = "UNWIND_TEST_KILLED"
	// NoProc makes the plugin work without /proc, in a mount namespace of its own.
	NoProc = "UNWIND_TEST_NO_PROC"
	// Cache is the path of libcni's cache.
	Cache = "UNWIND_TEST_CACHE"
	// UID makes the plugin run as the user with this ID instead of root.
	UID = "UNWIND_TEST_UID"
)

// Long contains the time budgets in tests. Most are so long that no working delegate is killed,
// even on a slow machine. A test shortens the budgets that it is about. Step, which is a minimum,
// keeps its default. So do Children and Exchange, because many tests wait until one of them is
// over. They wait for Children if a delegate's child hangs after unwind was killed, and for
// Exchange if a file or a plugin is missing.
var Long = undo.Budgets{
	Undo: long, GC: long, Status: long, Behind: long, Release: long, HostLink: long, Stop: long, Unread: long, Recorded: long,
	Step: undo.DefaultBudgets.Step, Children: undo.DefaultBudgets.Children,
	Exchange: undo.DefaultBudgets.Exchange,
}

const long = 3 * time.Minute

// BudgetsOf returns Long with the changes that text lists in the format of Budgets.
func BudgetsOf(text string) undo.Budgets {
	b := Long
	for field := range strings.FieldsSeq(text) {
		name, text, _ := strings.Cut(field, "=")
		d, err := time.ParseDuration(text)
		if err != nil {
			panic(err)
		}
		reflect.ValueOf(&b).Elem().FieldByName(name).SetInt(int64(d))
	}
	return b
}
