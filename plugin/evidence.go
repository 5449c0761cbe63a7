package plugin

import (
	"errors"
	"strings"
	"time"

	"github.com/containernetworking/plugins/pkg/ns"

	"cni-unwind/journal"
)

// judge gives the verdict on an attachment whose lock we do not hold.
func (o *op) judge(e *journal.Entry) verdict { return decide(o.gather(e, nil)) }

// gather gathers the evidence on an attachment. ours is its lock if we hold it.
func (o *op) gather(e *journal.Entry, ours *journal.Lock) evidence {
	ev := evidence{state: e.State, why: e.Reason}
	if ours != nil {
		ev.locked, ev.lockFile = no, answerOf(!ours.Made(), nil)
	} else {
		locked, exists, err := o.store.Locked(e.Key)
		ev.locked, ev.lockFile = answerOf(locked, err), answerOf(exists, err)
	}
	g := e.Newest()
	ev.observer = o.sees(g)
	ev.sameBoot, ev.otherHost = o.sameBoot(g), o.otherHost(g)
	ev.listed = o.list.has(e)
	if ev.sameBoot == yes {
		if e.Updated.Boot != 0 {
			ev.aged = answerOf(journal.BootNanos()-e.Updated.Boot > int64(o.gracePeriod(e)), nil)
		}
		o.lookAt(g, &ev)
	}
	return ev
}

// gracePeriod returns that of the attachment's network as it is configured now, or as it was at the ADD.
func (o *op) gracePeriod(e *journal.Entry) time.Duration {
	if recorded := e.Newest().GracePeriod; e.Network != o.conf.Name && recorded != 0 {
		return recorded
	}
	return o.conf.GracePeriod
}

// lookAt looks for one ADD's namespace and interface.
func (o *op) lookAt(g *journal.Generation, ev *evidence) {
	if !g.NetNS.Known() {
		return
	}
	there, err := identify(g.NetNS.Path)
	if isNoNetNS(err) {
		err = nil
	}
	ev.netns = answerOf(g.NetNS.Same(there), err)
	if ev.netns == yes && ev.listed != no {
		return
	}
	pid, err := processIn(g.NetNS)
	ev.inside = answerOf(pid != 0, err)
	if ev.netns != yes {
		ev.hostLink = answerOf(hostLinkThere(g.HostLinks))
	}
}

func (o *op) sameBoot(g *journal.Generation) answer {
	if g.Host.BootID == "" || o.host.BootID == "" {
		return unknown
	}
	return answerOf(g.Host.BootID == o.host.BootID, nil)
}

// otherHost compares machines where both have the same kind of name: where one is a DMI UUID and the other a machine-id,
// nothing is known.
func (o *op) otherHost(g *journal.Generation) answer {
	ours, _, _ := strings.Cut(o.host.Machine, ":")
	theirs, _, _ := strings.Cut(g.Host.Machine, ":")
	if ours == "" || ours != theirs {
		return unknown
	}
	return answerOf(g.Host.Machine != o.host.Machine, nil)
}

// sees says whether this process sees what the ADD saw, so that what is not there for the one is not there for the other.
// A runtime starts us where it started the ADD. Anyone else has to be in the same namespaces: in a container with the
// state folder mounted every network namespace looks gone, and no process is in it. The numbers of namespaces mean nothing
// in another boot, but for that of the first PID namespace, whose process 1 is in the others.
func (o *op) sees(g *journal.Generation) answer {
	if o.invoked {
		return yes
	}
	theirs := g.Host
	if o.sameBoot(g) == no {
		init := namespaces("/proc/1/ns/")
		theirs.MountNS, theirs.NetNS, theirs.TimeNS = init.MountNS, init.NetNS, init.TimeNS
	}
	for _, pair := range [][2]string{{o.host.MountNS, theirs.MountNS}, {o.host.PIDNS, theirs.PIDNS}} {
		if pair[0] == "" || pair[1] == "" {
			return unknown
		}
		if pair[0] != pair[1] {
			return no
		}
	}
	for _, pair := range [][2]string{{o.host.NetNS, theirs.NetNS}, {o.host.TimeNS, theirs.TimeNS}} {
		if pair[1] != "" && pair[0] != pair[1] {
			return no
		}
	}
	return yes
}

// isNoNetNS says whether an error of identify means that no network namespace is at the path.
func isNoNetNS(err error) bool {
	return errors.As(err, new(ns.NSPathNotExistErr)) || errors.As(err, new(ns.NSPathNotNSErr))
}

// List is a runtime's account of what is attached.
type List struct {
	Network string // the network that it speaks of; "" for all
	Pods    bool   // it speaks of pods only
	// Valid has the attachments, by container ID and interface; an interface "" stands for all of a container.
	Valid map[Attachment]bool
}

// Attachment names an attachment within a network, as a runtime lists it (SPEC 1.1 §2 GC).
type Attachment struct {
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifname"`
}

// NewList makes a list of what is attached to a network.
func NewList(network string, valid []Attachment) *List {
	l := &List{Network: network, Valid: map[Attachment]bool{}}
	for _, a := range valid {
		l.Valid[a] = true
	}
	return l
}

// has says whether an attachment is on the list. No list, and one that does not speak of it, leave it unknown. A container of
// podman's has the name of a pod in its arguments, but no namespace (podman#12083).
func (l *List) has(e *journal.Entry) answer {
	if l == nil || l.Network != "" && l.Network != e.Network || l.Pods && (e.Pod.Namespace == "" || e.Pod.Name == "") {
		return unknown
	}
	return answerOf(l.names(e.Key), nil)
}

func (l *List) names(k journal.Key) bool {
	return l.Valid[Attachment{k.ContainerID, k.IfName}] || l.Valid[Attachment{k.ContainerID, ""}]
}
