package plugin

import (
	"context"
	"fmt"
	"time"
	"unicode/utf8"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/journal"
	"cni-unwind/plugin/internal/host"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/record"
)

// adding is one running ADD.
//
//  1. Read the configuration and resolve every binary. An error here takes nothing.
//  2. Take the attachment's lock.
//  3. Release what is left of earlier ADDs of this attachment and of its pod.
//  4. Write the intent: the entry in state adding, with the whole chain.
//  5. Run each delegate. If its result differs from the one before, write the entry in state live,
//     with the result and claims on its new addresses. An attachment that claims one of these
//     addresses and is dead is released before the next delegate runs.
//  6. Print the result.
//
// A failure from step 4 on is undone. A crash before the first result is written leaves the state
// adding with a free lock: success was never printed, so the attachment is dead. After a crash
// between that and the print the attachment looks live until the runtime's DEL comes or its network
// namespace is gone. Either way every delegate of the chain gets its DEL, as libcni does after a
// failed ADD: which ones were started is not on record.
type adding struct {
	*op
	chain   *netconf.Chain
	lock    *journal.Lock
	entry   *journal.Entry
	gen     *journal.Generation
	prior   *journal.Entry // an earlier ADD of the attachment, as the journal has it
	started int            // delegates that were started
	durable bool           // the journal says live, with all that is known
}

// checkText refuses text that a journal entry, which is JSON, would change.
func checkText(args *skel.CmdArgs) error {
	for _, v := range []struct{ name, value string }{
		{"CNI_IFNAME", args.IfName}, {"CNI_ARGS", args.Args}, {"CNI_NETNS", args.Netns}, {"CNI_PATH", args.Path},
	} {
		if !utf8.ValidString(v.value) {
			return fmt.Errorf("%s is not valid UTF-8: the journal could not give it back for the DEL", v.name)
		}
	}
	return nil
}

// journalFailed decides whether this ADD goes on without a journal, or fails. It also fails if the
// journal has an earlier ADD of the attachment that is not over: the DEL of this ADD would undo
// only what is left of the earlier one.
func (a *adding) journalFailed(ctx context.Context, err error) error {
	if a.conf.OnJournalFailure == "fail" {
		return cniError(types.ErrTryAgainLater, "unwind: "+err.Error()+` (onJournalFailure is "fail")`, "")
	}
	if a.prior == nil {
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		a.rec.Read(ctx, a.findPrior)
	}
	if a.prior != nil && !a.isOver(a.prior) {
		return cniError(types.ErrTryAgainLater, fmt.Sprintf("unwind: %v; an earlier ADD of %s is not undone", err, a.key), "")
	}
	a.rec.Degraded("ADD", err)
	a.log.Error("the journal failed; going on without it: a crash from here on, or a DEL that fails, leaks", "err", err)
	a.rec.Unwritable = true
	return nil
}

// findPrior reads the entry of an earlier ADD of the attachment.
func (a *adding) findPrior(tx *journal.Tx) (err error) {
	a.prior, err = record.Readable(tx.Get(a.key))
	return err
}

// newEntry makes the entry of this ADD.
func (a *adding) newEntry() {
	seen, err := host.Look(a.args.Netns, a.args.IfName)
	if err != nil {
		a.log.Warn("the network namespace cannot be identified", "netns", a.args.Netns, "err", err)
	}
	gen := journal.Generation{
		NetNS: seen.Netns, Occupant: seen.Occupant(), Args: a.args.Args, Path: a.args.Path, CNIVersion: a.chain.CNIVersion,
		Host: a.node.Host, Created: journal.Now(), GracePeriod: max(1, a.conf.GracePeriod), // 0 is not known
		AWSCheckpoint: a.conf.AWSCheckpoint, Steps: a.chain.Steps(a.conf),
	}
	if len(a.conf.RuntimeConfig) > 0 {
		gen.RuntimeConfig = netconf.Marshal(a.conf.RuntimeConfig)
	}
	a.entry = &journal.Entry{
		Key: a.key, State: journal.Adding, Pod: netconf.PodOf(a.args.Args), Generations: []journal.Generation{gen},
	}
	a.gen = a.entry.Newest()
}
