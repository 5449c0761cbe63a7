package main

import (
	"bytes"
	"errors"

	"github.com/spf13/cobra"

	"cni-unwind/cmd/unwindctl/internal/inspect"
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
			var text bytes.Buffer
			source := metrics.Source{Version: version, Scope: of, Stderr: cmd.ErrOrStderr()}
			err := source.Print(cmd.Context(), &text)
			if text.Len() == 0 {
				return err
			}
			if textfile != "" {
				return errors.Join(err, metrics.WriteTextfile(textfile, &text))
			}
			_, writeErr := text.WriteTo(cmd.OutOrStdout())
			return errors.Join(err, writeErr)
		},
	}
	cmd.Flags().StringVar(&textfile, "textfile", "",
		"write the metrics to `FILE`, such as /var/lib/node_exporter/unwind.prom")
	addScopeFlags(cmd, &of)
	return cmd
}
