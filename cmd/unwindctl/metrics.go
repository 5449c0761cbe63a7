package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/big"
	"os"
	"path/filepath"
	"runtime"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"
	"github.com/spf13/cobra"

	"cni-unwind/journal"
	"cni-unwind/plugin"
)

func metricsCommand() *cobra.Command {
	var textfile string
	var flags sweepFlags
	cmd := &cobra.Command{
		Use:   "metrics",
		Short: "Print metrics for Prometheus",
		Long: "Print metrics in the text format of Prometheus, or write them to a file for node_exporter's textfile collector: whole or not\n" +
			"at all. unwindctl run serves the same as /metrics. No label names a pod, a container or an address.",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := flags.resolve(); err != nil {
				return err
			}
			var failed error
			c := &collector{ctx: cmd.Context(), flags: flags, stderr: cmd.ErrOrStderr(), failed: func(err error) { failed = err }}
			var text bytes.Buffer
			if err := printMetrics(&text, c.registry()); err != nil {
				return err
			}
			if textfile != "" {
				return errors.Join(failed, writeTextfile(textfile, &text))
			}
			_, err := text.WriteTo(cmd.OutOrStdout())
			return errors.Join(failed, err)
		},
	}
	cmd.Flags().StringVar(&textfile, "textfile", "", "write them to `FILE`, such as /var/lib/node_exporter/unwind.prom")
	addCommonFlags(cmd, &flags)
	return cmd
}

// writeTextfile makes a file have a content, whole or not at all. It takes the place of a file only: a link is followed, and a
// device stays what it is.
func writeTextfile(path string, text io.Reader) error {
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real
	}
	info, err := os.Stat(path)
	switch {
	case err == nil && !info.Mode().IsRegular():
		return usageError{fmt.Errorf("--textfile %s is not a file", path)}
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("--textfile: %w", err)
	}
	if err := replaceFile(path, text, info); err != nil {
		return fmt.Errorf("--textfile %s: %w", path, err)
	}
	return nil
}

func printMetrics(out io.Writer, from prometheus.Gatherer) error {
	families, err := from.Gather()
	for _, f := range families {
		if _, writeErr := expfmt.MetricFamilyToText(out, f); writeErr != nil {
			return writeErr
		}
	}
	return err
}

// collector reads the metrics out of the journal and the pools, each time it is asked.
type collector struct {
	ctx    context.Context
	flags  sweepFlags
	stderr io.Writer
	failed func(error) // is told what could not be read
}

// registry returns one that has the collector alone.
func (c *collector) registry() *prometheus.Registry {
	r := prometheus.NewPedanticRegistry()
	r.MustRegister(c)
	return r
}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("unwind_"+name, help, labels, nil)
}

// descs has every metric, by its name without unwind_.
func descs() map[string]*prometheus.Desc {
	return map[string]*prometheus.Desc{
		"attachments":     desc("attachments", "Attachments in the journal.", "network", "state"),
		"pending_deletes": desc("pending_deletes", "DELs that are owed although the attachment is not live any more.", "network", "plugin"),
		"oldest_pending_delete_timestamp_seconds": desc("oldest_pending_delete_timestamp_seconds",
			"Since when the oldest attachment that owes DELs owes them; absent if none does."),
		"rollbacks_total": desc("rollbacks_total", "ADDs that failed and were undone, by the delegate that failed; result is complete or pending.",
			"plugin", "result"),
		"swept_attachments_total": desc("swept_attachments_total", "Attachments that were released without the runtime's DEL.", "reason"),
		"sweep_last_success_timestamp_seconds": desc("sweep_last_success_timestamp_seconds",
			"When the last sweep of all networks came to its end, to the minute; absent if none did."),
		"duplicate_addresses_total": desc("duplicate_addresses_total", "Addresses that were given out while another attachment had them in use."),
		"degraded_operations_total": desc("degraded_operations_total", "ADDs and DELs that went on without the journal, as far as it could be told later.", "verb", "reason"),
		"ipam_addresses":            desc("ipam_addresses", "Addresses in the pools of host-local.", "network", "pool", "state"),
		"build_info":                desc("build_info", "The version of this program, always 1.", "version", "goversion"),
		"journal_readable":          desc("journal_readable", "Whether the journal can be read: 1, or 0."),
	}
}

// Describe sends every metric there can be.
func (c *collector) Describe(to chan<- *prometheus.Desc) {
	for _, d := range descs() {
		to <- d
	}
}

// Collect sends what is known now. What cannot be read is left out, and told by journal_readable and failed.
func (c *collector) Collect(to chan<- prometheus.Metric) {
	all := descs()
	gauge := func(name string, value float64, labels ...string) {
		to <- prometheus.MustNewConstMetric(all[name], prometheus.GaugeValue, value, labels...)
	}
	counter := func(name string, value uint64, labels ...string) {
		to <- prometheus.MustNewConstMetric(all[name], prometheus.CounterValue, float64(value), labels...)
	}
	gauge("build_info", 1, version, runtime.Version())
	err := c.collectJournal(gauge, counter)
	gauge("journal_readable", map[bool]float64{true: 1}[err == nil])
	if err := errors.Join(err, c.collectPools(gauge)); err != nil {
		c.failed(err)
	}
}

func (c *collector) collectJournal(gauge func(string, float64, ...string), counter func(string, uint64, ...string)) error {
	store := &journal.Store{Dir: c.flags.stateDir}
	attachments, err := readJournal(c.ctx, store)
	states, pending := map[[2]string]int{}, map[[2]string]int{}
	var oldest float64
	for _, a := range attachments {
		states[[2]string{a.Network, string(a.State)}]++
		if !a.owed() {
			continue
		}
		for _, s := range a.Steps {
			pending[[2]string{a.Network, s.Plugin}]++
		}
		if since := float64(a.Since.Unix()); oldest == 0 || since < oldest {
			oldest = since
		}
	}
	for labels, n := range states {
		gauge("attachments", float64(n), labels[:]...)
	}
	for labels, n := range pending {
		gauge("pending_deletes", float64(n), labels[:]...)
	}
	if oldest > 0 {
		gauge("oldest_pending_delete_timestamp_seconds", oldest)
	}
	duplicates := uint64(0)
	viewErr := store.View(c.ctx, func(tx *journal.Tx) error {
		return tx.Counters(func(name string, labels []string, n uint64) error {
			switch {
			case name == plugin.CountRollbacks && len(labels) == 2:
				counter("rollbacks_total", n, labels...)
			case name == plugin.CountSwept && len(labels) == 1:
				counter("swept_attachments_total", n, labels...)
			case name == plugin.CountDegraded && len(labels) == 2:
				counter("degraded_operations_total", n, labels...)
			case name == plugin.CountDuplicates && len(labels) == 0:
				duplicates = n
			case name == plugin.LastSweep && len(labels) == 0:
				gauge("sweep_last_success_timestamp_seconds", float64(n))
			}
			return nil
		})
	})
	if viewErr == nil { // else it would seem to begin anew
		counter("duplicate_addresses_total", duplicates)
	}
	return errors.Join(err, viewErr)
}

func (c *collector) collectPools(gauge func(string, float64, ...string)) error {
	pools, err := readPools(c.ctx, c.stderr, nil, c.flags)
	for _, p := range pools {
		states := map[string]float64{
			"live": float64(p.Live), "leaked": float64(p.Leaked), "ownerless": float64(p.Ownerless), "unknown": float64(p.Unknown),
		}
		if p.Free != nil {
			states["free"], _ = new(big.Float).SetInt(p.Free).Float64()
		}
		for state, n := range states {
			gauge("ipam_addresses", n, p.Network, p.Dir, state)
		}
	}
	if err != nil {
		return fmt.Errorf("the pools: %w", err)
	}
	return nil
}
