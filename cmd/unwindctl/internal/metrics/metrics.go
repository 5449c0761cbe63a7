// Package metrics exports the state of the journal and the pools to Prometheus.
package metrics

import (
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/cmd/unwindctl/internal/install"
	"cni-unwind/plugin/record"
)

// Source contains the data of the metrics.
type Source struct {
	Version string          // this program's version
	Report  *inspect.Report // nil before the first one
	// Counters are the report's counters, which cover only the events that are still in the history.
	// The agent uses its own counters instead, which never decrease.
	Counters inspect.Counters
	Off      *install.OffState // nil while unwind is on
	Status   install.Reason    // "" if this program does not keep unwind installed
	Plugin   string            // the version of the installed plugin, "" if unknown
}

// Registry returns a registry that collects the metrics of a source at each scrape. It leaves out
// metrics whose data the report could not read.
func Registry(source func() Source) *prometheus.Registry {
	r := prometheus.NewPedanticRegistry()
	r.MustRegister(collector(source))
	return r
}

type collector func() Source

// Describe implements prometheus.Collector. It describes no metric, so the registry checks metrics
// only when it gathers them.
func (collector) Describe(chan<- *prometheus.Desc) {}

func (source collector) Collect(to chan<- prometheus.Metric) {
	(&collection{Source: source(), to: to}).collect()
}

// helps contains each metric's help text and labels. The keys are the names without "unwind_".
var helps = map[string][]string{
	"attachments": {"Attachments in the journal, by their state in unwindctl list.",
		"network", "state"},
	"pending_deletes": {"Pending DELs that failed or have not run yet.",
		"network", "plugin"},
	"waiting_deletes": {"Pending DELs that cannot run yet. The label \"for\" names the reason: " +
		"container (the DEL could release resources of another ADD of the container or its pod) " +
		"or rules (a later plugin's rules or host ports may still use the pod's address). " +
		"unwind_pending_deletes does not count these DELs.",
		"network", "plugin", "for"},
	"oldest_pending_delete_timestamp_seconds": {"Time when the oldest DEL in " +
		"unwind_pending_deletes became pending, without DELs of plugins that have left the chain; " +
		"absent if there is none."},
	"rollbacks_total": {"Rolled-back ADDs, by the plugin that failed; the label " +
		"\"result\" is pending if DELs remain, else complete.", "plugin", "result"},
	"swept_attachments_total": {"Attachments released without a DEL from the runtime.", "reason"},
	"sweep_last_success_timestamp_seconds": {"Time when the last sweep of all networks finished, to " +
		"the minute; absent if no sweep has finished."},
	"duplicate_addresses_total": {"Addresses assigned while another attachment was using them."},
	"dropped_deletes_total": {"Pending DELs that unwind dropped, because they failed for about a " +
		"day, without DELs of plugins that have left the chain.", "plugin"},
	"degraded_operations_total": {"ADDs and DELs that continued without the journal. The count may " +
		"be too low, because a full or read-only disk keeps unwind from counting.", "verb", "reason"},
	"ipam_addresses": {"Addresses in host-local's pools by range set; an ADD takes one address from " +
		"each set. Addresses outside the known ranges have set=none. state=free is absent " +
		"for these, and for a set of 2^53 addresses or more.", "network", "pool", "set", "family",
		"state"},
	"status": {"The state of unwind on this node: 1 for the current state, 0 for all others.",
		"state"},
	"plugin_info": {"Always 1; the label is the version of the installed plugin.", "version"},
	"off_timestamp_seconds": {"Time when unwind was switched off; the label \"by\" names who did " +
		"it; absent while unwind is on.", "by"},
	"build_info": {"Always 1; the labels are the versions of this program and of Go.",
		"version", "goversion"},
	"journal_readable": {"Whether the whole journal is readable: 1 or 0."},
	"journal_writable": {"Whether ADDs and DELs can write the journal: 1 or 0."},
	"runtime_up": {"Whether the runtime returned its list of pods: 1 or 0; absent if no runtime was " +
		"queried."},
}

// collection sends the metrics of one scrape.
type collection struct {
	Source
	to chan<- prometheus.Metric
}

func (c *collection) add(name string, value float64, labels ...string) {
	kind := prometheus.GaugeValue
	if strings.HasSuffix(name, "_total") {
		kind = prometheus.CounterValue
	}
	desc := prometheus.NewDesc("unwind_"+name, helps[name][0], helps[name][1:], nil)
	c.to <- prometheus.MustNewConstMetric(desc, kind, value, labels...)
}

func (c *collection) collect() {
	c.add("build_info", 1, c.Version, runtime.Version())
	if c.Status != "" {
		for _, state := range install.Reasons {
			c.add("status", one(state == c.Status), string(state))
		}
	}
	if c.Plugin != "" {
		c.add("plugin_info", 1, c.Plugin)
	}
	if c.Off != nil {
		c.add("off_timestamp_seconds", float64(c.Off.Since.Unix()), c.Off.By)
	}
	if r := c.Report; r != nil {
		c.add("journal_readable", one(r.Err() == nil))
		c.add("journal_writable", one(r.Unwritable == nil))
		if r.List != nil || r.ListErr != nil {
			c.add("runtime_up", one(r.ListErr == nil))
		}
		if !r.LastSweep.IsZero() {
			c.add("sweep_last_success_timestamp_seconds", float64(r.LastSweep.Unix()))
		}
		c.collectAttachments()
		c.collectCounters()
		c.collectPools()
	}
}

func one(is bool) float64 {
	if is {
		return 1
	}
	return 0
}

func (c *collection) collectAttachments() {
	type count struct{ metric, network, label, waits string }
	counts := map[count]float64{}
	var oldest float64
	for _, a := range c.Report.Attachments {
		counts[count{"attachments", a.Network, a.Status, ""}]++
		if !a.PendingDEL() {
			continue
		}
		pending := false
		for _, step := range a.Steps {
			if step.WaitsFor.Blocked() {
				counts[count{"waiting_deletes", a.Network, step.Plugin, string(step.WaitsFor)}]++
				continue
			}
			pending = pending || step.Due()
			counts[count{"pending_deletes", a.Network, step.Plugin, ""}]++
		}
		if since := float64(a.Since.Unix()); pending && (oldest == 0 || since < oldest) {
			oldest = since
		}
	}
	for of, n := range counts {
		labels := []string{of.network, of.label}
		if of.waits != "" {
			labels = append(labels, of.waits)
		}
		c.add(of.metric, n, labels...)
	}
	if oldest > 0 {
		c.add("oldest_pending_delete_timestamp_seconds", oldest)
	}
}

func (c *collection) collectCounters() {
	names := map[string]string{
		record.CountRollbacks: "rollbacks_total", record.CountSwept: "swept_attachments_total",
		record.CountDegraded:   "degraded_operations_total",
		record.CountDuplicates: "duplicate_addresses_total",
		record.CountDropped:    "dropped_deletes_total",
	}
	duplicates := func(c inspect.Counter) bool { return c.Name == record.CountDuplicates }
	// after an error the counter is unknown, and 0 would look like a reset
	if c.Report.HistoryErr == nil && !slices.ContainsFunc(c.Counters, duplicates) {
		c.add("duplicate_addresses_total", 0)
	}
	for _, is := range c.Counters {
		if name := names[is.Name]; len(helps[name]) == 1+len(is.Labels) {
			c.add(name, float64(is.Value), is.Labels...)
		}
	}
}

func (c *collection) collectPools() {
	for _, p := range c.Report.Pools {
		for _, s := range p.Sets {
			set := "none"
			if s.Number != nil {
				set = strconv.Itoa(*s.Number)
			}
			for state, n := range s.ByState() {
				c.add("ipam_addresses", float64(*n), p.Network, p.Dir, set, s.Family, state)
			}
			if s.Free != nil {
				c.add("ipam_addresses", float64(*s.Free), p.Network, p.Dir, set, s.Family, "free")
			}
		}
	}
}
