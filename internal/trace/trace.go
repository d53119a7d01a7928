// Package trace reads, writes and makes request traces in Mooncake's format (FAST 25).
package trace

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/terminus-kv/terminus/internal/regular"
)

// BlockTokens is how many tokens one hash id stands for.
const BlockTokens = 512

// Limits of a trace that is read: what a line may be and what one request may hold.
const (
	MaxTokens    = 4 << 20
	maxLine      = 1 << 20
	maxTimestamp = int64(1) << 40 // ms
)

// Request is one line of a trace. Equal hash ids are equal KV of that
// block and of everything before it.
type Request struct {
	Timestamp    int64   `json:"timestamp"` // ms from the start of the trace
	InputLength  int     `json:"input_length"`
	OutputLength int     `json:"output_length"`
	HashIDs      []int64 `json:"hash_ids"` // one for each 512 tokens of input, the last may be partial
}

// Load reads at most limit requests from a file; without a path it generates as many.
func Load(path string, limit int, seed uint64) ([]Request, error) {
	if path == "" {
		return Generate(limit, seed), nil
	}
	f, err := regular.Open(path)
	if err != nil {
		return nil, fmt.Errorf("trace: %w", err)
	}
	defer f.Close()
	reqs, err := Read(f, limit)
	if err != nil {
		return nil, fmt.Errorf("trace %s: %w", path, err)
	}
	return reqs, nil
}

// Read reads at most limit requests from r. An error names the line and the field. Times must
// not decrease; the number of hash ids must be that of the blocks of input.
func Read(r io.Reader, limit int) ([]Request, error) {
	var out []Request
	sc := bufio.NewScanner(r)
	sc.Buffer(make([]byte, 0, 64<<10), maxLine)
	line := 0
	for len(out) < limit && sc.Scan() {
		line++
		text := bytes.TrimSpace(sc.Bytes())
		if len(text) == 0 {
			continue
		}
		req, err := parseRequest(text)
		if err == nil && len(out) > 0 && req.Timestamp < out[len(out)-1].Timestamp {
			err = fmt.Errorf("timestamp: %d is before the %d of the request above; sort the trace by timestamp", req.Timestamp, out[len(out)-1].Timestamp)
		}
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", line, err)
		}
		out = append(out, req)
	}
	if err := sc.Err(); err != nil {
		if errors.Is(err, bufio.ErrTooLong) {
			err = fmt.Errorf("longer than %d bytes", maxLine)
		}
		return nil, fmt.Errorf("line %d: %w", line+1, err)
	}
	if len(out) == 0 {
		return nil, errors.New("the trace holds no request")
	}
	return out, nil
}

func parseRequest(text []byte) (Request, error) {
	var raw struct {
		Timestamp    *int64   `json:"timestamp"`
		InputLength  *int64   `json:"input_length"`
		OutputLength *int64   `json:"output_length"`
		HashIDs      *[]int64 `json:"hash_ids"`
	}
	if err := json.Unmarshal(text, &raw); err != nil {
		var te *json.UnmarshalTypeError
		if errors.As(err, &te) && te.Field != "" {
			return Request{}, fmt.Errorf("%s: is a %s, must be an integer%s", te.Field, te.Value, map[bool]string{true: " list"}[te.Field == "hash_ids"])
		}
		return Request{}, fmt.Errorf("not a JSON object: %w", err)
	}
	for _, f := range []struct {
		name    string
		missing bool
	}{
		{"timestamp", raw.Timestamp == nil}, {"input_length", raw.InputLength == nil},
		{"output_length", raw.OutputLength == nil}, {"hash_ids", raw.HashIDs == nil},
	} {
		if f.missing {
			return Request{}, fmt.Errorf("%s: missing", f.name)
		}
	}
	within := func(name string, v, lo, hi int64) error {
		if v < lo || v > hi {
			return fmt.Errorf("%s: %d is not between %d and %d", name, v, lo, hi)
		}
		return nil
	}
	ids := *raw.HashIDs
	err := errors.Join(
		within("timestamp", *raw.Timestamp, 0, maxTimestamp),
		within("input_length", *raw.InputLength, 1, MaxTokens),
		within("output_length", *raw.OutputLength, 0, MaxTokens),
	)
	if err != nil {
		return Request{}, err
	}
	if want := (*raw.InputLength + BlockTokens - 1) / BlockTokens; int64(len(ids)) != want {
		return Request{}, fmt.Errorf("hash_ids: %d ids, but input_length %d makes %d blocks of %d tokens", len(ids), *raw.InputLength, want, BlockTokens)
	}
	for i, id := range ids {
		if id < 0 {
			return Request{}, fmt.Errorf("hash_ids[%d]: %d is negative", i, id)
		}
	}
	return Request{Timestamp: *raw.Timestamp, InputLength: int(*raw.InputLength), OutputLength: int(*raw.OutputLength), HashIDs: ids}, nil
}

// Write writes requests in the format that Read reads.
func Write(w io.Writer, reqs []Request) error {
	bw := bufio.NewWriter(w)
	enc := json.NewEncoder(bw)
	for i := range reqs {
		if err := enc.Encode(&reqs[i]); err != nil {
			return err
		}
	}
	return bw.Flush()
}

// quantile is one point of a distribution.
type quantile struct{ p, v float64 }

// Published is the number of requests of Mooncake's conversation trace, an hour of them.
const Published = 12_031

// The published distribution of that trace: prompt and answer lengths in tokens, arrivals in ticks of
// 3 s, and how prompts share prefixes: every request starts with block 0, 38.7 % share more than that,
// 1 % repeat an earlier one completely.
var (
	inputQuantiles  = []quantile{{0, 891}, {0.5, 6909}, {0.9, 27367}, {0.99, 85401}, {1, 126195}}
	outputQuantiles = []quantile{{0, 1}, {0.5, 350}, {0.9, 597}, {0.99, 1120}, {1, 2000}}
)

const (
	tickMillis     = 3000
	requestsPerSec = 3.4
	shareFraction  = 0.387
	repeatFraction = 0.01
)

// draw returns a value of the distribution at u in [0,1): log-linear between its quantiles.
func draw(q []quantile, u float64) float64 {
	for i := 1; i < len(q); i++ {
		if u < q[i].p {
			a, b := q[i-1], q[i]
			t := (u - a.p) / (b.p - a.p)
			return math.Exp(math.Log(a.v) + t*(math.Log(b.v)-math.Log(a.v)))
		}
	}
	return q[len(q)-1].v
}

// Generate makes n requests of the published distribution. Equal seeds make equal traces.
func Generate(n int, seed uint64) []Request {
	rng := rand.New(rand.NewPCG(seed, 0x7261_6365)) // a stream of its own
	out := make([]Request, 0, n)
	nextID := int64(1) // 0 is the system prompt's block, in front of everybody's
	fresh := func(ids []int64, blocks int) []int64 {
		for len(ids) < blocks {
			ids = append(ids, nextID)
			nextID++
		}
		return ids
	}
	for tick := int64(0); len(out) < n; tick++ {
		for k := poisson(rng, requestsPerSec*tickMillis/1000); k > 0 && len(out) < n; k-- {
			req := Request{
				Timestamp:    tick * tickMillis,
				InputLength:  int(draw(inputQuantiles, rng.Float64())),
				OutputLength: int(draw(outputQuantiles, rng.Float64())),
			}
			blocks := (req.InputLength + BlockTokens - 1) / BlockTokens
			switch u := rng.Float64(); {
			case u < repeatFraction && len(out) > 0:
				old := out[rng.IntN(len(out))]
				req.InputLength, req.HashIDs = old.InputLength, old.HashIDs
			case u < shareFraction:
				// The next turn of a conversation: as much of an earlier prompt as are whole blocks
				// of both. Of a few candidates the longest that fits.
				var best []int64
				for range 8 {
					if len(out) == 0 {
						break
					}
					old := out[rng.IntN(len(out))]
					whole := min(old.InputLength/BlockTokens, req.InputLength/BlockTokens)
					if whole > len(best) {
						best = old.HashIDs[:whole]
					}
				}
				if len(best) == 0 {
					best = []int64{0}
				}
				req.HashIDs = fresh(append(make([]int64, 0, blocks), best...), blocks)
			default:
				req.HashIDs = fresh(append(make([]int64, 0, blocks), 0), blocks)
			}
			out = append(out, req)
		}
	}
	return out
}

// poisson draws from the Poisson distribution (Knuth; mean is about 10 here).
func poisson(rng *rand.Rand, mean float64) int {
	limit, k, p := math.Exp(-mean), 0, 1.0
	for {
		if p *= rng.Float64(); p <= limit {
			return k
		}
		k++
	}
}

// Spread moves each request of a tick of 3 s to a moment within it, so that requests with one
// timestamp do not arrive as one burst. A trace with finer times has real ones and is left as it is:
// then Spread returns false.
func Spread(reqs []Request, seed uint64) bool {
	for i := 1; i < len(reqs); i++ {
		if gap := reqs[i].Timestamp - reqs[i-1].Timestamp; gap > 0 && gap < tickMillis/2 {
			return false
		}
	}
	rng := rand.New(rand.NewPCG(seed, 0x7370_7265))
	for i := 0; i < len(reqs); {
		j := i
		for j < len(reqs) && reqs[j].Timestamp == reqs[i].Timestamp {
			j++
		}
		at := make([]int64, j-i)
		for k := range at {
			at[k] = reqs[i].Timestamp + rng.Int64N(tickMillis)
		}
		slices.Sort(at)
		for k := range at {
			reqs[i+k].Timestamp = at[k]
		}
		i = j
	}
	// Ticks are 3 s give or take a few ms: they may have overlapped.
	for i := 1; i < len(reqs); i++ {
		reqs[i].Timestamp = max(reqs[i].Timestamp, reqs[i-1].Timestamp)
	}
	return true
}

// Uncached returns how many tokens of each request's input an unbounded prefix cache does not hold: those
// after the longest prefix of blocks that occurred before.
func Uncached(reqs []Request) []int {
	seen := map[int64]bool{}
	out := make([]int, len(reqs))
	for i := range reqs {
		ids := reqs[i].HashIDs
		k := slices.IndexFunc(ids, func(id int64) bool { return !seen[id] })
		if k < 0 {
			continue // all of it was there
		}
		out[i] = reqs[i].InputLength - k*BlockTokens
		for _, id := range ids[k:] {
			seen[id] = true
		}
	}
	return out
}

// Source names a trace in the output.
func Source(path string) string {
	if path == "" {
		return "generated from the published distribution of Mooncake's conversation trace (FAST 25)"
	}
	return strings.TrimSpace(path)
}
