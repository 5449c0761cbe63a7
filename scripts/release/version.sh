#!/usr/bin/env bash
# Prints the version of the commit that is checked out in the current directory. The version is the commit's tag, or
# else Go's pseudo-version (https://go.dev/ref/mod#pseudo-versions), which sorts after the last tag and before the next.
# With uncommitted changes, the version ends with -dirty, and sorts directly after the commit's own version. Go's
# suffix +dirty would not affect the order, and is invalid in an image's tag. Without a commit, the script prints dev.
#
# usage: scripts/release/version.sh
set -euo pipefail

describe() {
	git describe --tags --match 'v[0-9]*' "$@" 2>/dev/null || true
}

commit=$(TZ=UTC git log -1 --date=format-local:%Y%m%d%H%M%S --format=%cd-%H 2>/dev/null) || { echo dev; exit; }
commit=${commit:0:27} # with twelve digits of the hash
dirty=$(git describe --always --exclude='*' --dirty)
case $dirty in
*-dirty) commit+=-dirty ;;
*) describe --exact-match | grep . && exit ;;
esac

tag=$(describe --abbrev=0)
case $tag in
'') echo "v0.0.0-$commit" ;;
*-*) echo "$tag.0.$commit" ;; # a pre-release
*) echo "${tag%.*}.$((${tag##*.} + 1))-0.$commit" ;;
esac
