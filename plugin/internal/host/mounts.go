package host

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// mount is a line of /proc/PID/mountinfo (proc_pid_mountinfo(5)).
type mount struct{ id, root, point, options string }

// mountsOf returns the mounts in a process's mount namespace whose lines contain a text.
func mountsOf(proc, with string) (all []mount, err error) {
	f, err := os.Open(proc + "/mountinfo")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if !bytes.Contains(lines.Bytes(), []byte(with)) {
			continue
		}
		fields := strings.Fields(lines.Text()) // 36 35 98:0 ROOT MOUNTPOINT options … - nsfs nsfs rw
		if len(fields) < 5 {
			continue
		}
		// \040 for a blank
		point, err := strconv.Unquote(`"` + strings.ReplaceAll(fields[4], `"`, `\"`) + `"`)
		if err != nil {
			return all, fmt.Errorf("mount point %q: %w", fields[4], err)
		}
		all = append(all, mount{fields[0], fields[3], point, fields[len(fields)-1]})
	}
	return all, lines.Err()
}
