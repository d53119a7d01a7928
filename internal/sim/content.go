package sim

import (
	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// tag is what a cell of a page holds: what it means to a model. 0: nothing.
type tag uint64

// shape is how the groups of a role lay out their pages. Where the groups of both roles do it alike a page is one
// cell, which is copied whole; else it has a cell for each token of each head of each layer, of one byte in the
// plans of layout.
type shape struct {
	layout.Side
	heads  int32 // of a rank
	layers int32
	cells  int32 // of a page
}

// bytes is the size of a page as engines are told it.
func (s *shape) bytes() int64 {
	if s.cells == 1 {
		return 4096
	}
	return int64(s.cells) * 256
}

func plain(ranks int32) shape {
	return shape{Side: layout.Side{Ranks: ranks, Cache: layout.Cache{PageTokens: 1}}, heads: 1, layers: 1, cells: 1}
}

// unequal draws two shapes that differ and can be mapped, of so many ranks at least.
func (p *plan) unequal(d dice, least [3]int32) {
	for p.mapped.IsZero() {
		src := layout.Side{Cache: layout.Cache{DType: "fp8", Layers: 2, KVHeads: int32(1 + d.n(4)), HeadDim: 1, Kind: layout.MHA}}
		if d.one(3) {
			src.Kind, src.KVHeads = layout.MLA, 1
		}
		dst := src
		for _, s := range []*layout.Side{&src, &dst} {
			s.Ranks, s.PageTokens, s.Order = int32(1+d.n(maxRanks)), int32(1+d.n(2)), layout.NHD
			if d.one(2) {
				s.Order = layout.HND
			}
		}
		m, err := layout.New(src, dst)
		if err != nil || src.Ranks < least[statemachine.Source] || dst.Ranks < least[statemachine.Destination] {
			continue
		}
		p.mapped, p.shape = m, [3]shape{statemachine.Source: shapeOf(src), statemachine.Destination: shapeOf(dst)}
	}
}

func shapeOf(s layout.Side) shape {
	heads := max(1, s.KVHeads/s.Ranks)
	if s.Kind == layout.MLA {
		heads = 1
	}
	return shape{Side: s, heads: heads, layers: s.Layers, cells: s.Layers * heads * s.PageTokens}
}

// head is the i-th head of a rank.
func (s *shape) head(rank, i int32) int32 {
	if s.Kind == layout.MLA {
		return 0
	}
	return rank*s.KVHeads/s.Ranks + i
}

// lengths draws how many pages a source rank sends and where the sequence ends. Of the side with the larger pages the
// last one may be filled in part.
func (r *request) lengths(p *plan, d *dice) {
	from, per := p.mapped.Scale()
	r.prefix -= r.prefix % per
	left := r.pages - r.prefix
	r.sent = (left*from + per - 1) / per
	if from > 1 && left > 0 && d.one(2) {
		r.sent--
	}
	to := p.shape[statemachine.Destination].PageTokens
	r.tokens = r.prefix*to + min(left*to, r.sent*p.shape[statemachine.Source].PageTokens)
}

// want appends what the cells of a life's k-th page hold by what they mean. A destination's are empty beyond the end
// of the sequence.
func (w *world) want(to []tag, l *life, k int32) []tag {
	r, s, rank := &w.plan.requests[l.req], &w.plan.shape[l.role], w.workers[l.worker].rank
	first := k * s.PageTokens
	if l.role == statemachine.Source {
		first += r.prefix * w.plan.shape[statemachine.Destination].PageTokens
	}
	if s.cells == 1 {
		return append(to, tagOf(l.req, l.try, 0, rank, first))
	}
	for layer := range s.layers {
		for slot := range s.heads * s.PageTokens {
			head, token := slot%s.heads, slot/s.heads
			if s.Order == layout.HND {
				head, token = slot/s.PageTokens, slot%s.PageTokens
			}
			if l.role == statemachine.Destination && first+token >= r.tokens {
				to = append(to, 0)
				continue
			}
			to = append(to, tagOf(l.req, l.try, layer, s.head(rank, head), first+token))
		}
	}
	return to
}

func tagOf(request int32, try int, layer, head, token int32) tag {
	return tag(mix(uint64(request)<<48 ^ uint64(try)<<40 ^ uint64(layer)<<32 ^ uint64(head)<<16 ^ uint64(token)))
}

// copies is what a plugin copies from a page of one rank to a page of another.
type copies struct {
	m               layout.Map
	from, to, phase int32
	src, dst        int32 // cells of a layer
}

// planOf is the plan of an op; nil for whole pages. Plans are kept from one schedule to the next: there are few.
func (w *world) planOf(p *core.PluginEffect) []layout.Slice {
	if p.Map.IsZero() {
		return nil
	}
	src, dst := &w.plan.shape[statemachine.Source], &w.plan.shape[statemachine.Destination]
	c := copies{p.Map, p.SrcRank, p.DstRank, p.Phase, src.cells / src.layers, dst.cells / dst.layers}
	plan, ok := w.plans[c]
	if !ok {
		var tensors [2][]layout.Tensor
		for layer := range src.layers {
			tensors[0] = append(tensors[0], layout.Tensor{Layer: layer, PageBytes: int64(c.src)})
			tensors[1] = append(tensors[1], layout.Tensor{Layer: layer, PageBytes: int64(c.dst)})
		}
		var err error
		if plan, err = c.m.Plan(c.from, c.to, c.phase, tensors[0], tensors[1]); err != nil {
			w.violate(Memory, "op of %s: %v", w.openerText(p.S), err)
		}
		w.plans[c] = plan
	}
	return plan
}

// copyPage carries out an op between two pages: what its plan, whose tensors are the layers, copies of its layers.
func (w *world) copyPage(o *op, from, to []tag) {
	if o.plan == nil {
		copy(to, from)
		return
	}
	w.total.mapped++
	layers := int64(w.plan.shape[statemachine.Source].layers)
	src, dst := int64(len(from))/layers, int64(len(to))/layers
	for _, s := range o.plan {
		if int32(s.Src) < o.layers[0] || int32(s.Src) >= o.layers[1] {
			continue
		}
		a, b := int64(s.Src)*src+s.SrcOff, int64(s.Dst)*dst+s.DstOff
		for i := range int64(s.Count) {
			copy(to[b+i*s.DstStride:][:s.Len], from[a+i*s.SrcStride:][:s.Len])
		}
	}
}
