package main

import (
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/durable"
	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/cmd/unwindctl/internal/node"
)

func streams(cmd *cobra.Command) term.Streams {
	return term.Streams{In: cmd.InOrStdin(), Out: cmd.OutOrStdout(), Err: cmd.ErrOrStderr()}
}

// completeNames completes an argument that names an attachment, a pod or an address. The names come
// from the journal, and with history also from the events.
func completeNames(at *node.Directories, history bool) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, begun string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		names, _ := complete(cmd, *at, history)
		return beginning(begun, names), cobra.ShellCompDirectiveNoFileComp
	}
}

// completeSockets completes the sockets of the runtimes that exist on this node.
func completeSockets(
	_ *cobra.Command, _ []string, begun string,
) ([]string, cobra.ShellCompDirective) {
	sockets := slices.DeleteFunc(slices.Clone(node.CRISockets), func(path string) bool {
		return !durable.Exists(path)
	})
	return beginning(begun, append(sockets, "auto")), cobra.ShellCompDirectiveDefault
}

func complete(cmd *cobra.Command, at node.Directories, history bool) (args, networks []string) {
	if at.Resolve() != nil {
		return nil, nil
	}
	return inspect.Complete(cmd.Context(), at.StateDir, history)
}

// beginning returns the texts with a prefix, sorted and without duplicates.
func beginning(prefix string, texts []string) []string {
	slices.Sort(texts)
	return slices.DeleteFunc(slices.Compact(texts), func(text string) bool {
		return !strings.HasPrefix(text, prefix)
	})
}
