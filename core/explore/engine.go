package explore

import (
	"fmt"
	"slices"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// An engine is explored once: its state after an event is computed by the core, named by a number, and
// looked up from then on. A composed state is a few of these numbers, so that most steps of a search cost
// a table lookup, and yet every transition in it is one that core.Machine made.

// Bounds of what a composed state can hold.
const (
	maxSources = 2
	maxOpeners = 2 // a side
	maxChunks  = 2
)

const (
	backend   = "tcp"
	pageBytes = 1024
	layers    = 1
)

// name of the engines' groups.
const (
	sourceGroup      = "prefill"
	destinationGroup = "decode"
)

// eventKind is what can happen to one engine.
type eventKind uint8

const (
	evOpen        eventKind = iota + 1 // k: opener, a: attempt, b: room
	evRegister                         // k
	evSend                             // k, a: chunk
	evAbort                            // k
	evFrame                            // peer, f
	evHello                            // peer, f
	evLinkDown                         // peer
	evPeerGone                         // peer, a: incarnation
	evPeerDead                         // peer
	evClock                            // k: sequence of the record's opener
	evDropHold                         // a: room
	evOpEnd                            // k: sequence, a: chunk, b: end
	evOpQuiesced                       // k, a
	evPluginLost                       // a: epoch
	evPluginUp                         // a: epoch
	evPluginGone                       // a: epoch
	evWorkerDies                       // the next one connects at once
	evGranted                          // k: sequence
	evRevoked                          // k, a: quiet
	evFenceAnswer                      // k, a: quiet
	evGroup                            // peer: its group becomes known
	evLate                             // k, a: a request of a worker that has not seen that its room ended
)

// Ends of an op, field b of evOpEnd.
const (
	endDone uint8 = iota
	endDoneUnquiet
	endSkipped
)

type event struct {
	kind    eventKind
	peer    uint8
	k, a, b uint8
	f       uint32
}

// record is what a search has to know of one record of an engine.
type record struct {
	state     statemachine.State
	reason    statemachine.Reason
	residency statemachine.Residency
	rung      statemachine.Rung
	epoch     uint8 // of the plugin that a destination's pages are registered with; 0: none
	pair      statemachine.Opener
	reusable  bool // the worker may use the pages for something else
}

// node is one state of one engine.
type node struct {
	m       *core.Machine
	inc     uint64
	records [maxOpeners + 1]record // by sequence of the opener
	words   [maxOpeners + 1]core.WordEffect
	slots   [maxOpeners + 1]int32
	grants  [maxOpeners + 1]core.GrantID
	fences  [maxOpeners + 1]core.GrantID
	ops     []opID
	opened  uint8
	session core.SessionID
	heard   [maxSources]uint64 // incarnation of the peer's last Hello
	grouped [maxSources]bool   // the peer's group is known
}

// opID is an op that the plugin has not declared quiet.
type opID struct {
	seq, chunk uint8
	ended      bool // not quiet yet
	id         core.OpID
}

// transition is what an event does to one state of an engine.
type transition struct {
	to       uint32
	frames   []sent
	submits  []submit
	fences   []uint8 // sequences of destinations that rung 3 is asked for
	grants   []uint8
	revokes  []uint8
	aborts   []core.OpID
	violated string
}

type sent struct {
	peer  uint8
	frame uint32
}

type submit struct {
	seq, chunk uint8
	d          statemachine.Opener
}

type nodeKey struct {
	hash uint64
	rest string
}

type eventKey struct {
	node uint32
	ev   event
}

// engine is all that is known of one engine.
type engine struct {
	x     *explorer
	index int // of a source; x.Sources for the destination
	role  statemachine.Role
	nodes []node
	ids   map[nodeKey]uint32
	memo  map[eventKey]*transition
}

func newEngine(x *explorer, index int) *engine {
	e := &engine{x: x, index: index, role: statemachine.Source, ids: map[nodeKey]uint32{}, memo: map[eventKey]*transition{}}
	if index == x.Sources {
		e.role = statemachine.Destination
	}
	return e
}

func (e *engine) name() string {
	switch {
	case e.role == statemachine.Destination:
		return "D"
	case e.x.Sources == 1:
		return "P"
	}
	return fmt.Sprintf("P%d", e.index+1)
}

// incBase tells the engines' incarnations apart; a restart adds one.
func (e *engine) incBase() uint64 { return 16 * uint64(e.index+1) }

// start returns the state of an incarnation that has just started, with its plugin and its worker.
func (e *engine) start(restarts uint8) (uint32, error) {
	cfg := core.Config{Incarnation: e.incBase() + uint64(restarts), Clocks: core.DefaultClocks(), Limits: core.DefaultLimits()}
	m, err := core.New(cfg)
	if err != nil {
		return 0, err
	}
	n := node{m: m, inc: cfg.Incarnation}
	for i := range n.slots {
		n.slots[i] = -1
	}
	t := &transition{}
	e.run(&n, t, core.Event{Kind: core.PluginUp, Backend: backend, Epoch: 1, ReceiverChecked: e.x.Checked})
	e.connectWorker(&n, t)
	if t.violated != "" {
		return 0, fmt.Errorf("%s", t.violated)
	}
	return e.intern(n), nil
}

func (e *engine) connectWorker(n *node, t *transition) {
	n.session++
	group := sourceGroup
	if e.role == statemachine.Destination {
		group = destinationGroup
	}
	e.run(n, t,
		core.Event{Kind: core.SessionUp, Session: n.session, Group: group, Role: e.role, Size: 1, Slots: maxOpeners},
		core.Event{Kind: core.PoolUp, Session: n.session, Pool: 1, Pages: maxOpeners * maxChunks, Layers: layers, PageBytes: pageBytes})
}

// step returns what an event does to a state, from memory where it has happened before.
func (e *engine) step(id uint32, ev event) (t *transition) {
	key := eventKey{id, ev}
	if t, ok := e.memo[key]; ok {
		return t
	}
	t = &transition{}
	e.memo[key] = t
	defer func() {
		if p := recover(); p != nil {
			t.violated = fmt.Sprintf("R12: %s panics: %v", e.name(), p)
		}
	}()
	old := &e.nodes[id]
	n := *old
	n.m, n.ops = old.m.Clone(), slices.Clone(old.ops)
	e.happen(&n, t, ev)
	e.releaseAll(&n, t)
	e.judge(&e.nodes[id], &n, t)
	e.checkAborts(&e.nodes[id], &n, ev, t)
	if ev.kind == evFrame {
		e.checkEcho(&e.nodes[id], &n, t)
	}
	t.to = e.intern(n)
	return t
}

// happen carries out an event.
func (e *engine) happen(n *node, t *transition, ev event) {
	var out core.Effects
	switch ev.kind {
	case evOpen:
		in := core.Event{Kind: core.Open, Session: n.session, Room: int64(ev.b), Att: uint64(ev.a), Slot: int32(ev.k - 1)}
		if e.role == statemachine.Destination {
			in.PeerGroup = sourceGroup
		}
		if r := e.request(n, t, in); r.Code == core.OK {
			n.slots[r.Opener.Seq] = in.Slot
			n.opened++
		}
	case evRegister:
		e.request(n, t, core.Event{Kind: core.Register, Session: n.session, Slot: int32(ev.k - 1), Parts: pages(ev.k, 0, uint8(e.x.Chunks))})
	case evSend:
		in := core.Event{Kind: core.Send, Session: n.session, Slot: int32(ev.k - 1), LayerTo: layers}
		if e.x.Chunks > 0 {
			in.Parts = pages(ev.k, ev.a, 1)
		}
		if in.Last = int(ev.a)+1 >= e.x.Chunks; in.Last {
			seq := slices.Index(n.slots[:], in.Slot)
			in.Aux = auxOf(statemachine.Opener{Inc: n.inc, Seq: uint64(seq)})
		}
		e.request(n, t, in)
	case evAbort:
		e.request(n, t, core.Event{Kind: core.Abort, Session: n.session, Slot: int32(ev.k - 1)})
	case evFrame:
		e.run(n, t, core.Event{Kind: core.PeerFrame, Peer: core.PeerID(ev.peer), Frame: cloneFrame(&e.x.frames[ev.f].f)})
	case evHello:
		inc := e.x.frames[ev.f].inc
		n.heard[ev.peer] = inc
		e.run(n, t,
			core.Event{Kind: core.PeerHello, Peer: core.PeerID(ev.peer), Node: e.x.peerName(e, ev.peer), Inc: inc},
			core.Event{Kind: core.PeerPool, Peer: core.PeerID(ev.peer), Pool: 1, Pages: maxOpeners * maxChunks, Layers: layers, PageBytes: pageBytes})
	case evGroup:
		n.grouped[ev.peer] = true
		g := core.Event{Kind: core.PeerGroup, Peer: core.PeerID(ev.peer), Group: sourceGroup, PeerGroup: destinationGroup, Role: statemachine.Source, Size: 1, Backends: []string{backend}}
		if e.role == statemachine.Source {
			g.Group, g.PeerGroup, g.Role = destinationGroup, sourceGroup, statemachine.Destination
		}
		e.run(n, t, g)
	case evLate:
		for _, in := range e.late(ev) {
			in.Session, in.Slot = n.session, int32(ev.k-1)
			if r := e.request(n, t, in); r.Code != core.Ended && in.Kind != core.Abort {
				t.fail("R2", e, "a request for opener %d, which has ended, is answered %d", ev.k, r.Code)
			}
		}
	case evLinkDown:
		e.run(n, t, core.Event{Kind: core.PeerDown, Peer: core.PeerID(ev.peer)})
	case evPeerGone:
		e.run(n, t, core.Event{Kind: core.PeerGone, Peer: core.PeerID(ev.peer), Inc: n.heard[ev.peer]})
	case evPeerDead:
		n.m.FirePeer(core.PeerID(ev.peer), &out)
		e.effects(n, t, &out)
	case evClock:
		n.m.Fire(statemachine.Opener{Inc: n.inc, Seq: uint64(ev.k)}, statemachine.Deadline, &out)
		e.effects(n, t, &out)
	case evDropHold:
		n.m.FireHold(int64(ev.a), &out)
		e.effects(n, t, &out)
	case evOpEnd, evOpQuiesced:
		i := slices.IndexFunc(n.ops, func(o opID) bool { return o.seq == ev.k && o.chunk == ev.a })
		in := core.Event{Kind: core.OpQuiesced, Op: n.ops[i].id}
		if ev.kind == evOpEnd {
			in.Kind, in.End, in.Quiet, in.Bytes = core.OpEnd, core.EndDone, ev.b != endDoneUnquiet, pageBytes
			if ev.b == endSkipped {
				in.End, in.Bytes = core.EndSkipped, 0
			}
		}
		if n.ops[i].ended = true; in.Kind == core.OpQuiesced || in.Quiet {
			n.ops = slices.Delete(n.ops, i, i+1)
		}
		e.run(n, t, in)
		if ev.b == endSkipped && n.find(ev.k).State.Live() {
			t.fail("R1", e, "an op of s%d was skipped and the room goes on", ev.k)
		}
	case evPluginLost:
		n.ops = nil // it says nothing of them any more
		e.run(n, t, core.Event{Kind: core.PluginLost, Backend: backend, Epoch: uint32(ev.a)})
	case evPluginUp:
		e.run(n, t, core.Event{Kind: core.PluginUp, Backend: backend, Epoch: uint32(ev.a), ReceiverChecked: e.x.Checked})
	case evPluginGone:
		e.run(n, t, core.Event{Kind: core.PluginFenced, Backend: backend, Epoch: uint32(ev.a)})
	case evWorkerDies:
		for i := range n.slots {
			n.slots[i] = -1
		}
		e.run(n, t, core.Event{Kind: core.SessionDown, Session: n.session})
		e.connectWorker(n, t)
	case evGranted:
		e.run(n, t, core.Event{Kind: core.Granted, Grant: n.grants[ev.k]})
	case evRevoked:
		e.run(n, t, core.Event{Kind: core.Revoked, Grant: n.grants[ev.k], Quiet: ev.a == 1})
	case evFenceAnswer:
		e.run(n, t, core.Event{Kind: core.Fenced, Grant: n.fences[ev.k], Quiet: ev.a == 1})
	}
}

// late are the requests of a worker that still believes its room to live.
func (e *engine) late(ev event) []core.Event {
	in := []core.Event{{Kind: core.Abort}}
	if e.role == statemachine.Source {
		return append(in, core.Event{Kind: core.Send, LayerTo: layers, Parts: pages(ev.k, 0, 1)}, core.Event{Kind: core.Send, LayerTo: layers, Last: true})
	}
	return append(in, core.Event{Kind: core.Register, Parts: pages(ev.k, 0, 1)})
}

// find is the core's record of an opener; its state is Absent when there is none.
func (n *node) find(seq uint8) (v core.View) {
	n.m.Rooms(func(w *core.View) bool {
		if w.Own.Seq == uint64(seq) {
			v = *w
		}
		return v.Own.IsZero()
	})
	return v
}

// request runs a worker's request, which must be answered, and not by a refusal: the workers of a search
// ask for nothing that they may not have.
func (e *engine) request(n *node, t *transition, in core.Event) core.Reply {
	in.Seq = 1
	var out core.Effects
	n.m.Step(1, []core.Event{in}, &out)
	e.effects(n, t, &out)
	switch {
	case len(out.Replies) != 1:
		t.fail("R1", e, "a request got %d replies", len(out.Replies))
		return core.Reply{}
	case out.Replies[0].Code == core.Refused:
		t.fail("R1", e, "refused: %s", out.Replies[0].Detail)
	}
	return out.Replies[0]
}

func (e *engine) run(n *node, t *transition, in ...core.Event) {
	var out core.Effects
	n.m.Step(1, in, &out)
	e.effects(n, t, &out)
}

// effects turns what the core asks for into what happens around it.
func (e *engine) effects(n *node, t *transition, out *core.Effects) {
	for _, w := range out.Words {
		if w.Session == n.session {
			n.words[w.Opener.Seq] = w
		}
	}
	for i := range out.Frames {
		if k := out.Frames[i].Frame.Kind; e.x.NoHints && (k == core.FrameQueued || k == core.FrameProgress) {
			continue
		}
		t.frames = append(t.frames, sent{uint8(out.Frames[i].Peer), e.x.internFrame(&out.Frames[i].Frame)})
	}
	for i := range out.Plugin {
		p := &out.Plugin[i]
		switch p.Kind {
		case core.PluginSubmit:
			s := submit{seq: uint8(p.S.Seq), chunk: uint8(p.Source[0].Start) % maxChunks, d: p.D}
			n.ops = append(n.ops, opID{seq: s.seq, chunk: s.chunk, id: p.Op})
			t.submits = append(t.submits, s)
		case core.PluginAbort:
			t.aborts = append(t.aborts, p.Op)
		case core.PluginGrant:
			n.grants[p.D.Seq] = p.Grant
			t.grants = append(t.grants, uint8(p.D.Seq))
		case core.PluginRevoke:
			t.revokes = append(t.revokes, uint8(p.D.Seq))
		case core.PluginFencePeer:
			n.fences[p.D.Seq] = p.Grant
			t.fences = append(t.fences, uint8(p.D.Seq))
		}
	}
	for _, a := range out.Auxes {
		seq := slices.Index(n.slots[:], a.Slot)
		if seq < 0 || a.Session != n.session {
			continue // of a worker that is gone
		}
		if pair := n.find(uint8(seq)).Pair; !slices.Equal(a.Aux, auxOf(pair)) {
			t.fail("R11", e, "d%d gets the aux record %x, its source is %v", seq, a.Aux, pair)
		}
	}
}

// releaseAll lets the worker take its pages back at the first moment at which it may.
func (e *engine) releaseAll(n *node, t *transition) {
	for seq, w := range n.words {
		if w.Session == n.session && w.Session != 0 && w.Status.Terminal() && w.Residency.Reusable() && w.Residency != statemachine.Released && n.slots[seq] >= 0 {
			e.request(n, t, core.Event{Kind: core.Release, Session: n.session, Slot: n.slots[seq]})
			n.slots[seq] = -1
			n.words[seq] = core.WordEffect{}
		}
	}
}

// judge summarises a new state and checks the rules that concern one engine alone.
func (e *engine) judge(old, n *node, t *transition) {
	was := old.records
	n.records = [maxOpeners + 1]record{}
	idle := true
	n.m.Rooms(func(v *core.View) bool {
		r := &n.records[v.Own.Seq]
		*r = record{state: v.State, reason: v.Reason, residency: v.Residency, rung: v.Rung, pair: v.Pair, reusable: v.Released}
		if v.Backend != "" && v.Role == statemachine.Destination {
			r.epoch = uint8(v.Epoch)
		}
		if w := &n.words[v.Own.Seq]; w.Session == n.session && w.Opener == v.Own {
			r.reusable = r.reusable || w.Status.Terminal() && w.Residency.Reusable()
			if w.Status != v.Status {
				t.fail("R2", e, "the word of opener %d says %s, the record %s", v.Own.Seq, w.Status, v.Status)
			}
		}
		idle = idle && v.State == statemachine.Ended && v.Released && v.Ops == statemachine.Counts{}
		if v.State.Live() && v.Clock == "" {
			t.fail("R5", e, "no clock runs: %s", v.Why())
		}
		if o := &was[v.Own.Seq]; o.state == statemachine.Ended && (o.reason != r.reason || r.state != statemachine.Ended || !o.pair.IsZero() && o.pair != r.pair) {
			t.fail("R2", e, "opener %d ended %s and is now %s %s", v.Own.Seq, o.reason, r.state, r.reason)
		}
		return true
	})
	if idle {
		e.conserve(n, t)
	}
}

// checkAborts: the plugin is asked to abort what it still has of a room that ends.
func (e *engine) checkAborts(old, n *node, ev event, t *transition) {
	for _, o := range n.ops {
		if !o.ended && ev.kind != evPluginLost && old.records[o.seq].state.Live() && n.records[o.seq].state == statemachine.Ended && !slices.Contains(t.aborts, o.id) {
			t.fail("R7", e, "s%d has ended and its op for chunk %d goes on", o.seq, o.chunk)
		}
	}
}

// checkEcho: an end that a frame caused is not told back as an abort of the attempt, which would end the
// counterpart's next open of it, and so on.
func (e *engine) checkEcho(old, n *node, t *transition) {
	for _, s := range t.frames {
		f := &e.x.frames[s.frame].f
		if f.Kind != core.FrameAbort || !f.S.IsZero() && !f.D.IsZero() {
			continue
		}
		own := f.S
		if e.role == statemachine.Destination {
			own = f.D
		}
		if own.Inc == n.inc && old.records[own.Seq].state.Live() && n.records[own.Seq].state == statemachine.Ended {
			t.fail("R10", e, "opener %d was ended by its counterpart and says so to it", own.Seq)
		}
	}
}

// conserve demands that an engine whose records are all released holds nothing once it has forgotten
// them. Abort marks and placeholders belong to rooms that are not open here.
func (e *engine) conserve(n *node, t *transition) {
	m := n.m.Clone()
	var out core.Effects
	for seq := range n.records {
		m.Fire(statemachine.Opener{Inc: n.inc, Seq: uint64(seq)}, statemachine.None, &out)
	}
	c := m.Counts()
	c.Marks, c.Placeholders = 0, 0
	if c != (core.Counts{}) {
		t.fail("idle", e, "holds %+v", c)
	}
}

func (t *transition) fail(rule string, e *engine, format string, args ...any) {
	if t.violated == "" {
		t.violated = rule + ": " + e.name() + ": " + fmt.Sprintf(format, args...)
	}
}

// intern names a state; two that behave the same from here on get the same number.
func (e *engine) intern(n node) uint32 {
	b := []byte{byte(n.inc), byte(n.session), n.opened}
	for i, h := range n.heard {
		b = append(b, byte(h), bit(n.grouped[i]))
	}
	for _, s := range n.slots {
		b = append(b, byte(s))
	}
	for _, o := range n.ops {
		b = append(b, o.seq, o.chunk, bit(o.ended))
	}
	k := nodeKey{n.m.Hash(), string(b)}
	id, ok := e.ids[k]
	if !ok {
		id = uint32(len(e.nodes))
		e.ids[k] = id
		e.nodes = append(e.nodes, n)
	}
	return id
}

// pages of opener k: chunks from to from+n.
func pages(k, from, n uint8) []core.Part {
	if n == 0 {
		return nil
	}
	return []core.Part{{Runs: []layout.Run{{Start: int32(k-1)*maxChunks + int32(from), Count: int32(n), Stride: 1}}}}
}

// auxOf is the aux record of a source opener: it tells whose it is.
func auxOf(s statemachine.Opener) []byte { return []byte{byte(s.Inc), byte(s.Seq)} }
