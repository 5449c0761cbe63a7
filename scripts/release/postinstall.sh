#!/bin/sh
# The deb and the rpm run this script after an installation or an upgrade. A running agent then puts
# the new plugin into use. On a node without an agent, unwindctl install does.
if [ -d /run/systemd/system ]; then
	systemctl daemon-reload || true # a unit that fails must not leave the package half-installed
	systemctl try-restart unwind-agent.service || true
fi
