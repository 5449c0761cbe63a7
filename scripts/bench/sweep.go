package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// rounds is the number of parts into which benchSweep divides the pods. The two kinds take turns.
const rounds = 5

// benchSweep times the release of pods whose namespaces are gone: without unwind by one cnitool del
// for each pod, with unwind by unwindctl sweep. The chain is bridge with host-local, firewall,
// portmap.
func benchSweep(ctx context.Context, work string, pods int) error {
	plain, wrapped, err := sweepNetworks(work)
	if err != nil {
		return err
	}
	var p, w time.Duration
	for round := range rounds {
		for i := range pods / rounds {
			for _, n := range []*cnitool{plain, wrapped} {
				if err := n.forgotten(ctx, round*1000+i); err != nil {
					return err
				}
			}
		}
		if err := takenApart(ctx); err != nil {
			return err
		}
		start := time.Now()
		for i := range pods / rounds {
			if err := plain.run(ctx, "del", round*1000+i); err != nil {
				return err
			}
		}
		p += time.Since(start)
		start = time.Now()
		out, err := exec.CommandContext(ctx, "bin/unwindctl", "sweep", "--force", "--state-dir",
			work+"/sweep/state").CombinedOutput()
		w += time.Since(start)
		if err != nil {
			return fmt.Errorf("unwindctl sweep: %w: %s", err, out)
		}
		for _, n := range []*cnitool{plain, wrapped} {
			if err := n.nothingLeft(); err != nil {
				return err
			}
		}
	}
	pods = pods / rounds * rounds
	fmt.Printf("\n%d dead pods in %d rounds of bridge + firewall + portmap: cnitool del one by one "+
		"%.1f s, unwindctl sweep %.1f s, %.2f × as fast\n",
		pods, rounds, p.Seconds(), w.Seconds(), p.Seconds()/w.Seconds())
	return nil
}

// takenApart waits until the kernel has removed the veths of the deleted namespaces.
func takenApart(ctx context.Context) error {
	for ctx.Err() == nil {
		out, err := exec.CommandContext(ctx, "ip", "-o", "link", "show", "type", "veth").Output()
		if err != nil || len(strings.TrimSpace(string(out))) == 0 {
			return err
		}
		time.Sleep(50 * time.Millisecond)
	}
	return ctx.Err()
}

// cnitool is a network whose runtime is cnitool.
type cnitool struct{ name, work string }

func sweepNetworks(work string) (plain, wrapped *cnitool, err error) {
	work = filepath.Join(work, "sweep")
	for _, dir := range []string{"net.d", "netns", "cache"} {
		if err := os.MkdirAll(filepath.Join(work, dir), 0o700); err != nil {
			return nil, nil, err
		}
	}
	if err := os.MkdirAll("/var/lib/cni", 0o755); err != nil {
		return nil, nil, err
	}
	// cnitool caches its results there. The mount is visible only in this mount namespace.
	if err := unix.Mount(work+"/cache", "/var/lib/cni", "", unix.MS_BIND, ""); err != nil {
		return nil, nil, err
	}
	plugins := func(name, subnet string) string {
		return fmt.Sprintf(`
			{"type": "bridge", "bridge": "%[2]s", "isGateway": true,
				"ipam": {"type": "host-local", "subnet": "%[3]s", "dataDir": "%[1]s/ipam"}},
			{"type": "firewall"},
			{"type": "portmap", "backend": "iptables", "capabilities": {"portMappings": true}}`, work, name, subnet)
	}
	entry := fmt.Sprintf(`{"type": "unwind", "stateDir": "%s/state", "capabilities": {"portMappings": true},
		"chain": {"cniVersion": "1.0.0", "plugins": [%s]}}`, work, plugins("swept", "10.215.0.0/16"))
	for name, list := range map[string]string{"deleted": plugins("deleted", "10.216.0.0/16"),
		"swept": entry} {
		conflist := fmt.Sprintf(`{"cniVersion": "1.0.0", "name": %q, "plugins": [%s]}`, name, list)
		if err := os.WriteFile(filepath.Join(work, "net.d", name+".conflist"), []byte(conflist),
			0o600); err != nil {
			return nil, nil, err
		}
	}
	return &cnitool{"deleted", work}, &cnitool{"swept", work}, nil
}

func (n *cnitool) netns(i int) string { return fmt.Sprintf("%s/netns/%s-%d", n.work, n.name, i) }

// forgotten adds a pod with one host port, and removes its namespace without a DEL.
func (n *cnitool) forgotten(ctx context.Context, i int) error {
	path := n.netns(i)
	if err := netns(path); err != nil {
		return err
	}
	err := n.run(ctx, "add", i)
	return errors.Join(err, unix.Unmount(path, unix.MNT_DETACH), os.Remove(path))
}

func (n *cnitool) run(ctx context.Context, verb string, i int) error {
	cmd := exec.CommandContext(ctx, ".tools/bin/cnitool", verb, n.name, n.netns(i))
	bin, err := filepath.Abs("bin")
	if err != nil {
		return err
	}
	port := 10000
	if n.name == "swept" {
		port = 20000
	}
	cmd.Env = append(os.Environ(), "NETCONFPATH="+n.work+"/net.d",
		"CNI_PATH="+bin+":"+filepath.Dir(bin)+"/.tools/cni",
		fmt.Sprintf(`CAP_ARGS={"portMappings": [{"hostPort": %d, "containerPort": 80, "protocol": "tcp"}]}`, port+i))
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("cnitool %s %s: %w: %s", verb, n.netns(i), err, out)
	}
	return nil
}

// nothingLeft checks that the timed operations worked: no address is still assigned.
func (n *cnitool) nothingLeft() error {
	files, err := os.ReadDir(filepath.Join(n.work, "ipam", n.name))
	for _, f := range files {
		if _, notAddress := netip.ParseAddr(f.Name()); notAddress == nil {
			return fmt.Errorf("%s is still assigned in %s", f.Name(), n.name)
		}
	}
	return err
}
