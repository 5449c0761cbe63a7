package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// criTimeout bounds a CRI call. The kubelet allows two minutes, and four for the start of a
// sandbox.
const criTimeout = 2 * time.Minute

// Ready is the state of a running sandbox.
const Ready = cri.PodSandboxState_SANDBOX_READY

// CRI is a client that calls a runtime as kubelet does.
type CRI struct {
	node    *Node
	conn    *grpc.ClientConn
	runtime cri.RuntimeServiceClient
}

func dialCRI(n *Node, socket string) *CRI {
	n.Helper()
	conn, err := grpc.NewClient("unix:"+n.File(socket), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		n.Fatal(err)
	}
	n.Cleanup(func() { _ = conn.Close() })
	return &CRI{n, conn, cri.NewRuntimeServiceClient(conn)}
}

func (c *CRI) ready(ctx context.Context) error {
	_, err := c.runtime.Version(ctx, &cri.VersionRequest{}, grpc.WaitForReady(true))
	return err
}

// Pod describes a pod as kubelet does. Each attempt to start the pod creates a sandbox with a new
// name and ID.
type Pod struct {
	Name      string
	Attempt   uint32
	HostPorts []int32 // each is mapped to the same port of the pod
}

// RunPod starts a pod's sandbox.
func (c *CRI) RunPod(pod Pod) (id string, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), criTimeout)
	defer cancel()
	config := &cri.PodSandboxConfig{
		Metadata: &cri.PodSandboxMetadata{Name: pod.Name, Uid: "uid-" + pod.Name, Namespace: "default", Attempt: pod.Attempt},
		Linux: &cri.LinuxPodSandboxConfig{CgroupParent: c.node.Cgroup(), SecurityContext: &cri.LinuxSandboxSecurityContext{
			NamespaceOptions: &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER}, // the kubelet's default
		}},
	}
	for _, port := range pod.HostPorts {
		config.PortMappings = append(config.PortMappings, &cri.PortMapping{HostPort: port, ContainerPort: port})
	}
	answer, err := c.runtime.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: config})
	return answer.GetPodSandboxId(), err
}

// RunPodRaced starts a pod's sandbox. If the start fails because another pod starts at the same
// time, RunPodRaced tries again, as kubelet does. There are two such failures: firewall creates the
// same iptables chain for both pods, or the other pod's veth changes the bridge's MAC address
// before CRI-O's CHECK.
func (c *CRI) RunPodRaced(pod *Pod) (id string, err error) {
	for {
		id, err = c.RunPod(*pod)
		if err == nil || pod.Attempt >= 5 || !strings.Contains(err.Error(), "CHAIN_USER_ADD failed") &&
			!strings.Contains(err.Error(), "Bridge interface cni0 Mac doesn't match") {
			return id, err
		}
		pod.Attempt++
	}
}

// MustRunPod starts a pod's sandbox, and fails the test if the sandbox does not start.
func (c *CRI) MustRunPod(pod Pod) (id string) {
	c.node.Helper()
	id, err := c.RunPod(pod)
	if err != nil {
		c.node.Fatalf("pod %s: %v", pod.Name, err)
	}
	return id
}

// RunPods starts pods at the same time, and fails the test if a pod does not start. It returns the
// sandbox IDs by pod name.
func (c *CRI) RunPods(pods []Pod) map[string]string {
	c.node.Helper()
	ids, errs := make([]string, len(pods)), make([]error, len(pods))
	var wg sync.WaitGroup
	for i := range pods {
		wg.Go(func() { ids[i], errs[i] = c.RunPodRaced(&pods[i]) })
	}
	wg.Wait()
	byName := map[string]string{}
	for i, pod := range pods {
		if errs[i] != nil {
			c.node.Fatalf("pod %s: %v", pod.Name, errs[i])
		}
		byName[pod.Name] = ids[i]
	}
	return byName
}

// StopPod stops a sandbox. The runtime then detaches the sandbox from its network.
func (c *CRI) StopPod(id string) error {
	ctx, cancel := context.WithTimeout(context.Background(), criTimeout)
	defer cancel()
	_, err := c.runtime.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: id})
	return err
}

// RemovePod removes a stopped sandbox.
func (c *CRI) RemovePod(id string) error {
	ctx, cancel := context.WithTimeout(context.Background(), criTimeout)
	defer cancel()
	_, err := c.runtime.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: id})
	return err
}

// Pods lists the sandboxes that the runtime knows, with their states.
func (c *CRI) Pods() map[string]cri.PodSandboxState {
	c.node.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), criTimeout)
	defer cancel()
	answer, err := c.runtime.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		c.node.Fatal(err)
	}
	pods := map[string]cri.PodSandboxState{}
	for _, p := range answer.GetItems() {
		pods[p.GetId()] = p.GetState()
	}
	return pods
}

// IP returns a sandbox's address, as the runtime reports it.
func (c *CRI) IP(id string) string {
	c.node.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), criTimeout)
	defer cancel()
	answer, err := c.runtime.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: id})
	if err != nil {
		c.node.Fatal(err)
	}
	return answer.GetStatus().GetNetwork().GetIp()
}

// KillPod kills the first process of a sandbox, and waits until the runtime no longer reports the
// sandbox as ready.
func (c *CRI) KillPod(id string) {
	n := c.node
	n.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), criTimeout)
	defer cancel()
	answer, err := c.runtime.PodSandboxStatus(ctx, &cri.PodSandboxStatusRequest{PodSandboxId: id, Verbose: true})
	if err != nil {
		n.Fatal(err)
	}
	var info struct{ Pid int }
	if err := json.Unmarshal([]byte(answer.GetInfo()["info"]), &info); err != nil || info.Pid <= 1 {
		n.Fatalf("sandbox %.12s: no process: %v", id, err)
	}
	n.Run("/bin/kill", "-KILL", strconv.Itoa(info.Pid))
	Eventually(n, time.Minute, "the sandbox is not ready", func() bool { return c.Pods()[id] != Ready })
}

// CheckPod checks that a running pod's address is reserved for the pod and has rules, and that the
// pod answers a ping. If a check fails, the test continues.
func (n *Node) CheckPod(c *CRI, id string) {
	n.Helper()
	ip := c.IP(id)
	if owner := n.Reserved()[ip]; owner != id {
		n.Errorf("the address %s of pod %.12s is reserved for %q", ip, id, owner)
	}
	if !slices.ContainsFunc(n.Rules(), func(rule string) bool { return strings.Contains(rule, " "+ip+"/32 ") }) {
		n.Errorf("pod %.12s has no rules for %s", id, ip)
	}
	if _, _, err := n.Try("ping", "-c1", "-W2", ip); err != nil {
		n.Errorf("pod %.12s does not answer at %s", id, ip)
	}
}

// RemovePods stops and removes all sandboxes that the runtime lists, as kubelet does for deleted
// pods. It returns the errors.
func (c *CRI) RemovePods() (errs []error) {
	c.node.Helper()
	for id := range c.Pods() {
		err := c.StopPod(id)
		if err == nil {
			err = c.RemovePod(id)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("sandbox %.12s: %w", id, err))
		}
	}
	return errs
}

// RunAgain starts the pods of the previous boot again, as kubelet does. If the runtime lists a
// pod's old sandbox, RunAgain first stops and removes that sandbox. After it has tried to start the
// first pod, it calls began(). It returns the number of pods that failed to start.
func (c *CRI) RunAgain(pods []Pod, old map[string]string, began func()) (failed int) {
	c.node.Helper()
	known := c.Pods()
	for i := range pods {
		id := old[pods[i].Name]
		if _, is := known[id]; is {
			check(c.node, errors.Join(c.StopPod(id), c.RemovePod(id)))
		}
		pods[i].Attempt++
		if _, err := c.RunPodRaced(&pods[i]); err != nil {
			if failed++; !strings.Contains(err.Error(), "no IP addresses available") {
				c.node.Errorf("pod %s: %v", pods[i].Name, err)
			}
		}
		if i == 0 {
			began()
		}
	}
	return failed
}

// NetworkReady requests the runtime's status, as kubelet does every five seconds. It returns "" if
// the network is ready, and otherwise the reason. containerd 2 calls STATUS for each such request.
func (c *CRI) NetworkReady() (why string) {
	c.node.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), criTimeout)
	defer cancel()
	answer, err := c.runtime.Status(ctx, &cri.StatusRequest{})
	if err != nil {
		c.node.Fatal(err)
	}
	for _, condition := range answer.GetStatus().GetConditions() {
		if condition.GetType() == cri.NetworkReady && !condition.GetStatus() {
			return condition.GetReason() + ": " + condition.GetMessage()
		}
	}
	return ""
}
