package sdk

import (
	"slices"
	"sort"
)

// PageSet is a set of page ids: sorted, disjoint, non-adjacent half-open intervals. Immutable.
type PageSet struct {
	spans []span
	count uint64
}

type span struct{ from, to uint64 }

// Contains tells whether page is in the set.
func (s PageSet) Contains(page uint32) bool {
	_, ok := s.spanEnd(uint64(page))
	return ok
}

// Len returns the number of pages in the set.
func (s PageSet) Len() uint64 { return s.count }

// spanEnd returns the end of the interval that holds page.
func (s PageSet) spanEnd(page uint64) (uint64, bool) {
	i := sort.Search(len(s.spans), func(i int) bool { return s.spans[i].to > page })
	if i == len(s.spans) || s.spans[i].from > page {
		return 0, false
	}
	return s.spans[i].to, true
}

// NewPageSet makes the set of all pages that the runs name.
func NewPageSet(runs ...Run) PageSet {
	var spans []span
	for _, r := range runs {
		if r.Stride == 1 {
			spans = append(spans, span{uint64(r.Start), uint64(r.Start) + uint64(r.Count)})
			continue
		}
		for i := uint64(0); i < uint64(r.Count); i++ {
			page := uint64(r.Start) + i*uint64(r.Stride)
			spans = append(spans, span{page, page + 1})
		}
	}
	slices.SortFunc(spans, func(a, b span) int {
		if a.from < b.from {
			return -1
		}
		if a.from > b.from {
			return 1
		}
		return 0
	})
	set := PageSet{}
	for _, sp := range spans {
		if n := len(set.spans); n > 0 && sp.from <= set.spans[n-1].to {
			set.spans[n-1].to = max(set.spans[n-1].to, sp.to)
			continue
		}
		set.spans = append(set.spans, sp)
	}
	set.spans = slices.Clip(set.spans)
	for _, sp := range set.spans {
		set.count += sp.to - sp.from
	}
	return set
}

// Admits tells whether the writers of a node (Peer.Node, as Accept got it) may write under this grant. A backend
// with FeatureReceiverChecked asks besides Covers: an opener is no secret.
func (g *Grant) Admits(node string) bool {
	return len(g.Writers) == 0 || slices.Contains(g.Writers, node)
}

// Covers tells whether every byte of [off, off+n) of the region belongs to a granted page. A backend
// with FeatureReceiverChecked asks before it copies a slice. An empty range is covered.
func (g *Grant) Covers(region, off, n uint64) bool {
	end := off + n
	if end < off {
		return false
	}
	for off < end {
		next, ok := g.coveredFrom(region, off)
		if !ok {
			return false
		}
		off = next
	}
	return true
}

// coveredFrom returns the end of a granted stretch of the region that holds off.
func (g *Grant) coveredFrom(region, off uint64) (end uint64, ok bool) {
	for i := range g.Parts {
		part := &g.Parts[i]
		for j := range part.Pool.Tensors {
			t := &part.Pool.Tensors[j]
			if t.RegionID != region || off < t.Offset || t.PageStride == 0 {
				continue
			}
			page := (off - t.Offset) / t.PageStride
			if page >= uint64(part.Pool.Pages) || (off-t.Offset)%t.PageStride >= t.PageBytes {
				continue
			}
			last, in := part.Pages.spanEnd(page)
			if !in {
				continue
			}
			if t.PageStride == t.PageBytes { // pages lie side by side: take the whole interval
				return t.Offset + last*t.PageStride, true
			}
			return t.Offset + page*t.PageStride + t.PageBytes, true
		}
	}
	return 0, false
}
