package peer

import (
	"errors"
	"fmt"
	"hash/crc32"
	"math"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
	"github.com/terminus-kv/terminus/internal/peer/wire"
)

// Bounds of what one frame may carry. A frame beyond them is bad.
const (
	maxName     = 256
	maxAux      = 1 << 20
	maxRanks    = 1024
	maxParts    = 64      // of one rank
	maxRuns     = 1 << 20 // of one frame
	maxFeatures = 64
	maxBackends = 32
	maxClock    = 40 // log2 of seconds
	// maxMessage bounds an encoded Batch; maxFrame leaves room for the batch around one frame.
	maxMessage = 8 << 20
	maxFrame   = maxMessage - 64
)

// A fieldError names the field of a frame that breaks the protocol.
type fieldError struct {
	field  string
	detail string
}

func (e *fieldError) Error() string { return e.field + ": " + e.detail }

func bad(field, format string, args ...any) error {
	return &fieldError{field: field, detail: fmt.Sprintf(format, args...)}
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// encodeRoom converts f. It copies what it keeps of f.
func encodeRoom(f core.Frame) (*wire.Frame, error) {
	if f.Room < 0 {
		return nil, bad("room", "%d is negative", f.Room)
	}
	// One allocation: rooms end by the thousand.
	x := &struct {
		frame               wire.Frame
		body                wire.Frame_Room
		room                wire.Room
		source, destination wire.Opener
	}{}
	r := &x.room
	x.frame.Frame, x.body.Room = &x.body, r
	r.Room, r.Attempt = uint64(f.Room), f.Att
	r.Source, r.Destination = encodeOpener(f.S, &x.source), encodeOpener(f.D, &x.destination)
	switch f.Kind {
	case core.FrameQueued:
		r.Kind = &wire.Room_Queued{Queued: &wire.Queued{Group: f.Group, PeerGroup: f.PeerGroup}}
	case core.FrameRegister:
		r.Kind = &wire.Room_Register{Register: &wire.Register{
			Group: f.Group, PeerGroup: f.PeerGroup, Backend: f.Backend, Epoch: f.Epoch, Ranks: encodeRanks(f.Ranks),
		}}
	case core.FrameBound:
		r.Kind = &wire.Room_Bound{Bound: &wire.Bound{NeedPages: f.NeedPages}}
	case core.FrameConfirm:
		r.Kind = &wire.Room_Confirm{Confirm: &wire.Confirm{
			ClockLog2: uint32(f.ClockLog2), Backend: f.Backend, Epoch: f.Epoch, Ranks: encodeRanks(f.Ranks),
		}}
	case core.FrameProgress:
		r.Kind = &wire.Room_Progress{Progress: &wire.Progress{Bytes: uint64(f.Bytes), Outstanding: f.Outstanding}}
	case core.FrameRankEnd:
		r.Kind = &wire.Room_RankEnd{RankEnd: &wire.RankEnd{
			Quiet: f.Quiet, Sent: encodeSent(f.Sent), Aux: append([]byte(nil), f.Aux...),
			AuxCrc32C: crc32.Checksum(f.Aux, castagnoli),
		}}
	case core.FrameVerdict:
		r.Kind = &wire.Room_Verdict{Verdict: &wire.Verdict{Outcome: wire.Outcome(f.Outcome), Reason: uint32(f.Reason)}}
	case core.FrameAbort:
		r.Kind = &wire.Room_Abort{Abort: &wire.Abort{Reason: uint32(f.Reason)}}
	case core.FrameDrained:
		r.Kind = &wire.Room_Drained{Drained: &wire.Drained{}}
	case core.FrameReady:
		r.Kind = &wire.Room_Ready{Ready: &wire.Ready{Sources: encodeSources(f.Sources)}}
	case core.FrameGroupVerdict:
		r.Kind = &wire.Room_GroupVerdict{GroupVerdict: &wire.GroupVerdict{Outcome: wire.Outcome(f.Outcome), Reason: uint32(f.Reason)}}
	case core.FrameGroupAbort:
		r.Kind = &wire.Room_GroupAbort{GroupAbort: &wire.GroupAbort{}}
	default:
		return nil, bad("kind", "%d is no frame kind", f.Kind)
	}
	// What leaves here must pass the peer's check: one set of rules, applied to both directions.
	if _, err := decodeRoom(r); err != nil {
		return nil, err
	}
	return &x.frame, nil
}

// decodeRoom checks r and converts it. On error the frame has what could be read of Kind, Room, S and
// D; Room is -1 when it names none. Byte slices of r are kept.
func decodeRoom(r *wire.Room) (core.Frame, error) {
	f := core.Frame{Room: -1, Kind: roomKind(r)}
	if r.GetRoom() > math.MaxInt64 {
		return f, bad("room", "%d is above 2^63-1", r.GetRoom())
	}
	f.Room = int64(r.GetRoom())
	f.Att = r.GetAttempt()
	var err, errD error
	f.S, err = decodeOpener("source", r.GetSource())
	f.D, errD = decodeOpener("destination", r.GetDestination())
	if err = errors.Join(err, errD); err != nil {
		return f, err
	}
	if err := checkOpeners(f); err != nil {
		return f, err
	}
	return f, decodeKind(&f, r)
}

func roomKind(r *wire.Room) core.FrameKind {
	switch r.GetKind().(type) {
	case *wire.Room_Queued:
		return core.FrameQueued
	case *wire.Room_Register:
		return core.FrameRegister
	case *wire.Room_Bound:
		return core.FrameBound
	case *wire.Room_Confirm:
		return core.FrameConfirm
	case *wire.Room_Progress:
		return core.FrameProgress
	case *wire.Room_RankEnd:
		return core.FrameRankEnd
	case *wire.Room_Verdict:
		return core.FrameVerdict
	case *wire.Room_Abort:
		return core.FrameAbort
	case *wire.Room_Drained:
		return core.FrameDrained
	case *wire.Room_Ready:
		return core.FrameReady
	case *wire.Room_GroupVerdict:
		return core.FrameGroupVerdict
	case *wire.Room_GroupAbort:
		return core.FrameGroupAbort
	}
	return 0
}

// checkOpeners checks which of the two a kind must name.
func checkOpeners(f core.Frame) error {
	needS, needD := true, true
	switch f.Kind {
	case core.FrameQueued, core.FrameRegister, core.FrameReady, core.FrameGroupVerdict:
		needS = false
	case core.FrameAbort:
		if f.S.IsZero() && f.D.IsZero() {
			return bad("source", "an abort names at least one opener")
		}
		return nil
	case core.FrameGroupAbort, 0: // it speaks for an attempt
		return nil
	}
	if needS && f.S.IsZero() {
		return bad("source", "missing")
	}
	if needD && f.D.IsZero() {
		return bad("destination", "missing")
	}
	return nil
}

func decodeKind(f *core.Frame, r *wire.Room) error {
	switch k := r.GetKind().(type) {
	case *wire.Room_Queued:
		f.Group, f.PeerGroup = k.Queued.GetGroup(), k.Queued.GetPeerGroup()
		return errors.Join(checkName("queued.group", f.Group), checkOptional("queued.peer_group", f.PeerGroup))
	case *wire.Room_Register:
		m := k.Register
		f.Group, f.PeerGroup, f.Backend, f.Epoch = m.GetGroup(), m.GetPeerGroup(), m.GetBackend(), m.GetEpoch()
		err := errors.Join(checkName("register.group", f.Group), checkOptional("register.peer_group", f.PeerGroup),
			checkName("register.backend", f.Backend))
		if err != nil {
			return err
		}
		if f.Epoch == 0 {
			return bad("register.epoch", "0")
		}
		if len(m.GetRanks()) == 0 {
			return bad("register.ranks", "missing")
		}
		f.Ranks, err = decodeRanks("register.ranks", m.GetRanks())
		return err
	case *wire.Room_Bound:
		f.NeedPages = k.Bound.GetNeedPages()
	case *wire.Room_Confirm:
		m := k.Confirm
		if m.GetClockLog2() > maxClock {
			return bad("confirm.clock_log2", "%d is above %d", m.GetClockLog2(), maxClock)
		}
		f.ClockLog2, f.Backend, f.Epoch = uint8(m.GetClockLog2()), m.GetBackend(), m.GetEpoch()
		if err := checkOptional("confirm.backend", f.Backend); err != nil {
			return err
		}
		var err error
		f.Ranks, err = decodeRanks("confirm.ranks", m.GetRanks())
		return err
	case *wire.Room_Progress:
		if k.Progress.GetBytes() > math.MaxInt64 {
			return bad("progress.bytes", "%d is above 2^63-1", k.Progress.GetBytes())
		}
		f.Bytes, f.Outstanding = int64(k.Progress.GetBytes()), k.Progress.GetOutstanding()
	case *wire.Room_RankEnd:
		m := k.RankEnd
		if len(m.GetAux()) > maxAux {
			return bad("rank_end.aux", "%d bytes, at most %d", len(m.GetAux()), maxAux)
		}
		if got := crc32.Checksum(m.GetAux(), castagnoli); got != m.GetAuxCrc32C() {
			return bad("rank_end.aux_crc32c", "says %08x, the bytes have %08x", m.GetAuxCrc32C(), got)
		}
		f.Quiet, f.Aux, f.CRC = m.GetQuiet(), m.GetAux(), m.GetAuxCrc32C()
		var err error
		f.Sent, err = decodeSent(m.GetSent())
		return err
	case *wire.Room_Verdict:
		return decodeVerdict(f, "verdict.outcome", k.Verdict.GetOutcome(), k.Verdict.GetReason())
	case *wire.Room_Abort:
		f.Reason = decodeReason(k.Abort.GetReason())
	case *wire.Room_Drained:
	case *wire.Room_Ready:
		var err error
		f.Sources, err = decodeSources(k.Ready.GetSources())
		return err
	case *wire.Room_GroupVerdict:
		return decodeVerdict(f, "group_verdict.outcome", k.GroupVerdict.GetOutcome(), k.GroupVerdict.GetReason())
	case *wire.Room_GroupAbort:
	default:
		return bad("kind", "missing or unknown")
	}
	return nil
}

func decodeVerdict(f *core.Frame, field string, o wire.Outcome, reason uint32) error {
	if o < wire.Outcome_OUTCOME_SUCCESS || o > wire.Outcome_OUTCOME_UNKNOWN {
		return bad(field, "%d is no outcome", o)
	}
	f.Outcome, f.Reason = core.Outcome(o), decodeReason(reason)
	return nil
}

// decodeReason maps a reason that a newer release appended to PeerAborted, which says what is still
// true of it: the peer ended the room and its own record has the reason.
func decodeReason(n uint32) statemachine.Reason {
	if n >= uint32(statemachine.NumReasons) {
		return statemachine.PeerAborted
	}
	return statemachine.Reason(n)
}

// encodeOpener writes o to w and returns w; nil for none.
func encodeOpener(o statemachine.Opener, w *wire.Opener) *wire.Opener {
	if o.IsZero() {
		return nil
	}
	w.Incarnation, w.Sequence = o.Inc, o.Seq
	return w
}

func decodeOpener(field string, o *wire.Opener) (statemachine.Opener, error) {
	if o == nil {
		return statemachine.Opener{}, nil
	}
	if o.GetIncarnation() == 0 || o.GetSequence() == 0 {
		return statemachine.Opener{}, bad(field, "incarnation %d, sequence %d: neither may be 0", o.GetIncarnation(), o.GetSequence())
	}
	return statemachine.Opener{Inc: o.GetIncarnation(), Seq: o.GetSequence()}, nil
}

func encodeSources(sources []statemachine.Opener) []*wire.Opener {
	out := make([]*wire.Opener, len(sources))
	for i, o := range sources {
		out[i] = &wire.Opener{Incarnation: o.Inc, Sequence: o.Seq}
	}
	return out
}

// decodeSources reads the openers of a vote. Two may be equal: engines count incarnations and openers each
// for itself.
func decodeSources(sources []*wire.Opener) ([]statemachine.Opener, error) {
	const field = "ready.sources"
	if n := len(sources); n == 0 || n > maxRanks {
		return nil, bad(field, "%d openers: want 1 to %d", n, maxRanks)
	}
	out := make([]statemachine.Opener, len(sources))
	for i, w := range sources {
		o, err := decodeOpener(field, w)
		if err != nil {
			return nil, err
		}
		if o.IsZero() {
			return nil, bad(field, "opener %d is missing", i)
		}
		out[i] = o
	}
	return out, nil
}

func encodeRanks(ranks []core.RankPages) []*wire.RankPages {
	var out []*wire.RankPages
	for _, r := range ranks {
		w := &wire.RankPages{Rank: uint32(r.Rank)}
		for _, p := range r.Parts {
			w.Parts = append(w.Parts, &wire.PartPages{
				Ordinal: uint32(p.Ordinal), Pool: p.Pool, Prefix: uint32(p.Prefix), Pages: encodeRuns(p.Runs),
			})
		}
		out = append(out, w)
	}
	return out
}

func decodeRanks(field string, ranks []*wire.RankPages) ([]core.RankPages, error) {
	if len(ranks) == 0 {
		return nil, nil
	}
	if len(ranks) > maxRanks {
		return nil, bad(field, "%d ranks, at most %d", len(ranks), maxRanks)
	}
	out := make([]core.RankPages, 0, len(ranks))
	budget := maxRuns
	seen := numberSet{}
	for _, w := range ranks {
		if err := errors.Join(seen.add(field+".rank", w.GetRank()), checkParts(field, len(w.GetParts()))); err != nil {
			return nil, err
		}
		r := core.RankPages{Rank: int32(w.GetRank())}
		ordinals := numberSet{}
		for _, p := range w.GetParts() {
			if err := ordinals.add(field+".ordinal", p.GetOrdinal()); err != nil {
				return nil, err
			}
			if p.GetPool() == 0 {
				return nil, bad(field+".pool", "0")
			}
			runs, err := decodeRuns(field+".pages", p.GetPages(), &budget)
			if err != nil {
				return nil, err
			}
			if n := layout.Pages(runs); int64(p.GetPrefix()) > n {
				return nil, bad(field+".prefix", "%d of %d pages", p.GetPrefix(), n)
			}
			r.Parts = append(r.Parts, core.PartPages{
				Ordinal: int32(p.GetOrdinal()), Pool: p.GetPool(), Prefix: int32(p.GetPrefix()), Runs: runs,
			})
		}
		out = append(out, r)
	}
	return out, nil
}

// A numberSet finds a rank or ordinal that stands twice or is too large.
type numberSet map[uint32]struct{}

func (s numberSet) add(field string, n uint32) error {
	if n > math.MaxInt32 {
		return bad(field, "%d is above 2^31-1", n)
	}
	if _, twice := s[n]; twice {
		return bad(field, "%d stands twice", n)
	}
	s[n] = struct{}{}
	return nil
}

func checkParts(field string, n int) error {
	if n > maxParts {
		return bad(field+".parts", "%d, at most %d", n, maxParts)
	}
	return nil
}

func encodeRuns(runs []layout.Run) *wire.Runs {
	if len(runs) == 0 {
		return nil
	}
	w := &wire.Runs{Start: make([]uint32, len(runs)), Count: make([]uint32, len(runs))}
	strided := false
	for i, r := range runs {
		w.Start[i], w.Count[i] = uint32(r.Start), uint32(r.Count)
		strided = strided || r.Stride != 1
	}
	if strided {
		w.Stride = make([]uint32, len(runs))
		for i, r := range runs {
			w.Stride[i] = uint32(r.Stride)
		}
	}
	return w
}

func decodeRuns(field string, w *wire.Runs, budget *int) ([]layout.Run, error) {
	n := len(w.GetStart())
	if len(w.GetCount()) != n || len(w.GetStride()) != 0 && len(w.GetStride()) != n {
		return nil, bad(field, "%d starts, %d counts, %d strides", n, len(w.GetCount()), len(w.GetStride()))
	}
	if *budget -= n; *budget < 0 {
		return nil, bad(field, "more than %d runs in one frame", maxRuns)
	}
	if n == 0 {
		return nil, nil
	}
	runs := make([]layout.Run, n)
	total := int64(0)
	for i := range runs {
		start, count, stride := w.Start[i], w.Count[i], uint32(1)
		if len(w.GetStride()) != 0 {
			stride = w.Stride[i]
		}
		if start > math.MaxInt32 || count > math.MaxInt32 || stride > math.MaxInt32 {
			return nil, bad(field, "run %d: a number is above 2^31-1", i)
		}
		runs[i] = layout.Run{Start: int32(start), Count: int32(count), Stride: int32(stride)}
		total += int64(count)
	}
	if err := layout.Check(runs, math.MaxInt32); err != nil {
		return nil, bad(field, "%v", err)
	}
	if total > math.MaxInt32 {
		return nil, bad(field, "%d pages, at most 2^31-1", total)
	}
	return runs, nil
}

func encodeSent(sent []core.RankSent) []*wire.RankSent {
	var out []*wire.RankSent
	for _, s := range sent {
		w := &wire.RankSent{Rank: uint32(s.Rank), Chunks: uint32(s.Chunks)}
		for _, p := range s.Parts {
			w.Parts = append(w.Parts, &wire.PartSent{Ordinal: uint32(p.Ordinal), Pages: uint64(p.Pages)})
		}
		out = append(out, w)
	}
	return out
}

func decodeSent(sent []*wire.RankSent) ([]core.RankSent, error) {
	const field = "rank_end.sent"
	if len(sent) == 0 {
		return nil, nil
	}
	if len(sent) > maxRanks {
		return nil, bad(field, "%d ranks, at most %d", len(sent), maxRanks)
	}
	out := make([]core.RankSent, 0, len(sent))
	seen := numberSet{}
	for _, w := range sent {
		if err := errors.Join(seen.add(field+".rank", w.GetRank()), checkParts(field, len(w.GetParts()))); err != nil {
			return nil, err
		}
		if w.GetChunks() > math.MaxInt32 {
			return nil, bad(field+".chunks", "%d is above 2^31-1", w.GetChunks())
		}
		s := core.RankSent{Rank: int32(w.GetRank()), Chunks: int32(w.GetChunks())}
		ordinals := numberSet{}
		for _, p := range w.GetParts() {
			if err := ordinals.add(field+".ordinal", p.GetOrdinal()); err != nil {
				return nil, err
			}
			if p.GetPages() > math.MaxInt64 {
				return nil, bad(field+".pages", "%d is above 2^63-1", p.GetPages())
			}
			s.Parts = append(s.Parts, core.PartSent{Ordinal: int32(p.GetOrdinal()), Pages: int64(p.GetPages())})
		}
		out = append(out, s)
	}
	return out, nil
}

func checkName(field, s string) error {
	if s == "" {
		return bad(field, "missing")
	}
	return checkOptional(field, s)
}

func checkOptional(field, s string) error {
	if len(s) > maxName {
		return bad(field, "%d bytes, at most %d", len(s), maxName)
	}
	return nil
}
