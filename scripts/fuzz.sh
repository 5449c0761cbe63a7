#!/usr/bin/env bash
# fuzz.sh TIME: lets each fuzz target run for a time, such as 10s. The targets are what go test lists. Inputs that failed go into the
# package's testdata/fuzz; keep them there, with the fix.
set -euo pipefail

for package in $(go list ./...); do
	listed=$(go test -list '^Fuzz' "$package")
	for target in $(grep '^Fuzz' <<<"$listed" || true); do
		echo "$package $target"
		if out=$(go test -run '^$' -fuzz "^$target\$" -fuzztime "$1" -fuzzminimizetime 10x "$package" 2>&1); then
			tail -n 1 <<<"$out"
			continue
		fi
		echo "$out"
		# Before Go 1.27 a run may fail as its time ends, with "context deadline exceeded" and no input (golang/go#75804).
		case $out in
		*'Failing input'* | *panic*) exit 1 ;;
		*'    context deadline exceeded'*) ;;
		*) exit 1 ;;
		esac
	done
done
