#!/usr/bin/env bash
# Copies legal texts to DIRECTORY/MODULE@VERSION: those of Go's standard library, and of each module
# that the programs link on any platform. A module without a license is an error.
#
# usage: scripts/release/licenses.sh DIRECTORY
set -euo pipefail
to=$1

# texts copies the legal texts of one module.
texts() { # MODULE@VERSION SOURCE [find's arguments]
	local name=$1 source=$2
	mkdir -p "$to/$name"
	(cd "$source" && find . "${@:3}" \( -name testdata -o -name vendor \) -prune -o -type f ! -name '*.go' \
		-regextype posix-extended -iregex '.*/(licen[cs]e|copying|copyright|notice|patents)([-.][^/]*)?' -print0) |
		(cd "$source" && xargs -0r cp --parents --no-preserve=mode -t "$to/$name")
	compgen -G "$to/$name/*" >/dev/null || { echo "error: $name has no license" >&2; exit 1; }
}

to=$(mkdir -p "$to" && realpath "$to")
texts "std@$(go env GOVERSION)" "$(go env GOROOT)" -maxdepth 1
for platform in linux/amd64 linux/arm64 darwin/amd64 darwin/arm64 windows/amd64; do
	programs=./cmd/kubectl-unwind
	[[ $platform != linux/* ]] || programs=./cmd/...
	GOOS=${platform%/*} GOARCH=${platform#*/} CGO_ENABLED=0 go list -deps \
		-f '{{with .Module}}{{if not .Main}}{{.Path}}@{{.Version}} {{.Dir}}{{end}}{{end}}' "$programs"
done | sort -u | while read -r name source; do
	texts "$name" "$source"
done
