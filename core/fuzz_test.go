package core

import (
	"slices"
	"testing"
	"time"

	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// feed turns bytes into events. What only the host mints (sessions, peers, backends) is in range, what
// workers, peers and plugins bring is anything.
type feed struct {
	b   []byte
	ops []OpID
	gr  []GrantID
	out []Frame // that the machine sent
	at  []Reply // to opens
}

func (f *feed) byte() byte {
	if len(f.b) == 0 {
		return 0
	}
	c := f.b[0]
	f.b = f.b[1:]
	return c
}

func (f *feed) small(n int) int32 { return int32(int(f.byte()) % n) }

// odd is a number that is often reasonable and sometimes absurd.
func (f *feed) odd(n int) int32 {
	switch c := f.byte(); c {
	case 255:
		return -1
	case 254:
		return 1<<31 - 1
	case 253:
		return -1 << 31
	default:
		return int32(int(c) % n)
	}
}

func (f *feed) opener() statemachine.Opener {
	return statemachine.Opener{Inc: []uint64{0, 10, 20, 9, 19, 21}[f.small(6)], Seq: uint64(f.small(12))}
}

func (f *feed) runs() []layout.Run {
	runs := make([]layout.Run, f.small(4))
	for i := range runs {
		runs[i] = layout.Run{Start: f.odd(32), Count: f.odd(5), Stride: f.odd(3)}
	}
	return runs
}

func (f *feed) parts() []Part {
	if f.small(4) > 0 { // mostly what a worker would say
		return []Part{{Runs: []layout.Run{{Start: f.small(28), Count: 1 + f.small(3), Stride: 1}}}}
	}
	parts := make([]Part, f.small(3))
	for i := range parts {
		parts[i] = Part{Ordinal: f.odd(2), Prefix: f.odd(3), Runs: f.runs()}
	}
	return parts
}

// answer is a frame that fits one that the machine sent.
func (f *feed) answer() Frame {
	fr := f.out[len(f.out)-1-int(f.byte())%min(len(f.out), 8)]
	kinds := []FrameKind{FrameConfirm, FrameVerdict, FrameAbort, FrameRegister, FrameQueued}
	if fr.S.Inc != 10 {
		kinds = []FrameKind{FrameBound, FrameRankEnd, FrameRankEnd, FrameAbort, FrameDrained, FrameProgress}
	}
	fr.Kind = kinds[int(f.byte())%len(kinds)]
	if peer := (statemachine.Opener{Inc: 20, Seq: uint64(1 + f.small(3))}); fr.S.IsZero() {
		fr.S = peer
	} else if fr.D.IsZero() {
		fr.D = peer
	}
	fr.Group, fr.PeerGroup, fr.Backend, fr.Epoch = "decode", "prefill", "tcp", 1
	fr.Outcome, fr.Reason, fr.Quiet, fr.Bytes, fr.Outstanding = Outcome(1+f.small(3)), statemachine.Stalled, f.small(2) > 0, int64(f.byte()), f.small(2) > 0
	fr.Ranks = []RankPages{{Parts: []PartPages{{Pool: 1, Runs: []layout.Run{{Start: f.small(20), Count: 1 + f.small(9), Stride: 1}}}}}}
	fr.Sent = []RankSent{{Parts: []PartSent{{Pages: int64(1 + f.small(3))}}}}
	fr.Aux, fr.CRC = nil, 0
	return fr
}

func (f *feed) frame() Frame {
	if len(f.out) > 0 && f.small(4) > 0 {
		return f.answer()
	}
	if f.small(3) > 0 { // a destination that is first
		return Frame{
			Kind: FrameRegister, Room: int64(f.small(3)), D: statemachine.Opener{Inc: 20, Seq: uint64(1 + f.small(9))}, Att: uint64(f.small(2)), Group: "decode",
			PeerGroup: "prefill", Backend: "tcp", Epoch: 1, Ranks: []RankPages{{Parts: []PartPages{{Pool: 1, Runs: []layout.Run{{Start: f.small(20), Count: 1 + f.small(9), Stride: 1}}}}}},
		}
	}
	fr := Frame{
		Kind: FrameKind(f.small(14)), Room: int64(f.odd(3)), S: f.opener(), D: f.opener(), Att: uint64(f.small(2)),
		Group: []string{"prefill", "decode", "other"}[f.small(3)], Backend: []string{"tcp", "nixl", "?"}[f.small(3)], Epoch: uint32(f.small(3)),
		NeedPages: f.small(2) > 0, ClockLog2: f.byte(), Bytes: int64(f.odd(200)), Outstanding: f.small(2) > 0, Quiet: f.small(2) > 0,
		Outcome: Outcome(f.small(5)), Reason: statemachine.Reason(f.byte()), CRC: uint32(f.small(2)),
	}
	for range f.small(3) {
		rp := RankPages{Rank: f.odd(2)}
		for range f.small(3) {
			rp.Parts = append(rp.Parts, PartPages{Ordinal: f.odd(2), Pool: uint64(f.small(3)), Prefix: f.odd(3), Runs: f.runs()})
		}
		fr.Ranks = append(fr.Ranks, rp)
		fr.Sent = append(fr.Sent, RankSent{Rank: f.odd(2), Parts: []PartSent{{Ordinal: f.odd(2), Pages: int64(f.odd(5))}}})
	}
	return fr
}

// fuzzKinds are the events; those that bring a room forward are there more often.
var fuzzKinds = append([]EventKind{
	SessionUp, PoolUp, SessionDown, PeerHello, PeerDown, PeerHeard, PeerGone, PeerGroup, PeerPool, PeerDraining, PeerLost, PeerBadFrame, PluginUp, PluginLost,
	PluginFenced, PluginDown, PluginKept, OpAccepted, GrantFailed, Revoked, Fenced, Tick, DrainBegin, DrainEnd, AdminAbort, 0, 255,
}, slices.Concat(
	slices.Repeat([]EventKind{PeerFrame}, 60), slices.Repeat([]EventKind{Open, Register, Send}, 16), slices.Repeat([]EventKind{OpEnd}, 16),
	slices.Repeat([]EventKind{Release, Abort, OpProgress, OpQuiesced, Granted, PeerHello, PluginUp, SessionUp, PoolUp}, 4),
)...)

// fuzzMaps are maps that groups of one rank or two may have.
var fuzzMaps = func() []layout.Map {
	side := func(ranks, tokens int32) layout.Side {
		return layout.Side{Cache: layout.Cache{DType: "bf16", Layers: 2, KVHeads: 2, HeadDim: 1, PageTokens: tokens, Kind: layout.MHA, Order: layout.NHD}, Ranks: ranks}
	}
	maps := []layout.Map{{}}
	for _, p := range [][2]layout.Side{{side(1, 1), side(1, 2)}, {side(1, 2), side(1, 1)}, {side(2, 1), side(1, 1)}, {side(1, 1), side(2, 1)}} {
		m, err := layout.New(p[0], p[1])
		if err != nil {
			panic(err)
		}
		maps = append(maps, m)
	}
	return maps
}()

// rare events end much at once.
var rare = []EventKind{SessionDown, PluginDown, PluginLost, DrainBegin, DrainEnd, PeerDraining, PeerGroup, PeerPool, PeerDown, PeerGone, PeerHello, GrantFailed}

func (f *feed) event() Event {
	e := Event{
		Kind: fuzzKinds[f.small(len(fuzzKinds))], Session: SessionID(f.small(4)), Slot: f.odd(16), Peer: PeerID(f.small(8) / 7), Room: int64(f.odd(3)),
		Att: uint64(f.small(2)), Seq: uint64(f.byte()),
	}
	if slices.Contains(rare, e.Kind) && f.small(16) > 0 {
		e.Kind = PeerFrame
	}
	if e.Kind >= Open && e.Kind <= Release && f.small(4) > 0 {
		e.Session = SessionID(f.small(2))
		if n := len(f.at); n > 0 && e.Kind != Open { // a slot that was opened lately
			r := f.at[n-1-int(f.byte())%min(n, 6)]
			e.Session, e.Slot = r.Session, r.Slot
			if e.Kind != Release && e.Kind != Abort {
				e.Kind = []EventKind{Send, Register}[r.Session&1]
			}
		}
	}
	switch e.Kind {
	case SessionUp:
		e.Role, e.Group, e.Size, e.Rank, e.Slots = statemachine.Role(f.small(4)), []string{"prefill", "decode"}[f.small(2)], f.odd(3), f.odd(3), f.small(16)
	case PoolUp:
		e.Pool, e.Ordinal, e.Pages, e.Layers, e.PageBytes = uint64(f.small(3)), f.odd(2), f.odd(40), f.odd(3), int64(f.odd(99))
		e.State = f.small(4) == 0
	case Open:
		e.PeerGroup, e.Priority, e.Deadline = []string{"", "prefill", "decode"}[f.small(3)], f.odd(3), int64(f.odd(5))*1e9
		if f.small(4) > 0 {
			e.PeerGroup = []string{"decode", "prefill"}[e.Session&1]
		}
	case Register:
		e.Parts = f.parts()
	case Send:
		e.Parts, e.Last, e.LayerFrom, e.LayerTo, e.Aux = f.parts(), f.small(2) > 0, f.odd(3), f.odd(3), make([]byte, f.small(3))
	case PeerHello, PeerGone:
		e.Node, e.Inc = "peer", []uint64{20, 21, 10}[f.small(3)]
	case PeerGroup:
		e.Group, e.PeerGroup, e.Role, e.Size = []string{"prefill", "decode"}[f.small(2)], []string{"prefill", "decode"}[f.small(2)], statemachine.Role(f.small(3)), f.odd(3)
		e.Map = fuzzMaps[f.small(len(fuzzMaps))]
		e.Backends, e.Reason = []string{"tcp", "nixl"}[:f.small(3)], statemachine.Reason(f.small(2)*int32(statemachine.LayoutMismatch))
	case PeerPool:
		e.Pool, e.Pages, e.Layers, e.PageBytes = uint64(f.small(3)), f.small(40), f.small(3), int64(f.small(99))
		e.State = f.small(4) == 0
	case PeerFrame, PeerBadFrame:
		e.Frame = f.frame()
	case PluginUp, PluginLost, PluginFenced, PluginDown:
		e.Backend, e.Epoch, e.ReceiverChecked, e.MaxOpBytes = []string{"tcp", "nixl"}[f.small(2)], uint32(f.small(3)), f.small(2) > 0, int64(f.small(200))
	case OpAccepted, OpProgress, OpEnd, OpQuiesced:
		e.Op = OpID(f.byte())
		if len(f.ops) > 0 && f.small(8) > 0 {
			e.Op = f.ops[int(f.byte())%len(f.ops)]
		}
		e.End, e.Quiet, e.Bytes, e.Reason = EndKind(f.small(6)), f.small(2) > 0, int64(f.odd(200)), statemachine.Reason(f.small(2)*int32(statemachine.NoTerminal))
	case Granted, GrantFailed, Revoked, Fenced:
		e.Grant, e.Quiet = GrantID(f.byte()), f.small(2) > 0
		if len(f.gr) > 0 && f.small(8) > 0 {
			e.Grant = f.gr[int(f.byte())%len(f.gr)]
		}
	case AdminAbort:
		e.Role = statemachine.Role(f.small(4))
	}
	return e
}

// FuzzMachine feeds anything into one machine: it never panics, every live record has a running clock,
// what it holds is bounded, every request has its one reply, and its counts add up.
func FuzzMachine(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte("\x03\x00\x00\x00\x00\x00\x00\x00\x00\x00\x03\x01\x01\x00\x01\x00\x01\x01\x00"))
	for seed := range byte(8) { // long feeds, or nothing gets far
		b := make([]byte, 3000)
		x := uint32(seed) + 1
		for i := range b {
			x = x*1664525 + 1013904223
			b[i] = byte(x >> 24)
		}
		f.Add(b)
	}
	f.Fuzz(live)
}

// live is the life of one machine that is fed with b.
func live(t *testing.T, b []byte) {
	limits := DefaultLimits()
	limits.Rooms, limits.AdmitQueue, limits.Tombstones, limits.PeerMarks, limits.PeerOps, limits.RoomBytes = 12, 4, 3, 3, 4, 5000
	m, err := New(Config{Incarnation: 10, Clocks: DefaultClocks(), Limits: limits})
	if err != nil {
		t.Fatal(err)
	}
	in := &feed{b: b}
	now := int64(time.Second)
	var out Effects
	step := func(events ...Event) {
		out.Reset()
		m.Step(now, events, &out)
		for _, r := range out.Replies {
			if r.Code == OK && !r.Opener.IsZero() {
				in.at = append(in.at, r)
			}
		}
		for i := range out.Frames {
			in.out = append(in.out, out.Frames[i].Frame.Clone())
		}
		for i := range out.Plugin {
			switch e := &out.Plugin[i]; e.Kind {
			case PluginSubmit:
				in.ops = append(in.ops, e.Op)
			case PluginGrant, PluginFencePeer:
				in.gr = append(in.gr, e.Grant)
			}
		}
		requests := 0
		for i := range events {
			if k := events[i].Kind; k >= Open && k <= Release {
				requests++
			}
		}
		if len(out.Replies) != requests {
			t.Fatalf("%d requests, %d replies", requests, len(out.Replies))
		}
		sound(t, m)
	}
	step(
		Event{Kind: PluginUp, Backend: "tcp", Epoch: 1, ReceiverChecked: true},
		Event{Kind: SessionUp, Session: 0, Role: statemachine.Source, Group: "prefill", Size: 1, Slots: 16}, Event{Kind: PoolUp, Session: 0, Pool: 1, Pages: 32, Layers: 2, PageBytes: 64},
		Event{Kind: SessionUp, Session: 1, Role: statemachine.Destination, Group: "decode", Size: 1, Slots: 16}, Event{Kind: PoolUp, Session: 1, Pool: 2, Pages: 32, Layers: 2, PageBytes: 64},
		Event{Kind: PeerHello, Peer: 0, Node: "peer", Inc: 20}, Event{Kind: PeerHello, Peer: 1, Node: "self", Inc: 10},
		Event{Kind: PeerPool, Peer: 0, Pool: 1, Pages: 32, Layers: 2, PageBytes: 64},
		Event{Kind: PeerGroup, Peer: 0, Group: "prefill", PeerGroup: "decode", Role: statemachine.Source, Size: 1, Backends: []string{"tcp"}},
		Event{Kind: PeerGroup, Peer: 0, Group: "decode", PeerGroup: "prefill", Role: statemachine.Destination, Size: 1, Backends: []string{"tcp"}},
	)
	for range 400 {
		if len(in.b) == 0 {
			break
		}
		batch := make([]Event, 1+in.small(2))
		for i := range batch {
			batch[i] = in.event()
		}
		now += []int64{0, 0, 0, 0, 0, 0, 0, 0, 1e9, 3e9, 16e9, 310e9}[in.small(12)]
		step(batch...)
	}
	_ = m.Hash()
	_ = m.Clone()
	for _, v := range m.Room(1) {
		_ = v.Why()
	}
}

// sound checks what must hold of a machine after every step.
func sound(t *testing.T, m *Machine) {
	t.Helper()
	live, queued := int32(0), int32(0)
	held := 0
	ops := map[PeerID]int32{}
	m.Rooms(func(v *View) bool {
		if !v.State.Live() {
			return true
		}
		live++
		if !v.Admitted {
			queued++
		}
		if v.Clock == "" || v.Remaining < 0 {
			t.Fatalf("no running clock: %s", v.Why())
		}
		return true
	})
	for i := range int32(m.ops.len()) {
		if o := m.ops.at(i); o.state == opOpen {
			ops[o.peer]++
		}
	}
	for i := range m.peers {
		p := &m.peers[i]
		if p.ops != ops[PeerID(i)] || p.tombs.n < 0 || p.marks < 0 || p.holds < 0 || p.bytes < 0 {
			t.Fatalf("peer %d: %+v, %d ops are open", i, *p, ops[PeerID(i)])
		}
		held += int(p.holds)
	}
	c := m.Counts()
	l := &m.cfg.Limits
	switch {
	case live != m.live || queued != m.queued:
		t.Fatalf("%d live (%d said), %d queued (%d said)", live, m.live, queued, m.queued)
	case held != len(m.placeholders):
		t.Fatalf("%d placeholders, %d counted", len(m.placeholders), held)
	case c.Records > 4*16+3*int(l.Tombstones): // slots of four sessions, tombstones of two peers and of none
		t.Fatalf("%d records", c.Records)
	case c.Marks > 2*int(l.PeerMarks) || c.Placeholders > 2*int(l.PeerMarks) || m.queued > l.AdmitQueue+l.Rooms:
		t.Fatalf("%+v", c)
	case len(m.markQueue) > 3*64+8 || len(m.holdQueue) > 3*64+8 || len(m.waiting) > 3*64+8 || len(m.names) > 64:
		t.Fatalf("queues grow: %d marks, %d placeholders, %d waiting, %d names", len(m.markQueue), len(m.holdQueue), len(m.waiting), len(m.names))
	case c.Pinned < 0 || c.Inflight < 0 || c.Queued < 0:
		t.Fatalf("%+v", c)
	}
}
