package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// reported is what a report contains: the text of each file by its name, without the directory.
func reported(t *testing.T, archive []byte) (files map[string]string, names []string) {
	t.Helper()
	files = map[string]string{}
	unzipped, err := gzip.NewReader(bytes.NewReader(archive))
	check(t, err)
	for r := tar.NewReader(unzipped); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files, names
		}
		check(t, err)
		text, err := io.ReadAll(r)
		check(t, err)
		_, name, _ := strings.Cut(h.Name, "/")
		if files[name], names = string(text), append(names, name); h.Mode != 0o600 {
			t.Errorf("%s has mode %o", h.Name, h.Mode)
		}
	}
}

// secrets are in the conflist, in libcni's cache, and in a plugin's error.
var secrets = []string{"t0ken-of-calico", "pa55word", "client-key-data: LS0tLS1C", "MIIEowIBAAKCAQ", "987654321987", "u53r-pw", "eyJhbGciOi.eyJpc3M.c2ln", "in-cni-args"}

// TestReport: a report contains what its help says, and no secret, even if parts of it fail.
func TestReport(t *testing.T) {
	if !apart(t) {
		return
	}
	n := newCheckedNode(t, "10.78.0.9")
	secretive := fmt.Sprintf(`{"type": "calico", "etcd_key_file": "/etc/calico/etcd.key", "kubernetes": {"kubeconfig": "/etc/cni/net.d/calico-kubeconfig",
		"k8s_auth_token": %q}, "policy": {"credentials": {"user": "x", "value": %q}}, "kubeconfig": %q, "ca": "-----BEGIN CERTIFICATE-----\n%s\n-----END CERTIFICATE-----",
		"secretNumber": %s, "url": "https://admin:%s@etcd:2379", "args": ["a", "b", %q]}`, secrets[0], secrets[1], "users:\n- "+secrets[2], secrets[3], secrets[4], secrets[5], secrets[6])
	conflist := fmt.Sprintf(`{"cniVersion": "1.0.0", "name": %q, "plugins": [%s, %s]}`, network, n.chain, secretive)
	check(t, os.WriteFile(n.conf("10-podnet.conflist"), []byte(conflist), 0o600))
	check(t, os.WriteFile(n.conf("20-broken.conflist"), []byte(`{"token": "`+secrets[0]), 0o600))
	check(t, os.MkdirAll(cacheDir, 0o700))
	cached := filepath.Join(cacheDir, network+"-pod-eth0")
	check(t, os.WriteFile(cached, fmt.Appendf(nil, `{"kind": "cniCacheV1", "networkName": %q, "containerId": "pod", "ifName": "eth0",
		"config": %q, "cniArgs": [["K8S_POD_NAME", "web"], ["TOKEN", %q]], "result": {"ips": [{"address": "10.78.0.7/24"}]}}`,
		network, base64.StdEncoding.EncodeToString([]byte(conflist)), secrets[7]), 0o600))
	t.Cleanup(func() { _ = os.Remove(cached) })
	n.netns("says")
	n.plan(map[string]string{"ADD": "fail", "DEL": "fail"})
	n.chain = strings.Replace(n.chain, `"instance": "p"`, fmt.Sprintf(`"instance": %q`, secrets[0]), 1)
	check(t, os.WriteFile(filepath.Join(n.dir, "plan.json"), []byte(`{"*": {"ADD": "fail"}}`), 0o600))
	n.verb(home, "ADD", "says", n.pin("says")) // the error of the plugin contains the token

	args := []string{"report", "--conf-dir", n.conf(""), "--cni-bin-dir", n.plugin("")}
	cmd := n.unwindctl(args...)
	cmd.Dir = t.TempDir()
	out := n.run(cmd)
	paths := glob(t, cmd.Dir+"/unwind-report-*-*.tar.gz")
	if out.code != 1 || len(paths) != 1 || !regexp.MustCompile(`(?m)^error: /\S+/20-broken.conflist: left out, because it is not valid JSON, and may contain secrets$`).
		MatchString(out.stderr) {
		t.Fatalf("%+v\n%q", out, paths)
	}
	if info, err := os.Stat(paths[0]); err != nil || info.Mode() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	archive, err := os.ReadFile(paths[0])
	check(t, err)
	files, names := reported(t, archive)
	for name, want := range map[string][]string{
		"versions.txt":                         {"unwindctl dev", "kernel ", "plugin in " + n.plugin("") + ": dev", "PRETTY_NAME="},
		"doctor.txt":                           {"checks passed."},
		"doctor.json":                          {`"severity": "ok"`},
		"list.txt":                             {"podnet", "live"},
		"list.json":                            {`"attachments": [`},
		"ipam.txt":                             {"10.78.0.2"},
		"ipam.json":                            {`"pools": [`},
		"history.txt":                          {"rolled-back", "REDACTED ADD refused"},
		"history.json":                         {`"events": [`},
		"iptables-save.txt":                    {"*nat", "CNI-FORWARD"},
		"ip6tables-save.txt":                   {"*filter"},
		"nft.txt":                              {"table"},
		"cache.json":                           {`"K8S_POD_NAME",`, `"web"`, `"10.78.0.7/24"`, `"type": "bridge"`, cached},
		"errors.txt":                           {"20-broken.conflist"},
		"conflists" + n.conf("00-unwind.json"): {`"type": "unwind"`},
		"conflists" + n.conf("10-podnet.conflist"): {`"etcd_key_file": "/etc/calico/etcd.key"`, `"kubeconfig": "/etc/cni/net.d/calico-kubeconfig"`,
			`"k8s_auth_token": "REDACTED"`, `"kubeconfig": "REDACTED"`, `"ca": "REDACTED"`, `"secretNumber": "REDACTED"`, `"url": "REDACTEDetcd:2379"`, `"user": "REDACTED"`},
	} {
		for _, text := range want {
			if !strings.Contains(files[name], text) {
				t.Errorf("%s lacks %q:\n%s", name, text, files[name])
			}
		}
	}
	for name, text := range files {
		for _, secret := range secrets {
			if strings.Contains(text, secret) {
				t.Errorf("%s contains %q", name, secret)
			}
		}
	}
	var shown []string
	for _, m := range regexp.MustCompile(`(?m)^ *\d+  (\S+)$`).FindAllStringSubmatch(out.stdout, -1) {
		shown = append(shown, m[1])
	}
	if !slices.Equal(shown, names) || !strings.Contains(out.stdout, "\nWrote "+filepath.Base(paths[0])+". ") {
		t.Errorf("%s\ndoes not list %q", out.stdout, names)
	}

	check(t, os.Remove(n.conf("20-broken.conflist")))
	out = n.run(n.unwindctl(append(args, "-o", paths[0])...))
	if unchanged, _ := os.ReadFile(paths[0]); out.code != 1 || !bytes.Equal(unchanged, archive) || !strings.Contains(out.stderr, "file exists\nhint: choose another") {
		t.Errorf("a file that exists: %+v", out)
	}
	out = n.run(n.unwindctl(append(args, "-o", "-")...))
	if files, _ := reported(t, []byte(out.stdout)); out.code != 0 || len(files) != len(names)-1 || strings.Contains(out.stderr, "error") {
		t.Errorf("%d, %d files\n%s", out.code, len(files), out.stderr)
	}
	n.damageJournal()
	out = n.run(n.unwindctl(append(args, "-o", "-")...))
	files, _ = reported(t, []byte(out.stdout))
	if out.code != 1 || !strings.Contains(out.stderr, "error: list.txt: ") || !strings.Contains(files["errors.txt"], "list.txt: ") ||
		!strings.Contains(files["versions.txt"], "kernel") || !strings.Contains(files["doctor.txt"], "error ") {
		t.Errorf("a damaged journal: %d\n%s", out.code, out.stderr)
	}
}

func (n *checkedNode) damageJournal() {
	n.Helper()
	check(n, os.WriteFile(n.store.Path(), bytes.Repeat([]byte("x"), 1<<16), 0o600))
}
