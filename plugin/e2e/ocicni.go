package e2e

import "fmt"

// Ocicni runs CRI-O's CNI library on a node, with the network in the node's /etc/cni/net.d.
type Ocicni struct{ node *Node }

func (n *Node) NewOcicni() *Ocicni { return &Ocicni{n} }

// Add starts a sandbox of a pod, in a new network namespace with the sandbox's ID as its name. If
// the ADD fails, Add sends the DEL and removes the namespace.
func (o *Ocicni) Add(pod, id string) error {
	o.node.Helper()
	o.node.AddNetNS(id)
	err := o.run("add", pod, id, netnsOf(id))
	if err != nil {
		o.node.RemoveNetNS(id)
	}
	return err
}

// Del sends the DEL of a sandbox. It does not remove the network namespace.
func (o *Ocicni) Del(pod, id string) error {
	o.node.Helper()
	return o.run("del", pod, id, netnsOf(id))
}

// Status sends STATUS once.
func (o *Ocicni) Status() error {
	o.node.Helper()
	return o.run("status")
}

// GC sends GC with the given sandboxes as valid, as CRI-O does at its start. Without sandboxes, the
// list of valid attachments is null.
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
