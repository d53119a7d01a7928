package layout

import (
	"fmt"
	"strconv"
)

// Tensor is what a plan must know of one tensor of a pool.
type Tensor struct {
	Layer     int32
	PageBytes int64
}

// Slice is one strided copy inside a pair of pages: for i < Count, Len bytes at SrcOff + i*SrcStride of a
// page of tensor Src go to DstOff + i*DstStride of a page of tensor Dst.
type Slice struct {
	Src, Dst             int
	SrcOff, DstOff       int64
	Len                  int64
	Count                int32
	SrcStride, DstStride int64
}

// Identity is the plan between two pools of the same shape: tensor i to tensor i, whole pages. It
// covers each byte of a destination page exactly once.
func Identity(src, dst []Tensor) ([]Slice, error) { return Map{}.Plan(0, 0, 0, src, dst) }

// Plan is what one op of a phase copies from a page of a pool of source rank r to a page of a pool of
// destination rank q. Together the plans of all source ranks and phases cover each byte of the pages of q
// exactly once. The pools must fit the map: a *Mismatch names the tensor that does not.
func (m Map) Plan(r, q, phase int32, src, dst []Tensor) ([]Slice, error) {
	if len(src) != len(dst) {
		return nil, &Mismatch{"tensors", strconv.Itoa(len(src)), strconv.Itoa(len(dst))}
	}
	plan := make([]Slice, 0, len(src))
	for i := range src {
		if err := m.fit(i, src[i], dst[i]); err != nil {
			return nil, err
		}
		switch {
		case !m.moves(r, q, src[i].Layer):
		case m.row == 0:
			plan = append(plan, whole(i, src[i].PageBytes))
		default:
			plan = m.slices(plan, i, r, q, phase)
		}
	}
	return plan, nil
}

func whole(i int, n int64) Slice {
	return Slice{Src: i, Dst: i, Len: n, Count: 1, SrcStride: n, DstStride: n}
}

// fit checks tensor i of both pools.
func (m Map) fit(i int, src, dst Tensor) error {
	field := func(a, b string) error { return &Mismatch{fmt.Sprintf("tensors[%d]", i), a, b} }
	if src.Layer != dst.Layer || m.row == 0 && src.PageBytes != dst.PageBytes {
		return field(fmt.Sprintf("layer %d of %d bytes a page", src.Layer, src.PageBytes), fmt.Sprintf("layer %d of %d bytes a page", dst.Layer, dst.PageBytes))
	}
	if m.row == 0 {
		return nil
	}
	_, have := m.own(0, m.srcRanks)
	_, want := m.own(0, m.dstRanks)
	a, b := int64(m.srcTokens)*int64(have)*int64(m.row), int64(m.dstTokens)*int64(want)*int64(m.row)
	if src.PageBytes != a || dst.PageBytes != b {
		return field(fmt.Sprintf("%d bytes a page, %d by its layout", src.PageBytes, a), fmt.Sprintf("%d, %d by its layout", dst.PageBytes, b))
	}
	return nil
}

// slices appends the copies of one tensor: tokens x heads rows on both sides, with the strides that the
// orders give.
func (m Map) slices(plan []Slice, i int, r, q, phase int32) []Slice {
	a, have := m.own(r, m.srcRanks)
	b, want := m.own(q, m.dstRanks)
	head := max(a, b) // first of those that both have
	heads := int64(min(a+have, b+want) - head)
	row, tokens := int64(m.row), int64(min(m.srcTokens, m.dstTokens))
	s := strides(m.srcHND, int64(have), int64(m.srcTokens), row)
	d := strides(m.dstHND, int64(want), int64(m.dstTokens), row)
	c := Slice{Src: i, Dst: i, SrcOff: int64(head-a) * s.head, DstOff: int64(head-b) * d.head, Len: row}
	if m.srcTokens > m.dstTokens {
		c.SrcOff += int64(phase) * tokens * s.token
	} else {
		c.DstOff += int64(phase) * tokens * d.token
	}
	switch {
	case heads == 1 || s.head == row && d.head == row: // the heads of a token lie together
		c.Len = heads * row
		c.repeat(tokens, s.token, d.token)
	case tokens == 1 || s.token == row && d.token == row: // the tokens of a head do
		c.Len = tokens * row
		c.repeat(heads, s.head, d.head)
	default: // one order becomes the other
		for range heads {
			h := c
			h.repeat(tokens, s.token, d.token)
			plan = append(plan, h)
			c.SrcOff += s.head
			c.DstOff += d.head
		}
		return plan
	}
	return append(plan, c)
}

// stride is the distance of neighbours within a page, bytes.
type stride struct{ head, token int64 }

func strides(hnd bool, heads, tokens, row int64) stride {
	if hnd {
		return stride{head: tokens * row, token: row}
	}
	return stride{head: row, token: heads * row}
}

// repeat makes n of a slice; those that touch each other on both sides are one.
func (c *Slice) repeat(n, src, dst int64) {
	c.Count, c.SrcStride, c.DstStride = int32(n), src, dst
	if n == 1 || src == c.Len && dst == c.Len {
		c.Len *= n
		c.Count, c.SrcStride, c.DstStride = 1, c.Len, c.Len
	}
}

// Bytes is what a plan moves for one pair of pages in the layers [from, to).
func Bytes(plan []Slice, src []Tensor, from, to int32) int64 {
	var n int64
	for _, s := range plan {
		if l := src[s.Src].Layer; l >= from && l < to {
			n += s.Len * int64(s.Count)
		}
	}
	return n
}
