#!/usr/bin/env bash
# Prints the notes of a release: the lines under its version in CHANGELOG.md. Each item becomes one line, because the
# release page keeps line breaks. For a pre-release or an untagged build that has no lines in CHANGELOG.md, the script
# prints the lines under "Unreleased".
#
# usage: scripts/release/notes.sh VERSION
set -euo pipefail
changelog=$(dirname "${BASH_SOURCE[0]}")/../../CHANGELOG.md

section() { # heading
	awk -v heading="$1" '
		/^## / { inside = $2 == heading; next }
		!inside || /^$/ { next }
		/^  / { sub(/^ +/, ""); item = item " " $0; next }
		{ if (item) print item; item = $0 }
		END { if (item) print item }
	' "$changelog"
}

notes=$(section "$1")
if [[ -z $notes && ! $1 =~ ^v[0-9.]+$ ]]; then
	notes=$(section Unreleased)
fi
if [[ -z $notes ]]; then
	echo "error: CHANGELOG.md has no lines under $1" >&2
	echo "hint: move the lines under \"## Unreleased\" to the heading \"## $1\"" >&2
	exit 1
fi
echo "$notes"
