// Package systemd has the units that unwindctl install --systemd writes.
package systemd

import "embed"

// Units are the files beside this one.
//
//go:embed unwind-*
var Units embed.FS

// Program is the path of unwindctl in them.
const Program = "/usr/local/bin/unwindctl"
