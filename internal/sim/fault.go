package sim

import (
	"time"

	"github.com/terminus-kv/terminus/core"
)

// strike lets a planned fault happen.
func (w *world) strike(at int32) {
	f := &w.plan.faults[at]
	if f.kind == noFault {
		return
	}
	e := w.engines[f.a]
	w.say("FAULT %s", f)
	w.checkpoint()
	lasts := false
	switch f.kind {
	case killEngine:
		w.killEngine(e)
		w.after(max(f.last, int64(10*time.Millisecond)), engineUp, e.id, 0, 0)
	case stopEngine, pauseClock:
		lasts = true
		w.beats()
		e.frozen++
		if f.kind == pauseClock && e.up && e.stood == 0 {
			e.stood = w.now
		}
	case killPlugin: // any epoch that is up
		if e.up && e.epoch >= 0 {
			w.epochEnds(w.anyEpoch(e))
		}
	case upgradePlugin:
		if e.up && e.epoch >= 0 {
			w.startPlugin(e)
		}
	case stopPlugin:
		if e.up && e.epoch >= 0 {
			f.b = w.anyEpoch(e)
			w.epochs[f.b].frozen++
			if f.last > beats {
				w.after(beats, orphanEnds, f.b, 0, 0)
			} else {
				lasts = true
			}
		}
	case killWorker:
		var of []int32
		for i := range w.workers {
			if w.workers[i].engine == e.id {
				of = append(of, int32(i))
			}
		}
		if len(of) > 0 {
			w.killWorker(&w.workers[of[int(f.b)%len(of)]])
		}
	case cutLink:
		l, _ := w.linkOf(f.a, f.b)
		w.breakStream(l, 200*time.Millisecond)
	case blockOneWay, blockBoth:
		lasts = true
		l, _ := w.linkOf(f.a, f.b)
		w.block(l, l.of(f.a))
		if f.kind == blockBoth {
			w.block(l, l.of(f.b))
		}
	case splitOneWay, splitBoth:
		lasts = true
		for i := range w.links {
			if l := &w.links[i]; f.splits(l) {
				w.block(l, f.inside(l))
				if f.kind == splitBoth {
					w.block(l, 1-f.inside(l))
				}
			}
		}
	case slowLink:
		lasts = true
		l, _ := w.linkOf(f.a, f.b)
		l.slow++
	case overtakes:
		lasts = true
		l, _ := w.linkOf(f.a, f.b)
		l.mixed++
	case duplicates:
		lasts = true
		l, _ := w.linkOf(f.a, f.b)
		l.twice++
	case slowOps:
		lasts = true
		w.slowed++
	case lateWrites:
		lasts = true
		w.lateness++
	case failOps:
		lasts = true
		w.failing++
	case drainEngine:
		if e.up && !e.drains {
			e.drains = true
			w.step(e, &core.Event{Kind: core.DrainBegin})
			for i := range w.links {
				if l := &w.links[i]; l.of(e.id) >= 0 {
					w.post(l, l.of(e.id), false, &core.Event{Kind: core.PeerDraining, Peer: core.PeerID(e.id)})
				}
			}
			w.after(max(f.last, int64(time.Second)), drainEnd, e.id, 0, e.inc)
		}
	case adminAborts:
		for i := range w.plan.requests {
			if r := &w.plan.requests[i]; e.up && roll(w.plan.seed, 13, uint64(at), uint64(i)).half() {
				w.step(e, &core.Event{Kind: core.AdminAbort, Room: r.room})
			}
		}
	case storeOutage:
		lasts = true
		w.blind++
	}
	if lasts {
		w.after(f.last, healed, at, 0, 0)
	}
}

// anyEpoch draws one of the epochs of an engine that the host believes up, more often the newest.
func (w *world) anyEpoch(e *engine) int32 {
	for i := range w.epochs {
		if ep := &w.epochs[i]; ep.engine == e.id && ep.inc == e.inc && !ep.noticed && (int32(i) == e.epoch || e.dice.one(3)) {
			return int32(i)
		}
	}
	return e.epoch
}

// splits tells whether a split parts the ends of a link, inside the side whose engine is of the set.
func (f *plannedFault) splits(l *link) bool { return f.set>>l.ends[0]&1 != f.set>>l.ends[1]&1 }

func (f *plannedFault) inside(l *link) int { return int(f.set >> l.ends[1] & 1) }

func (d dice) half() bool { return d.one(2) }

// heal ends a fault that lasts.
func (w *world) heal(at int32) {
	f := &w.plan.faults[at]
	e := w.engines[f.a]
	w.say("HEALED %s", f)
	switch f.kind {
	case stopEngine, pauseClock:
		e.frozen--
		if e.frozen == 0 {
			if e.stood > 0 {
				e.skew, e.stood = e.skew+w.now-e.stood, 0
			}
			w.step(e, nil) // with all that came meanwhile
		}
	case stopPlugin:
		w.epochs[f.b].frozen--
	case blockOneWay, blockBoth:
		l, _ := w.linkOf(f.a, f.b)
		w.unblock(l, l.of(f.a))
		if f.kind == blockBoth {
			w.unblock(l, l.of(f.b))
		}
	case splitOneWay, splitBoth:
		for i := range w.links {
			if l := &w.links[i]; f.splits(l) {
				w.unblock(l, f.inside(l))
				if f.kind == splitBoth {
					w.unblock(l, 1-f.inside(l))
				}
			}
		}
	case slowLink:
		l, _ := w.linkOf(f.a, f.b)
		l.slow--
	case overtakes:
		l, _ := w.linkOf(f.a, f.b)
		l.mixed--
	case duplicates:
		l, _ := w.linkOf(f.a, f.b)
		l.twice--
	case slowOps:
		w.slowed--
	case lateWrites:
		w.lateness--
	case failOps:
		w.failing--
	case storeOutage:
		w.blind--
	}
	w.checkpoint()
}
