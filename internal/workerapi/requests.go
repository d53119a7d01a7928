package workerapi

import (
	"math"
	"strconv"
	"strings"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// Bounds of fields.
const (
	maxName     = 128 // bytes of a group name
	maxSlots    = 65536
	maxRanks    = core.MaxRanks
	maxDeadline = 30 * 24 * 3600 * 1000 // ms
)

// requests serves a session after hello.
func (ss *session) requests() {
	var m message // outside the loop: handlers take their addresses and keep none
	var h header
	for {
		var ok bool
		if m, h, ok = ss.next(); !ok {
			return
		}
		handle, known := handlers[h.T]
		if !known {
			ss.refuse(h.Seq, bad(BadField, "t", RuleFields, "unknown request %q", clip(h.T)))
			continue
		}
		if e := handle(ss, &h, &m); e != nil {
			closeAll(m.fds)
			ss.refuse(h.Seq, e)
		}
	}
}

// handlers serve one request each: they answer it, or see to it that it will be, or return an error.
// A handler that takes descriptors over clears message.fds.
var handlers = map[string]func(*session, *header, *message) *Error{
	"hello": func(*session, *header, *message) *Error {
		return bad(BadState, "t", RuleOrder, "hello was said; one connection is one worker")
	},
	"region_add": (*session).regionAdd,
	"pool_add":   (*session).poolAdd,
	"open":       (*session).open,
	"register":   (*session).register,
	"send":       (*session).sendChunk,
	"abort":      (*session).abort,
	"release":    (*session).release,
	"failure":    (*session).failure,
	"aux":        (*session).auxRecord,
}

// checkHello fills ss.info.
func (ss *session) checkHello(h *header, m *message) *Error {
	role, okRole := parseRole(h.Role)
	l := h.Layout
	if h.Slots == missing {
		h.Slots = 1024
	}
	switch {
	case h.V != 1:
		return bad(BadField, "v", RuleFields, "the worker speaks version %s; this engine speaks 1", show(h.V))
	case badName(h.Group):
		return bad(BadField, "group", RuleFields, "group is %q; 1 to %d printable bytes are wanted", clip(h.Group), maxName)
	case !okRole:
		return bad(BadField, "role", RuleFields, "role is %q; source or destination is wanted", clip(h.Role))
	case h.Size < 1 || h.Size > maxRanks:
		return bad(BadField, "size", RuleFields, "size is %s; 1 to %d are possible", show(h.Size), maxRanks)
	case h.Rank < 0 || h.Rank >= h.Size:
		return bad(BadField, "rank", RuleFields, "rank is %s; 0 to size-1 (%d) are possible", show(h.Rank), h.Size-1)
	case h.Slots < 1 || h.Slots > maxSlots:
		return bad(BadField, "slots", RuleFields, "slots is %d; 1 to %d are possible", h.Slots, maxSlots)
	case l == nil:
		return bad(BadField, "layout", RuleFields, "layout is missing")
	case badName(l.DType):
		return bad(BadField, "layout.dtype", RuleFields, "dtype is %q", clip(l.DType))
	case l.Layers < 1:
		return bad(BadField, "layout.layers", RuleFields, "layers is %d; at least 1 is wanted", l.Layers)
	case l.KVHeads < 1:
		return bad(BadField, "layout.kv_heads", RuleFields, "kv_heads is %d; at least 1 is wanted", l.KVHeads)
	case l.HeadDim < 1:
		return bad(BadField, "layout.head_dim", RuleFields, "head_dim is %d; at least 1 is wanted", l.HeadDim)
	case l.PageTokens < 1:
		return bad(BadField, "layout.page_tokens", RuleFields, "page_tokens is %d; at least 1 is wanted", l.PageTokens)
	case l.Order != "" && l.Order != layout.NHD && l.Order != layout.HND:
		return bad(BadField, "layout.order", RuleFields, "order is %q; nhd, hnd or none is wanted", clip(l.Order))
	case l.Kind != "mha" && l.Kind != "mla":
		return bad(BadField, "layout.kind", RuleFields, "kind is %q; mha or mla is wanted", clip(l.Kind))
	}
	i := &ss.info
	i.ID, i.Group, i.Role, i.Rank, i.Size = ss.id, h.Group, role, int32(h.Rank), int32(h.Size)
	i.Slots, i.Notify, i.Layout = int32(h.Slots), h.Notify, *l
	return noPayload(m)
}

func (ss *session) regionAdd(h *header, m *message) *Error {
	switch {
	case h.Region < 0:
		return bad(BadField, "region", RuleFields, "region is %s; a number from 0 is wanted", show(h.Region))
	case h.Size < 1:
		return bad(BadField, "size", RuleFields, "size is %s", show(h.Size))
	case ss.srv.cfg.MaxRegionBytes > 0 && h.Size > ss.srv.cfg.MaxRegionBytes:
		return bad(Limit, "size", RuleLimits, "%d bytes; a region has at most %d", h.Size, ss.srv.cfg.MaxRegionBytes)
	case h.CanaryOffset < 0 || h.CanaryOffset > h.Size-8:
		return bad(BadField, "canary_offset", RuleFields, "canary_offset is %s; 0 to size-8 (%d) are possible", show(h.CanaryOffset), h.Size-8)
	case h.Canary == nil:
		return bad(BadField, "canary", RuleFields, "canary is missing")
	}
	if e := noPayload(m); e != nil {
		return e
	}
	if e := checkMemory(m.fds[0], h.Size); e != nil {
		return e
	}
	if e := checkLease(m.fds[1]); e != nil {
		return e
	}
	ss.mu.Lock()
	if _, dup := ss.regions[h.Region]; dup {
		ss.mu.Unlock()
		return bad(BadField, "region", RuleMemory, "region %d exists", h.Region)
	}
	if n := len(ss.regions); n >= ss.srv.cfg.MaxRegions {
		ss.mu.Unlock()
		return bad(Limit, "region", RuleLimits, "the session has %d regions, the most that are allowed", n)
	}
	r := &region{size: h.Size}
	ss.regions[h.Region] = r
	ss.pending[h.Seq] = pending{}
	ss.mu.Unlock()

	id, seq := h.Region, h.Seq
	reg := Region{ID: id, Size: h.Size, CanaryOffset: h.CanaryOffset, Canary: *h.Canary, MemFD: m.fds[0], LeaseFD: m.fds[1]}
	m.fds = nil
	ss.srv.cfg.Node.AddRegion(ss.id, reg, func(err error) {
		ss.settle(seq, err, func() {
			r.ready = err == nil
			if err != nil {
				delete(ss.regions, id)
			}
		})
	})
	return nil
}

func (ss *session) poolAdd(h *header, m *message) *Error {
	if e := noPayload(m); e != nil {
		return e
	}
	switch {
	case h.Pages < 1 || h.Pages > math.MaxInt32:
		return bad(BadField, "pages", RulePools, "pages is %s; 1 to 2^31-1 are possible", show(h.Pages))
	case h.Kind != "" && h.Kind != "kv" && h.Kind != "state":
		return bad(BadField, "kind", RulePools, "kind is %q; kv or state is wanted", clip(h.Kind))
	case len(h.Tensors) == 0:
		return bad(BadField, "tensors", RulePools, "a pool needs at least one tensor")
	}
	ss.mu.Lock()
	n := len(ss.pools)
	if h.Pool != int64(n) {
		ss.mu.Unlock()
		return bad(BadField, "pool", RulePools, "pool is %s; the next number is %d", show(h.Pool), n)
	}
	if n >= ss.srv.cfg.MaxPools {
		ss.mu.Unlock()
		return bad(Limit, "pool", RuleLimits, "the session has %d pools, the most that are allowed", n)
	}
	ts := make([]Tensor, len(h.Tensors))
	for i, t := range h.Tensors {
		r := ss.regions[t.Region]
		var e *Error
		if r == nil || !r.ready {
			e = bad(BadField, "tensors", RulePools, "tensor %d: region %d is not ready; wait for the answer of region_add", i, t.Region)
		} else if e = checkTensor(i, t, h.Pages, r.size); e == nil && t.Layer >= int64(ss.info.Layout.Layers) {
			e = bad(BadField, "tensors", RulePools, "tensor %d: layer %d; the layout has %d layers", i, t.Layer, ss.info.Layout.Layers)
		}
		if e != nil {
			ss.mu.Unlock()
			return e
		}
		ts[i] = Tensor{Region: t.Region, Offset: t.Offset, PageStride: t.PageStride, PageBytes: t.PageBytes, Layer: int32(t.Layer)}
	}
	p := &pool{pages: int32(h.Pages)}
	ss.pools = append(ss.pools, p)
	ss.pending[h.Seq] = pending{}
	ss.mu.Unlock()

	seq := h.Seq
	ss.srv.cfg.Node.AddPool(ss.id, Pool{Ordinal: int32(n), Pages: p.pages, State: h.Kind == "state", Tensors: ts}, func(err error) {
		ss.settle(seq, err, func() {
			p.ready = err == nil
			if last := len(ss.pools) - 1; err != nil && last >= 0 && ss.pools[last] == p {
				ss.pools = ss.pools[:last] // the number can be used again
			}
		})
	})
	return nil
}

// settle answers a request of the node's; keep runs with mu held.
func (ss *session) settle(seq uint64, err error, keep func()) {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	if _, open := ss.pending[seq]; !open { // the session is over, or done was called twice
		return
	}
	delete(ss.pending, seq)
	keep()
	o := outgoing{header: ok(seq), counted: true}
	if err != nil {
		e := asError(err)
		ss.srv.countError(e.Code)
		o.header = errorAnswer(seq, e)
	}
	ss.queue = append(ss.queue, o)
	ss.signal()
}

func (ss *session) open(h *header, m *message) *Error {
	if e := noPayload(m); e != nil {
		return e
	}
	switch {
	case h.Room < 0:
		return bad(BadField, "room", RuleFields, "room is %s; 0 to 2^63-1 are possible", show(h.Room))
	case h.Attempt < 0:
		return bad(BadField, "attempt", RuleFields, "attempt is %d; 0 to 2^63-1 are possible", h.Attempt)
	case h.PeerGroup == "" && ss.info.Role == statemachine.Destination:
		return bad(BadField, "peer_group", RuleFields, "a destination names the group that it gets its pages from")
	case h.PeerGroup == "" && ss.srv.cfg.RequirePeerGroup:
		return bad(BadField, "peer_group", RuleFields, "this engine has worker.require_peer_group set: a source names the group that gets its pages")
	case h.PeerGroup != "" && badName(h.PeerGroup):
		return bad(BadField, "peer_group", RuleFields, "peer_group is %q", clip(h.PeerGroup))
	case h.Priority < math.MinInt32 || h.Priority > math.MaxInt32:
		return bad(BadField, "priority", RuleFields, "priority is %d; it has 32 bits", h.Priority)
	case h.Deadline < 0 || h.Deadline > maxDeadline:
		return bad(BadField, "deadline_ms", RuleFields, "deadline_ms is %d; 0 (none) to %d are possible", h.Deadline, int64(maxDeadline))
	}
	ss.mu.Lock()
	if len(ss.free) == 0 {
		ss.mu.Unlock()
		return bad(Limit, "slots", RuleLimits, "all %d slots are taken; release rooms, or ask for more slots in hello", ss.info.Slots)
	}
	i := ss.free[len(ss.free)-1]
	ss.free = ss.free[:len(ss.free)-1]
	ss.slots[i] = slot{state: slotOpening, room: h.Room, status: statemachine.Bootstrapping}
	ss.pending[h.Seq] = pending{core.Open, i}
	ss.mu.Unlock()
	ss.srv.cfg.Post(core.Event{
		Kind: core.Open, Session: ss.id, Seq: h.Seq, Slot: i, Room: h.Room, Att: uint64(h.Attempt), PeerGroup: h.PeerGroup,
		Role: ss.info.Role, Priority: int32(h.Priority), Deadline: h.Deadline * 1e6,
	})
	return nil
}

func (ss *session) register(h *header, m *message) *Error {
	if ss.info.Role != statemachine.Destination {
		return bad(BadState, "t", RuleRole, "register is for destinations; this worker is a source")
	}
	parts, rest, e := ss.parts(h, m.payload)
	if e != nil {
		return e
	}
	if len(rest) > 0 {
		return bad(BadField, "payload", RulePages, "%d bytes follow the page ids", len(rest))
	}
	ev := core.Event{Kind: core.Register, Parts: parts}
	return ss.post(h, ev, nil)
}

func (ss *session) sendChunk(h *header, m *message) *Error {
	if ss.info.Role != statemachine.Source {
		return bad(BadState, "t", RuleRole, "send is for sources; this worker is a destination")
	}
	switch {
	case h.Chunk < 0 || h.Chunk > math.MaxInt32:
		return bad(BadField, "chunk", RuleFields, "chunk is %s; chunks count 0, 1, 2 …", show(h.Chunk))
	case h.Aux < 0 || h.Aux > maxAux:
		return bad(Limit, "aux", RuleLimits, "aux has %d bytes; at most %d are allowed", h.Aux, maxAux)
	case h.Aux > 0 && !h.Last:
		return bad(BadField, "aux", RuleFields, "aux rides on the last chunk only")
	}
	ev := core.Event{Kind: core.Send, Last: h.Last}
	if h.Layers != nil {
		if len(h.Layers) != 2 || h.Layers[0] < 0 || h.Layers[1] <= h.Layers[0] || h.Layers[1] > int64(ss.info.Layout.Layers) {
			return bad(BadField, "layers", RuleFields, "layers is %v; [from, to) of %d layers is wanted", h.Layers, ss.info.Layout.Layers)
		}
		ev.LayerFrom, ev.LayerTo = int32(h.Layers[0]), int32(h.Layers[1])
	}
	parts, rest, e := ss.parts(h, m.payload)
	if e != nil {
		return e
	}
	if int64(len(rest)) != h.Aux {
		return bad(BadField, "payload", RulePages, "%d bytes follow the page ids; aux says %d", len(rest), h.Aux)
	}
	if len(parts) == 0 && !h.Last {
		return bad(BadField, "parts", RulePages, "a chunk without pages must be the last")
	}
	ev.Parts = parts
	if h.Last && h.Aux > 0 {
		ev.Aux = append([]byte(nil), rest...) // the core keeps it
	}
	return ss.post(h, ev, func(s *slot) *Error {
		if h.Chunk < s.nextChunk {
			return bad(BadField, "chunk", RuleFields, "chunk %d was sent; the next is %d", h.Chunk, s.nextChunk)
		}
		s.nextChunk = h.Chunk + 1
		return nil
	})
}

func (ss *session) abort(h *header, m *message) *Error {
	if e := noPayload(m); e != nil {
		return e
	}
	return ss.post(h, core.Event{Kind: core.Abort}, nil)
}

func (ss *session) release(h *header, m *message) *Error {
	if e := noPayload(m); e != nil {
		return e
	}
	return ss.post(h, core.Event{Kind: core.Release}, func(s *slot) *Error {
		s.state = slotReleasing
		return nil
	})
}

// post sends an event about a slot to the core. check, which may be nil, runs with mu held.
func (ss *session) post(h *header, ev core.Event, check func(*slot) *Error) *Error {
	ss.mu.Lock()
	s, e := ss.slotOf(h)
	if e == nil && check != nil {
		e = check(s)
	}
	if e != nil {
		ss.mu.Unlock()
		return e
	}
	ss.pending[h.Seq] = pending{ev.Kind, int32(h.Slot)}
	ss.mu.Unlock()
	ev.Session, ev.Seq, ev.Slot, ev.Room, ev.Role = ss.id, h.Seq, int32(h.Slot), h.Room, ss.info.Role
	ss.srv.cfg.Post(ev)
	return nil
}

// slotOf finds the slot that a request names. mu is held.
func (ss *session) slotOf(h *header) (*slot, *Error) {
	if h.Slot < 0 || h.Slot >= int64(len(ss.slots)) {
		return nil, bad(BadField, "slot", RuleSlot, "slot is %s; the page has %d", show(h.Slot), len(ss.slots))
	}
	s := &ss.slots[h.Slot]
	switch s.state {
	case slotOpen:
	case slotReleasing:
		return nil, bad(BadState, "slot", RuleSlot, "slot %d is being released", h.Slot)
	default:
		return nil, bad(BadField, "slot", RuleSlot, "slot %d holds no room of this session", h.Slot)
	}
	if h.Room != s.room {
		return nil, bad(BadField, "room", RuleSlot, "slot %d holds room %d, not %s", h.Slot, s.room, show(h.Room))
	}
	return s, nil
}

func (ss *session) failure(h *header, m *message) *Error {
	if e := noPayload(m); e != nil {
		return e
	}
	ss.mu.Lock()
	s, e := ss.slotOf(h)
	if e != nil {
		ss.mu.Unlock()
		return e
	}
	a := failureHeader{okHeader: ok(h.Seq), Status: uint8(s.status), Residency: uint8(s.residency)}
	a.Reason, a.Doc, a.Detail = s.reason.String(), s.reason.Doc(), s.detail
	ss.mu.Unlock()
	ss.send(outgoing{header: a, counted: true})
	return nil
}

func (ss *session) auxRecord(h *header, m *message) *Error {
	if e := noPayload(m); e != nil {
		return e
	}
	ss.mu.Lock()
	s, e := ss.slotOf(h)
	if e == nil && s.status != statemachine.Succeeded {
		e = bad(BadState, "room", RuleSlot, "room %d is %s; the aux record comes with Success", h.Room, s.status)
	}
	if e != nil {
		ss.mu.Unlock()
		return e
	}
	aux := s.aux
	ss.mu.Unlock()
	ss.send(outgoing{header: auxHeader{ok(h.Seq), len(aux)}, payload: aux, counted: true})
	return nil
}

// parts cuts the payload into runs of pages, checked against the pools, and returns what follows them.
func (ss *session) parts(h *header, payload []byte) ([]core.Part, []byte, *Error) {
	out := make([]core.Part, 0, len(h.Parts))
	for i, p := range h.Parts {
		if p.Pages < 0 || p.Pages > int64(len(payload)/4) {
			return nil, nil, bad(BadField, "payload", RulePages, "part %d has %d page ids, the payload has bytes for %d", i, p.Pages, len(payload)/4)
		}
		if p.Prefix < 0 || p.Prefix > p.Pages || p.Prefix > 0 && h.T != "register" {
			return nil, nil, bad(BadField, "prefix", RulePages, "part %d: prefix is %d of %d pages", i, p.Prefix, p.Pages)
		}
		pages, e := ss.poolPages(i, p.Pool)
		if e != nil {
			return nil, nil, e
		}
		runs := layout.AppendIDs(nil, ids(payload[:4*p.Pages]))
		payload = payload[4*p.Pages:]
		if err := layout.Check(runs, pages); err != nil {
			return nil, nil, bad(BadField, "parts", RulePages, "part %d, pool %d: %v", i, p.Pool, err)
		}
		out = append(out, core.Part{Ordinal: int32(p.Pool), Prefix: int32(p.Prefix), Runs: runs})
	}
	return out, payload, nil
}

// poolPages returns the number of pages of a pool that is ready.
func (ss *session) poolPages(part int, ordinal int64) (int32, *Error) {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	if ordinal < 0 || ordinal >= int64(len(ss.pools)) || !ss.pools[ordinal].ready {
		return 0, bad(BadField, "pool", RulePools, "part %d: pool %d is not ready; wait for the answer of pool_add", part, ordinal)
	}
	return ss.pools[ordinal].pages, nil
}

func noPayload(m *message) *Error {
	if len(m.payload) > 0 {
		return bad(BadField, "payload", RuleFields, "a payload of %d bytes where none is taken", len(m.payload))
	}
	return nil
}

// badName reports a name that is empty, too long, or would spoil a terminal or a log.
func badName(s string) bool {
	return s == "" || len(s) > maxName || strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r == 0x7f })
}

// clip shortens what a worker sent before it is quoted.
func clip(s string) string {
	if len(s) > 32 {
		return s[:32] + "…"
	}
	return s
}

// show writes a number of a header, or that it is missing.
func show(v int64) string {
	if v == missing {
		return "missing"
	}
	return strconv.FormatInt(v, 10)
}
