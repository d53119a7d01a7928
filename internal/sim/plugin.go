package sim

import (
	"fmt"
	"slices"
	"time"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// epoch is one process of a plugin.
type epoch struct {
	engine  int32
	inc     uint64
	number  uint32
	alive   bool  // the process runs
	noticed bool  // the host knows that it does not
	fenced  bool  // its lease is at EOF: it neither reads nor writes any more
	fenceAt int64 // when that is, 0: while it lives
	frozen  int   // by so many faults
	granted []opener
	retires int64 // since when, in its engine's time, a newer one serves; 0: it is the newest that came up
	ends    bool  // its engine asked for its end
}

// state of an op, in truth.
type opState uint8

const (
	opRuns   opState = iota // submitted
	opLate                  // ended with quiet=no: what is left of it lands later
	opQuiet                 // nothing of it can land or be read any more
	opDead                  // its process ended first: what is in the network may still land
	opFenced                // and the process's accesses are provably over
)

// op is a submission that a plugin was given.
type op struct {
	id       core.OpID
	s, d     opener
	epoch    int32 // that it was given to
	peer     int32 // engine at the other end
	peerEp   int32 // epoch there that the pages are registered with, -1: it never was
	state    opState
	done     bool // it ended Done
	cut      bool // the destination's plugin refuses its writer for good
	late     bool // it will end before it has landed
	fate     core.EndKind
	why      statemachine.Reason
	bytes    int64
	from, to []int32 // pages of srcMem and dstMem
	srcMem   int32
	dstMem   int32
	landed   int32
	step     int64 // between two pages
	dice     dice
	plan     []layout.Slice // what is copied from a page to a page; nil: all
	layers   [2]int32       // from, to
	read     []tag          // cells of the pages that were read before the process died
}

func (o *op) mayLand(w *world) bool {
	return o.state != opQuiet && !o.cut && !w.sealed[o.d] && int(o.landed) < len(o.to)
}

func (o *op) mayRead() bool {
	return o.state != opQuiet && o.state != opFenced && int(o.landed) < len(o.from) && o.read == nil
}

// startPlugin starts the next epoch of an engine's plugin. If one is up the new one comes beside it, as in an upgrade.
func (w *world) startPlugin(e *engine) {
	if e.epoch >= 0 {
		w.epochs[e.epoch].retires = e.coreNow(w.now)
		w.total.retired++
	}
	e.number++
	e.epoch = int32(len(w.epochs))
	w.epochs = append(w.epochs, epoch{engine: e.id, inc: e.inc, number: e.number, alive: true})
	w.say("%s plugin epoch %d is ready", e.name(), e.number)
	w.step(e, &core.Event{Kind: core.PluginUp, Backend: backend, Epoch: e.number, ReceiverChecked: w.plan.checked})
}

// epochEnds: the process dies, by whatever cause.
func (w *world) epochEnds(at int32) {
	ep := &w.epochs[at]
	if !ep.alive {
		return
	}
	ep.alive = false
	for i := range w.ops {
		if o := &w.ops[i]; o.epoch == at && o.state != opQuiet && o.state != opFenced {
			o.state = opDead
			w.held[o.s], w.held[o.d] = true, true
			if o.dice.one(2) { // it had read what is in the network
				m := &w.mems[o.srcMem]
				o.read = make([]tag, 0, len(o.from)*int(m.cells))
				for _, page := range o.from {
					o.read = append(o.read, m.of(page)...)
				}
			} else {
				o.cut = true // it had sent nothing more
			}
		}
	}
	e := w.engines[ep.engine]
	if e.up && e.inc == ep.inc {
		w.say("%s plugin epoch %d dies", e.name(), ep.number)
		w.after(e.dice.spread(10*time.Microsecond, 100*time.Millisecond), noticed, at, 0, 0)
		ep.fenceAt = w.now + e.dice.spread(time.Millisecond, 20*time.Second)
		w.push(due{at: ep.fenceAt, what: fenced, a: at})
	}
}

// registers: an engine offers pages that are registered with one of its epochs, of which it may not know yet that it
// is gone.
func (w *world) registers(e *engine, f *core.Frame) {
	for i := range w.epochs {
		ep := &w.epochs[i]
		if ep.engine != e.id || ep.inc != e.inc || ep.number != f.Epoch {
			continue
		}
		for _, at := range w.byOwn[f.D] {
			w.lives[at].epoch = int32(i)
		}
		w.held[f.D] = w.held[f.D] || !ep.alive
	}
}

// epochNoticed: the host sees the end of the process.
func (w *world) epochNoticed(at int32) {
	ep := &w.epochs[at]
	e := w.engines[ep.engine]
	if !e.up || e.inc != ep.inc || ep.noticed {
		return
	}
	ep.noticed = true
	for i := range w.ops {
		if o := &w.ops[i]; o.epoch == at && o.state != opQuiet {
			w.held[o.s], w.held[o.d] = true, true
		}
	}
	e.m.Rooms(func(v *core.View) bool {
		if v.State.Live() && v.Role == statemachine.Destination && v.Epoch == ep.number && v.Backend == backend {
			w.held[v.Own], w.held[v.Pair] = true, true
		}
		return true
	})
	w.step(e, &core.Event{Kind: core.PluginLost, Backend: backend, Epoch: ep.number, Detail: "signal: killed"})
	for i := range w.ops { // what the process had said last is read late
		if o := &w.ops[i]; o.epoch == at && o.state != opQuiet && o.dice.one(2) {
			w.after(o.dice.spread(time.Microsecond, 5*time.Second), stale, int32(i), 0, 0)
		}
	}
	if e.epoch == at {
		e.epoch = -1
		w.after(e.dice.in(20*time.Millisecond, 2*time.Second), pluginUp, e.id, 0, e.inc)
	}
}

// epochOf is the epoch of an engine's incarnation that has a number, -1 when there is none.
func (w *world) epochOf(engine int32, inc uint64, number uint32) int32 {
	for i := len(w.epochs) - 1; i >= 0; i-- {
		if ep := &w.epochs[i]; ep.engine == engine && ep.inc == inc && ep.number == number {
			return int32(i)
		}
	}
	return -1
}

// replaces: the core wants the newest epoch replaced. Sometimes the host cannot.
func (w *world) replaces(e *engine, at int32) {
	w.total.replaced++
	what := upgrade
	if e.dice.one(4) {
		what = kept
	}
	w.after(e.dice.spread(50*time.Millisecond, 15*time.Second), what, at, 0, 0)
}

// besides: the next epoch is ready that was started to replace one. If that one ended meanwhile it was followed
// by another.
func (w *world) besides(at int32) {
	ep := &w.epochs[at]
	if e := w.engines[ep.engine]; e.up && e.inc == ep.inc && e.epoch == at {
		w.startPlugin(e)
	}
}

func (w *world) keeps(at int32) {
	ep := &w.epochs[at]
	if e := w.engines[ep.engine]; e.up && e.inc == ep.inc {
		w.step(e, &core.Event{Kind: core.PluginKept, Backend: backend, Epoch: ep.number, Detail: "no handshake within 15s"})
	}
}

// ends: the core wants an epoch ended. A newer one must serve, and unless the bound has passed nothing may use this
// one: no live destination has its pages registered with it, and no op of it is unfinished.
func (w *world) ends(e *engine, at int32) {
	ep := &w.epochs[at]
	w.say("%s wants plugin epoch %d ended", e.name(), ep.number)
	if ep.ends || ep.retires == 0 {
		w.violate(Blast, "%s: plugin epoch %d is to be ended, which it is already or nothing came after it", e.name(), ep.number)
	}
	ep.ends = true
	if used := w.uses(at); used != "" {
		w.total.cut++
		if e.coreNow(w.now)-ep.retires < int64(w.clocks().Retire) {
			w.violate(Blast, "%s: plugin epoch %d is to be ended after %v though %s", e.name(), ep.number, time.Duration(e.coreNow(w.now)-ep.retires), used)
		}
	}
	w.after(e.dice.spread(100*time.Microsecond, time.Second), orphanEnds, at, 0, 0)
}

// uses tells what uses an epoch; empty when nothing does.
func (w *world) uses(at int32) string {
	for i := range w.ops {
		if o := &w.ops[i]; o.epoch == at && o.state != opQuiet && o.state != opFenced {
			return fmt.Sprintf("its op %d is not quiet", i)
		}
	}
	for i := range w.lives {
		if l := &w.lives[i]; l.epoch == at {
			if _, ended := w.verdict[l.own]; !ended {
				return fmt.Sprintf("pages of %s are registered with it", w.openerText(l.own))
			}
		}
	}
	return ""
}

// staleEnd tells an engine the end of an op of an epoch that it knows is gone. Nothing may change.
func (w *world) staleEnd(at int32) {
	o := &w.ops[at]
	ep := &w.epochs[o.epoch]
	e := w.engines[ep.engine]
	if !e.up || e.inc != ep.inc || e.frozen > 0 {
		return
	}
	w.step(e, nil) // what is due by now
	before := e.m.Hash()
	w.step(e, &core.Event{Kind: core.OpEnd, Op: o.id, End: core.EndDone, Quiet: true, Bytes: o.bytes})
	if e.m.Hash() != before {
		w.violate(Stale, "%s: the end of op %d of plugin epoch %d, which is gone, changed the state", e.name(), at, ep.number)
	}
}

// epochFenced: the lease of a dead process is at EOF, and everybody who waits for that learns it.
func (w *world) epochFenced(at int32) {
	ep := &w.epochs[at]
	if ep.fenced {
		return
	}
	e := w.engines[ep.engine]
	here := e.up && e.inc == ep.inc
	if here && !ep.noticed { // the host has not read the end yet
		ep.fenceAt = w.now + int64(50*time.Millisecond)
		w.push(due{at: ep.fenceAt, what: fenced, a: at})
		return
	}
	ep.fenced = true
	for i := range w.ops {
		if o := &w.ops[i]; o.epoch == at && o.state == opDead {
			o.state = opFenced
		}
	}
	// What was registered with it cannot be written any more, by anybody.
	for i := range w.lives {
		if l := &w.lives[i]; l.epoch == at {
			w.sealed[l.own] = true
		}
	}
	if here {
		w.say("%s plugin epoch %d is fenced", e.name(), ep.number)
		w.step(e, &core.Event{Kind: core.PluginFenced, Backend: backend, Epoch: ep.number})
	}
}

// asksPlugin gives a request to the plugin. What is for an epoch that is gone is dropped: PluginLost follows.
func (w *world) asksPlugin(e *engine, p *core.PluginEffect) {
	at := w.epochOf(e.id, e.inc, p.Epoch)
	if at < 0 || w.epochs[at].noticed {
		return
	}
	ep := &w.epochs[at]
	switch p.Kind {
	case core.PluginSubmit, core.PluginGrant, core.PluginReplace:
		if at < e.served {
			w.violate(Blast, "%s: plugin epoch %d gets something new though a newer one serves", e.name(), ep.number)
		}
	}
	switch p.Kind { // these are for the host
	case core.PluginReplace:
		w.replaces(e, at)
		return
	case core.PluginEnd:
		w.ends(e, at)
		return
	}
	if !ep.alive { // and its host has not noticed
		if p.Kind == core.PluginSubmit {
			w.held[p.S], w.held[p.D] = true, true
		}
		return
	}
	switch p.Kind {
	case core.PluginSubmit:
		w.submit(e, at, p)
	case core.PluginAbort:
		for i := range w.ops {
			if o := &w.ops[i]; o.id == p.Op && o.epoch == at {
				w.after(o.dice.spread(20*time.Microsecond, 20*time.Millisecond), opAbort, int32(i), 0, 0)
			}
		}
	case core.PluginGrant:
		for _, part := range p.Parts {
			for i := range w.lives {
				if l := &w.lives[i]; l.own == p.D && l.mem == int32(part.Pool)-1 {
					l.epoch = at
				}
			}
		}
		ev := core.Event{Kind: core.Granted, Grant: p.Grant}
		if w.failing > 0 && e.dice.one(8) {
			ev = core.Event{Kind: core.GrantFailed, Grant: p.Grant, Detail: "no memory"}
		} else {
			ep.granted = append(ep.granted, p.D)
		}
		w.answer(e, at, ev, nil)
	case core.PluginRevoke, core.PluginFencePeer:
		kind := core.Revoked
		if p.Kind == core.PluginFencePeer {
			kind = core.Fenced
		}
		w.answer(e, at, core.Event{Kind: kind, Grant: p.Grant, Quiet: !e.dice.one(6)}, p)
	}
}

// answer lets the plugin answer later.
func (w *world) answer(e *engine, at int32, ev core.Event, p *core.PluginEffect) {
	a := answered{epoch: at, event: ev}
	if p != nil {
		a.op = core.PluginEffect{Kind: p.Kind, S: p.S, D: p.D}
	}
	w.answers = append(w.answers, a)
	w.after(e.dice.spread(10*time.Microsecond, 10*time.Millisecond), answer, int32(len(w.answers)-1), 0, 0)
}

func (w *world) pluginAnswers(at int32) {
	a := &w.answers[at]
	ep := &w.epochs[a.epoch]
	if !ep.alive {
		return
	}
	if ep.frozen > 0 {
		i := int32(slices.IndexFunc(w.answers, func(o answered) bool {
			return o.event.Grant == a.event.Grant && o.event.Kind == a.event.Kind && o.epoch == a.epoch
		}))
		w.after(int64(20*time.Millisecond), answer, i, 0, 0)
		return
	}
	if a.event.Quiet {
		switch a.op.Kind {
		case core.PluginRevoke:
			w.sealed[a.op.D] = true
		case core.PluginFencePeer:
			for i := range w.ops {
				if o := &w.ops[i]; o.s == a.op.S && o.d == a.op.D {
					o.cut = true
				}
			}
		}
	}
	w.tell(ep, &a.event)
}

// submit takes an op.
func (w *world) submit(e *engine, at int32, p *core.PluginEffect) {
	o := op{
		id: p.Op, s: p.S, d: p.D, epoch: at, peer: int32(p.Peer), peerEp: w.epochOf(int32(p.Peer), p.D.Inc, p.PeerEpoch), bytes: p.Bytes,
		srcMem: int32(p.SrcPool) - 1, dstMem: int32(p.DstPool) - 1, dice: roll(w.plan.seed, 7, p.S.Seq, p.D.Seq, uint64(len(w.ops))), fate: core.EndDone,
		plan: w.planOf(p), layers: [2]int32{p.LayerFrom, p.LayerTo},
	}
	if n := len(w.ops); n < cap(w.ops) { // its memory is used again
		old := &w.ops[:n+1][n]
		o.from, o.to = old.from[:0], old.to[:0]
	}
	for _, r := range p.Source {
		for k := range r.Count {
			o.from = append(o.from, r.Start+k*r.Stride)
		}
	}
	for _, r := range p.Destination {
		for k := range r.Count {
			o.to = append(o.to, r.Start+k*r.Stride)
		}
	}
	took := o.dice.spread(100*time.Microsecond, 100*time.Millisecond)
	if w.slowed > 0 {
		took *= 100
	}
	if w.failing > 0 && o.dice.one(3) {
		o.fate = []core.EndKind{core.EndFailed, core.EndSkipped, core.EndAborted, core.EndDone}[o.dice.n(4)]
		o.late = o.dice.one(2)
		o.why = statemachine.TransferFailed
		if o.fate == core.EndSkipped {
			o.why = statemachine.Skipped
		}
	}
	if w.lateness > 0 && o.dice.one(3) {
		o.late = true
	}
	o.step = took/int64(len(o.to)+1) + 1
	if w.story != nil {
		w.say("%s submits op %d of room %s to %s: %d pages", e.name(), len(w.ops), w.openerText(o.s), w.openerText(o.d), len(o.to))
	}
	w.ops = append(w.ops, o)
	w.after(o.step, opStep, int32(len(w.ops)-1), 0, 0)
}

// opStep lands the next page of an op, or ends it.
func (w *world) opStep(at int32) {
	o := &w.ops[at]
	if o.state == opQuiet {
		return
	}
	ep := &w.epochs[o.epoch]
	again := func(d int64) { w.after(d, opStep, at, 0, 0) }
	if ep.alive && ep.frozen > 0 {
		again(int64(20 * time.Millisecond))
		return
	}
	if !w.reaches(ep.engine, o.peer) {
		if o.dice.one(200) && o.state == opRuns { // in the end the connection gives up
			w.endOp(at, core.EndFailed, statemachine.TransferFailed, true)
			return
		}
		again(int64(100 * time.Millisecond))
		return
	}
	if (o.state == opRuns || o.state == opLate) && !w.takes(o) { // the other end is gone
		if o.state == opRuns {
			w.endOp(at, core.EndFailed, statemachine.TransferFailed, true)
		} else {
			w.quiesce(at)
		}
		return
	}
	if int(o.landed) < len(o.to) {
		if o.state == opRuns && o.late && o.landed > 0 || o.fate != core.EndDone && o.state == opRuns && int(o.landed) == len(o.to)-1 {
			w.endOp(at, o.fate, o.why, !o.late)
			if o.state == opLate {
				again(o.dice.spread(time.Millisecond, 15*time.Second))
			}
			return
		}
		w.land(o)
		if o.state == opRuns {
			w.tell(ep, &core.Event{Kind: core.OpProgress, Op: o.id, Bytes: o.bytes * int64(o.landed) / int64(len(o.to))})
			o = &w.ops[at]
		}
		d := o.step
		if o.state == opLate || o.state == opDead {
			d = o.dice.spread(time.Millisecond, 10*time.Second)
		}
		again(d)
		return
	}
	switch o.state {
	case opRuns:
		if o.fate != core.EndDone {
			w.endOp(at, o.fate, o.why, !o.late)
		} else {
			w.endOp(at, core.EndDone, 0, true)
		}
	case opLate:
		w.quiesce(at)
	case opDead, opFenced:
		o.state = opQuiet
	}
}

// reaches tells whether bytes get from one engine's node to another's.
func (w *world) reaches(from, to int32) bool {
	if from == to {
		return true
	}
	l, _ := w.linkOf(from, to)
	return l.stuck[l.of(from)] == 0
}

// takes tells whether the plugin at the destination still takes bytes of an op: the epoch that the pages are
// registered with, or, without a receiver check, the memory that its process had registered.
func (w *world) takes(o *op) bool {
	if w.sealed[o.d] || o.cut || o.peerEp < 0 {
		return false
	}
	to := &w.epochs[o.peerEp]
	if !w.plan.checked {
		return !to.fenced
	}
	return to.alive && slices.Contains(to.granted, o.d)
}

// endOp ends an op with an event. Quiet: nothing of it lands or is read any more.
func (w *world) endOp(at int32, end core.EndKind, why statemachine.Reason, quiet bool) {
	o := &w.ops[at]
	if o.state != opRuns {
		return
	}
	ev := core.Event{Kind: core.OpEnd, Op: o.id, End: end, Quiet: quiet, Reason: why}
	switch {
	case end == core.EndDone:
		for int(o.landed) < len(o.to) { // Done: every byte is visible
			w.land(o)
		}
		o.done, ev.Reason, ev.Bytes = true, 0, o.bytes
	case end == core.EndAborted:
		ev.Reason = 0
	}
	o.state = opLate
	if quiet {
		o.state = opQuiet
	}
	e := w.engines[w.epochs[o.epoch].engine]
	if w.story != nil {
		w.say("%s op %d ends: %s, quiet=%v", e.name(), at, []string{"", "done", "failed", "skipped", "aborted"}[end], quiet)
	}
	w.tell(&w.epochs[o.epoch], &ev)
}

// tell is an event of a plugin to the incarnation that started it: an orphan speaks to nobody.
func (w *world) tell(ep *epoch, ev *core.Event) {
	if e := w.engines[ep.engine]; e.inc == ep.inc {
		w.step(e, ev)
	}
}

func (w *world) quiesce(at int32) {
	o := &w.ops[at]
	o.state = opQuiet
	e := w.engines[w.epochs[o.epoch].engine]
	if w.story != nil {
		w.say("%s op %d is quiet", e.name(), at)
	}
	w.tell(&w.epochs[o.epoch], &core.Event{Kind: core.OpQuiesced, Op: o.id})
}

// opAborted: the plugin has read an abort.
func (w *world) opAborted(at int32) {
	o := &w.ops[at]
	ep := &w.epochs[o.epoch]
	if o.state != opRuns || !ep.alive {
		return
	}
	if ep.frozen > 0 {
		w.after(int64(20*time.Millisecond), opAbort, at, 0, 0)
		return
	}
	switch o.dice.n(4) {
	case 0: // too late: it finishes
	case 1:
		w.endOp(at, core.EndAborted, 0, false)
	default:
		w.endOp(at, core.EndAborted, 0, true)
	}
}
