package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cni-unwind/plugin"
)

// criTimeout bounds the call to the runtime.
const criTimeout = 10 * time.Second

// maxCRIMessage bounds the runtime's answer, in bytes, as kubelet does.
const maxCRIMessage = 16 << 20

// criSockets are where runtimes of Kubernetes listen: containerd, CRI-O, k3s and RKE2, k0s, MicroK8s, cri-dockerd.
var criSockets = []string{
	"/run/containerd/containerd.sock", "/run/crio/crio.sock", "/run/k3s/containerd/containerd.sock", "/run/k0s/containerd.sock",
	"/var/snap/microk8s/common/run/containerd.sock", "/run/cri-dockerd.sock",
}

// findPodSandboxes returns the sandboxes of all runtimes that listen on one of the sockets, nil if none does. If one does not
// answer there is no list: its pods would be missing. A containerd without CRI, as Docker's, has no pods.
func findPodSandboxes(ctx context.Context, sockets []string) (all *plugin.List, err error) {
	for _, socket := range sockets {
		if _, err := os.Stat(socket); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		list, err := podSandboxes(ctx, socket)
		switch {
		case status.Code(err) == codes.Unimplemented:
		case err != nil:
			return nil, fmt.Errorf("the runtime at %s gave no list, so attachments are judged without one: %w", socket, err)
		case all == nil:
			all = list
		default:
			maps.Copy(all.Valid, list.Valid)
		}
	}
	if all == nil {
		return nil, errNoRuntime
	}
	return all, nil
}

// errNoRuntime is no error where a runtime need not be there.
var errNoRuntime = errors.New("--cri auto: no runtime listens on a socket that is known, so attachments are judged without its list; name its socket")

// podSandboxes returns the sandboxes that a CRI runtime has, in whatever state: one that is not ready still has its network
// until it is stopped. They are all of its pods and none of its other containers.
func podSandboxes(ctx context.Context, socket string) (*plugin.List, error) {
	ctx, cancel := context.WithTimeout(ctx, criTimeout)
	defer cancel()
	conn, err := grpc.NewClient("unix:"+strings.TrimPrefix(socket, "unix://"), // with two slashes, no relative path
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxCRIMessage)))
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	answer, err := cri.NewRuntimeServiceClient(conn).ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		return nil, err
	}
	list := plugin.NewList("", nil)
	list.Pods = true
	for _, sandbox := range answer.GetItems() {
		list.Valid[plugin.Attachment{ContainerID: sandbox.GetId()}] = true
	}
	return list, nil
}

// versionTimeout bounds the question for a runtime's version, which nothing depends on.
const versionTimeout = 2 * time.Second

// runtimeMajor asks a runtime for the first number of its version, 0 if it does not say.
func runtimeMajor(ctx context.Context, socket string) int {
	ctx, cancel := context.WithTimeout(ctx, versionTimeout)
	defer cancel()
	conn, err := grpc.NewClient("unix:"+strings.TrimPrefix(socket, "unix://"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return 0
	}
	defer conn.Close()
	answer, err := cri.NewRuntimeServiceClient(conn).Version(ctx, &cri.VersionRequest{})
	if err != nil {
		return 0
	}
	first, _, _ := strings.Cut(strings.TrimPrefix(answer.GetRuntimeVersion(), "v"), ".")
	major, err := strconv.Atoi(first)
	if err != nil {
		return 0
	}
	return major
}
