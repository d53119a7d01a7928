// Package coretest composes two cores, P (source engine) and D (destination engine), with a link, a
// plugin on each side and a worker on each side, all in memory and driven one command at a time. The
// golden interaction tests and the explorer use it.
package coretest

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// Engine is one core with its worker session, the frames that wait for the other side and the ops that
// its plugin holds.
type Engine struct {
	Name    string
	M       *core.Machine
	Role    statemachine.Role
	Group   string
	Inc     uint64
	Epoch   uint32
	Session core.SessionID
	Out     []core.Frame        // sent, not delivered
	Ops     []core.PluginEffect // submitted, not ended
	Words   map[int32]core.WordEffect
	Replies []core.Reply
	slots   map[string]int32 // slot of the newest open, by room
	grant   []core.GrantID   // asked, not answered
	next    int32
}

// Env is the two engines and core time.
type Env struct {
	P, D  *Engine
	Now   time.Duration
	Auto  bool // plugins grant at once
	Pages int32
	seq   uint64
	log   io.Writer
	cfg   core.Config
}

// New returns two engines that have said Hello to each other, each with a worker of one rank.
func New(cfg core.Config, log io.Writer) (*Env, error) {
	e := &Env{log: log, cfg: cfg, Pages: 64, Now: time.Second}
	if e.log == nil {
		e.log = io.Discard
	}
	e.P = &Engine{Name: "P", Role: statemachine.Source, Group: "prefill", Inc: 10}
	e.D = &Engine{Name: "D", Role: statemachine.Destination, Group: "decode", Inc: 20}
	for _, g := range []*Engine{e.P, e.D} {
		if err := e.start(g); err != nil {
			return nil, err
		}
	}
	e.Connect()
	return e, nil
}

// Other is the engine at the other end of the link.
func (e *Env) Other(g *Engine) *Engine {
	if g == e.P {
		return e.D
	}
	return e.P
}

// start gives an engine a fresh core, plugin epoch and worker session.
func (e *Env) start(g *Engine) error {
	cfg := e.cfg
	cfg.Incarnation = g.Inc
	m, err := core.New(cfg)
	if err != nil {
		return err
	}
	g.M, g.Out, g.Ops = m, nil, nil
	g.Words, g.slots = map[int32]core.WordEffect{}, map[string]int32{}
	g.Epoch++
	g.Session++
	g.next = 0
	e.Step(g,
		core.Event{Kind: core.PluginUp, Backend: "tcp", Epoch: g.Epoch, ReceiverChecked: true},
		core.Event{Kind: core.SessionUp, Session: g.Session, Group: g.Group, Role: g.Role, Size: 1, Slots: 64},
		core.Event{Kind: core.PoolUp, Session: g.Session, Pool: 1, Pages: e.Pages, Layers: 2, PageBytes: 1024})
	return nil
}

// Restart kills an engine and starts its next incarnation. The link is down until Connect.
func (e *Env) Restart(g *Engine) error {
	e.Disconnect()
	g.Inc++
	return e.start(g)
}

// Disconnect breaks the link: frames that were not delivered are lost.
func (e *Env) Disconnect() {
	for _, g := range []*Engine{e.P, e.D} {
		g.Out = nil
		e.Step(g, core.Event{Kind: core.PeerDown, Peer: 0})
	}
}

// Connect exchanges Hellos and what follows them: groups and pools.
func (e *Env) Connect() {
	for _, g := range []*Engine{e.P, e.D} {
		o := e.Other(g)
		e.Step(g,
			core.Event{Kind: core.PeerHello, Peer: 0, Node: o.Name, Inc: o.Inc},
			core.Event{Kind: core.PeerPool, Peer: 0, Pool: 1, Pages: e.Pages, Layers: 2, PageBytes: 1024},
			core.Event{Kind: core.PeerGroup, Peer: 0, Group: o.Group, PeerGroup: g.Group, Role: o.Role, Size: 1, Backends: []string{"tcp"}})
	}
}

// Step steps one engine and prints its effects.
func (e *Env) Step(g *Engine, in ...core.Event) {
	var out core.Effects
	g.M.Step(int64(e.Now), in, &out)
	for _, r := range out.Replies {
		g.Replies = append(g.Replies, r)
		if r.Code != core.OK && r.Code != core.Freed {
			e.printf("%s reply: %s %s%s", g.Name, code(r.Code), reasonOf(r.Reason), r.Detail)
		}
	}
	for _, w := range out.Words {
		g.Words[w.Slot] = w
		why := ""
		if w.Status.Terminal() {
			why = " (" + w.Reason.String() + ")"
		}
		e.printf("%s slot %d: %s%s, pages %s", g.Name, w.Slot, w.Status, why, w.Residency)
	}
	for _, a := range out.Auxes {
		e.printf("%s slot %d: aux %q", g.Name, a.Slot, a.Aux)
	}
	for _, f := range out.Frames {
		g.Out = append(g.Out, f.Frame)
		e.printf("%s sends %s", g.Name, e.Frame(&f.Frame))
	}
	for _, p := range out.Plugin {
		switch p.Kind {
		case core.PluginSubmit:
			p.Source, p.Destination = slices.Clone(p.Source), slices.Clone(p.Destination)
			g.Ops = append(g.Ops, p)
			e.printf("%s submits op %d: %v -> %v, %d bytes", g.Name, e.OpNumber(g, p.Op), pages(p.Source), pages(p.Destination), p.Bytes)
		case core.PluginAbort:
			e.printf("%s aborts op %d", g.Name, e.OpNumber(g, p.Op))
		case core.PluginGrant:
			if e.Auto {
				e.Step(g, core.Event{Kind: core.Granted, Grant: p.Grant})
			} else {
				e.printf("%s asks its plugin to grant the pages", g.Name)
				g.grant = append(g.grant, p.Grant)
			}
		case core.PluginRevoke:
			if e.Auto {
				e.Step(g, core.Event{Kind: core.Revoked, Grant: p.Grant, Quiet: true})
			} else {
				e.printf("%s revokes the grant", g.Name)
			}
		case core.PluginFencePeer:
			e.printf("%s asks its plugin to fence %s", g.Name, e.Other(g).Name)
		}
	}
	for _, s := range out.Gone {
		e.printf("%s session %d: memory is free", g.Name, s)
	}
	if out.Drained {
		e.printf("%s drained", g.Name)
	}
}

func (e *Env) printf(format string, args ...any) { fmt.Fprintf(e.log, format+"\n", args...) }

// OpNumber is a small stable number for an op in golden output: its position among those submitted.
func (e *Env) OpNumber(g *Engine, id core.OpID) int {
	for i := range g.Ops {
		if g.Ops[i].Op == id {
			return i + 1
		}
	}
	return len(g.Ops) + 1
}

// Opener prints an opener as its engine's letter, incarnation and sequence.
func (e *Env) Opener(o statemachine.Opener) string {
	if o.IsZero() {
		return "0"
	}
	l := "s"
	if o.Inc >= 20 {
		l = "d"
	}
	return fmt.Sprintf("%s%d.%d", l, o.Inc, o.Seq)
}

// Frame prints a frame as the protocol writes it.
func (e *Env) Frame(f *core.Frame) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s(room %d, s=%s, d=%s", f.Kind, f.Room, e.Opener(f.S), e.Opener(f.D))
	switch f.Kind {
	case core.FrameVerdict:
		fmt.Fprintf(&b, ", %s", [...]string{"", "success", "failed", "unknown"}[f.Outcome])
		if f.Outcome == core.OutcomeFailed {
			fmt.Fprintf(&b, " %s", f.Reason)
		}
	case core.FrameAbort:
		fmt.Fprintf(&b, ", %s", f.Reason)
	case core.FrameRankEnd:
		fmt.Fprintf(&b, ", quiet=%v", f.Quiet)
		for _, s := range f.Sent {
			for _, p := range s.Parts {
				fmt.Fprintf(&b, ", %d pages", p.Pages)
			}
		}
	case core.FrameProgress:
		fmt.Fprintf(&b, ", %d bytes, outstanding=%v", f.Bytes, f.Outstanding)
	case core.FrameBound:
		if f.NeedPages {
			b.WriteString(", need pages")
		}
	case core.FrameRegister, core.FrameConfirm:
		for _, r := range f.Ranks {
			for _, p := range r.Parts {
				fmt.Fprintf(&b, ", pages %v", pages(p.Runs))
			}
		}
	}
	b.WriteString(")")
	return b.String()
}

// Deliver hands the oldest waiting frame of an engine to the other; false when there is none.
func (e *Env) Deliver(from *Engine) bool {
	if len(from.Out) == 0 {
		return false
	}
	f := from.Out[0]
	from.Out = from.Out[1:]
	e.Step(e.Other(from), core.Event{Kind: core.PeerFrame, Peer: 0, Frame: f})
	return true
}

// Settle delivers frames until none waits.
func (e *Env) Settle() {
	for i := 0; i < 10_000 && (e.Deliver(e.P) || e.Deliver(e.D)); i++ {
	}
}

// Open opens a room and remembers its slot under the room's number.
func (e *Env) Open(g *Engine, room int64, att uint64, deadline time.Duration) {
	e.seq++
	slot := g.next
	g.next++
	peerGroup := ""
	if g.Role == statemachine.Destination {
		peerGroup = e.P.Group
	}
	n := len(g.Replies)
	e.Step(g, core.Event{Kind: core.Open, Session: g.Session, Seq: e.seq, Slot: slot, Room: room, Att: att, PeerGroup: peerGroup, Deadline: int64(deadline)})
	if g.Replies[n].Code == core.OK {
		g.slots[fmt.Sprint(room)] = slot
	}
}

// Slot is the slot of the newest open of a room; -1 when there was none.
func (g *Engine) Slot(room int64) int32 {
	if s, ok := g.slots[fmt.Sprint(room)]; ok {
		return s
	}
	return -1
}

// Request sends a worker's request for the newest open of a room.
func (e *Env) Request(g *Engine, kind core.EventKind, room int64, set func(*core.Event)) {
	e.seq++
	ev := core.Event{Kind: kind, Session: g.Session, Seq: e.seq, Slot: g.Slot(room)}
	if set != nil {
		set(&ev)
	}
	e.Step(g, ev)
}

// EndOp ends the n-th op that an engine's plugin got (from 1).
func (e *Env) EndOp(g *Engine, n int, end core.EndKind, quiet bool) {
	op := g.Ops[n-1]
	ev := core.Event{Kind: core.OpEnd, Op: op.Op, End: end, Quiet: quiet}
	if end == core.EndDone {
		ev.Bytes = op.Bytes
	}
	e.Step(g, ev)
}

// Pages is a run of pages for a request.
func Pages(start, count int32) []core.Part {
	if count == 0 {
		return nil
	}
	return []core.Part{{Runs: []layout.Run{{Start: start, Count: count, Stride: 1}}}}
}

func pages(runs []layout.Run) string {
	var b strings.Builder
	for i, r := range runs {
		if i > 0 {
			b.WriteByte(',')
		}
		if r.Count == 1 {
			fmt.Fprintf(&b, "%d", r.Start)
		} else {
			fmt.Fprintf(&b, "%d-%d", r.Start, r.Start+(r.Count-1)*r.Stride)
		}
	}
	return b.String()
}

func code(c core.ReplyCode) string {
	return [...]string{"", "ok", "ended", "refused", "freed"}[c]
}

func reasonOf(r statemachine.Reason) string {
	if r == statemachine.None {
		return ""
	}
	return r.String() + " "
}
