package core

import (
	"fmt"
	"hash/crc32"

	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// MaxAux is the largest aux record, bytes.
const MaxAux = 1 << 20

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// checksum is the CRC-32C of an aux record.
func checksum(aux []byte) uint32 {
	if len(aux) == 0 { // most rooms have none
		return 0
	}
	return crc32.Checksum(aux, castagnoli)
}

func emptySlots(n int32) []int32 {
	s := make([]int32, max(n, 0))
	for i := range s {
		s[i] = nil32
	}
	return s
}

// reply answers a request. The caller may add to it before the next one.
func (m *Machine) reply(e *Event, code ReplyCode) *Reply {
	r := next(&m.out.Replies)
	r.Session, r.Seq, r.Slot, r.Code = e.Session, e.Seq, e.Slot, code
	return r
}

func (m *Machine) refuse(e *Event, cause Refusal, format string, args ...any) {
	m.stats.Refused[cause]++
	m.reply(e, Refused).Detail = fmt.Sprintf(format, args...)
}

// maxPools bounds the pools of a session, MaxRanks the ranks of a group.
const (
	maxPools = 1024
	MaxRanks = 1024
)

// sessionUp admits a worker. What the worker API never lets through is dropped.
func (m *Machine) sessionUp(e *Event) {
	if e.Size < 1 || e.Size > MaxRanks || e.Rank < 0 || e.Rank >= e.Size || e.Slots < 0 || m.session(e.Session) != nil ||
		(e.Role != statemachine.Source && e.Role != statemachine.Destination) {
		m.stats.Dropped++
		return
	}
	m.sessionIDs[e.Session] = m.sessions.add(session{
		id: e.Session, group: m.intern(e.Group), role: e.Role, rank: e.Rank, size: e.Size, slots: emptySlots(e.Slots),
	})
}

func (m *Machine) poolUp(e *Event) {
	s := m.session(e.Session)
	if s == nil || s.down || e.Ordinal < 0 || e.Ordinal >= maxPools || e.Pages < 0 || e.PageBytes < 0 {
		m.stats.Dropped++
		return
	}
	for int(e.Ordinal) >= len(s.pools) {
		s.pools, s.armed = append(s.pools, pool{}), append(s.armed, nil)
	}
	if s.pools[e.Ordinal].pages != 0 { // a pool is added once; rooms may hold pages of it
		m.stats.Dropped++
		return
	}
	s.registered += int64(e.Pages) * e.PageBytes
	m.freed = m.freed || s.rested > 0 // its budget grew
	s.pools[e.Ordinal] = pool{id: e.Pool, pages: e.Pages, layers: max(e.Layers, 1), pageBytes: e.PageBytes, state: e.State}
}

// open accepts a room, joins a further rank to a live one, or answers for one that has ended.
func (m *Machine) open(e *Event) {
	s := m.session(e.Session)
	switch {
	case s == nil || s.down:
		m.refuse(e, RefusedSession, "session is closed")
		return
	case e.Room < 0:
		m.refuse(e, RefusedRequest, "room %d: must be 0 to 2^63-1", e.Room)
		return
	case e.Slot < 0 || int(e.Slot) >= len(s.slots) || s.slots[e.Slot] != nil32:
		m.refuse(e, RefusedRequest, "slot %d is not free", e.Slot)
		return
	case m.draining:
		m.refuse(e, RefusedDraining, "engine is draining and takes no new rooms; use another engine")
		return
	case e.PeerGroup == "" && s.role == statemachine.Destination:
		m.refuse(e, RefusedPeerGroup, "peer_group is missing: a destination names the source group that will send")
		return
	}
	key := keyOf(e.Room, s.role)
	head := m.head(key)
	for idx := head; idx != nil32; idx = m.rooms.at(idx).next {
		if m.rooms.at(idx).sm.State.Live() {
			m.join(e, s, idx)
			return
		}
	}
	for idx := head; idx != nil32 && s.size > 1; idx = m.rooms.at(idx).next {
		// A rank that comes after the end of its attempt gets the verdict and mints nothing.
		if r := m.rooms.at(idx); r.sm.Att == e.Att {
			if m.rankOf(r, s.rank) == nil32 {
				m.reply(e, Ended).Reason = r.sm.Reason
				return
			}
			break
		}
	}
	peerGroup := nil32
	if e.PeerGroup != "" {
		var ok bool
		if peerGroup, ok = m.learn(e.PeerGroup); !ok {
			m.refuse(e, RefusedPeerGroup, "peer_group %q: %d different names were used; name groups that exist", e.PeerGroup, maxNames)
			return
		}
		if why := m.groupTrouble(peerGroup, s); why != "" {
			m.refuse(e, RefusedPeerGroup, "peer_group %q: %s", e.PeerGroup, why)
			return
		}
	}
	// A source whose destination has registered is admitted whatever the limit: the destination's engine
	// has admitted it, and two engines that admit in different orders would wait for each other.
	wanted := s.role == statemachine.Source && m.wanted(e.Room, e.Att)
	admitted := wanted || m.live-m.queued < m.cfg.Limits.Rooms && s.live-s.queued < m.cfg.Limits.RoomsPerSession && m.firstWaiting() == nil32 &&
		!(s.role == statemachine.Destination && m.over(s))
	if !admitted && m.queued >= m.cfg.Limits.AdmitQueue {
		m.refuse(e, RefusedInflightRooms, "limits.inflight_rooms: %d rooms are live and %d wait for admission", m.live-m.queued, m.queued)
		return
	}

	if head != nil32 {
		m.trim(head)
		head = m.head(key)
	}
	m.opens++
	m.gens++
	idx := m.rooms.alloc()
	r := m.rooms.at(idx)
	r.sm.Role, r.sm.Att, r.pairs = s.role, e.Att, nil32
	r.id, r.gen, r.next, r.ranks, r.dst, r.ops, r.aux, r.detail, r.layout = e.Room, m.gens, head, nil32, nil32, nil32, nil32, nil32, nil32
	r.peer, r.group, r.peerGroup, r.backend = nilPeer, s.group, peerGroup, nil32
	r.size, r.local, r.joined, r.priority, r.opened, r.since = int16(s.size), int16(s.size), 1, e.Priority, m.now, m.now
	if e.Deadline > 0 {
		r.deadline = log2Seconds(e.Deadline) + 1
	}
	m.pairs.at(m.newPair(idx, r)).sm.Judge = s.role == statemachine.Source
	m.setHead(key, idx)
	if g := m.groups[groupPair{s.group, peerGroup}]; g != nil {
		m.meetGroup(idx, r, g)
	}
	m.meetOwn(idx, r)
	m.addRank(e, s, idx, r)

	ev := statemachine.Event{Kind: statemachine.OnOpen, Role: s.role, Own: statemachine.Opener{Inc: m.cfg.Incarnation, Seq: m.opens}, Att: e.Att, Admitted: admitted}
	at, marked := m.marked(key, r)
	if ev.Marked = marked; !marked && s.role == statemachine.Source && admitted {
		at, ev.D = m.nextHeld(idx, r)
	}
	m.reply(e, OK).Opener = ev.Own
	m.live++
	s.live++
	r.counted = true
	m.stepAt(idx, at, ev)
	if s.role == statemachine.Source {
		m.offerHeld(idx, r)
	}
	m.record(r, RecOpen)
	m.enqueue(idx)
	if r.sm.State.Live() && r.deadline > 0 {
		c := clkDeadline
		if s.role == statemachine.Source {
			c = clkDeadlineSrc
		}
		m.arm(idx, r, slotDeadline, c+class(r.deadline-1))
	}
	m.sayQueued(idx, r)
}

// groupTrouble says why rooms towards a group cannot be opened; empty when they can, or when the group
// is not known yet.
func (m *Machine) groupTrouble(name int32, s *session) string {
	g := m.groups[groupPair{s.group, name}]
	switch {
	case g == nil:
		return ""
	case g.reason != statemachine.None:
		return g.reason.String() + ": " + g.detail
	case g.role == s.role:
		return "has the role " + g.role.String() + ", the same as this worker's"
	case !g.fits(s.role, s.size):
		return fmt.Sprintf("has %d ranks, this worker's group has %d, and no layout maps them", g.size, s.size)
	}
	for _, h := range g.hosts {
		switch p := m.peer(h.peer); {
		case p.draining:
			return "its engine is draining"
		case p.suspect && p.known:
			return "its engine has been silent for longer than clocks.peer_suspect"
		}
	}
	if m.allDown(g) {
		return "backend_down: " + noBackend
	}
	return ""
}

// fits reports whether the sizes of a pair of groups are those that its layout maps; role and size are of
// the group here.
func (g *group) fits(role statemachine.Role, size int32) bool {
	if g.layout.IsZero() {
		return g.size == size
	}
	src, dst := g.layout.Ranks()
	if role == statemachine.Destination {
		src, dst = dst, src
	}
	return size == src && g.size == dst
}

const noBackend = "every transfer backend of the pair is down on this engine; see engine plugins list"

// allDown reports whether no backend of the pair will come up by itself.
func (m *Machine) allDown(g *group) bool {
	for _, b := range g.backends {
		if pl := m.backend(b); pl == nil || pl.up || !pl.down {
			return false // up, starting, or restarting within its budget
		}
	}
	return len(g.backends) > 0
}

// endIfDown ends a registered destination that waits for a backend which does not come.
func (m *Machine) endIfDown(idx int32) {
	r := m.rooms.at(idx)
	g := m.groups[groupPair{r.group, r.peerGroup}]
	if r.sm.State == statemachine.Registered && r.backend == nil32 && g != nil && m.allDown(g) {
		m.end(idx, statemachine.BackendDown, noBackend)
	}
}

func (m *Machine) addRank(e *Event, s *session, idx int32, r *room) {
	i := m.ranks.alloc()
	k := m.ranks.at(i)
	k.session, k.sess, k.room, k.slot, k.rank = e.Session, m.sessionIDs[e.Session], idx, e.Slot, s.rank
	k.cursors, k.head, k.tail, k.lanes, k.next = nil32, nil32, nil32, nil32, nil32
	s.slots[e.Slot] = i
	s.pinned++
	for p := r.pairs; p != nil32 && r.sm.Role == statemachine.Source; p = m.pairs.at(p).next {
		m.addLane(i, p)
	}
	if r.ranks == nil32 {
		r.ranks = i
		return
	}
	last := r.ranks
	for m.ranks.at(last).next != nil32 {
		last = m.ranks.at(last).next
	}
	m.ranks.at(last).next = i
}

// join adds a further rank of the same attempt to a live room.
func (m *Machine) join(e *Event, s *session, idx int32) {
	r := m.rooms.at(idx)
	switch {
	case r.group != s.group:
		m.refuse(e, RefusedRoomOpen, "room %d is open by group %q", e.Room, m.name(r.group))
	case int32(r.size) != s.size:
		m.refuse(e, RefusedRoomOpen, "room %d is open by a group of %d ranks, this worker's has %d", e.Room, r.size, s.size)
	case r.sm.Att != e.Att:
		m.refuse(e, RefusedRoomOpen, "room %d is open with attempt %d; end it before attempt %d", e.Room, r.sm.Att, e.Att)
	case m.rankOf(r, s.rank) != nil32:
		m.refuse(e, RefusedRoomOpen, "room %d is open already by rank %d (R3)", e.Room, s.rank)
	default:
		r.joined++
		m.addRank(e, s, idx, r)
		s.live++
		if !r.sm.Admitted {
			s.queued++
		}
		m.reply(e, OK).Opener = r.sm.Own
		m.publish(r)
	}
}

func (m *Machine) rankOf(r *room, rankNo int32) int32 {
	for i := r.ranks; i != nil32; i = m.ranks.at(i).next {
		if m.ranks.at(i).rank == rankNo {
			return i
		}
	}
	return nil32
}

// slot resolves a request's slot to its rank record.
func (m *Machine) slot(e *Event) (*session, int32) {
	s := m.session(e.Session)
	if s == nil || e.Slot < 0 || int(e.Slot) >= len(s.slots) {
		return s, nil32
	}
	return s, s.slots[e.Slot]
}

// register takes the pages of one destination rank.
func (m *Machine) register(e *Event) {
	s, k := m.slot(e)
	if k == nil32 {
		m.refuse(e, RefusedRequest, "slot %d holds no room", e.Slot)
		return
	}
	idx := m.ranks.at(k).room
	r := m.rooms.at(idx)
	switch {
	case r.sm.State == statemachine.Ended:
		m.reply(e, Ended).Reason = r.sm.Reason
		return
	case s.role != statemachine.Destination:
		m.refuse(e, RefusedRequest, "register is for destinations; a source sends")
		return
	case m.ranks.at(k).paged:
		m.refuse(e, RefusedRequest, "rank %d has registered its pages already", s.rank)
		return
	}
	var n need
	var lm layout.Map // of the pair, if it is known yet; else the source's engine looks
	if g := m.groups[groupPair{r.group, r.peerGroup}]; g != nil {
		lm = g.layout
	}
	for i := range e.Parts {
		p := &e.Parts[i]
		pl, err := s.pool(p)
		if err != nil {
			m.refuse(e, RefusedRequest, "parts[%d]: %v", i, err)
			return
		}
		pages := layout.Pages(p.Runs)
		if p.Prefix < 0 || int64(p.Prefix) > pages {
			m.refuse(e, RefusedRequest, "parts[%d].prefix: %d is outside 0 to %d", i, p.Prefix, pages)
			return
		}
		if why := unmapped(lm, pl.state, p.Prefix); why != "" {
			m.refuse(e, RefusedRequest, "parts[%d]%s", i, why)
			return
		}
		for j := range i {
			if e.Parts[j].Ordinal == p.Ordinal {
				m.refuse(e, RefusedRequest, "parts[%d].pool: %d is named twice", i, p.Ordinal)
				return
			}
		}
		n.pages += pages
		n.bytes += pages * pl.pageBytes
	}
	for _, l := range []struct {
		cause       Refusal
		unit        string
		need, limit int64
	}{
		{RefusedInflightBytes, "bytes", n.bytes, m.cfg.Limits.RoomBytes}, {RefusedInflightPages, "pages", n.pages, m.cfg.Limits.RoomPages},
		{RefusedWorkerBytes, "bytes", n.bytes, m.cfg.Limits.SessionBytes}, {RefusedWorkerPages, "pages", n.pages, m.cfg.Limits.SessionPages},
	} {
		if l.need > l.limit {
			m.refuse(e, l.cause, "limits.%s: the room needs %d %s, the limit is %d", l.cause, l.need, l.unit, l.limit)
			return
		}
	}
	if i, page := s.armPages(e.Parts); i >= 0 {
		if by := m.armedBy(s, e.Parts[i].Ordinal, page); by >= 0 {
			m.refuse(e, RefusedArmed, "parts[%d]: page %d is still armed by room %d (R4): a write may reach it until its pages are quiet or fenced", i, page, by)
		} else {
			m.refuse(e, RefusedRequest, "parts[%d]: page %d is named twice", i, page)
		}
		return
	}
	for i := range e.Parts {
		p := &e.Parts[i]
		r.dst = m.parts.add(part{
			next: r.dst, runs: m.putRuns(p.Runs), rank: s.rank, ordinal: int16(p.Ordinal), pages: int32(layout.Pages(p.Runs)),
			prefix: p.Prefix, pool: s.pools[p.Ordinal].id, state: s.pools[p.Ordinal].state,
		})
	}
	r.total += n.bytes
	k2 := m.ranks.at(k)
	k2.paged, k2.armed, k2.marked, k2.need = true, true, true, n
	r.paged++
	m.reply(e, OK)
	if r.paged == r.local {
		m.allPaged(idx, r)
	} else {
		m.publish(r)
	}
}

// allPaged: every rank here has registered its pages.
func (m *Machine) allPaged(idx int32, r *room) {
	all, workers := m.fits(r)
	was := r.sm.Admitted
	fits := was && all && workers
	if fits {
		m.account(r, 1)
	}
	m.step(idx, statemachine.Event{Kind: statemachine.OnPages, Admitted: fits})
	if was {
		m.enqueue(idx)
	}
	m.endIfDown(idx)
}

// unmapped says why a destination's part cannot be mapped; empty when it can.
func unmapped(lm layout.Map, state bool, prefix int32) string {
	src, dst := lm.Ranks()
	_, per := lm.Scale()
	switch {
	case state && src != dst:
		return fmt.Sprintf(".pool: it is of kind state, which goes from rank r to rank r; layout.ranks: source has %d, destination has %d", src, dst)
	case !state && prefix%per != 0:
		return fmt.Sprintf(".prefix: %d is no multiple of %d: the source sends whole pages, and one of its pages is %d of these", prefix, per, per)
	}
	return ""
}

// pool checks a part against the session's pools.
func (s *session) pool(p *Part) (*pool, error) {
	if p.Ordinal < 0 || int(p.Ordinal) >= len(s.pools) || s.pools[p.Ordinal].pages == 0 {
		return nil, fmt.Errorf("pool %d: this worker has not added it", p.Ordinal)
	}
	pl := &s.pools[p.Ordinal]
	if err := layout.Check(p.Runs, pl.pages); err != nil {
		return nil, err
	}
	if n := layout.Pages(p.Runs); n > int64(pl.pages) {
		return nil, fmt.Errorf("%d pages are named, the pool has %d: a page is named twice", n, pl.pages)
	}
	return pl, nil
}

// send takes one chunk of a source rank.
func (m *Machine) send(e *Event) {
	s, k := m.slot(e)
	if k == nil32 {
		m.refuse(e, RefusedRequest, "slot %d holds no room", e.Slot)
		return
	}
	idx := m.ranks.at(k).room
	r := m.rooms.at(idx)
	switch {
	case r.sm.State == statemachine.Ended:
		m.stats.Dropped++
		m.reply(e, Ended).Reason = r.sm.Reason
		return
	case s.role != statemachine.Source:
		m.refuse(e, RefusedRequest, "send is for sources; a destination registers")
		return
	case m.ranks.at(k).paged:
		m.refuse(e, RefusedRequest, "rank %d has sent its last chunk", s.rank)
		return
	case len(e.Aux) > MaxAux:
		m.refuse(e, RefusedRequest, "aux: %d bytes, the limit is %d", len(e.Aux), MaxAux)
		return
	case len(e.Aux) > 0 && (!e.Last || s.rank != 0):
		m.refuse(e, RefusedRequest, "aux: belongs to the last chunk of rank 0")
		return
	}
	// Check the whole request first: a refused one changes nothing.
	for i := range e.Parts {
		p := &e.Parts[i]
		pl, err := s.pool(p)
		if err != nil {
			m.refuse(e, RefusedRequest, "parts[%d]: %v", i, err)
			return
		}
		from, to := layers(e, pl)
		if from < 0 || to <= from || to > pl.layers {
			m.refuse(e, RefusedRequest, "layers: [%d, %d) is outside [0, %d)", from, to, pl.layers)
			return
		}
		for j := range i {
			if e.Parts[j].Ordinal == p.Ordinal {
				m.refuse(e, RefusedRequest, "parts[%d].pool: %d is named twice", i, p.Ordinal)
				return
			}
		}
		n := int32(layout.Pages(p.Runs))
		c := cursor{}
		if at := m.cursor(k, p.Ordinal); at != nil32 {
			c = *m.cursors.at(at)
		}
		if from != c.layer || (c.layer > 0 && n != c.chunk) {
			m.refuse(e, RefusedRequest, "parts[%d]: pages must go in order: layer %d of a chunk of %d pages is next", i, c.layer, c.chunk)
			return
		}
		if int64(c.page)+int64(n) > int64(pl.pages) {
			m.refuse(e, RefusedRequest, "parts[%d]: %d pages after %d: the pool has %d, a page is sent twice", i, n, c.page, pl.pages)
			return
		}
	}
	var added int64
	for i := range e.Parts {
		p := &e.Parts[i]
		pl := &s.pools[p.Ordinal]
		from, to := layers(e, pl)
		n := int32(layout.Pages(p.Runs))
		if n == 0 {
			continue
		}
		at := m.cursor(k, p.Ordinal)
		if at == nil32 {
			at = m.cursors.add(cursor{next: m.ranks.at(k).cursors, ordinal: p.Ordinal})
			m.ranks.at(k).cursors = at
		}
		c := m.cursors.at(at)
		perPage := pl.pageBytes * int64(to-from) / int64(pl.layers)
		ch := m.chunks.add(chunk{
			next: nil32, runs: m.putRuns(p.Runs), ordinal: p.Ordinal, from: c.page, pages: n,
			layerFrom: from, layerTo: to, pool: pl.id, pageBytes: perPage, state: pl.state,
		})
		if c.chunk, c.layer = n, to; to == pl.layers {
			c.page, c.chunk, c.layer = c.page+n, 0, 0
		}
		kk := m.ranks.at(k)
		kk.armed = true
		added += m.keepChunk(r, kk, ch)
	}
	kk := m.ranks.at(k)
	kk.chunks++
	if e.Last {
		kk.paged = true
		r.paged++
		if s.rank == 0 {
			m.setAux(r, auxRecord{e.Aux, checksum(e.Aux)})
		}
	}
	if !r.sm.Armed {
		m.stats.InflightEntered++
	}
	r.total += added
	m.reply(e, OK)
	m.step(idx, statemachine.Event{Kind: statemachine.OnSend})
	m.readyAll(idx, r)
	m.maybeComplete(idx, r)
}

// layers returns the layer range of a send: all layers when it names none.
func layers(e *Event, p *pool) (from, to int32) {
	if e.LayerFrom == 0 && e.LayerTo == 0 {
		return 0, p.layers
	}
	return e.LayerFrom, e.LayerTo
}

func (m *Machine) cursor(k, ordinal int32) int32 {
	for i := m.ranks.at(k).cursors; i != nil32; i = m.cursors.at(i).next {
		if m.cursors.at(i).ordinal == ordinal {
			return i
		}
	}
	return nil32
}

func (m *Machine) abort(e *Event) {
	_, k := m.slot(e)
	if k == nil32 {
		m.reply(e, OK) // R7: an unknown one is answered, nothing is created
		return
	}
	idx := m.ranks.at(k).room
	if r := m.rooms.at(idx); r.sm.State == statemachine.Ended {
		m.reply(e, Ended).Reason = r.sm.Reason
		return
	}
	m.reply(e, OK)
	m.step(idx, statemachine.Event{Kind: statemachine.OnAbort})
}

func (m *Machine) release(e *Event) {
	s, k := m.slot(e)
	if k == nil32 {
		m.refuse(e, RefusedRequest, "slot %d holds no room", e.Slot)
		return
	}
	kk := m.ranks.at(k)
	r := m.rooms.at(kk.room)
	if r.sm.State != statemachine.Ended {
		m.refuse(e, RefusedNotEnded, "room %d has not ended (%s); abort it first", r.id, r.sm.Status())
		return
	}
	if res := m.residency(r, kk); !res.Reusable() {
		m.refuse(e, RefusedNotReusable, "not_reusable: pages of room %d are %s (R4); wait for quiet or fenced", r.id, res)
		return
	}
	idx := kk.room
	s.slots[e.Slot] = nil32
	m.rankDone(kk)
	m.publish(r)
	m.setClocks(idx, r)
	m.record(r, RecReleased)
	m.reply(e, Freed)
}

// sessionDown ends what the dead worker's rooms demand; its memory is orphaned until nothing can touch
// it, and the session leaves when nothing of it is pinned.
func (m *Machine) sessionDown(id SessionID) {
	i, ok := m.sessionIDs[id]
	if !ok || m.sessions.at(i).down {
		return
	}
	s := m.sessions.at(i)
	s.down = true
	slots := s.slots
	s.slots = nil
	for _, k := range slots {
		if k == nil32 {
			continue
		}
		m.ranks.at(k).gone = true
		m.step(m.ranks.at(k).room, statemachine.Event{Kind: statemachine.OnWorkerLost})
	}
	if j, ok := m.sessionIDs[id]; ok && m.sessions.at(j).pinned == 0 {
		m.forgetSession(j)
	}
}
