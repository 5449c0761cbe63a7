package install

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/mod/semver"

	"cni-unwind/plugin/netconf"
)

// CompareReleases compares two versions by the rules of semantic versioning, which order releases,
// pre-releases and the pseudo-versions of untagged builds. Others, such as dev, cannot be compared.
func CompareReleases(a, b string) (order int, known bool) {
	if !semver.IsValid(a) || !semver.IsValid(b) {
		return 0, false
	}
	return semver.Compare(a, b), true
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
