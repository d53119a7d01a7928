package core

import (
	"slices"
	"testing"
	"time"

	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// What two engines, each with one group, cannot show.

// bindTo opens a room of the destination worker towards a group of a peer and binds it to s.
func (l *lone) bindTo(group string, peer PeerID, room int64, slot, page int32, s statemachine.Opener) View {
	l.t.Helper()
	l.step(Event{Kind: Open, Session: 2, Room: room, Slot: slot, PeerGroup: group})
	l.step(Event{Kind: Register, Session: 2, Slot: slot, Parts: []Part{{Runs: []layout.Run{{Start: page, Count: 1, Stride: 1}}}}})
	l.frame(peer, Frame{Kind: FrameBound, Room: room, S: s, D: l.only(room).Own})
	v := l.only(room)
	if v.State != statemachine.Bound {
		l.t.Fatalf("%s", v.Why())
	}
	return v
}

// A prefill engine that died took a healthy decode engine with it (sglang#12779). The loss of a peer ends
// the rooms with that peer, and no other (R12).
func TestDeathOfOnePeer(t *testing.T) {
	for _, how := range []string{"proof", "silence"} {
		t.Run(how, func(t *testing.T) {
			l := newLone(t)
			l.step(Event{Kind: PeerGroup, Peer: 1, Group: "near", PeerGroup: "decode", Role: statemachine.Source, Size: 1, Backends: []string{"tcp"}})
			for i := range int32(4) {
				l.bindTo("far", 0, int64(i), i, i, opener(20, uint64(i)+1))
				l.bindTo("near", 1, int64(i)+4, i+4, i+4, opener(30, uint64(i)+1))
			}
			if how == "proof" {
				l.step(Event{Kind: PeerGone, Peer: 0, Inc: 20})
			} else {
				for range 11 {
					l.now += int64(time.Second)
					l.step(Event{Kind: PeerHeard, Peer: 1})
				}
			}
			for room := range int64(4) {
				if v := l.only(room); v.Reason != statemachine.PeerLost {
					t.Errorf("of the dead peer: %s", v.Why())
				}
				v := l.only(room + 4)
				if v.State != statemachine.Bound {
					t.Errorf("of the living peer: %s", v.Why())
				}
				l.frame(1, Frame{
					Kind: FrameRankEnd, Room: v.Room, S: v.Pair, D: v.Own, Quiet: true,
					Sent: []RankSent{{Parts: []PartSent{{Pages: 1}}}},
				})
				if v := l.only(room + 4); v.Reason != statemachine.Success {
					t.Errorf("of the living peer: %s", v.Why())
				}
			}
		})
	}
}

// With more ranks than KV heads, an integer division gave 0 heads a rank: all ranks got head 0, or descriptors
// ran past the region (sglang#23746). Groups of unequal size that no layout maps do not work together: the room
// ends with the reason before a page is written.
func TestUnequalRanks(t *testing.T) {
	for _, size := range []int32{2, 4, 8, 16} {
		l := newLone(t)
		l.step(Event{Kind: Open, Session: 2, Room: 1, PeerGroup: "far"})
		l.step(Event{Kind: PeerGroup, Peer: 0, Group: "far", PeerGroup: "decode", Role: statemachine.Source, Size: size, Backends: []string{"tcp"}})
		l.step(Event{Kind: Register, Session: 2, Parts: []Part{{Runs: []layout.Run{{Start: 0, Count: 1, Stride: 1}}}}})
		if v := l.only(1); v.Reason != statemachine.LayoutMismatch {
			t.Errorf("%d ranks to 1: %s", size, v.Why())
		}
	}
}

// With ranks of the source group at several engines, a plugin that checks what is written was told of one of them,
// and refused the pages of the others.
func TestGrantNamesEveryWriter(t *testing.T) {
	cache := layout.Cache{Kind: "mha", DType: "bf16", Layers: 2, KVHeads: 2, HeadDim: 4, PageTokens: 16, Order: layout.HND}
	halves, err := layout.New(layout.Side{Cache: cache, Ranks: 2}, layout.Side{Cache: cache, Ranks: 1})
	if err != nil {
		t.Fatal(err)
	}
	l := newLone(t)
	l.step(Event{Kind: PluginUp, Backend: "tcp", Epoch: 2, ReceiverChecked: true})
	for peer := range PeerID(2) {
		l.step(Event{Kind: PeerGroup, Peer: peer, Group: "both", PeerGroup: "decode", Role: statemachine.Source, Size: 2, Ranks: []int32{1 - int32(peer)}, Backends: []string{"tcp"}, Map: halves})
	}
	l.step(Event{Kind: Open, Session: 2, Room: 1, PeerGroup: "both"})
	out := l.step(Event{Kind: Register, Session: 2, Parts: []Part{{Runs: []layout.Run{{Start: 1, Count: 1, Stride: 1}}}}})
	if len(out.Plugin) != 1 || out.Plugin[0].Kind != PluginGrant || !slices.Equal(out.Plugin[0].Writers, []PeerID{1, 0}) {
		t.Fatalf("%+v", out.Plugin)
	}
	grant := out.Plugin[0].Grant
	d := l.only(1).Own
	for peer, s := range []statemachine.Opener{opener(20, 1), opener(30, 1)} {
		l.frame(PeerID(peer), Frame{Kind: FrameBound, Room: 1, S: s, D: d})
	}
	out = l.step(Event{Kind: Granted, Backend: "tcp", Epoch: 2, Grant: grant})
	if len(out.Frames) != 2 || out.Frames[0].Frame.Kind != FrameConfirm || out.Frames[1].Frame.Kind != FrameConfirm {
		t.Errorf("both pairs should be confirmed now: %+v", out.Frames)
	}
}

// A source that named no group was never offered to the destinations that had registered before its engine knew of
// all ranks of their group: the room waited for its bootstrap clock.
func TestUnnamedGroupBecomesKnown(t *testing.T) {
	cache := layout.Cache{Kind: "mha", DType: "bf16", Layers: 2, KVHeads: 2, HeadDim: 4, PageTokens: 16, Order: layout.HND}
	halves, err := layout.New(layout.Side{Cache: cache, Ranks: 1}, layout.Side{Cache: cache, Ranks: 2})
	if err != nil {
		t.Fatal(err)
	}
	for _, last := range []PeerID{0, 1} { // whose group is known last
		l := newLone(t)
		known := func(peer PeerID) *Effects {
			return l.step(Event{Kind: PeerGroup, Peer: peer, Group: "halves", PeerGroup: "prefill", Role: statemachine.Destination, Size: 2, Ranks: []int32{int32(peer)}, Backends: []string{"tcp"}, Map: halves})
		}
		register := func(peer PeerID) {
			f := registerFrame(1, opener([]uint64{20, 30}[peer], 1))
			f.Group, f.PeerGroup, f.Ranks = "halves", "prefill", []RankPages{{Rank: int32(peer)}}
			l.frame(peer, f)
		}
		known(1 - last)
		l.step(Event{Kind: Open, Session: 1, Room: 1})
		register(1 - last)
		if v := l.only(1); v.State != statemachine.Unbound {
			t.Fatalf("before the group is known: %s", v.Why())
		}
		out := known(last)
		if len(out.Frames) != 1 || out.Frames[0].Frame.Kind != FrameBound || out.Frames[0].Peer != 1-last {
			t.Fatalf("the one that registered should be bound: %+v", out.Frames)
		}
		register(last)
		for i, p := range l.only(1).Pairs {
			if p.Peer != PeerID(i) || p.State != statemachine.Offered || p.Judge != (i == 0) {
				t.Errorf("pair %d: %+v", i, p)
			}
		}
	}
}

// A source whose engine learned only after the bind that a rank of its own group is at another engine waited for
// that rank's last send for ever. One that loses sight of it afterwards does not wait for it either.
func TestOwnGroupIsKnownAfterTheBind(t *testing.T) {
	l := newLone(t)
	l.step(
		Event{Kind: PeerGroup, Peer: 0, Group: "near", PeerGroup: "tp", Role: statemachine.Destination, Size: 2, Backends: []string{"tcp"}},
		Event{Kind: SessionUp, Session: 3, Role: statemachine.Source, Group: "tp", Size: 2, Slots: 8},
		Event{Kind: PoolUp, Session: 3, Pool: 3, Pages: 64, Layers: 2, PageBytes: 1024})
	l.step(Event{Kind: Open, Session: 3, Room: 1, PeerGroup: "near"})
	s, d := l.only(1).Own, opener(20, 1)
	f := registerFrame(1, d)
	f.Group, f.PeerGroup, f.Ranks = "near", "tp", []RankPages{{}, {Rank: 1}}
	l.frame(0, f)
	l.frame(0, Frame{Kind: FrameConfirm, Room: 1, S: s, D: d})
	l.step(Event{Kind: Send, Session: 3, Last: true})
	if v := l.only(1); v.State != statemachine.Confirmed {
		t.Fatalf("rank 1 may be here: %s", v.Why())
	}
	elsewhere := Event{Kind: PeerGroup, Peer: 1, Group: "tp", PeerGroup: "tp", Role: statemachine.Source, Size: 2, Ranks: []int32{1}}
	l.step(elsewhere)
	if v := l.only(1); v.State != statemachine.Committed {
		t.Errorf("rank 1 is elsewhere: %s", v.Why())
	}

	l.step(Event{Kind: Open, Session: 3, Slot: 1, Room: 2, PeerGroup: "near"})
	s, d = l.only(2).Own, opener(20, 2)
	f.Room, f.D = 2, d
	l.frame(0, f)
	l.frame(0, Frame{Kind: FrameConfirm, Room: 2, S: s, D: d})
	elsewhere.Size, elsewhere.Ranks = 0, nil // its worker has gone
	l.step(elsewhere)
	l.step(Event{Kind: Send, Session: 3, Slot: 1, Last: true})
	if v := l.only(2); v.State != statemachine.Committed {
		t.Errorf("rank 1 was elsewhere: %s", v.Why())
	}
}
