package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// problemDetector is a configuration of node-problem-detector's custom plugins, as far as the file
// has it: the keys that its docs/custom_plugin_monitor.md (v1.37) names.
type problemDetector struct {
	Plugin       string
	PluginConfig struct {
		Interval    string `json:"invoke_interval"`
		Timeout     string
		MaxOutput   int `json:"max_output_length"`
		Concurrency int
	}
	Source           string
	MetricsReporting bool
	Conditions       []struct{ Type, Reason, Message string }
	Rules            []struct {
		Type, Condition, Reason, Path, Timeout string
		Args                                   []string
	}
}

// TestNodeProblemDetector: the configuration is one that node-problem-detector takes, and what it
// runs exits with 1 on a node with an error, with 0 on one without, and with neither if it cannot
// look. The output is one line, shorter than where it would be cut.
func TestNodeProblemDetector(t *testing.T) {
	t.Parallel()
	var conf problemDetector
	data, err := os.ReadFile("../../scripts/deploy/node-problem-detector.json")
	check(t, err)
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(&conf); err != nil || len(conf.Rules) != 1 || len(conf.Conditions) != 1 {
		t.Fatalf("%+v: %v", conf, err)
	}
	rule := conf.Rules[0]
	interval, err := time.ParseDuration(conf.PluginConfig.Interval)
	timeout, timeoutErr := time.ParseDuration(conf.PluginConfig.Timeout)
	own, ownErr := time.ParseDuration(rule.Timeout)
	if err := errors.Join(err, timeoutErr, ownErr); err != nil || own > timeout || timeout > interval {
		t.Errorf("interval %s, timeouts %s and %s: %v", interval, timeout, own, err)
	}
	if conf.Plugin != "custom" || rule.Type != "permanent" || rule.Condition != conf.Conditions[0].Type || rule.Path != "/usr/local/bin/unwindctl" {
		t.Errorf("%+v", conf)
	}

	n := newAgentMachine(t)
	look := func(more ...string) outcome {
		args := slices.Concat(rule.Args, []string{"--conf-dir", n.ConfDir(), "--cni-bin-dir", n.BinDir(), "--state-dir", n.state}, more)
		out := n.run(n.unwindctl(args...))
		if strings.Count(out.stdout, "\n") > 1 || len(out.stdout) > conf.PluginConfig.MaxOutput {
			t.Errorf("stdout: %s", out.stdout)
		}
		return out
	}
	for _, plugin := range []string{"bridge", "host-local", "portmap"} {
		check(t, os.Symlink(filepath.Join(n.tools, "cni", plugin), filepath.Join(n.BinDir(), plugin)))
	}
	n.must(n.unwindctl("install", "--conf-dir", n.ConfDir(), "--cni-bin-dir", n.BinDir(),
		"--state-dir", n.state, "--binary", filepath.Join(n.dir, "unwind"), "--install-dir", ""))
	if out := look(); out.code != 0 || strings.HasPrefix(out.stdout, "error") {
		t.Errorf("sound: %+v", out)
	}
	n.Write(n.InConf("10-bridge.conflist"), "{")
	if out := look(); out.code != 1 || !strings.HasPrefix(out.stdout, "error: ") {
		t.Errorf("broken: %+v", out)
	}
	if out := look("--none"); out.code == 0 || out.code == 1 || out.stdout != "" {
		t.Errorf("unknown: %+v", out)
	}
}
