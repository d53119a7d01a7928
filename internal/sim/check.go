package sim

import (
	"fmt"
	"time"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// recorded takes a line of an engine's history. Ends are held against each other and against the truth.
func (w *world) recorded(e *engine, r *core.Record) {
	if r.Kind != core.RecEnd {
		return
	}
	if w.story != nil {
		w.say("%s %s of room %d ends: %s %s", e.name(), w.openerText(r.Own), r.Room, r.Reason, r.Detail)
	}
	if old, ok := w.verdict[r.Own]; ok && old.reason != r.Reason {
		w.violate(Sticky, "%s: %s ended %s and ends again %s", e.name(), w.openerText(r.Own), old.reason, r.Reason)
	}
	w.verdict[r.Own] = outcome{r.Reason, r.Pair}
	source := r.Role == statemachine.Source
	if !source && w.plan.budget.Age == 0 {
		if e.rests = w.now + int64(quarantine); e.resting != e.inc {
			e.resting = e.inc
			w.push(due{at: e.rests, what: retire, a: e.id, n: e.inc})
		}
	}
	if w.plan.spans {
		w.spanEnds(e, r)
	}
	switch r.Reason {
	case statemachine.Success:
		if w.plan.spans {
			break
		}
		if source && w.verdict[r.Pair].reason != statemachine.Success {
			w.violate(Agreement, "%s: %s is Success, its destination %s is %s", e.name(), w.openerText(r.Own), w.openerText(r.Pair), w.verdict[r.Pair].reason)
		}
		if !source {
			for i := range w.ops {
				if o := &w.ops[i]; o.s == r.Pair && o.d == r.Own && !o.done {
					w.violate(Agreement, "%s: %s is Success, op %d to it is not done", e.name(), w.openerText(r.Own), i)
				}
			}
			w.agree(r.Pair, r.Own)
		}
	case statemachine.PluginLost:
		if !w.held[r.Own] {
			w.held[r.Own] = w.registeredDead(e, r)
		}
		if !w.held[r.Own] && (r.Pair.IsZero() || !w.held[r.Pair]) && !(w.plan.spans && w.heldAnywhere(e, r)) {
			w.violate(Blast, "%s: %s ends plugin_lost, but no plugin that died held it", e.name(), w.openerText(r.Own))
		}
		fallthrough
	default:
		if source && !w.plan.spans {
			w.agree(r.Own, r.Pair)
		}
	}
}

// registeredDead tells whether the pages of a destination are registered with an epoch that is gone: the step that
// told its engine so registered them first.
func (w *world) registeredDead(e *engine, r *core.Record) (dead bool) {
	for _, v := range e.m.Room(r.Room) {
		for i := range w.epochs {
			ep := &w.epochs[i]
			dead = dead || v.Own == r.Own && v.Role == statemachine.Destination && ep.engine == e.id && ep.inc == e.inc && ep.number == v.Epoch && !ep.alive
		}
	}
	return dead
}

// agree holds that a pair does not end Success at the destination and Failed, with certainty, at the source.
func (w *world) agree(s, d opener) {
	if d.IsZero() {
		return
	}
	src, ok := w.verdict[s]
	if ok && src.pair == d && src.reason != statemachine.Success && src.reason != statemachine.OutcomeUnknown && w.verdict[d].reason == statemachine.Success {
		w.violate(Agreement, "%s ended %s, its destination %s is Success", w.openerText(s), src.reason, w.openerText(d))
	}
}

// checkpoint looks at what every engine holds.
func (w *world) checkpoint() {
	for _, e := range w.engines {
		if !e.up || e.frozen > 0 {
			continue
		}
		e.m.Rooms(func(v *core.View) bool {
			if v.State.Live() && v.Clock == "" {
				w.violate(Bounded, "%s: no clock runs: %s", e.name(), v.Why())
			}
			return w.broke == nil
		})
		var owned int64
		for i := range w.lives {
			if l := &w.lives[i]; l.inc == e.inc && l.role == statemachine.Destination && l.stage > planned && l.stage < over || l.stage == orphaned {
				owned += int64(len(l.pages)) * w.plan.shape[l.role].bytes()
			}
		}
		if c := e.m.Counts(); c.Pinned > owned {
			w.violate(Accounting, "%s accounts %d bytes of pages, its workers own %d", e.name(), c.Pinned, owned)
		}
	}
}

// notTerminal names what did not end.
func (w *world) notTerminal() {
	w.checkpoint()
	for i := range w.lives {
		l := &w.lives[i]
		if l.stage >= over && l.stage != orphaned && l.stage != inLimbo {
			continue
		}
		e := w.engines[w.workers[l.worker].engine]
		why := fmt.Sprintf("%s (rank %d, stage %d) has no end", w.openerText(l.own), w.workers[l.worker].rank, l.stage)
		if l.worded {
			why = fmt.Sprintf("%s is %s, its pages are %s, and it was not released", w.openerText(l.own), l.status, l.res)
		}
		if e.up {
			e.m.Rooms(func(v *core.View) bool {
				if v.Own == l.own {
					why += ": " + v.Why()
				}
				return true
			})
		}
		p := Terminal
		if l.worded && l.status.Terminal() {
			p = Accounting
		}
		w.violate(p, "%s", why)
		return
	}
}

// mostIdle is far more than happens once everything has ended.
const mostIdle = 1 << 20

// idle holds that nothing is left when everything has ended and every clock has run out.
func (w *world) idle() {
	for i := range w.plan.requests {
		if w.broke != nil {
			return
		}
		w.served(int32(i))
	}
	for i := range w.mems {
		if m := &w.mems[i]; len(m.free) != len(m.page) {
			w.violate(Accounting, "%d of %d pages of a worker are free when everything has ended", len(m.free), len(m.page))
		}
	}
	for range 3 { // tombstones and marks 600 s, placeholders 900 s; what expires may be told to the peer
		w.now += int64(901 * time.Second)
		for _, e := range w.engines {
			w.step(e, nil)
		}
		for n := 0; len(w.q.heap) > 0 && w.broke == nil; n++ {
			d := w.q.pop()
			if d.what == wake {
				continue
			}
			if n == mostIdle {
				w.violate(Accounting, "it does not come to rest when everything has ended")
				return
			}
			w.now = max(w.now, d.at) // what waits for another event would wait for ever
			w.pending--
			w.dispatch(&d)
		}
	}
	for _, e := range w.engines {
		if w.broke != nil || !e.up {
			continue
		}
		if c := e.m.Counts(); c != (core.Counts{}) {
			w.violate(Accounting, "%s holds %+v when everything has ended", e.name(), c)
		}
		if w.replay {
			w.again(e)
		}
	}
}

// served: where nothing went wrong that may fail a room, none fails.
func (w *world) served(at int32) {
	r := &w.plan.requests[at]
	if !w.plan.calm() || r.out || r.abort != 0 || r.deadline != 0 {
		return
	}
	for i := range w.lives {
		if l := &w.lives[i]; l.req == at && l.status != statemachine.Succeeded {
			w.violate(Store, "request %d: %s did not succeed though nothing but the store was ever down: %s", at, w.openerText(l.own), l.reason)
		}
	}
}

// again tells a fresh core what this incarnation was told: it must say the same.
func (w *world) again(e *engine) {
	if w.broke != nil {
		return
	}
	w.restart(&w.second, e)
	var said uint64
	from := 0
	for _, b := range e.steps {
		w.secondSays.Reset()
		w.second.Step(b.now, e.told[from:b.end], &w.secondSays)
		said, from = hashEffects(said, &w.secondSays), b.end
	}
	if said != e.said {
		w.violate(Replay, "%s incarnation %d answers differently when it is told the same", e.name(), e.inc)
	}
}
