// Package systemd contains the units that unwindctl install --systemd writes.
package systemd

import "embed"

// Units are the unit files in this directory.
//
//go:embed unwind-*
var Units embed.FS

// Program is the path of unwindctl in the units.
const Program = "/usr/local/bin/unwindctl"
