package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	"cni-unwind/cmd/internal/term"
)

// container is the agent's container in its pod.
const container = "agent"

// agent is the agent's pod on a node, or the reason why the node cannot be queried.
type agent struct{ node, pod, why string }

// pod contains the fields of a pod that this program reads, as kubectl get -o json prints them.
type pod struct {
	Metadata struct{ Name, DeletionTimestamp string }
	Spec     struct {
		NodeName string
		Affinity struct {
			NodeAffinity struct {
				Required struct {
					NodeSelectorTerms []struct{ MatchFields []struct{ Values []string } }
				} `json:"requiredDuringSchedulingIgnoredDuringExecution"`
			}
		}
	}
	Status struct {
		Phase, Reason, Message string
		Conditions             []struct{ Status, Message string }
		ContainerStatuses      []struct {
			Name  string
			State struct {
				Running    *struct{}
				Waiting    *struct{ Reason, Message string }
				Terminated *struct{ Reason string }
			}
		}
	}
}

// findAgents returns an entry for each node, sorted by name: each node with an agent's pod and, if
// the user may list nodes, each Linux node without an agent. Selecting nodes by label requires that
// permission.
func findAgents(ctx context.Context, o *options, stderr io.Writer) ([]agent, error) {
	out, err := o.run(ctx, "get", "pods", "--selector="+o.agents, "-o", "json")
	if err != nil {
		return nil, fmt.Errorf("cannot list the agents' pods: %w", err)
	}
	var pods struct{ Items []pod }
	if err := json.Unmarshal(out, &pods); err != nil {
		return nil, fmt.Errorf("cannot list the agents' pods: kubectl printed invalid JSON: %w", err)
	}
	if len(pods.Items) == 0 {
		return nil, term.WithHint("if the agents run elsewhere, set --namespace and --agent-selector",
			"no pods in namespace %s match the agent selector %s", o.namespace, o.agents)
	}
	agents := choose(pods.Items)
	const none = "no agent on this node"
	labels := strings.TrimSuffix("kubernetes.io/os=linux,"+o.selector, ",")
	out, err = o.run(ctx, "get", "nodes", "--selector="+labels, "-o", "name")
	found := strings.Fields(strings.ReplaceAll(string(out), "node/", ""))
	switch {
	case o.selector == "" && err != nil:
		fmt.Fprintf(stderr, "warning: cannot list the nodes, so nodes without an agent are not shown: "+
			"%v\n", err)
	case err != nil:
		return nil, fmt.Errorf("cannot list the nodes that match the selector %s: %w", o.selector, err)
	case o.selector != "" && len(found) == 0:
		return nil, fmt.Errorf("no Linux node matches the selector %s", o.selector)
	case o.selector != "":
		o.nodes = found
	}
	for _, name := range found {
		agents = addMissing(agents, name, none)
	}
	if len(o.nodes) > 0 {
		missing := "no such node"
		if err != nil {
			missing = none
		}
		for _, name := range o.nodes {
			agents = addMissing(agents, name, missing)
		}
		agents = slices.DeleteFunc(agents, func(a agent) bool {
			return !slices.Contains(o.nodes, a.node)
		})
	}
	slices.SortFunc(agents, func(a, b agent) int { return cmp.Compare(a.node, b.node) })
	return agents, ctx.Err()
}

func addMissing(agents []agent, node, why string) []agent {
	if slices.ContainsFunc(agents, func(a agent) bool { return a.node == node }) {
		return agents
	}
	return append(agents, agent{node: node, why: why})
}

// choose returns the agent's pod to use on each node. A node has several such pods while a new one
// replaces an old one.
func choose(pods []pod) (agents []agent) {
	rank := func(p *pod) int {
		switch {
		case p.why() != "":
			return 2
		case p.Metadata.DeletionTimestamp != "":
			return 1
		}
		return 0
	}
	slices.SortStableFunc(pods, func(a, b pod) int { return cmp.Compare(rank(&a), rank(&b)) })
	for i := range pods {
		p := &pods[i]
		if node := p.node(); !slices.ContainsFunc(agents, func(a agent) bool { return a.node == node }) {
			agents = append(agents, agent{node, p.Metadata.Name, p.why()})
		}
	}
	return agents
}

// node returns the node of a pod. If the scheduler has not placed the pod yet, node returns the
// node that the DaemonSet controller named in the pod's affinity.
func (p *pod) node() string {
	if p.Spec.NodeName == "" {
		for _, t := range p.Spec.Affinity.NodeAffinity.Required.NodeSelectorTerms {
			for _, f := range t.MatchFields {
				return strings.Join(f.Values, ",")
			}
		}
	}
	return cmp.Or(p.Spec.NodeName, "?")
}

// why returns the reason why a pod cannot run commands, or "" if it can. A pod that is not ready
// can run commands: doctor may explain why it is not ready.
func (p *pod) why() string {
	words := []string{p.Status.Phase, p.Status.Reason, p.Status.Message}
	if len(p.Status.ContainerStatuses) > 0 {
		words = []string{"no container named " + container}
	}
	for _, c := range p.Status.ContainerStatuses {
		switch {
		case c.Name != container:
			continue
		case c.State.Running != nil:
			return ""
		case c.State.Waiting != nil:
			words = []string{c.State.Waiting.Reason, c.State.Waiting.Message}
		case c.State.Terminated != nil:
			words = []string{"terminated", c.State.Terminated.Reason}
		}
	}
	if len(p.Status.ContainerStatuses) == 0 {
		for _, c := range p.Status.Conditions {
			if c.Status == "False" {
				words = append(words, c.Message)
			}
		}
	}
	words = slices.DeleteFunc(words, func(w string) bool { return w == "" })
	return fmt.Sprintf("pod %s: %s", p.Metadata.Name, strings.Join(words, ": "))
}
