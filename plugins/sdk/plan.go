package sdk

import (
	"fmt"
	"iter"
	"math/bits"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// Run is Count pages: Start, Start+Stride, …
type Run struct{ Start, Count, Stride uint32 }

// Row is Count pieces of Len bytes at constant strides: the form that libraries with strided
// descriptors want. Piece i goes from Src[SrcOff + i*SrcStride] to region DstRegion at
// DstOff + i*DstStride. With Count 1 the strides mean nothing.
type Row struct {
	Src       *Region
	SrcOff    uint64
	SrcStride uint64
	DstRegion uint64
	Dst       *RemoteRegion // nil when the region was not announced
	DstOff    uint64
	DstStride uint64
	Len       uint64
	Count     uint64
}

// Slice is one strided copy inside a pair of pages (contract.Slice) with its tensors resolved. A slice
// whose pieces touch is folded into one piece.
type Slice struct {
	Layer     uint32
	Src, Dst  *Tensor
	SrcOff    uint64 // from the start of the source page
	DstOff    uint64
	Len       uint64
	SrcStride uint64
	DstStride uint64
	Count     uint64
	SrcPage   uint32 // the page of its group, below Plan.SrcPages
	DstPage   uint32
}

// Plan says how groups of SrcPages pages of a local pool become groups of DstPages pages of a remote
// one. Both are 1 unless the backend has FeatureRepage.
type Plan struct {
	ID       uint64
	Src, Dst *Pool
	SrcPages uint32
	DstPages uint32
	Slices   []Slice
}

// maxGroup is the largest PlanAdd.src_pages and dst_pages.
const maxGroup = 4096

// bytesPerGroup is what a plan moves for one group of pages in layers [from, to).
func (p *Plan) bytesPerGroup(from, to uint32) uint64 {
	var n uint64
	for i := range p.Slices {
		if s := &p.Slices[i]; s.Layer >= from && s.Layer < to {
			n += s.Len * s.Count
		}
	}
	return n
}

// newPlan checks the slices against both pools. The error names the field. repage says that the backend
// serves plans of other than one page to one page.
func newPlan(m *contract.PlanAdd, src, dst *Pool, repage bool) (*Plan, error) {
	switch {
	case m.SrcPages == 1 && m.DstPages == 1:
	case !repage:
		return nil, unsupported("PlanAdd.src_pages:dst_pages is %d:%d; other than 1:1 needs feature %s", m.SrcPages, m.DstPages, FeatureRepage)
	case m.SrcPages == 0 || m.DstPages == 0 || m.SrcPages > maxGroup || m.DstPages > maxGroup:
		return nil, fmt.Errorf("PlanAdd.src_pages:dst_pages is %d:%d; each is from 1 to %d", m.SrcPages, m.DstPages, maxGroup)
	}
	plan := &Plan{ID: m.Plan, Src: src, Dst: dst, SrcPages: m.SrcPages, DstPages: m.DstPages, Slices: make([]Slice, 0, len(m.Slices))}
	var total uint64
	for i, w := range m.Slices {
		if w == nil {
			return nil, fmt.Errorf("PlanAdd.slices[%d] is empty", i)
		}
		if uint64(w.SrcTensor) >= uint64(len(src.Tensors)) {
			return nil, fmt.Errorf("PlanAdd.slices[%d].src_tensor is %d; the pool has %d", i, w.SrcTensor, len(src.Tensors))
		}
		if uint64(w.DstTensor) >= uint64(len(dst.Tensors)) {
			return nil, fmt.Errorf("PlanAdd.slices[%d].dst_tensor is %d; the pool has %d", i, w.DstTensor, len(dst.Tensors))
		}
		s := Slice{
			Src: &src.Tensors[w.SrcTensor], Dst: &dst.Tensors[w.DstTensor],
			SrcOff: w.SrcOff, DstOff: w.DstOff, Len: w.Len,
			SrcStride: w.SrcStride, DstStride: w.DstStride, Count: uint64(w.Count),
			SrcPage: w.SrcPage, DstPage: w.DstPage,
		}
		s.Layer = s.Src.Layer
		if s.SrcPage >= plan.SrcPages || s.DstPage >= plan.DstPages {
			return nil, fmt.Errorf("PlanAdd.slices[%d]: src_page %d, dst_page %d; the groups have %d and %d pages", i, s.SrcPage, s.DstPage, plan.SrcPages, plan.DstPages)
		}
		if s.Len == 0 || s.Count == 0 {
			return nil, fmt.Errorf("PlanAdd.slices[%d]: len %d, count %d; neither may be 0", i, s.Len, s.Count)
		}
		if s.Src.Layer != s.Dst.Layer {
			return nil, fmt.Errorf("PlanAdd.slices[%d]: source layer %d, destination layer %d", i, s.Src.Layer, s.Dst.Layer)
		}
		if !fits(s.SrcOff, s.SrcStride, s.Count, s.Len, s.Src.PageBytes) {
			return nil, fmt.Errorf("PlanAdd.slices[%d]: source bytes leave the page of %d bytes", i, s.Src.PageBytes)
		}
		if !fits(s.DstOff, s.DstStride, s.Count, s.Len, s.Dst.PageBytes) {
			return nil, fmt.Errorf("PlanAdd.slices[%d]: destination bytes leave the page of %d bytes", i, s.Dst.PageBytes)
		}
		if s.Count > 1 && s.DstStride < s.Len {
			return nil, fmt.Errorf("PlanAdd.slices[%d].dst_stride is %d, less than len %d: pieces overlap", i, s.DstStride, s.Len)
		}
		if s.Count > 1 && s.SrcStride == s.Len && s.DstStride == s.Len {
			s.Len, s.Count = s.Len*s.Count, 1
		}
		var carry uint64
		if total, carry = bits.Add64(total, s.Len*s.Count, 0); carry != 0 {
			return nil, fmt.Errorf("PlanAdd.slices: the sizes overflow")
		}
		plan.Slices = append(plan.Slices, s)
	}
	return plan, nil
}

// fits tells whether count pieces of n bytes from off at stride lie within size, without overflow.
func fits(off, stride, count, n, size uint64) bool {
	if count == 0 {
		return off <= size
	}
	hi, span := bits.Mul64(count-1, stride)
	if hi != 0 {
		return false
	}
	end, c1 := bits.Add64(span, off, 0)
	end, c2 := bits.Add64(end, n, 0)
	return c1 == 0 && c2 == 0 && end <= size
}

// newPool checks geometry. resolve fills in the tensor's region and returns its size; for a remote
// region that was not announced that is no more than a bound against overflow.
func newPool(m *contract.PoolAdd, resolve func(t *Tensor) (size uint64, err error)) (*Pool, error) {
	pool := &Pool{ID: m.Pool, Pages: m.Pages, Tensors: make([]Tensor, 0, len(m.Tensors))}
	if m.Pages == 0 {
		return nil, fmt.Errorf("PoolAdd.pages is 0")
	}
	if len(m.Tensors) == 0 {
		return nil, fmt.Errorf("PoolAdd.tensors is empty")
	}
	for i, w := range m.Tensors {
		if w == nil {
			return nil, fmt.Errorf("PoolAdd.tensors[%d] is empty", i)
		}
		t := Tensor{RegionID: w.Region, Offset: w.Offset, PageStride: w.PageStride, PageBytes: w.PageBytes, Layer: w.Layer}
		if t.PageBytes == 0 || t.PageStride < t.PageBytes {
			return nil, fmt.Errorf("PoolAdd.tensors[%d]: page_bytes %d, page_stride %d", i, t.PageBytes, t.PageStride)
		}
		size, err := resolve(&t)
		if err != nil {
			return nil, fmt.Errorf("PoolAdd.tensors[%d].region %d: %w", i, w.Region, err)
		}
		if !fits(t.Offset, t.PageStride, uint64(m.Pages), t.PageBytes, size) {
			return nil, fmt.Errorf("PoolAdd.tensors[%d]: %d pages leave the region of %d bytes", i, m.Pages, size)
		}
		pool.Tensors = append(pool.Tensors, t)
	}
	return pool, nil
}

// checkRuns validates runs against the pages of a pool and returns the number of pages named.
func checkRuns(field string, r *contract.Runs, pages uint32) (total uint64, strided bool, err error) {
	n := len(r.GetStart())
	if len(r.GetCount()) != n || (len(r.GetStride()) != 0 && len(r.GetStride()) != n) {
		return 0, false, fmt.Errorf("%s: %d starts, %d counts, %d strides", field, n, len(r.GetCount()), len(r.GetStride()))
	}
	for i := range n {
		run := runAt(r, i)
		if run.Count == 0 {
			return 0, false, fmt.Errorf("%s.count[%d] is 0", field, i)
		}
		if run.Stride == 0 {
			return 0, false, fmt.Errorf("%s.stride[%d] is 0", field, i)
		}
		if !fits(uint64(run.Start), uint64(run.Stride), uint64(run.Count), 1, uint64(pages)) {
			return 0, false, fmt.Errorf("%s: run %d (start %d, count %d, stride %d) leaves the pool of %d pages", field, i, run.Start, run.Count, run.Stride, pages)
		}
		strided = strided || (run.Stride > 1 && run.Count > 1)
		total += uint64(run.Count)
	}
	return total, strided, nil
}

func runAt(r *contract.Runs, i int) Run {
	run := Run{Start: r.Start[i], Count: r.Count[i], Stride: 1}
	if len(r.Stride) != 0 {
		run.Stride = r.Stride[i]
	}
	return run
}

// runList converts checked wire runs.
func runList(r *contract.Runs) []Run {
	out := make([]Run, len(r.GetStart()))
	for i := range out {
		out[i] = runAt(r, i)
	}
	return out
}

// picker walks the pages of a run list that stand at one place of their group: pages at, at+of, at+2*of …
// of the list, again as runs. The whole list is {runs: r, of: 1}.
type picker struct {
	runs *contract.Runs
	next int    // run
	at   uint64 // pages to pass over before the next one
	of   uint64
}

// run returns the next run, Count 0 at the end.
func (p *picker) run() Run {
	for p.next < len(p.runs.GetStart()) {
		r := runAt(p.runs, p.next)
		p.next++
		count := uint64(r.Count)
		if p.at >= count {
			p.at -= count
			continue
		}
		n := (count - p.at + p.of - 1) / p.of
		out := Run{Start: r.Start + uint32(p.at)*r.Stride, Count: uint32(n), Stride: 1}
		if n > 1 || p.of == 1 { // else the product could overflow, and means nothing
			out.Stride = r.Stride * uint32(p.of)
		}
		p.at = p.at + n*p.of - count
		return out
	}
	return Run{}
}

// pairRuns walks two run lists of equal length in pages and yields pairs of equal count.
func pairRuns(a, b picker) iter.Seq2[Run, Run] {
	return func(yield func(Run, Run) bool) {
		var ra, rb Run
		a, b := a, b // ranged over more than once
		for {
			if ra.Count == 0 {
				if ra = a.run(); ra.Count == 0 {
					return
				}
			}
			if rb.Count == 0 {
				if rb = b.run(); rb.Count == 0 {
					return
				}
			}
			n := min(ra.Count, rb.Count)
			ha, hb := ra, rb
			ha.Count, hb.Count = n, n
			if !yield(ha, hb) {
				return
			}
			ra.Start, ra.Count = ra.Start+n*ra.Stride, ra.Count-n
			rb.Start, rb.Count = rb.Start+n*rb.Stride, rb.Count-n
		}
	}
}

// rows expands runs × slices of layers [from, to), slice by slice, to strided rows.
func (p *Plan) rows(src, dst *contract.Runs, from, to uint32) iter.Seq[Row] {
	return func(yield func(Row) bool) {
		for i := 0; i < len(p.Slices); {
			if l := p.Slices[i].Layer; l < from || l >= to {
				i++
				continue
			}
			s := p.Slices[i]
			for i++; i < len(p.Slices) && s.absorb(&p.Slices[i], from, to); i++ {
			}
			srcs := picker{runs: src, at: uint64(s.SrcPage), of: uint64(p.SrcPages)}
			dsts := picker{runs: dst, at: uint64(s.DstPage), of: uint64(p.DstPages)}
			for a, b := range pairRuns(srcs, dsts) {
				if !s.emit(a, b, yield) {
					return
				}
			}
		}
	}
}

// absorb extends s by the next slice when the two touch at both ends in every page.
func (s *Slice) absorb(n *Slice, from, to uint32) bool {
	if n.Layer < from || n.Layer >= to || s.Count != 1 || n.Count != 1 || s.SrcPage != n.SrcPage || s.DstPage != n.DstPage ||
		s.Src.RegionID != n.Src.RegionID || s.Dst.RegionID != n.Dst.RegionID ||
		s.Src.PageStride != n.Src.PageStride || s.Dst.PageStride != n.Dst.PageStride ||
		s.Src.Offset+s.SrcOff+s.Len != n.Src.Offset+n.SrcOff ||
		s.Dst.Offset+s.DstOff+s.Len != n.Dst.Offset+n.DstOff {
		return false
	}
	s.Len += n.Len
	return true
}

// emit yields the rows of one slice over a pair of runs of equal count: the longer dimension becomes
// the row.
func (s *Slice) emit(a, b Run, yield func(Row) bool) bool {
	srcPage, dstPage := uint64(a.Stride)*s.Src.PageStride, uint64(b.Stride)*s.Dst.PageStride
	row := Row{
		Src: s.Src.Region, DstRegion: s.Dst.RegionID, Dst: s.Dst.Remote, Len: s.Len,
		SrcOff: s.Src.Offset + uint64(a.Start)*s.Src.PageStride + s.SrcOff,
		DstOff: s.Dst.Offset + uint64(b.Start)*s.Dst.PageStride + s.DstOff,
	}
	outer := uint64(a.Count)
	outerSrc, outerDst := srcPage, dstPage
	row.Count, row.SrcStride, row.DstStride = s.Count, s.SrcStride, s.DstStride
	if outer >= s.Count {
		outer, row.Count = row.Count, outer
		outerSrc, row.SrcStride = row.SrcStride, srcPage
		outerDst, row.DstStride = row.DstStride, dstPage
	}
	for range outer {
		if !yield(row) {
			return false
		}
		row.SrcOff += outerSrc
		row.DstOff += outerDst
	}
	return true
}

// copies expands rows to contiguous copies, joining neighbours.
func copies(rows iter.Seq[Row]) iter.Seq[Copy] {
	return func(yield func(Copy) bool) {
		var held Copy // Len 0: none
		for r := range rows {
			n, count := r.Len, r.Count
			if count > 1 && r.SrcStride == n && r.DstStride == n {
				n, count = n*count, 1
			}
			for i := range count {
				c := Copy{Src: r.Src, SrcOff: r.SrcOff + i*r.SrcStride, DstRegion: r.DstRegion, Dst: r.Dst, DstOff: r.DstOff + i*r.DstStride, Len: n}
				if held.Len != 0 && held.Src == c.Src && held.DstRegion == c.DstRegion &&
					held.SrcOff+held.Len == c.SrcOff && held.DstOff+held.Len == c.DstOff {
					held.Len += c.Len
					continue
				}
				if held.Len != 0 && !yield(held) {
					return
				}
				held = c
			}
		}
		if held.Len != 0 {
			yield(held)
		}
	}
}
