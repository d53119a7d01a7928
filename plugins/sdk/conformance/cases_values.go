package conformance

import (
	"encoding/binary"
	"fmt"
)

// values are words that somebody, somewhere, takes for "nothing is here yet".
var values = []struct {
	name string
	word uint32
}{
	{"zero", 0},
	{"negative-zero", 0x80000000},            // FP32 -0.0
	{"negative-zero-pair", 0x80008000},       // two BF16 -0.0
	{"negative-subnormal", 0x80010000},       // equals -0.0 where subnormals are flushed
	{"ones", 0xFFFFFFFF},                     // -1, an FP32 NaN
	{"nan", 0x7FC00000},                      // the quiet FP32 NaN
	{"poison", 0xDEADBEEF},                   // what debuggers fill memory with
	{"canary", uint32(canary & (1<<32 - 1))}, // half of the region's canary
}

func init() {
	register(
		Case{
			ID: "transfer/any-value-is-data", Rule: "R1", Profile: TransferCore,
			Title:    "no value of a page means that the page is not there",
			Incident: "flashinfer#3304: a reader waited until no word was -0.0, and a word of the data was taken for it",
			Script: `
> for each of 0, -0.0, a subnormal, NaN, all ones and others: a page full of it, and a page with it in the last word only
> Submit of both, over pages that hold it already, and over pages that do not
< Accepted, Done
= the destination pages hold the source pages`,
			Run: func(t *T) {
				const pageBytes = 4096
				p := t.Path(Shape{Pages: 4, PageBytes: pageBytes})
				page := func(r *Region, i, from int, word uint32) {
					b := make([]byte, pageBytes-from)
					for at := 0; at < len(b); at += 4 {
						binary.LittleEndian.PutUint32(b[at:], word)
					}
					pool := p.Src
					if r == p.DstMem {
						pool = p.Dst
					}
					r.Rewrite(pool.Tensors[0].Offset+uint64(i)*pageBytes+uint64(from), b)
				}
				for _, v := range values {
					page(p.SrcMem, 0, 0, v.word)
					page(p.SrcMem, 1, pageBytes-4, v.word)
					for i := range 2 { // pages 2 and 3 stay as the ops before left them
						page(p.DstMem, i, 0, v.word)
					}
					for _, dst := range []uint32{0, 2} {
						end := p.Submit(Submit{Src: Pages(0, 2), Dst: Pages(dst, 2)}).Quiet()
						t.Check(end.Kind == "done", "R1", fmt.Sprintf("pages of %s (%#08x) to be done", v.name, v.word), "%s", end)
					}
				}
			},
		},
	)
}
