package core

import (
	"testing"

	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// A source that sent while its peer had some ranks of the destination group only took the chunks of the ranks that
// had nothing for those for done, and forgot them: the room ended as Success without their pages (found by
// `engine demo --ranks 2:4`, when its decode workers were killed).
func TestSendToAGroupThatIsNotWhole(t *testing.T) {
	heads := layout.Cache{Kind: "mha", DType: "bf16", Layers: 2, KVHeads: 2, HeadDim: 4, PageTokens: 16, Order: layout.HND}
	unequal, err := layout.New(layout.Side{Ranks: 2, Cache: heads}, layout.Side{Ranks: 1, Cache: heads})
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		early [][]int32 // what peer 0, and peer 1, have of the group when the source sends
		whole [][]int32
		size  int32
		lm    layout.Map
		ops   int
	}{
		"rank 1 first":               {[][]int32{{1}}, [][]int32{{0, 1}}, 2, layout.Map{}, 2},
		"rank 0 first":               {[][]int32{{0}}, [][]int32{{0, 1}}, 2, layout.Map{}, 2},
		"rank 1 first, at two":       {[][]int32{{1}}, [][]int32{{1}, {0}}, 2, layout.Map{}, 2},
		"two of three, at two":       {[][]int32{{2}, {0}}, [][]int32{{1, 2}, {0}}, 3, layout.Map{}, 3},
		"all there":                  {[][]int32{{0, 1}}, [][]int32{{0, 1}}, 2, layout.Map{}, 2},
		"all there, of another size": {[][]int32{{0}}, [][]int32{{0}}, 1, unequal, 2},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLone(t)
			sources := c.size
			if !c.lm.IsZero() {
				sources = 2
			}
			for r := range sources {
				s := SessionID(10 + r)
				l.step(Event{Kind: SessionUp, Session: s, Role: statemachine.Source, Group: "p2", Rank: r, Size: sources, Slots: 8},
					Event{Kind: PoolUp, Session: s, Pool: uint64(20 + r), Pages: 64, Layers: 2, PageBytes: 1024})
			}
			announce := func(parts [][]int32) {
				for peer, ranks := range parts {
					if len(ranks) == int(c.size) {
						ranks = nil
					}
					l.step(Event{Kind: PeerGroup, Peer: PeerID(peer), Group: "far", PeerGroup: "p2", Role: statemachine.Destination, Size: c.size, Ranks: ranks, Map: c.lm, Backends: []string{"tcp"}})
				}
			}
			announce(c.early)
			for r := range sources {
				l.step(Event{Kind: Open, Session: SessionID(10 + r), Room: 7, PeerGroup: "far"})
				l.step(Event{Kind: Send, Session: SessionID(10 + r), Last: true, Parts: []Part{{Runs: []layout.Run{{Start: 4 * r, Count: 2, Stride: 1}}}}})
			}
			announce(c.whole)
			ops := 0
			count := func(out *Effects) {
				for i := range out.Plugin {
					if out.Plugin[i].Kind == PluginSubmit {
						ops++
					}
				}
			}
			for peer, ranks := range c.whole {
				f := registerFrame(7, opener(20+10*uint64(peer), 1))
				f.PeerGroup, f.Ranks = "p2", nil
				for _, r := range ranks {
					f.Ranks = append(f.Ranks, RankPages{Rank: r, Parts: []PartPages{{Pool: 1, Runs: []layout.Run{{Start: 0, Count: 2, Stride: 1}}}}})
				}
				count(l.frame(PeerID(peer), f))
			}
			own := l.only(7).Own
			for peer := range c.whole {
				count(l.frame(PeerID(peer), Frame{Kind: FrameConfirm, Room: 7, S: own, D: opener(20+10*uint64(peer), 1)}))
			}
			view := l.only(7)
			if ops != c.ops {
				t.Errorf("%d operations, want %d: %s", ops, c.ops, view.Why())
			}
		})
	}
}
