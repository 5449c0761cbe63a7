package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os/exec"
	"slices"
	"strings"
	"time"

	"cni-unwind/cmd/internal/term"
)

// node is a node of the cluster. pod is the agent's pod on the node, or "" if there is none.
type node struct{ name, pod string }

// supported selects the nodes on which scripts/deploy/daemonset.yaml runs agents.
const supported = "kubernetes.io/os=linux," +
	"type!=virtual-kubelet,eks.amazonaws.com/compute-type!=fargate," +
	"kubernetes.io/arch in (amd64,arm64)"

// findNodes returns the selected nodes, sorted by name. Without --nodes and --selector, these are
// all nodes with an agent's pod and, if the user may list nodes, the other supported nodes.
// --selector requires permission to list nodes.
func (o *options) findNodes(ctx context.Context, stderr io.Writer) (nodes []node, err error) {
	pods, err := o.list(ctx, stderr, "pods", "--selector="+o.agents, "--no-headers",
		"--output=custom-columns=POD:.metadata.name,NODE:.spec.nodeName,"+
			"ENDS:.metadata.deletionTimestamp,RUNS:.status.containerStatuses[*].state.running.startedAt")
	if err != nil {
		return nil, fmt.Errorf("cannot list the agents' pods: %w", err)
	}
	agents := chooseAgents(pods)
	if len(agents) == 0 {
		return nil, term.WithHint("if the agents run elsewhere, set --namespace and --agent-selector",
			"no scheduled pod in namespace %s matches the agent selector %s", o.namespace, o.agents)
	}
	names := slices.Clone(o.nodes)
	if len(names) == 0 {
		labels := strings.TrimSuffix(supported+","+o.selector, ",")
		listed, err := o.list(ctx, stderr, "nodes", "--selector="+labels, "--output=name")
		names = strings.Fields(strings.ReplaceAll(listed, "node/", ""))
		switch {
		case err != nil && (o.selector != "" || ctx.Err() != nil):
			return nil, fmt.Errorf("cannot list the nodes: %w", err)
		case err != nil:
			fmt.Fprintln(stderr, "warning: cannot list the nodes, so nodes without an agent are not shown")
		case o.selector != "" && len(names) == 0:
			return nil, fmt.Errorf("no node that unwind supports matches the selector %s", o.selector)
		}
		if o.selector == "" {
			names = slices.AppendSeq(names, maps.Keys(agents))
		}
	}
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		nodes = append(nodes, node{name, agents[name]})
	}
	return nodes, nil
}

// chooseAgents returns the agent's pod on each node, from the columns POD, NODE, ENDS and RUNS. If
// a node has several such pods, for example during an update, chooseAgents prefers a running one,
// and among several running ones, one that is not being deleted.
func chooseAgents(pods string) map[string]string {
	const none = "<none>"
	agents, ranks := map[string]string{}, map[string]int{}
	for line := range strings.Lines(pods) {
		column := strings.Fields(line)
		if len(column) < 4 || column[1] == none { // not scheduled yet
			continue
		}
		rank := 1
		if column[2] == none {
			rank++
		}
		if column[3] != none {
			rank += 2
		}
		if name := column[1]; rank > ranks[name] {
			agents[name], ranks[name] = column[0], rank
		}
	}
	return agents
}

// list returns the stdout of kubectl get.
func (o *options) list(ctx context.Context, stderr io.Writer, args ...string) (string, error) {
	var out strings.Builder
	err := o.kubectl(ctx, &out, stderr, append([]string{"get"}, args...)...)
	return out.String(), err
}

// kubectl runs kubectl with the user's flags, for at most --timeout.
func (o *options) kubectl(ctx context.Context, stdout, stderr io.Writer, args ...string) error {
	limited, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	handedOn := []string{"--namespace=" + o.namespace}
	for _, f := range kubectlFlags {
		values, _ := o.flags.GetStringArray(f[0])
		for _, value := range values {
			handedOn = append(handedOn, "--"+f[0]+"="+value)
		}
	}
	cmd := exec.CommandContext(limited, "kubectl", append(handedOn, args...)...)
	cmd.Stdout, cmd.Stderr = stdout, stderr
	cmd.WaitDelay = time.Second // a credential plugin of kubectl may keep stderr open
	err := cmd.Run()
	switch {
	case errors.Is(err, exec.ErrNotFound):
		return term.WithHint("add the directory of kubectl to PATH", "kubectl not found in PATH")
	case ctx.Err() != nil:
		return errors.New("interrupted")
	case limited.Err() != nil:
		return fmt.Errorf("no answer within %s (--timeout)", o.timeout)
	case errors.Is(err, exec.ErrWaitDelay):
		return nil
	}
	return err
}
