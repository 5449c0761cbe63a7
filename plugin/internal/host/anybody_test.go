package host

import (
	"bufio"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"testing"

	"cni-unwind/testdata/sandbox"
)

// TestAnybodys: a network namespace of this process's user namespace counts, also where that is a
// container's. One of a user namespace below does not.
func TestAnybodys(t *testing.T) {
	sandbox.Need(t)
	const inContainer = "UNWIND_TEST_IN_CONTAINER"
	for address, command := range map[string][]string{
		"127.8.0.1": {"--net"}, "127.8.0.2": {"--user", "--map-root-user", "--net"},
	} {
		cmd := exec.Command("unshare", append(command, "sh", "-ec", "ip address add "+address+"/32 dev lo; echo; exec sleep 600")...)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		cmd.Stderr = os.Stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		})
		if _, err := bufio.NewReader(out).ReadByte(); err != nil {
			t.Fatalf("%q: %v", command, err)
		}
	}
	all, err := (&View{}).All(slog.Default())
	has := func(address string) bool {
		return slices.ContainsFunc(all, func(i Interface) bool {
			return slices.Contains(i.Addresses, netip.MustParseAddr(address))
		})
	}
	if err != nil || !has("127.8.0.1") || has("127.8.0.2") {
		t.Errorf("its own: %t, of a user namespace below: %t (%v)", has("127.8.0.1"), has("127.8.0.2"), err)
	}
	if os.Getenv(inContainer) != "" {
		return
	}
	cmd := exec.Command("unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
		"/proc/self/exe", "-test.run=^TestAnybodys$", "-test.count=1", "-test.v")
	if cmd.Args[len(cmd.Args)-4], err = os.Executable(); err != nil {
		t.Fatal(err)
	}
	cmd.Env = append(os.Environ(), inContainer+"=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("in a container: %v\n%s", err, out)
	}
}
