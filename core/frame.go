package core

import (
	"slices"

	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// FrameKind is the kind of a room frame. Hello, Beat, Lost and Draining concern the link or the engine
// and are events of their own.
type FrameKind = statemachine.FrameKind

// The room frames of the protocol, see statemachine.FrameKind.
const (
	FrameQueued       = statemachine.FrameQueued
	FrameRegister     = statemachine.FrameRegister
	FrameBound        = statemachine.FrameBound
	FrameConfirm      = statemachine.FrameConfirm
	FrameProgress     = statemachine.FrameProgress
	FrameRankEnd      = statemachine.FrameRankEnd
	FrameVerdict      = statemachine.FrameVerdict
	FrameAbort        = statemachine.FrameAbort
	FrameDrained      = statemachine.FrameDrained
	FrameReady        = statemachine.FrameReady
	FrameGroupVerdict = statemachine.FrameGroupVerdict
	FrameGroupAbort   = statemachine.FrameGroupAbort
)

// Outcome is the judge's word in a Verdict.
type Outcome = statemachine.Outcome

// Outcomes of a Verdict frame.
const (
	OutcomeSuccess = statemachine.JudgeSuccess
	OutcomeFailed  = statemachine.JudgeFailed
	OutcomeUnknown = statemachine.JudgeUnknown
)

// Frame is one room frame between two engines. Which fields are set depends on Kind; the rest are
// zero.
type Frame struct {
	Kind FrameKind
	Room int64
	S, D statemachine.Opener
	Att  uint64 // attempt token, equal on both sides

	// Queued, Register: the destination's group and the source group that it named.
	Group, PeerGroup string
	// Register: the backend and plugin epoch that the pages are registered with at D.
	Backend string
	Epoch   uint32
	// Register, and Confirm when Bound asked NeedPages: the pages of every rank of D.
	Ranks []RankPages
	// Bound: P kept no page list and asks D to repeat it in Confirm.
	NeedPages bool
	// Confirm: length of the transfer clock, seconds as a power of two.
	ClockLog2 uint8
	// Progress.
	Bytes       int64
	Outstanding bool
	// RankEnd: what each rank of P sent, whether every op ended quiet, and the aux record of rank 0.
	Quiet bool
	Sent  []RankSent
	Aux   []byte
	CRC   uint32 // CRC-32C of Aux
	// Verdict, Abort, GroupVerdict.
	Outcome Outcome
	Reason  statemachine.Reason
	// Ready: the openers that D's RankEnds came from, one a source engine, in the order of their lowest ranks.
	Sources []statemachine.Opener
}

// Clone returns a copy that may be kept, see Effects. Aux is shared: nobody writes to it.
func (f *Frame) Clone() Frame {
	c := *f
	c.Ranks, c.Sent, c.Sources = slices.Clone(f.Ranks), slices.Clone(f.Sent), slices.Clone(f.Sources)
	for i := range c.Ranks {
		r := &c.Ranks[i]
		r.Parts = slices.Clone(r.Parts)
		for j := range r.Parts {
			r.Parts[j].Runs = slices.Clone(r.Parts[j].Runs)
		}
	}
	for i := range c.Sent {
		c.Sent[i].Parts = slices.Clone(c.Sent[i].Parts)
	}
	return c
}

// RankPages is what one destination rank registered.
type RankPages struct {
	Rank  int32
	Parts []PartPages
}

// PartPages is one pool's share: source page k goes to the page Prefix+k of Runs.
type PartPages struct {
	Ordinal int32  // position of the pool among the worker's pools; both sides pair by it
	Pool    uint64 // the destination engine's pool id
	Prefix  int32  // pages that the destination already holds
	Runs    []layout.Run
}

// RankSent is what one source rank says it sent.
type RankSent struct {
	Rank   int32
	Chunks int32
	Parts  []PartSent
}

// PartSent is the pages of one pool, by its ordinal, that a source rank sent.
type PartSent struct {
	Ordinal int32
	Pages   int64
}
