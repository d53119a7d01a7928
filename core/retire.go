package core

import (
	"time"

	"github.com/terminus-kv/terminus/core/statemachine"
)

// The top of the fencing ladder (docs/protocol.md, "Retire"): several epochs of a backend may be up. The
// newest takes new rooms and all new ops, of old rooms too; an older one retires: the rooms whose pages
// are registered with it, and the ops that it has, end there. Then the host is asked to end it, and the
// proof that it is gone fences what no other rung could.

// The rungs that no record stands on by itself.
const (
	RungReceiver statemachine.Rung = 2 // the receiver check, beside 1, 3 and 4
	RungRetire   statemachine.Rung = 5 // the plugin epoch ended; the proof that it is gone is awaited
	NumRungs     statemachine.Rung = 6
)

// Quarantine is the budget of pages that no rung could prove quiet (rung 4). Beyond it the core asks the
// host to replace the plugin epoch that they are registered with (PluginReplace), one at a time.
type Quarantine struct {
	// Share of the bytes in a worker's pools, in hundredths of a percent. Beyond it the worker's destinations
	// are not admitted either, until pages come back. 0: no budget.
	Share int32
	// Age that pages may rest for, whatever their size. It stops no admission. 0: for ever.
	Age time.Duration
}

// replaceRetry is the time after which a replacement that failed is asked for again.
const replaceRetry = time.Minute

// over reports whether more of a session's pages rest in quarantine than its budget allows.
func (m *Machine) over(s *session) bool {
	return m.cfg.Quarantine.Share > 0 && s.rested > m.budget(s)
}

func (m *Machine) budget(s *session) int64 {
	return int64(float64(s.registered) / 10_000 * float64(m.cfg.Quarantine.Share))
}

// supersede makes the newest epoch of a backend one that retires.
func (m *Machine) supersede(pl *plugin) {
	r := retiree{backend: pl.backend, epoch: pl.epoch}
	bound := int64(m.cfg.Clocks.Retire)
	m.eachRoom(func(idx int32) {
		d := m.rooms.at(idx)
		if d.sm.Role != statemachine.Destination || d.backend != pl.backend || d.epoch != pl.epoch {
			return
		}
		r.users++
		log2 := d.clockLog2
		if d.sm.State != statemachine.Bound { // the clock is fixed at bind
			log2 = m.transferLog2(d.total)
		}
		bound = max(bound, m.clocks.length[clkTransfer+class(log2)])
	})
	for o := range int32(m.ops.len()) {
		if oo := m.ops.at(o); oo.state != 0 && oo.state != opDead && oo.backend == pl.backend && oo.epoch == pl.epoch {
			r.users++
			bound = max(bound, m.clocks.length[clkTransferSrc+class(m.rooms.at(oo.room).clockLog2)])
		}
	}
	r.due = m.now + bound
	m.retirees = append(m.retirees, r)
	m.stats.Retires++
}

// unuse notes that a room or an op no longer uses an epoch.
func (m *Machine) unuse(backend int32, epoch uint32) {
	for i := range m.retirees {
		if r := &m.retirees[i]; r.backend == backend && r.epoch == epoch {
			r.users--
		}
	}
}

// retire asks the host to end epochs that are not used any more, or for too long, and to replace one that
// too many pages rest in. It is called in every step, after the clocks.
func (m *Machine) retire() {
	for i := range m.retirees {
		r := &m.retirees[i]
		if r.killed || r.users > 0 && m.now < r.due {
			continue
		}
		r.killed = true
		m.stats.RetiresCut += uint64(r.users)
		m.plugin(PluginEnd, r.backend, r.epoch)
	}
	if m.weigh || m.weighAt != 0 && m.now >= m.weighAt {
		m.weigh, m.weighAt = false, 0
		m.weighRest()
	}
}

// weighRest asks the host to replace the epoch of pages that rest beyond their budget. While one is
// replaced, retires or is not proven gone, no other is (each has the workers' memory registered once more):
// it is looked at again when that is over.
func (m *Machine) weighRest() {
	if len(m.retirees)+len(m.lost) > 0 {
		return
	}
	for i := range m.plugins {
		if m.plugins[i].asked {
			return
		}
	}
	for i := range m.plugins {
		pl := &m.plugins[i]
		if !pl.up || !m.restsBeyond(pl) && !m.shuts(pl) {
			continue
		}
		if m.now < pl.retryAt {
			m.weighAt = sooner(m.weighAt, pl.retryAt)
			continue
		}
		pl.asked = true
		m.stats.Replaces++
		m.plugin(PluginReplace, pl.backend, pl.epoch)
		return
	}
}

// shut notes that the epoch of a record's pages refuses the engine of a pair for good: its answer to FencePeer
// was quiet. If that incarnation lives, or comes back, the epoch is of no use to it and is replaced.
func (m *Machine) shut(r *room, pr *pair) {
	if m.cfg.Quarantine == (Quarantine{}) || pr.peer == nilPeer {
		return
	}
	p := m.peer(pr.peer)
	p.shutInc, p.shutBackend, p.shutEpoch = pr.sm.Other.Inc, r.backend, r.epoch
	m.weigh = true
}

// shuts reports whether an epoch refuses a living peer for good.
func (m *Machine) shuts(pl *plugin) bool {
	for i := range m.peers {
		p := &m.peers[i]
		if p.shutInc != 0 && p.shutInc == p.inc && p.known && !p.dead && p.shutBackend == pl.backend && p.shutEpoch == pl.epoch {
			return true
		}
	}
	return false
}

// restsBeyond reports whether pages that are registered with an epoch rest beyond their budget.
func (m *Machine) restsBeyond(pl *plugin) bool {
	beyond := false
	m.eachRecord(func(_ int32, r *room) {
		if beyond || !r.rested || r.backend != pl.backend || r.epoch != pl.epoch {
			return
		}
		beyond = r.aged
		m.eachSession(r, func(s *session, _ *rank) { beyond = beyond || m.over(s) })
	})
	return beyond
}

// pluginKept: the host could not replace an epoch, which serves on.
func (m *Machine) pluginKept(e *Event) {
	pl := m.backend(m.intern(e.Backend))
	if pl == nil || pl.epoch != e.Epoch || !pl.asked {
		m.stats.Dropped++
		return
	}
	pl.asked, pl.retryAt = false, m.now+int64(replaceRetry)
	m.weigh = true
}

// epochLost notes that an epoch ended; false when it was not up.
func (m *Machine) epochLost(backend int32, epoch uint32) bool {
	m.weigh = true // what waited for it can go on
	if pl := m.backend(backend); pl != nil && pl.epoch == epoch {
		if pl.lost {
			return false
		}
		pl.up, pl.lost, pl.asked = false, true, false
	} else if i := m.retireeOf(backend, epoch); i >= 0 {
		m.retirees = append(m.retirees[:i:i], m.retirees[i+1:]...)
	} else {
		return false
	}
	m.lost = append(m.lost, lostEpoch{backend, epoch, m.now})
	return true
}

// retireeOf is the index of an epoch that retires; -1 when it does not.
func (m *Machine) retireeOf(backend int32, epoch uint32) int {
	for i := range m.retirees {
		if m.retirees[i].backend == backend && m.retirees[i].epoch == epoch {
			return i
		}
	}
	return -1
}

// lostAt is when an epoch ended that is not fenced yet; 0 when there is no such epoch.
func (m *Machine) lostAt(backend int32, epoch uint32) int64 {
	for i := range m.lost {
		if l := &m.lost[i]; l.backend == backend && l.epoch == epoch {
			return l.at
		}
	}
	return 0
}

// climbed does the book-keeping of pages that left one rung and perhaps stand on another.
func (m *Machine) climbed(r *room, was statemachine.Rung) {
	if was != statemachine.NoRung {
		m.leftRung(was, r.rung)
	}
	if r.sm.Rung != statemachine.NoRung {
		m.stats.Rungs[r.sm.Rung].Entered++
	} else if at := m.lostAt(r.backend, r.epoch); at != 0 {
		m.leftRung(RungRetire, at)
	}
	r.rung = m.now
	rec := m.record(r, RecRung)
	rec.Rung, rec.Residency = r.sm.Rung, r.sm.Pages
	if rests := r.sm.Pages == statemachine.Quarantined; rests != r.rested {
		m.rest(r, rests)
	}
}

// ladder is what View says of an epoch that pages are registered with.
func (m *Machine) ladder(backend int32, epoch uint32) (l Ladder) {
	if at := m.lostAt(backend, epoch); at != 0 {
		return Ladder{Epoch: EpochLost, Lost: time.Duration(m.now - at)}
	}
	if i := m.retireeOf(backend, epoch); i >= 0 {
		r := &m.retirees[i]
		l = Ladder{Epoch: EpochRetires, Users: int(r.users), EndsIn: time.Duration(max(r.due-m.now, 0))}
		if r.killed {
			l.Epoch = EpochEnds
		}
		return l
	}
	if pl := m.backend(backend); pl != nil && pl.epoch == epoch && pl.up {
		l = Ladder{Epoch: EpochServes, Asked: pl.asked}
	}
	return l
}

func (m *Machine) leftRung(rung statemachine.Rung, since int64) {
	m.stats.Rungs[rung].Left++
	m.stats.Rungs[rung].Time += time.Duration(m.now - since)
}

// rest adds a destination's pages to those in quarantine, or takes them away.
func (m *Machine) rest(r *room, rests bool) {
	r.rested, m.weigh = rests, true
	sign := int64(1)
	if !rests {
		sign, m.freed = -1, true // its workers may be admitted again
	}
	m.eachSession(r, func(s *session, k *rank) { s.rested += sign * k.need.bytes })
}

// RestView is the pages of one worker that rest in quarantine.
type RestView struct {
	Group         string
	Rank          int32
	Bytes, Budget int64
	Over          bool // Bytes exceed Budget
	Gone          bool // the worker is
}

// Rests lists the workers of which pages rest in quarantine.
func (m *Machine) Rests() []RestView {
	var out []RestView
	for i := range int32(m.sessions.len()) {
		if s := m.sessions.at(i); s.rested > 0 {
			out = append(out, RestView{Group: m.name(s.group), Rank: s.rank, Bytes: s.rested, Budget: m.budget(s), Over: m.over(s), Gone: s.down})
		}
	}
	return out
}

// EpochView is a plugin epoch that is up, or whose end is not proven yet.
type EpochView struct {
	Backend  string
	Epoch    uint32
	State    EpochState
	Rooms    int           // live destinations whose pages are registered with it
	Ops      int           // ops of it that are not quiet
	EndsIn   time.Duration // EpochRetires: when it is ended whoever uses it
	Lost     time.Duration // EpochLost: for how long
	Replaced bool          // EpochServes: the host was asked to start the next one
}

// EpochState is what an epoch does.
type EpochState uint8

// States of an epoch.
const (
	EpochServes  EpochState = iota + 1 // it takes what is new
	EpochRetires                       // a newer one does; what it has ends there
	EpochEnds                          // the host was asked to end it
	EpochLost                          // it ended; that it is gone is not proven
)

// Epochs lists the plugin epochs that are not provably gone.
func (m *Machine) Epochs() []EpochView {
	var out []EpochView
	for i := range m.plugins {
		if pl := &m.plugins[i]; pl.up {
			out = append(out, EpochView{Backend: m.name(pl.backend), Epoch: pl.epoch, State: EpochServes, Replaced: pl.asked})
		}
	}
	for i := range m.retirees {
		r := &m.retirees[i]
		v := EpochView{Backend: m.name(r.backend), Epoch: r.epoch, State: EpochRetires, EndsIn: time.Duration(max(r.due-m.now, 0))}
		if r.killed {
			v.State = EpochEnds
		}
		out = append(out, v)
	}
	for _, l := range m.lost {
		out = append(out, EpochView{Backend: m.name(l.backend), Epoch: l.epoch, State: EpochLost, Lost: time.Duration(m.now - l.at)})
	}
	at := func(backend int32, epoch uint32) *EpochView {
		for i := range out {
			if out[i].Epoch == epoch && out[i].Backend == m.name(backend) {
				return &out[i]
			}
		}
		return nil
	}
	m.eachRoom(func(idx int32) {
		if r := m.rooms.at(idx); r.sm.Role == statemachine.Destination && r.backend != nil32 {
			if v := at(r.backend, r.epoch); v != nil {
				v.Rooms++
			}
		}
	})
	for o := range int32(m.ops.len()) {
		if oo := m.ops.at(o); oo.state == opOpen || oo.state == opLinger {
			if v := at(oo.backend, oo.epoch); v != nil {
				v.Ops++
			}
		}
	}
	return out
}
