package main

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"cni-unwind/journal"
	"cni-unwind/plugin/record"
)

// agentMetrics are those that the agent serves, with their labels, sorted. What monitoring is built on
// is not renamed. Counters end in _total; ofAgent alone has those that the command does not print.
var agentMetrics, ofAgent = map[string][]string{
	"unwind_attachments":                             {"network", "state"},
	"unwind_build_info":                              {"goversion", "version"},
	"unwind_degraded_operations_total":               {"reason", "verb"},
	"unwind_duplicate_addresses_total":               nil,
	"unwind_events_total":                            {"result"},
	"unwind_in_use":                                  {"reason"},
	"unwind_ipam_addresses":                          {"family", "network", "pool", "set", "state"},
	"unwind_journal_readable":                        nil,
	"unwind_off_timestamp_seconds":                   {"by"},
	"unwind_oldest_pending_delete_timestamp_seconds": nil,
	"unwind_pending_deletes":                         {"network", "plugin"},
	"unwind_plugin_info":                             {"version"},
	"unwind_rollbacks_total":                         {"plugin", "result"},
	"unwind_sweep_last_success_timestamp_seconds":    nil,
	"unwind_swept_attachments_total":                 {"reason"},
	"unwind_unproven_deletes":                        {"network", "plugin"},
}, []string{"unwind_events_total", "unwind_in_use", "unwind_off_timestamp_seconds", "unwind_plugin_info"}

// counted is a node that has something for every metric.
func counted(t *testing.T) (n *machine, confDir string) {
	n = newMachine(t)
	confDir = n.crowd(3)
	err := n.store.Update(context.Background(), func(tx *journal.Tx) error {
		stuck, err := tx.Get(journal.Key{Network: network, ContainerID: "stuck", IfName: "eth0"})
		if err != nil {
			return err
		}
		stuck.Newest().Steps[0].Ended(journal.StepUnproven, "", 0)
		stuck.Newest().Steps[0].Unproven = "its address is not free"
		return errors.Join(tx.Put(stuck), tx.Count(record.CountRollbacks, "p", "complete"), tx.Count(record.CountSwept, "cut-off"),
			tx.Count(record.CountDuplicates), tx.Count(record.CountDegraded, "ADD", "busy"), tx.SetCounter(1, record.LastSweep))
	})
	if err != nil {
		t.Fatal(err)
	}
	return n, confDir
}

// TestMetrics: they are those that are promised, of names and help that Prometheus's own linter
// finds well, and no label names a pod, a container or an address.
func TestMetrics(t *testing.T) {
	t.Parallel()
	n, confDir := counted(t)
	text := n.must(n.ctl(confDir, "metrics"))
	problems, err := promlint.New(strings.NewReader(text)).Lint()
	if err != nil || len(problems) > 0 {
		t.Errorf("promlint: %v, %v", problems, err)
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	got := map[string][]string{}
	for name, f := range families {
		kind := "GAUGE"
		if strings.HasSuffix(name, "_total") {
			kind = "COUNTER"
		}
		if f.GetType().String() != kind {
			t.Errorf("%s is a %v", name, f.GetType())
		}
		got[name] = nil
		for _, l := range f.GetMetric()[0].GetLabel() {
			got[name] = append(got[name], l.GetName())
		}
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if strings.Contains(l.GetValue(), n.dir) {
					continue // the directory of a pool
				}
				for _, word := range []string{"live", "stuck", "stranger", "many", "default", "eth0", "10.9.0."} {
					if strings.Contains(l.GetValue(), word) && l.GetName() != "state" {
						t.Errorf("%s has the label %s=%q", name, l.GetName(), l.GetValue())
					}
				}
			}
		}
	}
	want := maps.Clone(agentMetrics)
	maps.DeleteFunc(want, func(name string, _ []string) bool { return slices.Contains(ofAgent, name) })
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// TestTextfile has a reader look all the time at a file that is written again and again: it sees it
// whole, or not at all.
func TestTextfile(t *testing.T) {
	t.Parallel()
	n, confDir := counted(t)
	dir := filepath.Join(n.dir, "textfile")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "unwind.prom")
	write := func() error { return n.ctl(confDir, "metrics", "--textfile", path).Run() }
	if err := write(); err != nil {
		t.Fatal(err)
	}
	whole, err := os.ReadFile(path)
	if err != nil || bytes.Count(whole, []byte("# HELP")) != len(agentMetrics)-len(ofAgent) {
		t.Fatalf("%v\n%s", err, whole)
	}
	written := make(chan error)
	go func() {
		var err error
		for range 20 {
			err = errors.Join(err, write())
		}
		written <- err
	}()
	for looks := 0; ; looks++ {
		select {
		case err := <-written:
			if err != nil || looks < 100 {
				t.Errorf("after %d looks: %v", looks, err)
			}
			if files, err := os.ReadDir(dir); err != nil || len(files) != 1 {
				t.Errorf("left: %v (%v)", files, err)
			}
			if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o644 {
				t.Errorf("node_exporter, which is not root, cannot read it: %v (%v)", info.Mode(), err)
			}
			return
		default:
			if got, err := os.ReadFile(path); err != nil || len(got) != len(whole) {
				t.Fatalf("%d of %d bytes are there (%v)", len(got), len(whole), err)
			}
		}
	}
}
