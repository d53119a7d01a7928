package coretest

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// Span is two groups whose ranks sit on several engines each: P1, P2, … of the source group and D1, D2, …
// of the destination group, linked as docs/protocol.md says: every P with every D, and every D with every D.
// One room is enough to show what a group does; its number is 1.
type Span struct {
	Core    core.Config
	Map     layout.Map
	Engines []*Member
	Now     time.Duration

	log      io.Writer
	verdicts map[statemachine.Opener]statemachine.Reason
	won      []core.View // records of the judge that succeeded, of all its incarnations
	down     map[[2]int]bool
	seq      uint64
}

// Member is one engine of a Span.
type Member struct {
	Name    string
	Role    statemachine.Role
	Inc     uint64
	Ranks   []int32 // that it hosts
	M       *core.Machine
	Ops     []*Op
	Orphans []*Op
	Words   map[int32]core.WordEffect // by rank
	Epoch   uint32

	at    int // in Engines; its PeerID for the others
	out   [][]core.Frame
	slots map[int32]int32 // by rank: the newest open
	next  int32
	lost  []uint32 // epochs that ended and are not proven gone
	seals map[statemachine.Opener]bool
	fence []core.PluginEffect
}

// The names of the groups.
const (
	spanSource      = "prefill"
	spanDestination = "decode"
)

// NewSpan returns engines with these ranks, which have said Hello to each other.
func NewSpan(cfg core.Config, lm layout.Map, sources, destinations [][]int32, log io.Writer) (*Span, error) {
	s := &Span{Core: cfg, Map: lm, Now: time.Second, log: log, verdicts: map[statemachine.Opener]statemachine.Reason{}, down: map[[2]int]bool{}}
	for i, ranks := range sources {
		s.Engines = append(s.Engines, &Member{Name: fmt.Sprintf("P%d", i+1), Role: statemachine.Source, Ranks: ranks, Inc: 100 * uint64(i+1)})
	}
	for i, ranks := range destinations {
		s.Engines = append(s.Engines, &Member{Name: fmt.Sprintf("D%d", i+1), Role: statemachine.Destination, Ranks: ranks, Inc: 1000 * uint64(i+1)})
	}
	for i, g := range s.Engines {
		g.at = i
		if err := s.start(g); err != nil {
			return nil, err
		}
	}
	for i, a := range s.Engines {
		for _, b := range s.Engines[:i] {
			if s.Linked(a, b) {
				s.Connect(a, b)
			}
		}
	}
	return s, nil
}

// Linked reports whether two engines have a link: all but two of the source group.
func (s *Span) Linked(a, b *Member) bool {
	return a != b && (a.Role == statemachine.Destination || b.Role == statemachine.Destination)
}

// Engine is the one with a name; nil when there is none.
func (s *Span) Engine(name string) *Member {
	for _, g := range s.Engines {
		if g.Name == name {
			return g
		}
	}
	return nil
}

func (s *Span) size(role statemachine.Role) (n int32) {
	for _, g := range s.Engines {
		if g.Role == role {
			n += int32(len(g.Ranks))
		}
	}
	return n
}

func (g *Member) group() string {
	if g.Role == statemachine.Source {
		return spanSource
	}
	return spanDestination
}

func (s *Span) start(g *Member) error {
	cfg := s.Core
	cfg.Incarnation = g.Inc
	m, err := core.New(cfg)
	if err != nil {
		return err
	}
	g.Orphans = append(g.Orphans, g.Ops...)
	g.M, g.Ops, g.Words, g.slots, g.seals, g.fence, g.lost = m, nil, map[int32]core.WordEffect{}, map[int32]int32{}, map[statemachine.Opener]bool{}, nil, nil
	g.out = make([][]core.Frame, len(s.Engines))
	g.Epoch++
	s.Step(g, core.Event{Kind: core.PluginUp, Backend: Backend, Epoch: g.Epoch})
	for _, r := range g.Ranks {
		s.Step(g,
			core.Event{Kind: core.SessionUp, Session: core.SessionID(r) + 1, Group: g.group(), Role: g.Role, Rank: r, Size: s.size(g.Role), Slots: 64},
			core.Event{Kind: core.PoolUp, Session: core.SessionID(r) + 1, Pool: uint64(r) + 1, Pages: 64, Layers: 2, PageBytes: 1024})
	}
	return nil
}

func link(a, b *Member) [2]int { return [2]int{min(a.at, b.at), max(a.at, b.at)} }

// Connect brings up the link of two engines: Hello, pools and groups, both ways.
func (s *Span) Connect(a, b *Member) {
	s.down[link(a, b)] = false
	for _, pair := range [][2]*Member{{a, b}, {b, a}} {
		g, o := pair[0], pair[1]
		in := []core.Event{{Kind: core.PeerHello, Peer: core.PeerID(o.at), Node: o.Name, Inc: o.Inc}}
		for _, r := range o.Ranks {
			in = append(in, core.Event{Kind: core.PeerPool, Peer: core.PeerID(o.at), Pool: uint64(r) + 1, Pages: 64, Layers: 2, PageBytes: 1024})
		}
		s.Step(g, append(in, s.membership(g, o))...)
		if g.Role == statemachine.Source { // of its own group it hears without a link
			for _, p := range s.Engines {
				if p != g && p.Role == g.Role {
					s.Step(g, s.membership(g, p))
				}
			}
		}
	}
}

// membership is what g is told of o.
func (s *Span) membership(g, o *Member) core.Event {
	e := core.Event{Kind: core.PeerGroup, Peer: core.PeerID(o.at), Group: o.group(), PeerGroup: g.group(), Role: o.Role, Size: s.size(o.Role), Ranks: o.Ranks}
	if o.Role != g.Role {
		e.Backends, e.Map = []string{Backend}, s.Map
	}
	return e
}

// Disconnect breaks the link of two engines: what is under way is lost.
func (s *Span) Disconnect(a, b *Member) {
	s.down[link(a, b)] = true
	a.out[b.at], b.out[a.at] = nil, nil
	s.Step(a, core.Event{Kind: core.PeerDown, Peer: core.PeerID(b.at)})
	s.Step(b, core.Event{Kind: core.PeerDown, Peer: core.PeerID(a.at)})
	a.out[b.at], b.out[a.at] = nil, nil
}

// Restart kills an engine and starts its next incarnation, with its links.
func (s *Span) Restart(g *Member) error {
	for _, o := range s.Engines {
		if s.Linked(g, o) {
			s.Disconnect(g, o)
		}
	}
	g.Inc++
	if err := s.start(g); err != nil {
		return err
	}
	for _, o := range s.Engines {
		if s.Linked(g, o) {
			s.Connect(g, o)
		}
	}
	return nil
}

// Step steps one engine and prints its effects.
func (s *Span) Step(g *Member, in ...core.Event) {
	var out core.Effects
	g.M.Step(int64(s.Now), in, &out)
	for _, r := range out.Replies {
		if r.Code != core.OK && r.Code != core.Freed {
			fmt.Fprintf(s.log, "%s reply: %s %s%s\n", g.Name, code(r.Code), reasonOf(r.Reason), r.Detail)
		}
	}
	for _, a := range out.Auxes {
		fmt.Fprintf(s.log, "%s rank %d: aux %q\n", g.Name, a.Session-1, a.Aux)
	}
	for _, w := range out.Words {
		g.Words[int32(w.Session)-1] = w
		why := ""
		if w.Status.Terminal() {
			why = " (" + w.Reason.String() + ")"
		}
		fmt.Fprintf(s.log, "%s rank %d: %s%s, pages %s\n", g.Name, w.Session-1, w.Status, why, w.Residency)
	}
	for _, f := range out.Frames {
		g.out[f.Peer] = append(g.out[f.Peer], f.Frame.Clone())
		fmt.Fprintf(s.log, "%s to %s: %s\n", g.Name, s.Engines[f.Peer].Name, s.frame(&f.Frame))
	}
	for _, p := range out.Plugin {
		switch p.Kind {
		case core.PluginSubmit:
			p.Source, p.Destination = slices.Clone(p.Source), slices.Clone(p.Destination)
			g.Ops = append(g.Ops, &Op{PluginEffect: p})
			fmt.Fprintf(s.log, "%s submits op %d to %s: rank %d %s -> rank %d %s\n", g.Name, len(g.Ops), s.Engines[p.Peer].Name, p.SrcRank, pages(p.Source), p.DstRank, pages(p.Destination))
		case core.PluginAbort:
			for i := range g.Ops {
				if g.Ops[i].Op == p.Op {
					fmt.Fprintf(s.log, "%s aborts op %d\n", g.Name, i+1)
				}
			}
		case core.PluginFencePeer:
			fmt.Fprintf(s.log, "%s asks its plugin to fence %s\n", g.Name, s.Engines[p.Peer].Name)
			g.fence = append(g.fence, p)
		}
	}
}

// Opener prints an opener by its engine: s1 of P1, d2 of D2; ' for each incarnation and open after the first.
func (s *Span) Opener(o statemachine.Opener) string {
	if o.IsZero() {
		return "0"
	}
	letter, at, since := "d", o.Inc/1000, o.Inc%1000
	if o.Inc < 1000 {
		letter, at, since = "s", o.Inc/100, o.Inc%100
	}
	return letter + fmt.Sprint(at) + strings.Repeat("'", int(since+o.Seq-1))
}

func (s *Span) frame(f *core.Frame) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s(%s,%s)", f.Kind, s.Opener(f.S), s.Opener(f.D))
	switch f.Kind {
	case core.FrameVerdict, core.FrameGroupVerdict:
		b.WriteString([...]string{"", " success", " failed", " unknown"}[f.Outcome])
		if f.Outcome == core.OutcomeFailed {
			fmt.Fprintf(&b, " %s", f.Reason)
		}
	case core.FrameAbort, core.FrameGroupAbort:
		fmt.Fprintf(&b, " %s", f.Reason)
	case core.FrameRankEnd:
		fmt.Fprintf(&b, " quiet=%v", f.Quiet)
		for _, r := range f.Sent {
			fmt.Fprintf(&b, ", rank %d", r.Rank)
			for _, p := range r.Parts {
				fmt.Fprintf(&b, ": %d pages", p.Pages)
			}
		}
	case core.FrameReady:
		for _, o := range f.Sources {
			fmt.Fprintf(&b, " %s", s.Opener(o))
		}
	case core.FrameBound:
		if f.NeedPages {
			b.WriteString(" need pages")
		}
	case core.FrameRegister, core.FrameConfirm:
		for _, r := range f.Ranks {
			fmt.Fprintf(&b, ", rank %d", r.Rank)
			for _, p := range r.Parts {
				fmt.Fprintf(&b, ": %s", pages(p.Runs))
			}
		}
	}
	return b.String()
}

// Deliver hands the oldest frame from one engine to another over, or the oldest of a kind. It reports whether
// there was one.
func (s *Span) Deliver(from, to *Member, kind core.FrameKind) bool {
	q := from.out[to.at]
	i := 0
	if kind != 0 {
		i = slices.IndexFunc(q, func(f core.Frame) bool { return f.Kind == kind })
	}
	if i < 0 || i >= len(q) {
		return false
	}
	f := q[i]
	from.out[to.at] = slices.Delete(q, i, i+1)
	s.Step(to, core.Event{Kind: core.PeerFrame, Peer: core.PeerID(from.at), Frame: f})
	return true
}

// Settle delivers frames until none waits.
func (s *Span) Settle() {
	for n := 0; n < 10_000; n++ {
		moved := false
		for _, a := range s.Engines {
			for _, b := range s.Engines {
				moved = s.Deliver(a, b, 0) || moved
			}
		}
		if !moved {
			return
		}
	}
}

// Open opens the room for every rank of an engine.
func (s *Span) Open(g *Member, att uint64) {
	peer := spanSource
	if g.Role == statemachine.Source {
		peer = spanDestination
	}
	for _, r := range g.Ranks {
		s.seq++
		g.slots[r] = g.next
		s.Step(g, core.Event{Kind: core.Open, Session: core.SessionID(r) + 1, Seq: s.seq, Slot: g.next, Room: 1, Att: att, PeerGroup: peer})
	}
	g.next++
}

// Request sends a request for the newest open of a rank.
func (s *Span) Request(g *Member, rank int32, e core.Event) {
	s.seq++
	e.Session, e.Seq, e.Slot = core.SessionID(rank)+1, s.seq, g.slots[rank]
	s.Step(g, e)
}

// EndOp ends an op of an engine. It reports whether its plugin had it.
func (s *Span) EndOp(g *Member, n int, end core.EndKind, quiet bool) bool {
	if n < 1 || n > len(g.Ops) || g.Ops[n-1].State != OpOpen {
		return false
	}
	op := g.Ops[n-1]
	op.State = OpLinger
	if quiet {
		op.State = OpQuiet
	}
	e := core.Event{Kind: core.OpEnd, Op: op.Op, End: end, Quiet: quiet}
	if end == core.EndDone {
		e.Bytes, op.Done = op.Bytes, true
	}
	s.Step(g, e)
	return true
}

// Quiesce says that an op that ended with quiet=no is over.
func (s *Span) Quiesce(g *Member, n int) {
	g.Ops[n-1].State = OpQuiet
	s.Step(g, core.Event{Kind: core.OpQuiesced, Op: g.Ops[n-1].Op})
}

// KillPlugin ends the plugin epoch of an engine and starts the next.
func (s *Span) KillPlugin(g *Member) {
	for _, o := range g.Ops {
		if o.Epoch == g.Epoch && o.State != OpQuiet {
			o.State = OpDead
		}
	}
	g.lost = append(g.lost, g.Epoch)
	s.Step(g, core.Event{Kind: core.PluginLost, Backend: Backend, Epoch: g.Epoch, Detail: "exit status 137"})
	g.Epoch++
	s.Step(g, core.Event{Kind: core.PluginUp, Backend: Backend, Epoch: g.Epoch})
}

// FencePlugin proves the oldest epoch that ended gone.
func (s *Span) FencePlugin(g *Member) {
	epoch := g.lost[0]
	g.lost = g.lost[1:]
	for _, o := range g.Ops {
		if o.Epoch == epoch && o.State == OpDead {
			o.State = OpFenced
		}
	}
	g.M.Rooms(func(v *core.View) bool {
		if g.Role == statemachine.Destination && v.Epoch == epoch {
			g.seals[v.Own] = true
		}
		return true
	})
	s.Step(g, core.Event{Kind: core.PluginFenced, Backend: Backend, Epoch: epoch})
}

// AnswerFence answers the oldest FencePeer.
func (s *Span) AnswerFence(g *Member, quiet bool) bool {
	if len(g.fence) == 0 {
		return false
	}
	f := g.fence[0]
	g.fence = g.fence[1:]
	if quiet {
		s.ops(func(o *Op) {
			if o.S == f.S && o.D == f.D {
				o.Cut = true
			}
		})
	}
	s.Step(g, core.Event{Kind: core.Fenced, Grant: f.Grant, Quiet: quiet})
	return true
}

func (s *Span) ops(fn func(*Op)) {
	for _, g := range s.Engines {
		for _, o := range g.Orphans {
			fn(o)
		}
		for _, o := range g.Ops {
			fn(o)
		}
	}
}

// Check compares what the engines say with the truth, and with what they said before: a verdict never
// changes (G1); nobody is Success before the judge is (G2); no page is reusable while an op may touch it
// (G3); when the judge is Success, every op of its attempt is Done (G4), and of those that it decided for
// nobody is Failed but for outcome_unknown (G5).
func (s *Span) Check() error {
	var errs []error
	judge := s.Engine("D1")
	pairs := func(g *Member, v *core.View, fn func(statemachine.Opener)) {
		for _, p := range v.Pairs {
			fn(p.Other)
		}
		if len(v.Pairs) == 0 {
			fn(v.Pair)
		}
	}
	judge.M.Rooms(func(v *core.View) bool {
		if v.State == statemachine.Ended && v.Reason == statemachine.Success && !slices.ContainsFunc(s.won, func(w core.View) bool { return w.Own == v.Own }) {
			s.won = append(s.won, *v)
		}
		return true
	})
	decided := func(g *Member, v *core.View) bool { // whether the judge said Success to this very record
		for i := range s.won {
			found := v.Own == s.won[i].Own
			pairs(judge, &s.won[i], func(o statemachine.Opener) { found = found || o == v.Own })
			if found {
				return true
			}
		}
		return false
	}
	for _, g := range s.Engines {
		views := map[statemachine.Opener]core.View{}
		g.M.Rooms(func(v *core.View) bool {
			views[v.Own] = *v
			if v.State.Live() {
				if v.Clock == "" {
					errs = append(errs, fmt.Errorf("R5: %s: %s has no clock", g.Name, v.Why()))
				}
				return true
			}
			if old, ok := s.verdicts[v.Own]; ok && old != v.Reason {
				errs = append(errs, fmt.Errorf("G1: %s was %s, is %s", s.Opener(v.Own), old, v.Reason))
			}
			s.verdicts[v.Own] = v.Reason
			switch yes := decided(g, v); {
			case v.Reason == statemachine.Success && !yes:
				errs = append(errs, fmt.Errorf("G2: %s is Success, the judge has not said so", s.Opener(v.Own)))
			case v.Reason != statemachine.Success && v.Reason != statemachine.OutcomeUnknown && yes:
				errs = append(errs, fmt.Errorf("G5: %s is Failed (%s), the judge said Success", s.Opener(v.Own), v.Reason))
			}
			return true
		})
		for rank, w := range g.Words {
			if !w.Residency.Reusable() || w.Opener.IsZero() {
				continue
			}
			s.ops(func(o *Op) {
				switch {
				case g.Role == statemachine.Destination && o.D == w.Opener && o.DstPool == uint64(rank)+1 && o.MayLand() && !g.seals[o.D]:
					errs = append(errs, fmt.Errorf("G3: pages of %s rank %d are %s, a write of %s may land", g.Name, rank, w.Residency, s.Opener(o.S)))
				case g.Role == statemachine.Source && o.S == w.Opener && o.SrcPool == uint64(rank)+1 && o.MayRead():
					errs = append(errs, fmt.Errorf("G3: pages of %s rank %d are %s, an op to %s may read", g.Name, rank, w.Residency, s.Opener(o.D)))
				}
			})
		}
	}
	for i := range s.won {
		pairs(judge, &s.won[i], func(o statemachine.Opener) {
			s.ops(func(op *Op) {
				if op.S == o && !op.Done {
					errs = append(errs, fmt.Errorf("G4: %s is Success, an op of %s is not Done", s.Opener(s.won[i].Own), s.Opener(o)))
				}
			})
		})
	}
	return errors.Join(errs...)
}

// Gone is the event by which g hears that o hosts nothing of its group any more.
func (s *Span) Gone(g, o *Member) core.Event {
	return core.Event{Kind: core.PeerGroup, Peer: core.PeerID(o.at), Group: o.group(), PeerGroup: g.group()}
}

// Waiting is how many frames from one engine to another are under way.
func (s *Span) Waiting(from, to *Member) int { return len(from.out[to.at]) }

// Down reports whether the link of two engines is broken.
func (s *Span) Down(a, b *Member) bool { return s.down[link(a, b)] }

// Newest is the attempt of an engine's newest open, 0 when it has opened nothing, and whether that lives.
func (s *Span) Newest(g *Member) (att uint64, live bool) {
	var seq uint64
	g.M.Rooms(func(v *core.View) bool {
		if v.Own.Seq > seq {
			seq, att, live = v.Own.Seq, v.Attempt, v.State.Live()
		}
		return true
	})
	return att, live
}

// Unproven reports whether a plugin epoch ended that is not proven gone.
func (g *Member) Unproven() bool { return len(g.lost) > 0 }

// Asked reports whether FencePeer waits for an answer.
func (g *Member) Asked() bool { return len(g.fence) > 0 }
