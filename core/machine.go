// Package core is the engine's deterministic heart: rooms, their judge, the inflight queue, the
// scheduler and the clocks, as a pure step function. A batch of events goes in, effects come out;
// time is an argument. It does no I/O, reads no clock, starts no goroutine. The production engine, the
// simulator and the explorer run this same code.
//
// The transitions of a room are those of core/statemachine; this package finds the record that an
// event concerns, keeps what the transitions do not know (pages, ops, windows, clocks, ranks) and
// carries out what they ask for.
package core

import (
	"fmt"

	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// Machine is the core of one engine. It is owned by one goroutine.
type Machine struct {
	cfg    Config
	now    int64
	seq    uint64
	out    *Effects
	policy Policy
	clocks clocks

	rooms   slab[room]
	ranks   slab[rank]
	parts   slab[part]
	cursors slab[cursor]
	chunks  slab[chunk]
	ops     slab[op]
	runs    slab[runBlock]
	gens    uint32

	heads        map[roomKey]int32
	marks        map[markKey]mark
	markQueue    []markDue
	placeholders map[int64]placeholder
	holdQueue    []holdDue
	aux          map[int32]auxRecord // by room record
	details      map[int32]string    // by room record: why, in the plugin's words
	sessions     map[SessionID]*session
	peers        []peer
	groups       map[groupPair]*group
	remotePools  map[remotePool]pool
	plugins      map[int32]*plugin
	scratch      []layout.Run
	names        []string
	ids          map[string]int32

	waiting  []int32 // rooms that wait for admission, in order; those that left are skipped
	queued   int32   // live rooms that wait
	live     int32
	held     need // pages of destinations that are accounted
	freed    bool // a waiting room may fit now
	draining bool
	drained  bool
	stats    Stats

	registering int32  // the record whose Register is being handled, else nil32
	peerless    int32  // tombstones of no peer
	unproven    uint64 // sequence up to which a forgotten source may have lost ops with their writer
}

type markDue struct {
	key markKey
	seq uint64
}

type holdDue struct {
	room int64
	seq  uint64
	due  int64
}

type auxRecord struct {
	data []byte
	crc  uint32
}

// New returns the core of an engine incarnation that has just started.
func New(cfg Config) (*Machine, error) {
	if err := cfg.check(); err != nil {
		return nil, fmt.Errorf("core: %w", err)
	}
	p := cfg.Policy
	if p == nil {
		p = NewSRF()
	}
	cfg.Policy = nil
	return &Machine{
		cfg: cfg, policy: p, clocks: newClocks(&cfg.Clocks),
		heads: map[roomKey]int32{}, marks: map[markKey]mark{}, placeholders: map[int64]placeholder{},
		aux: map[int32]auxRecord{}, details: map[int32]string{}, sessions: map[SessionID]*session{},
		groups: map[groupPair]*group{}, remotePools: map[remotePool]pool{}, plugins: map[int32]*plugin{},
		ids: map[string]int32{}, registering: nil32,
	}, nil
}

// Step takes a batch of events in order, then judges what is due at now (nanoseconds of core time,
// never going back), then submits what the windows allow. Effects are appended to out, which the
// caller has reset.
func (m *Machine) Step(now int64, in []Event, out *Effects) {
	m.now, m.out = max(now, m.now), out
	for i := range in {
		m.event(&in[i])
	}
	m.judgePeers()
	m.expire()
	m.expireMarks()
	m.expireHolds()
	m.admit()
	m.schedule()
	if m.draining && !m.drained && m.live == 0 && m.Unreleased() == 0 {
		m.drained, out.Drained = true, true
	}
	m.out = nil
}

// Unreleased is the number of ranks of rooms, ended or not, whose connected workers have not released
// them: they may still want the verdict, the aux record or the pages.
func (m *Machine) Unreleased() int {
	n := 0
	for _, s := range m.sessions {
		if !s.down {
			n += int(s.pinned)
		}
	}
	return n
}

func (m *Machine) event(e *Event) {
	switch e.Kind {
	case SessionUp:
		m.sessionUp(e)
	case PoolUp:
		m.poolUp(e)
	case SessionDown:
		m.sessionDown(e.Session)
	case Open:
		m.open(e)
	case Register:
		m.register(e)
	case Send:
		m.send(e)
	case Abort:
		m.abort(e)
	case Release:
		m.release(e)
	case PeerHello:
		m.peerHello(e)
	case PeerDown:
		m.peer(e.Peer).ready = false
	case PeerHeard:
		m.heard(e.Peer)
	case PeerGone:
		m.peerGone(e)
	case PeerGroup:
		m.peerGroup(e)
	case PeerPool:
		if e.Pages > 0 {
			m.remotePools[remotePool{e.Peer, e.Pool}] = pool{id: e.Pool, pages: e.Pages, layers: e.Layers, pageBytes: e.PageBytes}
		} else {
			delete(m.remotePools, remotePool{e.Peer, e.Pool})
		}
	case PeerDraining:
		m.peer(e.Peer).draining = true
	case PeerLost:
		// Input to rung 3 only: it ends nothing by itself.
	case PeerFrame:
		m.heard(e.Peer)
		m.frame(e.Peer, &e.Frame)
	case PeerBadFrame:
		m.badFrame(e.Peer, &e.Frame, e.Detail)
	case PluginUp:
		m.pluginUp(e)
	case PluginLost:
		m.pluginLost(e)
	case PluginFenced:
		m.pluginFenced(e)
	case PluginDown:
		m.pluginDown(e)
	case OpAccepted:
	case OpProgress:
		m.opProgress(e)
	case OpEnd:
		m.opEnd(e)
	case OpQuiesced:
		m.opQuiesced(e)
	case Granted, GrantFailed:
		m.granted(e)
	case Revoked:
		m.grantEvent(e, statemachine.OnRevoked)
	case Fenced:
		m.grantEvent(e, statemachine.OnFenced)
	case DrainBegin:
		m.draining, m.drained = true, false
	case DrainEnd:
		m.eachRoom(func(idx int32) { m.end(idx, statemachine.Draining, "") })
	case AdminAbort:
		for _, role := range []statemachine.Role{statemachine.Source, statemachine.Destination} {
			if e.Role == 0 || e.Role == role {
				if idx := m.liveRoom(roomKey{e.Room, role}); idx != nil32 {
					m.details[idx] = "aborted by an operator"
					m.step(idx, statemachine.Event{Kind: statemachine.OnAbort})
				}
			}
		}
	case Tick:
	default:
		m.stats.Dropped++
	}
}

func (m *Machine) intern(name string) int32 {
	if id, ok := m.ids[name]; ok {
		return id
	}
	id := int32(len(m.names))
	m.names = append(m.names, name)
	m.ids[name] = id
	return id
}

// maxNames bounds the group and backend names that outsiders may bring.
const maxNames = 1 << 16

// learn is intern for a name that came from outside; ok is false when there are too many.
func (m *Machine) learn(name string) (id int32, ok bool) {
	if _, known := m.ids[name]; !known && len(m.names) >= maxNames {
		return nil32, false
	}
	return m.intern(name), true
}

// maxDetail bounds the words that a plugin or a peer may add to a verdict, bytes.
const maxDetail = 1024

// explain keeps words that go with the verdict of a record.
func (m *Machine) explain(idx int32, detail string) {
	if detail != "" {
		m.details[idx] = detail[:min(len(detail), maxDetail)]
	}
}

func (m *Machine) name(id int32) string {
	if id == nil32 {
		return ""
	}
	return m.names[id]
}

// eachRoom calls fn for every live record, in slab order.
func (m *Machine) eachRoom(fn func(idx int32)) {
	for i := range m.rooms.items {
		if m.rooms.items[i].sm.State.Live() {
			fn(int32(i))
		}
	}
}

// eachRecord calls fn for every record, live or ended.
func (m *Machine) eachRecord(fn func(idx int32, r *room)) {
	for i := range m.rooms.items {
		if m.rooms.items[i].sm.State != statemachine.Absent {
			fn(int32(i), &m.rooms.items[i])
		}
	}
}

// liveRoom is the live record of a key, of which there is at most one.
func (m *Machine) liveRoom(k roomKey) int32 {
	for i := m.head(k); i != nil32; i = m.rooms.at(i).next {
		if m.rooms.at(i).sm.State.Live() {
			return i
		}
	}
	return nil32
}

func (m *Machine) head(k roomKey) int32 {
	if i, ok := m.heads[k]; ok {
		return i
	}
	return nil32
}

// find returns the first record of the key that fits.
func (m *Machine) find(k roomKey, fits func(*statemachine.Record) bool) int32 {
	for i := m.head(k); i != nil32; i = m.rooms.at(i).next {
		if fits(&m.rooms.at(i).sm) {
			return i
		}
	}
	return nil32
}

func (m *Machine) byOwn(k roomKey, own statemachine.Opener) int32 {
	return m.find(k, func(r *statemachine.Record) bool { return r.Own == own })
}

// end ends a live room by a cause of this side.
func (m *Machine) end(idx int32, why statemachine.Reason, detail string) {
	if !m.rooms.at(idx).sm.State.Live() {
		return
	}
	m.explain(idx, detail)
	m.step(idx, statemachine.Event{Kind: statemachine.OnClock, Reason: why})
}

// step runs the transition function on a record and carries out what it asks for.
func (m *Machine) step(idx int32, e statemachine.Event) {
	r := m.rooms.at(idx)
	old := r.sm
	next, o := statemachine.Step(old, e)
	r.sm = next
	m.settle(idx, &old, &o)
}

func (m *Machine) settle(idx int32, old *statemachine.Record, o *statemachine.Out) {
	r := m.rooms.at(idx)
	if old.State.Live() && !old.Admitted && (r.sm.Admitted || !r.sm.State.Live()) {
		m.queued--
		m.eachSession(idx, func(s *session, _ *rank) { s.queued-- })
	}
	if r.sm.State != old.State {
		r.since = m.now
		m.stats.Enter[r.sm.Role][r.sm.State]++
		m.record(Record{Kind: RecState, State: r.sm.State}, idx)
		if r.sm.State == statemachine.Ended {
			m.ended(idx)
		}
	}
	m.act(idx, o)
	for i := range o.N {
		m.sendFrame(idx, &o.Sends[i])
	}
	r = m.rooms.at(idx)
	if r.pinned && r.sm.State == statemachine.Ended && r.sm.Pages.Reusable() {
		m.account(idx, -1)
	}
	m.publish(idx)
	m.setClocks(idx)
}

// act carries out the actions of one transition.
func (m *Machine) act(idx int32, o *statemachine.Out) {
	r := m.rooms.at(idx)
	if o.Do&statemachine.DoDropPlaceholder != 0 {
		if h, ok := m.placeholders[r.id]; ok && h.d == r.sm.Pair {
			delete(m.placeholders, r.id)
			m.peer(h.peer).holds--
		}
	}
	if o.Do&statemachine.DoSubmit != 0 {
		m.ready(idx)
	}
	if o.Do&statemachine.DoCancel != 0 {
		m.cancel(idx)
	}
	if o.Do&statemachine.DoDrop != 0 {
		m.stats.Dropped++
		m.record(Record{Kind: RecDropped}, idx)
	}
	if o.Do&statemachine.DoRevoke != 0 && r.grant != noGrant {
		m.plugin(PluginEffect{Kind: PluginRevoke, Backend: m.name(r.backend), Epoch: r.epoch, Room: r.id, D: r.sm.Own, Grant: m.grantID(idx)})
	}
	if o.Do&statemachine.DoFence != 0 && r.backend != nil32 {
		m.plugin(PluginEffect{Kind: PluginFencePeer, Backend: m.name(r.backend), Epoch: r.epoch, Room: r.id, S: r.sm.Pair, D: r.sm.Own, Peer: r.peer, PeerInc: r.sm.Pair.Inc, Grant: m.grantID(idx)})
	}
}

// ended does the book-keeping of an end: the room leaves every queue in this same step.
func (m *Machine) ended(idx int32) {
	r := m.rooms.at(idx)
	if r.counted {
		r.counted, m.freed = false, true
		m.live--
		for i := r.ranks; i != nil32; i = m.ranks.at(i).next {
			if s := m.sessions[m.ranks.at(i).session]; s != nil {
				s.live--
			}
		}
	}
	m.stats.Verdicts[r.sm.Role][r.sm.Reason]++
	if r.sm.Role == statemachine.Source && r.sm.Armed {
		m.stats.InflightLeft++
	}
	if r.sm.Role == statemachine.Destination && r.sm.Reason == statemachine.Success {
		a := m.aux[idx]
		for i := r.ranks; i != nil32; i = m.ranks.at(i).next {
			if k := m.ranks.at(i); !k.gone && a.data != nil {
				m.out.Auxes = append(m.out.Auxes, AuxEffect{Session: k.session, Slot: k.slot, Room: r.id, Aux: a.data})
			}
		}
	}
	delete(m.aux, idx)
	m.record(Record{Kind: RecEnd, Detail: m.details[idx]}, idx)
}

// publish writes the words of a record's ranks that changed.
func (m *Machine) publish(idx int32) {
	r := m.rooms.at(idx)
	status := r.sm.Status()
	all := true
	for i := r.ranks; i != nil32; i = m.ranks.at(i).next {
		k := m.ranks.at(i)
		res := m.residency(r, k)
		if k.marked && res.Reusable() {
			m.disarmRank(idx, k)
		}
		if k.gone && !k.done && r.sm.State == statemachine.Ended && res.Reusable() {
			m.rankDone(i)
		}
		all = all && k.done
		w := uint16(status) | uint16(res)<<3 | 1<<15
		if w == k.word || k.gone {
			continue
		}
		if k.word>>3&7 != w>>3&7 {
			m.record(Record{Kind: RecResidency, Residency: res}, idx)
		}
		k.word = w
		m.out.Words = append(m.out.Words, WordEffect{Session: k.session, Slot: k.slot, Status: status, Residency: res, Opener: r.sm.Own, Reason: r.sm.Reason, Detail: m.details[idx]})
	}
}

// residency of one rank's pages.
func (m *Machine) residency(r *room, k *rank) statemachine.Residency {
	switch {
	case k.done && !k.gone:
		return statemachine.Released
	case r.sm.Role == statemachine.Source:
		return statemachine.SourceResidency(r.sm.State, k.armed, k.ops)
	case !k.armed:
		return statemachine.NoPages
	case r.sm.Pages == statemachine.NoPages && r.sm.State.Live():
		return statemachine.Armed
	case r.sm.Pages == statemachine.NoPages:
		return statemachine.Quiet // registered by this rank, never announced
	}
	return r.sm.Pages
}

// rankDone marks a rank as released: nobody will ask for it again.
func (m *Machine) rankDone(i int32) {
	k := m.ranks.at(i)
	k.done = true
	if s := m.sessions[k.session]; s != nil {
		s.pinned--
		if s.down && s.pinned == 0 {
			delete(m.sessions, k.session)
			m.out.Gone = append(m.out.Gone, k.session)
		}
	}
}

// forgettable reports whether an ended record may become a tombstone: no op of it is unquiet, its
// pages are reusable and every rank took them back.
func (m *Machine) forgettable(idx int32) bool {
	r := m.rooms.at(idx)
	if r.sm.State != statemachine.Ended || !r.sm.Ops.QuietLocal() {
		return false
	}
	if r.sm.Role == statemachine.Destination && !r.sm.Pages.Reusable() {
		return false
	}
	for i := r.ranks; i != nil32; i = m.ranks.at(i).next {
		if !m.ranks.at(i).done {
			return false
		}
	}
	return true
}

// record appends one line of a room's history.
func (m *Machine) record(rec Record, idx int32) {
	r := m.rooms.at(idx)
	rec.Role, rec.Room, rec.Own, rec.Pair, rec.Peer = r.sm.Role, r.id, r.sm.Own, r.sm.Pair, r.peer
	rec.State, rec.Reason = r.sm.State, r.sm.Reason
	m.out.Records = append(m.out.Records, rec)
}

func (m *Machine) plugin(e PluginEffect) { m.out.Plugin = append(m.out.Plugin, e) }

func (m *Machine) grantID(idx int32) GrantID {
	return GrantID(uint64(m.rooms.at(idx).gen)<<32 | uint64(uint32(idx)))
}

// roomOf resolves a grant id; nil32 when the record is gone.
func (m *Machine) roomOf(g GrantID) int32 {
	idx := int32(uint32(g))
	if idx < 0 || int(idx) >= len(m.rooms.items) || m.rooms.at(idx).gen != uint32(g>>32) || m.rooms.at(idx).sm.State == statemachine.Absent {
		return nil32
	}
	return idx
}
