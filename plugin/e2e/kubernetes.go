package e2e

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Cluster is a Kubernetes cluster. It consists of workers and of a separate node for the control
// plane, which has no kubelet.
type Cluster struct {
	testing.TB
	Workers []*Worker
	control *Node
}

// Worker is a node of a cluster.
type Worker struct {
	*Node
	NodeName string
	Runtime  *Containerd
	network  Network
	cluster  *Cluster
	address  string // in the nodes' network
	kubelet  *daemon
}

const (
	kubernetesDir  = "/etc/kubernetes"
	kubeconfigPath = kubernetesDir + "/kubeconfig"
	controlAddress = "172.31.0.1"
	nodesBridge    = "nodes"
	// clusterTimeout bounds the start of the control plane, and of a kubelet, on a busy machine.
	clusterTimeout = 2 * time.Minute
)

// kubeconfig is the same for all programs: they use the administrator's token.
const kubeconfig = `apiVersion: v1
kind: Config
clusters: [{name: e2e, cluster: {server: "https://` + controlAddress + `:6443", insecure-skip-tls-verify: true}}]
users: [{name: admin, user: {token: e2e}}]
contexts: [{name: e2e, context: {cluster: e2e, user: admin}}]
current-context: e2e
`

// kubeletConfig changes the kubelet's defaults, because the machine may use cgroups v1, or may not
// allow cgroups at all. The first %s is the runtime's socket, and the second is the cgroup of the
// node's pods.
const kubeletConfig = `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
containerRuntimeEndpoint: unix://%s
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
cgroupDriver: cgroupfs
cgroupRoot: %s
cgroupsPerQOS: false
enforceNodeAllocatable: []
failCgroupV1: false
failSwapOn: false
oomScoreAdj: 0
localStorageCapacityIsolation: false
makeIPTablesUtilChains: false
evictionHard: {memory.available: "1Mi"}
imageGCHighThresholdPercent: 100
resolvConf: ""
readOnlyPort: 0
volumePluginDir: /var/lib/kubelet/volume-plugins
nodeStatusUpdateFrequency: 4s
maxPods: 200
`

// NewCluster starts the control plane of a cluster without workers. The cluster ends with the test.
func NewCluster(t testing.TB) *Cluster {
	t.Helper()
	c := &Cluster{TB: t, control: NewNode(t)}
	n := c.control
	n.do(func() error { return addBridge(nodesBridge, controlAddress) })
	n.Write(kubernetesDir+"/tokens.csv", `e2e,admin,admin,"system:masters"`+"\n")
	n.Write(kubernetesDir+"/sa.key", newKey(n))
	n.Write(kubeconfigPath, kubeconfig)

	const etcd = "http://127.0.0.1:2379"
	n.hyperkube("etcd", "--data-dir=/var/lib/etcd/data", "--listen-client-urls="+etcd, "--advertise-client-urls="+etcd,
		"--listen-peer-urls=http://127.0.0.1:2380", "--unsafe-no-fsync")
	n.hyperkube("kube-apiserver", "--etcd-servers="+etcd, "--advertise-address="+controlAddress, "--cert-dir=/run/kubernetes",
		"--service-cluster-ip-range=10.96.0.0/24", "--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file="+kubernetesDir+"/sa.key", "--service-account-signing-key-file="+kubernetesDir+"/sa.key",
		"--token-auth-file="+kubernetesDir+"/tokens.csv", "--authorization-mode=RBAC", "--allow-privileged",
		"--kubelet-preferred-address-types=InternalIP", "--enable-priority-and-fairness=false")
	Eventually(n, clusterTimeout, "the API server is ready", func() bool {
		_, err := c.TryKubectl("get", "--raw", "/readyz")
		return err == nil
	})
	n.hyperkube("kube-controller-manager", "--kubeconfig="+kubeconfigPath, "--leader-elect=false",
		"--service-account-private-key-file="+kubernetesDir+"/sa.key")
	n.hyperkube("kube-scheduler", "--kubeconfig="+kubeconfigPath, "--leader-elect=false",
		"--authentication-kubeconfig="+kubeconfigPath, "--authorization-kubeconfig="+kubeconfigPath)
	return c
}

// newKey creates the key that signs the tokens of service accounts.
func newKey(t testing.TB) string {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}))
}

// tunables maps kernel settings to the values to which a kubelet would set them for the whole
// machine (pkg/kubelet/cm/container_manager_linux.go setupKernelTunables).
var tunables = map[string]string{
	"vm/overcommit_memory": "1", "vm/panic_on_oom": "0", "kernel/panic": "10", "kernel/panic_on_oops": "1",
	"kernel/keys/root_maxkeys": "1000000", "kernel/keys/root_maxbytes": "25000000",
}

// keepTunables mounts a file over each of the tunables. The file contains the kubelet's value, so
// the kubelet does not change the setting.
func (w *Worker) keepTunables() {
	w.Helper()
	w.do(func() error {
		for name, value := range tunables {
			source := filepath.Join(w.Dir, strings.ReplaceAll(name, "/", "."))
			if err := errors.Join(os.WriteFile(source, []byte(value), 0o644), mount(source, "/proc/sys/"+name, "", unix.MS_BIND, "")); err != nil {
				return err
			}
		}
		return nil
	})
}

// Join adds a worker with containerd and a kubelet to the cluster, and returns once the worker is
// ready for pods.
func (c *Cluster) Join(name string, network func(n *Node) Network) *Worker {
	c.Helper()
	w := &Worker{Node: NewNode(c), NodeName: name, cluster: c, address: fmt.Sprintf("172.31.0.%d", len(c.Workers)+2)}
	c.Workers = append(c.Workers, w)
	w.keepTunables()
	w.connect()
	w.Use(network(w.Node))
	w.Write(kubeconfigPath, kubeconfig)
	w.Write(kubernetesDir+"/kubelet.yaml", fmt.Sprintf(kubeletConfig, Socket, w.Cgroup()))
	w.Runtime = w.StartContainerd(Containerds(w)[0])
	w.StartKubelet()
	w.AwaitReady()
	c.apply(object{"apiVersion": "v1", "kind": "Namespace", "metadata": object{"name": w.Namespace()}})
	Eventually(c, clusterTimeout, "the default service account of the namespace exists", func() bool {
		_, err := c.TryKubectl("get", "serviceaccount", "default", "--namespace", w.Namespace())
		return err == nil
	})
	return w
}

// Use gives the worker's pods a network, and adds routes between this network and the other
// workers' networks. The caller must first remove all pods from the previous network.
func (w *Worker) Use(network Network) {
	w.Helper()
	w.do(func() error { return removeLink("cni0") }) // bridge fails if cni0 keeps an old address
	w.network = network
	w.Configure(network)
	w.routes()
}

// StartKubelet starts the kubelet, for the first time or after a reboot.
func (w *Worker) StartKubelet() {
	w.Helper()
	w.kubelet = w.hyperkube("kubelet", "--kubeconfig="+kubeconfigPath, "--config="+kubernetesDir+"/kubelet.yaml",
		"--cert-dir=/run/kubernetes", "--hostname-override="+w.NodeName, "--node-ip="+w.address)
}

// Restart reboots the worker, and then starts the runtime and the kubelet.
func (w *Worker) Restart() {
	w.Helper()
	w.Reboot()
	w.connect()
	w.routes()
	w.Runtime.Start()
	w.StartKubelet()
}

// Condition returns the status of a worker's Ready condition (True, False or Unknown), and its
// message.
func (w *Worker) Condition() (status, message string) {
	w.Helper()
	out, err := w.cluster.TryKubectl("get", "node", w.NodeName, "-o", `jsonpath={range .status.conditions[?(@.type=="Ready")]}{.status} {.message}{end}`)
	if err != nil {
		return "Unknown", err.Error()
	}
	status, message, _ = strings.Cut(out, " ")
	return status, message
}

// AwaitReady waits until the worker is ready for pods, and returns how long that took.
func (w *Worker) AwaitReady() time.Duration {
	w.Helper()
	return Eventually(w, clusterTimeout, "node "+w.NodeName+" is ready", func() bool {
		if w.kubelet.hasEnded() {
			w.Fatalf("the kubelet has ended:\n%s", w.kubelet.log())
		}
		status, _ := w.Condition()
		return status == "True"
	})
}

// Kubectl runs kubectl as the cluster's administrator, and fails the test if kubectl fails.
func (c *Cluster) Kubectl(args ...string) string {
	c.Helper()
	out, err := c.TryKubectl(args...)
	if err != nil {
		c.Fatalf("kubectl %s: %v", strings.Join(args, " "), err)
	}
	return out
}

// TryKubectl runs kubectl as the cluster's administrator.
func (c *Cluster) TryKubectl(args ...string) (string, error) {
	args = append([]string{"kubectl", "--kubeconfig=" + kubeconfigPath, "--cache-dir=" + filepath.Join(c.control.Dir, "kubectl")}, args...)
	out, stderr, err := c.control.Try(hyperkube(c), args...)
	if err != nil {
		err = fmt.Errorf("%w: %s", err, strings.TrimSpace(stderr))
	}
	return out, err
}

// KubectlUnwind runs "kubectl unwind" as the cluster's administrator, with kubectl and
// kubectl-unwind in PATH.
func (c *Cluster) KubectlUnwind(args ...string) (stdout, stderr string, err error) {
	c.Helper()
	env := c.KubectlEnv()
	return c.run(env, filepath.Join(c.control.Dir, "bin/kubectl"), append([]string{"unwind"}, args...)...)
}

// Helm runs helm as the cluster's administrator, for releases in kube-system, and fails the test if
// helm fails.
func (c *Cluster) Helm(args ...string) string {
	c.Helper()
	out, stderr, err := c.run(c.KubectlEnv(), tool(c, "helm/helm"), append(args, "--namespace=kube-system")...)
	if err != nil {
		c.Fatalf("helm %s: %v\n%s%s", strings.Join(args, " "), err, out, stderr)
	}
	return out
}

// run runs a program as the cluster's administrator, on the node of the control plane.
func (c *Cluster) run(env []string, program string, args ...string) (stdout, stderr string, err error) {
	var out, errs strings.Builder
	cmd := exec.Command(program, args...)
	cmd.Env = env
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err = c.control.Start(cmd); err == nil {
		err = cmd.Wait()
	}
	return out.String(), errs.String(), err
}

// KubectlEnv returns the environment of the cluster's administrator. PATH contains kubectl,
// kubectl-unwind and ctr of the newest containerd. HOME is on the control plane's disk.
func (c *Cluster) KubectlEnv() []string {
	c.Helper()
	shim := filepath.Join(c.control.Dir, "bin/kubectl")
	script := fmt.Sprintf("#!/bin/sh\nexec '%s' kubectl \"$@\"\n", hyperkube(c))
	if err := errors.Join(os.MkdirAll(filepath.Dir(shim), 0o755),
		os.WriteFile(shim, []byte(script), 0o755)); err != nil {
		c.Fatal(err)
	}
	path := []string{filepath.Dir(shim), filepath.Dir(Path(c, "bin/kubectl-unwind")),
		tool(c, Containerds(c)[0].dir), "/usr/sbin", "/usr/bin", "/sbin", "/bin"}
	return []string{"PATH=" + strings.Join(path, ":"), "KUBECONFIG=" + kubeconfigPath, "HOME=" + c.control.Dir}
}

// daemon is a program that runs until it is stopped or its node ends.
type daemon struct {
	cmd   *exec.Cmd
	out   string // the file with the output of the program
	ended chan struct{}
}

func hyperkube(t testing.TB) string {
	t.Helper()
	return tool(t, "kubernetes/hyperkube")
}

// hyperkube starts one of the programs in the hyperkube binary.
func (n *Node) hyperkube(program string, args ...string) *daemon {
	n.Helper()
	d := &daemon{out: filepath.Join(n.Dir, program+".log"), ended: make(chan struct{})}
	logFile, err := os.OpenFile(d.out, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		n.Fatal(err)
	}
	defer logFile.Close()
	d.cmd = exec.Command(hyperkube(n), append([]string{program}, args...)...)
	d.cmd.Stdout, d.cmd.Stderr = logFile, logFile
	if err := n.Start(d.cmd); err != nil {
		n.Fatal(err)
	}
	go func() {
		_ = d.cmd.Wait()
		close(d.ended)
	}()
	n.Cleanup(func() {
		if n.Failed() {
			n.Logf("%s:\n%s", d.out, d.log())
		}
	})
	return d
}

func (d *daemon) hasEnded() bool {
	select {
	case <-d.ended:
		return true
	default:
		return false
	}
}

// log returns the last lines of the program's log, except lines of level info.
func (d *daemon) log() string {
	data, err := os.ReadFile(d.out)
	if err != nil {
		return err.Error()
	}
	lines := slices.DeleteFunc(strings.SplitAfter(string(data), "\n"), func(l string) bool {
		return strings.HasPrefix(l, "I") || strings.HasPrefix(l, `{"level":"info"`)
	})
	return strings.Join(lines[max(0, len(lines)-6):], "")
}
