package plugin

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
	"github.com/containernetworking/plugins/pkg/ns"

	"cni-unwind/ipam"
	"cni-unwind/journal"
)

// scratchAllowed are the plugins that are shown a scratch namespace when the container's cannot be named: with it they
// find and remove what they otherwise leave on the host (bridge, ptp: a nat chain; tuning: its backup file; sbr fails
// without one). A plugin that moves a device back to the host must never be here.
var scratchAllowed = []string{"bridge", "ptp", "sbr", "tuning"}

// undo runs the DELs that an entry owes, newest generation first, each in reverse order, and takes out of the entry what
// is undone. It returns the failures; what is left without one is parked, or waits for its second DEL. The caller holds
// the entry's lock, and writes the entry.
//
// The time that ctx has is divided over the steps that are left, but into no parts in which a delegate that is well would
// be killed: a pass without time for the next step ends. A step that failed or hung last time goes last. After a pass that
// was cut off or ended early, the next one begins with another step.
func (o *op) undo(ctx context.Context, lock *journal.Lock, e *journal.Entry, cniNetns string) []*failure {
	o.claimHeld(e)
	var failures []*failure
	left := e.Pending()
	for i := len(e.Generations) - 1; i >= 0; i-- {
		u := undoing{op: o, lock: lock, entry: e, gen: &e.Generations[i], left: left}
		left -= len(u.gen.Steps)
		if i == len(e.Generations)-1 {
			u.cniNetns = cniNetns
		}
		failures = append(failures, u.pass(ctx)...)
	}
	e.Generations = slices.DeleteFunc(e.Generations, func(g journal.Generation) bool { return len(g.Steps) == 0 })
	return failures
}

// undoing is one pass over the steps of one generation.
type undoing struct {
	*op
	lock     *journal.Lock
	entry    *journal.Entry
	gen      *journal.Generation
	cniNetns string // as the runtime gave it with this DEL, or ""
	left     int    // steps in this generation and in those that come after it
	place    place
	foreign  []netip.Addr // claimed addresses that another attachment owns
}

func (u *undoing) pass(ctx context.Context) []*failure {
	var failures []*failure
	u.place = u.find()
	defer u.place.release()
	u.foreign = u.foreignAddresses(ctx)
	for _, index := range undoOrder(u.gen) {
		at := slices.IndexFunc(u.gen.Steps, func(s journal.Step) bool { return s.Index == index })
		step := &u.gen.Steps[at]
		if u.late(step) {
			u.foreign = u.foreignAddresses(ctx)
		}
		stepCtx, cancel, ok := u.share(ctx, step)
		if !ok {
			return append(failures, &failure{plugin: step.Type, command: "DEL", code: types.ErrTryAgainLater,
				msg: "no time was left for it", unstarted: true})
		}
		u.left--
		f := u.del(stepCtx, step)
		cancel()
		if u.settled(step, f) {
			u.gen.Steps = slices.Delete(u.gen.Steps, at, at+1)
		}
		if f != nil {
			failures = append(failures, f)
		}
		u.at("undone")
	}
	u.gen.Undo.Ended = u.gen.Undo.Began
	u.releaseHeld(ctx)
	return failures
}

// releaseHeld releases what host-local still keeps for the attachment, where its owner is undone, or the namespace proven
// gone: that a DEL passed is no proof. host-device keeps the address when its device is gone, and who fails at something
// else may not come to its IPAM.
func (u *undoing) releaseHeld(ctx context.Context) {
	owner := ipam.Owner{ContainerID: u.entry.ContainerID, IfName: u.entry.IfName}
	for _, c := range u.gen.Claims {
		if c.Pool == "" || !u.gen.Freed(c) && !u.place.gone || u.claimedAgain(c) {
			continue
		}
		freed, err := ipam.Free(ctx, c.Pool, owner, c.Address)
		if err != nil {
			u.log.Warn("releasing an address that its DEL left", "attachment", u.entry.Key.String(), "address", c.Address, "err", err)
		}
		if freed {
			u.log.Info("released an address that its DEL left", "attachment", u.entry.Key.String(), "address", c.Address)
		}
	}
}

// claimedAgain says whether another ADD of the attachment got the same address.
func (u *undoing) claimedAgain(c journal.Claim) bool {
	return slices.ContainsFunc(u.entry.Generations, func(g journal.Generation) bool {
		return g.Number != u.gen.Number && slices.ContainsFunc(g.Claims, func(o journal.Claim) bool { return o.Address == c.Address })
	})
}

// undoOrder returns the indexes of the steps in the order of their DELs.
func undoOrder(g *journal.Generation) []int {
	var first, last []int
	for _, s := range slices.Backward(g.Steps) {
		if s.LastError != "" {
			last = append(last, s.Index)
		} else {
			first = append(first, s.Index)
		}
	}
	order := append(first, last...)
	if cut := g.Undo.Began - 1 - g.Undo.Ended; cut > 0 && len(order) > 0 {
		n := cut % len(order)
		order = append(order[n:], order[:n]...)
	}
	return order
}

// share gives a step its part of the time that is left, if that is enough.
func (u *undoing) share(ctx context.Context, step *journal.Step) (_ context.Context, _ context.CancelFunc, ok bool) {
	deadline, bounded := ctx.Deadline()
	if !bounded {
		ctx, cancel := context.WithCancel(ctx)
		return ctx, cancel, true
	}
	left := time.Until(deadline)
	if left < u.Budgets.Step {
		return nil, nil, false
	}
	limit := max(left/time.Duration(u.left), u.Budgets.Step)
	if u.late(step) {
		limit = min(limit, u.Budgets.LateDel)
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	return ctx, cancel, true
}

// late says whether a step would be shown an address that it knows from prevResult alone, and that may have been given to
// another container since the delegate that brought it was undone, or since whatever else took it back: of an attachment
// that the journal did not know, every delegate is still to be asked. Such a DEL must be over before an ADD that gets the
// address stops waiting for it.
func (u *undoing) late(step *journal.Step) bool {
	return slices.ContainsFunc(u.gen.Claims, func(c journal.Claim) bool {
		return c.Receives(step.Index) && (u.gen.Freed(c) || u.takenBack(c))
	})
}

// takenBack says whether host-local's own file does not say that a claimed address is still the attachment's.
func (u *undoing) takenBack(c journal.Claim) bool {
	if c.Pool == "" {
		return false
	}
	owner, given, err := ipam.OwnerOf(c.Pool, c.Address)
	return err != nil || !given || !owner.Is(u.entry.ContainerID, u.entry.IfName)
}

// del runs the DEL of one step. If the delegate rejects its own configuration of then as bad (it was upgraded and knows it
// no more), it is shown the one that the chain has for it now. After no other error: success with another configuration
// says nothing about what the first one took.
func (u *undoing) del(ctx context.Context, step *journal.Step) *failure {
	f := u.delWith(ctx, step, step.Config, u.versionOf(step))
	if f == nil || !slices.Contains(rejections, f.code) || f.killed {
		return f
	}
	config, cniVersion := u.current(step)
	if config == nil || bytes.Equal(config, step.Config) {
		return f
	}
	if again := u.delWith(ctx, step, config, cniVersion); again != nil {
		f.killed = again.killed
		return f
	}
	u.log.Info("DEL passed with the chain's present configuration, after the delegate rejected that of the ADD",
		"plugin", step.Type, "attachment", u.entry.Key.String(), "rejected", shorten(f.msg, 200))
	step.Config, step.Replaced = config, true
	return nil
}

// rejections are the codes with which a delegate says that it cannot use its configuration.
var rejections = []uint{types.ErrIncompatibleCNIVersion, types.ErrUnsupportedField, types.ErrDecodingFailure, types.ErrInvalidNetworkConfig}

// versionOf returns the version in which a step's delegate is spoken to: that of the ADD, or of what replaced its configuration.
func (u *undoing) versionOf(step *journal.Step) string {
	var conf struct {
		CNIVersion string `json:"cniVersion"`
	}
	if step.Replaced && json.Unmarshal(step.Config, &conf) == nil {
		return conf.CNIVersion
	}
	return u.gen.CNIVersion
}

// current returns the configuration that the chain, as the verb was given it, has for the delegate of a step, with what the
// runtime gave to the ADD; nil if there is no such chain or delegate.
func (u *undoing) current(step *journal.Step) (config json.RawMessage, cniVersion string) {
	if u.conf.Name != u.entry.Network {
		return nil, ""
	}
	chain, err := u.conf.LoadChain()
	if err != nil {
		return nil, ""
	}
	i := chain.only(step.Type)
	if i < 0 || slices.ContainsFunc(u.gen.Steps, func(s journal.Step) bool { return s.Type == step.Type && s.Index != step.Index }) {
		return nil, ""
	}
	conf := *u.conf
	conf.RuntimeConfig, conf.Injected = objectOf(u.gen.RuntimeConfig), map[string]json.RawMessage{}
	for key, value := range objectOf(step.Config) {
		if slices.Contains(injectedKeys, key) {
			conf.Injected[key] = value
		}
	}
	return chain.Config(i, &conf), chain.CNIVersion
}

func (u *undoing) delWith(ctx context.Context, step *journal.Step, config json.RawMessage, cniVersion string) *failure {
	g := u.gen
	c := &call{
		command: "DEL", plugin: step.Type, path: g.Path, containerID: u.entry.ContainerID, ifname: u.entry.IfName,
		netns: u.place.path, args: g.Args, stdin: config,
	}
	if u.lock != nil {
		c.lock = u.lock.File()
	}
	if _, err := findPlugin(step.Type, c.path); err != nil {
		c.path = u.args.Path // the runtime's folder of plugins may have moved
	}
	if prevResult, err := u.prevResult(cniVersion); err != nil {
		return c.failed(0, "its prevResult: "+err.Error())
	} else if prevResult != nil {
		c.stdin = withPrevResult(config, prevResult)
	}
	stderr := u.Stderr
	if step.LastError != "" {
		stderr = io.Discard // it has said it before
	}
	if !slices.Contains(scratchAllowed, step.Type) {
		_, f := c.run(ctx, stderr)
		return f
	}
	if u.place.path != "" && u.hasInterface() {
		// The namespace may be removed meanwhile. A plugin that does not find it any more succeeds, and leaves the rest.
		if _, f := c.run(ctx, stderr); f != nil || u.stillThere() {
			return f
		}
	}
	path, remove, err := scratchNetNS(u.entry.IfName, u.addressesHad())
	if err != nil {
		u.log.Warn("no scratch network namespace; the plugin may leave rules behind", "plugin", step.Type, "err", err)
	} else {
		defer remove()
		c.netns = path
	}
	_, f := c.run(ctx, stderr)
	return f
}

// stillThere says whether the path that the DELs are shown names a network namespace.
func (u *undoing) stillThere() bool {
	_, err := identify(u.place.path)
	return err == nil
}

// prevResult returns what every DEL of the pass gets: the final result of the ADD, or the best known, without the
// addresses that are another attachment's by now. As libcni, it gives none before version 0.4.0.
func (u *undoing) prevResult(cniVersion string) (json.RawMessage, error) {
	if u.gen.Result == nil {
		return nil, nil
	}
	if has, err := version.GreaterThanOrEqualTo(cniVersion, "0.4.0"); err != nil || !has {
		return nil, err
	}
	result := u.gen.Result
	if cniVersion != u.gen.CNIVersion {
		var err error
		if result, err = convertResult(result, cniVersion); err != nil {
			return nil, err
		}
	}
	if len(u.foreign) == 0 {
		return result, nil
	}
	return withoutAddresses(result, u.foreign)
}

// hasInterface says whether the container's interface is in the namespace that the DELs are shown, or may be. It is not
// there for the second DEL of a bridge that removed it and then failed at its rules.
func (u *undoing) hasInterface() bool {
	there, err := linkIn(u.place.path, u.entry.IfName)
	return there || err != nil
}

// claimHeld claims, where the delegate that got addresses was cut off before its result was written, those that
// host-local's own files say it has: its first DEL frees them, and a second one must still find them. So it is done, and
// written, before the first one. It says whether there are any.
func (o *op) claimHeld(e *journal.Entry) (found bool) {
	for i := range e.Generations {
		g := &e.Generations[i]
		for _, step := range g.Steps {
			pool := ipam.Pool(step.Config, e.Network)
			if pool == "" || slices.ContainsFunc(g.Claims, func(c journal.Claim) bool { return c.Step == step.Index }) {
				continue
			}
			held, err := ipam.HeldBy(pool, e.ContainerID, e.IfName)
			if err != nil {
				o.log.Warn("looking for the addresses of a container", "attachment", e.Key.String(), "pool", pool, "err", err)
			}
			for _, a := range held {
				g.Claims = append(g.Claims, journal.Claim{Address: a, Step: step.Index, Pool: pool})
				found = true
			}
		}
	}
	return found
}

// addressesHad returns the addresses that the container's interface had: as the best known result has them, or as claimed.
func (u *undoing) addressesHad() []netip.Prefix {
	if r, err := parseResult(u.gen.Result); err == nil && len(r.prefixes()) > 0 {
		return r.prefixes()
	}
	var prefixes []netip.Prefix
	for _, c := range u.gen.Claims {
		prefixes = append(prefixes, netip.PrefixFrom(c.Address, c.Address.BitLen()))
	}
	return prefixes
}

// settled notes how the DEL of a step ended and says whether the step is undone.
func (u *undoing) settled(step *journal.Step, f *failure) bool {
	step.Attempts++
	step.RetryAt = journal.BootNanos() + int64(backoff(step.Attempts))
	wasParked := step.Parked
	step.Parked = false
	if f != nil {
		if step.LastError == "" || step.LastCode != f.code {
			u.log.Warn("DEL failed and is pending", "plugin", step.Type, "attachment", u.entry.Key.String(),
				"code", f.code, "err", shorten(f.said(), 500))
		}
		step.LastError, step.LastCode = shorten(f.said(), 500), f.code
		if f.killed {
			step.RepeatAt = journal.BootNanos() + int64(u.conf.GracePeriod)
		}
		return false
	}
	step.LastError, step.LastCode = "", 0
	if address, is := u.foreignTo(step); is {
		if step.Parked = true; !wasParked {
			u.log.Info("DEL parked: its address has another owner", "plugin", step.Type,
				"attachment", u.entry.Key.String(), "address", address)
			event := eventOf(journal.Parked, u.entry)
			event.Reason, event.Plugins = fmt.Sprintf("%s has another owner", address), []string{step.Type}
			u.tell(event)
		}
		return false
	}
	return !u.waits(u.gen, step)
}

// foreignTo returns an address that a step was to be shown, and was not since it belongs to another attachment.
func (u *undoing) foreignTo(step *journal.Step) (address netip.Addr, is bool) {
	for _, c := range u.gen.Claims {
		if c.Receives(step.Index) && slices.Contains(u.foreign, c.Address) {
			return c.Address, true
		}
	}
	return address, false
}

// maxBackoff bounds the time between two tries of a DEL that fails.
const maxBackoff = 30 * time.Second

// backoff returns how long no sweep tries a DEL that was tried so many times: not at all after the first, since the
// rollback of an ADD and the next sandbox's may come at once; then 2 s, 4 s, 8 s and so on. The attachments of a node are
// spread over half of that time.
func backoff(attempts int) time.Duration {
	if attempts < 2 {
		return 0
	}
	d := maxBackoff
	if attempts < 6 {
		d = time.Second << (attempts - 1)
	}
	return d/2 + rand.N(d/2)
}

// waits says whether the time for a killed delegate's second DEL has not come. A reboot ends whatever it was about.
func (o *op) waits(g *journal.Generation, step *journal.Step) bool {
	return step.RepeatAt != 0 && o.sameBoot(g) == yes && journal.BootNanos() < step.RepeatAt
}

// due says whether an entry has a step that waits for nothing: neither for its second DEL, nor for the new owner of its
// address, nor, unless the try is eager, for the time of its next one.
func (o *op) due(ctx context.Context, e *journal.Entry, eager bool) bool {
	now := journal.BootNanos()
	for i := range e.Generations {
		u := undoing{op: o, entry: e, gen: &e.Generations[i]}
		for j := range u.gen.Steps {
			s := &u.gen.Steps[j]
			switch wait := s.RetryAt - now; {
			case s.Attempts == 0:
				return true
			case s.LastError != "":
				if eager || wait <= 0 || wait > int64(maxBackoff) { // of another boot
					return true
				}
			case s.Parked:
				if u.foreign == nil {
					u.foreign = u.foreignAddresses(ctx)
				}
				if _, is := u.foreignTo(s); !is {
					return true
				}
			case !o.waits(u.gen, s):
				return true
			}
		}
	}
	return false
}

// place is where the DELs of a generation run.
type place struct {
	path string   // CNI_NETNS; "" if there is no namespace to name
	gone bool     // the namespace is proven gone
	held ns.NetNS // what path names, if it is open in this process
}

// release closes the namespace. path may name nothing, or another one, from then on.
func (p place) release() {
	if p.held != nil {
		_ = p.held.Close()
	}
}

// find looks for the generation's network namespace: where the runtime says, where it was, or in a process that is in it.
// Another namespace at one of these paths is never named to a delegate.
func (u *undoing) find() place {
	g := u.gen
	if !g.NetNS.Known() {
		return u.findUnknown()
	}
	if u.sameBoot(g) == no {
		return place{gone: true} // identities of another boot mean nothing in this one
	}
	for _, path := range []string{u.cniNetns, g.NetNS.Path} {
		if id, err := identify(path); err == nil && g.NetNS.Same(id) {
			return place{path: path}
		}
	}
	_, held, err := openByProcess(g.NetNS)
	if held != nil {
		return place{path: fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), held.Fd()), held: held}
	}
	// The kernel takes a namespace apart some time after its last user is gone. A host link that was there and is not
	// any more proves as much as a look at every process.
	linkGone := u.awaitHostLinkGone()
	return place{gone: linkGone && (err == nil || len(g.HostLinks) > 0)}
}

// awaitHostLinkGone says whether no host's end of the container's interface is there, or goes within a moment.
func (u *undoing) awaitHostLinkGone() bool {
	for end := time.Now().Add(u.Budgets.HostLink); ; time.Sleep(5 * time.Millisecond) {
		there, err := hostLinkThere(u.gen.HostLinks)
		if err != nil || there && time.Now().After(end) {
			return false
		}
		if !there {
			return true
		}
	}
}

// findUnknown goes by the runtime's word: the ADD did not tell which namespace it was, or there is no record of one.
func (u *undoing) findUnknown() place {
	for _, path := range []string{u.cniNetns, u.gen.NetNS.Path} {
		if _, err := identify(path); err == nil {
			return place{path: path}
		}
	}
	return place{gone: u.awaitHostLinkGone()}
}
