package main

import (
	"fmt"
	"slices"
	"strings"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/doctor"
	"cni-unwind/cmd/unwindctl/internal/install"
)

// exit is an exit code, and its meaning for some commands.
type exit struct {
	commands string // separated by spaces; "" for each command without its own row for this code
	code     int
	meaning  string
}

// exits are the exit codes of all commands. They are part of the help texts and of the man pages.
var exits = []exit{
	{"", 0, "success"},
	{"doctor", 0, "no problem; with --fail-on: no problem of that severity or worse"},
	{"check", 0, "the network works"},
	{"sweep", 0, "no DEL failed, and no state is unknown"},
	{"", term.ExitError, "something failed, was not found, could not be read, or remains to be done"},
	{"doctor", term.ExitError, "doctor failed; with --fail-on also: a problem of that severity or " +
		"worse"},
	{"check", term.ExitError, "check could not run"},
	{"sweep", term.ExitError, "a DEL failed or was not attempted, an attachment's state is " +
		"unknown, sweep kept attachments because too many seem dead, or no pod can start because " +
		"unwind's plugin is missing"},
	{"", term.ExitUsage, "usage error; nothing was done"},
	{"unwindctl", exitWarning, "doctor, check: the worst problem is a warning (with --fail-on: 0 " +
		"or 1)"},
	{"doctor", exitWarning, "the worst problem is a warning"},
	{"check", exitWarning, "the network works, with a warning"},
	{"unwindctl", exitFailure, "doctor, check: the worst problem is an error (with --fail-on: 1)"},
	{"doctor", exitFailure, "the worst problem is an error"},
	{"check", exitFailure, "the network does not work, or pods do not start through unwind"},
	{"unwindctl", install.ExitUnrecorded, "off, uninstall: pods start without unwind, but the next " +
		"agent that starts will install it again"},
	{"off uninstall", install.ExitUnrecorded, "pods start without unwind, but the file \"off\" " +
		"cannot be written: the next agent that starts will install unwind again"},
	{"unwindctl", install.ExitKept, "uninstall: kept some files, because they are still needed"},
	{"uninstall", install.ExitKept, "kept some files, because they are still needed; later, run " +
		"unwindctl sweep and unwindctl uninstall again"},
	{"", term.ExitInterrupted, "interrupted"},
	{"doctor check", term.ExitInterrupted, "interrupted, so there is no result"},
}

// The exit codes of doctor and check if the worst problem is a warning or a failure.
const (
	exitWarning = 2 + int(doctor.Warning)
	exitFailure = 2 + int(doctor.Failure)
)

// exitsOf returns the exit codes of a command.
func exitsOf(command string) (of []exit) {
	for _, e := range exits {
		isOwn := slices.Contains(strings.Fields(e.commands), command)
		last := len(of) - 1
		switch {
		case isOwn && last >= 0 && of[last].code == e.code:
			of[last] = e
		case isOwn, e.commands == "":
			of = append(of, e)
		}
	}
	return of
}

// describeExits returns the exit codes of a command, as the end of a help text.
func describeExits(command string) string {
	lines := "The exit codes:"
	for _, e := range exitsOf(command) {
		lines += fmt.Sprintf("\n  %-5d%s", e.code, e.meaning)
	}
	return lines
}
