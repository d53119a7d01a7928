package core

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/terminus-kv/terminus/core/statemachine"
)

// A record has a pair for each engine that hosts ranks of the group at the other side, and, at a
// destination, for each engine that hosts others of its own group and that it speaks with. Which engines
// those are is known from membership (PeerGroup). A record whose group is not complete waits for it.

// fullyHosted is what a host has that hosts all ranks of its group.
const fullyHosted = nil32

// setOf is a set of ranks, which is kept for good: there are few. It is ok false when there are too many.
func (m *Machine) setOf(ranks []int32, size int32) (set int32, ok bool) {
	if len(ranks) == 0 || len(ranks) == int(size) {
		return fullyHosted, true
	}
	for i := range m.sets {
		if slices.Equal(m.sets[i], ranks) {
			return int32(i), true
		}
	}
	if len(m.sets) >= maxNames {
		return fullyHosted, false
	}
	m.sets = append(m.sets, slices.Clone(ranks))
	return int32(len(m.sets) - 1), true
}

// hosts reports whether an engine hosts a rank.
func (m *Machine) hosts(set, rank int32) bool {
	if set == fullyHosted {
		return true
	}
	_, ok := slices.BinarySearch(m.sets[set], rank)
	return ok
}

// complete reports whether every rank of a group is hosted by some engine.
func (g *group) complete() bool {
	n := int32(0)
	for i := range g.hosts {
		n += g.hosts[i].n
	}
	return n >= g.size
}

func (g *group) hostedBy(id PeerID) bool {
	return slices.ContainsFunc(g.hosts, func(h host) bool { return h.peer == id })
}

// rehost returns the hosts of a group with what an engine hosts of it now, in their order. An engine that
// takes ranks over takes them from the one that had them.
func (m *Machine) rehost(hosts []host, e *Event, set int32) []host {
	var out []host
	for _, h := range hosts {
		overlaps := set == fullyHosted || h.set == fullyHosted
		for i := 0; !overlaps && i < len(m.sets[set]); i++ {
			overlaps = m.hosts(h.set, m.sets[set][i])
		}
		if h.peer != e.Peer && (!overlaps || e.Size == 0) {
			out = append(out, h)
		}
	}
	if e.Size == 0 {
		return out
	}
	h := host{peer: e.Peer, set: set, n: e.Size}
	if set != fullyHosted {
		h.lowest, h.n = m.sets[set][0], int32(len(m.sets[set]))
	}
	out = append(out, h)
	slices.SortFunc(out, func(a, b host) int { return cmp.Compare(a.lowest, b.lowest) })
	return out
}

// peerGroup: an engine hosts ranks of a group, hosts others than before, or the pair of groups was refused.
// Rooms that waited for it go on.
func (m *Machine) peerGroup(e *Event) {
	key := groupPair{m.intern(e.PeerGroup), m.intern(e.Group)}
	set, ok := m.setOf(e.Ranks, e.Size)
	if !ok || e.Size < 0 || len(e.Ranks) > int(e.Size) {
		m.stats.Dropped++
		return
	}
	g := &group{role: e.Role, size: e.Size, layout: e.Map, reason: e.Reason, detail: e.Detail}
	old := m.groups[key]
	if old != nil {
		g.hosts = m.rehost(old.hosts, e, set)
	} else {
		g.hosts = m.rehost(nil, e, set)
	}
	if len(g.hosts) == 0 {
		delete(m.groups, key)
		return
	}
	if e.Size == 0 {
		g.role, g.size, g.layout, g.reason, g.detail, g.backends = old.role, old.size, old.layout, old.reason, old.detail, old.backends
	}
	for _, b := range e.Backends {
		g.backends = append(g.backends, m.intern(b))
	}
	m.groups[key] = g
	if key.own == key.peer {
		m.eachRoom(func(idx int32) {
			if r := m.rooms.at(idx); r.group == key.own {
				m.meetOwn(idx, r)
			}
		})
		return
	}
	m.eachRecord(func(idx int32, r *room) {
		switch {
		case r.group != key.own:
		case r.peerGroup == key.peer:
			m.regroup(idx, r, g, e)
		case r.peerGroup == nil32 && r.sm.Role == statemachine.Source && r.sm.State.Live():
			m.offerHeld(idx, r) // it waits for any group, and a part of this one may have registered
		}
	})
}

// regroup is what peerGroup does to one record towards that group.
func (m *Machine) regroup(idx int32, r *room, g *group, e *Event) {
	met := m.pairWith(r, e.Peer, false) >= 0 && r.peer != nilPeer
	if r.sm.State == statemachine.Ended {
		if !r.whole {
			m.meetGroup(idx, r, g)
			m.eachPair(r, func(at int, p *pair) {
				if p.peer == e.Peer && p.untold {
					m.resync(idx, r, at)
				}
			})
		}
		return
	}
	m.meetGroup(idx, r, g)
	at := m.pairWith(r, e.Peer, false)
	if at < 0 || m.bound(r) {
		return
	}
	if r.sm.Role == statemachine.Destination && r.backend != nil32 {
		m.setMap(r, g.layout)
	}
	switch {
	case g.reason != statemachine.None:
		m.end(idx, g.reason, g.detail)
	case !g.fits(r.sm.Role, int32(r.size)):
		m.end(idx, statemachine.LayoutMismatch, fmt.Sprintf("group %q has %d ranks, this one %d", e.Group, g.size, r.size))
	case !r.whole:
	case r.sm.Role == statemachine.Source:
		m.offerHeld(idx, r)
	case !met || r.sm.State == statemachine.Registered && r.backend == nil32:
		m.resyncAll(idx, r) // it waited for the group; else Hello has said it already
		m.endIfDown(idx)
	}
}

// bound reports whether a pair of a record has met its other opener.
func (m *Machine) bound(r *room) bool {
	for i := r.pairs; i != nil32; i = m.pairs.at(i).next {
		if p := m.pairs.at(i); !p.sm.Sibling && !p.sm.Other.IsZero() {
			return true
		}
	}
	return false
}

// meetGroup gives a record that is not whole a pair for each known host of the other group. One that has ended
// needs it as well: to answer that host, or to tell it.
func (m *Machine) meetGroup(idx int32, r *room, g *group) {
	if r.whole || g == nil || r.sm.State.Live() && m.bound(r) {
		return
	}
	// What a destination said when it ended, an engine that appears later has not heard.
	untold := r.sm.State == statemachine.Ended && r.sm.Role == statemachine.Destination
	for i := r.pairs; i != nil32; i = m.pairs.at(i).next {
		untold = untold || m.pairs.at(i).untold
	}
	judge := r.sm.Role == statemachine.Source // the first host has rank 0
	last := nil32
	for _, h := range g.hosts {
		i := r.pairs
		for i != nil32 && (m.pairs.at(i).sm.Sibling || m.pairs.at(i).peer != h.peer && m.pairs.at(i).peer != nilPeer) {
			i = m.pairs.at(i).next
		}
		if i == nil32 {
			i = m.newPair(idx, r)
			m.pairs.at(i).untold = untold
		}
		p := m.pairs.at(i)
		p.peer, p.set, p.sm.Judge = h.peer, h.set, judge && h.lowest == 0
		m.putPair(r, i, last)
		last = i
	}
	for i := r.pairs; i != nil32; { // only now: what a source holds must be held for one at least
		p := m.pairs.at(i)
		next := p.next
		if !p.sm.Sibling && p.sm.Other.IsZero() && p.peer != nilPeer && !g.hostedBy(p.peer) {
			m.dropPair(r, i)
		}
		i = next
	}
	r.whole = g.complete()
	for i := r.pairs; i != nil32 && r.sm.Role == statemachine.Source; i = m.pairs.at(i).next {
		if len(g.hosts) > 1 && g.fits(r.sm.Role, int32(r.size)) {
			m.setMap(r, g.layout)
		}
		m.recount(r, i)
	}
	m.setPeer(idx, r, m.pairs.at(r.pairs).peer)
}

// meetOwn gives a record that has announced nothing yet its siblings, and tells how many ranks of its own
// group are here. A source may learn later that others are elsewhere, and has fewer to wait for.
func (m *Machine) meetOwn(idx int32, r *room) {
	own := m.groups[groupPair{r.group, r.group}]
	local := r.size
	judge := nilPeer // the engine of rank 0, when it is another
	if own != nil {
		for _, h := range own.hosts {
			local -= int16(h.n)
			if h.lowest == 0 {
				judge = h.peer
			}
		}
	}
	fixed := m.bound(r)
	switch r.sm.State {
	case statemachine.Absent, statemachine.Opened, statemachine.Unbound:
	case statemachine.Offered, statemachine.Confirmed:
		fixed = true
	default:
		return
	}
	if fixed {
		if r.sm.Role == statemachine.Source {
			r.local = min(r.local, max(local, 1))
			m.maybeComplete(idx, r)
		}
		return
	}
	r.local = max(local, 1)
	if r.sm.Role == statemachine.Source {
		return
	}
	for i := r.pairs; i != nil32; {
		p := m.pairs.at(i)
		next := p.next
		if p.sm.Sibling {
			m.dropPair(r, i)
		}
		i = next
	}
	for i := 0; own != nil && i < len(own.hosts); i++ {
		if h := own.hosts[i]; judge == nilPeer || h.peer == judge {
			pi := m.newPair(idx, r)
			p := m.pairs.at(pi)
			p.peer, p.set, p.sm.Sibling, p.sm.Judge = h.peer, h.set, true, h.peer == judge
			m.putPair(r, pi, math.MaxInt32)
		}
	}
	if r.paged == r.local && r.sm.State == statemachine.Opened && !r.sm.Armed {
		m.allPaged(idx, r)
	}
}

// newPair adds a pair that is in no order yet.
func (m *Machine) newPair(idx int32, r *room) int32 {
	m.gens++
	i := m.pairs.alloc()
	p := m.pairs.at(i)
	p.room, p.next, p.gen, p.peer, p.set, p.said, p.backend = idx, r.pairs, m.gens, nilPeer, fullyHosted, nil32, nil32
	r.pairs = i
	if r.sm.Role == statemachine.Source {
		for k := r.ranks; k != nil32; k = m.ranks.at(k).next {
			m.addLane(k, i)
		}
	}
	return i
}

// putPair moves a pair behind another: nil32 for the first place, beyond all for the last.
func (m *Machine) putPair(r *room, i, after int32) {
	m.unlinkPair(r, i)
	p := m.pairs.at(i)
	if after == nil32 || r.pairs == nil32 {
		p.next, r.pairs = r.pairs, i
		return
	}
	at := r.pairs
	for at != after && m.pairs.at(at).next != nil32 {
		at = m.pairs.at(at).next
	}
	p.next = m.pairs.at(at).next
	m.pairs.at(at).next = i
}

func (m *Machine) unlinkPair(r *room, i int32) {
	if r.pairs == i {
		r.pairs = m.pairs.at(i).next
		return
	}
	for at := r.pairs; at != nil32; at = m.pairs.at(at).next {
		if m.pairs.at(at).next == i {
			m.pairs.at(at).next = m.pairs.at(i).next
			return
		}
	}
}

// dropPair forgets a pair that nothing was agreed with.
func (m *Machine) dropPair(r *room, i int32) {
	m.unlinkPair(r, i)
	p := m.pairs.at(i)
	r.held -= p.held
	r.total -= p.held
	for k := r.ranks; k != nil32; k = m.ranks.at(k).next {
		m.dropLane(k, i)
	}
	m.freeSaid(p)
	m.pairs.del(i)
}

// freePairs forgets the pairs of a record that is evicted.
func (m *Machine) freePairs(r *room) {
	for i := r.pairs; i != nil32; {
		next := m.pairs.at(i).next
		m.freeSaid(m.pairs.at(i))
		m.pairs.del(i)
		i = next
	}
	r.pairs = nil32
}

func (m *Machine) freeSaid(p *pair) {
	for s := p.said; s != nil32; {
		next := m.saids.at(s).next
		m.saids.del(s)
		s = next
	}
	p.said = nil32
}

// eachPair calls fn for every pair, siblings too.
func (m *Machine) eachPair(r *room, fn func(at int, p *pair)) {
	at := 0
	for i := r.pairs; i != nil32; at++ {
		p := m.pairs.at(i)
		next := p.next
		fn(at, p)
		i = next
	}
}

// pairAt is the pair at a place.
func (m *Machine) pairAt(r *room, at int) *pair {
	return m.pairs.at(m.indexOf(r, at))
}

// firstPair is the first pair of a record, which has at least one.
func (m *Machine) firstPair(r *room) *pair { return m.pairs.at(r.pairs) }

// placeOf is the place of a pair.
func (m *Machine) placeOf(r *room, pi int32) int {
	at := 0
	for i := r.pairs; i != pi; i = m.pairs.at(i).next {
		at++
	}
	return at
}

// pairWith is the place of the pair with an engine; -1 when there is none. A pair whose engine is not
// known may be anybody's.
func (m *Machine) pairWith(r *room, from PeerID, sibling bool) int {
	at := 0
	for i := r.pairs; i != nil32; i = m.pairs.at(i).next {
		if p := m.pairs.at(i); p.sm.Sibling == sibling && (p.peer == from || p.peer == nilPeer) {
			return at
		}
		at++
	}
	return -1
}

// agreed reports whether ops may be submitted: every pair is confirmed. With one that waits for memory or for a worker
// the others could only fill pages and have their transfer clocks run.
func agreed(r *room) bool { return r.sm.State == statemachine.Confirmed }

// ops are those of all pairs.
func (m *Machine) opsOf(r *room) (c statemachine.Counts) {
	for i := r.pairs; i != nil32; i = m.pairs.at(i).next {
		c = c.Add(m.pairs.at(i).sm.Ops)
	}
	return c
}

// indexOf is the pair at a place, as an index.
func (m *Machine) indexOf(r *room, at int) int32 {
	i := r.pairs
	for range at {
		i = m.pairs.at(i).next
	}
	return i
}

// smPairs are the pairs of a record for the transition function, which changes them where they are. It allocates
// no pair, so they stay there.
func (m *Machine) smPairs(r *room) []*statemachine.Pair {
	g := m.gathered[:0]
	for i := r.pairs; i != nil32; i = m.pairs.at(i).next {
		g = append(g, &m.pairs.at(i).sm)
	}
	m.gathered = g
	return g
}

// outstanding brings the record's word up to date with those of its pairs.
func (m *Machine) setOutstanding(r *room, p *pair, is bool) {
	p.outstanding, r.outstanding = is, false
	for i := r.pairs; i != nil32; i = m.pairs.at(i).next {
		r.outstanding = r.outstanding || m.pairs.at(i).outstanding
	}
}

// moved counts bytes of a pair.
func (r *room) count(p *pair, moved, flight int64) {
	p.moved, p.flight = p.moved+moved, p.flight+flight
	r.moved, r.flight = r.moved+moved, r.flight+flight
}

// voter reports whether a destination's judge is another engine.
func (m *Machine) voter(r *room) bool {
	for i := r.pairs; i != nil32; i = m.pairs.at(i).next {
		if p := m.pairs.at(i); p.sm.Sibling && p.sm.Judge {
			return true
		}
	}
	return false
}

// fenceID names a request for rung 3 of one pair.
func (m *Machine) fenceID(r *room, at int) GrantID {
	i := m.indexOf(r, at)
	return GrantID(uint64(m.pairs.at(i).gen)<<32 | uint64(uint32(i)))
}

// fenced resolves what fenceID made; nil32 when the pair is gone.
func (m *Machine) fenceOf(g GrantID) int32 {
	i := int32(uint32(g))
	if i < 0 || int(i) >= m.pairs.len() || m.pairs.at(i).gen != uint32(g>>32) || m.pairs.at(i).gen == 0 {
		return nil32
	}
	return i
}

// addLane lets a rank's chunks go to the engine of a pair.
func (m *Machine) addLane(k, pi int32) {
	kk := m.ranks.at(k)
	kk.lanes = m.lanes.add(lane{next: kk.lanes, pair: pi, at: kk.head})
	for c := kk.head; c != nil32; c = m.chunks.at(c).next {
		m.chunks.at(c).lanes++
	}
}

func (m *Machine) dropLane(k, pi int32) {
	kk := m.ranks.at(k)
	before := nil32
	for l := kk.lanes; l != nil32; l = m.lanes.at(l).next {
		ln := m.lanes.at(l)
		if ln.pair != pi {
			before = l
			continue
		}
		for c := ln.at; c != nil32; c = m.chunks.at(c).next {
			m.chunks.at(c).lanes--
		}
		if before == nil32 {
			kk.lanes = ln.next
		} else {
			m.lanes.at(before).next = ln.next
		}
		m.lanes.del(l)
		break
	}
	m.freePassed(kk)
}

// laneOf is the lane of a rank to the engine of a pair.
func (m *Machine) laneOf(k *rank, pi int32) *lane {
	for l := k.lanes; l != nil32; l = m.lanes.at(l).next {
		if ln := m.lanes.at(l); ln.pair == pi {
			return ln
		}
	}
	return nil
}

// pass moves a lane behind its chunk.
func (m *Machine) pass(k *rank, ln *lane) {
	c := m.chunks.at(ln.at)
	c.lanes--
	*ln = lane{next: ln.next, pair: ln.pair, at: c.next}
	m.freePassed(k)
}

// freePassed forgets the chunks that every lane has passed.
func (m *Machine) freePassed(k *rank) {
	for k.head != nil32 && m.chunks.at(k.head).lanes == 0 {
		next := m.chunks.at(k.head).next
		m.freeChunk(k.head)
		if k.head = next; next == nil32 {
			k.tail = nil32
		}
	}
}
