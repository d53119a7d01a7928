package explore

import (
	"fmt"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// An engine alone faces everything that its counterpart could ever send, in any order and as often as it
// likes: frames that are late, that repeat, that belong to the other opener, that make no sense. What
// must hold then is what an engine owes by itself: an end that never changes, a clock for every room that
// lives, pages that are not reused while its own ops touch them, and nothing left in the end.

// alone lists the frames.
func (x *explorer) alone() {
	here := x.engines[0]
	there := x.engines[x.Sources]
	if x.Alone == 'D' {
		here, there = there, here
	}
	for inc := range uint64(2) {
		x.alphabet = append(x.alphabet, x.hello(there.incBase()+inc))
	}
	add := func(f core.Frame) {
		f.Room = 1
		text := fmt.Sprintf("%s(s%d, d%d, attempt %d)", f.Kind, f.S.Seq, f.D.Seq, f.Att)
		if f.Outcome != 0 || f.Quiet || f.Outstanding {
			text += fmt.Sprintf(" outcome %d, quiet %v, outstanding %v, pages %v", f.Outcome, f.Quiet, f.Outstanding, f.Sent)
		}
		x.alphabet = append(x.alphabet, x.addFrame(flying{f: f, text: text}))
	}
	openers := func(base uint64) (out []statemachine.Opener) {
		for seq := range uint64(x.Openers) {
			out = append(out, statemachine.Opener{Inc: base, Seq: seq + 1})
		}
		return out
	}
	for _, o := range openers(there.incBase()) {
		for _, own := range openers(here.incBase()) {
			if x.Alone == 'P' {
				x.toSourceAlone(add, own, o)
			} else {
				x.toDestinationAlone(add, o, own)
			}
		}
	}
}

// toSourceAlone are the frames of a destination d that name, or may concern, the source s.
func (x *explorer) toSourceAlone(add func(core.Frame), s, d statemachine.Opener) {
	ranks := []core.RankPages{{Parts: []core.PartPages{{Pool: 1, Runs: []layout.Run{{Count: max(int32(x.Chunks), 1), Stride: 1}}}}}}
	if s.Seq == 1 {
		for att := range uint64(2) {
			add(core.Frame{Kind: core.FrameRegister, D: d, Att: att + 1, Group: destinationGroup, PeerGroup: sourceGroup, Backend: backend, Epoch: 1, Ranks: ranks})
			add(core.Frame{Kind: core.FrameAbort, D: d, Att: att + 1, Reason: statemachine.Aborted})
		}
		add(core.Frame{Kind: core.FrameQueued, D: d, Att: 1})
	}
	add(core.Frame{Kind: core.FrameConfirm, S: s, D: d, Backend: backend, Epoch: 1, Ranks: ranks, Group: destinationGroup})
	for _, v := range []core.Outcome{core.OutcomeSuccess, core.OutcomeFailed, core.OutcomeUnknown} {
		add(core.Frame{Kind: core.FrameVerdict, S: s, D: d, Outcome: v, Reason: statemachine.Aborted})
	}
}

// toDestinationAlone are the frames of a source s that name, or may concern, the destination d.
func (x *explorer) toDestinationAlone(add func(core.Frame), s, d statemachine.Opener) {
	add(core.Frame{Kind: core.FrameBound, S: s, D: d, Att: d.Seq})
	add(core.Frame{Kind: core.FrameProgress, S: s, D: d, Outstanding: true})
	for _, pages := range []int64{int64(x.Chunks), 7} { // complete, and not
		for _, quiet := range []bool{true, false} {
			add(core.Frame{Kind: core.FrameRankEnd, S: s, D: d, Quiet: quiet, Sent: []core.RankSent{{Chunks: 1, Parts: []core.PartSent{{Pages: pages}}}}})
		}
	}
	add(core.Frame{Kind: core.FrameAbort, S: s, D: d, Reason: statemachine.Aborted})
	add(core.Frame{Kind: core.FrameDrained, S: s, D: d})
	if d.Seq == 1 {
		for att := range uint64(2) {
			add(core.Frame{Kind: core.FrameAbort, S: s, Att: att + 1, Reason: statemachine.Aborted})
		}
	}
	if s.Seq == 1 {
		add(core.Frame{Kind: core.FrameAbort, D: d, Reason: statemachine.StaleRoom})
	}
}

// aloneMoves: any of them may come now, and the link may break.
func (x *explorer) aloneMoves(st *state) {
	e := 0
	if x.Alone == 'D' {
		e = x.Sources
	}
	for _, f := range x.alphabet {
		x.do(move{kind: mvAny, e: uint8(e), frame: f, may: true}, func(n *state) {
			ev := event{kind: evFrame, f: f}
			if x.frames[f].hello {
				ev.kind = evHello
			}
			x.apply(n, e, ev)
		})
	}
	if g := &x.engines[e].nodes[st.engine[e]]; !g.grouped[0] {
		x.do(move{kind: mvGroup, e: uint8(e), may: true}, func(n *state) { x.apply(n, e, event{kind: evGroup}) })
	}
	x.do(move{kind: mvBreak, e: uint8(e), may: true}, func(n *state) { x.apply(n, e, event{kind: evLinkDown}) })
	x.do(move{kind: mvPeerDead, e: uint8(e)}, func(n *state) { x.apply(n, e, event{kind: evPeerDead}) })
}
