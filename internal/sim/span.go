package sim

import (
	"slices"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// Groups whose ranks sit on several engines: where they sit, and what the engines of a room must agree on.

// maxHosts is the most engines of one group.
const maxHosts = 3

// span spreads the groups of a plan, or those of one role, over two or three engines. Sometimes one engine has ranks
// of both roles; sometimes a group that sits on one engine works with the others too.
func (p *plan) span(d dice) {
	var hosts [statemachine.Destination + 1]int32
	for hosts[statemachine.Source]+hosts[statemachine.Destination] < 3 {
		for role := statemachine.Source; role <= statemachine.Destination; role++ {
			hosts[role] = [...]int32{1, 1, 1, 2, 2, maxHosts}[d.n(6)]
		}
	}
	p.spans, p.groups = true, p.groups[:0]
	p.engines = hosts[statemachine.Source] + hosts[statemachine.Destination]
	first := hosts[statemachine.Source] // engine of the destination group
	if d.one(4) {
		first, p.engines = first-1, p.engines-1
	}
	if p.mapped = (layout.Map{}); d.one(2) {
		p.unequal(d, hosts)
	} else {
		least := max(hosts[statemachine.Source], hosts[statemachine.Destination])
		ranks := least + int32(d.n(int(maxRanks-least)+1))
		p.shape[statemachine.Source], p.shape[statemachine.Destination] = plain(ranks), plain(ranks)
	}
	p.groups = append(p.groups,
		p.spread(&d, 0, hosts[statemachine.Source], statemachine.Source),
		p.spread(&d, first, hosts[statemachine.Destination], statemachine.Destination))
	if d.one(4) {
		p.groups = append(p.groups, atOne(p.engines, statemachine.Role(1+d.n(2))))
		p.engines++
	}
}

// spread is a group of which each of n engines has a rank at least.
func (p *plan) spread(d *dice, first, n int32, role statemachine.Role) groupSpec {
	g := groupSpec{role: role, name: groupNames[first][role]}
	order := [maxRanks]int32{}
	ranks := p.shape[role].Ranks
	for i := range ranks { // in any order
		at := int32(d.n(int(i) + 1))
		order[i] = order[at]
		order[at] = i
	}
	for i, rank := range order[:ranks] {
		if g.at[rank] = first + int32(i); int32(i) >= n {
			g.at[rank] = first + int32(d.n(int(n)))
		}
	}
	return g
}

// atOne is a group all of whose ranks are at one engine.
func atOne(e int32, role statemachine.Role) groupSpec {
	return groupSpec{role: role, name: groupNames[e][role], at: [maxRanks]int32{e, e, e, e}}
}

// hosts tells whether ranks of a group are at an engine.
func (p *plan) hosts(group, e int32) bool {
	g := &p.groups[group]
	return slices.Contains(g.at[:p.shape[g.role].Ranks], e)
}

// vote is what an engine of a destination group told the judge: it has every byte of these sources, one an engine of
// their group in the order of their lowest ranks.
type vote struct {
	own     opener
	room    int64
	att     uint64
	n       int
	sources [maxHosts]opener
}

// win is a judge's Success: itself, then the openers of all engines that it decided for.
type win struct {
	n   int
	all [2 * maxHosts]opener
}

func (v *win) add(o opener) {
	if v.n < len(v.all) {
		v.all[v.n] = o
		v.n++
	}
}

// won is the win that an opener is part of, nil when no judge has said Success to it.
func (w *world) won(o opener) *win {
	for i := range w.wins {
		if v := &w.wins[i]; slices.Contains(v.all[:v.n], o) {
			return v
		}
	}
	return nil
}

// voted notes what leaves an engine.
func (w *world) voted(f *core.Frame) {
	v := vote{own: f.D, room: f.Room, att: f.Att, n: len(f.Sources)}
	copy(v.sources[:], f.Sources)
	w.votes = append(w.votes, v)
}

// spanEnds holds an end at one engine against those at the others, and a judge's Success against the truth.
func (w *world) spanEnds(e *engine, r *core.Record) {
	switch {
	case r.Reason == statemachine.OutcomeUnknown:
	case r.Reason != statemachine.Success:
		if v := w.won(r.Own); v != nil {
			w.violate(Agreement, "%s: %s ends %s, its judge %s is Success", e.name(), w.openerText(r.Own), r.Reason, w.openerText(v.all[0]))
		}
	default:
		if at := w.byOwn[r.Own]; r.Role == statemachine.Destination && len(at) > 0 && w.judges(&w.lives[at[0]], e) {
			w.judged(e, r, &w.lives[at[0]])
		} else if w.won(r.Own) == nil {
			w.violate(Agreement, "%s: %s is Success, which no judge has said to it", e.name(), w.openerText(r.Own))
		}
	}
}

// judges tells whether an engine has rank 0 of a life's destination group.
func (w *world) judges(l *life, e *engine) bool {
	return w.plan.groups[w.plan.requests[l.req].dst].at[0] == e.id
}

// judged holds that a judge that says Success has the word of every engine of both groups, and that all bytes are
// where they belong, at all of them.
func (w *world) judged(e *engine, r *core.Record, l *life) {
	var sources [maxHosts]opener
	n := 0
	for _, v := range e.m.Room(r.Room) {
		if v.Own != r.Own {
			continue
		}
		if len(v.Pairs) == 0 {
			sources[0], n = v.Pair, 1
		}
		for i := range v.Pairs {
			if p := &v.Pairs[i]; !p.Sibling && n < maxHosts {
				sources[n], n = p.Other, n+1
			}
		}
	}
	won := win{}
	won.add(r.Own)
	for i := range w.votes {
		if v := &w.votes[i]; v.room == r.Room && v.att == uint64(l.try) && v.n == n && v.sources == sources && w.won(v.own) == nil && !slices.Contains(won.all[:won.n], v.own) {
			won.add(v.own)
		}
	}
	first := won.n
	for _, s := range sources[:n] {
		won.add(s)
	}
	w.wins = append(w.wins, won)
	if won.n > 2 {
		w.total.spanned++
	}
	w.allSaid(r.Own, w.plan.requests[l.req].dst, won.all[:first])
	w.allSaid(r.Own, w.plan.requests[l.req].src, won.all[first:won.n])
	for _, o := range won.all[1:won.n] {
		if end, ok := w.verdict[o]; ok && end.reason != statemachine.Success && end.reason != statemachine.OutcomeUnknown {
			w.violate(Agreement, "%s: %s is Success, %s ended %s", e.name(), w.openerText(r.Own), w.openerText(o), end.reason)
		}
	}
	for i := range w.ops {
		if o := &w.ops[i]; !o.done && slices.Contains(won.all[first:won.n], o.s) {
			w.violate(Agreement, "%s: %s is Success, op %d of %s is not done", e.name(), w.openerText(r.Own), i, w.openerText(o.s))
		}
	}
	for _, d := range won.all[:first] {
		for _, at := range w.byOwn[d] {
			w.content(at, r.Own)
		}
	}
}

// allSaid holds that each engine of a group is one of those whose word a judge had.
func (w *world) allSaid(judge opener, group int32, openers []opener) {
	for host := range w.plan.engines {
		if w.plan.hosts(group, host) && !slices.ContainsFunc(openers, func(o opener) bool { return !o.IsZero() && w.byInc[o.Inc] == host }) {
			w.violate(Agreement, "%s is Success without the word of %s, which has ranks of %s", w.openerText(judge), engineName(host), w.plan.groups[group].name)
		}
	}
}

// partsOfDead lets an engine whose core has found a peer dead count that one's ranks no more, where others of their group
// are at the living: as the node does. When the peer is back it announces them.
func (w *world) partsOfDead(e *engine) {
	n := e.m.Stats().PeersDead
	if n == e.dead {
		return
	}
	e.dead = n
	var dead [maxEngines]bool
	for _, p := range e.m.Peers() {
		dead[p.ID] = p.Dead
	}
	for g := range int32(len(w.plan.groups)) {
		living := false
		for o := range w.plan.engines {
			living = living || !dead[o] && w.plan.hosts(g, o)
		}
		for o := range w.plan.engines {
			if living && dead[o] && w.plan.hosts(g, o) {
				w.tellPart(g, o, nil, e, func(ev core.Event) { w.hand(e, &ev) })
			}
		}
	}
	w.wakeAt(e, e.coreNow(w.now)+1)
}

// heldAnywhere tells whether a plugin that died held the room of a record at any engine: its end comes round. The record
// may have been opened by the step that ended it.
func (w *world) heldAnywhere(e *engine, r *core.Record) bool {
	for _, v := range e.m.Room(r.Room) {
		for i := range w.lives {
			l := &w.lives[i]
			if v.Own == r.Own && w.plan.requests[l.req].room == r.Room && uint64(l.try) == v.Attempt && !l.own.IsZero() && w.held[l.own] {
				return true
			}
		}
	}
	return false
}
