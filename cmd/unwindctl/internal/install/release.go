package install

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"cni-unwind/plugin/netconf"
)

// releasePattern matches a version as git describe has it: that of a release or a pre-release, and
// how many commits came after it.
var releasePattern = regexp.MustCompile(
	`^v?(\d+)\.(\d+)\.(\d+)(?:-((?:alpha|beta|rc)[.\d]*))?(?:-(\d+)-g[0-9a-f]+)?$`)

// CompareReleases compares two versions. They cannot be compared if one is of no release, such as
// dev, or if they are of different pre-releases of one release.
func CompareReleases(a, b string) (order int, known bool) {
	x, y := releasePattern.FindStringSubmatch(a), releasePattern.FindStringSubmatch(b)
	if x == nil || y == nil {
		return 0, false
	}
	number := func(text string) int { n, _ := strconv.Atoi(text); return n }
	for i := 1; i <= 3; i++ {
		if order := cmp.Compare(number(x[i]), number(y[i])); order != 0 {
			return order, true
		}
	}
	switch {
	case x[4] == y[4]:
		return cmp.Compare(number(x[5]), number(y[5])), true
	case x[4] == "":
		return 1, true
	case y[4] == "":
		return -1, true
	}
	return 0, false
}

// versionOf returns the version in what a plugin says of itself, "" if it is not unwind.
func versionOf(about string) string {
	_, rest, _ := strings.Cut(about, "CNI plugin "+netconf.Name+" ")
	version, _, _ := strings.Cut(rest, ":")
	return version
}

// KeepsInstalled returns why an agent leaves the plugin that is installed as it is, "" if it may put
// its own in the place of that: an agent that is older than an install does not undo it. A plugin
// that does not run, or is not unwind, is not kept.
func (s Setup) KeepsInstalled(ctx context.Context) (why string, err error) {
	from, err := s.binary()
	if err != nil {
		return "", err
	}
	to := filepath.Join(s.BinDir, netconf.Name)
	if own, err := os.Open(from); err == nil {
		same := sameContent(own, to)
		if _ = own.Close(); same {
			return "", nil
		}
	}
	there, _, err := AskVersion(ctx, to)
	if err != nil || !strings.Contains(there, netconf.Name) {
		return "", nil //nolint:nilerr // it is of no use as it is
	}
	own, _, err := AskVersion(ctx, from)
	if err != nil {
		return "", err
	}
	theirs, ours := versionOf(there), versionOf(own)
	switch order, known := CompareReleases(theirs, ours); {
	case !known:
		return fmt.Sprintf("%s (%s) and this agent's (%s) cannot be compared: unwindctl install "+
			"replaces it", to, theirs, ours), nil
	case order > 0:
		return fmt.Sprintf("%s (%s) is newer than this agent's (%s)", to, theirs, ours), nil
	}
	return "", nil
}
