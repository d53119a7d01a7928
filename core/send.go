package core

import (
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// What leaves for the other engine: frames, and the lists that they carry.

// sendFrame completes what a transition asks to send and queues it.
func (m *Machine) sendFrame(idx int32, r *room, s *statemachine.Send) {
	switch s.Kind {
	case FrameRegister:
		if !m.place(idx, r) {
			return
		}
	case FrameConfirm:
		if r.grant == grantAsked {
			m.pairAt(r, s.At).confirmOwed = true
			return
		}
	}
	p := m.pairAt(r, s.At)
	// An unbound destination's end that its source's engine cannot hear now is told when it can.
	unbound := s.Kind == FrameAbort && r.sm.Role == statemachine.Destination && s.S.IsZero()
	p.untold = p.untold || unbound
	if p.peer == nilPeer {
		return
	}
	target := s.D
	if r.sm.Role == statemachine.Destination && !p.sm.Sibling {
		target = s.S
	} else if s.Kind == FrameReady {
		target = statemachine.Opener{} // it names its own
	}
	if to := m.peer(p.peer); !target.IsZero() && to.known && target.Inc != to.inc {
		return // an older incarnation cannot hear
	}
	m.record(r, RecFrameOut).Frame = s.Kind
	f := m.frameTo(p.peer, s.Kind)
	if f == nil {
		return
	}
	p.untold = p.untold && !unbound
	f.Room, f.S, f.D, f.Att, f.Outcome, f.Reason, f.Quiet = r.id, s.S, s.D, r.sm.Att, s.Outcome, s.Reason, s.Quiet
	switch s.Kind {
	case FrameQueued:
		f.Group, f.PeerGroup = m.name(r.group), m.name(r.peerGroup)
	case FrameRegister:
		f.Group, f.PeerGroup = m.name(r.group), m.name(r.peerGroup)
		f.Backend, f.Epoch, f.Ranks = m.name(r.backend), r.epoch, m.pageLists(r)
	case FrameBound:
		f.NeedPages = !p.havePages && m.registering != m.indexOf(r, s.At) // a Register that is being handled brings them
	case FrameConfirm:
		f.ClockLog2 = r.clockLog2
		if p.wantPages {
			f.Backend, f.Epoch, f.Ranks = m.name(r.backend), r.epoch, m.pageLists(r)
		}
	case FrameReady:
		first := len(m.out.sources)
		for i := r.pairs; i != nil32; i = m.pairs.at(i).next {
			if q := m.pairs.at(i); !q.sm.Sibling {
				m.out.sources = append(m.out.sources, q.sm.Other)
			}
		}
		f.Sources = tail(m.out.sources, first)
	case FrameRankEnd:
		f.Sent = m.sent(r)
		if r.aux != nil32 {
			a := m.auxes.at(r.aux)
			f.Aux, f.CRC = a.data, a.crc
		}
	}
}

// frameTo queues a frame of a kind; nil when the peer's link is not ready. The caller completes it before
// the next one.
func (m *Machine) frameTo(to PeerID, kind FrameKind) *Frame {
	if to == nilPeer || !m.peer(to).ready {
		m.stats.Unsent++
		return nil
	}
	m.stats.FramesOut[kind]++
	f := next(&m.out.Frames)
	f.Peer, f.Frame.Kind = to, kind
	switch kind {
	case FrameAbort, FrameVerdict, FrameGroupVerdict, FrameGroupAbort:
		f.Urgent = true
	}
	return &f.Frame
}

// place chooses the backend for a destination's pages, once, and asks the plugin to grant them. It
// returns false while the peer's group, or a plugin, is not there yet.
func (m *Machine) place(idx int32, r *room) bool {
	if r.backend != nil32 {
		return true
	}
	g := m.groups[groupPair{r.group, r.peerGroup}]
	if g == nil || g.reason != statemachine.None || !r.whole {
		return false
	}
	for _, b := range g.backends {
		pl := m.backend(b)
		if pl == nil || !pl.up {
			continue
		}
		r.backend, r.epoch = b, pl.epoch
		m.setMap(r, g.layout)
		if pl.receiverChecked {
			r.grant = grantAsked
			e := m.plugin(PluginGrant, b, pl.epoch)
			e.Room, e.D, e.Grant = r.id, r.sm.Own, grantID(idx, r)
			e.Writers = m.writers(r)
			first := len(m.out.grantParts)
			for p := r.dst; p != nil32; p = m.parts.at(p).next {
				m.out.grantParts = append(m.out.grantParts, GrantPart{Pool: m.parts.at(p).pool, Runs: m.effectRuns(m.parts.at(p).runs)})
			}
			e.Parts = tail(m.out.grantParts, first)
		}
		return true
	}
	return false
}

// writers are the engines whose ops may write to a destination's pages.
func (m *Machine) writers(r *room) []PeerID {
	first := len(m.out.writers)
	for i := r.pairs; i != nil32; i = m.pairs.at(i).next {
		if p := m.pairs.at(i); !p.sm.Sibling {
			m.out.writers = append(m.out.writers, p.peer)
		}
	}
	return tail(m.out.writers, first)
}

// effectRuns is a stored page list in the memory of the effects.
func (m *Machine) effectRuns(head int32) []layout.Run {
	n := len(m.out.runs)
	m.out.runs = m.getRuns(m.out.runs, head)
	return tail(m.out.runs, n)
}

// pageLists are the pages of every destination rank, as Register carries them.
func (m *Machine) pageLists(r *room) []RankPages {
	first := len(m.out.ranks)
	for i := range int32(r.size) {
		if m.rankOf(r, i) == nil32 {
			continue // another engine's
		}
		n := len(m.out.parts)
		for p := r.dst; p != nil32; p = m.parts.at(p).next {
			if pt := m.parts.at(p); pt.rank == i {
				m.out.parts = append(m.out.parts, PartPages{Ordinal: int32(pt.ordinal), Pool: pt.pool, Prefix: pt.prefix, Runs: m.effectRuns(pt.runs)})
			}
		}
		m.out.ranks = append(m.out.ranks, RankPages{Rank: i, Parts: tail(m.out.parts, n)})
	}
	return tail(m.out.ranks, first)
}

// sent is what every source rank says it sent.
func (m *Machine) sent(r *room) []RankSent {
	first := len(m.out.sent)
	for i := r.ranks; i != nil32; i = m.ranks.at(i).next {
		k := m.ranks.at(i)
		n := len(m.out.sentParts)
		for c := k.cursors; c != nil32; c = m.cursors.at(c).next {
			m.out.sentParts = append(m.out.sentParts, PartSent{Ordinal: m.cursors.at(c).ordinal, Pages: int64(m.cursors.at(c).page)})
		}
		m.out.sent = append(m.out.sent, RankSent{Rank: k.rank, Chunks: k.chunks, Parts: tail(m.out.sentParts, n)})
	}
	return tail(m.out.sent, first)
}
