// Package env names the variables by which a test sets up the plugin under test. It is apart from
// that program because the tests of package plugin cannot import what imports plugin.
package env

import (
	"time"

	"cni-unwind/plugin/undo"
)

const (
	// KillAt makes the plugin kill itself at the n-th point that it passes, or at the n-th of a
	// name: "added 2".
	KillAt = "UNWIND_TEST_KILL_AT"
	// Killed is the path of a file that the plugin makes before it kills itself.
	Killed = "UNWIND_TEST_KILLED"
	// Hasty gives the plugin the budgets HastyBudgets.
	Hasty = "UNWIND_TEST_HASTY"
	// Patient gives other attachments during an ADD a minute.
	Patient = "UNWIND_TEST_PATIENT"
	// Prompt gives its STATUS the time that it has on a real node, rather than a minute.
	Prompt = "UNWIND_TEST_PROMPT"
	// NoProc makes the plugin work without /proc, in a mount namespace of its own.
	NoProc = "UNWIND_TEST_NO_PROC"
	// Cache is the path of libcni's cache.
	Cache = "UNWIND_TEST_CACHE"
	// UID makes the plugin drop root for that user.
	UID = "UNWIND_TEST_UID"
)

// HastyBudgets are short, for tests in which delegates hang.
var HastyBudgets = undo.Budgets{
	Undo: 3 * time.Second, Release: 2 * time.Second, LateDel: 1500 * time.Millisecond,
	HostLink: time.Second, Orphans: 500 * time.Millisecond, Stop: time.Second,
	GC: 4 * time.Second, Status: 2 * time.Second, Step: 200 * time.Millisecond, Reserve: 500 * time.Millisecond,
}
