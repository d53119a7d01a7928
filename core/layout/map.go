package layout

import (
	"fmt"
	"math"
	"strconv"
)

// Cache says what the bytes of a group's pages mean. It does not depend on the tensor-parallel size.
type Cache struct {
	DType      string `json:"dtype"`       // element type, e.g. "bf16", "fp8_e4m3"
	Layers     int32  `json:"layers"`      // of the model (or of this pipeline stage)
	KVHeads    int32  `json:"kv_heads"`    // in all, not per rank
	HeadDim    int32  `json:"head_dim"`    // elements
	PageTokens int32  `json:"page_tokens"` // tokens in a page
	Kind       string `json:"kind"`        // "mha" (also grouped queries) or "mla"
	// Order of a tensor's page: "nhd" ([token][head][dim]) or "hnd" ([head][token][dim]). It is needed
	// only where the two groups of a pair share out heads or tokens differently; empty: not said.
	Order string `json:"order,omitempty"`
}

// Kinds and orders of a Cache.
const (
	MHA = "mha"
	MLA = "mla"
	NHD = "nhd"
	HND = "hnd"
)

// Side is one group of a pair.
type Side struct {
	Cache
	Ranks int32 // tensor-parallel size
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

// MaxPhases bounds how many pages of one group make one page of the other.
const MaxPhases = 1024

// Map says how pages of a source group become pages of a destination group. The zero Map copies the
// pages of rank r to rank r as they are. A Map is a small value without pointers.
//
// Where page sizes differ, one page of one side is several of the other, and what fills one of them from
// one of those is a phase: an op is of one phase, so that it moves one page to one page, whatever its
// chunk begins with.
type Map struct {
	srcRanks, dstRanks   int32
	heads                int32 // in all; 1 where every rank has everything (MLA)
	srcTokens, dstTokens int32 // of a page
	row                  int32 // bytes of one token of one head; 0: pages are copied whole
	srcHND, dstHND       bool
	alone                bool // one source rank serves a destination rank, though others have the same
}

// New returns the map of a pair of groups, or a *Mismatch that names the field by which this version
// cannot map them.
func New(src, dst Side) (Map, error) {
	if m := model(src.Cache, dst.Cache); m != nil {
		return Map{}, m
	}
	mla := src.Kind == MLA
	m := Map{
		srcRanks: src.Ranks, dstRanks: dst.Ranks, heads: src.KVHeads, srcTokens: src.PageTokens, dstTokens: dst.PageTokens,
		srcHND: src.Order == HND, dstHND: dst.Order == HND, alone: mla,
	}
	if mla {
		m.heads = 1
	}
	ordered := mla || src.Order == dst.Order
	if src.Ranks == dst.Ranks && src.PageTokens == dst.PageTokens && ordered {
		return Map{}, nil
	}
	for _, s := range []Side{src, dst} {
		if s.Ranks < 1 || m.heads < 1 || m.heads%s.Ranks != 0 && s.Ranks%m.heads != 0 {
			return Map{}, &Mismatch{"ranks", share(src), share(dst)}
		}
	}
	if a, b := src.PageTokens, dst.PageTokens; a < 1 || b < 1 || max(a, b)%min(a, b) != 0 || max(a, b)/min(a, b) > MaxPhases {
		return Map{}, &Mismatch{"page_tokens", number(a), number(b) + " (one must be a multiple of the other, at most " + number(MaxPhases) + " times)"}
	}
	_, most := m.own(0, m.srcRanks)
	_, there := m.own(0, m.dstRanks)
	single := most == 1 && there == 1 // then both orders are the same
	if single {
		m.srcHND, m.dstHND = false, false
	}
	switch {
	case single && src.PageTokens == dst.PageTokens && src.Ranks == dst.Ranks:
		return Map{}, nil
	case single && src.PageTokens == dst.PageTokens: // whole pages, though not from rank r to rank r
		m.srcTokens, m.dstTokens = 0, 0
		return m, nil
	case !single && (!known(src.Order) || !known(dst.Order)):
		return Map{}, &Mismatch{"order", said(src.Order), said(dst.Order) + ` (both must say "nhd" or "hnd": heads or tokens are shared out differently)`}
	}
	bits := int64(elementBits(src.DType))
	row := int64(src.HeadDim) * bits / 8
	if bits == 0 || int64(src.HeadDim)*bits%8 != 0 || row < 1 || row > math.MaxInt32 {
		return Map{}, &Mismatch{"dtype", src.DType, dst.DType + " (the size of one head's token is not known: the name must say its bits, as bf16 or fp8_e4m3 do)"}
	}
	m.row = int32(row)
	return m, nil
}

// model reports by which field two caches are not of one model; nil when they are.
func model(src, dst Cache) *Mismatch {
	return differ([]field{
		{"kind", src.Kind, dst.Kind}, {"dtype", src.DType, dst.DType}, {"layers", number(src.Layers), number(dst.Layers)},
		{"kv_heads", number(src.KVHeads), number(dst.KVHeads)}, {"head_dim", number(src.HeadDim), number(dst.HeadDim)},
	})
}

// Differ reports the first field by which two caches differ; nil when they are equal. The ranks of one
// group must be.
func Differ(src, dst Cache) *Mismatch {
	if m := model(src, dst); m != nil {
		return m
	}
	return differ([]field{{"page_tokens", number(src.PageTokens), number(dst.PageTokens)}, {"order", said(src.Order), said(dst.Order)}})
}

type field struct{ name, src, dst string }

func differ(fields []field) *Mismatch {
	for _, f := range fields {
		if f.src != f.dst {
			return &Mismatch{f.name, f.src, f.dst}
		}
	}
	return nil
}

func number(v int32) string { return strconv.Itoa(int(v)) }

func known(order string) bool { return order == NHD || order == HND }

func said(order string) string {
	if order == "" {
		return "none"
	}
	return order
}

func share(s Side) string { return fmt.Sprintf("%d for %d KV heads", s.Ranks, s.KVHeads) }

// elementBits reads the size of an element off the name of its type, its first number; 0 when there is
// none.
func elementBits(dtype string) int {
	n := 0
	for _, c := range dtype {
		if c >= '0' && c <= '9' {
			n = n*10 + int(c-'0')
			if n > 1024 {
				return 0
			}
		} else if n > 0 {
			break
		}
	}
	return n
}

// Words are the map as numbers, for hashes.
func (m Map) Words() [4]uint64 {
	pack := func(a, b int32) uint64 { return uint64(uint32(a))<<32 | uint64(uint32(b)) }
	w := [4]uint64{pack(m.srcRanks, m.dstRanks), pack(m.heads, m.row), pack(m.srcTokens, m.dstTokens)}
	for i, set := range []bool{m.srcHND, m.dstHND, m.alone} {
		if set {
			w[3] |= 1 << i
		}
	}
	return w
}

// IsZero reports whether the pages of rank r go to rank r as they are.
func (m Map) IsZero() bool { return m == Map{} }

// Ranks are the sizes of the two groups; 0 and 0 of the zero Map, which fits any.
func (m Map) Ranks() (src, dst int32) { return m.srcRanks, m.dstRanks }

// own is the heads of rank r of a group: first and how many.
func (m Map) own(r, ranks int32) (first, n int32) {
	if ranks <= m.heads {
		n = m.heads / ranks
		return r * n, n
	}
	return r / (ranks / m.heads), 1
}

// writers is which of the source ranks that have the same heads write to destination rank q: those from
// lo on, n of them, which take turns by layer.
func (m Map) writers(q int32) (lo, n int32) {
	if m.srcRanks <= m.heads {
		return 0, 1
	}
	copies, readers, c := m.srcRanks/m.heads, int32(1), int32(0)
	if m.dstRanks > m.heads {
		readers = m.dstRanks / m.heads
		c = q % readers
	}
	lo = c * copies / readers
	if m.alone {
		return lo, 1
	}
	return lo, max(1, (c+1)*copies/readers-lo)
}

// Sources are the source ranks [first, end) that write to destination rank q.
func (m Map) Sources(q int32) (first, end int32) {
	if m.IsZero() {
		return q, q + 1
	}
	a, n := m.own(q, m.dstRanks)
	if m.srcRanks <= m.heads {
		per := m.heads / m.srcRanks
		return a / per, (a+n-1)/per + 1
	}
	copies := m.srcRanks / m.heads
	if lo, w := m.writers(q); n == 1 {
		return a*copies + lo, a*copies + lo + w
	}
	return a * copies, (a + n) * copies // only a destination without replicas has several heads, and all copies write
}

// Writes reports whether source rank r writes to destination rank q.
func (m Map) Writes(r, q int32) bool {
	first, end := m.Sources(q)
	return r >= first && r < end
}

// Destinations counts the destination ranks that source rank r writes to.
func (m Map) Destinations(r int32) int32 {
	if m.IsZero() {
		return 1
	}
	var n int32
	for q := range m.dstRanks {
		if m.Writes(r, q) {
			n++
		}
	}
	return n
}

// turn is when source rank r, one of q's, writes: at every layer that leaves the remainder i when divided
// by n.
func (m Map) turn(r, q int32) (i, n int32) {
	lo, n := m.writers(q)
	if n == 1 {
		return 0, 1
	}
	return r%(m.srcRanks/m.heads) - lo, n
}

// moves reports whether source rank r writes the layer to destination rank q.
func (m Map) moves(r, q, layer int32) bool {
	if !m.Writes(r, q) {
		return false
	}
	if m.IsZero() {
		return true
	}
	i, n := m.turn(r, q)
	return layer%n == i
}

// layers counts the layers of [from, to) that source rank r, one of q's, writes.
func (m Map) layers(r, q, from, to int32) int32 {
	i, n := m.turn(r, q)
	below := func(l int32) int32 { return (l - i + n - 1) / n } // of [0, l); l - i > -n
	return below(to) - below(from)
}

// Scale is how many source pages make a destination page, and how many destination pages a source page
// makes. One of them is 1.
func (m Map) Scale() (src, dst int32) {
	switch {
	case m.srcTokens < m.dstTokens:
		return m.dstTokens / m.srcTokens, 1
	case m.srcTokens > m.dstTokens:
		return 1, m.srcTokens / m.dstTokens
	}
	return 1, 1
}

// Phases is how many plans a pair of ranks has.
func (m Map) Phases() int32 {
	src, dst := m.Scale()
	return max(src, dst)
}

// Fits reports whether src source pages fill dst destination pages: the last page of the side with the
// larger ones may be filled in part.
func (m Map) Fits(src, dst int64) bool {
	a, b := m.Scale()
	switch {
	case a > 1:
		return dst == (src+int64(a)-1)/int64(a)
	case b > 1:
		return src == (dst+int64(b)-1)/int64(b)
	}
	return src == dst
}

// Holds reports whether src source pages have room in dst destination pages.
func (m Map) Holds(src, dst int64) bool {
	a, b := m.Scale()
	return (src+int64(a)-1)/int64(a) <= (dst+int64(b)-1)/int64(b)
}

// Bytes is what source rank r sends destination rank q of one page in one phase, when its page has
// pageBytes in the layers [from, to) on both sides of which the shares are equal. It is 0 only when r sends q
// nothing of those layers.
func (m Map) Bytes(r, q int32, pageBytes int64, from, to int32) int64 {
	if m.IsZero() {
		if r != q {
			return 0
		}
		return pageBytes
	}
	if !m.Writes(r, q) {
		return 0
	}
	n := m.layers(r, q, from, to)
	if n == 0 {
		return 0
	}
	a, have := m.own(r, m.srcRanks)
	b, want := m.own(q, m.dstRanks)
	common := min(a+have, b+want) - max(a, b)
	_, parts := m.Scale()
	pageBytes = pageBytes / int64(have) * int64(common) / int64(parts)
	return max(1, pageBytes*int64(n)/int64(to-from))
}

// Steps pairs up pages: for i < Count, the page Src + i*SrcStep of a chunk goes to the page Dst + i*DstStep
// of the destination's list, after its prefix.
type Steps struct {
	Src, SrcStep, Dst, DstStep, Count int32
}

// Steps is what phase f moves of a chunk of pages that begins with page from of its rank, when the
// destination has dstPages, which hold from+pages source pages.
func (m Map) Steps(f, from, pages, dstPages int32) Steps {
	a, b := m.Scale()
	if a > 1 {
		first := (f - from%a + a) % a
		if first >= pages {
			return Steps{}
		}
		return Steps{Src: first, SrcStep: a, Dst: (from + first) / a, DstStep: 1, Count: (pages-first-1)/a + 1}
	}
	first := int64(from)*int64(b) + int64(f)
	left := (int64(dstPages) - first + int64(b) - 1) / int64(b) // destination pages of this phase from there on
	if first >= int64(dstPages) {
		return Steps{}
	}
	return Steps{SrcStep: 1, Dst: int32(first), DstStep: b, Count: min(pages, int32(left))}
}
