package ipam

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
)

// TestAWS reads checkpoints of every kind: one without the attachment is evidence, one that cannot
// be read is not, and one that is not there, or of another format, is no store.
func TestAWS(t *testing.T) {
	t.Parallel()
	one := func(network, id, ifname, addresses string) string {
		return fmt.Sprintf(`{"networkName": %q, "containerID": %q, "ifName": %q, %s}`, network, id, ifname, addresses)
	}
	file := func(entries ...string) string {
		return `{"version": "vpc-cni-ipam/1", "allocations": [` + strings.Join(entries, ",") + `]}`
	}
	a := one("aws", "a", "eth0", `"ipv4": "10.0.0.3"`)
	others := []string{one("aws", "b", "eth0", `"ipv4": "10.0.0.4"`), one("aws", "a", "eth1", `"ipv4": "10.0.0.5"`),
		one("other", "a", "eth0", `"ipv4": "10.0.0.6"`)}
	for _, tt := range []struct {
		name  string
		files files
		held  string
		asked bool
		fails string
	}{
		{name: "no file"},
		{name: "another format", files: files{"ipam.json": strings.Replace(file(a), "/1", "/2", 1)}},
		{name: "another format, of another form", files: files{"ipam.json": `{"version": "vpc-cni-ipam/2", "allocations": {}}`}},
		{name: "no format", files: files{"ipam.json": `{"allocations": []}`}},
		{name: "the attachment's", files: files{"ipam.json": file(append(others, a)...)}, held: "10.0.0.3", asked: true},
		{name: "others'", files: files{"ipam.json": file(others...)}, asked: true},
		{name: "none", files: files{"ipam.json": file()}, asked: true},
		{name: "two families", files: files{"ipam.json": file(one("aws", "a", "eth0", `"ipv4": "10.0.0.3", "ipv6": "fd00::3"`))},
			held: "10.0.0.3 fd00::3", asked: true},
		{name: "two entries", files: files{"ipam.json": file(a, one("aws", "a", "eth0", `"ipv4": "10.0.0.9"`))}, held: "10.0.0.3 10.0.0.9", asked: true},
		{name: "no address", files: files{"ipam.json": file(one("aws", "a", "eth0", `"x": 1`))}, asked: true, fails: "no valid address"},
		{name: "an odd entry", files: files{"ipam.json": file(`5`, `{"networkName": 5}`, a)}, held: "10.0.0.3", asked: true},
		{name: "null", files: files{"ipam.json": `{"version": "vpc-cni-ipam/1", "allocations": null}`}, asked: true, fails: "is missing or null"},
		{name: "no list", files: files{"ipam.json": `{"version": "vpc-cni-ipam/1", "allocations": {}}`}, asked: true, fails: "ipam.json"},
		{name: "no JSON", files: files{"ipam.json": `{`}, asked: true, fails: "ipam.json"},
		{name: "a folder", files: files{"ipam.json": "folder"}, asked: true, fails: "regular"},
		{name: "large", files: files{"ipam.json": file(a) + strings.Repeat(" ", maxCheckpoint)}, asked: true, fails: "more than"},
		{name: "almost too large", files: files{"ipam.json": file(a) + strings.Repeat(" ", maxCheckpoint-len(file(a)))}, held: "10.0.0.3", asked: true},
		{name: "another card", files: files{"ipam.json": file(), "ipam-nic-1.json": file(a)}, held: "10.0.0.3", asked: true},
		{name: "another card, and the first is broken", files: files{"ipam.json": "{", "ipam-nic-1.json": file(a)}, held: "10.0.0.3", asked: true},
		{name: "another card is broken", files: files{"ipam.json": file(others...), "ipam-nic-1.json": "{"}, asked: true, fails: "nic-1"},
		{name: "no card", files: files{"ipam-nic.json": file(a), "ipam-nic-1.txt": file(a)}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			tt.files.Fill(t, dir)
			q := Query{Network: "aws", ContainerID: "a", IfName: "eth0", Store: filepath.Join(dir, "ipam.json")}
			held, asked, err := AWS{}.Held(t.Context(), q)
			if got := strings.Trim(fmt.Sprint(held), "[]"); got != tt.held || asked != tt.asked {
				t.Errorf("held %v, asked %t; want %q, %t", held, asked, tt.held, tt.asked)
			}
			if (err != nil) != (tt.fails != "") || err != nil && (!strings.Contains(err.Error(), tt.fails) || errors.Is(err, ErrQueued)) {
				t.Errorf("%v; want %q", err, tt.fails)
			}
		})
	}
}
