package core

import (
	"fmt"
	"hash/crc32"
	"time"

	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

func (m *Machine) peer(id PeerID) *peer {
	for int(id) >= len(m.peers) {
		m.peers = append(m.peers, peer{})
	}
	return &m.peers[id]
}

func (m *Machine) heard(id PeerID) {
	p := m.peer(id)
	p.heard, p.suspect = m.now, false
}

// peerHello: the link is up. An older incarnation's openers end; then Resync.
func (m *Machine) peerHello(e *Event) {
	p := m.peer(e.Peer)
	newer := p.known && e.Inc != p.inc
	p.node, p.inc, p.known, p.ready, p.dead, p.draining = e.Node, e.Inc, true, true, false, false
	m.heard(e.Peer)
	if newer {
		m.eachRecord(func(idx int32, r *room) {
			if r.peer == e.Peer && !r.sm.Pair.IsZero() && r.sm.Pair.Inc != e.Inc {
				m.step(idx, statemachine.Event{Kind: statemachine.OnHelloNewer})
			}
		})
		m.forgetPeer(e.Peer)
	}
	m.forgetHolds(e.Peer) // Resync registers again what still stands
	m.eachRecord(func(idx int32, r *room) {
		if r.peer == e.Peer {
			m.resync(idx)
		}
	})
}

// resync re-sends what the protocol says after a Hello.
func (m *Machine) resync(idx int32) {
	r := m.rooms.at(idx)
	own, pair := r.sm.Own, r.sm.Pair
	switch r.sm.State {
	case statemachine.Offered, statemachine.Confirmed:
		m.sendFrame(idx, &statemachine.Send{Kind: FrameBound, S: own, D: pair, Att: r.sm.Att})
		if r := m.rooms.at(idx); r.sm.Started { // or the judge's stall clock runs on what was said last
			r.told = !r.outstanding
			m.tell(idx)
		}
	case statemachine.Committed:
		m.sendFrame(idx, &statemachine.Send{Kind: FrameRankEnd, S: own, D: pair, Quiet: r.sm.RankQuiet})
	case statemachine.Opened:
		m.sayQueued(idx)
	case statemachine.Registered:
		m.sendFrame(idx, &statemachine.Send{Kind: FrameRegister, D: own, Att: r.sm.Att})
	case statemachine.Bound:
		m.sendFrame(idx, &statemachine.Send{Kind: FrameConfirm, S: pair, D: own})
	case statemachine.Ended:
		if r.sm.Role == statemachine.Destination && r.sm.Rung != statemachine.NoRung && pair.Inc == m.peer(r.peer).inc {
			s := r.sm.Repeat()
			m.sendFrame(idx, &s)
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
		if r.peer == e.Peer && r.sm.Pair.Inc == e.Inc {
			m.step(idx, statemachine.Event{Kind: statemachine.OnHelloNewer})
		}
	})
}

// judgePeers ends the rooms of peers that have been silent too long.
func (m *Machine) judgePeers() {
	for i := range m.peers {
		p := &m.peers[i]
		if !p.known || p.dead {
			continue
		}
		silent := time.Duration(m.now - p.heard)
		p.suspect = silent > m.cfg.Clocks.PeerSuspect
		if silent > m.cfg.Clocks.PeerDead {
			m.peerDead(PeerID(i))
		}
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
	m.eachRecord(func(idx int32, r *room) {
		if r.peer == id && !r.sm.Pair.IsZero() {
			m.step(idx, statemachine.Event{Kind: statemachine.OnPeerDead})
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
	if e.Size == 0 {
		delete(m.groups, groupPair{own, name})
		return
	}
	g := &group{peer: e.Peer, role: e.Role, size: e.Size, reason: e.Reason, detail: e.Detail}
	for _, b := range e.Backends {
		g.backends = append(g.backends, m.intern(b))
	}
	m.groups[groupPair{own, name}] = g
	m.eachRoom(func(idx int32) {
		r := m.rooms.at(idx)
		if r.peerGroup != name || r.group != own {
			return
		}
		met := r.peer != nilPeer
		if !met {
			r.peer = e.Peer
		}
		if !r.sm.Pair.IsZero() || r.peer != e.Peer {
			return
		}
		switch {
		case g.reason != statemachine.None:
			m.end(idx, g.reason, g.detail)
		case g.size != int32(r.size):
			m.end(idx, statemachine.LayoutMismatch, fmt.Sprintf("group %q has %d ranks, this one %d", e.Group, g.size, r.size))
		case r.sm.Role == statemachine.Destination && (!met || r.sm.State == statemachine.Registered && r.backend == nil32):
			m.resync(idx) // it waited for the group; else Hello has said it already
			m.endIfDown(idx)
		}
	})
}

// sayQueued tells the source engine that the destination is open and waits for memory.
func (m *Machine) sayQueued(idx int32) {
	r := m.rooms.at(idx)
	if r.sm.Role == statemachine.Destination && r.sm.State == statemachine.Opened {
		m.sendFrame(idx, &statemachine.Send{Kind: FrameQueued, D: r.sm.Own, Att: r.sm.Att})
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
		m.toSource(from, f, e)
	case FrameBound, FrameProgress, FrameRankEnd, FrameDrained:
		m.toDestination(from, f, e)
	case FrameAbort:
		if f.S.IsZero() && !f.D.IsZero() && !m.returned(from, f) {
			m.toSource(from, f, e)
		} else {
			m.toDestination(from, f, e)
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
	d := m.byOwn(roomKey{f.Room, statemachine.Destination}, f.D)
	return d != nil32 && m.rooms.at(d).sm.State.Live()
}

// first returns the first record that one of the predicates accepts, in the predicates' order.
func (m *Machine) first(k roomKey, fits ...func(*statemachine.Record) bool) int32 {
	for _, fit := range fits {
		if i := m.find(k, fit); i != nil32 {
			return i
		}
	}
	return nil32
}

func (m *Machine) toSource(from PeerID, f *Frame, e statemachine.Event) {
	key := roomKey{f.Room, statemachine.Source}
	live := func(r *statemachine.Record) bool { return r.State.Live() }
	var idx int32
	switch f.Kind {
	case FrameConfirm, FrameVerdict:
		idx = m.byOwn(key, f.S)
	default:
		idx = m.first(key,
			func(r *statemachine.Record) bool { return r.State.Live() && r.Pair == f.D },
			func(r *statemachine.Record) bool { return r.State == statemachine.Ended && r.Pair == f.D },
			func(r *statemachine.Record) bool {
				return r.State == statemachine.Ended && r.Pair.IsZero() && r.Att == f.Att && f.Kind != FrameQueued
			},
			live)
	}
	if idx == nil32 {
		m.absent(from, statemachine.Source, f, e)
		return
	}
	r := m.rooms.at(idx)
	if r.peer != nilPeer && r.peer != from && !r.sm.Pair.IsZero() && r.sm.Pair == f.D {
		m.stats.Dropped++ // another engine speaks for this pair
		return
	}
	m.record(Record{Kind: RecFrameIn, Frame: f.Kind}, idx)
	if f.Kind == FrameQueued {
		if (r.sm.State == statemachine.Unbound || r.sm.State == statemachine.Offered) && f.Att == r.sm.Att {
			r.peerQueued = true
			if r.peer == nilPeer {
				r.peer = from
			}
		}
		m.step(idx, e)
		return
	}
	if f.Kind == FrameRegister && r.sm.State == statemachine.Unbound && f.Att == r.sm.Att {
		if r.peerGroup != nil32 && m.name(r.peerGroup) != f.Group {
			m.sendTo(from, Frame{Kind: FrameAbort, Room: f.Room, D: f.D, Att: f.Att, Reason: statemachine.StaleRoom})
			m.stats.Dropped++
			return
		}
		r.peerQueued = false
		if !r.sm.Admitted { // see open
			m.step(idx, statemachine.Event{Kind: statemachine.OnAdmit})
			r = m.rooms.at(idx)
		}
	}
	old := r.sm.State
	if r.sm.Pair.IsZero() && f.Att == r.sm.Att {
		m.setPeer(idx, from)
	}
	if f.Kind == FrameRegister {
		m.registering = idx
	}
	m.stepFrame(idx, from, f, e)
	m.registering = nil32
	r = m.rooms.at(idx)
	switch {
	case f.Kind == FrameRegister && r.sm.State == statemachine.Offered && r.sm.Pair == f.D && !r.havePages:
		m.takePages(idx, from, f)
	case f.Kind == FrameConfirm && old == statemachine.Offered && r.sm.State == statemachine.Confirmed:
		if !r.havePages {
			m.takePages(idx, from, f)
		}
		r = m.rooms.at(idx)
		r.clockLog2 = min(f.ClockLog2, logs-1)
		if r.sm.State == statemachine.Confirmed {
			m.ready(idx)
			m.maybeComplete(idx)
		}
	}
}

// stepFrame is step for a frame: what the transition asks to remember comes from the frame.
func (m *Machine) stepFrame(idx int32, from PeerID, f *Frame, e statemachine.Event) {
	r := m.rooms.at(idx)
	old := r.sm
	next, o := statemachine.Step(old, e)
	r.sm = next
	if old.State.Live() && next.State == statemachine.Ended && (f.Kind == FrameVerdict || f.Kind == FrameAbort) && m.details[idx] == "" && next.ByPeer {
		m.details[idx] = "said by " + m.peer(from).node
	}
	m.remember(from, f, next.Role, &o)
	m.settle(idx, &old, &o)
}

// absent answers a frame for which there is no record.
func (m *Machine) absent(from PeerID, role statemachine.Role, f *Frame, e statemachine.Event) {
	_, o := statemachine.Step(statemachine.Record{Role: role}, e)
	m.remember(from, f, role, &o)
	if o.Do&statemachine.DoDrop != 0 {
		m.stats.Dropped++
	}
	for i := range o.N {
		s := &o.Sends[i]
		m.sendTo(from, Frame{Kind: s.Kind, Room: f.Room, S: s.S, D: s.D, Att: f.Att, Outcome: s.Outcome, Reason: s.Reason})
	}
}

func (m *Machine) toDestination(from PeerID, f *Frame, e statemachine.Event) {
	key := roomKey{f.Room, statemachine.Destination}
	var idx int32
	if f.Kind == FrameAbort && f.D.IsZero() {
		idx = m.first(key,
			func(r *statemachine.Record) bool { return r.State.Live() && r.Att == f.Att },
			func(r *statemachine.Record) bool { return r.State == statemachine.Ended && r.Att == f.Att },
			func(r *statemachine.Record) bool { return r.State.Live() })
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
	m.record(Record{Kind: RecFrameIn, Frame: f.Kind, Bytes: f.Bytes}, idx)
	switch f.Kind {
	case FrameBound:
		if r.sm.State == statemachine.Registered {
			r.clockLog2 = m.transferLog2(r.total)
			r.peer = from
		}
		r.wantPages = f.NeedPages
	case FrameRankEnd:
		e.Complete = m.completes(idx, f)
		if r.sm.State == statemachine.Bound && r.sm.Pair == f.S {
			if e.Complete {
				m.aux[idx] = auxRecord{data: f.Aux, crc: f.CRC}
				r.moved = r.total
			} else if m.details[idx] == "" {
				m.details[idx] = "RankEnd of " + m.peer(from).node + " does not match the pages that were registered"
			}
		}
	case FrameProgress:
		if r.sm.State == statemachine.Bound && r.sm.Pair == f.S {
			if f.Outstanding && f.Bytes > r.moved { // a byte counter that grows renews the stall clock
				m.disarm(idx, slotPhase)
				m.peer(from).moved = m.now
			}
			r.moved = max(r.moved, f.Bytes)
			r.outstanding = f.Outstanding
		}
	}
	m.stepFrame(idx, from, f, e)
}

// transferLog2 is the length of the transfer clock, fixed by the judge at bind.
func (m *Machine) transferLog2(bytes int64) uint8 {
	d := int64(m.cfg.Clocks.TransferMin)
	if bytes > 0 {
		d = max(d, int64(float64(bytes)*4/float64(m.cfg.Clocks.FloorRate)*1e9))
	}
	return log2Seconds(d)
}

// completes is rule R11 over one RankEnd: every rank of the source reported, each part's pages are
// exactly those registered, and the aux record is whole.
func (m *Machine) completes(idx int32, f *Frame) bool {
	r := m.rooms.at(idx)
	if len(f.Sent) != int(r.size) || crc32.Checksum(f.Aux, castagnoli) != f.CRC {
		return false
	}
	seen := make([]bool, r.size)
	for i := range f.Sent {
		s := &f.Sent[i]
		if s.Rank < 0 || s.Rank >= int32(r.size) || seen[s.Rank] {
			return false
		}
		seen[s.Rank] = true
	}
	for p := r.dst; p != nil32; p = m.parts.at(p).next {
		pt := m.parts.at(p)
		if sentPages(f, pt.rank, pt.ordinal) != int64(pt.pages-pt.prefix) {
			return false
		}
	}
	for i := range f.Sent {
		for _, ps := range f.Sent[i].Parts {
			if ps.Pages < 0 || ps.Pages != 0 && m.part(idx, f.Sent[i].Rank, ps.Ordinal) == nil32 {
				return false
			}
		}
	}
	return true
}

func sentPages(f *Frame, rankNo, ordinal int32) int64 {
	var n int64
	for i := range f.Sent {
		if f.Sent[i].Rank != rankNo {
			continue
		}
		for _, p := range f.Sent[i].Parts {
			if p.Ordinal == ordinal {
				n += p.Pages
			}
		}
	}
	return n
}

func (m *Machine) part(idx, rankNo, ordinal int32) int32 {
	for p := m.rooms.at(idx).dst; p != nil32; p = m.parts.at(p).next {
		if pt := m.parts.at(p); pt.rank == rankNo && pt.ordinal == ordinal {
			return p
		}
	}
	return nil32
}

// takePages keeps the destination's page lists of a Register or Confirm, checked against the pools
// that the peer announced. What does not fit ends the room.
func (m *Machine) takePages(idx int32, from PeerID, f *Frame) {
	r := m.rooms.at(idx)
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
	if len(f.Ranks) != int(r.size) {
		m.end(idx, statemachine.LayoutMismatch, fmt.Sprintf("%s registered %d ranks, this group has %d", m.peer(from).node, len(f.Ranks), r.size))
		return
	}
	for i := range f.Ranks {
		rp := &f.Ranks[i]
		if rp.Rank < 0 || rp.Rank >= int32(r.size) {
			m.end(idx, statemachine.Protocol, fmt.Sprintf("%s.ranks[%d].rank: %d is outside the group", f.Kind, i, rp.Rank))
			return
		}
		for j := range rp.Parts {
			pp := &rp.Parts[j]
			where := fmt.Sprintf("%s.ranks[%d].parts[%d]", f.Kind, i, j)
			rpool, ok := m.remotePools[remotePool{from, pp.Pool}]
			if !ok {
				m.end(idx, statemachine.Protocol, fmt.Sprintf("%s.pool: %s has not announced pool %d", where, m.peer(from).node, pp.Pool))
				return
			}
			if err := layout.Check(pp.Runs, rpool.pages); err != nil {
				m.end(idx, statemachine.Protocol, where+": "+err.Error())
				return
			}
			n := layout.Pages(pp.Runs)
			if n > int64(rpool.pages) {
				m.end(idx, statemachine.Protocol, fmt.Sprintf("%s: %d pages of a pool of %d", where, n, rpool.pages))
				return
			}
			if pp.Prefix < 0 || int64(pp.Prefix) > n || m.part(idx, rp.Rank, pp.Ordinal) != nil32 {
				m.end(idx, statemachine.Protocol, where+": prefix out of range, or the pool is named twice")
				return
			}
			r.dst = m.parts.add(part{next: r.dst, runs: m.putRuns(pp.Runs), rank: rp.Rank, ordinal: pp.Ordinal, pages: int32(n), prefix: pp.Prefix, pool: pp.Pool})
		}
	}
	r.havePages = true
}

// sendFrame completes what a transition asks to send and queues it.
func (m *Machine) sendFrame(idx int32, s *statemachine.Send) {
	r := m.rooms.at(idx)
	f := Frame{Kind: s.Kind, Room: r.id, S: s.S, D: s.D, Att: r.sm.Att, Outcome: s.Outcome, Reason: s.Reason, Quiet: s.Quiet}
	switch s.Kind {
	case FrameQueued:
		f.Group, f.PeerGroup = m.name(r.group), m.name(r.peerGroup)
	case FrameRegister:
		if !m.place(idx) {
			return
		}
		r = m.rooms.at(idx)
		f.Group, f.PeerGroup = m.name(r.group), m.name(r.peerGroup)
		f.Backend, f.Epoch, f.Ranks = m.name(r.backend), r.epoch, m.pageLists(idx)
	case FrameBound:
		f.NeedPages = !r.havePages && m.registering != idx // a Register that is being handled brings them
	case FrameConfirm:
		if r.grant == grantAsked {
			r.confirmOwed = true
			return
		}
		f.ClockLog2 = r.clockLog2
		if r.wantPages {
			f.Backend, f.Epoch, f.Ranks = m.name(r.backend), r.epoch, m.pageLists(idx)
			f.Group = m.name(r.group)
		}
	case FrameRankEnd:
		f.Sent = m.sent(idx)
		a := m.aux[idx]
		f.Aux, f.CRC = a.data, a.crc
	}
	if r.peer == nilPeer {
		return
	}
	target := s.D
	if r.sm.Role == statemachine.Destination {
		target = s.S
	}
	if p := m.peer(r.peer); !target.IsZero() && p.known && target.Inc != p.inc {
		return // an older incarnation cannot hear
	}
	m.record(Record{Kind: RecFrameOut, Frame: f.Kind}, idx)
	m.sendTo(r.peer, f)
}

func (m *Machine) sendTo(to PeerID, f Frame) {
	if to == nilPeer || !m.peer(to).ready {
		m.stats.Unsent++
		return
	}
	m.stats.FramesOut[f.Kind]++
	m.out.Frames = append(m.out.Frames, FrameEffect{Peer: to, Frame: f, Urgent: f.Kind == FrameAbort || f.Kind == FrameVerdict})
}

// place chooses the backend for a destination's pages, once, and asks the plugin to grant them. It
// returns false while the peer's group, or a plugin, is not there yet.
func (m *Machine) place(idx int32) bool {
	r := m.rooms.at(idx)
	if r.backend != nil32 {
		return true
	}
	g := m.groups[groupPair{r.group, r.peerGroup}]
	if g == nil || g.reason != statemachine.None {
		return false
	}
	for _, b := range g.backends {
		pl := m.plugins[b]
		if pl == nil || !pl.up {
			continue
		}
		r.backend, r.epoch, r.peer = b, pl.epoch, g.peer
		if pl.receiverChecked {
			r.grant = grantAsked
			e := PluginEffect{Kind: PluginGrant, Backend: m.name(b), Epoch: pl.epoch, Room: r.id, D: r.sm.Own, Grant: m.grantID(idx)}
			for p := r.dst; p != nil32; p = m.parts.at(p).next {
				pt := m.parts.at(p)
				e.Parts = append(e.Parts, GrantPart{Pool: pt.pool, Runs: m.getRuns(nil, pt.runs)})
			}
			m.plugin(e)
		}
		return true
	}
	return false
}

// pageLists are the pages of every destination rank, as Register carries them.
func (m *Machine) pageLists(idx int32) []RankPages {
	r := m.rooms.at(idx)
	out := make([]RankPages, r.size)
	for i := range out {
		out[i].Rank = int32(i)
	}
	for p := r.dst; p != nil32; p = m.parts.at(p).next {
		pt := m.parts.at(p)
		out[pt.rank].Parts = append(out[pt.rank].Parts, PartPages{Ordinal: pt.ordinal, Pool: pt.pool, Prefix: pt.prefix, Runs: m.getRuns(nil, pt.runs)})
	}
	return out
}

// sent is what every source rank says it sent.
func (m *Machine) sent(idx int32) []RankSent {
	r := m.rooms.at(idx)
	out := make([]RankSent, 0, r.size)
	for i := r.ranks; i != nil32; i = m.ranks.at(i).next {
		k := m.ranks.at(i)
		rs := RankSent{Rank: k.rank, Chunks: k.chunks}
		for c := k.cursors; c != nil32; c = m.cursors.at(c).next {
			rs.Parts = append(rs.Parts, PartSent{Ordinal: m.cursors.at(c).ordinal, Pages: int64(m.cursors.at(c).page)})
		}
		out = append(out, rs)
	}
	return out
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
		if idx := m.byOwn(roomKey{f.Room, role}, own); idx != nil32 && m.rooms.at(idx).peer == from {
			m.end(idx, statemachine.Protocol, fmt.Sprintf("%s of %s: %s", f.Kind, m.peer(from).node, detail))
		}
	}
}
