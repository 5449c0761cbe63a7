#!/usr/bin/env bash
# deps.sh COMMAND:PACKAGE...: installs, with Debian's apt and as root, the packages of the commands that are missing. gcc also needs
# the C library's headers.
set -euo pipefail

missing=()
for dep in "$@"; do
	command -v "${dep%:*}" >/dev/null || missing+=("${dep#*:}")
done
echo '#include <stdlib.h>' | gcc -E - >/dev/null 2>&1 || missing+=(libc6-dev)
[ ${#missing[@]} -gt 0 ] || exit 0
if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
	echo "error: missing: ${missing[*]}" >&2
	echo "hint: on Debian and as root, make installs these packages; elsewhere, install their like" >&2
	exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install -y --no-install-recommends "${missing[@]}"
