package main

import (
	"github.com/spf13/cobra"

	"cni-unwind/cmd/unwindctl/internal/wrap"
)

func unwrapCommand() *cobra.Command {
	return rewriteCommand(&cobra.Command{
		Use:   "unwrap FILE",
		Short: "Restore the conflist that wrap put into unwind's entry",
		Long: "Restore the conflist that unwindctl wrap put into unwind's entry: print the value\n" +
			"of \"chain\", byte for byte. Later changes to the chain are kept; everything else\n" +
			"in FILE is dropped. - stands for the standard input. A file that is not wrapped\n" +
			"stays unchanged. In NetworkAttachmentDefinitions, only spec.config changes.",
		Example: "  unwindctl unwrap --in-place /etc/cni/net.d/10-podnet.conflist\n" +
			"  unwindctl unwrap wrapped.conflist | diff - /etc/cni/net.d/10-podnet.conflist",
	}, "not wrapped", wrap.Restore)
}
