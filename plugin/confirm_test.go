package plugin

import (
	"context"
	"testing"
	"time"

	"cni-unwind/journal"
)

// wantConfirmation checks that the DEL of the pod's one pending step passed, proves nothing, and
// runs once more after a grace period that has just begun.
func (p *pod) wantConfirmation(grace time.Duration) {
	p.Helper()
	e := p.entry()
	if e == nil || e.Pending() != 1 {
		p.Fatalf("the journal has %+v, want one step", e)
	}
	s := e.Newest().Steps[0]
	in := time.Duration(s.ConfirmAt - journal.BootNanos())
	if in > grace || in < grace-time.Minute || s.LastError != "" {
		p.Errorf("the DEL runs once more in %s, want %s; %q", in, grace, s.LastError)
	}
	if s.ADD != journal.AddCutOff && s.RepeatAt != 0 {
		p.Error("it counts as killed")
	}
}

// TestConfirmationIsNoKill: aws-cni's DEL passed, proves nothing and waits for the one once more.
// portmap, whose DEL failed, keeps nearly the whole time of a DEL. If a delegate was killed, it has
// its part.
func TestConfirmationIsNoKill(t *testing.T) {
	t.Parallel()
	a := newAWS(t)
	a.conf["gracePeriod"] = "1h"
	list := a.unwind(a.plugin(), a.faulty("p1", ""))
	p := a.pod("a")
	p.mustAdd(list)
	a.plan(map[string]map[string]string{"p1": {"DEL": "fail"}})
	if err := p.del(list); err == nil {
		t.Fatal("the DEL passed")
	}
	limit := func() time.Duration {
		e := p.entry()
		if e == nil || e.Pending() != 2 {
			t.Fatalf("%+v, want two steps", e)
		}
		u := undoing{op: &op{Plugin: &Plugin{Budgets: DefaultBudgets}}, entry: e, gen: e.Newest(), left: 2}
		ctx, cancel := context.WithTimeout(t.Context(), DefaultBudgets.Undo)
		defer cancel()
		began := time.Now()
		ctx, cancel, ok := u.share(ctx, &u.gen.Steps[1])
		if !ok {
			t.Fatal("no time")
		}
		defer cancel()
		deadline, _ := ctx.Deadline()
		return deadline.Sub(began)
	}
	unsure := limit()
	p.edit(func(g *journal.Generation) { g.Steps[0].RepeatAt = g.Steps[0].ConfirmAt })
	if hung := limit(); unsure < hung*3/2 {
		t.Errorf("portmap has %s beside a DEL that proves nothing, and %s beside a killed one", unsure, hung)
	}
	if got, want := p.entry().Newest().Steps[0], OnceMore(true, true); pendingSteps(p.entry())[0] != got.Type+" ("+want+")" {
		t.Errorf("%q", pendingSteps(p.entry()))
	}
}

// TestConfirmationAfterReboot: a DEL of a later boot proves as little as one of the same boot. A
// time that a longer boot has left holds nothing up.
func TestConfirmationAfterReboot(t *testing.T) {
	t.Parallel()
	n, list := newWhereabouts(t)
	p := n.pod("a")
	p.mustAdd(list)
	p.edit(func(g *journal.Generation) { g.Host.BootID = "another" })
	n.sweep(DefaultBudgets)
	p.wantConfirmation(time.Hour)
	n.sweep(DefaultBudgets)
	p.mustDel(list)
	p.wantConfirmation(time.Hour)
	p.edit(func(g *journal.Generation) { g.Steps[0].ConfirmAt += int64(time.Hour) }) // of a longer boot
	n.sweep(DefaultBudgets)
	if e := p.entry(); e != nil {
		t.Errorf("%+v, want nothing", e)
	}
}
