#!/bin/sh
# The deb and the rpm run this script after an installation or an upgrade. It restarts a running
# agent, which then installs the new plugin. On a node without an agent, run "unwindctl install".
if [ -d /run/systemd/system ]; then
	systemctl daemon-reload || true # a unit that fails must not leave the package half-installed
	systemctl try-restart unwind-agent.service || true
fi
