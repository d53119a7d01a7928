package explore

import (
	"fmt"
	"slices"
	"strings"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// A search of groups whose ranks sit on several engines, on the shipped core: one room, one attempt or two. As
// in Run, an engine's state after an event is computed once and named by a number.
//
// Every clock may run out in every state. Writes land at any time until their plugin says otherwise. In every
// state: a verdict never changes (G1); nobody is Success before the judge is (G2); no page is reusable while an op may
// touch it (G3); judge Success means that every op of its attempt is Done (G4), that no engine that it decided for
// is Failed but as outcome_unknown (G5), and that all of them opened the same attempt (G8). Where nothing is left to
// happen, every record has ended and its pages are reusable or in quarantine (G6), and the last attempt has
// succeeded everywhere unless something disturbed it (G7, where no clock of it runs out).

// GroupConfig is what GroupRun searches.
type GroupConfig struct {
	Sources, Destinations int
	Attempts              int    // of the room, 1 or 2; 0: 1
	Ops                   bool   // every source writes one page to every destination
	Faults                int    // at most that many
	Kinds                 string // of faults, see below
	NoClocks              bool   // no clock of the last attempt runs out
	Bound                 bool   // begin where every pair of the first attempt is confirmed and nothing is sent
	Overtake              bool   // urgent frames may overtake all but Hello
	Late                  string // engines whose workers come at any later time: "D2". They announce their ranks on their links then
	Limit                 int    // states; 0: none
}

// Faults of groups, by letter.
const (
	groupBreak   = 'b' // a link breaks and is redialled
	groupSilent  = 'd' // it breaks, and one end takes the other for dead
	groupRestart = 'r' // an engine dies and comes back
	groupPlugin  = 'm' // its plugin dies, and comes back
	groupWorker  = 'w' // its workers die, and come back
	groupAbort   = 'a' // its worker aborts: past its last word where the search is of one attempt with clocks, else of any but the last attempt
	groupUnquiet = 'q' // an op is Done with quiet=no
	groupEvict   = 'e' // a tombstone is evicted
	groupLeave   = 'g' // the workers of an engine die, and it hosts no ranks until others come
)

// GroupResult is what a search found.
type GroupResult struct {
	States, Edges, Depth int
	Complete             bool
	Violation            string
	Trace                []string
}

func (r *GroupResult) String() string {
	how := "complete"
	if !r.Complete {
		how = "stopped"
	}
	return fmt.Sprintf("%d states, %d edges, depth %d, %s", r.States, r.Edges, r.Depth, how)
}

const (
	maxSide  = 2
	maxGroup = 2 * maxSide
	maxOpens = 2 // of an incarnation
	maxSlots = 2 * maxOpens
	maxQueue = 12
)

// slotOf tells the openers of an engine's two incarnations apart.
func slotOf(inc, seq uint8) uint8 { return inc*maxOpens + seq - 1 }

// groupRecord is what a search has to know of one record.
type groupRecord struct {
	state    statemachine.State
	reason   statemachine.Reason
	reusable bool // the worker may use the pages for something else
	quarant  bool
	epoch    uint8                         // of the plugin that a destination's pages are registered with; 0: none
	pairs    [maxGroup]statemachine.Opener // by engine
}

// groupNode is one state of one engine.
type groupNode struct {
	m       *core.Machine
	inc     uint64
	session core.SessionID // of its first rank; those of the others follow
	rec     [maxOpens]groupRecord
	word    [maxOpens]core.WordEffect
	held    [maxOpens]uint8 // ranks whose open was given a slot, by bit; one that is late to an attempt that has ended is not
	done    [maxOpens]bool  // released
	ops     [maxGroup][maxOpens]core.OpID
	cut     [maxGroup][maxOpens]core.GrantID // FencePeer that was asked and is not answered, by engine
}

// groupStep is what an event does to a state of an engine.
type groupStep struct {
	to       uint32
	frames   []sent
	submits  []groupSubmit
	violated string
}

type groupSubmit struct {
	to  uint8 // engine
	seq uint8
	d   statemachine.Opener
}

type groupEngine struct {
	nodes []groupNode
	ids   map[string]uint32
	memo  map[eventKey]*groupStep
}

// ranksWord is what a frame on a link says of the ranks that its engine hosts, if it is no room frame.
type ranksWord uint8

const (
	ranksHere ranksWord = iota + 1
	ranksGone
)

type groups struct {
	GroupConfig
	n       int
	late    [maxGroup]bool
	lm      layout.Map
	engines [maxGroup]*groupEngine
	frames  []core.Frame
	urgent  []bool
	hello   []uint64 // incarnation of a Hello, by frame; 0: none
	said    []ranksWord
	byText  map[string]uint32
	queues  [][]uint32
	byQueue map[string]uint32
	bad     string
}

func (x *groups) source(e int) bool { return e < x.Sources }

func (x *groups) name(e int) string {
	if x.source(e) {
		return fmt.Sprintf("P%d", e+1)
	}
	return fmt.Sprintf("D%d", e-x.Sources+1)
}

func (x *groups) linked(a, b int) bool {
	if x.source(a) || x.source(b) {
		return x.source(a) != x.source(b)
	}
	return a != b && (a == x.Sources || b == x.Sources) // a star around the judge
}

func (x *groups) base(e int) uint64 { return 16 * uint64(e+1) }

// slot of an opener of engine e.
func (x *groups) slot(e int, o statemachine.Opener) uint8 {
	return slotOf(uint8(o.Inc-x.base(e)), uint8(o.Seq))
}

// ranks that an engine hosts: with ops every source has one and every destination one for each source, so that each
// writes to each.
func (x *groups) ranks(e int) (out []int32) {
	mine, engines, at := x.Sources, x.Sources, e
	if !x.source(e) {
		mine, engines, at = x.Sources*x.Destinations, x.Destinations, e-x.Sources
	}
	for r := at; r < mine; r += engines {
		out = append(out, int32(r))
	}
	return out
}

func (x *groups) size(source bool) int32 {
	if source {
		return int32(x.Sources)
	}
	return int32(x.Sources * x.Destinations)
}

func (x *groups) group(e int) (name string, role statemachine.Role) {
	if x.source(e) {
		return sourceGroup, statemachine.Source
	}
	return destinationGroup, statemachine.Destination
}

// GroupRun searches.
func GroupRun(cfg GroupConfig) (*GroupResult, error) {
	cfg.Attempts = max(cfg.Attempts, 1)
	if cfg.Sources < 1 || cfg.Sources > maxSide || cfg.Destinations < 1 || cfg.Destinations > maxSide || cfg.Attempts > maxOpens {
		return nil, fmt.Errorf("explore: %+v: 1 to %d engines a side, 1 to %d attempts", cfg, maxSide, maxOpens)
	}
	x := &groups{GroupConfig: cfg, n: cfg.Sources + cfg.Destinations, byText: map[string]uint32{}, byQueue: map[string]uint32{"": 0}, queues: [][]uint32{nil}}
	side := func(source bool) layout.Side {
		return layout.Side{Ranks: x.size(source), Cache: layout.Cache{Kind: layout.MHA, DType: "bf16", Layers: layers, KVHeads: x.size(false), HeadDim: 4, PageTokens: 16, Order: layout.HND}}
	}
	var err error
	if x.lm, err = layout.New(side(true), side(false)); err != nil {
		return nil, err
	}
	for e := range x.n {
		x.late[e] = slices.Contains(strings.Fields(cfg.Late), x.name(e))
	}
	first := groupState{}
	for e := range x.n {
		x.engines[e] = &groupEngine{ids: map[string]uint32{}, memo: map[eventKey]*groupStep{}}
		first.at[e].known = x.known(e)
		if first.node[e], err = x.start(e, 0); err != nil {
			return nil, err
		}
	}
	for a := range x.n {
		for b := range x.n {
			if x.linked(a, b) {
				x.apply(&first, a, event{kind: evHello, peer: uint8(b), f: x.helloOf(b, 0)})
			}
		}
	}
	if cfg.Bound {
		x.bind(&first)
	}
	return x.search(first), nil
}

// known are the engines whose ranks an engine knows when it starts, by bit; its own: it hosts some.
func (x *groups) known(e int) (bits uint8) {
	for o := range x.n {
		if !x.late[o] {
			bits |= 1 << o
		}
	}
	return bits
}

// bind opens and registers at every engine and carries what they say.
func (x *groups) bind(st *groupState) {
	for e := range x.n {
		x.open(st, e, 1)
		if !x.source(e) {
			st.at[e].moved = true
			x.apply(st, e, event{kind: evRegister, k: 1})
		}
	}
	for busy := true; busy; {
		busy = false
		for a := range x.n {
			for b := range x.n {
				if list := x.queues[st.queue[a][b]]; len(list) > 0 {
					busy = true
					st.queue[a][b] = x.queueOf(list[1:])
					x.apply(st, b, event{kind: evFrame, peer: uint8(a), f: list[0]})
				}
			}
		}
	}
}

// start is the state of an incarnation that has just started, with its plugin and its workers.
func (x *groups) start(e int, restarts uint8) (uint32, error) {
	m, err := core.New(core.Config{Incarnation: x.base(e) + uint64(restarts), Clocks: core.DefaultClocks(), Limits: core.DefaultLimits()})
	if err != nil {
		return 0, err
	}
	n := groupNode{m: m, inc: x.base(e) + uint64(restarts), session: 1}
	t := &groupStep{}
	x.run(e, &n, t, core.Event{Kind: core.PluginUp, Backend: backend, Epoch: 1})
	x.connectWorkers(e, &n, t)
	for o := range x.n {
		if o != e && x.known(e)&(1<<o) != 0 {
			x.run(e, &n, t, x.membership(e, o, false))
		}
	}
	if t.violated != "" {
		return 0, fmt.Errorf("explore: %s", t.violated)
	}
	return x.intern(e, n), nil
}

func (x *groups) connectWorkers(e int, n *groupNode, t *groupStep) {
	group, role := x.group(e)
	for i, r := range x.ranks(e) {
		id := n.session + core.SessionID(i)
		x.run(e, n, t,
			core.Event{Kind: core.SessionUp, Session: id, Group: group, Role: role, Rank: r, Size: x.size(x.source(e)), Slots: maxOpens},
			core.Event{Kind: core.PoolUp, Session: id, Pool: uint64(r) + 1, Pages: maxOpens * maxChunks, Layers: layers, PageBytes: pageBytes})
	}
}

// membership is what engine e is told of o.
func (x *groups) membership(e, o int, gone bool) core.Event {
	group, _ := x.group(e)
	name, role := x.group(o)
	g := core.Event{Kind: core.PeerGroup, Peer: core.PeerID(o), Group: name, PeerGroup: group}
	if gone {
		return g
	}
	g.Role, g.Size, g.Ranks = role, x.size(x.source(o)), x.ranks(o)
	if name != group {
		g.Backends, g.Map = []string{backend}, x.lm
	}
	return g
}

// intern names a state; two that behave the same from here on get the same number.
func (x *groups) intern(e int, n groupNode) uint32 {
	b := []byte{byte(n.inc), byte(n.session)} // a machine without a record does not tell whose life it is
	for k := range maxOpens {
		b = append(b, bit(n.done[k])|n.held[k]<<1)
		for p := range x.n {
			b = append(b, bit(n.cut[p][k] != 0))
		}
	}
	key := fmt.Sprintf("%x %s", n.m.Hash(), b)
	g := x.engines[e]
	id, ok := g.ids[key]
	if !ok {
		id = uint32(len(g.nodes))
		g.nodes = append(g.nodes, n)
		g.ids[key] = id
	}
	return id
}

func (x *groups) helloOf(e int, inc uint8) uint32 {
	return x.frameOf(fmt.Sprintf("hello %d %d", e, inc), core.Frame{}, false, x.base(e)+uint64(inc), 0)
}

func (x *groups) ranksOf(e int, said ranksWord) uint32 {
	return x.frameOf(fmt.Sprintf("ranks %d %d", e, said), core.Frame{}, false, 0, said)
}

func (x *groups) frameOf(text string, f core.Frame, urgent bool, hello uint64, said ranksWord) uint32 {
	id, ok := x.byText[text]
	if !ok {
		id = uint32(len(x.frames))
		x.frames, x.urgent, x.hello, x.said = append(x.frames, f), append(x.urgent, urgent), append(x.hello, hello), append(x.said, said)
		x.byText[text] = id
	}
	return id
}

func (x *groups) run(e int, n *groupNode, t *groupStep, in ...core.Event) {
	var out core.Effects
	n.m.Step(1, in, &out)
	x.effects(e, n, t, &out)
}

// request runs a worker's request at every rank. The workers of a search ask for nothing that they may not have.
func (x *groups) request(e int, n *groupNode, t *groupStep, in core.Event) {
	for i := range x.ranks(e) {
		in.Session, in.Seq = n.session+core.SessionID(i), 1
		if in.Kind != core.Open && n.held[in.Slot]>>i&1 == 0 {
			continue
		}
		var out core.Effects
		n.m.Step(1, []core.Event{in}, &out)
		x.effects(e, n, t, &out)
		switch {
		case len(out.Replies) != 1:
			t.fail("R1: %s: a request got %d replies", x.name(e), len(out.Replies))
		case out.Replies[0].Code == core.Refused:
			t.fail("R1: %s refuses: %s", x.name(e), out.Replies[0].Detail)
		case in.Kind == core.Open && out.Replies[0].Code == core.OK:
			n.held[in.Slot] |= 1 << i
		}
	}
}

func (t *groupStep) fail(format string, args ...any) {
	if t.violated == "" {
		t.violated = fmt.Sprintf(format, args...)
	}
}

// effects turns what the core asks for into what happens around it.
func (x *groups) effects(e int, n *groupNode, t *groupStep, out *core.Effects) {
	for i := range out.Frames {
		f := out.Frames[i].Frame.Clone()
		if f.Kind == core.FrameQueued || f.Kind == core.FrameProgress {
			continue // they decide nothing
		}
		if f.Reason != statemachine.None { // which failure it was decides nothing
			f.Reason = statemachine.Aborted
		}
		t.frames = append(t.frames, sent{uint8(out.Frames[i].Peer), x.frameOf(fmt.Sprintf("%+v", f), f, out.Frames[i].Urgent, 0, 0)})
	}
	for i := range out.Plugin {
		switch p := &out.Plugin[i]; p.Kind {
		case core.PluginSubmit:
			n.ops[p.Peer][p.S.Seq-1] = p.Op
			t.submits = append(t.submits, groupSubmit{uint8(p.Peer), uint8(p.S.Seq), p.D})
		case core.PluginFencePeer:
			n.cut[p.Peer][p.D.Seq-1] = p.Grant
		}
	}
	for i := range out.Words {
		if w := &out.Words[i]; w.Session >= n.session {
			n.word[w.Opener.Seq-1] = *w
		}
	}
}

// free reports whether a worker sees that it may take the pages of an open back.
func (n *groupNode) free(k int) bool {
	w := &n.word[k]
	return w.Session != 0 && w.Status.Terminal() && w.Residency.Reusable()
}

// release lets the workers take their pages back at the first moment at which they may.
func (x *groups) release(e int, n *groupNode, t *groupStep) {
	for k := range maxOpens {
		if n.free(k) && !n.done[k] {
			n.done[k] = true
			x.request(e, n, t, core.Event{Kind: core.Release, Slot: int32(k)})
		}
	}
}

// judge summarises a new state and checks the rules that concern one engine alone.
func (x *groups) judge(e int, n *groupNode, t *groupStep, evicts bool) {
	was := n.rec
	n.rec = [maxOpens]groupRecord{}
	n.m.Rooms(func(v *core.View) bool {
		k := v.Own.Seq - 1
		r := &n.rec[k]
		*r = groupRecord{state: v.State, reason: v.Reason, quarant: v.Residency == statemachine.Quarantined}
		r.reusable = v.Released && v.Residency.Reusable() || n.done[k] || n.free(int(k))
		if v.Role == statemachine.Destination && v.Backend != "" {
			r.epoch = uint8(v.Epoch)
		}
		if v.Peer >= 0 {
			r.pairs[v.Peer] = v.Pair
		}
		for _, p := range v.Pairs {
			if p.Peer >= 0 && (!p.Sibling || !p.Other.IsZero()) {
				r.pairs[p.Peer] = p.Other
			}
		}
		if v.State.Live() && v.Clock == "" {
			t.fail("R5: %s: %s", x.name(e), v.Why())
		}
		return true
	})
	for k := range was {
		if old, r := &was[k], &n.rec[k]; old.state == statemachine.Ended && !(evicts && r.state == statemachine.Absent) && (r.state != statemachine.Ended || r.reason != old.reason) {
			t.fail("G1: %s was %s, is %s", x.name(e), old.reason, r.reason)
		}
	}
}

// step is what an event does to a state of an engine, from memory where it has happened before.
func (x *groups) step(e int, id uint32, ev event) *groupStep {
	g := x.engines[e]
	key := eventKey{id, ev}
	if t := g.memo[key]; t != nil {
		return t
	}
	t := &groupStep{}
	g.memo[key] = t
	defer func() {
		if p := recover(); p != nil {
			t.fail("R12: %s panics: %v", x.name(e), p)
		}
	}()
	n := g.nodes[id]
	n.m = n.m.Clone()
	x.happen(e, &n, t, ev)
	x.release(e, &n, t)
	x.judge(e, &n, t, ev.kind == evClock && g.nodes[id].rec[ev.k-1].reusable)
	t.to = x.intern(e, n)
	return t
}

// happen carries out an event.
func (x *groups) happen(e int, n *groupNode, t *groupStep, ev event) {
	var out core.Effects
	peer := core.PeerID(ev.peer)
	own := statemachine.Opener{Inc: n.inc, Seq: uint64(ev.k)}
	slot := int32(ev.k) - 1
	switch ev.kind {
	case evOpen:
		in := core.Event{Kind: core.Open, Room: 1, Att: uint64(ev.a), Slot: slot, PeerGroup: destinationGroup}
		if !x.source(e) {
			in.PeerGroup = sourceGroup
		}
		x.request(e, n, t, in)
	case evRegister:
		in := core.Event{Kind: core.Register, Slot: slot}
		if x.Ops {
			in.Parts = pages(ev.k, 0, 1)
		}
		x.request(e, n, t, in)
	case evSend:
		in := core.Event{Kind: core.Send, Slot: slot, Last: true, LayerTo: layers}
		if x.Ops {
			in.Parts = pages(ev.k, 0, 1)
		}
		x.request(e, n, t, in)
	case evAbort:
		x.request(e, n, t, core.Event{Kind: core.Abort, Slot: slot})
	case evFrame:
		x.run(e, n, t, core.Event{Kind: core.PeerFrame, Peer: peer, Frame: cloneFrame(&x.frames[ev.f])})
	case evHello:
		in := []core.Event{{Kind: core.PeerHello, Peer: peer, Node: x.name(int(peer)), Inc: x.hello[ev.f]}}
		for _, r := range x.ranks(int(peer)) {
			in = append(in, core.Event{Kind: core.PeerPool, Peer: peer, Pool: uint64(r) + 1, Pages: maxOpens * maxChunks, Layers: layers, PageBytes: pageBytes})
		}
		x.run(e, n, t, in...)
	case evGroup:
		x.run(e, n, t, x.membership(e, int(peer), ranksWord(ev.a) == ranksGone))
	case evLinkDown:
		x.run(e, n, t, core.Event{Kind: core.PeerDown, Peer: peer})
	case evPeerDead:
		n.m.FirePeer(peer, &out)
		x.effects(e, n, t, &out)
	case evClock:
		n.m.Fire(own, statemachine.Stalled, &out)
		x.effects(e, n, t, &out)
	case evWorkerDies:
		for i := range x.ranks(e) {
			x.run(e, n, t, core.Event{Kind: core.SessionDown, Session: n.session + core.SessionID(i)})
		}
		n.session += core.SessionID(len(x.ranks(e)))
		n.word = [maxOpens]core.WordEffect{}
		x.connectWorkers(e, n, t)
	case evPluginLost:
		x.run(e, n, t, core.Event{Kind: core.PluginLost, Backend: backend, Epoch: uint32(ev.a)})
	case evPluginUp:
		x.run(e, n, t, core.Event{Kind: core.PluginUp, Backend: backend, Epoch: uint32(ev.a)})
	case evPluginGone:
		x.run(e, n, t, core.Event{Kind: core.PluginFenced, Backend: backend, Epoch: uint32(ev.a)})
	case evOpEnd:
		in := core.Event{Kind: core.OpEnd, Op: n.ops[peer][slot], End: core.EndDone, Quiet: ev.a != endDoneUnquiet, Bytes: pageBytes}
		if ev.a == endSkipped {
			in.End, in.Bytes = core.EndAborted, 0
		}
		x.run(e, n, t, in)
	case evOpQuiesced:
		x.run(e, n, t, core.Event{Kind: core.OpQuiesced, Op: n.ops[peer][slot]})
	case evFenceAnswer:
		id := n.cut[peer][slot]
		n.cut[peer][slot] = 0
		x.run(e, n, t, core.Event{Kind: core.Fenced, Grant: id, Quiet: ev.a == 1})
	}
}

func (x *groups) queueOf(list []uint32) uint32 {
	if len(list) == 0 {
		return 0
	}
	key := make([]byte, 0, 4*maxQueue)
	for _, f := range list {
		key = append(key, byte(f), byte(f>>8), byte(f>>16), byte(f>>24))
	}
	id, ok := x.byQueue[string(key)]
	if !ok {
		id = uint32(len(x.queues))
		x.queues = append(x.queues, slices.Clone(list))
		x.byQueue[string(key)] = id
	}
	return id
}

// push appends a frame, unless it says the same as one that waits.
func (x *groups) push(q *uint32, f uint32) {
	list := x.queues[*q]
	if n := len(list); n > 0 && list[n-1] == f || (x.urgent[f] || x.frames[f].Kind == core.FrameDrained) && slices.Contains(list, f) {
		return
	}
	if len(list) >= maxQueue {
		x.bad = "a queue overflows"
		return
	}
	*q = x.queueOf(append(slices.Clone(list), f))
}

func (x *groups) text(f uint32) string {
	switch {
	case x.hello[f] != 0:
		return "Hello"
	case x.said[f] == ranksHere:
		return "the ranks"
	case x.said[f] == ranksGone:
		return "that no ranks are left"
	}
	text := x.frames[f].Kind.String()
	switch x.frames[f].Outcome {
	case core.OutcomeSuccess:
		text += "(Success)"
	case core.OutcomeFailed:
		text += "(Failed)"
	case core.OutcomeUnknown:
		text += "(unknown)"
	}
	if x.frames[f].Att > 1 {
		text += " of attempt 2"
	}
	return text
}
