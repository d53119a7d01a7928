// Package coretest composes two cores, P (source engine) and D (destination engine), with a link, a
// plugin on each side and workers on each side, all in memory and driven one command at a time. The
// golden interaction tests, the random tests and the explorer use it.
//
// Beside what the engines believe it keeps the truth about every op: whether its bytes may still land.
// Check compares the two.
package coretest

import (
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// Backend is the name of the only backend.
const Backend = "tcp"

// OpState is the truth about an op.
type OpState uint8

// States of an op at a plugin.
const (
	OpOpen   OpState = iota // submitted
	OpLinger                // ended with quiet=no
	OpQuiet                 // nothing of it can land or be read any more
	OpDead                  // its writer process ended first: what is in kernel buffers may still land
	OpFenced                // as OpDead, and the writer's memory accesses are provably over
)

// Op is a submission that a plugin was given.
type Op struct {
	core.PluginEffect
	State OpState
	Done  bool // it ended Done: every byte of it is visible at the destination
	Cut   bool // the destination's plugin proved that nothing of it lands any more
}

// MayLand reports whether bytes of the op may still reach the destination's pages.
func (o *Op) MayLand() bool { return o.State != OpQuiet && !o.Cut }

// MayRead reports whether the op may still read the source's pages.
func (o *Op) MayRead() bool { return o.State != OpQuiet && o.State != OpFenced }

// SlotKey names a slot of a worker.
type SlotKey struct {
	Rank, Slot int32
}

// Engine is one core with its workers, the frames that wait for the other side and the ops that its
// plugin was given.
type Engine struct {
	Name      string
	M         *core.Machine
	Role      statemachine.Role
	Group     string
	Inc       uint64
	Epoch     uint32
	PluginUp  bool
	Old       []uint32     // older epochs that are up
	Ending    []uint32     // of those, the ones that the core wants ended
	Replacing uint32       // epoch that the core wants replaced; 0: none
	Out       []core.Frame // sent, not delivered
	Ops       []*Op        // by number, from 1
	Orphans   []*Op        // of incarnations that are gone
	Words     map[SlotKey]core.WordEffect
	Replies   []core.Reply
	Grants    []core.PluginEffect // asked, not answered
	Revokes   []core.PluginEffect
	Fences    []core.PluginEffect
	Sealed    map[statemachine.Opener]bool // destinations that the plugin refuses for good, or that were fenced

	sessions []core.SessionID // by rank; 0: the worker is gone
	epochs   []uint32         // that are gone and not proven gone
	minted   core.SessionID
	slots    map[roomRank]int32
	next     map[int32]int32
}

type roomRank struct {
	room int64
	rank int32
}

// Config is what New needs; the zero value of each field has a default.
type Config struct {
	Core      core.Config
	Ranks     int32 // of each group; default 1
	DRanks    int32 // of D's group; default Ranks
	Map       layout.Map
	State     bool  // each worker has a second pool, of kind state
	Pages     int32 // of each pool; default 64
	PageBytes int64 // default 1024
	Layers    int32 // default 2
	Plain     bool  // plugins do not check the receiver: no grants
	Manual    bool  // plugins answer grants only when told
	NoGroups  bool  // the engines do not know each other's groups yet
}

// Env is the two engines and core time.
type Env struct {
	Config
	P, D      *Engine
	Now       time.Duration
	Connected bool
	// OnStep, if set, sees every batch before an engine steps over it.
	OnStep func(g *Engine, in []core.Event)
	// OnEffects, if set, sees what it asks for then.
	OnEffects func(g *Engine, out *core.Effects)
	verdicts  map[statemachine.Opener]verdict
	seq       uint64
	log       io.Writer
}

// New returns two engines that have said Hello to each other, each with the workers of one group.
func New(cfg Config, log io.Writer) (*Env, error) {
	e := &Env{Config: cfg, log: log, Now: time.Second}
	if e.log == nil {
		e.log = io.Discard
	}
	e.Ranks, e.Pages, e.Layers = max(e.Ranks, 1), max(e.Pages, 1), max(e.Layers, 1)
	if cfg.DRanks == 0 {
		e.DRanks = e.Ranks
	}
	if cfg.Pages == 0 {
		e.Pages = 64
	}
	if cfg.PageBytes == 0 {
		e.PageBytes = 1024
	}
	if cfg.Layers == 0 {
		e.Layers = 2
	}
	e.P = &Engine{Name: "P", Role: statemachine.Source, Group: "prefill", Inc: 10}
	e.D = &Engine{Name: "D", Role: statemachine.Destination, Group: "decode", Inc: 20}
	for _, g := range e.Engines() {
		if err := e.start(g); err != nil {
			return nil, err
		}
	}
	e.Connect()
	return e, nil
}

// Engines are P and D.
func (e *Env) Engines() []*Engine { return []*Engine{e.P, e.D} }

// Other is the engine at the other end of the link.
func (e *Env) Other(g *Engine) *Engine {
	if g == e.P {
		return e.D
	}
	return e.P
}

// start gives an engine a fresh core, plugin epoch and worker sessions.
func (e *Env) start(g *Engine) error {
	cfg := e.Core
	cfg.Incarnation = g.Inc
	m, err := core.New(cfg)
	if err != nil {
		return err
	}
	g.Orphans = append(g.Orphans, g.Ops...) // the orphan plugin goes on with them until it notices
	g.M, g.Out, g.Ops, g.Replies = m, nil, nil, nil
	g.Grants, g.Revokes, g.Fences, g.epochs = nil, nil, nil, nil
	g.PluginUp, g.Old, g.Ending, g.Replacing = false, nil, nil, 0
	g.Words, g.slots, g.next = map[SlotKey]core.WordEffect{}, map[roomRank]int32{}, map[int32]int32{}
	g.Sealed = map[statemachine.Opener]bool{}
	e.StartPlugin(g)
	g.sessions = make([]core.SessionID, e.Size(g))
	for rank := range e.Size(g) {
		e.StartWorker(g, rank)
	}
	return nil
}

// StartPlugin starts the next plugin epoch of an engine.
func (e *Env) StartPlugin(g *Engine) {
	if g.PluginUp { // it goes on beside
		g.Old = append(g.Old, g.Epoch)
	}
	g.Replacing = 0
	g.Epoch++
	g.PluginUp = true
	e.Step(g, core.Event{Kind: core.PluginUp, Backend: Backend, Epoch: g.Epoch, ReceiverChecked: !e.Plain})
}

// KillPlugin ends the engine's newest plugin epoch. What it was given and did not end may still land.
func (e *Env) KillPlugin(g *Engine) { e.KillEpoch(g, g.Epoch) }

// KillEpoch is KillPlugin for any epoch that is up. It reports whether it was.
func (e *Env) KillEpoch(g *Engine, epoch uint32) bool {
	g.Ending = slices.DeleteFunc(g.Ending, func(n uint32) bool { return n == epoch })
	if i := slices.Index(g.Old, epoch); i >= 0 {
		g.Old = slices.Delete(g.Old, i, i+1)
	} else if g.PluginUp && epoch == g.Epoch {
		g.PluginUp, g.Replacing = false, 0
	} else {
		return false
	}
	g.epochs = append(g.epochs, epoch)
	other := func(p core.PluginEffect) bool { return p.Epoch == epoch }
	g.Grants, g.Revokes, g.Fences = slices.DeleteFunc(g.Grants, other), slices.DeleteFunc(g.Revokes, other), slices.DeleteFunc(g.Fences, other)
	for _, o := range g.Ops {
		if o.Epoch == epoch && o.State != OpQuiet && o.State != OpFenced {
			o.State = OpDead
		}
	}
	e.Step(g, core.Event{Kind: core.PluginLost, Backend: Backend, Epoch: epoch, Detail: "exit status 137"})
	return true
}

// KeepPlugin says that the epoch which the core wants replaced could not be. It reports whether there was one.
func (e *Env) KeepPlugin(g *Engine) bool {
	epoch := g.Replacing
	if g.Replacing = 0; epoch == 0 {
		return false
	}
	e.Step(g, core.Event{Kind: core.PluginKept, Backend: Backend, Epoch: epoch, Detail: "no handshake within 15s"})
	return true
}

// FencePlugin proves the oldest epoch that ended gone: it neither reads nor writes any more. It reports
// whether there was one.
func (e *Env) FencePlugin(g *Engine) bool {
	if len(g.epochs) == 0 {
		return false
	}
	epoch := g.epochs[0]
	g.epochs = g.epochs[1:]
	for _, o := range g.Ops {
		if o.Epoch == epoch && o.State == OpDead {
			o.State = OpFenced
		}
	}
	if g == e.D { // the pages that were registered with it cannot be written any more
		g.M.Rooms(func(v *core.View) bool {
			if v.Epoch == epoch && v.Backend == Backend {
				g.Sealed[v.Own] = true
			}
			return true
		})
	}
	e.Step(g, core.Event{Kind: core.PluginFenced, Backend: Backend, Epoch: epoch})
	return true
}

// StartWorker connects the worker of a rank.
func (e *Env) StartWorker(g *Engine, rank int32) {
	g.minted++
	g.sessions[rank] = g.minted
	g.next[rank] = 0
	e.Step(g,
		core.Event{Kind: core.SessionUp, Session: g.minted, Group: g.Group, Role: g.Role, Rank: rank, Size: e.Size(g), Slots: 1024},
		core.Event{Kind: core.PoolUp, Session: g.minted, Pool: uint64(rank) + 1, Pages: e.Pages, Layers: e.Layers, PageBytes: e.PageBytes})
	if e.State {
		e.Step(g, core.Event{Kind: core.PoolUp, Session: g.minted, Ordinal: 1, Pool: statePool + uint64(rank) + 1, Pages: e.Pages, Layers: e.Layers, PageBytes: e.PageBytes, State: true})
	}
}

// statePool is added to the id of a rank's first pool, its rank plus one, for that of its pool of state.
const statePool = 1000

// Size is how many ranks the group of an engine has.
func (e *Env) Size(g *Engine) int32 {
	if g == e.D {
		return e.DRanks
	}
	return e.Ranks
}

// KillWorker ends the worker of a rank.
func (e *Env) KillWorker(g *Engine, rank int32) {
	id := g.sessions[rank]
	g.sessions[rank] = 0
	for k := range g.Words {
		if k.Rank == rank {
			delete(g.Words, k)
		}
	}
	for k := range g.slots {
		if k.rank == rank {
			delete(g.slots, k)
		}
	}
	e.Step(g, core.Event{Kind: core.SessionDown, Session: id})
}

// Alive reports whether a rank's worker is connected.
func (g *Engine) Alive(rank int32) bool { return g.sessions[rank] != 0 }

// Restart kills an engine and starts its next incarnation. The link is down until Connect.
func (e *Env) Restart(g *Engine) error {
	e.Disconnect()
	g.Inc++
	return e.start(g)
}

// Disconnect breaks the link: frames that were not delivered are lost.
func (e *Env) Disconnect() {
	e.Connected = false
	for _, g := range e.Engines() {
		g.Out = nil
		e.Step(g, core.Event{Kind: core.PeerDown, Peer: 0})
	}
	e.P.Out, e.D.Out = nil, nil
}

// Connect exchanges Hellos and what follows them: pools and groups.
func (e *Env) Connect() {
	e.Connected = true
	for _, g := range e.Engines() {
		o := e.Other(g)
		in := []core.Event{{Kind: core.PeerHello, Peer: 0, Node: o.Name, Inc: o.Inc}}
		for rank := range e.Size(o) {
			in = append(in, core.Event{Kind: core.PeerPool, Peer: 0, Pool: uint64(rank) + 1, Pages: e.Pages, Layers: e.Layers, PageBytes: e.PageBytes})
			if e.State {
				in = append(in, core.Event{Kind: core.PeerPool, Peer: 0, Pool: statePool + uint64(rank) + 1, Pages: e.Pages, Layers: e.Layers, PageBytes: e.PageBytes, State: true})
			}
		}
		if !e.NoGroups {
			in = append(in, e.group(g))
		}
		e.Step(g, in...)
	}
}

// group is the event by which an engine learns the group of the other.
func (e *Env) group(g *Engine) core.Event {
	o := e.Other(g)
	return core.Event{Kind: core.PeerGroup, Peer: 0, Group: o.Group, PeerGroup: g.Group, Role: o.Role, Size: e.Size(o), Map: e.Map, Backends: []string{Backend}}
}

// Announce tells an engine the group of the other, or, with a reason, that the pair is refused.
func (e *Env) Announce(g *Engine, why statemachine.Reason, detail string) {
	ev := e.group(g)
	if why != statemachine.None {
		ev.Reason, ev.Detail, ev.Backends = why, detail, nil
	}
	e.Step(g, ev)
}

// Step steps one engine and prints its effects.
func (e *Env) Step(g *Engine, in ...core.Event) {
	var out core.Effects
	if e.OnStep != nil {
		e.OnStep(g, in)
	}
	g.M.Step(int64(e.Now), in, &out)
	if e.OnEffects != nil {
		e.OnEffects(g, &out)
	}
	var answers []core.Event
	for _, r := range out.Replies {
		g.Replies = append(g.Replies, r)
		if r.Code != core.OK && r.Code != core.Freed {
			e.printf("%s reply: %s %s%s", g.Name, code(r.Code), reasonOf(r.Reason), r.Detail)
		}
	}
	for _, a := range out.Auxes {
		e.printf("%s: aux %q", e.who(g, a.Session, a.Slot), a.Aux)
	}
	for _, w := range out.Words {
		if rank := g.rank(w.Session); rank >= 0 {
			g.Words[SlotKey{rank, w.Slot}] = w
		}
		why := ""
		if w.Status.Terminal() {
			why = " (" + w.Reason.String() + ")"
		}
		e.printf("%s: %s%s, pages %s", e.who(g, w.Session, w.Slot), w.Status, why, w.Residency)
	}
	for _, f := range out.Frames {
		g.Out = append(g.Out, f.Frame.Clone()) // the effects are reused
		e.printf("%s sends %s", g.Name, e.Frame(&f.Frame))
	}
	for _, p := range out.Plugin {
		answers = append(answers, e.plugin(g, p)...)
	}
	for _, s := range out.Gone {
		e.printf("%s session %d: memory is free", g.Name, s)
	}
	if out.Drained {
		e.printf("%s drained", g.Name)
	}
	if len(answers) > 0 {
		e.Step(g, answers...)
	}
}

// plugin gives a request to the engine's plugin and returns what it answers at once.
func (e *Env) plugin(g *Engine, p core.PluginEffect) []core.Event {
	if !(p.Epoch == g.Epoch && g.PluginUp || slices.Contains(g.Old, p.Epoch)) {
		return nil // the host drops what is for an epoch that is gone
	}
	epoch := ""
	if len(g.Old) > 0 {
		epoch = fmt.Sprintf(" of epoch %d", p.Epoch)
	}
	switch p.Kind {
	case core.PluginSubmit:
		p.Source, p.Destination = slices.Clone(p.Source), slices.Clone(p.Destination)
		g.Ops = append(g.Ops, &Op{PluginEffect: p})
		layers := ""
		if p.LayerFrom != 0 || p.LayerTo != e.Layers {
			layers = fmt.Sprintf(", layers %d-%d", p.LayerFrom, p.LayerTo-1)
		}
		to := ""
		if !e.Map.IsZero() {
			to = fmt.Sprintf(" (rank %d to %d, phase %d)", p.SrcRank, p.DstRank, p.Phase)
		}
		e.printf("%s submits op %d%s: %s -> %s%s%s, %d bytes", g.Name, len(g.Ops), epoch, pages(p.Source), pages(p.Destination), to, layers, p.Bytes)
	case core.PluginAbort:
		e.printf("%s aborts op %d", g.Name, e.OpNumber(g, p.Op))
	case core.PluginGrant:
		if !e.Manual {
			return []core.Event{{Kind: core.Granted, Grant: p.Grant}}
		}
		e.printf("%s asks its plugin to grant the pages", g.Name)
		g.Grants = append(g.Grants, p)
	case core.PluginRevoke:
		if !e.Manual {
			g.Sealed[p.D] = true
			return []core.Event{{Kind: core.Revoked, Grant: p.Grant, Quiet: true}}
		}
		e.printf("%s asks its plugin to revoke the grant", g.Name)
		g.Revokes = append(g.Revokes, p)
	case core.PluginFencePeer:
		e.printf("%s asks its plugin to fence %s", g.Name, e.Other(g).Name)
		g.Fences = append(g.Fences, p)
	case core.PluginReplace:
		e.printf("%s wants epoch %d of its plugin replaced", g.Name, p.Epoch)
		g.Replacing = p.Epoch
	case core.PluginEnd:
		e.printf("%s wants epoch %d of its plugin ended", g.Name, p.Epoch)
		g.Ending = append(g.Ending, p.Epoch)
	}
	return nil
}

// rank of a session; -1 when its worker is gone.
func (g *Engine) rank(id core.SessionID) int32 { return int32(slices.Index(g.sessions, id)) }

func (e *Env) who(g *Engine, id core.SessionID, slot int32) string {
	if e.Size(g) == 1 {
		return fmt.Sprintf("%s slot %d", g.Name, slot)
	}
	return fmt.Sprintf("%s rank %d slot %d", g.Name, g.rank(id), slot)
}

func (e *Env) printf(format string, args ...any) { fmt.Fprintf(e.log, format+"\n", args...) }

// OpNumber is a small stable number for an op in golden output: its position among those submitted.
func (e *Env) OpNumber(g *Engine, id core.OpID) int {
	for i := range g.Ops {
		if g.Ops[i].Op == id {
			return i + 1
		}
	}
	return 0
}

// Deliver hands the oldest waiting frame of an engine to the other, or, if kind is not zero, the
// oldest of that kind, which overtakes the others. It reports whether there was one.
func (e *Env) Deliver(from *Engine, kind core.FrameKind) bool {
	i := 0
	if kind != 0 {
		i = slices.IndexFunc(from.Out, func(f core.Frame) bool { return f.Kind == kind })
	}
	if i < 0 || i >= len(from.Out) {
		return false
	}
	f := from.Out[i]
	from.Out = slices.Delete(from.Out, i, i+1)
	e.Step(e.Other(from), core.Event{Kind: core.PeerFrame, Peer: 0, Frame: f})
	return true
}

// Settle delivers frames until none waits.
func (e *Env) Settle() {
	for i := 0; i < 10_000 && (e.Deliver(e.P, 0) || e.Deliver(e.D, 0)); i++ {
	}
}

// Open opens a room for a rank and remembers its slot under the room's number.
func (e *Env) Open(g *Engine, rank int32, ev core.Event) {
	e.seq++
	ev.Kind, ev.Session, ev.Seq, ev.Slot = core.Open, g.sessions[rank], e.seq, g.next[rank]
	if g.Role == statemachine.Destination && ev.PeerGroup == "" {
		ev.PeerGroup = e.P.Group
	}
	n := len(g.Replies)
	e.Step(g, ev)
	if g.Replies[n].Code == core.OK {
		g.slots[roomRank{ev.Room, rank}] = ev.Slot
		g.next[rank]++
	}
}

// Slot is the slot of the newest open of a room by a rank; -1 when there was none.
func (g *Engine) Slot(room int64, rank int32) int32 {
	if s, ok := g.slots[roomRank{room, rank}]; ok {
		return s
	}
	return -1
}

// Request sends a worker's request for the newest open of a room.
func (e *Env) Request(g *Engine, rank int32, kind core.EventKind, room int64, set func(*core.Event)) {
	e.seq++
	ev := core.Event{Kind: kind, Session: g.sessions[rank], Seq: e.seq, Slot: g.Slot(room, rank)}
	if set != nil {
		set(&ev)
	}
	e.Step(g, ev)
	if r := g.Replies[len(g.Replies)-1]; r.Code == core.Freed {
		delete(g.Words, SlotKey{rank, ev.Slot})
	}
}

// EndOp ends an op that an engine's plugin got. It reports whether the plugin still had it.
func (e *Env) EndOp(g *Engine, n int, end core.EndKind, quiet bool, why statemachine.Reason) bool {
	if n < 1 || n > len(g.Ops) || g.Ops[n-1].State != OpOpen {
		return false
	}
	op := g.Ops[n-1]
	op.State = OpLinger
	if quiet {
		op.State = OpQuiet
	}
	ev := core.Event{Kind: core.OpEnd, Op: op.Op, End: end, Quiet: quiet, Reason: why}
	if end == core.EndDone {
		ev.Bytes, op.Done = op.Bytes, true
	}
	e.Step(g, ev)
	return true
}

// Quiesce says that nothing of an op that ended with quiet=no can land any more.
func (e *Env) Quiesce(g *Engine, n int) bool {
	if n < 1 || n > len(g.Ops) || g.Ops[n-1].State != OpLinger {
		return false
	}
	g.Ops[n-1].State = OpQuiet
	e.Step(g, core.Event{Kind: core.OpQuiesced, Op: g.Ops[n-1].Op})
	return true
}

// AnswerFence answers the oldest FencePeer. Quiet: the writers that had an op of that source are cut.
func (e *Env) AnswerFence(g *Engine, quiet bool) bool {
	if len(g.Fences) == 0 {
		return false
	}
	f := g.Fences[0]
	g.Fences = g.Fences[1:]
	if quiet {
		o := e.Other(g)
		for _, op := range append(slices.Clone(o.Orphans), o.Ops...) {
			if op.S == f.S && op.D == f.D {
				op.Cut = true
			}
		}
	}
	e.Step(g, core.Event{Kind: core.Fenced, Grant: f.Grant, Quiet: quiet})
	return true
}

// AnswerGrant answers the oldest Grant.
func (e *Env) AnswerGrant(g *Engine, ok bool) bool {
	if len(g.Grants) == 0 {
		return false
	}
	p := g.Grants[0]
	g.Grants = g.Grants[1:]
	ev := core.Event{Kind: core.Granted, Grant: p.Grant}
	if !ok {
		ev.Kind, ev.Detail = core.GrantFailed, "no memory"
	}
	e.Step(g, ev)
	return true
}

// AnswerRevoke answers the oldest Revoke. Quiet: the plugin refuses that destination for good.
func (e *Env) AnswerRevoke(g *Engine, quiet bool) bool {
	if len(g.Revokes) == 0 {
		return false
	}
	r := g.Revokes[0]
	g.Revokes = g.Revokes[1:]
	if quiet {
		g.Sealed[r.D] = true
	}
	e.Step(g, core.Event{Kind: core.Revoked, Grant: r.Grant, Quiet: quiet})
	return true
}

// Pages is a run of pages for a request.
func Pages(start, count int32) []core.Part {
	if count == 0 {
		return nil
	}
	return []core.Part{{Runs: []layout.Run{{Start: start, Count: count, Stride: 1}}}}
}

// Parts is a list of page ids for a request.
func Parts(ids []int32) []core.Part {
	return []core.Part{{Runs: layout.AppendIDs(nil, ids)}}
}
