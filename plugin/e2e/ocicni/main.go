// ocicni calls CRI-O's own CNI library as CRI-O does (server/sandbox_network.go and
// server/server.go of 1.36):
//
//	ocicni add POD ID NETNS     sends a sandbox's ADD and, if the ADD fails, the DEL
//	ocicni del POD ID NETNS     sends a sandbox's DEL
//	ocicni status               sends STATUS once; CRI-O repeats it until it succeeds
//	ocicni gc [ID:NETNS]...     sends GC with a list of sandboxes, as CRI-O does once, at its start
//
// After a failed DEL, CRI-O 1.34 and later remove the sandbox's entry from libcni's cache. This
// program does the same.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/cri-o/ocicni/pkg/ocicni"
	"github.com/sirupsen/logrus"
)

const (
	confDir   = "/etc/cni/net.d"
	pluginDir = "/opt/cni/bin"
	results   = "/var/lib/cni/results"
)

func main() {
	logrus.SetLevel(logrus.ErrorLevel)
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string) error {
	plugin, err := ocicni.InitCNI("", confDir, pluginDir)
	if err != nil {
		return err
	}
	defer func() { _ = plugin.Shutdown() }()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	switch {
	case len(args) == 4 && args[0] == "add":
		pod := podOf(plugin, args[1], args[2], args[3])
		if _, err := plugin.SetUpPodWithContext(ctx, pod); err != nil {
			return errors.Join(err, stop(ctx, plugin, pod))
		}
		return nil
	case len(args) == 4 && args[0] == "del":
		return stop(ctx, plugin, podOf(plugin, args[1], args[2], args[3]))
	case len(args) == 1 && args[0] == "status":
		return plugin.StatusWithContext(ctx)
	case len(args) > 0 && args[0] == "gc":
		var valid []*ocicni.PodNetwork
		for _, arg := range args[1:] {
			id, netns, _ := strings.Cut(arg, ":")
			pod := podOf(plugin, "", id, netns)
			valid = append(valid, &pod)
		}
		return plugin.GC(ctx, valid)
	}
	return fmt.Errorf("unknown command: %v", args)
}

// stop sends the DEL of a sandbox, as CRI-O's networkStop does.
func stop(ctx context.Context, plugin ocicni.CNIPlugin, pod ocicni.PodNetwork) error {
	err := plugin.TearDownPodWithContext(ctx, pod)
	if err == nil {
		return nil
	}
	records, globErr := filepath.Glob(filepath.Join(results, "*-"+pod.ID+"-*"))
	for _, record := range records {
		globErr = errors.Join(globErr, os.Remove(record))
	}
	return errors.Join(err, globErr)
}

func podOf(plugin ocicni.CNIPlugin, name, id, netns string) ocicni.PodNetwork {
	return ocicni.PodNetwork{
		Namespace: "default", Name: name, UID: "uid-" + name, ID: id, NetNS: netns,
		Networks:      []ocicni.NetAttachment{},
		RuntimeConfig: map[string]ocicni.RuntimeConfig{plugin.GetDefaultNetworkName(): {}},
	}
}
