package sim

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strings"
	"time"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
	"github.com/terminus-kv/terminus/internal/trace"
)

// PoliciesConfig is a comparison of scheduling policies on a trace.
type PoliciesConfig struct {
	Requests   []trace.Request
	Peers      int   // decode engines, 1 to MaxPeers; each request goes to the next one
	TokenBytes int64 // of KV that a token has, 1 to MaxTokenBytes
	// Progress, if set, is told what runs and how many rooms are done, very often.
	Progress func(variant, policy string, done int)
}

// PolicyResult is how long the rooms of a trace took under a policy: from the arrival of the request, on
// schedule, until its room is Success at the source.
type PolicyResult struct {
	Variant string  `json:"variant"` // what moves: cached, the part of a prompt that no earlier one shares; all, the whole prompt
	Policy  string  `json:"policy"`
	Rooms   int     `json:"rooms"`
	Empty   int     `json:"empty_rooms"` // that move no page
	Bytes   int64   `json:"bytes"`
	Rate    int64   `json:"bytes_per_second"` // of the link
	Mean    float64 `json:"mean_seconds"`
	P50     float64 `json:"p50_seconds"`
	P99     float64 `json:"p99_seconds"`
	Worst   float64 `json:"worst_seconds"`
	// MeanGain is FIFO's mean divided by this one, WorstRatio this worst divided by FIFO's.
	MeanGain   float64 `json:"mean_gain"`
	WorstRatio float64 `json:"worst_ratio"`
	// Met says, of the shipped policy, whether both targets are met.
	Met *bool `json:"met,omitempty"`
}

// What the shipped policy is to reach beside FIFO.
const (
	WantMeanGain   = 2.0
	WantWorstRatio = 2.5
)

// Limits of a PoliciesConfig.
const (
	MaxPeers      = 1024
	MaxTokenBytes = 64 << 20
)

// linkLoad is which part of the link's rate the trace needs on average.
const linkLoad = 0.8

// chunkTokens is what one step of a chunked prefill computes.
const chunkTokens = 8192

// policies are compared in this order; the shipped one is the first.
var policies = []struct {
	name string
	new  func() core.Policy
}{
	{"srf", func() core.Policy { return core.NewSRF() }},
	{"fifo", func() core.Policy { return core.NewFIFO() }},
	{"round-robin", func() core.Policy { return new(roundRobin) }},
}

// Policies replays a trace through the shipped core of one source engine with its default limits, once with
// each policy. When a request arrives its room is opened, registered and confirmed, and its chunks of 8,192
// tokens are sent at once: the time that prefill computes is not modelled, the network is what rooms share.
// The ops go over a wire whose rate is such that the trace fills four fifths of it. Frames take no time. Beside
// the policies stands what an oracle would reach.
func Policies(ctx context.Context, cfg PoliciesConfig) ([]PolicyResult, error) {
	switch n := len(cfg.Requests); {
	case cfg.Peers < 1 || cfg.Peers > MaxPeers:
		return nil, fmt.Errorf("%d peers: want 1 to %d", cfg.Peers, MaxPeers)
	case cfg.TokenBytes < 1 || cfg.TokenBytes > MaxTokenBytes:
		return nil, fmt.Errorf("%d bytes a token: want 1 to %d", cfg.TokenBytes, MaxTokenBytes)
	case n == 0 || cfg.Requests[n-1].Timestamp == cfg.Requests[0].Timestamp:
		return nil, errors.New("all requests of the trace arrive at one time: the rate of the link follows from their span, use a longer trace")
	}
	all := make([]int, len(cfg.Requests))
	for i := range cfg.Requests {
		all[i] = cfg.Requests[i].InputLength
	}
	var results []PolicyResult
	for _, v := range []struct {
		name   string
		tokens []int
	}{{"cached", trace.Uncached(cfg.Requests)}, {"all", all}} {
		first := len(results)
		for _, p := range policies {
			r, err := newReplay(&cfg, v.tokens, p.new())
			if err != nil {
				return nil, err
			}
			if cfg.Progress != nil {
				r.progress = func() { cfg.Progress(v.name, p.name, r.done) }
			}
			if err := r.run(ctx); err != nil {
				return nil, fmt.Errorf("%s, %s: %w", v.name, p.name, err)
			}
			res := r.result()
			res.Variant, res.Policy = v.name, p.name
			results = append(results, res)
		}
		r, err := newReplay(&cfg, v.tokens, core.NewFIFO())
		if err != nil {
			return nil, err
		}
		r.oracle()
		best := r.result()
		best.Variant, best.Policy = v.name, oraclePolicy
		results = append(results, best)
		fifo := results[first+1]
		for i := range results[first:] {
			r := &results[first+i]
			r.MeanGain, r.WorstRatio = fifo.Mean/r.Mean, r.Worst/fifo.Worst
		}
		met := results[first].MeanGain >= WantMeanGain && results[first].WorstRatio <= WantWorstRatio
		results[first].Met = &met
	}
	return results, nil
}

// replay is one trace under one policy.
type replay struct {
	m        *core.Machine
	wire     *wire
	heard    int64 // when the peers were last heard
	rooms    []replayed
	arrived  int
	done     int
	bytes    int64 // of the trace
	moved    int64 // of ops that are done
	page     int64 // bytes: a page is a token
	in       []core.Event
	out      core.Effects
	progress func()
}

// replayed is one request's room; its number is that of the room, its slot and, by its peer, its opener.
type replayed struct {
	at     int64 // of its arrival
	tokens int
	took   int64
	own    opener
	ended  bool
}

const (
	sourceInc   = 1
	firstInc    = 2 // of the peers
	replayPool  = 1
	replayGroup = "prefill"
)

func newReplay(cfg *PoliciesConfig, tokens []int, p core.Policy) (*replay, error) {
	m, err := core.New(core.Config{Incarnation: sourceInc, Clocks: core.DefaultClocks(), Limits: core.DefaultLimits(), Policy: p})
	if err != nil {
		return nil, err
	}
	r := &replay{m: m, rooms: make([]replayed, len(tokens)), page: cfg.TokenBytes}
	first, last := cfg.Requests[0].Timestamp, cfg.Requests[len(tokens)-1].Timestamp
	most := 1
	for i, n := range tokens {
		r.rooms[i] = replayed{at: (cfg.Requests[i].Timestamp - first) * int64(time.Millisecond), tokens: n}
		if r.bytes += int64(n) * r.page; r.bytes < 0 {
			return nil, fmt.Errorf("the first %d requests have more than %d bytes: use a shorter trace or fewer bytes a token", i+1, int64(math.MaxInt64))
		}
		most = max(most, n)
	}
	span := float64(last-first) / 1000
	r.wire = newWire(max(1, int64(float64(r.bytes)/span/linkLoad)), cfg.Peers)

	r.in = append(r.in,
		core.Event{Kind: core.PluginUp, Backend: backend, Epoch: 1},
		core.Event{Kind: core.SessionUp, Session: 1, Group: replayGroup, Role: statemachine.Source, Size: 1, Slots: int32(len(tokens))},
		core.Event{Kind: core.PoolUp, Session: 1, Pool: replayPool, Pages: int32(most), Layers: 1, PageBytes: r.page})
	for p := range core.PeerID(cfg.Peers) {
		r.in = append(r.in,
			core.Event{Kind: core.PeerHello, Peer: p, Node: replayPeer(p), Inc: firstInc + uint64(p)},
			core.Event{Kind: core.PeerPool, Peer: p, Pool: replayPool, Pages: int32(most), Layers: 1, PageBytes: r.page},
			core.Event{Kind: core.PeerGroup, Peer: p, Group: replayPeer(p), PeerGroup: replayGroup, Role: statemachine.Destination, Size: 1, Backends: backends})
	}
	return r, r.settle()
}

func replayPeer(p core.PeerID) string { return fmt.Sprintf("decode-%d", p) }

func (r *replay) peer(i int) core.PeerID { return core.PeerID(i % len(r.wire.peers)) }

func (r *replay) opener(i int) opener {
	return opener{Inc: firstInc + uint64(r.peer(i)), Seq: uint64(i) + 1}
}

// pagesFrom are the pages of a chunk, or of a room. Rooms share them: nobody looks at the bytes.
func pagesFrom(from, n int) []layout.Run {
	if n == 0 {
		return nil
	}
	return []layout.Run{{Start: int32(from), Count: int32(n), Stride: 1}}
}

// run goes from one moment at which something happens to the next until every room has ended.
func (r *replay) run(ctx context.Context) error {
	for r.done < len(r.rooms) {
		at, ok := r.wire.next()
		if r.arrived < len(r.rooms) && (!ok || r.rooms[r.arrived].at < at) {
			at, ok = r.rooms[r.arrived].at, true
		}
		if !ok {
			return fmt.Errorf("%d of %d rooms wait for nothing", len(r.rooms)-r.done, len(r.rooms))
		}
		r.wire.advance(at, func(f flight) {
			r.moved += f.bytes
			r.in = append(r.in, core.Event{Kind: core.OpEnd, Op: f.op, End: core.EndDone, Quiet: true, Bytes: f.bytes})
		})
		for ; r.arrived < len(r.rooms) && r.rooms[r.arrived].at <= at; r.arrived++ {
			r.open(r.arrived)
		}
		if err := r.settle(); err != nil {
			return err
		}
		if r.progress != nil {
			r.progress()
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	if n := r.m.Counts(); n.Live != 0 || n.Queued != 0 || r.moved != r.bytes {
		return fmt.Errorf("%d rooms are live and %d queued, %d of %d bytes moved", n.Live, n.Queued, r.moved, r.bytes)
	}
	return nil
}

// open is the arrival of a request: the worker opens its room and the peer registers the pages.
func (r *replay) open(i int) {
	room := int64(i)
	pages := []core.RankPages{{Parts: []core.PartPages{{Pool: replayPool, Runs: pagesFrom(0, r.rooms[i].tokens)}}}}
	r.in = append(r.in,
		core.Event{Kind: core.Open, Session: 1, Seq: uint64(i), Slot: int32(i), Room: room},
		core.Event{Kind: core.PeerFrame, Peer: r.peer(i), Frame: core.Frame{
			Kind: core.FrameRegister, Room: room, D: r.opener(i), Group: replayPeer(r.peer(i)), PeerGroup: replayGroup, Backend: backend, Epoch: 1, Ranks: pages,
		}})
}

// confirm follows it: the peer confirms and the worker sends every chunk.
func (r *replay) confirm(i int) {
	n := &r.rooms[i]
	clocks := core.DefaultClocks()
	length := max(int64(clocks.TransferMin/time.Second), 4*int64(n.tokens)*r.page/clocks.FloorRate)
	r.in = append(r.in, core.Event{Kind: core.PeerFrame, Peer: r.peer(i), Frame: core.Frame{
		Kind: core.FrameConfirm, Room: int64(i), S: n.own, D: r.opener(i), ClockLog2: uint8(bits.Len64(uint64(length))),
	}})
	for from := 0; from == 0 || from < n.tokens; from += chunkTokens {
		c := min(chunkTokens, n.tokens-from)
		e := core.Event{Kind: core.Send, Session: 1, Seq: uint64(i), Slot: int32(i), Last: from+c == n.tokens}
		if c > 0 {
			e.Parts = []core.Part{{Runs: pagesFrom(from, c)}}
		}
		r.in = append(r.in, e)
	}
}

// settle hands what happened to the core, and what follows from its answers, until nothing does.
func (r *replay) settle() error {
	if r.wire.now-r.heard >= int64(time.Second) { // the peers are alive and beat
		r.heard = r.wire.now
		for p := range r.wire.peers {
			r.in = append(r.in, core.Event{Kind: core.PeerHeard, Peer: core.PeerID(p)})
		}
	}
	for len(r.in) > 0 {
		r.out.Reset()
		r.m.Step(r.wire.now, r.in, &r.out)
		r.in = r.in[:0]
		for i := range r.out.Replies {
			switch a := &r.out.Replies[i]; {
			case a.Code == core.Refused || a.Code == core.Ended:
				return fmt.Errorf("room %d: a request was refused: %s%s", a.Seq, a.Reason, a.Detail)
			case !a.Opener.IsZero():
				r.rooms[a.Seq].own = a.Opener
				r.confirm(int(a.Seq))
			}
		}
		for i := range r.out.Plugin {
			p := &r.out.Plugin[i]
			if p.Kind != core.PluginSubmit {
				return fmt.Errorf("room %d: the core asks the plugin for %d", p.Room, p.Kind)
			}
			r.wire.send(p.Peer, p.Op, p.Bytes)
		}
		for i := range r.out.Frames {
			if f := &r.out.Frames[i].Frame; f.Kind == core.FrameRankEnd {
				r.in = append(r.in, core.Event{Kind: core.PeerFrame, Peer: r.out.Frames[i].Peer, Frame: core.Frame{
					Kind: core.FrameVerdict, Room: f.Room, S: f.S, D: f.D, Outcome: core.OutcomeSuccess,
				}})
			}
		}
		for i := range r.out.Words {
			w := &r.out.Words[i]
			n := &r.rooms[w.Slot]
			switch {
			case w.Status == statemachine.Failed:
				return fmt.Errorf("room %d failed %.1f s after its arrival: %s", w.Slot, float64(r.wire.now-n.at)/1e9, strings.TrimSpace(w.Reason.String()+" "+w.Detail))
			case w.Status == statemachine.Succeeded && !n.ended:
				n.ended, n.took = true, r.wire.now-n.at
				r.done++
				r.in = append(r.in, core.Event{Kind: core.Release, Session: 1, Seq: uint64(w.Slot), Slot: w.Slot})
			}
		}
	}
	return nil
}

func (r *replay) result() PolicyResult {
	res := PolicyResult{Rooms: len(r.rooms), Bytes: r.bytes, Rate: r.wire.rate}
	took := make([]float64, len(r.rooms))
	var sum int64
	for i := range r.rooms {
		sum += r.rooms[i].took
		took[i] = float64(r.rooms[i].took) / 1e9
		if r.rooms[i].tokens == 0 {
			res.Empty++
		}
	}
	res.Mean = float64(sum) / float64(len(took)) / 1e9
	slices.Sort(took)
	at := func(p float64) float64 { return took[int(math.Ceil(p*float64(len(took))))-1] }
	res.P50, res.P99, res.Worst = at(0.5), at(0.99), at(1)
	return res
}
