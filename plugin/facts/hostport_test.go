package facts

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"cni-unwind/plugin/tristate"
	"cni-unwind/testdata/sandbox"
)

// TestForwardsTo: a rule of portmap is seen by the address alone, and by the whole address, with each
// backend and family, until portmap's DEL has passed.
func TestForwardsTo(t *testing.T) {
	sandbox.Need(t)
	for _, backend := range []string{"iptables", "nftables"} {
		for _, to := range []string{"10.99.0.2", "fd99::2"} {
			t.Run(backend+" "+to, func(t *testing.T) {
				address := netip.MustParseAddr(to)
				want := func(want tristate.Value) {
					t.Helper()
					if got, err := ForwardsTo(t.Context(), address); got != want || err != nil {
						t.Errorf("%v, %v, want %v", got, err, want)
					}
					next := netip.MustParseAddr(to + "2") // of which the other is the beginning
					if got, err := ForwardsTo(t.Context(), next); got != tristate.No || err != nil {
						t.Errorf("%s: %v, %v", next, got, err)
					}
				}
				want(tristate.No)
				portmap(t, "ADD", backend, address)
				want(tristate.Yes)
				portmap(t, "DEL", backend, address)
				want(tristate.No)
			})
		}
	}
}

// TestForwardsToUnknown: whoever cannot list rules says so, and a missing program has made none.
func TestForwardsToUnknown(t *testing.T) {
	for name, test := range map[string]struct {
		programs map[string]string
		want     tristate.Value
	}{
		"no program":             {nil, tristate.Unknown},
		"iptables alone":         {map[string]string{"iptables-save": ""}, tristate.No},
		"nft alone":              {map[string]string{"nft": ""}, tristate.No},
		"iptables fails":         {map[string]string{"iptables-save": "exit 1", "nft": ""}, tristate.Unknown},
		"nft fails":              {map[string]string{"iptables-save": "", "nft": "exit 1"}, tristate.Unknown},
		"one fails, one has it":  {map[string]string{"iptables-save": "echo '-A CNI-DN-1 -j DNAT --to-destination 10.99.0.2:80'", "nft": "exit 1"}, tristate.Yes},
		"a chain of another":     {map[string]string{"iptables-save": "echo '-A KUBE-SEP-1 -j DNAT --to-destination 10.99.0.2:80'"}, tristate.No},
		"a table of another":     {map[string]string{"nft": "[ $2 = tables ] && echo table ip nat || echo dnat to 10.99.0.2:80"}, tristate.No},
		"the table goes at once": {map[string]string{"nft": "[ $2 = tables ] && echo table ip cni_hostport"}, tristate.Unknown},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for program, script := range test.programs {
				if err := os.WriteFile(filepath.Join(dir, program), []byte("#!/bin/sh\n"+script+"\n"), 0o700); err != nil {
					t.Fatal(err)
				}
			}
			t.Setenv("PATH", dir)
			got, err := ForwardsTo(t.Context(), netip.MustParseAddr("10.99.0.2"))
			if got != test.want || (err != nil) != (got == tristate.Unknown) {
				t.Errorf("%v, %v, want %v", got, err, test.want)
			}
		})
	}
}

// portmap runs a verb of the plugin for a container with an address and host port 8555.
func portmap(t *testing.T, command, backend string, address netip.Addr) {
	t.Helper()
	tools, err := filepath.Abs("../../.tools/cni")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(filepath.Join(tools, "portmap"))
	cmd.Env = append(os.Environ(), "CNI_COMMAND="+command, "CNI_CONTAINERID=forwarded", "CNI_IFNAME=eth0", "CNI_NETNS=/proc/self/ns/net", "CNI_PATH="+tools)
	cmd.Env = append(cmd.Env, "CNI_NETNS_OVERRIDE=1")
	cmd.Stdin = strings.NewReader(fmt.Sprintf(`{"cniVersion": "1.0.0", "name": "ports", "type": "portmap", "backend": %q,
		"runtimeConfig": {"portMappings": [{"hostPort": 8555, "containerPort": 80, "protocol": "tcp"}]},
		"prevResult": {"cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "sandbox": "/proc/self/ns/net"}],
			"ips": [{"address": "%s/%d", "interface": 0}]}}`, backend, address, address.BitLen()))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("portmap %s: %v\n%s", command, err, out)
	}
}
