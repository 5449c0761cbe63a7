package check

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/template"
)

// alerts returns the rules of alerts.yaml by name. It fails the test if Prometheus' own checks
// reject the file.
func alerts(t *testing.T) map[string]rulefmt.Rule {
	t.Helper()
	groups, errs := rulefmt.ParseFile(chartDir+"/alerts.yaml", false, model.UTF8Validation, promQL, slog.Default())
	if len(errs) > 0 {
		t.Fatal(errs)
	}
	rules := map[string]rulefmt.Rule{}
	for _, group := range groups.Groups {
		for _, rule := range group.Rules {
			rules[rule.Alert] = rule
		}
	}
	return rules
}

// node is a two-hour series of a metric that every agent serves.
const node = `unwind_journal_readable{instance="a"} 1x120`

// TestAlerts tests each rule with series for which it must fire, and with series for which it must
// not fire. A series lasts two hours, with one value a minute.
func TestAlerts(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, alert string
		series      []string
		want        []string // the periods in which the rule fires, each with the alert's summary
	}{
		{"a DEL is pending", "UnwindDeletePending", []string{`unwind_oldest_pending_delete_timestamp_seconds{instance="a"} _x9 600x20 _x90`},
			[]string{"26m to 33m: A DEL on a has been pending for 16m 0s"}},
		{"another DEL is pending each time", "UnwindDeletePending", []string{`unwind_oldest_pending_delete_timestamp_seconds{instance="a"} 60+60x119`}, nil},
		{"a DEL waits for other DELs", "UnwindDeletePending",
			[]string{`unwind_waiting_deletes{instance="a", network="n", plugin="firewall", for="rules"} 1x120`}, nil},
		{"no DEL is pending", "UnwindDeletePending", []string{`unwind_oldest_pending_delete_timestamp_seconds{instance="a"} 0x120`}, nil},

		{"a set fills up", "UnwindPoolNearlyFull", []string{
			`unwind_ipam_addresses{instance="a", network="n", pool="p", set="0", family="IPv4", state="free"} 100 9x119`,
			`unwind_ipam_addresses{instance="a", network="n", pool="p", set="0", family="IPv4", state="leaked"} 0 1x119`,
			`unwind_ipam_addresses{instance="a", network="n", pool="p", set="0", family="IPv4", state="live"} 0 90x119`,
		}, []string{"6m to 120m: The pool p of n on a is 91% full, in its range set 0 (IPv4)"}},
		{"a set is exactly 90 % full", "UnwindPoolNearlyFull", []string{
			`unwind_ipam_addresses{instance="a", network="n", pool="p", set="0", family="IPv4", state="free"} 10x120`,
			`unwind_ipam_addresses{instance="a", network="n", pool="p", set="0", family="IPv4", state="live"} 90x120`,
		}, nil},
		{"a set is full for four minutes", "UnwindPoolNearlyFull", []string{
			`unwind_ipam_addresses{instance="a", network="n", pool="p", set="0", family="IPv4", state="free"} 10x9 0x4 10x104`,
			`unwind_ipam_addresses{instance="a", network="n", pool="p", set="0", family="IPv4", state="live"} 90x120`,
		}, nil},
		{"a full set next to one of 2^53 addresses or more, and one with free addresses", "UnwindPoolNearlyFull", []string{
			`unwind_ipam_addresses{instance="a", network="n", pool="p", set="0", family="IPv6", state="live"} 13x120`,
			`unwind_ipam_addresses{instance="a", network="n", pool="p", set="1", family="IPv4", state="live"} 13x120`,
			`unwind_ipam_addresses{instance="a", network="n", pool="p", set="1", family="IPv4", state="free"} 0x120`,
			`unwind_ipam_addresses{instance="a", network="n", pool="p", set="2", family="IPv4", state="live"} 13x120`,
			`unwind_ipam_addresses{instance="a", network="n", pool="p", set="2", family="IPv4", state="free"} 240x120`,
		}, []string{"5m to 120m: The pool p of n on a is 100% full, in its range set 1 (IPv4)"}},
		{"a set without an address", "UnwindPoolNearlyFull", []string{
			`unwind_ipam_addresses{instance="a", network="n", pool="p", set="0", family="IPv4", state="live"} 0x120`,
			`unwind_ipam_addresses{instance="a", network="n", pool="p", set="0", family="IPv4", state="free"} 0x120`,
		}, []string{"5m to 120m: The pool p of n on a is 100% full, in its range set 0 (IPv4)"}},
		{"addresses outside of the chain's ranges", "UnwindPoolNearlyFull", []string{
			`unwind_ipam_addresses{instance="a", network="n", pool="p", set="none", family="IPv4", state="live"} 13x120`,
			`unwind_ipam_addresses{instance="a", network="n", pool="p", set="none", family="IPv4", state="leaked"} 0x120`,
		}, nil},

		{"sweeps succeed", "UnwindSweepStale", []string{node, `unwind_sweep_last_success_timestamp_seconds{instance="a"} 0+60x120`}, nil},
		{"sweeps stop succeeding for a while", "UnwindSweepStale", []string{node,
			`unwind_sweep_last_success_timestamp_seconds{instance="a"} 0+60x20 1200x40 3660+60x59`},
			[]string{"36m to 61m: No sweep has succeeded on a for more than ten minutes, or ever"}},
		{"no sweep ever succeeded", "UnwindSweepStale", []string{node, `unwind_attachments{instance="a", network="n", state="live"} 1x120`,
			`unwind_attachments{instance="a", network="n", state="dead"} 1x120`, `unwind_sweep_last_success_timestamp_seconds{instance="b"} 0+60x120`},
			[]string{"5m to 120m: No sweep has succeeded on a for more than ten minutes, or ever"}},
		{"no pod has started through unwind yet", "UnwindSweepStale", []string{node}, nil},
		{"the first sweep succeeds after four minutes", "UnwindSweepStale", []string{node,
			`unwind_sweep_last_success_timestamp_seconds{instance="a"} _x3 240+60x116`}, nil},

		{"an address is assigned twice", "UnwindDuplicateAddress", []string{`unwind_duplicate_addresses_total{instance="a"} 0x30 1x89`},
			[]string{"31m to 44m: An address was assigned twice on a"}},
		{"an address was assigned twice before the first scrape", "UnwindDuplicateAddress", []string{`unwind_duplicate_addresses_total{instance="a"} _x30 1x89`},
			[]string{"30m to 44m: An address was assigned twice on a"}},
		{"no address was assigned twice", "UnwindDuplicateAddress", []string{`unwind_duplicate_addresses_total{instance="a"} 0x120`}, nil},
		{"long ago, and the agent's pod was replaced since", "UnwindDuplicateAddress", []string{
			`unwind_duplicate_addresses_total{instance="a", pod="unwind-1"} 1x60 stale`,
			`unwind_duplicate_addresses_total{instance="a", pod="unwind-2"} _x61 1x58`,
		}, []string{"0m to 14m: An address was assigned twice on a"}},

		{"long ago, and Prometheus was down since", "UnwindDuplicateAddress", []string{`unwind_duplicate_addresses_total{instance="a"} 1x20 _x40 1x59`},
			[]string{"0m to 14m: An address was assigned twice on a"}},

		{"a DEL without the journal", "UnwindDegraded", []string{
			`unwind_degraded_operations_total{instance="a", verb="DEL", reason="busy"} 2x30 3x89`,
			`unwind_degraded_operations_total{instance="a", verb="ADD", reason="full"} _x60 1x59`,
		}, []string{
			"0m to 14m: unwind on a ran DEL without its journal (busy)",
			"31m to 44m: unwind on a ran DEL without its journal (busy)",
			"60m to 74m: unwind on a ran ADD without its journal (full)",
		}},
		{"long ago, and the agent's pod was replaced since", "UnwindDegraded", []string{
			`unwind_degraded_operations_total{instance="a", verb="ADD", reason="full", pod="unwind-1"} 0 1x59 stale`,
			`unwind_degraded_operations_total{instance="a", verb="ADD", reason="full", pod="unwind-2"} _x61 1x58`,
		}, []string{"1m to 14m: unwind on a ran ADD without its journal (full)"}},
		{"long ago, and Prometheus was down since", "UnwindDegraded", []string{
			`unwind_degraded_operations_total{instance="a", verb="ADD", reason="full"} 1x20 _x40 1x59`,
		}, []string{"0m to 14m: unwind on a ran ADD without its journal (full)"}},
		{"never", "UnwindDegraded", []string{node}, nil},

		{"a disk becomes read-only", "UnwindJournalUnwritable", []string{`unwind_journal_writable{instance="a"} 1x30 0x29 1x60`},
			[]string{"36m to 60m: unwind on a cannot write its journal"}},

		{"on", "UnwindOff", []string{`unwind_status{instance="a", state="on"} 1x120`, `unwind_status{instance="a", state="refused"} 0x120`}, nil},
		{"off, with a series for each state", "UnwindOff", []string{
			`unwind_status{instance="a", state="on"} 1x9 0x50 1x59`,
			`unwind_status{instance="a", state="no-provider"} 0x9 1x20 0x89`,
			`unwind_status{instance="a", state="refused"} 0x30 1x29 0x59`,
			`unwind_status{instance="b", state="on"} 1x120`,
		}, []string{"25m to 60m: unwind may not be in use on a"}},
		{"off, with a series only for the current state", "UnwindOff", []string{
			`unwind_status{instance="a", state="on"} 1x9 stale`,
			`unwind_status{instance="a", state="off"} _x10 1x109`,
		}, []string{"25m to 120m: unwind may not be in use on a"}},
		{"off for 14 minutes", "UnwindOff", []string{
			`unwind_status{instance="a", state="on"} 1x9 0x14 1x95`,
			`unwind_status{instance="a", state="off"} 0x9 1x14 0x95`,
		}, nil},
		{"starting for half an hour", "UnwindOff", []string{`unwind_status{instance="a", state="starting"} 1x30 0x89`,
			`unwind_status{instance="a", state="on"} 0x30 1x89`}, []string{"15m to 30m: unwind may not be in use on a"}},
		{"an agent that installs nothing", "UnwindOff", []string{node, `up{instance="a", job="unwind"} 1x120`}, nil},
		{"the plugin is missing, which has its own alert", "UnwindOff", []string{
			`unwind_status{instance="a", state="on"} 0x120`, `unwind_status{instance="a", state="plugin-missing"} 1x120`}, nil},
		{"missing for three minutes, and for one", "UnwindPluginMissing", []string{
			`unwind_status{instance="a", state="plugin-missing"} 0x9 1x3 0x20 1x1 0x85`, `unwind_status{instance="a", state="on"} 0x120`},
			[]string{"12m to 13m: unwind's plugin is missing on a, and the agent cannot copy it"}},
		{"down for 15 minutes, and for nine", "UnwindRuntimeDown", []string{`unwind_runtime_up{instance="a"} 1x9 0x14 1x20 0x9 1x65`,
			`unwind_runtime_up{instance="b"} 1x120`}, []string{"20m to 24m: The container runtime on a does not return its list of pods"}},
		{"an agent that is down", "UnwindOff", []string{`up{instance="a", job="unwind"} 0x120`}, nil},

		{"an agent is down for half an hour", "UnwindAgentDown", []string{`up{instance="a", job="unwind"} 1x9 0x30 1x79`,
			`up{instance="b", job="unwind"} 1x120`, `up{instance="a", job="kubelet"} 0x120`}, []string{"25m to 40m: The agent on a is down"}},
		{"Prometheus has no agent as a target", "UnwindAgentDown", []string{`up{instance="a", job="unwind"} 1x60 stale`, `up{instance="a", job="kubelet"} 1x120`},
			[]string{"76m to 120m: The agent on every node is down"}},
		{"a node is removed", "UnwindAgentDown", []string{`up{instance="a", job="unwind"} 1x60 stale`, `up{instance="b", job="unwind"} 1x120`}, nil},

		{"the plugin is not upgraded with the agent", "UnwindPluginSkew", []string{
			`unwind_build_info{instance="a", version="v1", goversion="go1"} 1x10 stale`,
			`unwind_build_info{instance="a", version="v2", goversion="go1"} _x10 1x109`,
			`unwind_plugin_info{instance="a", version="v1"} 1x120`,
			`unwind_build_info{instance="b", version="v1", goversion="go1"} 1x120`,
		}, []string{"41m to 120m: The plugin on a has version v1, and the agent has another version"}},
		{"the agent is upgraded while no pod uses the plugin", "UnwindPluginSkew", []string{
			`unwind_build_info{instance="a", version="v2", goversion="go1"} 1x120`,
			`unwind_plugin_info{instance="a", version="v1"} 1x120`,
			`unwind_status{instance="a", state="off"} 1x20 0x99`, `unwind_status{instance="a", state="cilium-exclusive"} 0x20 1x20 0x79`,
			`unwind_status{instance="a", state="no-provider"} 0x40 1x20 0x59`, `unwind_status{instance="a", state="on"} 0x60 1x59`,
		}, []string{"92m to 120m: The plugin on a has version v1, and the agent has another version"}},
		{"the plugin is upgraded after the agent", "UnwindPluginSkew", []string{
			`unwind_build_info{instance="a", version="v1", goversion="go1"} 1x10 stale`,
			`unwind_build_info{instance="a", version="v2", goversion="go1"} _x10 1x109`,
			`unwind_plugin_info{instance="a", version="v1"} 1x30 stale`,
			`unwind_plugin_info{instance="a", version="v2"} _x30 1x89`,
		}, nil},

		{"leaked for more than an hour", "UnwindAddressesLeaked", []string{
			`unwind_ipam_addresses{instance="a", network="n", pool="p", set="0", family="IPv4", state="leaked"} 0x9 2x99 0x10`,
			`unwind_ipam_addresses{instance="a", network="n", pool="p", set="0", family="IPv4", state="empty"} 1x109 0x10`,
			`unwind_ipam_addresses{instance="a", network="n", pool="p", set="0", family="IPv4", state="live"} 9x120`,
		}, []string{"60m to 109m: 3 addresses of n on a belong to no pod (pool p)"}},
		{"leaked twice for less than an hour", "UnwindAddressesLeaked", []string{
			`unwind_ipam_addresses{instance="a", network="n", pool="p", set="0", family="IPv4", state="leaked"} 2x50 0x5 1x50 0x14`,
			`unwind_ipam_addresses{instance="a", network="n", pool="p", set="0", family="IPv4", state="live"} 9x120`,
		}, nil},

		{"a DEL is dropped", "UnwindDeletesDropped", []string{`unwind_dropped_deletes_total{instance="a", plugin="portmap"} 1x30 2x89`,
			`unwind_dropped_deletes_total{instance="a", plugin="sbr"} _x60 1x59`},
			[]string{"0m to 14m: unwind on a has dropped DELs of portmap", "31m to 44m: unwind on a has dropped DELs of portmap", "60m to 74m: unwind on a has dropped DELs of sbr"}},
		{"long ago, and the agent's pod was replaced since", "UnwindDeletesDropped", []string{
			`unwind_dropped_deletes_total{instance="a", plugin="sbr", pod="unwind-1"} 0 1x59 stale`,
			`unwind_dropped_deletes_total{instance="a", plugin="sbr", pod="unwind-2"} _x61 1x58`,
		}, []string{"1m to 14m: unwind on a has dropped DELs of sbr"}},
		{"a record is damaged, and repaired", "UnwindJournalUnreadable", []string{`unwind_journal_readable{instance="a"} 1x30 0x29 1x60`},
			[]string{"36m to 60m: unwind on a cannot read its whole journal"}},
		{"dead or unknown for more than an hour", "UnwindAttachmentsKept", []string{
			`unwind_attachments{instance="a", network="n", state="dead"} 12x40 0x80`, `unwind_attachments{instance="a", network="n", state="unknown"} 0x40 2x40 0x40`,
			`unwind_attachments{instance="a", network="n", state="live"} 9x120`,
		}, []string{"60m to 81m: 2 attachments of n on a are dead or unknown, and no sweep releases them"}},
		{"dead twice for less than an hour", "UnwindAttachmentsKept", []string{
			`unwind_attachments{instance="a", network="n", state="dead"} 1x50 0x5 1x50 0x14`, `unwind_attachments{instance="a", network="n", state="deleting"} 1x120`,
		}, nil},

		{"a plugin fails", "UnwindRollbacks", []string{
			`unwind_rollbacks_total{instance="a", plugin="istio-cni", result="complete"} 0+1x60 61x60`,
			`unwind_rollbacks_total{instance="a", plugin="istio-cni", result="pending"} 0x120`,
			`unwind_rollbacks_total{instance="a", plugin="portmap", result="complete"} 0x20 5x100`,
		}, []string{"26m to 65m: The plugin istio-cni on a keeps failing ADDs"}},
	} {
		t.Run(tt.alert+"/"+tt.name, func(t *testing.T) {
			t.Parallel()
			rule, ok := alerts(t)[tt.alert]
			if !ok {
				t.Fatal("there is no such rule")
			}
			equal(t, "the periods in which it fires", tt.want, firing(t, rule, scrape(t, tt.series...)))
		})
	}
}

// TestAlertsAreTested fails if alerts.yaml gets a new rule: add it to TestAlerts and to this list.
func TestAlertsAreTested(t *testing.T) {
	t.Parallel()
	want := []string{"UnwindAddressesLeaked", "UnwindAgentDown", "UnwindAttachmentsKept", "UnwindDegraded", "UnwindDeletePending", "UnwindDeletesDropped",
		"UnwindDuplicateAddress", "UnwindJournalUnreadable", "UnwindJournalUnwritable", "UnwindOff", "UnwindPluginMissing", "UnwindPluginSkew",
		"UnwindPoolNearlyFull", "UnwindRollbacks", "UnwindRuntimeDown", "UnwindSweepStale"}
	equal(t, "rules", want, slices.Sorted(maps.Keys(alerts(t))))
}

// firing returns the periods within two hours in which a rule fires, each with the alert's summary
// at the period's beginning. An alert fires once its expression has been true for the rule's whole
// "for". firing reimplements AlertingRule.Eval of Prometheus' package rules, because that package
// depends on the client libraries of all clouds.
func firing(t *testing.T, rule rulefmt.Rule, s scraped) []string {
	t.Helper()
	hold := int(time.Duration(rule.For) / step)
	var periods []string
	for _, series := range s.query(t, rule.Expr, 0, 120) {
		points := series.Floats
		for begin, end := 0, 0; begin < len(points); begin = end {
			for end = begin + 1; end < len(points) && minute(points[end]) == minute(points[end-1])+1; {
				end++
			}
			if first := begin + hold; first < end {
				texts := expand(t, rule.Annotations, promql.Sample{Metric: series.Metric, F: points[first].F})
				periods = append(periods, fmt.Sprintf("%dm to %dm: %s",
					minute(points[first]), minute(points[end-1]), texts["summary"]))
			}
		}
	}
	slices.Sort(periods)
	return periods
}

func minute(p promql.FPoint) int { return int(p.T / step.Milliseconds()) }

// expand returns the annotations as Prometheus would send them. It fails the test if a template
// uses a label that the alert lacks.
func expand(t *testing.T, annotations map[string]string, sample promql.Sample) map[string]string {
	t.Helper()
	defs := "{{$labels := .Labels}}{{$value := .Value}}"
	data := template.AlertTemplateData(sample.Metric.Map(), nil, "", sample)
	texts := map[string]string{}
	for name, text := range annotations {
		var err error
		texts[name], err = template.NewTemplateExpander(context.Background(), defs+text, name, data, 0, nil, nil,
			[]string{"missingkey=error"}).Expand()
		if err != nil {
			t.Errorf("%s: %v", text, err)
		}
	}
	return texts
}
