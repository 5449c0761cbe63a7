package ipam

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// TestCilium: which files of the queue are an attachment's. The names are the SHA-256 of
// "cni-attachment-id:a:eth0" and of {"container-id":"a"}.
func TestCilium(t *testing.T) {
	const (
		file120 = "efff10c8e9390ab4e795bf36c13dbb6ce43d0edaaab471debdc33642931a762d.delete"
		file119 = "30256168baf8c8b28db4376f81ca7e259669aa3a8f7f3af66019979abb00c6ab.delete"
	)
	both := []string{file119, file120}
	for _, tt := range []struct {
		name, ipam, containerID, ifname string
		files                           []string
		asked, queued                   bool
	}{
		{"1.20", "", "a", "eth0", []string{file120, "lockfile"}, true, true},
		{"1.20, another interface", "", "a", "net1", []string{file120}, true, false},
		{"1.19", "", "a", "eth0", []string{file119}, true, true},
		{"another container", "", "b", "eth0", both, true, false},
		{"no queue", "", "a", "eth0", nil, true, false},
		{"an IPAM plugin, queued", "other", "a", "eth0", both, true, true},
		{"an IPAM plugin, not queued", "other", "a", "eth0", nil, false, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			queue := filepath.Join(t.TempDir(), "deleteQueue")
			if tt.files != nil {
				check(t, os.Mkdir(queue, 0o755))
			}
			for _, name := range tt.files {
				files{name: ""}.Fill(t, queue)
			}
			held, asked, err := Cilium{}.Held(t.Context(), Query{Network: "cilium",
				ContainerID: tt.containerID, IfName: tt.ifname, IPAM: tt.ipam, Store: queue})
			if len(held) > 0 || asked != tt.asked || (err != nil) != tt.queued {
				t.Errorf("%v, asked %t, %v", held, asked, err)
			}
			if err != nil && !errors.Is(err, ErrQueued) {
				t.Error(err)
			}
		})
	}
}

// TestCiliumNoQueue: a file in place of the queue has no deletion. A queue that cannot be looked at
// may have one.
func TestCiliumNoQueue(t *testing.T) {
	dir := t.TempDir()
	files{"file": "", "loop": "link to loop"}.Fill(t, dir)
	held := func(queue string) error {
		_, _, err := Cilium{}.Held(t.Context(), Query{ContainerID: "a", IfName: "eth0", Store: filepath.Join(dir, queue)})
		return err
	}
	if err := held("file"); err != nil {
		t.Errorf("a file: %v", err)
	}
	if err := held("loop"); err == nil || errors.Is(err, ErrQueued) {
		t.Errorf("a loop of links: %v", err)
	}
}
