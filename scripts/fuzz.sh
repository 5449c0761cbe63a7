#!/usr/bin/env bash
# Runs each fuzz target of the module for the given time, such as 10s. An input that fails is
# written to the package's testdata/fuzz: commit it with the fix.
#
# usage: scripts/fuzz.sh TIME
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
		# Before Go 1.27, a run that finds no failing input may end with the error "context deadline
		# exceeded" (golang/go#75804). That is not a failure of the target.
		case $out in
		*'Failing input'* | *panic*) exit 1 ;;
		*'    context deadline exceeded'*) ;;
		*) exit 1 ;;
		esac
	done
done
