package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"cni-unwind/journal"
	"cni-unwind/plugin/record"
)

// wantMetrics has every metric with its type and labels. What monitoring is built on is not
// renamed.
const wantMetrics = `unwind_attachments GAUGE network state
unwind_build_info GAUGE goversion version
unwind_degraded_operations_total COUNTER reason verb
unwind_duplicate_addresses_total COUNTER
unwind_ipam_addresses GAUGE family network pool set state
unwind_journal_readable GAUGE
unwind_oldest_pending_delete_timestamp_seconds GAUGE
unwind_pending_deletes GAUGE network plugin
unwind_rollbacks_total COUNTER plugin result
unwind_sweep_last_success_timestamp_seconds GAUGE
unwind_swept_attachments_total COUNTER reason
unwind_unproven_deletes GAUGE network plugin
`

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
	var got []string
	for name, f := range families {
		line := []string{name, f.GetType().String()}
		for _, l := range f.GetMetric()[0].GetLabel() {
			line = append(line, l.GetName())
		}
		got = append(got, strings.Join(line, " ")+"\n")
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
	slices.Sort(got)
	if got := strings.Join(got, ""); got != wantMetrics {
		t.Errorf("got\n%s\nwant\n%s", got, wantMetrics)
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
	if err != nil || bytes.Count(whole, []byte("# HELP")) != strings.Count(wantMetrics, "\n") {
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

// TestMetricsOfAnotherRelease: what the journal's counters have of a later release does not fail
// the rest.
func TestMetricsOfAnotherRelease(t *testing.T) {
	t.Parallel()
	n, confDir := counted(t)
	err := n.store.Update(context.Background(), func(tx *journal.Tx) error {
		return errors.Join(tx.Count(record.CountRollbacks, "p", "complete", "more"), tx.Count(record.CountSwept), tx.Count("later", "x"),
			tx.Count(record.CountSwept, "a reason of later"), tx.Count(record.CountDuplicates, "more"), tx.Count(record.LastSweep, "more"))
	})
	if err != nil {
		t.Fatal(err)
	}
	text := n.must(n.ctl(confDir, "metrics"))
	for _, want := range []string{`unwind_swept_attachments_total{reason="a reason of later"} 1`, `unwind_duplicate_addresses_total 1`} {
		if !strings.Contains(text, want+"\n") {
			t.Errorf("no %s in\n%s", want, text)
		}
	}
	if got := strings.Count(text, "unwind_rollbacks_total{plugin=\"p\","); got != 1 {
		t.Errorf("%d rollbacks", got)
	}
}
