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
	m.heard(e.Peer)
	m.judgeAt = 0
	if newer {
		m.eachRecord(func(idx int32, r *room) {
			if r.peer == e.Peer && !r.pair().Other.IsZero() && r.pair().Other.Inc != e.Inc {
				m.step(idx, statemachine.Event{Kind: statemachine.OnHelloNewer})
			}
		})
		m.forgetPeer(e.Peer)
		m.forgetQueued(e.Peer)
	}
	m.forgetHolds(e.Peer) // Resync registers again what still stands
	m.eachRecord(func(idx int32, r *room) {
		if r.peer == e.Peer {
			m.resync(idx, r)
		}
	})
}

// resync re-sends what the protocol says after a Hello.
func (m *Machine) resync(idx int32, r *room) {
	own, pair := r.sm.Own, r.pair().Other
	switch r.sm.State {
	case statemachine.Offered, statemachine.Confirmed:
		m.sendFrame(idx, r, &statemachine.Send{Kind: FrameBound, S: own, D: pair, Att: r.sm.Att})
		if r.sm.Started { // or the judge's stall clock runs on what was said last
			r.told = !r.outstanding
			m.tell(r)
		}
	case statemachine.Committed:
		m.sendFrame(idx, r, &statemachine.Send{Kind: FrameRankEnd, S: own, D: pair, Quiet: r.pair().RankQuiet})
	case statemachine.Opened:
		m.sayQueued(idx, r)
	case statemachine.Registered:
		m.sendFrame(idx, r, &statemachine.Send{Kind: FrameRegister, D: own, Att: r.sm.Att})
	case statemachine.Bound:
		m.sendFrame(idx, r, &statemachine.Send{Kind: FrameConfirm, S: pair, D: own})
	case statemachine.Ended:
		if r.untold {
			m.sendFrame(idx, r, &statemachine.Send{Kind: FrameAbort, D: own, Att: r.sm.Att, Reason: r.sm.Reason})
		}
		if r.sm.Role == statemachine.Destination && r.sm.Rung != statemachine.NoRung && pair.Inc == m.peer(r.peer).inc {
			s := r.sm.Repeat(r.pair())
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
		if r.peer == e.Peer && r.pair().Other.Inc == e.Inc {
			m.step(idx, statemachine.Event{Kind: statemachine.OnHelloNewer})
		}
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
		if r.peer == id && !r.pair().Other.IsZero() {
			m.step(idx, statemachine.Event{Kind: statemachine.OnPeerDead})
		}
	})
}

// forgetQueued: whoever said Queued is gone. The clock that it started runs on.
func (m *Machine) forgetQueued(id PeerID) {
	m.eachRecord(func(_ int32, r *room) {
		if r.peer == id {
			r.peerQueued = false
		}
	})
}

// forgetPeer drops what belongs to an older incarnation of the peer: abort marks and pools.
func (m *Machine) forgetPeer(id PeerID) {
	for k, mk := range m.marks {
		if mk.peer == id {
			m.dropMark(k, mk)
		}
	}
	for k := range m.remotePools {
		if k.peer == id {
			delete(m.remotePools, k)
		}
	}
}

// peerGroup: a group appeared at a peer, changed, or was refused. Rooms that waited for it go on.
func (m *Machine) peerGroup(e *Event) {
	name := m.intern(e.Group)
	own := m.intern(e.PeerGroup)
	if own == name { // ranks of the own group at another engine: groups that span engines are not served yet
		return
	}
	if e.Size == 0 {
		delete(m.groups, groupPair{own, name})
		return
	}
	g := &group{peer: e.Peer, role: e.Role, size: e.Size, layout: e.Map, reason: e.Reason, detail: e.Detail}
	for _, b := range e.Backends {
		g.backends = append(g.backends, m.intern(b))
	}
	m.groups[groupPair{own, name}] = g
	m.eachRecord(func(idx int32, r *room) {
		if r.peerGroup != name || r.group != own {
			return
		}
		if r.sm.State == statemachine.Ended {
			if r.untold && r.peer == nilPeer {
				m.setPeer(idx, r, e.Peer)
				m.resync(idx, r)
			}
			return
		}
		met := r.peer != nilPeer
		if !met {
			r.peer = e.Peer
		}
		if !r.pair().Other.IsZero() || r.peer != e.Peer {
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
		case r.sm.Role == statemachine.Destination && (!met || r.sm.State == statemachine.Registered && r.backend == nil32):
			m.resync(idx, r) // it waited for the group; else Hello has said it already
			m.endIfDown(idx)
		}
	})
}

// sayQueued tells the source engine that the destination is open and waits for memory.
func (m *Machine) sayQueued(idx int32, r *room) {
	if r.sm.Role == statemachine.Destination && r.sm.State == statemachine.Opened {
		m.sendFrame(idx, r, &statemachine.Send{Kind: FrameQueued, D: r.sm.Own, Att: r.sm.Att})
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
	default:
		m.stats.Dropped++ // group frames: groups that span engines are refused
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
func (m *Machine) first(k roomKey, f *Frame, rank func(*room, *Frame) int) int32 {
	best, at := none, nil32
	for i := m.head(k); i != nil32 && best > 0; i = m.rooms.at(i).next {
		if n := rank(m.rooms.at(i), f); n < best {
			best, at = n, i
		}
	}
	return at
}

const none = 4

// sourceRank is the precedence of docs/protocol.md for frames that do not name the source.
func sourceRank(r *room, f *Frame) int {
	pair, ended := r.pair().Other, r.sm.State == statemachine.Ended
	switch {
	case !ended && pair == f.D:
		return 0
	case ended && pair == f.D:
		return 1
	case ended && pair.IsZero() && r.sm.Att == f.Att && f.Kind != FrameQueued:
		return 2
	case !ended:
		return 3
	}
	return none
}

// destinationRank is the same for Abort(s, 0).
func destinationRank(r *room, f *Frame) int {
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
// engine that it has met and of the one that hosts that group now. While nobody is known to host it, anybody
// may be the one, as for a room that named none.
func (m *Machine) speaksFor(from PeerID, r *room) bool {
	if r.peerGroup == nil32 || r.peer == from {
		return true
	}
	if g := m.groups[groupPair{r.group, r.peerGroup}]; g != nil {
		return g.peer == from
	}
	return r.peer == nilPeer
}

// stranger answers a frame about a room that does not belong to its sender. What it says of another attempt may
// be about a room that will be opened here: it is kept as if none were.
func (m *Machine) stranger(from PeerID, r *room, f *Frame, e *statemachine.Event) {
	switch {
	case f.Att != r.sm.Att && (f.Kind == FrameRegister || f.Kind == FrameAbort):
		m.absent(from, r.sm.Role, f, e)
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
		idx = m.first(key, f, sourceRank)
	}
	if idx == nil32 {
		m.absent(from, statemachine.Source, f, e)
		return
	}
	r := m.rooms.at(idx)
	if r.peer != nilPeer && r.peer != from && !r.pair().Other.IsZero() && r.pair().Other == f.D {
		m.stats.Dropped++ // another engine speaks for this pair
		return
	}
	if !m.speaksFor(from, r) || f.Kind == FrameQueued && r.peerGroup != nil32 && r.peer == nilPeer {
		m.stranger(from, r, f, e)
		return
	}
	m.record(r, RecFrameIn).Frame = f.Kind
	if f.Kind == FrameQueued {
		if (r.sm.State == statemachine.Unbound || r.sm.State == statemachine.Offered) && f.Att == r.sm.Att {
			r.peerQueued = true
			if r.peer == nilPeer {
				r.peer = from
			}
		}
		m.step(idx, *e)
		return
	}
	if f.Kind == FrameRegister && r.sm.State == statemachine.Unbound && f.Att == r.sm.Att {
		if r.peerGroup != nil32 && m.name(r.peerGroup) != f.Group {
			m.sendStale(from, f.Room, f.D, f.Att)
			m.stats.Dropped++
			return
		}
		r.peerQueued = false
		if !r.sm.Admitted { // see open
			m.step(idx, statemachine.Event{Kind: statemachine.OnAdmit})
		}
	}
	old := r.sm.State
	if r.pair().Other.IsZero() && f.Att == r.sm.Att {
		m.setPeer(idx, r, from)
	}
	if f.Kind == FrameRegister {
		m.registering = idx
	}
	m.stepFrame(idx, r, from, f, e)
	m.registering = nil32
	switch {
	case f.Kind == FrameRegister && r.sm.State == statemachine.Offered && r.pair().Other == f.D && !r.havePages:
		m.takePages(idx, r, from, f)
	case f.Kind == FrameConfirm && old == statemachine.Offered && r.sm.State == statemachine.Confirmed:
		if !r.havePages {
			m.takePages(idx, r, from, f)
		}
		r.clockLog2 = min(f.ClockLog2, logs-1)
		if r.sm.State == statemachine.Confirmed {
			m.ready(idx, r)
			m.maybeComplete(idx, r)
		}
	}
}

// stepFrame is step for a frame: what the transition asks to remember comes from the frame.
func (m *Machine) stepFrame(idx int32, r *room, from PeerID, f *Frame, e *statemachine.Event) {
	was := standingOf(r)
	o := m.emptyOut()
	r.sm.Step(r.pairs[:], 0, e, o)
	if was.state.Live() && r.sm.State == statemachine.Ended && (f.Kind == FrameVerdict || f.Kind == FrameAbort) && r.detail == nil32 && r.sm.ByPeer {
		m.explain(idx, "said by "+m.peer(from).node)
	}
	if o.Do != 0 {
		m.remember(from, f, r.sm.Role, o)
	}
	m.settle(idx, r, was, o)
}

// absent answers a frame for which there is no record.
func (m *Machine) absent(from PeerID, role statemachine.Role, f *Frame, e *statemachine.Event) {
	o := m.emptyOut()
	(&statemachine.Record{Role: role}).Step(make([]statemachine.Pair, 1), 0, e, o)
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
		idx = m.first(key, f, destinationRank)
	} else {
		idx = m.byOwn(key, f.D)
	}
	if idx == nil32 {
		m.absent(from, statemachine.Destination, f, e)
		return
	}
	r := m.rooms.at(idx)
	if r.peer != nilPeer && r.peer != from && (!f.D.IsZero() || r.sm.Att == f.Att) {
		m.stats.Dropped++ // another engine than the one that was asked
		return
	}
	if r.peer == nilPeer && !f.D.IsZero() {
		m.stats.Dropped++ // no engine was told of d yet
		return
	}
	rec := m.record(r, RecFrameIn)
	rec.Frame, rec.Bytes = f.Kind, f.Bytes
	switch f.Kind {
	case FrameBound:
		if r.sm.State == statemachine.Registered {
			r.clockLog2 = m.transferLog2(r.total)
			r.peer = from
		}
		r.wantPages = f.NeedPages
	case FrameRankEnd:
		e.Complete = m.completes(r, f)
		if r.sm.State == statemachine.Bound && r.pair().Other == f.S {
			if e.Complete {
				m.setAux(r, auxRecord{data: f.Aux, crc: f.CRC})
				r.moved = r.total
			} else if r.detail == nil32 {
				m.explain(idx, "RankEnd of "+m.peer(from).node+" does not match the pages that were registered")
			}
		}
	case FrameProgress:
		if r.sm.State == statemachine.Bound && r.pair().Other == f.S {
			if f.Outstanding && f.Bytes > r.moved { // a byte counter that grows renews the stall clock
				m.disarm(r, slotPhase)
				m.peer(from).moved = m.now
			}
			r.moved = max(r.moved, f.Bytes)
			r.outstanding = f.Outstanding
		}
	}
	m.stepFrame(idx, r, from, f, e)
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
	said bool
	at   int // in Frame.Sent
}

// completes is rule R11 over one RankEnd: every rank of the source reported, what it sent of each part is
// exactly what the ranks that it writes to registered, and the aux record is whole.
func (m *Machine) completes(r *room, f *Frame) bool {
	lm := m.mapOf(r)
	ranks := int32(r.size)
	if !lm.IsZero() {
		ranks, _ = lm.Ranks()
	}
	if len(f.Sent) != int(ranks) || checksum(f.Aux) != f.CRC {
		return false
	}
	m.reports = append(m.reports[:0], make([]report, ranks)...)
	for i := range f.Sent {
		s := &f.Sent[i]
		if s.Rank < 0 || s.Rank >= ranks || m.reports[s.Rank].said {
			return false
		}
		m.reports[s.Rank] = report{said: true, at: i}
	}
	for p := r.dst; p != nil32; p = m.parts.at(p).next {
		pt := m.parts.at(p)
		of := lm
		if pt.state {
			of = layout.Map{}
		}
		for s, end := of.Sources(pt.rank); s < end; s++ {
			if s >= ranks || !of.Fits(sentPages(&f.Sent[m.reports[s].at], int32(pt.ordinal)), int64(pt.pages-pt.prefix)) {
				return false
			}
		}
	}
	for i := range f.Sent {
		s := &f.Sent[i]
		for _, ps := range s.Parts {
			if ps.Pages < 0 || ps.Pages != 0 && !m.registered(r, lm, s.Rank, ps.Ordinal) {
				return false
			}
		}
	}
	return true
}

func sentPages(s *RankSent, ordinal int32) int64 {
	var n int64
	for _, p := range s.Parts {
		if p.Ordinal == ordinal {
			n += p.Pages
		}
	}
	return n
}

// registered reports whether every destination rank that source rank s writes to has registered the part.
func (m *Machine) registered(r *room, lm layout.Map, s, ordinal int32) bool {
	if at := m.part(r, s, ordinal); lm.IsZero() || at != nil32 && m.parts.at(at).state {
		return at != nil32
	}
	_, ranks := lm.Ranks()
	for q := range ranks {
		if lm.Writes(s, q) && m.part(r, q, ordinal) == nil32 {
			return false
		}
	}
	return true
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
func (m *Machine) takePages(idx int32, r *room, from PeerID, f *Frame) {
	r.peer, r.epoch = from, f.Epoch
	b, ok := m.learn(f.Backend)
	if !ok {
		m.end(idx, statemachine.Protocol, f.Kind.String()+".backend: too many different names")
		return
	}
	r.backend = b
	if f.Kind == FrameConfirm && len(f.Ranks) == 0 {
		m.end(idx, statemachine.Protocol, "Confirm.ranks: the pages were asked for and are missing")
		return
	}
	ranks := int32(r.size)
	if f.Kind == FrameRegister { // Confirm does not name the group: the placeholder did
		if g := m.groupOf(r, f.Group); g != nil && g.reason == statemachine.LayoutMismatch {
			m.end(idx, g.reason, g.detail)
			return
		}
		m.setMap(r, m.towards(r, f.Group))
	}
	lm := m.mapOf(r)
	if !lm.IsZero() {
		_, ranks = lm.Ranks()
	}
	if len(f.Ranks) != int(ranks) {
		m.end(idx, statemachine.LayoutMismatch, fmt.Sprintf("%s registered %d ranks, %d are expected of its group", m.peer(from).node, len(f.Ranks), ranks))
		return
	}
	for i := range f.Ranks {
		rp := &f.Ranks[i]
		if rp.Rank < 0 || rp.Rank >= ranks {
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
	r.havePages = true
	m.recount(r)
}

// towards is how the pages of a source are mapped to those of a group at its peer; of a group that is not
// known nothing else than equal layouts can be meant.
func (m *Machine) towards(r *room, group string) layout.Map {
	if g := m.groupOf(r, group); g != nil && g.fits(statemachine.Source, int32(r.size)) {
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
		if idx := m.byOwn(keyOf(f.Room, role), own); idx != nil32 && m.rooms.at(idx).peer == from {
			m.end(idx, statemachine.Protocol, fmt.Sprintf("%s of %s: %s", f.Kind, m.peer(from).node, detail))
		}
	}
}
