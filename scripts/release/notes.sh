#!/usr/bin/env bash
# Prints the notes of a release: the lines that CHANGELOG.md has under its version, each item in one line, as a page
# that keeps line breaks needs it. A pre-release or an untagged build without lines of its own has those under
# "Unreleased".
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
	echo "error: CHANGELOG.md: no lines under $1" >&2
	echo "hint: give the lines under \"Unreleased\" the heading \"## $1\"" >&2
	exit 1
fi
echo "$notes"
