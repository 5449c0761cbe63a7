package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/journal/journaltest"
	"cni-unwind/plugin/plugintest/nodetest"
)

// age matches a table cell with an age, which may change between two runs.
var age = regexp.MustCompile(` +[0-9]+[sm] +`)

// TestColours: on a terminal, doctor prints severities in color, unless NO_COLOR is set. With
// --watch, doctor clears the screen before each repetition. Output to a pipe has no escape
// sequences.
func TestColours(t *testing.T) {
	t.Parallel()
	n := newMachine(t)
	run := func(env string, args ...string) string {
		term, stdout := nodetest.NewTerminal(t, 0)
		cmd := n.unwindctl(append([]string{"doctor", "-v", "--conf-dir", n.dir + "/none", "--cni-bin-dir", n.dir, "--state-dir", n.state}, args...)...)
		cmd.Env = append(cmd.Environ(), "TERM=xterm", env)
		cmd.Stdout = stdout
		check(t, cmd.Start())
		lines := 1 + 2*len(args)
		eventually(t, "the last line", func() bool { return strings.Count(term.String(), "1 error, ") >= lines })
		_ = cmd.Process.Signal(unix.SIGINT)
		_ = cmd.Wait()
		return term.String()
	}
	const coloured = "\x1b[31merror\x1b[0m  network "
	if text := run("NO_COLOR="); !strings.Contains(text, coloured) || !strings.Contains(text, "\x1b[32mok\x1b[0m     ") {
		t.Errorf("on a terminal: %q", text)
	}
	if text := run("NO_COLOR=1"); strings.Contains(text, "\x1b") {
		t.Errorf("with NO_COLOR: %q", text)
	}
	if text := run("NO_COLOR=1", "--watch"); strings.Count(text, "\x1b[H\x1b[2J") < 3 || !strings.HasPrefix(text, "\x1b[H\x1b[2J") {
		t.Errorf("with --watch: %q", text)
	}
	if out := n.run(n.unwindctl("doctor", "--conf-dir", n.dir+"/none", "--cni-bin-dir", n.dir)); strings.Contains(out.stdout, "\x1b") {
		t.Errorf("piped: %q", out.stdout)
	}
}

// dead adds dead attachments, and sets the faulty plugin's mode for their DELs.
func (n *machine) dead(many int, mode string) {
	n.Helper()
	n.netns("d")
	n.add(home, "d", n.pin("d"))
	e, d := n.entry("d"), n.entry("d")
	err := n.store.Update(context.Background(), func(tx *journal.Tx) error {
		e.Added.Host.BootID = "earlier"
		for i := range many {
			e.ContainerID, e.Number, e.State = fmt.Sprintf("d-%d", i), 0, journal.Live
			if err := journaltest.PutIn(tx, e); err != nil {
				return err
			}
		}
		return tx.Delete(d)
	})
	check(n, err)
	n.plan(map[string]string{"DEL": mode})
}

// TestTables: on a terminal, each table fits the terminal's width. In a pipe, or with -o wide,
// nothing is cut.
func TestTables(t *testing.T) {
	t.Parallel()
	n := newMachine(t)
	n.dead(3, "fail")
	confDir := n.crowd(2)
	for _, tt := range []struct {
		width int
		whole string // a text that must not be cut
		args  []string
	}{
		{80, "faulty (tried 1×, code", []string{"list"}}, {80, "faulty: p ADD refused\n", []string{"history"}},
		{120, "faulty: p ADD refused\n", []string{"history"}}, {80, "", []string{"sweep", "--dry-run"}},
		{80, "", []string{"doctor", "--cni-bin-dir", n.dir}},
		{80, "", []string{"list", "-o", "wide"}},
	} {
		args, width := tt.args, tt.width
		piped := n.run(n.ctl(confDir, args...)).stdout
		term, stdout := nodetest.NewTerminal(t, uint16(width))
		cmd := n.ctl(confDir, args...)
		cmd.Env, cmd.Stdout = append(cmd.Environ(), "NO_COLOR=1"), stdout
		_ = cmd.Run()
		lines := strings.Count(piped, "\n")
		eventually(t, "the table", func() bool { return strings.Count(term.String(), "\n") >= lines })
		shown := strings.ReplaceAll(term.String(), "\r\n", "\n")
		if slices.Contains(args, "wide") {
			if age.ReplaceAllString(shown, "") != age.ReplaceAllString(piped, "") {
				t.Errorf("%v: on a terminal\n%s\npiped\n%s", args, shown, piped)
			}
			continue
		}
		for line := range strings.Lines(shown) {
			line = strings.TrimSpace(line)
			if chars := utf8.RuneCountInString(line); chars > width && !strings.HasSuffix(line, ".") { // only sentences may be longer
				t.Errorf("%v: %d characters on %d columns: %s", args, chars, width, line)
			}
		}
		if !strings.Contains(shown, tt.whole) {
			t.Errorf("%v on %d columns: no %q in\n%s", args, width, tt.whole, shown)
		}
		if !strings.Contains(shown, "is cut to fit") && args[0] != "doctor" { // doctor wraps its texts
			t.Errorf("%v: nothing is cut:\n%s\npiped:\n%s", args, shown, piped)
		}
	}
}

// onTerminal returns the output of a command on a terminal of this width.
func (n *machine) onTerminal(width uint16, cmd *exec.Cmd) string {
	n.Helper()
	term, stdout := nodetest.NewTerminal(n, width)
	cmd.Env, cmd.Stdout, cmd.Stderr = append(cmd.Environ(), "TERM=xterm", "NO_COLOR=", "LC_ALL=C"), stdout, stdout
	_ = cmd.Run()
	_, err := stdout.WriteString("the end")
	check(n, err)
	eventually(n, "the end", func() bool { return strings.HasSuffix(term.String(), "the end") })
	return strings.ReplaceAll(strings.TrimSuffix(term.String(), "the end"), "\r\n", "\n")
}

var colour = regexp.MustCompile("\x1b\\[[0-9]+m")

// TestLines: on a terminal of 80 columns, commands and their help texts break long lines between
// words, and print states in color.
func TestLines(t *testing.T) {
	t.Parallel()
	n := newMachine(t)
	confDir := n.crowd(1)
	commands := [][]string{
		{"ipam", "\x1b[31m1 leaked\x1b[0m"}, {"ipam", "-o", "wide", "  \x1b[31mleaked\x1b[0m  "}, {"list", "  \x1b[32mlive\x1b[0m "}, {"list", "  \x1b[33mrolling-back\x1b[0m "},
		{"show", "many", "\x1b[32mlive\x1b[0m: its"}, {"show", "stuck", "\x1b[33mrolling-back\x1b[0m for "}, {"show", "stuck", "\x1b[31mdead\x1b[0m: "},
		{"off", "--dry-run", "--conf-dir", confDir, "--cni-bin-dir", n.dir, ""}, {"uninstall", "--dry-run", "--conf-dir", confDir, "--cni-bin-dir", n.dir, ""},
		{"--help", ""}, {"show", "no/such/attachment/at/all", "hint: "},
	}
	for _, cmd := range rootCommand().Commands() {
		commands = append(commands, []string{cmd.Name(), "--help", "Usage:"})
	}
	for _, args := range commands {
		args, want := args[:len(args)-1], args[len(args)-1]
		cmd := n.unwindctl(args...)
		if !slices.Contains(args, "--help") {
			cmd = n.ctl(confDir, args...)
		}
		shown := n.onTerminal(80, cmd)
		if !strings.Contains(shown, want) {
			t.Errorf("%v: no %q in %q", args, want, shown)
		}
		if slices.Contains(args, "wide") {
			continue
		}
		for line := range strings.Lines(shown) {
			line = strings.TrimSpace(colour.ReplaceAllString(line, ""))
			if chars := utf8.RuneCountInString(line); chars > 80 && strings.Contains(line, " ") {
				t.Errorf("%v: %d characters: %s", args, chars, line)
			}
		}
	}
}

// reported returns the contents of a report's files, by name, and the names in the report's order.
// The names lack the top directory.
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

// secrets lists the secrets that TestReport puts into the conflist, libcni's cache and a plugin's
// error.
var secrets = []string{"t0ken-of-calico", "pa55word", "client-key-data: LS0tLS1C", "MIIEowIBAAKCAQ", "987654321987", "u53r-pw", "eyJhbGciOi.eyJpc3M.c2ln", "in-cni-args", "in-environment"}

// TestReport: a report contains the parts that its help text lists, and no secret. If a part fails,
// the report contains the others.
func TestReport(t *testing.T) {
	if !apart(t) {
		return
	}
	n := newCheckedNode(t, "10.78.0.9")
	secretive := fmt.Sprintf(`{"type": "calico", "etcd_key_file": "/etc/calico/etcd.key", "kubernetes": {"kubeconfig": "/etc/cni/net.d/calico-kubeconfig",
		"k8s_auth_token": %q}, "policy": {"credentials": {"user": "x", "value": %q}}, "kubeconfig": %q, "ca": "-----BEGIN CERTIFICATE-----\n%s\n-----END CERTIFICATE-----",
		"secretNumber": %s, "url": "https://admin:%s@etcd:2379", "args": ["a", "b", %q], "env": [{"name": "DB_PASSWORD", "value": %q}]}`, secrets[0], secrets[1], "users:\n- "+secrets[2], secrets[3], secrets[4], secrets[5], secrets[6], secrets[8])
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
	n.verb(home, "ADD", "says", n.pin("says")) // the plugin's error contains the token

	args := []string{"report", "--conf-dir", n.conf(""), "--cni-bin-dir", n.plugin("")}
	cmd := n.unwindctl(args...)
	cmd.Dir = t.TempDir()
	out := n.run(cmd)
	paths := glob(t, cmd.Dir+"/unwind-report-*-*.tar.gz")
	if out.code != 1 || len(paths) != 1 || !regexp.MustCompile(`(?m)^error: /\S+/20-broken.conflist: left out: it is not valid JSON, so secrets in it cannot be redacted$`).
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
	if !slices.Equal(shown, names) || !strings.Contains(out.stdout, "\nWrote "+paths[0]+". ") {
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
