// Runtime stands in for containerd's CRI server in the example session of README.md:
//
//	runtime DIR
//
// It lists a pod for each network namespace in /run/netns, with cnitool's container ID for that
// namespace. It reports DIR as its conflist directory, and CNI_PATH as its plugin directories.
//
// The command starts a server on containerd's usual socket, returns once the server listens, and
// leaves it running until the PID namespace ends.
package main

import (
	"context"
	"crypto/sha512"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"

	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const (
	socket   = "/run/containerd/containerd.sock"
	netnsDir = "/run/netns"

	// serverEnv is an environment variable that is set only in the server's process.
	serverEnv = "UNWIND_RUNTIME_SERVER"
)

func main() {
	err := errors.New("usage: runtime DIR")
	switch {
	case len(os.Args) != 2:
	case os.Getenv(serverEnv) == "":
		err = start()
	default:
		err = serve(os.Args[1])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "runtime:", err)
		os.Exit(1)
	}
}

// start starts the server in a separate process, and returns once the server listens.
func start() error {
	server := exec.Command("/proc/self/exe", os.Args[1:]...)
	server.Env = append(os.Environ(), serverEnv+"=1")
	server.Stderr = os.Stderr
	ready, err := server.StdoutPipe()
	if err != nil {
		return err
	}
	if err := server.Start(); err != nil {
		return err
	}
	if _, err := io.ReadFull(ready, make([]byte, 1)); err != nil {
		return errors.New("the server ended")
	}
	return nil
}

func serve(confDir string) error {
	if err := os.MkdirAll(filepath.Dir(socket), 0o755); err != nil {
		return err
	}
	l, err := new(net.ListenConfig).Listen(context.Background(), "unix", socket)
	if err != nil {
		return err
	}
	s := grpc.NewServer()
	cri.RegisterRuntimeServiceServer(s, &runtime{confDir: confDir})
	fmt.Print("\n")
	if err := os.Stdout.Close(); err != nil {
		return err
	}
	return s.Serve(l)
}

type runtime struct {
	cri.UnimplementedRuntimeServiceServer
	confDir string
}

func (r *runtime) Version(context.Context, *cri.VersionRequest) (*cri.VersionResponse, error) {
	return &cri.VersionResponse{RuntimeName: "containerd", RuntimeVersion: "v2.0.0"}, nil
}

// Status reports the CNI directories in the same format as containerd.
func (r *runtime) Status(context.Context, *cri.StatusRequest) (*cri.StatusResponse, error) {
	info, err := json.Marshal(map[string]any{
		"PluginDirs": filepath.SplitList(os.Getenv("CNI_PATH")), "PluginConfDir": r.confDir,
	})
	return &cri.StatusResponse{Info: map[string]string{"cniconfig": string(info)}}, err
}

func (r *runtime) ListPodSandbox(context.Context, *cri.ListPodSandboxRequest) (
	*cri.ListPodSandboxResponse, error) {
	names, err := os.ReadDir(netnsDir)
	var all []*cri.PodSandbox
	for _, name := range names {
		all = append(all, &cri.PodSandbox{
			Id: containerID(filepath.Join(netnsDir, name.Name())), State: cri.PodSandboxState_SANDBOX_READY,
			Metadata: &cri.PodSandboxMetadata{Namespace: "default", Name: name.Name()},
		})
	}
	return &cri.ListPodSandboxResponse{Items: all}, err
}

// containerID returns the container ID that cnitool uses for a namespace.
func containerID(netns string) string {
	return fmt.Sprintf("cnitool-%x", sha512.Sum512([]byte(netns)))[:len("cnitool-")+20]
}
