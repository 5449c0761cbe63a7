package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"
	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/cmd/unwindctl/internal/install"
	"cni-unwind/cmd/unwindctl/internal/metrics"
)

func metricsCommand() *cobra.Command {
	var textfile string
	var of inspect.Scope
	cmd := &cobra.Command{
		Use:   "metrics",
		Short: "Print metrics for Prometheus",
		Long: "Print metrics in the Prometheus text format, or write them atomically to a file\n" +
			"for node_exporter's textfile collector. unwindctl run serves the same metrics at\n" +
			"/metrics. No label contains an address, or the name of a pod or container.\n\n" +
			"The agent also serves unwind_status. Its states:\n" +
			describe("status"),
		Example: "  unwindctl metrics\n" +
			"  unwindctl metrics --textfile /var/lib/node_exporter/unwind.prom",
		RunE: func(cmd *cobra.Command, _ []string) error {
			r, err := inspect.NewReport(cmd.Context(), streams(cmd), of)
			if err != nil {
				return err
			}
			failed := errors.Join(r.Err(), r.HistoryErr, r.SweepErr, r.PoolErr)
			registry := metrics.Registry(func() metrics.Source {
				return metrics.Source{Version: version, Report: r, Counters: r.Counters,
					Off: install.ReadOff(of.StateDir)}
			})
			if textfile != "" {
				// WriteToTextfile would replace a device such as /dev/stdout
				if info, err := os.Stat(textfile); err == nil && !info.Mode().IsRegular() {
					return term.Usage("--textfile %s is not a regular file", textfile)
				}
				if err := prometheus.WriteToTextfile(textfile, registry); err != nil {
					return fmt.Errorf("--textfile: %w", err)
				}
				return failed
			}
			families, err := registry.Gather()
			for _, f := range families {
				if _, err := expfmt.MetricFamilyToText(cmd.OutOrStdout(), f); err != nil {
					return errors.Join(failed, err)
				}
			}
			return errors.Join(failed, err)
		},
	}
	cmd.Flags().StringVar(&textfile, "textfile", "",
		"write the metrics to `FILE`, such as /var/lib/node_exporter/unwind.prom")
	addScopeFlags(cmd, &of)
	return cmd
}
