package bench

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

var step = Bench{
	Name:  "step",
	Short: "room lives a second through the core, on one core",
	Long: "whole lives of rooms of two chunks through the core of one engine, 64 events a step over many rooms in flight, as the owner loop of a busy " +
		"engine hands them over; 10,000 other rooms are live and the tombstones are at their limit. A second is one of processor time, and includes " +
		"building the events. Rounds of about 1 ms are timed and the fastest tenth counts: what else runs on the machine slows the others",
	Run: runStep,
}

const (
	stepOthers  = 10_000    // rooms that are live all the time
	stepBatch   = 64        // events a Step
	stepRound   = 64 * 64   // events between looks at the clock: about a millisecond
	stepFlights = 8         // rooms at each point of a life: their ops fit into the peer's window
	stepWorkers = 8         // sessions that share the rooms
	stepEvent   = 150       // ns of core time that pass an event
	stepRun     = 16        // pages of a run
	stepRuns    = 4         // of a room, in two chunks
	stepPage    = 128 << 10 // bytes
	stepPool    = 1 << 20   // pages
	stepOwn     = 1         // incarnations
	stepPeer    = 2
)

func runStep(ctx context.Context, o Options) ([]Result, error) {
	var results []Result
	for _, c := range []struct {
		name  string
		role  statemachine.Role
		batch int
	}{
		{"source_lives", statemachine.Source, stepBatch},
		{"destination_lives", statemachine.Destination, stepBatch},
		{"source_lives_unbatched", statemachine.Source, 1},
		{"destination_lives_unbatched", statemachine.Destination, 1},
	} {
		o.progress("%s", c.name)
		l, err := newLives(c.role, o.scale(int(core.DefaultLimits().Tombstones), stepOthers))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", c.name, err)
		}
		m, err := l.measure(ctx, c.batch, o.Duration)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", c.name, err)
		}
		slices.Sort(m.rounds)
		event := m.rounds[len(m.rounds)/10]
		perSecond := float64(time.Second) / event / float64(len(l.life))
		lives := Result{
			Name: c.name, Value: perSecond, Unit: "lives/s", Better: Higher, Samples: m.lives,
			Note: fmt.Sprintf("%d events a life, %d a step; %.0f ns an event in the fastest tenth of %d rounds, %.0f in the median", len(l.life), c.batch, event, len(m.rounds), m.rounds[len(m.rounds)/2]),
		}
		allocs := Result{
			Name: c.name + "_allocations", Value: math.Round(1000*float64(m.mallocs)/float64(m.events)) / 1000, Unit: "allocations/event", Better: Lower, Samples: m.events,
			Note: fmt.Sprintf("rounded to a thousandth; %d in all", m.mallocs),
		}
		if c.batch == stepBatch {
			allocs.Target = &Target{Of: OfValue, Limit: 0}
			if c.role == statemachine.Source {
				lives.Target = &Target{Of: OfValue, Limit: 500_000}
			}
		}
		results = append(results, lives, allocs)
	}
	return results, nil
}

// lives drives rooms through the core of one engine. Each lane has one room at a time, each at another
// point of its life, so that a batch has events of every kind; the peer and the plugin are what the events
// say.
type lives struct {
	m       *core.Machine
	now     int64
	life    []func(*flight, *core.Event)
	flights []flight
	first   int64 // room of lane 0
	next    int   // lane
	done    int   // lives
	in      []core.Event
	out     core.Effects
}

// flight is one room in flight.
type flight struct {
	at        int // of its life
	room      int64
	session   core.SessionID
	slot      int32
	seq       uint64 // of its requests: the number of the lane
	own, peer statemachine.Opener
	op        core.OpID
	grant     core.GrantID
	parts     [1]core.Part // what the worker hands over: a destination all pages, a source a chunk
	runs      []layout.Run
	ranks     []core.RankPages // what the peer's frames say
	sent      []core.RankSent
}

// newLives makes an engine that holds the other rooms and as many tombstones, and stands amid of lives.
func newLives(role statemachine.Role, tombstones int) (*lives, error) {
	cfg := core.Config{Incarnation: stepOwn, Clocks: core.DefaultClocks(), Limits: core.DefaultLimits()}
	cfg.Limits.Tombstones = int32(tombstones)
	m, err := core.New(cfg)
	if err != nil {
		return nil, err
	}
	l := &lives{m: m, now: int64(time.Second), life: sourceLife, in: make([]core.Event, 64)}
	group, peerGroup, bound := "prefill", "decode", 3 // bound: the events until the pair is agreed
	if role == statemachine.Destination {
		l.life, group, peerGroup, bound = destinationLife, peerGroup, group, 4
	}
	lanes := len(l.life) * stepFlights
	setup := []core.Event{
		{Kind: core.PluginUp, Backend: "tcp", Epoch: 1, ReceiverChecked: true},
		{Kind: core.PeerHello, Node: "peer", Inc: stepPeer},
		{Kind: core.PeerPool, Pool: 1, Pages: stepPool, Layers: 1, PageBytes: stepPage},
		{Kind: core.PeerGroup, Group: peerGroup, PeerGroup: group, Role: 3 - role, Size: 1, Backends: []string{"tcp"}},
	}
	for w := range core.SessionID(stepWorkers) {
		setup = append(setup,
			core.Event{Kind: core.SessionUp, Session: 1 + w, Group: group, Role: role, Size: 1, Slots: int32(stepOthers+lanes)/stepWorkers + 1},
			core.Event{Kind: core.PoolUp, Session: 1 + w, Pool: 1 + uint64(w), Pages: stepPool, Layers: 1, PageBytes: stepPage})
	}
	l.m.Step(l.now, setup, &l.out)

	l.fill(stepOthers, 0)
	for range bound * stepOthers / 50 {
		if err := l.step(50); err != nil {
			return nil, err
		}
	}
	if n := l.m.Counts(); n.Live != stepOthers || l.flights[0].at != bound {
		return nil, fmt.Errorf("%d of %d rooms are live, the first at event %d", n.Live, stepOthers, l.flights[0].at)
	}
	l.fill(lanes, stepOthers)
	for i := range lanes { // a batch is like what hosts collect: runs of events of one kind
		for range i / stepFlights {
			l.next = i
			if err := l.step(1); err != nil {
				return nil, err
			}
		}
	}
	l.next, l.done = 0, 0
	for l.done < tombstones+lanes {
		if err := l.step(stepBatch); err != nil {
			return nil, err
		}
	}
	return l, nil
}

// fill makes n lanes for rooms from first on, in slots of their own.
func (l *lives) fill(n int, first int64) {
	l.flights, l.first, l.next = make([]flight, n), first, 0
	for i := range l.flights {
		at := int(first) + i
		n := &l.flights[i]
		n.session, n.slot, n.seq, n.room = core.SessionID(1+at%stepWorkers), int32(at/stepWorkers), uint64(i), int64(at)
		n.peer = statemachine.Opener{Inc: stepPeer, Seq: uint64(at)}
		for r := range int32(stepRuns) { // with a page between, or they were one
			n.runs = append(n.runs, layout.Run{Start: (n.slot*stepRuns + r) * (stepRun + 1), Count: stepRun, Stride: 1})
		}
		n.ranks = []core.RankPages{{Parts: []core.PartPages{{Pool: 1, Runs: n.runs}}}}
		n.sent = []core.RankSent{{Chunks: 2, Parts: []core.PartSent{{Pages: stepRuns * stepRun}}}}
	}
}

// step hands the next event of each of the next flights to the core, and what it answers to the flights.
func (l *lives) step(batch int) error {
	for i := range batch {
		n, e := &l.flights[l.next], &l.in[i]
		*e = core.Event{Session: n.session, Slot: n.slot, Seq: n.seq, Room: n.room}
		l.life[n.at](n, e)
		if n.at++; n.at == len(l.life) {
			l.done++
			n.at = 0
			n.room += int64(len(l.flights))
			n.peer.Seq += uint64(len(l.flights))
		}
		if l.next++; l.next == len(l.flights) {
			l.next = 0
		}
	}
	l.now += stepEvent * int64(batch)
	l.out.Reset()
	l.m.Step(l.now, l.in[:batch], &l.out)
	for i := range l.out.Replies {
		switch r := &l.out.Replies[i]; {
		case r.Code != core.OK && r.Code != core.Freed:
			return fmt.Errorf("a request was answered with code %d: %s%s", r.Code, r.Reason, r.Detail)
		case !r.Opener.IsZero():
			l.flights[r.Seq].own = r.Opener
		}
	}
	for i := range l.out.Plugin {
		p := &l.out.Plugin[i]
		n := &l.flights[(p.Room-l.first)%int64(len(l.flights))]
		n.op, n.grant = p.Op, p.Grant
	}
	return nil
}

// scale is a count that a run of DefaultDuration has, for a shorter one: at least least.
func (o *Options) scale(count, least int) int {
	return max(least, min(count, int(int64(count)*int64(o.Duration)/int64(DefaultDuration))))
}

type measured struct {
	lives, events int
	rounds        []float64 // processor time an event, ns
	mallocs       uint64
}

// measure runs for about d.
func (l *lives) measure(ctx context.Context, batch int, d time.Duration) (measured, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	runtime.GC()
	m := measured{rounds: make([]float64, 0, 1<<16)}
	done := l.done
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	verdicts := l.succeeded()
	start := time.Now()
	for time.Since(start) < d && len(m.rounds) < cap(m.rounds) && ctx.Err() == nil {
		cpu := threadTime()
		for range stepRound / batch {
			if err := l.step(batch); err != nil {
				return m, err
			}
		}
		m.rounds = append(m.rounds, float64(threadTime()-cpu)/stepRound)
		m.events += stepRound
	}
	m.lives = l.done - done
	runtime.ReadMemStats(&after)
	m.mallocs = after.Mallocs - before.Mallocs
	if got := l.succeeded() - verdicts; ctx.Err() == nil && (got < m.lives-len(l.flights) || got > m.lives+len(l.flights)) {
		return m, fmt.Errorf("%d of %d rooms ended in success", got, m.lives)
	}
	return m, ctx.Err()
}

func (l *lives) succeeded() int {
	v := l.m.Stats().Verdicts
	return int(v[statemachine.Source][statemachine.Success] + v[statemachine.Destination][statemachine.Success])
}

// threadTime is the processor time of this thread.
func threadTime() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		panic(err) // Linux has it
	}
	return time.Duration(t.Nano())
}

const stepBytes = stepRuns * stepRun * stepPage // of a room

var sourceLife = []func(*flight, *core.Event){
	func(n *flight, e *core.Event) { e.Kind = core.Open },
	func(n *flight, e *core.Event) {
		f := n.frame(e, core.FrameRegister)
		f.D, f.Group, f.PeerGroup, f.Backend, f.Epoch, f.Ranks = n.peer, "decode", "prefill", "tcp", 1, n.ranks
	},
	func(n *flight, e *core.Event) {
		f := n.frame(e, core.FrameConfirm)
		f.S, f.D, f.ClockLog2 = n.own, n.peer, 7
	},
	func(n *flight, e *core.Event) { n.send(e, n.runs[:stepRuns/2]) },
	func(n *flight, e *core.Event) { n.plugin(e, core.OpAccepted, 0) },
	func(n *flight, e *core.Event) { n.plugin(e, core.OpProgress, stepBytes/4) },
	func(n *flight, e *core.Event) { n.end(e) },
	func(n *flight, e *core.Event) { n.send(e, n.runs[stepRuns/2:]); e.Last = true },
	func(n *flight, e *core.Event) { n.plugin(e, core.OpAccepted, 0) },
	func(n *flight, e *core.Event) { n.plugin(e, core.OpProgress, stepBytes/4) },
	func(n *flight, e *core.Event) { n.end(e) },
	func(n *flight, e *core.Event) {
		f := n.frame(e, core.FrameVerdict)
		f.S, f.D, f.Outcome = n.own, n.peer, core.OutcomeSuccess
	},
	func(n *flight, e *core.Event) { e.Kind = core.Release },
}

var destinationLife = []func(*flight, *core.Event){
	func(n *flight, e *core.Event) { e.Kind, e.PeerGroup = core.Open, "prefill" },
	func(n *flight, e *core.Event) {
		e.Kind, n.parts[0].Runs = core.Register, n.runs
		e.Parts = n.parts[:]
	},
	func(n *flight, e *core.Event) { e.Kind, e.Grant = core.Granted, n.grant },
	func(n *flight, e *core.Event) { n.frame(e, core.FrameBound).D = n.own; e.Frame.S = n.peer },
	func(n *flight, e *core.Event) { n.progress(e, 0, true) },
	func(n *flight, e *core.Event) { n.progress(e, stepBytes/4, true) },
	func(n *flight, e *core.Event) { n.progress(e, stepBytes/2, false) },
	func(n *flight, e *core.Event) { n.progress(e, stepBytes/2, true) },
	func(n *flight, e *core.Event) { n.progress(e, stepBytes/4*3, true) },
	func(n *flight, e *core.Event) {
		f := n.frame(e, core.FrameRankEnd)
		f.S, f.D, f.Quiet, f.Sent = n.peer, n.own, true, n.sent
	},
	func(n *flight, e *core.Event) { e.Kind, e.Grant, e.Quiet = core.Revoked, n.grant, true },
	func(n *flight, e *core.Event) { e.Kind = core.Release },
}

func (n *flight) frame(e *core.Event, kind core.FrameKind) *core.Frame {
	e.Kind, e.Frame.Kind, e.Frame.Room = core.PeerFrame, kind, n.room
	return &e.Frame
}

func (n *flight) progress(e *core.Event, bytes int64, outstanding bool) {
	f := n.frame(e, core.FrameProgress)
	f.S, f.D, f.Bytes, f.Outstanding = n.peer, n.own, bytes, outstanding
}

func (n *flight) send(e *core.Event, runs []layout.Run) {
	e.Kind, n.parts[0].Runs = core.Send, runs
	e.Parts = n.parts[:]
}

func (n *flight) plugin(e *core.Event, kind core.EventKind, bytes int64) {
	e.Kind, e.Op, e.Bytes = kind, n.op, bytes
}

func (n *flight) end(e *core.Event) {
	n.plugin(e, core.OpEnd, stepBytes/2)
	e.End, e.Quiet = core.EndDone, true
}
