package core

import (
	"testing"

	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// TestFrameClone: a frame that was cloned stays what it was when its effects are used again; one that was
// not does not.
func TestFrameClone(t *testing.T) {
	var e Effects
	m := &Machine{out: &e}
	sources := make([]statemachine.Opener, 1)
	frame := func(pages int32) Frame {
		e.Reset()
		e.parts = append(e.parts, PartPages{Runs: m.effectRuns(m.putRuns([]layout.Run{{Start: pages, Count: 1, Stride: 1}}))})
		e.ranks = append(e.ranks, RankPages{Parts: tail(e.parts, 0)})
		e.sentParts = append(e.sentParts, PartSent{Pages: int64(pages)})
		e.sent = append(e.sent, RankSent{Parts: tail(e.sentParts, 0)})
		sources[0].Seq = uint64(pages)
		return Frame{Ranks: tail(e.ranks, 0), Sent: tail(e.sent, 0), Sources: sources}
	}
	frame(1) // makes the buffers
	kept := frame(2)
	clone := kept.Clone()
	frame(3)
	if kept.Ranks[0].Parts[0].Runs[0].Start != 3 || kept.Sent[0].Parts[0].Pages != 3 {
		t.Error("the buffers are not used again")
	}
	if clone.Ranks[0].Parts[0].Runs[0].Start != 2 || clone.Sent[0].Parts[0].Pages != 2 || clone.Sources[0].Seq != 2 {
		t.Errorf("the clone changed: %+v", clone)
	}
}
