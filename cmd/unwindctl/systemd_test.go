package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// unitFiles returns the systemd units by name.
func unitFiles(t *testing.T) map[string]string {
	t.Helper()
	paths, err := filepath.Glob("internal/install/systemd/unwind-*")
	units := map[string]string{}
	for _, path := range paths {
		data, readErr := os.ReadFile(path)
		if readErr != nil {
			t.Fatal(readErr)
		}
		units[filepath.Base(path)] = string(data)
	}
	if err != nil || len(units) != 4 {
		t.Fatalf("units: %v (%v)", paths, err)
	}
	return units
}

// TestUnitsAreValid has systemd's own tool read the units.
func TestUnitsAreValid(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("systemd-analyze"); err != nil {
		t.Skip("no systemd-analyze")
	}
	dir := t.TempDir()
	args := []string{"verify", "--man=no"}
	for name, text := range unitFiles(t) {
		// The command has to be there. The units are not installed, so neither is it.
		text = strings.ReplaceAll(text, "/usr/local/bin/unwindctl", "/bin/true")
		path := filepath.Join(dir, name)
		check(t, os.WriteFile(path, []byte(text), 0o644))
		args = append(args, path)
	}
	out, err := exec.Command("systemd-analyze", args...).CombinedOutput()
	if err != nil || bytes.Contains(out, []byte("unwind-")) { // of other units it may say what it likes
		t.Errorf("%v\n%s", err, out)
	}
}

// TestUnitsStayOnTheHost: a service with a mount, PID or network namespace of its own can tell
// nothing, and many a setting makes one. So only settings that are known not to are used; and the
// boot is not held up for long.
func TestUnitsStayOnTheHost(t *testing.T) {
	t.Parallel()
	harmless := []string{"Type", "ExecStart", "SuccessExitStatus", "TimeoutStartSec", "TimeoutStopSec", "KillMode", "Restart", "RestartSec",
		"OOMPolicy", "LockPersonality", "RestrictRealtime", "RestrictSUIDSGID", "CapabilityBoundingSet"}
	for name, text := range unitFiles(t) {
		section, bounded := "", false
		for _, line := range strings.Split(text, "\n") {
			key, _, isSetting := strings.Cut(line, "=")
			switch {
			case strings.HasPrefix(line, "#"):
			case strings.HasPrefix(line, "["):
				section = line
			case section == "[Service]" && isSetting && !slices.Contains(harmless, key):
				t.Errorf("%s: %s: is it sure that it makes no namespace?", name, line)
			}
			bounded = bounded || key == "TimeoutStartSec" || line == "Type=exec"
		}
		if strings.HasSuffix(name, ".service") && !bounded {
			t.Errorf("%s: a oneshot service has no TimeoutStartSec by default", name)
		}
	}
}
