// Package env names the variables by which a test sets up the plugin under test. It is apart from
// that program because the tests of package plugin cannot import what imports plugin.
package env

import (
	"reflect"
	"strings"
	"time"

	"cni-unwind/plugin/undo"
)

const (
	// KillAt makes the plugin kill itself at the n-th point that it passes, or at the n-th of a
	// name: "added 2".
	KillAt = "UNWIND_TEST_KILL_AT"
	// FailAt makes a commit of the journal fail there: before it writes at "commit 1", after all is
	// written at "committed 1".
	FailAt = "UNWIND_TEST_FAIL_AT"
	// Budgets sets budgets of the plugin: "Orphans=500ms Stop=1s". The others are Long.
	Budgets = "UNWIND_TEST_BUDGETS"
	// Hangs is a directory. A delegate that hangs makes the file COMMAND.CONTAINER.IFNAME.PLUGIN
	// there, and its time is over then, if it is limited at all. PLUGIN is the instance of a faulty
	// plugin, or else the plugin's type.
	Hangs = "UNWIND_TEST_HANGS"
	// Killed is the path of a file that the plugin makes before it kills itself.
	Killed = "UNWIND_TEST_KILLED"
	// NoProc makes the plugin work without /proc, in a mount namespace of its own.
	NoProc = "UNWIND_TEST_NO_PROC"
	// Cache is the path of libcni's cache.
	Cache = "UNWIND_TEST_CACHE"
	// UID makes the plugin drop root for that user.
	UID = "UNWIND_TEST_UID"
)

// Long are the budgets in tests. They end no delegate that works, however slow the machine is; a
// test sets those that it is about. Orphans and Exchange are those of a real node, because a
// delegate that outlives its unwind hangs in most tests, and what is missing stays so.
var Long = undo.Budgets{
	Undo: long, GC: long, Status: long, Release: long, LateDel: long, HostLink: long, Stop: long,
	Step: undo.DefaultBudgets.Step, Orphans: undo.DefaultBudgets.Orphans,
	Exchange: undo.DefaultBudgets.Exchange,
}

const long = 3 * time.Minute

// BudgetsOf returns Long, changed by a text in the format of Budgets.
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
