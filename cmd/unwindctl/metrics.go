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
		Long: "Print metrics in the text format of Prometheus, or write them to a file for\n" +
			"node_exporter's textfile collector: whole or not at all. unwindctl run serves\n" +
			"the same as /metrics. No label names a pod, a container or an address.",
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
		"write them to `FILE`, such as /var/lib/node_exporter/unwind.prom")
	addScopeFlags(cmd, &of)
	return cmd
}
