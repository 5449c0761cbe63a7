#!/bin/sh
# The deb and the rpm run this script before a removal (argument remove or 0) and before an upgrade.
# Before a removal, it stops the units, but leaves the plugin, because a running pod may need it.
case $1 in
remove | 0) ;;
*) exit 0 ;;
esac
if [ -d /run/systemd/system ]; then
	systemctl disable --now unwind-agent.service unwind-sweep.timer unwind-sweep-boot.service || true
fi
echo "unwind: if unwindctl install has installed the plugin, it stays, because pods may still need it; to remove it," \
	"install the package again, and run unwindctl uninstall" >&2
