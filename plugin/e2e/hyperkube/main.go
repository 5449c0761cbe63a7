// Hyperkube is one binary with all programs of a Kubernetes cluster, for the end-to-end tests. The
// first argument names the program, as in "hyperkube kubelet". One binary is a fifth of the size
// of six binaries, and links in a fifth of the time.
//
// Hyperkube is a separate module, because Kubernetes and unwind need different versions of
// dependencies.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: hyperkube PROGRAM [ARGUMENT...]")
		os.Exit(2)
	}
	os.Args = os.Args[1:]
	if os.Args[0] == "etcd" {
		etcdmain.Main(os.Args)
		return
	}
	command := map[string]func() *cobra.Command{
		"kube-apiserver":          apiserver.NewAPIServerCommand,
		"kube-controller-manager": controllers.NewControllerManagerCommand,
		"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
		"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
		"kubectl":                 func() *cobra.Command { return kubectl.NewDefaultKubectlCommand() },
	}[os.Args[0]]
	if command == nil {
		fmt.Fprintf(os.Stderr, "hyperkube: no such program: %s\n", os.Args[0])
		os.Exit(2)
	}
	os.Exit(cli.Run(command()))
}
