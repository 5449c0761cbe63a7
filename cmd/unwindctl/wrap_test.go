package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	types100 "github.com/containernetworking/cni/pkg/types/100"
)

// TestWrappedRuns wraps the network of nerdctl and runs an ADD and a DEL through it, as a runtime
// does: the delegates are real.
func TestWrappedRuns(t *testing.T) {
	n := newMachine(t)
	x, err := os.ReadFile("../../testdata/conflists/nerdctl.conflist")
	if err != nil {
		t.Fatal(err)
	}
	x = bytes.ReplaceAll(x, []byte(`"type": "host-local"`), []byte(`"type": "host-local", "dataDir": "`+n.dir+`/ipam"`))
	path := filepath.Join(n.dir, "nerdctl-bridge.conflist")
	if err := os.WriteFile(path, x, 0o600); err != nil {
		t.Fatal(err)
	}
	n.must(home.command(n, filepath.Join(n.bin, "unwindctl"), "wrap", "--in-place", path))
	wrapped, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	wrapped = bytes.Replace(wrapped, []byte(`"type": "unwind",`), []byte(`"type": "unwind", "stateDir": "`+n.state+`",`), 1)
	if err := os.WriteFile(path, wrapped, 0o600); err != nil {
		t.Fatal(err)
	}
	list, err := libcni.NetworkConfFromFile(path)
	if err != nil {
		t.Fatal(err)
	}
	n.removeLink("nerdctl0")
	n.netns("web")
	runtime := libcni.NewCNIConfigWithCacheDir([]string{n.bin, filepath.Join(n.tools, "cni")}, filepath.Join(n.dir, "cache"), nil)
	container := &libcni.RuntimeConf{ContainerID: "web", NetNS: n.pin("web"), IfName: "eth0",
		CapabilityArgs: map[string]any{"portMappings": []map[string]any{{"hostPort": 18081, "containerPort": 80, "protocol": "tcp"}}}}
	result, err := runtime.AddNetworkList(context.Background(), list, container)
	if err != nil {
		t.Fatal(err)
	}
	if r, err := types100.GetResult(result); err != nil || len(r.IPs) != 1 || r.IPs[0].Address.String() != "10.4.0.2/24" {
		t.Errorf("%v, %v", r, err)
	}
	rules := func() string {
		return n.must(home.command(n, "iptables", "-t", "nat", "-S")) + n.must(home.command(n, "nft", "list", "ruleset"))
	}
	if !strings.Contains(rules(), "18081") {
		t.Errorf("the port is not mapped:\n%s", rules())
	}
	if err := runtime.CheckNetworkList(context.Background(), list, container); err != nil {
		t.Errorf("CHECK: %v", err)
	}
	if err := runtime.DelNetworkList(context.Background(), list, container); err != nil {
		t.Fatal(err)
	}
	if ids := n.ids(); len(ids) != 0 || strings.Contains(rules(), "18081") {
		t.Errorf("after the DEL: %v\n%s", ids, rules())
	}
	n.must(home.command(n, filepath.Join(n.bin, "unwindctl"), "unwrap", "--in-place", path))
	if back, err := os.ReadFile(path); err != nil || !bytes.Equal(back, x) {
		t.Errorf("unwrapped: %v\n%s", err, back)
	}
}
