package core

import (
	"fmt"
	"math"

	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

func (m *Machine) peer(id PeerID) *peer {
	if int(id) >= len(m.peers) {
		m.meet(id)
	}
	return &m.peers[id]
}

func (m *Machine) meet(id PeerID) {
	for int(id) >= len(m.peers) {
		m.peers = append(m.peers, peer{tombs: graves{fifo: emptyFIFO}})
	}
}

func (m *Machine) heard(id PeerID) {
	p := m.peer(id)
	p.heard = m.now
	if p.suspect || !p.known {
		p.suspect, m.judgeAt = false, 0
	}
}

// peerHello: the link is up. An older incarnation's openers end; then Resync.
func (m *Machine) peerHello(e *Event) {
	p := m.peer(e.Peer)
	newer := p.known && e.Inc != p.inc
	p.node, p.inc, p.known, p.ready, p.dead, p.draining = e.Node, e.Inc, true, true, false, false
	m.weigh = m.weigh || p.shutInc != 0
	m.heard(e.Peer)
	m.judgeAt = 0
	if newer {
		m.eachRecord(func(idx int32, r *room) {
			m.eachPair(r, func(at int, p *pair) {
				if p.peer == e.Peer && (p.sm.Sibling || !p.sm.Other.IsZero() && p.sm.Other.Inc != e.Inc) {
					m.stepAt(idx, at, statemachine.Event{Kind: statemachine.OnHelloNewer})
				}
			})
		})
		m.forgetPeer(e.Peer)
		m.forgetQueued(e.Peer)
	}
	m.forgetHolds(e.Peer) // Resync registers again what still stands
	m.eachRecord(func(idx int32, r *room) {
		m.eachPair(r, func(at int, p *pair) {
			if p.peer == e.Peer {
				m.resync(idx, r, at)
			}
		})
	})
}

func (m *Machine) resyncAll(idx int32, r *room) {
	m.eachPair(r, func(at int, _ *pair) { m.resync(idx, r, at) })
}

// resync re-sends to the engine of a pair what the protocol says after a Hello.
func (m *Machine) resync(idx int32, r *room, at int) {
	p := m.pairAt(r, at)
	own, other := r.sm.Own, p.sm.Other
	if p.sm.Sibling {
		if r.sm.State == statemachine.Voted {
			o := m.emptyOut()
			r.sm.Vote(m.smPairs(r), o)
			for i := range o.Sends {
				m.sendFrame(idx, r, &o.Sends[i])
			}
		}
		return
	}
	switch r.sm.Column(&p.sm) {
	case statemachine.Offered, statemachine.Confirmed:
		m.sendFrame(idx, r, &statemachine.Send{Kind: FrameBound, At: at, S: own, D: other, Att: r.sm.Att})
		if r.sm.Started { // or the judge's stall clock runs on what was said last
			p.told = !p.outstanding
			m.tell(r, p)
		}
	case statemachine.Committed:
		m.sendFrame(idx, r, &statemachine.Send{Kind: FrameRankEnd, At: at, S: own, D: other, Quiet: p.sm.RankQuiet})
	case statemachine.Opened:
		m.sayQueuedTo(idx, r, at)
	case statemachine.Registered:
		m.sendFrame(idx, r, &statemachine.Send{Kind: FrameRegister, At: at, D: own, Att: r.sm.Att})
	case statemachine.Bound:
		if !p.sm.RankEnded {
			m.sendFrame(idx, r, &statemachine.Send{Kind: FrameConfirm, At: at, S: other, D: own})
		}
	case statemachine.Ended:
		if p.untold {
			m.sendFrame(idx, r, &statemachine.Send{Kind: FrameAbort, At: at, D: own, Att: r.sm.Att, Reason: r.sm.Reason})
		}
		if r.sm.Role == statemachine.Destination && r.sm.Rung != statemachine.NoRung && !p.sm.Quiet && other.Inc == m.peer(p.peer).inc {
			s := r.sm.Repeat(&p.sm)
			s.At = at
			m.sendFrame(idx, r, &s)
		}
	}
}

// peerGone: that incarnation is provably dead.
func (m *Machine) peerGone(e *Event) {
	p := m.peer(e.Peer)
	if !p.known || p.inc != e.Inc {
		return
	}
	m.peerDead(e.Peer)
	// A dead engine submits nothing more: as after a Hello of a newer incarnation, rung 3 can be a proof.
	m.eachRecord(func(idx int32, r *room) {
		m.eachPair(r, func(at int, p *pair) {
			if p.peer == e.Peer && (p.sm.Sibling || p.sm.Other.Inc == e.Inc) {
				m.stepAt(idx, at, statemachine.Event{Kind: statemachine.OnHelloNewer})
			}
		})
	})
}

// judgePeers ends the rooms of peers that have been silent too long. It looks only when that can be.
func (m *Machine) judgePeers() {
	if m.now < m.judgeAt {
		return
	}
	suspect, dead := int64(m.cfg.Clocks.PeerSuspect), int64(m.cfg.Clocks.PeerDead)
	m.judgeAt = math.MaxInt64
	for i := range m.peers {
		p := &m.peers[i]
		if !p.known || p.dead {
			continue
		}
		silent := m.now - p.heard
		p.suspect = silent > suspect
		if silent > dead {
			m.peerDead(PeerID(i))
			continue
		}
		due := p.heard + dead + 1
		if !p.suspect {
			due = min(due, p.heard+suspect+1)
		}
		m.judgeAt = min(m.judgeAt, due)
	}
}

func (m *Machine) peerDead(id PeerID) {
	p := m.peer(id)
	if p.dead {
		return
	}
	p.dead, p.ready = true, false
	m.stats.PeersDead++
	m.forgetHolds(id)
	m.forgetQueued(id)
	m.eachRecord(func(idx int32, r *room) {
		m.eachPair(r, func(at int, p *pair) {
			if p.peer == id && (p.sm.Sibling || !p.sm.Other.IsZero()) {
				m.stepAt(idx, at, statemachine.Event{Kind: statemachine.OnPeerDead})
			}
		})
	})
}

// forgetQueued: whoever said Queued is gone. The clock that it started runs on.
func (m *Machine) forgetQueued(id PeerID) {
	m.eachRecord(func(_ int32, r *room) {
		if r.peerQueued && m.pairWith(r, id, false) >= 0 {
			r.peerQueued = false
		}
	})
}

// forgetPeer drops what belongs to an older incarnation of the peer: abort marks and pools.
func (m *Machine) forgetPeer(id PeerID) {
	for k := range m.marks {
		if k.peer == id {
			m.dropMark(k)
		}
	}
	for k := range m.remotePools {
		if k.peer == id {
			delete(m.remotePools, k)
		}
	}
}

// sayQueued tells the source engines that the destination is open and waits for memory.
func (m *Machine) sayQueued(idx int32, r *room) {
	m.eachPair(r, func(at int, _ *pair) { m.sayQueuedTo(idx, r, at) })
}

func (m *Machine) sayQueuedTo(idx int32, r *room, at int) {
	if r.sm.Role == statemachine.Destination && r.sm.State == statemachine.Opened && !m.pairAt(r, at).sm.Sibling {
		m.sendFrame(idx, r, &statemachine.Send{Kind: FrameQueued, At: at, D: r.sm.Own, Att: r.sm.Att})
	}
}

// frame finds the record that a frame concerns, by the precedence of the protocol, and steps it.
func (m *Machine) frame(from PeerID, f *Frame) {
	if !m.peer(from).ready { // of a link that is over: Hello comes first
		m.stats.Dropped++
		return
	}
	m.stats.FramesIn[min(f.Kind, statemachine.NumFrameKinds-1)]++
	e := statemachine.Event{Kind: statemachine.OnFrame, Frame: f.Kind, Outcome: f.Outcome, Reason: f.Reason, Quiet: f.Quiet, S: f.S, D: f.D, Att: f.Att}
	e.OwnInc = f.S.Inc == m.cfg.Incarnation
	e.Unproven = f.S.Seq <= m.unproven
	if inc := m.peer(from).inc; (f.Kind == FrameRegister || f.Kind == FrameQueued) && f.D.Inc != inc || f.Kind == FrameBound && f.S.Inc != inc {
		m.stats.Dropped++ // of an older incarnation: nobody would hear the answer
		return
	}
	switch f.Kind {
	case FrameQueued, FrameRegister, FrameConfirm, FrameVerdict:
		m.toSource(from, f, &e)
	case FrameBound, FrameProgress, FrameRankEnd, FrameDrained:
		m.toDestination(from, f, &e)
	case FrameAbort:
		switch {
		case f.S.IsZero() && f.D.IsZero():
			m.stats.Dropped++ // of nobody
		case f.S.IsZero() && !m.returned(from, f):
			m.toSource(from, f, &e)
		default:
			m.toDestination(from, f, &e)
		}
	case FrameReady, FrameGroupVerdict, FrameGroupAbort:
		m.toSibling(from, f, &e)
	default:
		m.stats.Dropped++
	}
}

// returned tells Abort(0,d), the answer to a placeholder that was dropped, from Abort(d), the word of an
// unbound destination that ended. The opener says whose d it is, except on the link of an engine to
// itself; there, one that ended is not live.
func (m *Machine) returned(from PeerID, f *Frame) bool {
	if f.D.Inc != m.cfg.Incarnation {
		return false
	}
	if m.peer(from).inc != m.cfg.Incarnation {
		return true
	}
	d := m.byOwn(keyOf(f.Room, statemachine.Destination), f.D)
	return d != nil32 && m.rooms.at(d).sm.State.Live()
}

// first returns the record of a key that a frame concerns most by rank, 0 before all; of equals the
// newest. A rank of none does not count.
func (m *Machine) first(k roomKey, from PeerID, f *Frame, rank func(*Machine, *room, PeerID, *Frame) int) int32 {
	best, at := none, nil32
	for i := m.head(k); i != nil32 && best > 0; i = m.rooms.at(i).next {
		if n := rank(m, m.rooms.at(i), from, f); n < best {
			best, at = n, i
		}
	}
	return at
}

const none = 5

// sourceRank is the precedence of docs/protocol.md for frames that do not name the source.
func sourceRank(m *Machine, r *room, from PeerID, f *Frame) int {
	pair, ended := statemachine.Opener{}, r.sm.State == statemachine.Ended
	if at := m.pairWith(r, from, false); at >= 0 {
		pair = m.pairAt(r, at).sm.Other
	} else {
		pair = m.firstPair(r).sm.Other // of another engine: it is not this one's
	}
	switch {
	case !ended && pair == f.D:
		return 0
	case ended && pair == f.D:
		return 1
	case !ended:
		return 3
	case !m.meant(r, f.PeerGroup):
		return none
	case pair.IsZero() && r.sm.Att == f.Att && f.Kind != FrameQueued:
		if !m.speaksFor(from, r) || f.Kind == FrameRegister && r.peerGroup != nil32 && m.name(r.peerGroup) != f.Group {
			return 4 // it waited for another group, so the live one may be meant
		}
		return 2
	}
	return none
}

// destinationRank is the same for Abort(s, 0).
func destinationRank(_ *Machine, r *room, _ PeerID, f *Frame) int {
	ended := r.sm.State == statemachine.Ended
	switch {
	case !ended && r.sm.Att == f.Att:
		return 0
	case ended && r.sm.Att == f.Att:
		return 1
	case !ended:
		return 2
	}
	return none
}

// speaksFor reports whether an engine may speak about a room: a room that named a group takes the word of the
// engines that it has met and of those that host that group now. While nobody is known to host it, anybody
// may be the one, as for a room that named none.
func (m *Machine) speaksFor(from PeerID, r *room) bool {
	met := r.peer == from
	for i := r.pairs; i != nil32 && !met; i = m.pairs.at(i).next {
		met = m.pairs.at(i).peer == from
	}
	if r.peerGroup == nil32 || met {
		return true
	}
	if g := m.groups[groupPair{r.group, r.peerGroup}]; g != nil {
		return g.hostedBy(from)
	}
	return r.peer == nilPeer
}

// counterpart is the place of the pair that an engine at the other side speaks about; -1 when there is none.
// A record that sits with one engine and is not bound may go on with another.
func (m *Machine) counterpart(r *room, from PeerID) int {
	at := m.pairWith(r, from, false)
	if first := m.firstPair(r); at < 0 && r.whole && first.sm.Other.IsZero() && first.next == nil32 {
		return 0
	}
	return at
}

// towardsGroup is the place of the pair with an engine whose destination is of a group; -1 when the record must
// wait until all engines of the group are known.
func (m *Machine) towardsGroup(idx int32, r *room, from PeerID, group string) int {
	if !r.whole {
		if g := m.groupOf(r, group); g != nil && (len(g.hosts) > 1 || !g.complete()) {
			if m.meetGroup(idx, r, g); !r.whole {
				return -1
			}
		}
	}
	return m.counterpart(r, from)
}

// mayBeMissing reports whether the destination of a Register may be of the engine that a room's group lacks.
func (m *Machine) mayBeMissing(r *room, f *Frame) bool {
	if r.whole || r.peerGroup == nil32 || m.name(r.peerGroup) != f.Group {
		return false
	}
	g := m.groups[groupPair{r.group, r.peerGroup}]
	return g != nil && g.reason == statemachine.None && !g.complete()
}

// meetPeer notes the engine of a pair that anybody could have been.
func (m *Machine) meetPeer(idx int32, r *room, at int, from PeerID) {
	p := m.pairAt(r, at)
	if p.peer = from; at == 0 {
		m.setPeer(idx, r, from)
	}
}

// stranger answers a frame about a room that does not belong to its sender. What it says of another attempt may
// be about a room that will be opened here: it is kept as if none were.
func (m *Machine) stranger(from PeerID, r *room, f *Frame, e *statemachine.Event) {
	switch {
	case f.Att != r.sm.Att && (f.Kind == FrameRegister || f.Kind == FrameAbort):
		m.absent(from, r.sm.Role, f, e, false)
		return
	case f.Kind == FrameRegister: // it would wait in vain
		m.sendStale(from, f.Room, f.D, f.Att)
	}
	m.stats.Dropped++
}

func (m *Machine) toSource(from PeerID, f *Frame, e *statemachine.Event) {
	key := keyOf(f.Room, statemachine.Source)
	var idx int32
	switch f.Kind {
	case FrameConfirm, FrameVerdict:
		idx = m.byOwn(key, f.S)
	default:
		idx = m.first(key, from, f, sourceRank)
	}
	if idx == nil32 {
		m.absent(from, statemachine.Source, f, e, false)
		return
	}
	r := m.rooms.at(idx)
	if !m.meant(r, f.PeerGroup) { // it lives, so no other source of this room can be open here (R3)
		if f.Kind == FrameRegister {
			m.sendStale(from, f.Room, f.D, f.Att)
		}
		m.stats.Dropped++
		return
	}
	if f.Kind == FrameRegister && f.Att == r.sm.Att && r.sm.State == statemachine.Unbound && m.mayBeMissing(r, f) {
		m.holdFrame(from, f)
		return
	}
	if !m.speaksFor(from, r) || f.Kind == FrameQueued && r.peerGroup != nil32 && r.peer == nilPeer {
		m.stranger(from, r, f, e)
		return
	}
	if f.Kind == FrameRegister && r.sm.State == statemachine.Unbound && f.Att == r.sm.Att && !f.D.IsZero() {
		if r.peerGroup != nil32 && m.name(r.peerGroup) != f.Group {
			m.sendStale(from, f.Room, f.D, f.Att)
			m.stats.Dropped++
			return
		}
		if m.towardsGroup(idx, r, from, f.Group) < 0 { // not all engines of the group are known yet
			m.holdFrame(from, f)
			return
		}
	}
	at := m.counterpart(r, from)
	if at < 0 {
		if m.otherPairOf(r, f.D) {
			m.stats.Dropped++ // another engine speaks for this pair
			return
		}
		m.stranger(from, r, f, e)
		return
	}
	p := m.pairAt(r, at)
	m.record(r, RecFrameIn).Frame = f.Kind
	if f.Kind == FrameQueued {
		if c := r.sm.Column(&p.sm); (c == statemachine.Unbound || c == statemachine.Offered) && f.Att == r.sm.Att {
			r.peerQueued = true
			if p.peer == nilPeer {
				m.meetPeer(idx, r, at, from)
			}
		}
		m.stepAt(idx, at, *e)
		return
	}
	if f.Kind == FrameRegister && r.sm.Column(&p.sm) == statemachine.Unbound && f.Att == r.sm.Att {
		r.peerQueued = false
		if !r.sm.Admitted { // see open
			m.step(idx, statemachine.Event{Kind: statemachine.OnAdmit})
		}
	}
	old := r.sm.Column(&p.sm)
	if p.sm.Other.IsZero() && f.Att == r.sm.Att {
		m.meetPeer(idx, r, at, from)
	}
	if f.Kind == FrameRegister {
		m.registering = m.indexOf(r, at)
	}
	m.stepFrame(idx, r, at, from, f, e)
	m.registering = nil32
	switch {
	case f.Kind == FrameRegister && r.sm.Column(&p.sm) == statemachine.Offered && p.sm.Other == f.D && !p.havePages:
		m.takePages(idx, r, at, from, f)
	case f.Kind == FrameConfirm && old == statemachine.Offered && r.sm.Column(&p.sm) == statemachine.Confirmed:
		if !p.havePages {
			m.takePages(idx, r, at, from, f)
		}
		if p.sm.Judge {
			r.clockLog2 = min(f.ClockLog2, logs-1)
			m.setClocks(idx, r)
		}
		if agreed(r) {
			m.readyAll(idx, r)
			m.maybeComplete(idx, r)
		}
	}
}

// otherPairOf reports whether d is the other opener of a pair of the record.
func (m *Machine) otherPairOf(r *room, d statemachine.Opener) bool {
	for i := r.pairs; i != nil32; i = m.pairs.at(i).next {
		if !d.IsZero() && m.pairs.at(i).sm.Other == d {
			return true
		}
	}
	return false
}

// stepFrame is stepAt for a frame: what the transition asks to remember comes from the frame.
func (m *Machine) stepFrame(idx int32, r *room, at int, from PeerID, f *Frame, e *statemachine.Event) {
	was := standingOf(r)
	o := m.emptyOut()
	r.sm.Step(m.smPairs(r), at, e, o)
	if was.state.Live() && r.sm.State == statemachine.Ended && r.detail == nil32 && r.sm.ByPeer {
		switch f.Kind {
		case FrameVerdict, FrameAbort, FrameGroupVerdict, FrameGroupAbort:
			m.explain(idx, "said by "+m.peer(from).node)
		}
	}
	if o.Do != 0 {
		m.remember(from, f, r.sm.Role, o)
	}
	m.settle(idx, r, was, o)
}

// absent answers a frame for which there is no record.
func (m *Machine) absent(from PeerID, role statemachine.Role, f *Frame, e *statemachine.Event, sibling bool) {
	o := m.emptyOut()
	m.gathered = append(m.gathered[:0], &statemachine.Pair{Sibling: sibling})
	(&statemachine.Record{Role: role}).Step(m.gathered, 0, e, o)
	m.remember(from, f, role, o)
	if o.Do&statemachine.DoDrop != 0 {
		m.stats.Dropped++
	}
	for i := range o.Sends {
		s := &o.Sends[i]
		if a := m.frameTo(from, s.Kind); a != nil {
			a.Room, a.S, a.D, a.Att, a.Outcome, a.Reason = f.Room, s.S, s.D, f.Att, s.Outcome, s.Reason
		}
	}
}

func (m *Machine) toDestination(from PeerID, f *Frame, e *statemachine.Event) {
	key := keyOf(f.Room, statemachine.Destination)
	var idx int32
	if f.Kind == FrameAbort && f.D.IsZero() {
		idx = m.first(key, from, f, destinationRank)
	} else {
		idx = m.byOwn(key, f.D)
	}
	if idx == nil32 {
		m.absent(from, statemachine.Destination, f, e, false)
		return
	}
	r := m.rooms.at(idx)
	at := m.pairWith(r, from, false)
	if at < 0 {
		if f.D.IsZero() && r.sm.Att != f.Att {
			m.absent(from, statemachine.Destination, f, e, false)
			return
		}
		m.stats.Dropped++ // another engine than the ones that were asked
		return
	}
	p := m.pairAt(r, at)
	if p.peer == nilPeer && !f.D.IsZero() {
		m.stats.Dropped++ // no engine was told of d yet
		return
	}
	rec := m.record(r, RecFrameIn)
	rec.Frame, rec.Bytes = f.Kind, f.Bytes
	own := r.sm.Column(&p.sm) == statemachine.Bound && p.sm.Other == f.S
	switch f.Kind {
	case FrameBound:
		if r.sm.State == statemachine.Registered {
			r.clockLog2 = m.transferLog2(r.total)
		}
		p.wantPages = f.NeedPages
	case FrameRankEnd:
		if !own || p.sm.RankEnded {
			break
		}
		if e.Complete = m.completes(r, p, f); e.Complete {
			if len(f.Aux) > 0 {
				m.setAux(r, auxRecord{data: f.Aux, crc: f.CRC})
			}
			m.setOutstanding(r, p, false) // the others of its group may be slower
			if m.lastRankEnd(r, p) {
				r.moved = r.total
			}
		} else if r.detail == nil32 {
			m.explain(idx, "RankEnd of "+m.peer(from).node+" does not match the pages that were registered")
		}
	case FrameProgress:
		if own {
			if f.Outstanding && f.Bytes > p.moved { // a byte counter that grows renews the stall clock
				m.disarm(r, slotPhase)
				m.peer(from).moved = m.now
			}
			r.count(p, max(p.moved, f.Bytes)-p.moved, 0)
			m.setOutstanding(r, p, f.Outstanding)
		}
	}
	m.stepFrame(idx, r, at, from, f, e)
}

// toSibling is for the frames between the engines of a destination group.
func (m *Machine) toSibling(from PeerID, f *Frame, e *statemachine.Event) {
	key := keyOf(f.Room, statemachine.Destination)
	idx := nil32
	switch f.Kind {
	case FrameGroupVerdict:
		idx = m.byOwn(key, f.D)
	case FrameGroupAbort:
		idx = m.first(key, from, f, destinationRank)
	default: // Ready: the record that is bound to the sources that it names
		for i := m.head(key); i != nil32 && idx == nil32; i = m.rooms.at(i).next {
			if m.boundTo(m.rooms.at(i), f.Sources) {
				idx, e.Complete = i, true
			}
		}
	}
	at := -1
	if idx != nil32 {
		at = m.pairWith(m.rooms.at(idx), from, true)
	}
	if at < 0 {
		m.absent(from, statemachine.Destination, f, e, true)
		return
	}
	r := m.rooms.at(idx)
	m.record(r, RecFrameIn).Frame = f.Kind
	m.stepFrame(idx, r, at, from, f, e)
}

// boundTo reports whether openers are those that a destination is bound to, one a source engine in the order of
// their lowest ranks.
func (m *Machine) boundTo(r *room, sources []statemachine.Opener) bool {
	n := 0
	for i := r.pairs; i != nil32; i = m.pairs.at(i).next {
		if p := m.pairs.at(i); !p.sm.Sibling {
			if n >= len(sources) || p.sm.Other.IsZero() || p.sm.Other != sources[n] {
				return false
			}
			n++
		}
	}
	return n == len(sources)
}

// transferLog2 is the length of the transfer clock, fixed by the judge at bind.
func (m *Machine) transferLog2(bytes int64) uint8 {
	d := int64(m.cfg.Clocks.TransferMin)
	if bytes > 0 {
		d = max(d, int64(float64(bytes)*4/float64(m.cfg.Clocks.FloorRate)*1e9))
	}
	return log2Seconds(d)
}

// report is what RankEnd says of one source rank, while it is checked.
type report struct {
	said     bool
	from, to int // in Machine.saying
}

// lastRankEnd reports whether every other source engine has said RankEnd.
func (m *Machine) lastRankEnd(r *room, last *pair) bool {
	for i := r.pairs; i != nil32; i = m.pairs.at(i).next {
		if p := m.pairs.at(i); !p.sm.Sibling && p != last && !p.sm.RankEnded {
			return false
		}
	}
	return true
}

// completes is rule R11 over the RankEnd of one source engine: every rank there reported, and the aux
// record is whole. With the last one also: what each rank sent of each part is exactly what the ranks here
// that it writes to registered.
func (m *Machine) completes(r *room, p *pair, f *Frame) bool {
	lm := m.mapOf(r)
	ranks := int32(r.size)
	if !lm.IsZero() {
		ranks, _ = lm.Ranks()
	}
	if checksum(f.Aux) != f.CRC {
		return false
	}
	m.reports = append(m.reports[:0], make([]report, ranks)...)
	m.saying = m.saying[:0]
	here := int32(0)
	for i := range f.Sent {
		s := &f.Sent[i]
		if s.Rank < 0 || s.Rank >= ranks || m.reports[s.Rank].said || !m.hosts(p.set, s.Rank) {
			return false
		}
		from := len(m.saying)
		m.saying = append(m.saying, s.Parts...)
		m.reports[s.Rank] = report{true, from, len(m.saying)}
		here++
	}
	if p.set != fullyHosted && int(here) != len(m.sets[p.set]) || p.set == fullyHosted && here != ranks {
		return false
	}
	for _, ps := range m.saying {
		if ps.Pages < 0 {
			return false
		}
	}
	if !m.lastRankEnd(r, p) {
		m.keepSaid(p, f)
		return true
	}
	for i := r.pairs; i != nil32; i = m.pairs.at(i).next {
		if q := m.pairs.at(i); q != p && !q.sm.Sibling {
			m.recallSaid(q)
		}
	}
	m.firsts = m.firsts[:0]
	for range r.size {
		m.firsts = append(m.firsts, nil32)
	}
	for i := r.dst; i != nil32; i = m.parts.at(i).next {
		pt := m.parts.at(i)
		if m.firsts[pt.rank] == nil32 {
			m.firsts[pt.rank] = i
		}
		of := lm
		if pt.state {
			of = layout.Map{}
		}
		for s, end := of.Sources(pt.rank); s < end; s++ {
			if s >= ranks || !m.reports[s].said || !of.Fits(m.sentPages(s, int32(pt.ordinal)), int64(pt.pages-pt.prefix)) {
				return false
			}
		}
	}
	for i := r.ranks; i != nil32; i = m.ranks.at(i).next {
		q := m.ranks.at(i).rank
		for s, end := lm.Sources(q); s < end; s++ {
			for _, ps := range m.saying[m.reports[s].from:m.reports[s].to] {
				if ps.Pages != 0 && !m.registered(q, ps.Ordinal) {
					return false
				}
			}
		}
	}
	return true
}

// registered reports whether a rank here has registered a part. Those of a rank lie together, from Machine.firsts on.
func (m *Machine) registered(rankNo, ordinal int32) bool {
	for i := m.firsts[rankNo]; i != nil32 && m.parts.at(i).rank == rankNo; i = m.parts.at(i).next {
		if int32(m.parts.at(i).ordinal) == ordinal {
			return true
		}
	}
	return false
}

// keepSaid keeps what a RankEnd says until the last one has come; recallSaid adds it to what is checked.
func (m *Machine) keepSaid(p *pair, f *Frame) {
	for i := range f.Sent {
		s := &f.Sent[i]
		for _, ps := range s.Parts {
			p.said = m.saids.add(said{p.said, s.Rank, ps.Ordinal, ps.Pages})
		}
		p.said = m.saids.add(said{p.said, s.Rank, -1, 0})
	}
}

func (m *Machine) recallSaid(p *pair) {
	for i := p.said; i != nil32; {
		s := m.saids.at(i)
		if s.ordinal < 0 { // its parts follow
			m.reports[s.rank] = report{true, len(m.saying), len(m.saying)}
		} else {
			m.saying = append(m.saying, PartSent{Ordinal: s.ordinal, Pages: s.pages})
			m.reports[s.rank].to = len(m.saying)
		}
		i = s.next
	}
}

func (m *Machine) sentPages(rankNo, ordinal int32) int64 {
	var n int64
	for _, p := range m.saying[m.reports[rankNo].from:m.reports[rankNo].to] {
		if p.Ordinal == ordinal {
			n += p.Pages
		}
	}
	return n
}

func (m *Machine) part(r *room, rankNo, ordinal int32) int32 {
	for p := r.dst; p != nil32; p = m.parts.at(p).next {
		if pt := m.parts.at(p); pt.rank == rankNo && int32(pt.ordinal) == ordinal {
			return p
		}
	}
	return nil32
}

// takePages keeps the destination's page lists of a Register or Confirm, checked against the pools
// that the peer announced. What does not fit ends the room.
func (m *Machine) takePages(idx int32, r *room, at int, from PeerID, f *Frame) {
	p := m.pairAt(r, at)
	p.peer, p.epoch = from, f.Epoch
	b, ok := m.learn(f.Backend)
	if !ok {
		m.end(idx, statemachine.Protocol, f.Kind.String()+".backend: too many different names")
		return
	}
	p.backend = b
	if at == 0 {
		r.backend, r.epoch = b, f.Epoch
	}
	if f.Kind == FrameConfirm && len(f.Ranks) == 0 {
		m.end(idx, statemachine.Protocol, "Confirm.ranks: the pages were asked for and are missing")
		return
	}
	ranks := int32(r.size)
	if f.Kind == FrameRegister { // Confirm does not name the group: the placeholder did
		g := m.groupOf(r, f.Group)
		if g != nil && g.reason == statemachine.LayoutMismatch {
			m.end(idx, g.reason, g.detail)
			return
		}
		m.setMap(r, towards(r, g))
	}
	lm := m.mapOf(r)
	if !lm.IsZero() {
		_, ranks = lm.Ranks()
	}
	expected := int(ranks)
	if p.set != fullyHosted {
		expected = len(m.sets[p.set])
	}
	if len(f.Ranks) != expected {
		m.end(idx, statemachine.LayoutMismatch, fmt.Sprintf("%s registered %d ranks, %d are expected of its group", m.peer(from).node, len(f.Ranks), expected))
		return
	}
	for i := range f.Ranks {
		rp := &f.Ranks[i]
		if rp.Rank < 0 || rp.Rank >= ranks || !m.hosts(p.set, rp.Rank) {
			m.end(idx, statemachine.Protocol, fmt.Sprintf("%s.ranks[%d].rank: %d is outside the group", f.Kind, i, rp.Rank))
			return
		}
		for j := range rp.Parts {
			if why := m.takePart(r, from, rp.Rank, &rp.Parts[j]); why != "" {
				m.end(idx, statemachine.Protocol, fmt.Sprintf("%s.ranks[%d].parts[%d]%s", f.Kind, i, j, why))
				return
			}
		}
	}
	for p := r.dst; p != nil32; p = m.parts.at(p).next {
		if pt := m.parts.at(p); unmapped(lm, pt.state, pt.prefix) != "" {
			m.end(idx, statemachine.LayoutMismatch, fmt.Sprintf("%s, rank %d, pool %d: parts%s", m.peer(from).node, pt.rank, pt.ordinal, unmapped(lm, pt.state, pt.prefix)))
			return
		}
	}
	p.havePages = true
	m.recount(r, m.indexOf(r, at))
}

// towards is how the pages of a source are mapped to those of a group at its peer; of a group that is not
// known, nil, nothing else than equal layouts can be meant.
func towards(r *room, g *group) layout.Map {
	if g != nil && g.fits(statemachine.Source, int32(r.size)) {
		return g.layout
	}
	return layout.Map{}
}

// groupOf is the group of that name that works with a room's group; nil when it is not known.
func (m *Machine) groupOf(r *room, name string) *group {
	if id, ok := m.ids[name]; ok {
		return m.groups[groupPair{r.group, id}]
	}
	return nil
}

// takePart keeps one list; it says what is wrong with it, or nothing.
func (m *Machine) takePart(r *room, from PeerID, rankNo int32, pp *PartPages) (why string) {
	rpool, ok := m.remotePools[remotePool{from, pp.Pool}]
	if !ok {
		return fmt.Sprintf(".pool: %s has not announced pool %d", m.peer(from).node, pp.Pool)
	}
	if err := layout.Check(pp.Runs, rpool.pages); err != nil {
		return ": " + err.Error()
	}
	n := layout.Pages(pp.Runs)
	if n > int64(rpool.pages) {
		return fmt.Sprintf(": %d pages of a pool of %d", n, rpool.pages)
	}
	if pp.Ordinal < 0 || pp.Ordinal >= maxPools {
		return fmt.Sprintf(".ordinal: %d is outside 0 to %d", pp.Ordinal, maxPools-1)
	}
	if pp.Prefix < 0 || int64(pp.Prefix) > n || m.part(r, rankNo, pp.Ordinal) != nil32 {
		return ": prefix out of range, or the pool is named twice"
	}
	r.dst = m.parts.add(part{next: r.dst, runs: m.putRuns(pp.Runs), rank: rankNo, ordinal: int16(pp.Ordinal), pages: int32(n), prefix: pp.Prefix, pool: pp.Pool, state: rpool.state})
	return ""
}

// badFrame ends the live room that a malformed frame of its own peer names: what it meant to say is
// lost, so the room cannot go on as if nothing had been said.
func (m *Machine) badFrame(from PeerID, f *Frame, detail string) {
	m.stats.Dropped++
	for _, role := range []statemachine.Role{statemachine.Source, statemachine.Destination} {
		own := f.S
		if role == statemachine.Destination {
			own = f.D
		}
		if own.IsZero() {
			continue
		}
		if idx := m.byOwn(keyOf(f.Room, role), own); idx != nil32 && m.rooms.at(idx).peer != nilPeer && m.pairWith(m.rooms.at(idx), from, false) >= 0 {
			m.end(idx, statemachine.Protocol, fmt.Sprintf("%s of %s: %s", f.Kind, m.peer(from).node, detail))
		}
	}
}
