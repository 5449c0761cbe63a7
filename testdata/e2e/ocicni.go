package e2e

import "fmt"

// Ocicni is CRI-O's CNI library on a node: its network is that of the node's /etc/cni/net.d.
type Ocicni struct{ node *Node }

// NewOcicni returns the node's.
func (n *Node) NewOcicni() *Ocicni { return &Ocicni{n} }

// Add makes a sandbox of a pod, with a network namespace of its ID. If the ADD fails, the DEL
// follows, and the namespace goes.
func (o *Ocicni) Add(pod, id string) error {
	o.node.Helper()
	o.node.AddNetNS(id)
	err := o.run("add", pod, id, netnsOf(id))
	if err != nil {
		o.node.RemoveNetNS(id)
	}
	return err
}

// Del sends the DEL of a sandbox. Its network namespace stays.
func (o *Ocicni) Del(pod, id string) error {
	o.node.Helper()
	return o.run("del", pod, id, netnsOf(id))
}

// Status sends STATUS once.
func (o *Ocicni) Status() error {
	o.node.Helper()
	return o.run("status")
}

// GC sends GC with these sandboxes, as a start of CRI-O does. Without any, the list of the network is
// null.
func (o *Ocicni) GC(ids ...string) error {
	o.node.Helper()
	args := []string{"gc"}
	for _, id := range ids {
		args = append(args, id+":"+netnsOf(id))
	}
	return o.run(args...)
}

func (o *Ocicni) run(args ...string) error {
	o.node.Helper()
	_, stderr, err := o.node.Try(tool(o.node, "ocicni/ocicni"), args...)
	if err != nil {
		return fmt.Errorf("%w: %s", err, stderr)
	}
	return nil
}

func netnsOf(id string) string { return "/run/netns/" + id }
