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
	seq    uint64 // of marks and placeholders
	opens  uint64 // openers minted
	out    *Effects
	policy Policy
	clocks clocks

	rooms    slab[room]
	sessions slab[session]
	ranks    slab[rank]
	parts    slab[part]
	cursors  slab[cursor]
	chunks   slab[chunk]
	ops      slab[op]
	lanes    slab[lane]
	pairs    slab[pair]
	saids    slab[said]
	runs     slab[runBlock]
	auxes    slab[auxRecord]
	details  slab[string] // why rooms ended, in the words of plugins and peers
	maps     slab[mapUse]
	gens     uint32

	heads        index
	marks        map[markKey]mark
	markQueue    []markDue
	placeholders map[holdKey]placeholder
	holdQueue    []holdDue
	sessionIDs   map[SessionID]int32
	peers        []peer
	groups       map[groupPair]*group
	mapIDs       map[layout.Map]int32
	remotePools  map[remotePool]pool
	plugins      []plugin         // by backend, its newest epoch
	retirees     []retiree        // older epochs that are up
	lost         []lostEpoch      // epochs that ended, until they are fenced
	asked        statemachine.Out // of the transition that is being carried out
	scratch      []layout.Run
	gathered     []*statemachine.Pair // of the record that is being stepped
	reports      []report
	firsts       []int32 // part of a destination that is checked, by rank
	saying       []PartSent
	sets         [][]int32 // sets of ranks, ascending; none is ever changed
	names        []name
	ids          map[string]int32

	waiting  []int32 // rooms that wait for admission, in order; those that left are skipped
	queued   int32   // live rooms that wait
	live     int32
	held     need // pages of destinations that are accounted
	freed    bool // a waiting room may fit now
	draining bool
	drained  bool
	stats    Stats

	registering int32  // the pair whose Register is being handled, else nil32
	peerless    graves // tombstones of no peer
	judgeAt     int64  // no peer changes by time alone before
	weighAt     int64  // when quarantined pages are weighed against their budget next, whatever happens; 0: not by time
	weigh       bool   // the same at the end of this step
	unproven    uint64 // sequence up to which a forgotten source may have lost ops with their writer
}

type markDue struct {
	key markKey
	seq uint64
}

type holdDue struct {
	key holdKey
	seq uint64
	due int64
}

// name is an interned name of a group or a backend, and the hash of it.
type name struct {
	text string
	hash uint64
}

// mapUse is a map of layouts that is not the zero one, and how many records have it.
type mapUse struct {
	layout.Map
	users int32
}

type auxRecord struct {
	data []byte
	crc  uint32
}

// New returns the core of an engine incarnation that has just started.
func New(cfg Config) (*Machine, error) {
	m := new(Machine)
	if err := m.Reset(cfg); err != nil {
		return nil, err
	}
	return m, nil
}

// Reset makes m what New returns, in the memory that m has: for simulators, which start thousands of
// incarnations a second. What m was is forgotten. An error changes nothing.
func (m *Machine) Reset(cfg Config) error {
	if err := cfg.check(); err != nil {
		return fmt.Errorf("core: %w", err)
	}
	p := cfg.Policy
	if p == nil {
		p = NewSRF()
	}
	cfg.Policy = nil
	old := *m
	*m = Machine{
		cfg: cfg, policy: p, clocks: newClocks(&cfg.Clocks, &cfg.Quarantine), peerless: graves{fifo: emptyFIFO}, registering: nil32,
		heads: old.heads.emptied(), marks: emptyMap(old.marks), placeholders: emptyMap(old.placeholders),
		sessionIDs: emptyMap(old.sessionIDs), groups: emptyMap(old.groups), remotePools: emptyMap(old.remotePools), ids: emptyMap(old.ids), mapIDs: emptyMap(old.mapIDs),

		rooms: old.rooms.emptied(), sessions: old.sessions.emptied(), ranks: old.ranks.emptied(), parts: old.parts.emptied(),
		cursors: old.cursors.emptied(), chunks: old.chunks.emptied(), ops: old.ops.emptied(), runs: old.runs.emptied(),
		auxes: old.auxes.emptied(), details: old.details.emptied(), pairs: old.pairs.emptied(), lanes: old.lanes.emptied(), saids: old.saids.emptied(),
		sets: emptied(old.sets), gathered: old.gathered[:0], saying: old.saying[:0], asked: old.asked,
		markQueue: old.markQueue[:0], holdQueue: old.holdQueue[:0], waiting: old.waiting[:0], peers: emptied(old.peers), plugins: emptied(old.plugins),
		retirees: emptied(old.retirees), lost: emptied(old.lost), names: emptied(old.names), scratch: old.scratch, reports: old.reports[:0], firsts: old.firsts[:0], maps: old.maps.emptied(),
	}
	return nil
}

// emptyMap is m without entries, a new one if there is none.
func emptyMap[K comparable, V any](m map[K]V) map[K]V {
	if m == nil {
		return map[K]V{}
	}
	clear(m)
	return m
}

// emptied is s without elements, which are forgotten.
func emptied[T any](s []T) []T {
	clear(s)
	return s[:0]
}

// Step takes a batch of events in order, then judges what is due at now (nanoseconds of core time,
// never going back), then submits what the windows allow. Effects are appended to out, which the
// caller has reset.
func (m *Machine) Step(now int64, in []Event, out *Effects) {
	m.now, m.out = max(now, m.now), out
	for i := range in {
		m.event(&in[i])
	}
	m.flush(out)
}

// flush is what follows the events of a Step.
func (m *Machine) flush(out *Effects) {
	m.out = out
	m.judgePeers()
	m.expire()
	m.expireMarks()
	m.expireHolds()
	m.admit()
	m.schedule()
	m.retire()
	if m.draining && !m.drained && m.live == 0 && m.Unreleased() == 0 {
		m.drained, out.Drained = true, true
	}
	m.out = nil
}

// Unreleased is the number of ranks of rooms, ended or not, whose connected workers have not released
// them: they may still want the verdict, the aux record or the pages.
func (m *Machine) Unreleased() int {
	n := 0
	for _, i := range m.sessionIDs {
		if s := m.sessions.at(i); !s.down {
			n += int(s.pinned)
		}
	}
	return n
}

// session of an id; nil when there is none.
func (m *Machine) session(id SessionID) *session {
	if i, ok := m.sessionIDs[id]; ok {
		return m.sessions.at(i)
	}
	return nil
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
			m.remotePools[remotePool{e.Peer, e.Pool}] = pool{id: e.Pool, pages: e.Pages, layers: e.Layers, pageBytes: e.PageBytes, state: e.State}
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
	case PluginKept:
		m.pluginKept(e)
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
		m.revoked(e)
	case Fenced:
		m.fenced(e)
	case DrainBegin:
		m.draining, m.drained = true, false
	case DrainEnd:
		m.eachRoom(func(idx int32) { m.end(idx, statemachine.Draining, "") })
	case AdminAbort:
		for _, role := range []statemachine.Role{statemachine.Source, statemachine.Destination} {
			if e.Role == 0 || e.Role == role {
				if idx := m.liveRoom(keyOf(e.Room, role)); idx != nil32 {
					m.explain(idx, "aborted by an operator")
					m.step(idx, statemachine.Event{Kind: statemachine.OnAbort})
				}
			}
		}
	case Tick:
	default:
		m.stats.Dropped++
	}
}

func (m *Machine) intern(text string) int32 {
	id, ok := m.ids[text]
	if !ok {
		id = int32(len(m.names))
		m.names = append(m.names, name{text, hashString(text)})
		m.ids[text] = id
	}
	return id
}

// maxNames bounds the group and backend names that outsiders may bring.
const maxNames = 1 << 16

// learn is intern for a name that came from outside; ok is false when there are too many.
func (m *Machine) learn(text string) (id int32, ok bool) {
	if id, ok := m.ids[text]; ok {
		return id, true
	}
	if len(m.names) >= maxNames {
		return nil32, false
	}
	return m.intern(text), true
}

// maxDetail bounds the words that a plugin or a peer may add to a verdict, bytes.
const maxDetail = 1024

// explain keeps words that go with the verdict of a record.
func (m *Machine) explain(idx int32, detail string) {
	if detail == "" {
		return
	}
	detail = detail[:min(len(detail), maxDetail)]
	if r := m.rooms.at(idx); r.detail == nil32 {
		r.detail = m.details.add(detail)
	} else {
		*m.details.at(r.detail) = detail
	}
}

// detail is what explain kept.
func (m *Machine) detail(r *room) string {
	if r.detail == nil32 {
		return ""
	}
	return *m.details.at(r.detail)
}

// setMap says how the pages of a record are mapped.
func (m *Machine) setMap(r *room, lm layout.Map) {
	if m.mapOf(r) == lm {
		return
	}
	m.dropMap(r)
	if lm.IsZero() {
		return
	}
	i, ok := m.mapIDs[lm]
	if !ok {
		i = m.maps.add(mapUse{Map: lm})
		m.mapIDs[lm] = i
	}
	m.maps.at(i).users++
	r.layout = i
}

func (m *Machine) dropMap(r *room) {
	if r.layout == nil32 {
		return
	}
	u := m.maps.at(r.layout)
	if u.users--; u.users == 0 {
		delete(m.mapIDs, u.Map)
		m.maps.del(r.layout)
	}
	r.layout = nil32
}

// mapOf is how the pages of a record are mapped.
func (m *Machine) mapOf(r *room) layout.Map {
	if r.layout == nil32 {
		return layout.Map{}
	}
	return m.maps.at(r.layout).Map
}

// setAux keeps the aux record of a record; dropAux forgets it.
func (m *Machine) setAux(r *room, a auxRecord) {
	if r.aux == nil32 {
		r.aux = m.auxes.add(a)
	} else {
		*m.auxes.at(r.aux) = a
	}
}

func (m *Machine) dropAux(r *room) {
	if r.aux != nil32 {
		m.auxes.del(r.aux)
		r.aux = nil32
	}
}

func (m *Machine) name(id int32) string {
	if id == nil32 {
		return ""
	}
	return m.names[id].text
}

// eachRoom calls fn for every live record, in slab order.
func (m *Machine) eachRoom(fn func(idx int32)) {
	m.eachRecord(func(idx int32, r *room) {
		if r.sm.State.Live() {
			fn(idx)
		}
	})
}

// eachRecord calls fn for every record, live or ended.
func (m *Machine) eachRecord(fn func(idx int32, r *room)) {
	for i := range int32(m.rooms.len()) {
		if r := m.rooms.at(i); r.sm.State != statemachine.Absent {
			fn(i, r)
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

func (m *Machine) byOwn(k roomKey, own statemachine.Opener) int32 {
	i := m.head(k)
	for i != nil32 && m.rooms.at(i).sm.Own != own {
		i = m.rooms.at(i).next
	}
	return i
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
func (m *Machine) step(idx int32, e statemachine.Event) { m.stepAt(idx, -1, e) }

// stepAt is step for an event that is about the pair at a place.
func (m *Machine) stepAt(idx int32, at int, e statemachine.Event) {
	r := m.rooms.at(idx)
	was := standingOf(r)
	o := m.emptyOut()
	r.sm.Step(m.smPairs(r), at, &e, o)
	m.settle(idx, r, was, o)
}

// emptyOut is what a transition fills. There is one at a time: what it asks for is carried out before
// another begins.
func (m *Machine) emptyOut() *statemachine.Out {
	m.asked.Reset()
	return &m.asked
}

// standing is what settle must know of a record before its transition.
type standing struct {
	state    statemachine.State
	admitted bool
	rung     statemachine.Rung
}

func standingOf(r *room) standing { return standing{r.sm.State, r.sm.Admitted, r.sm.Rung} }

func (m *Machine) settle(idx int32, r *room, was standing, o *statemachine.Out) {
	if was.state.Live() && !was.admitted && (r.sm.Admitted || !r.sm.State.Live()) {
		m.queued--
		m.eachSession(r, func(s *session, _ *rank) { s.queued-- })
	}
	if r.sm.State != was.state {
		r.since = m.now
		m.stats.Enter[r.sm.Role][r.sm.State]++
		m.record(r, RecState)
		if r.sm.State == statemachine.Ended {
			m.ended(r)
		}
	}
	if r.sm.Rung != was.rung {
		m.climbed(r, was.rung)
	}
	if o.Do != 0 {
		m.act(idx, r, o)
	}
	for i := range o.Sends {
		m.sendFrame(idx, r, &o.Sends[i])
	}
	if r.pinned && r.sm.State == statemachine.Ended && r.sm.Pages.Reusable() {
		m.account(r, -1)
	}
	m.publish(r)
	m.setClocks(idx, r)
}

// act carries out the actions of one transition.
func (m *Machine) act(idx int32, r *room, o *statemachine.Out) {
	if o.Do&statemachine.DoDropPlaceholder != 0 {
		m.eachPair(r, func(_ int, p *pair) {
			if h, ok := m.placeholders[holdKey{r.id, p.peer}]; ok && h.d == p.sm.Other && p.peer != nilPeer {
				m.unhold(holdKey{r.id, p.peer})
			}
		})
	}
	if o.Do&statemachine.DoSubmit != 0 {
		m.readyAll(idx, r)
	}
	if o.Do&statemachine.DoCancel != 0 {
		m.cancel(r)
	}
	if o.Do&statemachine.DoDrop != 0 {
		m.stats.Dropped++
		m.record(r, RecDropped)
	}
	if o.Do&statemachine.DoRevoke != 0 && r.grant != noGrant {
		p := m.plugin(PluginRevoke, r.backend, r.epoch)
		p.Room, p.D, p.Grant = r.id, r.sm.Own, grantID(idx, r)
		if r.sm.Rung != statemachine.NoRung {
			m.stats.Rungs[RungReceiver].Entered++
		}
	}
	for i := 0; i < len(o.Fence) && r.backend != nil32; i++ {
		q := m.pairAt(r, o.Fence[i])
		p := m.plugin(PluginFencePeer, r.backend, r.epoch)
		p.Room, p.S, p.D, p.Peer, p.PeerInc, p.Grant = r.id, q.sm.Other, r.sm.Own, q.peer, q.sm.Other.Inc, m.fenceID(r, o.Fence[i])
	}
}

// ended does the book-keeping of an end: the room leaves every queue in this same step.
func (m *Machine) ended(r *room) {
	if r.counted {
		r.counted, m.freed = false, true
		m.live--
		m.eachSession(r, func(s *session, _ *rank) { s.live-- })
	}
	m.stats.Verdicts[r.sm.Role][r.sm.Reason]++
	if r.sm.Role == statemachine.Source && r.sm.Armed {
		m.stats.InflightLeft++
	}
	if r.sm.Role == statemachine.Destination && r.backend != nil32 {
		m.unuse(r.backend, r.epoch)
	}
	if r.aux != nil32 {
		a := m.auxes.at(r.aux).data
		for i := r.ranks; i != nil32 && r.sm.Role == statemachine.Destination && r.sm.Reason == statemachine.Success; i = m.ranks.at(i).next {
			if k := m.ranks.at(i); !k.gone && a != nil {
				m.out.Auxes = append(m.out.Auxes, AuxEffect{Session: k.session, Slot: k.slot, Room: r.id, Aux: a})
			}
		}
		m.dropAux(r)
	}
	m.record(r, RecEnd).Detail = m.detail(r)
}

// publish writes the words of a record's ranks that changed.
func (m *Machine) publish(r *room) {
	m.stage(r)
	status := r.sm.Status()
	for i := r.ranks; i != nil32; {
		k := m.ranks.at(i)
		res := m.residency(r, k)
		if k.marked && res.Reusable() {
			m.disarmRank(r, k)
		}
		if k.gone && !k.done && r.sm.State == statemachine.Ended && res.Reusable() {
			m.rankDone(k)
		}
		if w := uint16(status) | uint16(res)<<3 | 1<<15; w != k.word && !k.gone {
			if k.word>>3&7 != w>>3&7 {
				m.record(r, RecResidency).Residency = res
			}
			k.word = w
			e := next(&m.out.Words)
			e.Session, e.Slot, e.Status, e.Residency = k.session, k.slot, status, res
			e.Opener, e.Reason, e.Detail = r.sm.Own, r.sm.Reason, m.detail(r)
		}
		i = k.next
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
func (m *Machine) rankDone(k *rank) {
	k.done = true
	s := m.sessions.at(k.sess)
	s.pinned--
	if s.down && s.pinned == 0 {
		m.forgetSession(k.sess)
	}
	k.sess = nil32
}

// forgetSession drops a session that is down and of which nothing is pinned.
func (m *Machine) forgetSession(i int32) {
	id := m.sessions.at(i).id
	delete(m.sessionIDs, id)
	m.sessions.del(i)
	m.out.Gone = append(m.out.Gone, id)
}

// forgettable reports whether an ended record may become a tombstone: no op of it is unquiet, its
// pages are reusable and every rank took them back.
func (m *Machine) forgettable(r *room) bool {
	if r.sm.State != statemachine.Ended || !m.opsOf(r).QuietLocal() {
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

// record appends one line of a room's history. The caller may add to it before the next one.
func (m *Machine) record(r *room, kind RecordKind) *Record {
	rec := next(&m.out.Records)
	rec.Kind, rec.Role, rec.State, rec.Reason = kind, r.sm.Role, r.sm.State, r.sm.Reason
	rec.Peer, rec.Room, rec.Own, rec.Pair = r.peer, r.id, r.sm.Own, m.firstPair(r).sm.Other
	return rec
}

// plugin appends a request to a plugin epoch. The caller completes it before the next one.
func (m *Machine) plugin(kind PluginKind, backend int32, epoch uint32) *PluginEffect {
	p := next(&m.out.Plugin)
	p.Kind, p.Backend, p.Epoch = kind, m.name(backend), epoch
	return p
}

func grantID(idx int32, r *room) GrantID { return GrantID(uint64(r.gen)<<32 | uint64(uint32(idx))) }

// roomOf resolves a grant id; nil32 when the record is gone.
func (m *Machine) roomOf(g GrantID) int32 {
	idx := int32(uint32(g))
	if idx < 0 || int(idx) >= m.rooms.len() || m.rooms.at(idx).gen != uint32(g>>32) || m.rooms.at(idx).sm.State == statemachine.Absent {
		return nil32
	}
	return idx
}
