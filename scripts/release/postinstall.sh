#!/bin/sh
# The deb and the rpm run this script after an installation or an upgrade. It restarts a running
# agent, which then installs the new plugin. It reports files that systemd or a shell uses instead
# of the package's. dpkg sets DPKG_ROOT to the root directory, or to "" for /.
say() { echo "unwind: $*" >&2; }
units=
for unit in agent.service sweep.service sweep.timer sweep-boot.service; do
	path=$DPKG_ROOT/etc/systemd/system/unwind-$unit
	[ ! -f "$path" ] || units="$units $path"
done
[ -z "$units" ] || say "these units take precedence over this package's:$units; keep your changes with" \
	"systemctl edit, remove these files, then run systemctl daemon-reload and systemctl try-restart unwind-agent.service"
program=$DPKG_ROOT/usr/local/bin/unwindctl
[ ! -f "$program" ] || say "$program takes precedence over this package's /usr/bin/unwindctl; remove it"
active=
if [ -d "$DPKG_ROOT/run/systemd/system" ]; then
	systemctl daemon-reload || true # a unit that fails must not leave the package half-installed
	systemctl try-restart unwind-agent.service || true
	! systemctl is-active --quiet unwind-agent.service || active=yes
fi
[ -n "$active" ] ||
	say "unwind-agent.service is not active; to install or update the plugin, run unwindctl install (with the same flags as before)"
