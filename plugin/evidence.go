package plugin

import (
	"cni-unwind/journal"

	"github.com/containernetworking/plugins/pkg/ns"
)

// judge gathers the evidence on an attachment and gives the verdict. ours is its lock if we hold it.
func (o *op) judge(e *journal.Entry, ours *journal.Lock) verdict {
	ev := o.lookAt(e.Newest())
	ev.state = e.State
	if ours != nil {
		ev.locked, ev.lockFile = no, answerOf(!ours.Made(), nil)
	} else {
		locked, exists, err := o.store.Locked(e.Key)
		ev.locked, ev.lockFile = answerOf(locked, err), answerOf(exists, err)
	}
	return decide(ev)
}

// lookAt gathers what can be seen of one ADD's namespace and interface.
func (o *op) lookAt(g *journal.Generation) evidence {
	ev := evidence{sameBoot: o.sameBoot(g)}
	if g.Host.Machine != "" && o.host.Machine != "" {
		ev.otherHost = answerOf(g.Host.Machine != o.host.Machine, nil)
	}
	if ev.sameBoot != yes || !g.NetNS.Known() {
		return ev
	}
	there, err := identify(g.NetNS.Path)
	if isNoNetNS(err) {
		err = nil
	}
	ev.netns = answerOf(g.NetNS.Same(there), err)
	if ev.netns == yes {
		return ev
	}
	pid, err := processIn(g.NetNS)
	ev.inside = answerOf(pid != 0, err)
	ev.hostLink = answerOf(hostLinkThere(g.HostLinks))
	return ev
}

func (o *op) sameBoot(g *journal.Generation) answer {
	if g.Host.BootID == "" || o.host.BootID == "" {
		return unknown
	}
	return answerOf(g.Host.BootID == o.host.BootID, nil)
}

// isNoNetNS says whether an error of identify means that no network namespace is at the path.
func isNoNetNS(err error) bool {
	switch err.(type) {
	case ns.NSPathNotExistErr, ns.NSPathNotNSErr:
		return true
	}
	return false
}
