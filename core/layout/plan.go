package layout

import (
	"fmt"
	"strconv"
)

// Cache says what the bytes of a group's pages mean. It does not depend on the tensor-parallel size.
type Cache struct {
	DType      string `json:"dtype"`       // element type, e.g. "bf16", "fp8_e4m3"
	Layers     int32  `json:"layers"`      // of the model (or of this pipeline stage)
	KVHeads    int32  `json:"kv_heads"`    // in all, not per rank
	HeadDim    int32  `json:"head_dim"`    // elements
	PageTokens int32  `json:"page_tokens"` // tokens in a page
	Kind       string `json:"kind"`        // "mha" or "mla"
}

// Mismatch says which field of two caches cannot be mapped. It refuses the pair of groups before any
// room.
type Mismatch struct {
	Field               string
	Source, Destination string
}

func (m *Mismatch) Error() string {
	return fmt.Sprintf("layout.%s: source has %s, destination has %s", m.Field, m.Source, m.Destination)
}

// Compatible reports why pages of src cannot become pages of dst; nil when they can. Version 1 maps
// equal layouts only.
func Compatible(src, dst Cache) error {
	n := func(v int32) string { return strconv.Itoa(int(v)) }
	for _, f := range []struct{ name, src, dst string }{
		{"kind", src.Kind, dst.Kind},
		{"dtype", src.DType, dst.DType},
		{"layers", n(src.Layers), n(dst.Layers)},
		{"kv_heads", n(src.KVHeads), n(dst.KVHeads)},
		{"head_dim", n(src.HeadDim), n(dst.HeadDim)},
		{"page_tokens", n(src.PageTokens), n(dst.PageTokens)},
	} {
		if f.src != f.dst {
			return &Mismatch{f.name, f.src, f.dst}
		}
	}
	return nil
}

// Tensor is what a plan must know of one tensor of a pool.
type Tensor struct {
	Layer     int32
	PageBytes int64
}

// Slice is one copy inside a pair of pages: Len bytes at SrcOff of a page of tensor Src go to DstOff
// of a page of tensor Dst.
type Slice struct {
	Src, Dst       int
	SrcOff, DstOff int64
	Len            int64
}

// Identity is the plan between two pools of the same shape: tensor i to tensor i, whole pages. It
// covers each byte of a destination page exactly once.
func Identity(src, dst []Tensor) ([]Slice, error) {
	if len(src) != len(dst) {
		return nil, &Mismatch{"tensors", strconv.Itoa(len(src)), strconv.Itoa(len(dst))}
	}
	plan := make([]Slice, len(src))
	for i := range src {
		if src[i] != dst[i] {
			return nil, &Mismatch{
				fmt.Sprintf("tensors[%d]", i),
				fmt.Sprintf("layer %d of %d bytes a page", src[i].Layer, src[i].PageBytes),
				fmt.Sprintf("layer %d of %d bytes a page", dst[i].Layer, dst[i].PageBytes),
			}
		}
		plan[i] = Slice{Src: i, Dst: i, Len: src[i].PageBytes}
	}
	return plan, nil
}

// Bytes is what a plan moves for one pair of pages in the layers [from, to).
func Bytes(plan []Slice, src []Tensor, from, to int32) int64 {
	var n int64
	for _, s := range plan {
		if l := src[s.Src].Layer; l >= from && l < to {
			n += s.Len
		}
	}
	return n
}
