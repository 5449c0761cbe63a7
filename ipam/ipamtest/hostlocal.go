// Package ipamtest runs the reference plugin host-local on a pool of its own.
package ipamtest

import (
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

// Plugin is host-local, with the configuration of a bridge plugin that calls it.
type Plugin struct {
	*testing.T
	Config  string
	DataDir string
}

// New returns a Plugin with a data directory of its own. The first ADD creates the pool there. ipam
// contains additional keys of host-local's configuration. The test must run in a sandbox
// (sandbox.Need).
func New(t *testing.T, ipam string) *Plugin {
	p := &Plugin{T: t, DataDir: t.TempDir()}
	p.Config = fmt.Sprintf(`{"cniVersion": "1.0.0", "name": "podnet", "type": "bridge",
		"ipam": {"type": "host-local", "dataDir": %q, %s}}`, p.DataDir, ipam)
	return p
}

func (p *Plugin) Pool() string { return filepath.Join(p.DataDir, "podnet") }

// Command returns the command that runs host-local with a verb.
func (p *Plugin) Command(verb, containerID string) *exec.Cmd {
	p.Helper()
	_, file, _, _ := runtime.Caller(0)
	tools := filepath.Join(filepath.Dir(file), "../../.tools/cni")
	cmd := exec.Command(filepath.Join(tools, "host-local"))
	cmd.Env = []string{"CNI_COMMAND=" + verb, "CNI_CONTAINERID=" + containerID, "CNI_IFNAME=eth0",
		"CNI_PATH=" + tools, "CNI_NETNS=/run/netns/none", "CNI_NETNS_OVERRIDE=1"}
	cmd.Stdin = strings.NewReader(p.Config)
	return cmd
}

// Run runs host-local with a verb. It returns host-local's error, or "" if the verb succeeds.
func (p *Plugin) Run(verb, containerID string) (failed string) {
	p.Helper()
	out, err := p.Command(verb, containerID).Output()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		return string(out) + string(exit.Stderr)
	case err != nil:
		p.Fatalf("%v; run make tools", err)
	}
	return ""
}
