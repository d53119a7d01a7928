package explore

import (
	"fmt"
	"slices"
	"strings"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// A search of groups whose ranks sit on several engines, on the shipped core: one room, one attempt, one open an
// engine's incarnation. As in Run, an engine's state after an event is computed once and named by a number.
//
// Every clock may run out in every state. Writes land at any time until their plugin says otherwise. In every
// state: a verdict never changes (G1); nobody is Success before the judge is (G2); no page is reusable while an op may
// touch it (G3); judge Success means that every op of its attempt is Done (G4) and that no engine that it decided for
// is Failed but as outcome_unknown (G5). Where nothing is left to happen, every record has ended and its pages are
// reusable or in quarantine (G6).

// GroupConfig is what GroupRun searches.
type GroupConfig struct {
	Sources, Destinations int
	Ops                   bool   // every source writes one page to every destination
	Faults                int    // at most that many
	Kinds                 string // of faults: b link breaks, r engine restarts, a abort past the last word, q op ends with quiet=no
	NoClocks              bool   // no clock runs out
	Bound                 bool   // begin where every pair is confirmed and nothing is sent
	Overtake              bool   // urgent frames may overtake all but Hello
	Limit                 int    // states; 0: none
}

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
	maxQueue = 12
)

type groupEvent struct {
	kind eventKind
	peer uint8
	a    uint8
	f    uint32
}

type groupRecord struct {
	state    statemachine.State
	reason   statemachine.Reason
	reusable bool
	quarant  bool
	pairs    [maxGroup]statemachine.Opener // by engine
}

type groupNode struct {
	m    *core.Machine
	rec  groupRecord
	word bool // pages, as the worker sees them, are reusable
	ops  [maxGroup]core.OpID
	cut  [maxGroup]core.GrantID // FencePeer that was asked and is not answered, by engine
}

type groupStep struct {
	to       uint32
	frames   []sent
	submits  []uint8 // to these engines
	violated string
}

type groupEngine struct {
	nodes []groupNode
	ids   map[string]uint32
	memo  map[struct {
		node uint32
		ev   groupEvent
	}]*groupStep
}

// groupOp is the truth about the op of a source engine's incarnation to a destination engine.
type groupOp struct {
	state opState
	dInc  uint8
	done  bool
	cut   bool
}

type groupState struct {
	node   [maxGroup]uint32
	inc    [maxGroup]uint8
	opened [maxGroup]uint8 // steps of the worker: 1 open, 2 registered or sent
	queue  [maxGroup][maxGroup]uint32
	ops    [maxSide][maxSide][2]groupOp
	end    [maxGroup][2]end
	won    [2]uint8 // by incarnation of the judge: 1 + bits of the others' incarnations that it decided for
	faults uint8
}

type groups struct {
	GroupConfig
	n       int
	lm      layout.Map
	engines [maxGroup]*groupEngine
	frames  []core.Frame
	hello   []uint64 // incarnation of a Hello, by frame; 0: none
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
	x := &groups{GroupConfig: cfg, n: cfg.Sources + cfg.Destinations, byText: map[string]uint32{}, byQueue: map[string]uint32{"": 0}, queues: [][]uint32{nil}}
	side := func(source bool) layout.Side {
		return layout.Side{Ranks: x.size(source), Cache: layout.Cache{Kind: layout.MHA, DType: "bf16", Layers: layers, KVHeads: x.size(false), HeadDim: 4, PageTokens: 16, Order: layout.HND}}
	}
	var err error
	if x.lm, err = layout.New(side(true), side(false)); err != nil {
		return nil, err
	}
	first := groupState{}
	for e := range x.n {
		x.engines[e] = &groupEngine{ids: map[string]uint32{}, memo: map[struct {
			node uint32
			ev   groupEvent
		}]*groupStep{}}
		if first.node[e], err = x.start(e, 0); err != nil {
			return nil, err
		}
	}
	for a := range x.n {
		for b := range x.n {
			if x.linked(a, b) {
				x.apply(&first, a, groupEvent{kind: evHello, peer: uint8(b), f: x.helloOf(b, 0)})
			}
		}
	}
	if cfg.Bound {
		x.bind(&first)
	}
	return x.search(first), nil
}

// bind opens and registers at every engine and carries what they say.
func (x *groups) bind(st *groupState) {
	for e := range x.n {
		st.opened[e] = 1
		x.apply(st, e, groupEvent{kind: evOpen})
		if !x.source(e) {
			st.opened[e] = 2
			x.apply(st, e, groupEvent{kind: evRegister})
		}
	}
	for busy := true; busy; {
		busy = false
		for a := range x.n {
			for b := range x.n {
				if list := x.queues[st.queue[a][b]]; len(list) > 0 {
					busy = true
					st.queue[a][b] = x.queueOf(list[1:])
					x.apply(st, b, groupEvent{kind: evFrame, peer: uint8(a), f: list[0]})
				}
			}
		}
	}
}

func (x *groups) start(e int, restarts uint8) (uint32, error) {
	m, err := core.New(core.Config{Incarnation: x.base(e) + uint64(restarts), Clocks: core.DefaultClocks(), Limits: core.DefaultLimits()})
	if err != nil {
		return 0, err
	}
	n := groupNode{m: m}
	group, role := x.group(e)
	in := []core.Event{{Kind: core.PluginUp, Backend: backend, Epoch: 1}}
	for i, r := range x.ranks(e) {
		in = append(in,
			core.Event{Kind: core.SessionUp, Session: core.SessionID(i) + 1, Group: group, Role: role, Rank: r, Size: x.size(x.source(e)), Slots: 2},
			core.Event{Kind: core.PoolUp, Session: core.SessionID(i) + 1, Pool: uint64(r) + 1, Pages: 2, Layers: layers, PageBytes: pageBytes})
	}
	for o := range x.n {
		if o != e {
			name, r := x.group(o)
			g := core.Event{Kind: core.PeerGroup, Peer: core.PeerID(o), Group: name, PeerGroup: group, Role: r, Size: x.size(x.source(o)), Ranks: x.ranks(o)}
			if name != group {
				g.Backends, g.Map = []string{backend}, x.lm
			}
			in = append(in, g)
		}
	}
	x.run(e, &n, &groupStep{}, in...)
	return x.intern(e, n), nil
}

func (x *groups) intern(e int, n groupNode) uint32 {
	key := fmt.Sprintf("%x %v %v", n.m.Hash(), n.rec, n.word)
	for p, id := range n.cut {
		if id != 0 {
			key += fmt.Sprint(" cut ", p)
		}
	}
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
	key := fmt.Sprintf("hello %d %d", e, inc)
	id, ok := x.byText[key]
	if !ok {
		id = uint32(len(x.frames))
		x.frames, x.hello = append(x.frames, core.Frame{}), append(x.hello, x.base(e)+uint64(inc))
		x.byText[key] = id
	}
	return id
}

func (x *groups) run(e int, n *groupNode, t *groupStep, in ...core.Event) {
	var out core.Effects
	n.m.Step(1, in, &out)
	x.effects(e, n, t, &out)
}

func (x *groups) effects(e int, n *groupNode, t *groupStep, out *core.Effects) {
	for i := range out.Frames {
		f := &out.Frames[i].Frame
		if f.Kind == core.FrameQueued || f.Kind == core.FrameProgress {
			continue // they decide nothing
		}
		key := fmt.Sprintf("%+v", *f)
		id, ok := x.byText[key]
		if !ok {
			id = uint32(len(x.frames))
			x.frames, x.hello = append(x.frames, f.Clone()), append(x.hello, 0)
			x.byText[key] = id
		}
		t.frames = append(t.frames, sent{uint8(out.Frames[i].Peer), id})
	}
	for i := range out.Plugin {
		switch p := &out.Plugin[i]; p.Kind {
		case core.PluginSubmit:
			n.ops[p.Peer] = p.Op
			t.submits = append(t.submits, uint8(p.Peer))
		case core.PluginFencePeer:
			n.cut[p.Peer] = p.Grant
		}
	}
	for i := range out.Words {
		n.word = out.Words[i].Residency.Reusable()
	}
	n.m.Rooms(func(v *core.View) bool {
		old := n.rec
		n.rec = groupRecord{state: v.State, reason: v.Reason, reusable: v.Residency.Reusable(), quarant: v.Residency == statemachine.Quarantined}
		if v.Peer >= 0 {
			n.rec.pairs[v.Peer] = v.Pair
		}
		for _, p := range v.Pairs {
			if p.Peer >= 0 && !p.Sibling {
				n.rec.pairs[p.Peer] = p.Other
			} else if p.Peer >= 0 && p.Sibling && !p.Other.IsZero() {
				n.rec.pairs[p.Peer] = p.Other
			}
		}
		switch {
		case v.State.Live() && v.Clock == "":
			t.violated = "R5: " + v.Why()
		case old.state == statemachine.Ended && (v.State != statemachine.Ended || v.Reason != old.reason):
			t.violated = fmt.Sprintf("G1: %s was %s, is %s", x.name(e), old.reason, v.Reason)
		}
		return true
	})
}

// step is what an event does to a state of an engine, from memory where it has happened before.
func (x *groups) step(e int, id uint32, ev groupEvent) *groupStep {
	g := x.engines[e]
	key := struct {
		node uint32
		ev   groupEvent
	}{id, ev}
	if t := g.memo[key]; t != nil {
		return t
	}
	t := &groupStep{}
	g.memo[key] = t
	n := g.nodes[id]
	n.m = n.m.Clone()
	var out core.Effects
	peer := core.PeerID(ev.peer)
	each := func(in core.Event) {
		for i := range x.ranks(e) {
			in.Session = core.SessionID(i) + 1
			x.run(e, &n, t, in)
		}
	}
	switch ev.kind {
	case evOpen:
		in := core.Event{Kind: core.Open, Room: 1, Att: 1, PeerGroup: destinationGroup}
		if !x.source(e) {
			in.PeerGroup = sourceGroup
		}
		each(in)
	case evRegister:
		in := core.Event{Kind: core.Register}
		if x.Ops {
			in.Parts = pages(1, 0, 1)
		}
		each(in)
	case evSend:
		in := core.Event{Kind: core.Send, Last: true, LayerTo: layers}
		if x.Ops {
			in.Parts = pages(1, 0, 1)
		}
		each(in)
	case evAbort:
		each(core.Event{Kind: core.Abort})
	case evFrame:
		x.run(e, &n, t, core.Event{Kind: core.PeerFrame, Peer: peer, Frame: cloneFrame(&x.frames[ev.f])})
	case evHello:
		in := []core.Event{{Kind: core.PeerHello, Peer: peer, Node: x.name(int(peer)), Inc: x.hello[ev.f]}}
		for _, r := range x.ranks(int(peer)) {
			in = append(in, core.Event{Kind: core.PeerPool, Peer: peer, Pool: uint64(r) + 1, Pages: 2, Layers: layers, PageBytes: pageBytes})
		}
		x.run(e, &n, t, in...)
	case evLinkDown:
		x.run(e, &n, t, core.Event{Kind: core.PeerDown, Peer: peer})
	case evClock:
		if !n.m.Fire(statemachine.Opener{Inc: x.base(e) + uint64(ev.a), Seq: 1}, statemachine.Stalled, &out) {
			t.to = id
			return t
		}
		x.effects(e, &n, t, &out)
	case evOpEnd:
		in := core.Event{Kind: core.OpEnd, Op: n.ops[peer], End: core.EndDone, Quiet: ev.a != endDoneUnquiet, Bytes: pageBytes}
		if ev.a == endSkipped {
			in.End, in.Bytes = core.EndAborted, 0
		}
		x.run(e, &n, t, in)
	case evOpQuiesced:
		x.run(e, &n, t, core.Event{Kind: core.OpQuiesced, Op: n.ops[peer]})
	case evFenceAnswer:
		id := n.cut[peer]
		n.cut[peer] = 0
		x.run(e, &n, t, core.Event{Kind: core.Fenced, Grant: id, Quiet: ev.a == 1})
	}
	t.to = x.intern(e, n)
	return t
}

// apply carries an event out in a composed state.
func (x *groups) apply(st *groupState, e int, ev groupEvent) {
	t := x.step(e, st.node[e], ev)
	st.node[e] = t.to
	if t.violated != "" {
		x.bad = t.violated
	}
	for _, f := range t.frames {
		x.push(&st.queue[e][f.peer], f.frame)
	}
	for _, d := range t.submits {
		j := int(d) - x.Sources
		st.ops[e][j][st.inc[e]] = groupOp{state: opOpen, dInc: uint8(x.engines[e].nodes[t.to].rec.pairs[d].Inc - x.base(int(d)))}
	}
	x.observe(st, e)
}

func (x *groups) push(q *uint32, f uint32) {
	list := x.queues[*q]
	if slices.Contains(list, f) {
		return // it says the same as one that waits
	}
	if len(list) >= maxQueue {
		x.bad = "a queue overflows"
		return
	}
	*q = x.queueOf(append(slices.Clone(list), f))
}

func (x *groups) queueOf(list []uint32) uint32 {
	key := fmt.Sprint(list)
	if len(list) == 0 {
		return 0
	}
	id, ok := x.byQueue[key]
	if !ok {
		id = uint32(len(x.queues))
		x.queues = append(x.queues, list)
		x.byQueue[key] = id
	}
	return id
}

// observe notes how a record ended, and for whom the judge decided.
func (x *groups) observe(st *groupState, e int) {
	r := &x.engines[e].nodes[st.node[e]].rec
	if r.state != statemachine.Ended || st.end[e][st.inc[e]] != notEnded {
		return
	}
	end := &st.end[e][st.inc[e]]
	switch r.reason {
	case statemachine.Success:
		*end = endSuccess
	case statemachine.OutcomeUnknown:
		*end = endUnknown
	default:
		*end = endFailed
	}
	if e == x.Sources && *end == endSuccess {
		won := uint8(1)
		for o := range x.n {
			if o != e && !r.pairs[o].IsZero() {
				won |= uint8(r.pairs[o].Inc-x.base(o)) << (o + 1)
			}
			if o != e && r.pairs[o].IsZero() {
				x.bad = "G2: the judge is Success without " + x.name(o)
			}
		}
		st.won[st.inc[e]] = won
		for i := range x.Sources {
			for j := range x.Destinations {
				if op := st.ops[i][j][won>>(i+1)&1]; x.Ops && !op.done {
					x.bad = fmt.Sprintf("G4: the judge is Success, the op of %s to D%d is not Done", x.name(i), j+1)
				}
			}
		}
	}
}

func (x *groups) check(st *groupState) {
	judge := x.Sources
	for e := range x.n {
		for inc := range uint8(2) {
			decided := false
			for _, won := range st.won {
				decided = decided || won != 0 && e != judge && won>>(e+1)&1 == inc
			}
			switch end := st.end[e][inc]; {
			case e == judge:
			case end == endSuccess && !decided:
				x.bad = fmt.Sprintf("G2: %s is Success, the judge is not", x.name(e))
			case end == endFailed && decided:
				x.bad = fmt.Sprintf("G5: %s is Failed, the judge is Success", x.name(e))
			}
		}
	}
	for i := range x.Sources {
		for j := range x.Destinations {
			for inc := range uint8(2) {
				op := &st.ops[i][j][inc]
				d := x.Sources + j
				if op.mayLand() && op.dInc == st.inc[d] {
					if n := &x.engines[d].nodes[st.node[d]]; n.rec.state != statemachine.Absent && n.rec.reusable {
						x.bad = fmt.Sprintf("G3: the pages of %s are reusable, the write of %s may land", x.name(d), x.name(i))
					}
				}
				if op.mayRead() && inc == st.inc[i] {
					if n := &x.engines[i].nodes[st.node[i]]; n.rec.state != statemachine.Absent && n.word {
						x.bad = fmt.Sprintf("G3: the pages of %s are reusable, its op to %s may read them", x.name(i), x.name(d))
					}
				}
			}
		}
	}
}

func (o *groupOp) mayLand() bool {
	return !o.cut && (o.state == opOpen || o.state == opLinger || o.state == opDead)
}
func (o *groupOp) mayRead() bool { return o.state == opOpen || o.state == opLinger }

// moves calls try for everything that can happen in a state; must: it is no fault and nobody's choice.
func (x *groups) moves(st *groupState, try func(must bool, label func() string, f func(n *groupState))) {
	say := func(format string, args ...any) func() string {
		return func() string { return fmt.Sprintf(format, args...) }
	}
	spare := int(st.faults) < x.Faults
	fault := func(kind string) bool { return spare && strings.Contains(x.Kinds, kind) }
	for a := range x.n {
		for b := range x.n {
			list := x.queues[st.queue[a][b]]
			for i, f := range list {
				if k := x.frames[f].Kind; i > 0 && !(x.Overtake && (k == core.FrameAbort || k == core.FrameVerdict || k == core.FrameGroupVerdict || k == core.FrameGroupAbort)) {
					if x.hello[f] != 0 {
						break
					}
					continue
				}
				try(true, func() string { return fmt.Sprintf("%s gets %s of %s", x.name(b), x.text(f), x.name(a)) }, func(n *groupState) {
					n.queue[a][b] = x.queueOf(slices.Delete(slices.Clone(list), i, i+1))
					ev := groupEvent{kind: evFrame, peer: uint8(a), f: f}
					if x.hello[f] != 0 {
						ev.kind = evHello
					}
					x.apply(n, b, ev)
				})
				if x.hello[f] != 0 {
					break
				}
			}
		}
	}
	for e := range x.n {
		node := &x.engines[e].nodes[st.node[e]]
		r := &node.rec
		live := r.state.Live()
		switch {
		case st.opened[e] == 0:
			try(true, say("%s opens", x.name(e)), func(n *groupState) {
				n.opened[e] = 1
				x.apply(n, e, groupEvent{kind: evOpen})
			})
		case st.opened[e] == 1 && live:
			kind, word := evSend, "sends"
			if !x.source(e) {
				kind, word = evRegister, "registers"
			}
			try(true, say("%s %s", x.name(e), word), func(n *groupState) {
				n.opened[e] = 2
				x.apply(n, e, groupEvent{kind: kind})
			})
		}
		if live && !x.NoClocks || r.state == statemachine.Ended && !r.reusable && !r.quarant {
			try(!live, say("a clock of %s runs out", x.name(e)), func(n *groupState) { x.apply(n, e, groupEvent{kind: evClock, a: st.inc[e]}) })
		}
		if past := r.state == statemachine.Committed || r.state == statemachine.Voted; live && fault("a") && (past || x.NoClocks) {
			try(false, say("the worker of %s aborts", x.name(e)), func(n *groupState) {
				n.faults++
				x.apply(n, e, groupEvent{kind: evAbort})
			})
		}
		for p := range x.n {
			if node.cut[p] != 0 {
				try(true, say("%s fences %s", x.name(e), x.name(p)), func(n *groupState) {
					for inc := range n.ops[p][e-x.Sources] {
						if uint64(inc)+x.base(p) == r.pairs[p].Inc {
							n.ops[p][e-x.Sources][inc].cut = true
						}
					}
					x.apply(n, e, groupEvent{kind: evFenceAnswer, peer: uint8(p), a: 1})
				})
			}
		}
		if fault("r") && st.inc[e] == 0 {
			try(false, say("%s restarts", x.name(e)), func(n *groupState) {
				n.faults++
				x.restart(n, e)
			})
		}
	}
	for i := range x.Sources {
		for j := range x.Destinations {
			op, d := st.ops[i][j][st.inc[i]], x.Sources+j
			end := func(word string, a uint8, set func(*groupOp)) {
				try(true, say("the op of %s to %s %s", x.name(i), x.name(d), word), func(n *groupState) {
					set(&n.ops[i][j][n.inc[i]])
					x.apply(n, i, groupEvent{kind: evOpEnd, peer: uint8(d), a: a})
				})
			}
			switch op.state {
			case opOpen:
				if !op.cut && op.dInc == st.inc[d] {
					end("is Done", endDone, func(o *groupOp) { o.state, o.done = opQuiet, true })
					if fault("q") {
						try(false, say("the op of %s to %s is Done, quiet=no", x.name(i), x.name(d)), func(n *groupState) {
							n.faults++
							o := &n.ops[i][j][n.inc[i]]
							o.state, o.done = opLinger, true
							x.apply(n, i, groupEvent{kind: evOpEnd, peer: uint8(d), a: endDoneUnquiet})
						})
					}
				}
				if op.cut || op.dInc != st.inc[d] || x.engines[i].nodes[st.node[i]].rec.state == statemachine.Ended {
					end("is aborted", endSkipped, func(o *groupOp) { o.state = opQuiet })
				}
			case opLinger:
				try(true, say("the op of %s to %s is quiet", x.name(i), x.name(d)), func(n *groupState) {
					n.ops[i][j][n.inc[i]].state = opQuiet
					x.apply(n, i, groupEvent{kind: evOpQuiesced, peer: uint8(d)})
				})
			}
		}
	}
	for a := range x.n {
		for b := range a {
			if x.linked(a, b) && fault("b") {
				try(false, say("the link of %s and %s breaks", x.name(b), x.name(a)), func(n *groupState) {
					n.faults++
					x.breakLink(n, a, b)
				})
			}
		}
	}
}

// breakLink loses what is under way; both ends say Hello again.
func (x *groups) breakLink(n *groupState, a, b int) {
	for _, e := range [][2]int{{a, b}, {b, a}} {
		x.apply(n, e[0], groupEvent{kind: evLinkDown, peer: uint8(e[1])})
	}
	n.queue[a][b] = x.queueOf([]uint32{x.helloOf(a, n.inc[a])})
	n.queue[b][a] = x.queueOf([]uint32{x.helloOf(b, n.inc[b])})
}

func (x *groups) restart(n *groupState, e int) {
	n.inc[e], n.opened[e] = 1, 0
	id, err := x.start(e, 1)
	if err != nil {
		x.bad = err.Error()
	}
	n.node[e] = id
	if x.source(e) {
		for j := range x.Destinations {
			if o := &n.ops[e][j][0]; o.state == opOpen || o.state == opLinger {
				o.state = opDead // its orphan plugin goes on writing
			}
		}
	}
	for o := range x.n {
		if x.linked(e, o) {
			x.breakLink(n, e, o)
		}
	}
}

func (x *groups) text(f uint32) string {
	if x.hello[f] != 0 {
		return "Hello"
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
	return text
}

// search is breadth first.
func (x *groups) search(first groupState) *GroupResult {
	res := &GroupResult{}
	type parent struct {
		at, move uint32
	}
	seen := map[groupState]struct{}{first: {}}
	states, from := []groupState{first}, []parent{{}}
	story := func(at uint32) (out []string) {
		for at != 0 {
			p := from[at]
			st, i := states[p.at], uint32(0)
			x.moves(&st, func(_ bool, label func() string, _ func(*groupState)) {
				if i == p.move {
					out = append(out, label())
				}
				i++
			})
			at = p.at
		}
		slices.Reverse(out)
		return out
	}
	level := 1
	for at := 0; at < len(states); at++ {
		if at == level {
			res.Depth++
			level = len(states)
		}
		st := states[at]
		musts, i := 0, uint32(0)
		x.moves(&st, func(must bool, label func() string, f func(*groupState)) {
			i++
			if x.bad != "" {
				return
			}
			n := st
			f(&n)
			res.Edges++
			if n != st && must {
				musts++
			}
			if x.bad == "" {
				x.check(&n)
			}
			if x.bad != "" {
				res.Violation, res.Trace = x.bad, append(story(uint32(at)), label())
				return
			}
			if _, ok := seen[n]; !ok {
				seen[n] = struct{}{}
				states, from = append(states, n), append(from, parent{uint32(at), i - 1})
			}
		})
		if x.bad == "" && musts == 0 {
			if why := x.stuck(&st); why != "" {
				x.bad, res.Violation, res.Trace = why, why, story(uint32(at))
			}
		}
		if x.bad != "" || x.Limit > 0 && len(states) >= x.Limit {
			res.States = len(states)
			return res
		}
	}
	res.States, res.Complete = len(states), true
	return res
}

// stuck says what is wrong with a state in which nothing is left to happen but clocks and faults.
func (x *groups) stuck(st *groupState) string {
	for e := range x.n {
		r := &x.engines[e].nodes[st.node[e]].rec
		switch {
		case r.state.Live() && x.NoClocks && !strings.Contains(x.Kinds, "r"):
			return fmt.Sprintf("G6: %s is %s and nothing is left to happen", x.name(e), r.state)
		case r.state == statemachine.Ended && !r.reusable && !r.quarant:
			return fmt.Sprintf("G6: the pages of %s are never quiet", x.name(e))
		case x.NoClocks && st.faults == 0 && r.reason != statemachine.Success:
			return fmt.Sprintf("G7: %s ended %s without a fault", x.name(e), r.reason)
		}
	}
	return ""
}
