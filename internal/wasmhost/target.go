package wasmhost

import (
	"cmp"
	"slices"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/shm"
)

// target is what an op may write to of one region of its peer: the pages of its destination. The guest's word
// that an op is quiet is worth as much as this: a page that was given away is in no target.
type target struct {
	window *shm.Window
	spans  []span // sorted; two that touch are one
}

// span is the bytes [from, to) of a region.
type span struct{ from, to uint64 }

// aim fills in the spans of the op's targets. The SDK has checked that all pages lie in their regions.
func (o *openOp) aim() {
	from, to := o.op.Layers()
	runs := o.op.Destination()
	seen := map[*sdk.Tensor]bool{}
	plan := o.op.Plan().Slices
	for i := range plan {
		tensor := plan[i].Dst
		if seen[tensor] || plan[i].Layer < from || plan[i].Layer >= to {
			continue
		}
		seen[tensor] = true
		t := o.targets[tensor.RegionID]
		for _, r := range runs {
			t.spans = appendPages(t.spans, tensor, r)
		}
	}
	for _, t := range o.targets {
		t.spans = merge(t.spans)
	}
}

func appendPages(spans []span, t *sdk.Tensor, r sdk.Run) []span {
	start := t.Offset + uint64(r.Start)*t.PageStride
	if r.Stride == 1 && t.PageStride == t.PageBytes {
		return append(spans, span{start, start + uint64(r.Count)*t.PageBytes})
	}
	for range r.Count {
		spans = append(spans, span{start, start + t.PageBytes})
		start += uint64(r.Stride) * t.PageStride
	}
	return spans
}

// merge sorts spans and joins those that touch.
func merge(spans []span) []span {
	slices.SortFunc(spans, func(a, b span) int { return cmp.Compare(a.from, b.from) })
	joined := spans[:0]
	for _, s := range spans {
		if n := len(joined); n > 0 && s.from <= joined[n-1].to {
			joined[n-1].to = max(joined[n-1].to, s.to)
		} else {
			joined = append(joined, s)
		}
	}
	return slices.Clip(joined)
}

// covers tells whether [off, off+n), which lies in the region, is all in pages of the op.
func (t *target) covers(off, n uint64) bool {
	i, found := slices.BinarySearchFunc(t.spans, off, func(s span, off uint64) int { return cmp.Compare(s.from, off) })
	if !found {
		i--
	}
	return n == 0 || i >= 0 && off+n <= t.spans[i].to
}
