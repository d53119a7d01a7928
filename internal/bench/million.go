package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

var million = Bench{
	Name:  "million",
	Short: "bytes a room at 1,000,000 rooms, and what a sweep of expired clocks costs",
	Long: "destination rooms, bound, WaitingForInput, of 64 pages in 4 runs each, in a process that holds only the core: what its resident memory " +
		"grows by, and the processor time of a step in which the clocks of 1,000 of the rooms expire, against the same step of an engine with 10,000 rooms",
	Run:   runMillion,
	Child: millionChild,
}

const (
	millionRooms   = 1_000_000
	millionFew     = 10_000
	millionExpire  = 1_000 // rooms a sweep
	millionSweeps  = 5     // less than the 5 s of the drain clock, a second each: ended rooms add nothing
	millionSession = 10_000
	millionBatch   = 50
)

// millionReport is what the child prints.
type millionReport struct {
	Resident int64     `json:"resident"` // bytes that came with the rooms
	Heap     int64     `json:"heap"`     // of them, live objects
	SweepNS  []float64 `json:"sweep_ns"`
	IdleNS   float64   `json:"idle_ns"` // a step in which nothing is due
	NextNS   float64   `json:"next_ns"`
}

func runMillion(ctx context.Context, o Options) ([]Result, error) {
	all := o.scale(millionRooms, 2*millionFew) / millionBatch * millionBatch
	of := map[int]millionReport{}
	for _, n := range []int{millionFew, all} {
		o.progress("%d rooms", n)
		var out, errs bytes.Buffer
		cmd := o.child(ctx, "million", strconv.Itoa(n))
		cmd.Stdout, cmd.Stderr = &out, &errs
		if err := cmd.Run(); err != nil {
			return nil, fmt.Errorf("the process with %d rooms: %w: %s", n, err, strings.TrimSpace(errs.String()))
		}
		var r millionReport
		if err := json.Unmarshal(out.Bytes(), &r); err != nil {
			return nil, fmt.Errorf("the process with %d rooms printed %q: %w", n, out.String(), err)
		}
		slices.Sort(r.SweepNS)
		of[n] = r
	}
	many, few := of[all], of[millionFew]
	sweep := func(r millionReport) float64 { return r.SweepNS[len(r.SweepNS)/2] / 1e3 }
	const ofFew = "the same with 10,000 rooms"
	return []Result{
		{
			Name: "bytes_per_room", Value: float64(many.Resident) / float64(all), Unit: "B", Better: Lower, Samples: all,
			Target: &Target{Of: OfValue, Limit: 512}, Note: fmt.Sprintf("resident; %.0f B of it are live objects", float64(many.Heap)/float64(all)),
		},
		{
			Name: "sweep", Value: sweep(many), Unit: "µs", Better: Lower, Samples: millionSweeps,
			Reference: &Reference{Name: ofFew, Value: sweep(few)}, Target: &Target{Of: OfRatio, Limit: 5},
			Note: "1,000 clocks expire, each ends a room and tells its worker and its peer; a sweep that looks at every room would have a ratio of 100",
		},
		{Name: "idle_step", Value: many.IdleNS, Unit: "ns", Better: Lower, Reference: &Reference{Name: ofFew, Value: few.IdleNS}, Note: "nothing is due"},
		{Name: "next", Value: many.NextNS, Unit: "ns", Better: Lower, Reference: &Reference{Name: ofFew, Value: few.NextNS}, Note: "when the next clock is due"},
	}, nil
}

func millionChild(ctx context.Context, args []string) error {
	if len(args) != 1 {
		return errors.New("want the number of rooms")
	}
	n, err := strconv.Atoi(args[0])
	if err != nil || n < millionSweeps*millionExpire || n%millionBatch != 0 {
		return fmt.Errorf("%q: want a number of rooms, %d at least and a multiple of %d", args[0], millionSweeps*millionExpire, millionBatch)
	}
	r, err := holdRooms(ctx, n)
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(r)
}

// holdRooms binds n rooms, of which the first expire 1,000 a second, and weighs them.
func holdRooms(ctx context.Context, n int) (r millionReport, err error) {
	runtime.LockOSThread() // for threadTime
	defer runtime.UnlockOSThread()
	b, err := newBinder(n)
	if err != nil {
		return r, err
	}
	resident, heap, err := weigh()
	if err != nil {
		return r, err
	}
	for room := 0; room < n && ctx.Err() == nil; room += millionBatch {
		if room%millionExpire == 0 && room <= millionSweeps*millionExpire {
			b.now += int64(time.Second)
		}
		if err := b.bind(room); err != nil {
			return r, err
		}
	}
	after, heapAfter, err := weigh()
	if err = errors.Join(err, ctx.Err()); err != nil {
		return r, err
	}
	r.Resident, r.Heap = after-resident, heapAfter-heap
	if live := b.m.Counts().Live; live != n {
		return r, fmt.Errorf("%d of %d rooms are live", live, n)
	}

	const loops = 100_000
	start := threadTime()
	for range loops {
		b.step(core.Event{Kind: core.PeerHeard})
	}
	r.IdleNS = float64(threadTime()-start) / loops
	start = threadTime()
	for range loops {
		b.m.Next()
	}
	r.NextNS = float64(threadTime()-start) / loops
	for len(r.SweepNS) < millionSweeps {
		due := b.m.Next()
		b.now = due - 1
		b.step(core.Event{Kind: core.PeerHeard})
		before := b.m.Counts().Live
		b.now = due
		start := threadTime()
		b.step(core.Event{Kind: core.PeerHeard})
		took, ended := float64(threadTime()-start), before-b.m.Counts().Live
		if ended == 0 {
			continue // the peer's silence was due to be judged, no clock of a room
		}
		r.SweepNS = append(r.SweepNS, took)
		if ended != millionExpire || len(b.out.Frames) != millionExpire || len(b.out.Words) != millionExpire {
			return r, fmt.Errorf("a sweep ended %d rooms, with %d frames and %d words, want %d", ended, len(b.out.Frames), len(b.out.Words), millionExpire)
		}
	}
	return r, nil
}

// weigh returns the resident memory of this process and the bytes of its live objects.
func weigh() (resident, heap int64, err error) {
	debug.FreeOSMemory() // collects first
	var s runtime.MemStats
	runtime.ReadMemStats(&s)
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0, 0, err
	}
	var total, pages int64
	if _, err := fmt.Sscan(string(b), &total, &pages); err != nil {
		return 0, 0, fmt.Errorf("/proc/self/statm: %w", err)
	}
	return pages * int64(os.Getpagesize()), int64(s.HeapAlloc), nil
}

// binder is an engine with destination workers, and a peer that binds what they open.
type binder struct {
	m    *core.Machine
	now  int64
	in   []core.Event
	out  core.Effects
	runs [][]layout.Run // of a batch
}

func newBinder(rooms int) (*binder, error) {
	cfg := core.Config{Incarnation: stepOwn, Clocks: core.DefaultClocks(), Limits: core.DefaultLimits()}
	cfg.Limits.Rooms = int32(rooms)
	m, err := core.New(cfg)
	if err != nil {
		return nil, err
	}
	b := &binder{m: m, now: int64(time.Second), in: make([]core.Event, 0, 2*millionBatch), runs: make([][]layout.Run, millionBatch)}
	for i := range b.runs {
		b.runs[i] = make([]layout.Run, stepRuns)
	}
	setup := []core.Event{
		{Kind: core.PluginUp, Backend: "tcp", Epoch: 1},
		{Kind: core.PeerHello, Node: "peer", Inc: stepPeer},
		{Kind: core.PeerGroup, Group: "prefill", PeerGroup: "decode", Role: statemachine.Source, Size: 1, Backends: []string{"tcp"}},
	}
	for s := range (rooms + millionSession - 1) / millionSession {
		setup = append(setup,
			core.Event{Kind: core.SessionUp, Session: core.SessionID(1 + s), Group: "decode", Role: statemachine.Destination, Size: 1, Slots: millionSession},
			core.Event{Kind: core.PoolUp, Session: core.SessionID(1 + s), Pool: uint64(1 + s), Pages: millionSession * stepRuns * (stepRun + 1), Layers: 1, PageBytes: stepPage})
	}
	b.step(setup...)
	return b, nil
}

func (b *binder) step(in ...core.Event) {
	b.out.Reset()
	b.m.Step(b.now, in, &b.out)
}

// bind opens and binds a batch of rooms from first on.
func (b *binder) bind(first int) error {
	in := b.in
	for i := range millionBatch {
		room := first + i
		session, slot := core.SessionID(1+room/millionSession), int32(room%millionSession)
		for r := range b.runs[i] {
			b.runs[i][r] = layout.Run{Start: (slot*stepRuns + int32(r)) * (stepRun + 1), Count: stepRun, Stride: 1}
		}
		in = append(in,
			core.Event{Kind: core.Open, Session: session, Slot: slot, Room: int64(room), PeerGroup: "prefill"},
			core.Event{Kind: core.Register, Session: session, Slot: slot, Parts: []core.Part{{Runs: b.runs[i]}}})
	}
	b.step(in...)
	in = b.in
	for i := range b.out.Replies {
		switch r := &b.out.Replies[i]; {
		case r.Code != core.OK:
			return fmt.Errorf("room %d: %s", first+i/2, r.Detail)
		case !r.Opener.IsZero():
			room := first + i/2
			in = append(in, core.Event{Kind: core.PeerFrame, Frame: core.Frame{
				Kind: core.FrameBound, Room: int64(room), S: statemachine.Opener{Inc: stepPeer, Seq: uint64(1 + room)}, D: r.Opener,
			}})
		}
	}
	b.step(in...)
	for i := range b.out.Words {
		if w := &b.out.Words[i]; w.Status != statemachine.WaitingForInput {
			return fmt.Errorf("room %d is %s", first+i, w.Status)
		}
	}
	return nil
}
