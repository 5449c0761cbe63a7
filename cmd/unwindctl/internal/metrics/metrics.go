// Package metrics exports the state of the journal and the pools to Prometheus.
package metrics

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/cmd/unwindctl/internal/install"
	"cni-unwind/journal"
	"cni-unwind/plugin/record"
)

// Source is the source of the metrics.
type Source struct {
	Version string // of this program
	Scope   inspect.Scope
	Stderr  io.Writer      // of the dry run of a sweep
	InUse   install.Reason // "" if this program does not keep unwind installed
	Plugin  string         // the version of the plugin that is installed, "" if that is not known

	Process bool              // with client_golang's metrics of the process and of Go
	Events  map[string]uint64 // of Kubernetes, by result; nil if this program posts none
}

// Registry returns a registry that reads the journal and the pools at each collection. It calls
// failed with the errors of reading them.
func (s Source) Registry(ctx context.Context, failed func(error)) *prometheus.Registry {
	r := prometheus.NewPedanticRegistry()
	r.MustRegister(&collector{s, ctx, failed})
	return r
}

// Print prints the metrics in Prometheus's text format. It leaves out metrics that it cannot read,
// and returns the error. It prints nothing if it cannot read any.
func (s Source) Print(ctx context.Context, out io.Writer) error {
	var failed error
	from := prometheus.Gatherers{s.Registry(ctx, func(err error) { failed = err })}
	if s.Process {
		from = append(from, prometheus.DefaultGatherer)
	}
	families, err := from.Gather()
	if err != nil {
		return err
	}
	for _, f := range families {
		if _, err := expfmt.MetricFamilyToText(out, f); err != nil {
			return err
		}
	}
	return failed
}

// collector is a Source for the lifetime of ctx: Prometheus calls a collector without a context.
type collector struct {
	Source
	ctx    context.Context
	failed func(error)
}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("unwind_"+name, help, labels, nil)
}

// descs returns the description of every metric, by its name without unwind_.
func descs() map[string]*prometheus.Desc {
	return map[string]*prometheus.Desc{
		"attachments": desc("attachments", "Attachments in the journal.", "network", "state"),
		"pending_deletes": desc("pending_deletes",
			"Pending DELs of attachments that are no longer live.", "network", "plugin"),
		"unproven_deletes": desc("unproven_deletes",
			"DELs that passed although their address is not known to be free; included in the pending DELs.",
			"network", "plugin"),
		"oldest_pending_delete_timestamp_seconds": desc("oldest_pending_delete_timestamp_seconds",
			"Time since which the oldest attachment with pending DELs has had them; absent if there is "+
				"none."),
		"rollbacks_total": desc("rollbacks_total",
			"ADDs that failed and were undone, by the delegate that failed; result is complete or "+
				"pending.",
			"plugin", "result"),
		"swept_attachments_total": desc("swept_attachments_total",
			"Attachments released without the runtime's DEL.", "reason"),
		"sweep_last_success_timestamp_seconds": desc("sweep_last_success_timestamp_seconds",
			"Time when the last sweep of all networks finished, to the minute; absent if none has."),
		"duplicate_addresses_total": desc("duplicate_addresses_total",
			"Addresses assigned while another attachment was using them."),
		"degraded_operations_total": desc("degraded_operations_total",
			"ADDs and DELs that continued without the journal, as far as known.",
			"verb", "reason"),
		"ipam_addresses": desc("ipam_addresses",
			"Addresses in host-local's pools by range set; an ADD takes one address from each set. "+
				"Addresses outside the chain's ranges have the set none. State free is absent for these, "+
				"and for a set of 2^53 addresses or more.", "network", "pool", "set", "family", "state"),
		"in_use": desc("in_use",
			"Whether pods of this node go through unwind: 1 for the reason that applies, else 0.", "reason"),
		"plugin_info": desc("plugin_info", "The version of the installed plugin, always 1.",
			"version"),
		"off_timestamp_seconds": desc("off_timestamp_seconds",
			"Time since which unwind is switched off, and by whom; absent if it is on.", "by"),
		"events_total": desc("events_total",
			"Events that this program posted to Kubernetes, dropped because of the rate limit, or failed "+
				"to post.", "result"),
		"build_info": desc("build_info", "The version of this program, always 1.",
			"version", "goversion"),
		"journal_readable": desc("journal_readable",
			"Whether the journal is readable: 1 or 0."),
	}
}

// Describe sends the description of every metric.
func (c *collector) Describe(to chan<- *prometheus.Desc) {
	for _, d := range descs() {
		to <- d
	}
}

// Collect sends the current values. It leaves out what it cannot read; journal_readable and failed
// report that.
func (c *collector) Collect(to chan<- prometheus.Metric) {
	all := descs()
	gauge := func(name string, value float64, labels ...string) {
		to <- prometheus.MustNewConstMetric(all[name], prometheus.GaugeValue, value, labels...)
	}
	counter := func(name string, value uint64, labels ...string) {
		to <- prometheus.MustNewConstMetric(all[name], prometheus.CounterValue, float64(value),
			labels...)
	}
	gauge("build_info", 1, c.Version, runtime.Version())
	if c.InUse != "" {
		for _, reason := range install.Reasons {
			gauge("in_use", map[bool]float64{true: 1}[reason == c.InUse], string(reason))
		}
	}
	if c.Plugin != "" {
		gauge("plugin_info", 1, c.Plugin)
	}
	if off := install.ReadOff(c.Scope.StateDir); off != nil {
		gauge("off_timestamp_seconds", float64(off.Since.Unix()), off.By)
	}
	for result, n := range c.Events {
		counter("events_total", n, result)
	}
	err := c.collectJournal(gauge, counter)
	gauge("journal_readable", map[bool]float64{true: 1}[err == nil])
	if err := errors.Join(err, c.collectPools(gauge)); err != nil {
		c.failed(err)
	}
}

func (c *collector) collectJournal(gauge func(string, float64, ...string),
	counter func(string, uint64, ...string)) error {
	store := &journal.Store{Dir: c.Scope.StateDir}
	s, err := inspect.ReadSnapshot(c.ctx, store, nil)
	type count struct{ metric, network, label string }
	counts := map[count]float64{}
	var oldest float64
	for _, a := range s.Attachments {
		counts[count{"attachments", a.Network, string(a.State)}]++
		if !a.PendingDEL() {
			continue
		}
		for _, step := range a.Steps {
			counts[count{"pending_deletes", a.Network, step.Plugin}]++
			if step.State == journal.StepUnproven || step.ProvesNothing {
				counts[count{"unproven_deletes", a.Network, step.Plugin}]++
			}
		}
		if since := float64(a.Since.Unix()); oldest == 0 || since < oldest {
			oldest = since
		}
	}
	for of, n := range counts {
		gauge(of.metric, n, of.network, of.label)
	}
	if oldest > 0 {
		gauge("oldest_pending_delete_timestamp_seconds", oldest)
	}
	duplicates := uint64(0)
	for _, one := range s.Counters {
		switch labels := one.Labels; {
		case one.Name == record.CountRollbacks && len(labels) == 2:
			counter("rollbacks_total", one.Value, labels...)
		case one.Name == record.CountSwept && len(labels) == 1:
			counter("swept_attachments_total", one.Value, labels...)
		case one.Name == record.CountDegraded && len(labels) == 2:
			counter("degraded_operations_total", one.Value, labels...)
		case one.Name == record.CountDuplicates && len(labels) == 0:
			duplicates = one.Value
		case one.Name == record.LastSweep && len(labels) == 0:
			gauge("sweep_last_success_timestamp_seconds", float64(one.Value))
		}
	}
	if err == nil { // else it would seem to begin anew
		counter("duplicate_addresses_total", duplicates)
	}
	return errors.Join(append(s.Damaged, err)...)
}

func (c *collector) collectPools(gauge func(string, float64, ...string)) error {
	pools, err := inspect.ReadPools(c.ctx, term.Streams{Err: c.Stderr}, c.Scope)
	for _, p := range pools {
		for _, s := range p.Sets {
			set := "none"
			if s.Number != nil {
				set = strconv.Itoa(*s.Number)
			}
			states := map[string]int64{
				"live": int64(s.Live), "leaked": int64(s.Leaked),
				"ownerless": int64(s.Ownerless), "unknown": int64(s.Unknown),
			}
			if s.Free != nil {
				states["free"] = *s.Free
			}
			for state, n := range states {
				gauge("ipam_addresses", float64(n), p.Network, p.Dir, set, s.Family, state)
			}
		}
	}
	if err != nil {
		return fmt.Errorf("pools: %w", err)
	}
	return nil
}
