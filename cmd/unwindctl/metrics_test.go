package main

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"net/netip"
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

// agentMetrics maps each of the agent's metrics to its labels, in alphabetical order. Never rename
// a metric, because users' dashboards and alerts contain its name. Counters end in _total. ofAgent
// lists the metrics that need an agent or a runtime, or exist only while unwind is off.
var agentMetrics, ofAgent = map[string][]string{
	"unwind_attachments":                             {"network", "state"},
	"unwind_build_info":                              {"goversion", "version"},
	"unwind_degraded_operations_total":               {"reason", "verb"},
	"unwind_dropped_deletes_total":                   {"plugin"},
	"unwind_duplicate_addresses_total":               nil,
	"unwind_status":                                  {"state"},
	"unwind_ipam_addresses":                          {"family", "network", "pool", "set", "state"},
	"unwind_journal_readable":                        nil,
	"unwind_journal_writable":                        nil,
	"unwind_off_timestamp_seconds":                   {"by"},
	"unwind_oldest_pending_delete_timestamp_seconds": nil,
	"unwind_pending_deletes":                         {"network", "plugin"},
	"unwind_plugin_info":                             {"version"},
	"unwind_rollbacks_total":                         {"plugin", "result"},
	"unwind_runtime_up":                              nil,
	"unwind_sweep_last_success_timestamp_seconds":    nil,
	"unwind_swept_attachments_total":                 {"reason"},
	"unwind_waiting_deletes":                         {"for", "network", "plugin"},
}, []string{"unwind_status", "unwind_off_timestamp_seconds", "unwind_plugin_info", "unwind_runtime_up"}

// counted returns a node with a value for every metric.
func counted(t *testing.T) (n *machine, confDir string) {
	n = newMachine(t)
	confDir = n.crowd(3)
	err := n.store.Update(context.Background(), func(tx *journal.Tx) error {
		stuck, err := tx.Get(journal.Key{Network: network, ContainerID: "stuck", IfName: "eth0"})
		if err != nil {
			return err
		}
		frees, port := stuck.Steps[0], stuck.Steps[0] // the first waits for the second
		frees.Index, port.Index = len(stuck.Steps), len(stuck.Steps)+1
		port.ADD, port.Config = journal.AddPassed, json.RawMessage(`{"runtimeConfig": {"portMappings": [{}]}}`)
		stuck.Steps = append(stuck.Steps, frees, port)
		stuck.Got.Claims = append(stuck.Got.Claims, journal.Claim{Address: netip.MustParseAddr("10.9.9.9"), Step: frees.Index})
		return tx.Put(stuck)
	})
	err = errors.Join(err, n.store.NoteSweep(), n.store.Record(journal.Event{Count: []string{record.CountRollbacks, "p", "complete"}},
		journal.Event{Count: []string{record.CountSwept, "interrupted"}}, journal.Event{Count: []string{record.CountDuplicates}},
		journal.Event{Count: []string{record.CountDropped, "p"}}, journal.Event{Count: []string{record.CountDegraded, "ADD", "busy"}}))
	check(t, err)
	return n, confDir
}

// TestMetrics: `unwindctl metrics` prints exactly the metrics in agentMetrics that are not in
// ofAgent. Prometheus's linter accepts their names and help texts, and no label contains a pod, a
// container or an address.
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
	check(t, err)
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
