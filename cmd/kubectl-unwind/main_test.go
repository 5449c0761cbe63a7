package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"golang.org/x/net/websocket"
)

// patience is how long a test waits for an event. It only ends a test that hangs.
const patience = 5 * time.Minute

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"kubectl-unwind": main, "kubectl": fakeKubectl})
}

// TestScript runs the scripts of testdata/kubectl. A script that says nothing else has a cluster of
// node-a, node-b and node-c, with the agents a, b and c. It can write files of one line, or none:
// write FILE [TEXT].
func TestScript(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "../../testdata/kubectl",
		RequireExplicitExec: true,
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"write": func(ts *testscript.TestScript, _ bool, args []string) {
				text := strings.Join(append(args[1:], ""), "\n")
				ts.Check(os.WriteFile(ts.MkAbs(args[0]), []byte(text), 0o600))
			},
		},
		Setup: func(env *testscript.Env) error {
			c := cluster{dir: filepath.Join(env.WorkDir, "cluster")}
			env.Setenv("CLUSTER", c.dir)
			self, err := os.Executable()
			env.Setenv("PROGRAM", self)
			if !c.has("nodes") {
				err = errors.Join(err, os.MkdirAll(c.dir, 0o700), os.WriteFile(c.at("nodes"), []byte("node-a node-b node-c"), 0o600),
					os.WriteFile(c.at("pods"), []byte("a node-a\nb node-b\nc node-c\n"), 0o600))
			}
			return err
		},
	})
}

// fakeKubectl is a kubectl for the cluster that the directory $CLUSTER describes. It appends its
// arguments to the file log, and so does its proxy for an exec.
//
//	pods           a line a pod: POD NODE, and what its container does, running if nothing is said
//	nodes          a line a node; without the file nodes may not be listed
//	matching       those that a selector matches
//	POD.COMMAND    what unwindctl prints there; COMMAND: on all others
//	POD.stderr     what it says; POD.code: its exit code
//	POD.hang       it never ends; pods.hang: nor does the list of pods
//	POD.flood      it prints without an end
//	POD.refused    what the API server says of it with 500; forbidden: of all with 403
//	proxy-url      of the kubeconfig; proxy.hang: kubectl proxy does not listen
//	most           so many are asked at once, and not more
//
// The proxy's number is in the file proxy.pid.
func fakeKubectl() {
	args := os.Args[1:]
	verb := slices.IndexFunc(args, func(a string) bool { return !strings.HasPrefix(a, "--") })
	c := cluster{os.Getenv("CLUSTER"), args[:verb]}
	c.log(args[verb:])
	switch args = args[verb:]; args[0] + " " + args[1] {
	case "get pods":
		if c.has("pods.hang") {
			time.Sleep(time.Hour)
		}
		if !c.has("pods") {
			fail(1, "E1122 13:05:55.795990    1402 memcache.go:265] \"Unhandled Error\"\n"+
				"The connection to the server was refused\nis it the right one?")
		}
		printPods(c.read("pods"))
	case "get nodes":
		if !c.has("nodes") {
			fail(1, `Error from server (Forbidden): nodes is forbidden: User "ann" cannot list nodes`)
		}
		file := "nodes"
		if args[2] != "--selector=kubernetes.io/os=linux" {
			file = "matching"
		}
		for name := range strings.FieldsSeq(c.read(file)) {
			fmt.Println("node/" + name)
		}
	case "config view":
		fmt.Print(c.read("proxy-url"))
	default:
		if args[0] == "proxy" {
			c.proxy(args)
		}
		if args[2] != "--container=agent" || args[3] != "--" {
			fail(9, fmt.Sprintf("not as the agent is asked: %q", args))
		}
		if code := c.execute(strings.TrimPrefix(args[1], "pod/"), args[4:], os.Stdout, os.Stderr); code != 0 {
			fail(code, fmt.Sprintf("command terminated with exit code %d", code))
		}
	}
}

// cluster is its directory, and the flags of a kubectl.
type cluster struct {
	dir   string
	flags []string
}

func (c cluster) at(name string) string { return filepath.Join(c.dir, name) }

func (c cluster) has(name string) bool { _, err := os.Stat(c.at(name)); return err == nil }

func (c cluster) read(name string) string {
	data, _ := os.ReadFile(c.at(name))
	return string(data)
}

func (c cluster) log(args []string) {
	log, err := os.OpenFile(c.at("log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err == nil {
		fmt.Fprintln(log, strings.Join(slices.Concat(c.flags, args), " "))
		err = log.Close()
	}
	if err != nil {
		fail(9, err.Error())
	}
}

// proxy is kubectl proxy, for exec by WebSocket.
func (c cluster) proxy(args []string) {
	socket, is := strings.CutPrefix(args[1], "--unix-socket=")
	listener, err := net.Listen("unix", socket)
	if err != nil || !is || c.has("proxy.hang") {
		time.Sleep(time.Hour)
	}
	_ = os.WriteFile(c.at("proxy.pid"), []byte(strconv.Itoa(os.Getpid())), 0o600)
	fmt.Println("Starting to serve on " + socket)
	mux := http.NewServeMux()
	mux.HandleFunc("GET /api/v1/namespaces/{namespace}/pods/{pod}/exec", func(w http.ResponseWriter, r *http.Request) {
		pod, query := r.PathValue("pod"), r.URL.Query()
		said, code := c.read(pod+".refused"), http.StatusInternalServerError
		if c.has("forbidden") {
			said, code = c.read("forbidden"), http.StatusForbidden
		}
		if said != "" {
			w.WriteHeader(code)
			_ = json.NewEncoder(w).Encode(map[string]any{"kind": "Status", "message": strings.TrimSpace(said)})
			return
		}
		if c.flags[0] != "--namespace="+r.PathValue("namespace") || r.Host != "localhost" {
			fail(9, "not as the agent is asked: "+r.Host+r.URL.Path)
		}
		command := query["command"]
		c.log(append([]string{"websocket pod/" + pod, "--container=" + query.Get("container"), "--"}, command...))
		serveExec(w, r, func(out, stderr io.Writer) int { return c.execute(pod, command, out, stderr) })
	})
	fail(9, http.Serve(listener, mux).Error())
}

// serveExec carries out an exec as the API server does, by WebSocket: the first byte of a message
// names the stream, and the last message is a status on stream 3.
func serveExec(w http.ResponseWriter, r *http.Request, run func(out, stderr io.Writer) int) {
	websocket.Server{
		Handshake: func(config *websocket.Config, _ *http.Request) error {
			if !slices.Contains(config.Protocol, "v5.channel.k8s.io") {
				return fmt.Errorf("not a protocol of exec: %q", config.Protocol)
			}
			config.Protocol = []string{"v5.channel.k8s.io"}
			return nil
		},
		Handler: func(conn *websocket.Conn) {
			conn.PayloadType = websocket.BinaryFrame
			end := `{"kind": "Status", "status": "Success"}`
			if code := run(stream{conn, 1}, stream{conn, 2}); code != 0 {
				end = fmt.Sprintf(`{"kind": "Status", "status": "Failure", "reason": "NonZeroExitCode",
					"message": "command terminated with non-zero exit code: exit status %d",
					"details": {"causes": [{"reason": "ExitCode", "message": "%[1]d"}]}}`, code)
			}
			_, _ = stream{conn, 3}.Write([]byte(end))
			_ = conn.WriteClose(1000)
		},
	}.ServeHTTP(w, r)
}

// stream is one of those of an exec.
type stream struct {
	conn   io.Writer
	number byte
}

func (s stream) Write(p []byte) (int, error) {
	_, err := s.conn.Write(append([]byte{s.number}, p...))
	return len(p), err
}

// execute is /unwindctl --host COMMAND … in a pod, and returns its exit code.
func (c cluster) execute(pod string, command []string, out, stderr io.Writer) int {
	if !slices.Equal(command[:2], []string{"/unwindctl", "--host"}) {
		fail(9, fmt.Sprintf("not as the agent is asked: %q", command))
	}
	if c.has(pod + ".hang") {
		time.Sleep(time.Hour)
	}
	var err error
	for c.has(pod+".flood") && err == nil {
		_, err = out.Write(make([]byte, 1<<16))
	}
	c.checkAtOnce(pod)
	fmt.Fprint(out, cmp.Or(c.read(pod+"."+command[2]), c.read(command[2])))
	fmt.Fprint(stderr, c.read(pod+".stderr"))
	code, _ := strconv.Atoi(strings.TrimSpace(c.read(pod + ".code")))
	return code
}

// checkAtOnce fails if more run at once than are allowed, and hangs if fewer do: the first wait for
// each other.
func (c cluster) checkAtOnce(pod string) {
	if !c.has("most") {
		return
	}
	most, _ := strconv.Atoi(strings.TrimSpace(c.read("most")))
	mine := c.at(pod + ".runs")
	_ = os.WriteFile(mine, nil, 0o600)
	running := func() int { all, _ := filepath.Glob(c.at("*.runs")); return len(all) }
	if running() >= most {
		_ = os.WriteFile(c.at("met"), nil, 0o600)
	}
	for !c.has("met") {
		time.Sleep(50 * time.Millisecond)
	}
	time.Sleep(100 * time.Millisecond)
	if n := running(); n > most {
		fail(1, fmt.Sprintf("error: %d at once", n))
	}
	_ = os.Remove(mine)
}

func printPods(lines string) {
	items := []any{}
	for line := range strings.Lines(lines) {
		name, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		node, does, _ := strings.Cut(rest, " ")
		type object = map[string]any
		meta, spec := object{"name": name}, object{"nodeName": node}
		status := object{"phase": "Pending"}
		agent := func(state string, of object) {
			status = object{"phase": "Running", "containerStatuses": []any{
				object{"name": "other", "state": object{"running": object{}}},
				object{"name": "agent", "ready": false, "state": object{state: of}},
			}}
		}
		switch {
		case does == "unscheduled":
			delete(spec, "nodeName")
			spec["affinity"] = object{"nodeAffinity": object{
				"requiredDuringSchedulingIgnoredDuringExecution": object{"nodeSelectorTerms": []any{
					object{"matchFields": []any{object{"key": "metadata.name", "operator": "In",
						"values": []string{node}}}}}}}}
			status["conditions"] = []any{object{"type": "PodScheduled", "status": "False",
				"message": "0/3 nodes are available: too many pods"}}
		case does == "foreign":
			status = object{"phase": "Running", "containerStatuses": []any{
				object{"name": "other", "state": object{"running": object{}}}}}
		case does == "terminated":
			agent("terminated", object{"exitCode": 1, "reason": "OOMKilled"})
		case does == "":
			agent("running", object{"startedAt": "2026-11-22T12:00:00Z"})
		case does == "leaving":
			meta["deletionTimestamp"] = "2026-11-22T12:00:00Z"
			agent("running", object{})
		default:
			agent("waiting", object{"reason": does, "message": "it waits"})
		}
		items = append(items, object{"metadata": meta, "spec": spec, "status": status})
	}
	_ = json.NewEncoder(os.Stdout).Encode(map[string]any{"items": items})
}

func fail(code int, said string) {
	fmt.Fprintln(os.Stderr, said)
	os.Exit(code)
}
