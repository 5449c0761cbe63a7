package install

import (
	"context"
	"fmt"
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

// PluginVersion returns the version of the plugin that is installed, "" if there is none that says.
func (s Setup) PluginVersion(ctx context.Context) string {
	about, _, _ := AskVersion(ctx, s.plugin())
	return versionOf(about)
}

// KeepsInstalled returns the reason why an agent keeps the installed plugin, of version theirs, or
// "" if it may replace it. An agent does not replace a newer plugin. A plugin that does not run, or
// is not unwind, has no version and is replaced.
func (s Setup) KeepsInstalled(theirs, about string) (why string) {
	own := versionOf(about)
	switch order, known := CompareReleases(theirs, own); {
	case theirs == "" || theirs == own:
		return ""
	case !known:
		return fmt.Sprintf("%s (%s) and this agent's (%s) cannot be compared; --allow-downgrade or "+
			"unwindctl install replaces it", s.plugin(), theirs, own)
	case order > 0:
		return fmt.Sprintf("%s (%s) is newer than this agent's (%s): --allow-downgrade replaces it",
			s.plugin(), theirs, own)
	}
	return ""
}
