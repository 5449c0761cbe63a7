#!/usr/bin/env bash
# Installs the Debian packages of missing commands, with apt and as root. If gcc does not find the
# headers of the C library, the script also installs these.
#
# usage: scripts/deps.sh COMMAND:PACKAGE...
set -euo pipefail

missing=()
for dep in "$@"; do
	command -v "${dep%:*}" >/dev/null || missing+=("${dep#*:}")
done
echo '#include <stdlib.h>' | gcc -E - >/dev/null 2>&1 || missing+=(libc6-dev)
[ ${#missing[@]} -gt 0 ] || exit 0
if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
	echo "error: missing: ${missing[*]}" >&2
	echo "hint: on Debian and as root, make installs these packages; elsewhere, install the equivalent packages" >&2
	exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install -y --no-install-recommends "${missing[@]}"
