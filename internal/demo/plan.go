package demo

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"

	"github.com/terminus-kv/terminus/internal/trace"
)

// Arrivals.
const (
	ArrivalBurst  = "burst"
	ArrivalSpread = "spread"
)

// The scaled-down model: what a token's KV looks like.
const (
	pageTokens    = 64
	blockPages    = trace.BlockTokens / pageTokens
	planTensors   = 4       // two layers, K and V
	fullModelKV   = 327_680 // bytes a token of Llama-3-70B, the scale that is printed
	pageUnit      = 128     // a head's part of a page of one tensor is a multiple of it: 2 bytes a token,
	minPageBytes  = 512     // of all heads at least so much
	maxPageBytes  = 256 << 10
	minPoolPages  = 16_384
	maxPoolBytes  = int64(512) << 20 // unless the largest prompt needs more
	maxPlanBytes  = int64(32) << 30  // of a pool at all
	roomInterval  = 12_000           // µs: the trace is sped up to about this many a room
	decodeToken   = 20_000           // µs that one generated token takes before the speed-up
	prefillTokens = 20_000           // tokens that a prefill computes a second before the speed-up
)

// Plan is the schedule of a run, known to both workers: the model's scale and the rooms in order of
// arrival. It is a pure function of the trace and the options.
type Plan struct {
	PlanHeader
	Rooms []Room
}

// PlanHeader is the first line of a schedule file.
type PlanHeader struct {
	Version     int     `json:"version"`
	Seed        uint64  `json:"seed"`
	Arrival     string  `json:"arrival"`
	PageTokens  int     `json:"page_tokens"`
	BlockPages  int     `json:"block_pages"`
	ChunkTokens int     `json:"chunk_tokens"`
	Tensors     int     `json:"tensors"`
	PageBytes   int     `json:"page_bytes"` // of one tensor, all heads; a page holds Tensors of them
	Heads       int     `json:"heads"`      // that ranks share; each has as many bytes of a page
	PoolPages   int     `json:"pool_pages"` // of each worker, or rank
	Speed       float64 `json:"speed"`      // trace time divided by time here
	Count       int     `json:"rooms"`
}

// Room is one request: a line of a schedule file.
type Room struct {
	ID      int64   `json:"room"`
	At      int64   `json:"at_us"`    // from the start of the run
	Pages   int     `json:"pages"`    // of the whole prompt
	Cached  int     `json:"cached"`   // pages at its front that the destination holds
	Keep    int     `json:"keep"`     // pages at its front that later rooms share
	Pause   int64   `json:"pause_us"` // before each chunk: its computation
	Hold    int64   `json:"hold_us"`  // from success to release at the decode worker
	Chunks  []int   `json:"chunks"`   // pages a chunk; empty: everything is cached
	Aborter string  `json:"aborter,omitempty"`
	Point   float64 `json:"point,omitempty"` // when: a share of the room's way, in [0,1)
	// Prefix says whose content the cached pages hold: the room that computed them and how many.
	Prefix []Share `json:"prefix,omitempty"`
}

// Share is consecutive cached pages that one earlier room computed.
type Share struct {
	Owner int64 `json:"owner"`
	Pages int   `json:"pages"`
}

// PageBytesAll is the size of one page over all tensors.
func (h PlanHeader) PageBytesAll() int64 { return int64(h.PageBytes) * int64(h.Tensors) }

// Moved returns how many pages the room moves.
func (r Room) Moved() int { return r.Pages - r.Cached }

// Owner returns the room whose content page k of the prompt holds.
func (r Room) Owner(k int) int64 {
	for _, s := range r.Prefix {
		if k < s.Pages {
			return s.Owner
		}
		k -= s.Pages
	}
	return r.ID
}

// planOptions is what a schedule depends on.
type planOptions struct {
	Trace         string
	Rooms         int
	Bytes         int64
	Seed          uint64
	AbortFraction float64
	Arrival       string
	Ranks         [2]int // prefill, decode; zero: one each
}

// newPlan reads or generates the trace and makes the schedule.
func newPlan(o planOptions) (*Plan, error) {
	reqs, err := trace.Load(o.Trace, o.Rooms, o.Seed)
	if err != nil {
		return nil, err
	}
	if o.Arrival == ArrivalSpread && !trace.Spread(reqs, o.Seed) {
		o.Arrival = ArrivalBurst // as recorded
	}
	return planTrace(reqs, o)
}

// planTrace maps requests to rooms: blocks to pages, shared prefixes to cached pages, the uncached
// rest to chunks, and everything to the size and speed of this run.
func planTrace(reqs []trace.Request, o planOptions) (*Plan, error) {
	if len(reqs) == 0 {
		return nil, errors.New("the trace holds no request")
	}
	if o.Ranks == [2]int{} {
		o.Ranks = [2]int{1, 1}
	}
	p := &Plan{PlanHeader: PlanHeader{
		Version: 1, Seed: o.Seed, Arrival: o.Arrival, PageTokens: pageTokens, BlockPages: blockPages,
		Tensors: planTensors, Heads: headsFor(o.Ranks), Speed: 1, Count: len(reqs),
	}}
	if span := reqs[len(reqs)-1].Timestamp - reqs[0].Timestamp; span > 0 {
		want := float64(len(reqs)) * roomInterval / 1000
		p.Speed = max(1, float64(span)/want)
	}
	rng := rand.New(rand.NewPCG(o.Seed, 0x706c_616e))
	ids := roomIDs(rng, len(reqs))
	p.Rooms = make([]Room, len(reqs))
	shareBlocks(p.Rooms, reqs, ids)

	var moved int64
	largest := 0
	for i := range p.Rooms {
		r, q := &p.Rooms[i], &reqs[i]
		r.At = int64(float64(q.Timestamp-reqs[0].Timestamp) * 1000 / p.Speed)
		r.Hold = int64(float64(q.OutputLength) * decodeToken / p.Speed)
		moved += int64(r.Moved())
		largest = max(largest, r.Pages)
	}
	if moved == 0 {
		return nil, errors.New("no request of the trace has a page to move")
	}

	perPage := (o.Bytes + moved - 1) / moved
	unit := int64(pageUnit * p.Heads)
	up := func(n int64) int64 { return (n + unit - 1) / unit * unit }
	p.PageBytes = int(min(max(up(perPage/planTensors), up(minPageBytes)), maxPageBytes/unit*unit))
	p.PoolPages = int(max(int64(2*largest), min(minPoolPages, maxPoolBytes/p.PageBytesAll())))

	if p.poolBytes() > maxPlanBytes {
		return nil, fmt.Errorf("each worker would need a pool of %s for the largest prompt, of %d pages; ask for fewer bytes", sizeText(p.poolBytes()), largest)
	}

	p.ChunkTokens = chunkTokens(p.Rooms)
	for i := range p.Rooms {
		r := &p.Rooms[i]
		r.Pause = int64(float64(p.ChunkTokens) / prefillTokens * 1e6 / p.Speed)
		for left := r.Moved(); left > 0; left -= p.ChunkTokens / pageTokens {
			r.Chunks = append(r.Chunks, min(left, p.ChunkTokens/pageTokens))
		}
	}

	for n, i := range rng.Perm(len(reqs))[:int(o.AbortFraction*float64(len(reqs))+0.5)] {
		p.Rooms[i].Aborter = [2]string{RolePrefill, RoleDecode}[n%2]
		p.Rooms[i].Point = rng.Float64()
	}
	return p, nil
}

// roomIDs draws n different ids of 62 bits, as routers do.
func roomIDs(rng *rand.Rand, n int) []int64 {
	ids := make([]int64, 0, n)
	seen := make(map[int64]bool, n)
	for len(ids) < n {
		if id := rng.Int64() >> 1; !seen[id] {
			seen[id] = true
			ids = append(ids, id)
		}
	}
	return ids
}

// shareBlocks fills in ID, Pages, Cached, Prefix and Keep. A block is cached when an earlier request
// had the same id at the same place with as many tokens, and so was everything before it. (The cache
// is unbounded here; what a worker has evicted by then it computes again.)
func shareBlocks(rooms []Room, reqs []trace.Request, ids []int64) {
	type place struct{ room, block, tokens int }
	first := make(map[int64]place)
	for i := range reqs {
		q, r := &reqs[i], &rooms[i]
		r.ID = ids[i]
		r.Pages = (q.InputLength + pageTokens - 1) / pageTokens
		cached := true
		for b, id := range q.HashIDs {
			tokens := min(trace.BlockTokens, q.InputLength-b*trace.BlockTokens)
			pages := (tokens + pageTokens - 1) / pageTokens
			at, known := first[id]
			if cached = cached && known && at.block == b && at.tokens == tokens; cached {
				owner := &rooms[at.room]
				if n := len(r.Prefix); n > 0 && r.Prefix[n-1].Owner == owner.ID {
					r.Prefix[n-1].Pages += pages
				} else {
					r.Prefix = append(r.Prefix, Share{Owner: owner.ID, Pages: pages})
				}
				r.Cached += pages
				owner.Keep = max(owner.Keep, b*blockPages+pages)
			} else if !known {
				first[id] = place{i, b, tokens}
			}
		}
	}
}

// chunkTokens returns the largest chunk of at most 8,192 tokens with which half of the rooms have
// several chunks; the smallest is one block.
func chunkTokens(rooms []Room) int {
	for chunk := 8192; chunk > trace.BlockTokens; chunk /= 2 {
		several := 0
		for i := range rooms {
			if rooms[i].Moved() > chunk/pageTokens {
				several++
			}
		}
		if 2*several >= len(rooms) {
			return chunk
		}
	}
	return trace.BlockTokens
}

// summary is what is printed about a plan.
type summary struct {
	Rooms, Several, Empty, Aborts int
	Pages, CachedPages            int64
	Bytes                         int64
	Scale                         float64 // bytes a token here by those of the full model
}

func (p *Plan) summary() summary {
	s := summary{Rooms: len(p.Rooms)}
	for i := range p.Rooms {
		r := &p.Rooms[i]
		s.Pages += int64(r.Moved())
		s.CachedPages += int64(r.Cached)
		switch {
		case len(r.Chunks) == 0:
			s.Empty++
		case len(r.Chunks) > 1:
			s.Several++
		}
		if r.Aborter != "" {
			s.Aborts++
		}
	}
	s.Bytes = s.Pages * p.PageBytesAll()
	s.Scale = float64(p.PageBytesAll()) / pageTokens / fullModelKV
	return s
}

// sizeNote says how much is going to be moved, and why it is not what was asked for; empty when the two are
// about the same.
func (p *Plan) sizeNote(asked int64) string {
	s := p.summary()
	if d := float64(s.Bytes)/float64(asked) - 1; d > -0.1 && d < 0.1 {
		return ""
	}
	text := fmt.Sprintf("asked to move %s, going to move %s: the rooms have %d pages that are not cached, ", sizeText(asked), sizeText(s.Bytes), s.Pages)
	size := fmt.Sprintf("%s in each of %d tensors", sizeText(int64(p.PageBytes)), p.Tensors)
	unit := pageUnit * p.Heads
	switch p.PageBytes {
	case (minPageBytes + unit - 1) / unit * unit:
		return text + "and a page has at least " + size + "; fewer --rooms move less"
	case maxPageBytes / unit * unit:
		return text + "and a page has at most " + size + "; more --rooms move more"
	}
	return text + fmt.Sprintf("and a page's size is rounded up to a multiple of %d B, to %s", unit, size)
}

// Write writes the schedule: the header, then a line a room.
func (p *Plan) write(w io.Writer) error {
	bw := bufio.NewWriter(w)
	enc := json.NewEncoder(bw)
	if err := enc.Encode(p.PlanHeader); err != nil {
		return err
	}
	for i := range p.Rooms {
		if err := enc.Encode(&p.Rooms[i]); err != nil {
			return err
		}
	}
	return bw.Flush()
}

// readPlan is the inverse of write. It accepts nothing that planTrace would not make: a worker
// allocates what the header says.
func readPlan(r io.Reader) (*Plan, error) {
	dec := json.NewDecoder(bufio.NewReader(r))
	var p Plan
	if err := dec.Decode(&p.PlanHeader); err != nil {
		return nil, fmt.Errorf("schedule, line 1: %w", err)
	}
	h := p.PlanHeader
	switch {
	case h.Version != 1:
		return nil, fmt.Errorf("schedule, line 1: version %d; this program reads 1", h.Version)
	case h.Count < 1 || h.Count > maxRooms:
		return nil, fmt.Errorf("schedule, line 1: rooms %d is not between 1 and %d", h.Count, maxRooms)
	case h.PageBytes < minPageBytes || h.PageBytes > maxPageBytes || h.Tensors < 1 || h.Tensors > 64:
		return nil, fmt.Errorf("schedule, line 1: page_bytes %d, tensors %d: outside [%d, %d], [1, 64]", h.PageBytes, h.Tensors, minPageBytes, maxPageBytes)
	case h.Heads < 1 || h.Heads > maxRanks*maxRanks || h.PageBytes%(pageUnit*h.Heads) != 0:
		return nil, fmt.Errorf("schedule, line 1: heads %d: not between 1 and %d, or page_bytes %d is no multiple of %d each", h.Heads, maxRanks*maxRanks, h.PageBytes, pageUnit)
	case h.PageTokens < 1 || h.BlockPages < 1 || h.PoolPages < 1 || h.PoolPages > 4*trace.MaxTokens/pageTokens || h.poolBytes() > maxPlanBytes:
		return nil, fmt.Errorf("schedule, line 1: page_tokens %d, block_pages %d, pool_pages %d: out of range", h.PageTokens, h.BlockPages, h.PoolPages)
	}
	for i := range h.Count {
		var room Room
		if err := dec.Decode(&room); err != nil {
			return nil, fmt.Errorf("schedule, line %d: %w", i+2, err)
		}
		if err := room.check(h); err != nil {
			return nil, fmt.Errorf("schedule, line %d: %w", i+2, err)
		}
		p.Rooms = append(p.Rooms, room)
	}
	return &p, nil
}

func (r Room) check(h PlanHeader) error {
	if r.ID < 0 || r.Pages < 1 || r.Pages > h.PoolPages || r.Cached < 0 || r.Cached > r.Pages || r.Keep < 0 || r.Keep > r.Pages {
		return fmt.Errorf("room %d: pages %d, cached %d, keep %d do not fit a pool of %d", r.ID, r.Pages, r.Cached, r.Keep, h.PoolPages)
	}
	moved, shared := 0, 0
	for _, c := range r.Chunks {
		if c < 1 || c > r.Pages {
			return fmt.Errorf("room %d: chunks: %d pages", r.ID, c)
		}
		moved += c
	}
	for _, s := range r.Prefix {
		if s.Pages < 1 || s.Pages > r.Pages {
			return fmt.Errorf("room %d: prefix: %d pages", r.ID, s.Pages)
		}
		shared += s.Pages
	}
	if moved != r.Moved() || shared != r.Cached {
		return fmt.Errorf("room %d: chunks hold %d pages of %d, prefix %d of %d", r.ID, moved, r.Moved(), shared, r.Cached)
	}
	if r.At < 0 || r.Pause < 0 || r.Hold < 0 || !(r.Point >= 0 && r.Point < 1) {
		return fmt.Errorf("room %d: at_us %d, pause_us %d, hold_us %d, point %v: out of range", r.ID, r.At, r.Pause, r.Hold, r.Point)
	}
	return nil
}
