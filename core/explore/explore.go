// Package explore walks every interleaving of a small system of engines, on the shipped step function:
// one destination engine, one or two source engines, workers, plugins, links that may break, and writes
// that land at any later time. It checks the rules of docs/protocol.md in every state and prints the
// shortest path to one that breaks them.
//
// What is explored is core.Machine itself. The links, the workers and the plugins around it are models;
// so is the truth about writes, which no engine sees.
package explore

import (
	"fmt"
	"slices"
	"strings"
)

// Config says what to explore.
type Config struct {
	Sources     int    // source engines, 1 or 2
	Alone       byte   // 'P' or 'D': that engine only, and any frame that its counterpart could ever send, at any time
	Rooms       int    // 1, or 2 with one opener a side each
	Openers     int    // opens a side, 1 or 2
	Chunks      int    // of an attempt, 0 to 2; 0: fully cached, no pages
	Faults      int    // how many happen in one run
	Kinds       string // which, by letter; empty: all
	Checked     bool   // the plugins check the receiver (rung 2)
	SameAttempt bool   // a second open carries the same attempt token
	Ignore      string // rules whose violation does not end the search, such as "R3 R4"
	Depth       int    // steps at most; 0: no bound
	States      int    // states at most; 0: no bound
	Graph       bool   // keep the edges: look for cycles, and for attempts that cannot succeed
	NoHints     bool   // the links lose Queued and Progress, which decide nothing
	Connected   bool   // begin when both ends of each link have said Hello, not with the links down
	NoProof     bool   // the death of an incarnation is known by its next Hello and by silence only
	NoLease     bool   // a worker's rule switched off: pages are reused once the engine is lost
}

// Result is what a search found.
type Result struct {
	States, Edges, Depth int
	Frontier             int // states that were not expanded; 0: the search is exhaustive
	EngineStates         []int
	Violation            string
	Trace                []string
	Cyclic               bool
	Fresh, Stuck         int // states with two fresh attempts, and those of them that cannot reach Success
	Successes            int // states in which a destination has succeeded
}

// String is one line.
func (r *Result) String() string {
	how := "exhaustive"
	if r.Frontier > 0 {
		how = fmt.Sprintf("stopped, %d states in the frontier", r.Frontier)
	}
	out := fmt.Sprintf("%d states, %d edges, depth %d, %s; engine states %v", r.States, r.Edges, r.Depth, how, r.EngineStates)
	if r.Violation != "" {
		out += fmt.Sprintf("; %s, after %d steps", r.Violation, len(r.Trace))
	}
	return out
}

// Story is the trace as text, one numbered step a line.
func (r *Result) Story() string {
	var b strings.Builder
	for i, l := range r.Trace {
		fmt.Fprintf(&b, "%3d  %s\n", i+1, l)
	}
	fmt.Fprintf(&b, "=> %s\n", r.Violation)
	return b.String()
}

type explorer struct {
	Config
	kinds    [256]bool
	engines  []*engine
	frames   []flying
	frameIDs map[string]uint32
	queues   [][]uint32
	queueIDs map[string]uint32
	pushed   map[pushKey]uint32
	taken    map[pushKey]uint32
	violated string
	alphabet []uint32 // of the counterpart of an engine alone

	from  *state // whose successors are under way
	next  state
	move  move
	yield func(mv *move, next *state, violated string)

	met     *store
	buf     []byte
	edges   []uint32 // of Graph: successors of each state, one after the other
	offsets []uint64
}

// Run explores breadth first. The error says that the configuration is not one.
func Run(cfg Config) (*Result, error) {
	if cfg.Sources < 1 || cfg.Sources > maxSources || cfg.Openers < 1 || cfg.Openers > maxOpeners || cfg.Chunks < 0 || cfg.Chunks > maxChunks || cfg.Rooms < 1 || cfg.Rooms > 2 {
		return nil, fmt.Errorf("explore: %+v: 1 to %d sources, 1 to %d openers, 0 to %d chunks, 1 or 2 rooms", cfg, maxSources, maxOpeners, maxChunks)
	}
	if cfg.Rooms == 2 {
		cfg.Openers = 2 // one of each room
	}
	if cfg.Kinds == "" {
		cfg.Kinds = AllFaults
	}
	x := &explorer{
		Config: cfg, frameIDs: map[string]uint32{}, queueIDs: map[string]uint32{}, pushed: map[pushKey]uint32{}, taken: map[pushKey]uint32{},
	}
	x.met = newStore(len(x.pack(nil, &state{})))
	for i := range len(cfg.Kinds) {
		x.kinds[cfg.Kinds[i]] = true
	}
	x.queue(nil)
	var first state
	for e := range cfg.Sources + 1 {
		x.engines = append(x.engines, newEngine(x, e))
		id, err := x.engines[e].start(0)
		if err != nil {
			return nil, fmt.Errorf("explore: %w", err)
		}
		first.engine[e], first.plugin[e].epoch = id, 1
	}
	if cfg.Alone != 0 {
		x.alone()
	}
	if cfg.Connected {
		for l := range cfg.Sources {
			first.link[l] = linkUp
			for _, e := range []int{l, cfg.Sources} {
				other, peer := cfg.Sources, uint8(0)
				if e == cfg.Sources {
					other, peer = l, uint8(l)
				}
				x.apply(&first, e, event{kind: evHello, peer: peer, f: x.hello(x.engines[other].incBase())})
				x.apply(&first, e, event{kind: evGroup, peer: peer})
			}
		}
	}
	return x.search(first), nil
}

func (x *explorer) peerName(e *engine, peer uint8) string {
	if e.index == x.Sources {
		return x.engines[peer].name()
	}
	return x.engines[x.Sources].name()
}

// add returns the number of a state, a new one if it was not met yet.
func (x *explorer) add(st *state, from parent) uint32 {
	x.buf = x.pack(x.buf[:0], st)
	return x.met.add(x.buf, from)
}

// load returns a state by its number.
func (x *explorer) load(id uint32) (st state) {
	x.unpack(x.met.packed(id), &st)
	return st
}

// search is the breadth-first walk.
func (x *explorer) search(first state) *Result {
	r := &Result{}
	x.add(&first, parent{})
	level, depth := 1, 0
	for at := 0; at < x.met.n && r.Violation == ""; at++ {
		if at == level {
			level = x.met.n
			depth++
		}
		if x.Depth > 0 && depth >= x.Depth || x.States > 0 && x.met.n >= x.States {
			r.Frontier = x.met.n - at
			break
		}
		r.Depth = depth
		st := x.load(uint32(at))
		ordinal, owed, bad := 0, 0, -1
		if x.Graph {
			x.offsets = append(x.offsets, uint64(len(x.edges)))
		}
		x.successors(&st, func(mv *move, next *state, violated string) {
			if r.Violation != "" {
				return
			}
			if !mv.may && mv.fault == 0 {
				owed++
			}
			id := x.add(next, parent{uint32(at), uint8(ordinal)})
			ordinal++
			r.Edges++
			if x.Graph {
				x.edges = append(x.edges, id)
			}
			if violated != "" {
				r.Violation, bad = violated, ordinal-1
			}
		})
		if bad >= 0 {
			r.Trace = append(x.trace(uint32(at)), x.line(&st, bad))
		} else if owed == 0 {
			if why := x.checkEnd(&st); why != "" {
				r.Violation, r.Trace = why, x.trace(uint32(at))
			}
		}
	}
	r.States = x.met.n
	for _, e := range x.engines {
		r.EngineStates = append(r.EngineStates, len(e.nodes))
	}
	for id := range uint32(x.met.n) {
		st := x.load(id)
		if slices.ContainsFunc(st.d[:], func(d opener) bool { return d.end == endSuccess }) {
			r.Successes++
		}
	}
	if x.Graph && r.Violation == "" && r.Frontier == 0 {
		x.graph(r)
	}
	return r
}

// trace tells the steps that lead to a state.
func (x *explorer) trace(id uint32) []string {
	var path []uint32
	for ; id != 0; id = x.met.parent(id).state {
		path = append(path, id)
	}
	var out []string
	from := uint32(0)
	for i := len(path) - 1; i >= 0; i-- {
		st := x.load(from)
		out = append(out, x.line(&st, int(x.met.parent(path[i]).ordinal)))
		from = path[i]
	}
	return out
}

// line tells one step of a state.
func (x *explorer) line(st *state, ordinal int) (out string) {
	x.successors(st, func(mv *move, next *state, _ string) {
		if ordinal == 0 {
			out = x.describeMove(st, next, mv)
		}
		ordinal--
	})
	return out
}
