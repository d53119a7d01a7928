package guest

import (
	"iter"
	"strconv"
)

// copyMost is the most that one call of the host copies: little enough that progress is seen, and that the
// calls do not count. The host's own limit is above.
const copyMost = 1 << 20

// Op is one operation: the pages of Source go to those of Destination as Plan says, layers [LayerFrom,
// LayerTo) only.
type Op struct {
	ID          uint64
	Plan        *Plan
	Source      []Run
	Destination []Run
	LayerFrom   uint32
	LayerTo     uint32
	Priority    int32
	Bytes       uint64 // the sum of Len over Copies

	s        *session
	yield    func(over bool) bool
	aborted  bool
	ended    bool
	progress uint64 // moved, by Copy or by the author's word
	sent     uint64 // the last Progress
	turn     uint64 // copied since the op was resumed
}

// Copy is Len bytes from a region of this engine's to a region of the peer's.
type Copy struct {
	Src, SrcOff uint64
	Dst, DstOff uint64
	Len         uint64
}

// Copy has the host copy c, however long, counts it as progress, and gives way to other ops when the turn of
// this one is over. An error other than ErrAborted says what was wrong with c.
func (o *Op) Copy(c Copy) error {
	for c.Len > 0 {
		if err := o.pause(); err != nil {
			return err
		}
		n := min(c.Len, copyMost)
		if err := failure(o.s.host.copy(o.Plan.Peer, c.Dst, c.DstOff, c.Src, c.SrcOff, n)); err != nil {
			return err
		}
		c.SrcOff, c.DstOff, c.Len = c.SrcOff+n, c.DstOff+n, c.Len-n
		o.turn += n
		o.Progress(o.progress + n)
	}
	return nil
}

// pause gives way when the turn is over.
func (o *Op) pause() error {
	if o.aborted {
		return ErrAborted
	}
	if o.turn >= turnBytes || o.s.host.now() >= o.s.deadline {
		return o.Yield()
	}
	return nil
}

// Yield lets other ops run and returns in a later turn: ErrAborted when this op should end.
func (o *Op) Yield() error {
	o.yield(false)
	o.turn = 0
	if o.aborted {
		return ErrAborted
	}
	return nil
}

// Progress reports the bytes moved so far, for those that Copy did not move. It never goes back.
func (o *Op) Progress(bytes uint64) { o.progress = max(o.progress, min(bytes, o.Bytes)) }

// Done ends the op: every byte is visible to the destination worker.
func (o *Op) Done() { o.end(func(e *encoder) { e.done(o.ID, o.Bytes) }) }

// Fail ends the op; detail, of which 256 bytes are kept, is for people. What Copy did is over when it
// returned, so every end of a guest is quiet.
func (o *Op) Fail(cause Cause, detail string) {
	o.end(func(e *encoder) { e.failed(o.ID, cause, detail) })
}

// Skip ends the op because the backend decided not to do it. Nothing to do is Done, not Skip.
func (o *Op) Skip(cause Cause, detail string) {
	o.end(func(e *encoder) { e.skipped(o.ID, cause, detail) })
}

// Aborted ends the op after ErrAborted.
func (o *Op) Aborted() { o.end(func(e *encoder) { e.aborted(o.ID) }) }

func (o *Op) end(put func(*encoder)) {
	if o.ended {
		panic("op " + strconv.FormatUint(o.ID, 10) + " is ended a second time")
	}
	o.ended = true
	o.s.report(put)
}

// Copies yields the contiguous copies of the op, neighbours joined.
func (o *Op) Copies() iter.Seq[Copy] {
	return func(yield func(Copy) bool) {
		var held Copy
		for c := range o.pieces() {
			if held.Len != 0 && held.Src == c.Src && held.Dst == c.Dst && held.SrcOff+held.Len == c.SrcOff && held.DstOff+held.Len == c.DstOff {
				held.Len += c.Len
				continue
			}
			if held.Len != 0 && !yield(held) {
				return
			}
			held = c
		}
		if held.Len != 0 {
			yield(held)
		}
	}
}

// pieces yields the op piece by piece, tensor by tensor and within it group by group: so pages that follow one
// another in memory at both ends come one after the other, also when their sizes differ.
func (o *Op) pieces() iter.Seq[Copy] {
	p := o.Plan
	src, dst := pages(o.Source), pages(o.Destination)
	groups := len(src) / int(p.SrcPages)
	return func(yield func(Copy) bool) {
		for first := 0; first < len(p.Slices); {
			s := &p.Slices[first]
			last := first + 1
			for last < len(p.Slices) && p.Slices[last].SrcTensor == s.SrcTensor && p.Slices[last].DstTensor == s.DstTensor {
				last++
			}
			slices := p.Slices[first:last]
			first = last
			from, to := &p.Src.Tensors[s.SrcTensor], &p.Dst.Tensors[s.DstTensor]
			if from.Layer < o.LayerFrom || from.Layer >= o.LayerTo {
				continue
			}
			for k := range groups {
				for i := range slices {
					s := &slices[i]
					c := Copy{
						Src: from.Region, SrcOff: from.Offset + uint64(src[k*int(p.SrcPages)+int(s.SrcPage)])*from.PageStride + s.SrcOff,
						Dst: to.Region, DstOff: to.Offset + uint64(dst[k*int(p.DstPages)+int(s.DstPage)])*to.PageStride + s.DstOff,
						Len: s.Len,
					}
					count := s.Count
					if s.SrcStride == s.Len && s.DstStride == s.Len {
						c.Len, count = c.Len*uint64(count), 1
					}
					for range count {
						if !yield(c) {
							return
						}
						c.SrcOff, c.DstOff = c.SrcOff+s.SrcStride, c.DstOff+s.DstStride
					}
				}
			}
		}
	}
}

// pages lists the pages of runs, in order.
func pages(runs []Run) []uint32 {
	n := 0
	for _, r := range runs {
		n += int(r.Count)
	}
	list := make([]uint32, 0, n)
	for _, r := range runs {
		for i := range r.Count {
			list = append(list, r.Start+i*r.Stride)
		}
	}
	return list
}
