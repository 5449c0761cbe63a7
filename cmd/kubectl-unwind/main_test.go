package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"kubectl-unwind": main, "kubectl": fakeKubectl})
}

func TestScript(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "../../testdata/kubectl",
		RequireExplicitExec: true,
		Setup: func(env *testscript.Env) error {
			env.Setenv("CLUSTER", filepath.Join(env.WorkDir, "cluster"))
			self, err := os.Executable()
			env.Setenv("PROGRAM", self)
			return err
		},
	})
}

// fakeKubectl is a kubectl for the cluster that the directory $CLUSTER describes. It appends its
// arguments to the file log.
//
//	pods           a line a pod: POD NODE, and what its container does, running if nothing is said
//	nodes          a line a node; without the file nodes may not be listed
//	POD.COMMAND    what unwindctl prints there; COMMAND: on all others
//	POD.stderr     what it says; POD.code: its exit code
//	POD.hang       it never ends; pods.hang: nor does the list of pods
//	POD.flood      it prints without an end
//	most           not more run at once than may, and that many do
func fakeKubectl() {
	cluster, args := os.Getenv("CLUSTER"), os.Args[1:]
	at := func(name string) string { return filepath.Join(cluster, name) }
	log, err := os.OpenFile(at("log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err == nil {
		fmt.Fprintln(log, strings.Join(args, " "))
		err = log.Close()
	}
	if err != nil {
		fail(9, err.Error())
	}
	verb := slices.IndexFunc(args, func(a string) bool { return !strings.HasPrefix(a, "--") })
	switch args = args[verb:]; args[0] + " " + args[1] {
	case "get pods":
		if _, err := os.Stat(at("pods.hang")); err == nil {
			time.Sleep(time.Hour)
		}
		if _, err := os.Stat(at("pods")); err != nil {
			fail(1, "E1122 13:05:55.795990    1402 memcache.go:265] \"Unhandled Error\"\n"+
				"The connection to the server was refused\nis it the right one?")
		}
		printPods(read(at("pods")))
	case "get nodes":
		if _, err := os.Stat(at("nodes")); err != nil {
			fail(1, `Error from server (Forbidden): nodes is forbidden: User "ann" cannot list nodes`)
		}
		for name := range strings.FieldsSeq(read(at("nodes"))) {
			fmt.Println("node/" + name)
		}
	default:
		execute(at, args)
	}
}

// execute is kubectl exec pod/POD --container=agent -- /unwindctl --host COMMAND ….
func execute(at func(string) string, args []string) {
	pod := strings.TrimPrefix(args[1], "pod/")
	if !slices.Equal(args[2:6], []string{"--container=agent", "--", "/unwindctl", "--host"}) {
		fail(9, fmt.Sprintf("not as the agent is asked: %q", args))
	}
	if _, err := os.Stat(at(pod + ".hang")); err == nil {
		time.Sleep(time.Hour)
	}
	for _, err := os.Stat(at(pod + ".flood")); err == nil; {
		_, err = os.Stdout.Write(make([]byte, 1<<16))
	}
	checkAtOnce(at, pod)
	fmt.Print(cmp.Or(read(at(pod+"."+args[6])), read(at(args[6]))))
	fmt.Fprint(os.Stderr, read(at(pod+".stderr")))
	if code, _ := strconv.Atoi(strings.TrimSpace(read(at(pod + ".code")))); code != 0 {
		fail(code, fmt.Sprintf("command terminated with exit code %d", code))
	}
}

// checkAtOnce fails if more kubectl run at once than are allowed, and hangs if fewer do: the first
// wait for each other.
func checkAtOnce(at func(string) string, pod string) {
	if _, err := os.Stat(at("most")); err != nil {
		return
	}
	mine := at(pod + ".runs")
	_ = os.WriteFile(mine, nil, 0o600)
	for {
		all, _ := filepath.Glob(at("*.runs"))
		if len(all) >= 64 {
			_ = os.WriteFile(at("met"), nil, 0o600)
		}
		if _, err := os.Stat(at("met")); err == nil {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	time.Sleep(100 * time.Millisecond)
	if all, _ := filepath.Glob(at("*.runs")); len(all) > 64 {
		fail(1, fmt.Sprintf("error: %d at once", len(all)))
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

func read(path string) string {
	data, _ := os.ReadFile(path)
	return string(data)
}

func fail(code int, said string) {
	fmt.Fprintln(os.Stderr, said)
	os.Exit(code)
}
