package coretest

import (
	"errors"
	"fmt"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/statemachine"
)

type verdict struct {
	reason statemachine.Reason
	pair   statemachine.Opener
}

// Check compares what the engines believe with the truth, and with what they said before. It is called
// after every step; the first violation of a rule is returned.
//
// A verdict never changes (R2); source Success implies destination Success, and a destination that
// succeeded has a source that did or that does not know (outcome_unknown); pages are reusable only
// when nothing can touch them (R4); destination Success implies that every op of the pair is Done
// (R11); every live record has a running clock (R5); a worker's word is a function of the record; an epoch
// that retires is ended when, and not before, nothing uses it or its time is over.
func (e *Env) Check() error {
	if e.verdicts == nil {
		e.verdicts = map[statemachine.Opener]verdict{}
	}
	var errs []error
	fail := func(g *Engine, rule, format string, args ...any) {
		errs = append(errs, fmt.Errorf("%s: %s: %s", rule, g.Name, fmt.Sprintf(format, args...)))
	}
	for _, g := range []*Engine{e.D, e.P} { // D first: its Success precedes that of P
		views := map[statemachine.Opener]core.View{}
		g.M.Rooms(func(v *core.View) bool {
			views[v.Own] = *v
			if v.State.Live() {
				if v.Clock == "" || v.Remaining < 0 {
					fail(g, "R5", "%s has no running clock", v.Why())
				}
				return true
			}
			old, ended := e.verdicts[v.Own]
			switch {
			case ended && old.reason != v.Reason:
				fail(g, "R2", "%s ended %s, now %s", e.Opener(v.Own), old.reason, v.Reason)
			case ended && !old.pair.IsZero() && old.pair != v.Pair:
				fail(g, "R3", "%s was paired with %s, now with %s", e.Opener(v.Own), e.Opener(old.pair), e.Opener(v.Pair))
			case !ended && v.Reason == statemachine.Success && g == e.P && e.verdicts[v.Pair].reason != statemachine.Success:
				fail(g, "R11", "%s is Success, %s is not", e.Opener(v.Own), e.Opener(v.Pair))
			case !ended && v.Reason == statemachine.Success && g == e.D:
				e.ops(func(o *Op) {
					if o.S == v.Pair && o.D == v.Own && !o.Done {
						fail(g, "R11", "%s is Success, %d bytes to it are not Done", e.Opener(v.Own), o.Bytes)
					}
				})
			}
			e.verdicts[v.Own] = verdict{v.Reason, v.Pair}
			if s, d := v.Own, v.Pair; !d.IsZero() {
				if g == e.D {
					s, d = d, s
				}
				at, ok := e.verdicts[s]
				if ok && at.pair == d && at.reason != statemachine.Success && at.reason != statemachine.OutcomeUnknown && e.verdicts[d].reason == statemachine.Success {
					fail(g, "R10", "%s ended %s, %s is Success", e.Opener(s), at.reason, e.Opener(d))
				}
			}
			return true
		})
		for _, v := range g.M.Epochs() {
			idle := v.Rooms+v.Ops == 0
			switch {
			case v.State == core.EpochRetires && (idle || v.EndsIn == 0):
				fail(g, "retire", "epoch %d has %d rooms, %d ops and %s left, its end was not asked", v.Epoch, v.Rooms, v.Ops, v.EndsIn)
			case v.State == core.EpochEnds && !idle && v.EndsIn > 0:
				fail(g, "retire", "the end of epoch %d was asked, it has %d rooms, %d ops and %s left", v.Epoch, v.Rooms, v.Ops, v.EndsIn)
			}
		}
		for k, w := range g.Words {
			if v, ok := views[w.Opener]; ok && w.Residency != statemachine.Released && v.Status != w.Status {
				fail(g, "R2", "slot %d says %s, the record %s", k.Slot, w.Status, v.Status)
			}
			if !w.Residency.Reusable() {
				continue
			}
			own := func(pool uint64) bool { return pool%statePool == uint64(k.Rank)+1 }
			e.ops(func(o *Op) {
				if g == e.D && own(o.DstPool) && o.D == w.Opener && o.MayLand() && !g.Sealed[o.D] {
					fail(g, "R4", "pages of %s are %s, %d bytes may still land", e.Opener(o.D), w.Residency, o.Bytes)
				}
				if g == e.P && own(o.SrcPool) && o.S == w.Opener && o.MayRead() {
					fail(g, "R4", "pages of %s are %s, %d bytes may still be read", e.Opener(o.S), w.Residency, o.Bytes)
				}
			})
		}
	}
	return errors.Join(errs...)
}

// ops calls fn for every op that P's plugins were ever given.
func (e *Env) ops(fn func(*Op)) {
	for _, o := range e.P.Orphans {
		fn(o)
	}
	for _, o := range e.P.Ops {
		fn(o)
	}
}
