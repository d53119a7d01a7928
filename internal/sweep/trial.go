package sweep

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/terminus-kv/terminus/internal/admin"
)

const (
	// routerPause is how long a request whose one side is lost may stay open on the other before the router aborts it
	// there. The engines need not be told of rooms that are bound; of one that is not, they may not know the other side.
	routerPause = 50 * time.Millisecond
	// stopTime is how long a process stands still in mode Stop: longer than a peer may be silent without being suspect,
	// shorter than any clock that ends rooms.
	stopTime = 3 * time.Second
	// playBound is how long a play may take after what was done in mode Kill, or in mode Stop after the process went on: an
	// end that is proven takes milliseconds, one by a clock of the engines, such as peer_dead, would take this long.
	playBound = 10 * time.Second
	// frozenBound is the same in mode Freeze: longer than the sum of the clocks that can end a room there, and then than
	// the host waits for a beat of a plugin.
	frozenBound = 45 * time.Second
)

// cleanBound is the longest that a play without a fault takes on a busy machine.
const cleanBound = 30 * time.Second

// Outcome is what became of one pair.
type Outcome struct {
	Pair    Pair           `json:"pair"`
	Mode    Mode           `json:"mode"`
	Hit     bool           `json:"hit"`              // false: the process ended its part before it came to the pair
	Faults  []string       `json:"faults,omitempty"` // promises that were broken
	Verdict []float64      `json:"-"`                // ms from the fault to the end of each room that it ended, at surviving workers
	Later   []float64      `json:"-"`                // of each room that it did not harm and that succeeded
	Reasons map[string]int `json:"-"`                // of the rooms that it ended
	Slowest string         `json:"-"`                // of Verdict
	Took    time.Duration  `json:"-"`
}

// trial is one play, with one fault in it.
type trial struct {
	c     *cluster
	out   Outcome
	rooms []room
	ends  [2]map[int64]report
	over  [2]bool
	dead  int   // the side whose worker died; -1
	at    int64 // of the fault, Unix time in ns
	from  int64 // when a stopped process went on; else at
	stuck bool  // the play was given up
}

func newTrial(c *cluster, p Pair, m Mode) *trial {
	t := &trial{c: c, out: Outcome{Pair: p, Mode: m, Reasons: map[string]int{}}, rooms: newPlay(c.room), dead: -1}
	t.ends = [2]map[int64]report{{}, {}}
	c.room += roomsOfPlay
	return t
}

func (t *trial) fault(format string, args ...any) {
	t.out.Faults = append(t.out.Faults, fmt.Sprintf(format, args...))
}

// run plays, with the tracer that injects the fault attached; nil: without one. It returns when the play is over on
// both sides, as far as they are alive.
func (t *trial) run(ctx context.Context, tr *tracer) {
	c := t.c
	for _, w := range c.workers {
		w.tell(order{Play: t.rooms})
	}
	var killed, stopped, resume <-chan struct{}
	if tr != nil {
		killed, stopped = tr.killed, tr.stopped
	}
	type call struct {
		at time.Time
		do func()
	}
	var calls []call // of the router, in order of time
	later := func(d time.Duration, do func()) { calls = append(calls, call{time.Now().Add(d), do}) }
	bound, within := time.After(cleanBound), cleanBound
	limit := func(d time.Duration) { bound, within = time.After(d), d }
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	struck := func(signal string) {
		at, ok := tr.struck(t.out.Pair.Syscall, t.out.Pair.Nth)
		if t.out.Hit = ok; !ok {
			t.fault("the process had its %s elsewhere", signal)
			at = time.Now().UnixNano()
		}
		t.at, t.from = at, at
	}
	frozen := false
	for !t.finished() {
		select {
		case ev := <-c.events:
			t.hear(ev, later)
		case <-killed:
			killed = nil
			struck("end")
			limit(playBound)
			later(routerPause, func() {
				for side, w := range c.workers {
					if t.out.Pair.Kind != workerKinds[side] {
						w.tell(order{Halt: true})
					}
				}
			})
		case <-stopped:
			stopped = nil
			struck("stop")
			pid := c.pid(t.out.Pair.Kind)
			tr.leaveStopped(pid)
			if t.out.Mode == Freeze {
				frozen = true
				limit(frozenBound)
				continue
			}
			wake := make(chan struct{})
			resume = wake
			limit(stopTime + playBound)
			time.AfterFunc(stopTime, func() { close(wake) })
		case <-resume:
			resume = nil
			t.from = time.Now().UnixNano()
			_ = syscall.Kill(c.pid(t.out.Pair.Kind), syscall.SIGCONT)
		case now := <-tick.C:
			for len(calls) > 0 && !now.Before(calls[0].at) {
				calls[0].do()
				calls = calls[1:]
			}
			if frozen && t.ended() {
				frozen = false
				killPid(c.pid(t.out.Pair.Kind))
			}
		case <-bound:
			t.fault("the play is not over after %v: the prefill worker has seen %d ends, the decode worker %d, of %d", within, len(t.ends[prefill]), len(t.ends[decode]), len(t.rooms))
			t.explain(ctx)
			t.stuck = true
			return
		case <-ctx.Done():
			t.fault("%v", context.Cause(ctx))
			return
		}
	}
}

// hear takes what a worker says. later has the router do something in a while.
func (t *trial) hear(ev event, later func(time.Duration, func())) {
	c, r := t.c, ev.report
	switch {
	case ev.worker != c.workers[ev.side]: // it is replaced
	case ev.gone:
		t.dead = ev.side
		if t.out.Pair.Kind != workerKinds[ev.side] {
			t.fault("the %s worker has ended: %s", sides[ev.side], ev.worker.said)
		}
	case r.T == "end":
		t.ends[ev.side][r.Room] = r
		other := 1 - ev.side
		if _, ended := t.ends[other][r.Room]; !ended && r.Status != success {
			later(routerPause, func() {
				if _, ended := t.ends[other][r.Room]; !ended {
					c.workers[other].tell(order{Abort: r.Room})
				}
			})
		}
	case r.T == "over":
		t.over[ev.side] = true
		t.out.Faults = append(t.out.Faults, r.Faults...)
	case r.T == "back", r.T == "ready":
		ev.worker.node = r.Node
	}
}

// late takes notice of a fault that came when the play was over, and has what died be gone.
func (t *trial) late(tr *tracer) {
	if t.stuck {
		return
	}
	c, kind := t.c, t.out.Pair.Kind
	if at, ok := tr.struck(t.out.Pair.Syscall, t.out.Pair.Nth); ok && t.at == 0 {
		// The tracer may have gone before the signal took effect, or before it was sent.
		err := await(context.Background(), time.Second, func(context.Context) string {
			switch s := stateOf(c.pid(kind)); {
			case c.mode == Kill && (s == "" || s == "Z" || s == "X"), c.mode != Kill && s == "T":
				return ""
			default:
				return s
			}
		})
		if err == nil {
			t.out.Hit, t.at, t.from = true, at, at
		}
	}
	select {
	case <-tr.killed:
		if t.at == 0 {
			t.at = time.Now().UnixNano()
			t.from = t.at
			t.fault("the process had its end elsewhere")
		}
	default:
	}
	if pid := c.pid(kind); c.mode != Kill && stateOf(pid) == "T" {
		if c.mode == Freeze && t.at != 0 {
			killPid(pid)
		} else {
			_ = syscall.Kill(pid, syscall.SIGCONT)
		}
	}
	if t.at == 0 || c.mode == Stop {
		return
	}
	// Its threads die one after the other. Until the last is gone an engine takes its plugin for alive, and what looks
	// then would wait for the dead one and not know its successor.
	pid := c.pid(kind)
	if err := await(context.Background(), idleBound, func(context.Context) string {
		if s := stateOf(pid); s != "" && s != "Z" && s != "X" {
			return describe(pid)
		}
		return ""
	}); err != nil {
		t.fault("%s was killed and is not gone: %v", kind, err)
		return
	}
	gone := c.engines[kind.side()].done
	switch kind.of() {
	case "plugin":
		return // its engine waits for it
	case "worker":
		gone, t.dead = c.workers[kind.side()].done, kind.side()
	}
	select {
	case <-gone:
	case <-time.After(idleBound):
		t.fault("%s was killed and is not gone", kind)
	}
}

// finished says that the play is over at both workers, as far as they live. One that is to be killed may have been over
// before.
func (t *trial) finished() bool {
	return (t.over[prefill] || t.dead == prefill) && (t.over[decode] || t.dead == decode)
}

// ended says that every room has ended at every worker that is not frozen.
func (t *trial) ended() bool {
	for side := range sides {
		if len(t.ends[side]) < len(t.rooms) && t.out.Pair.Kind != workerKinds[side] {
			return false
		}
	}
	return true
}

// explain asks the engines about the rooms that have not ended.
func (t *trial) explain(ctx context.Context) {
	n := 0
	for side, e := range t.c.engines {
		for _, r := range t.rooms {
			if _, ok := t.ends[side][r.ID]; ok || n > 3 {
				continue
			}
			n++
			ctx, cancel := context.WithTimeout(ctx, time.Second)
			why, err := e.admin.Why(ctx, r.ID)
			cancel()
			t.fault("engine %s about room %d: %q %v", e.node, r.ID, why, err)
		}
	}
}

// judge looks at how the rooms ended.
func (t *trial) judge() {
	for _, r := range t.rooms {
		p, d := t.ends[prefill][r.ID], t.ends[decode][r.ID]
		for side, e := range []report{p, d} {
			worker := workerKinds[side]
			if e.T == "" {
				if t.dead != side {
					t.fault("room %d has no end at the %s worker", r.ID, sides[side])
				}
				continue
			}
			if t.out.Pair.Kind == worker && t.out.Mode != Stop || t.at == 0 || e.At < t.at || e.Status == refused {
				continue
			}
			ms := max(0, float64(e.At-t.from)/1e6)
			if e.Status == success {
				t.out.Later = append(t.out.Later, ms)
				continue
			}
			if len(t.out.Verdict) == 0 || ms > slices.Max(t.out.Verdict) {
				t.out.Slowest = fmt.Sprintf("%.1f ms: room %d at the %s worker, %s %s", ms, r.ID, sides[side], e.Reason, e.Detail)
			}
			t.out.Verdict = append(t.out.Verdict, ms)
			t.out.Reasons[e.Reason]++
		}
		// Either side may have died without a word, and a source whose judge is lost does not know.
		if p.Status == success && d.T != "" && d.Status != success && d.Reason != "engine_lost" {
			t.fault("room %d: Success at the source, %s (%s) at the destination", r.ID, d.Status, d.Reason)
		}
		if d.Status == success && p.Status == failed && p.Reason != "engine_lost" && p.Reason != "outcome_unknown" {
			t.fault("room %d: Success at the destination, Failed (%s) at the source", r.ID, p.Reason)
		}
		if !t.out.Hit && r.Abort == "" && t.at == 0 && (p.Status != success || d.Status != success) {
			t.fault("room %d of a play without a fault: %s (%s) at the source, %s (%s) at the destination", r.ID, p.Status, p.Reason, d.Status, d.Reason)
		}
	}
}

// settle puts what died in its place again, and wants nothing to be left of it and of the play.
func (t *trial) settle(ctx context.Context) {
	if t.stuck {
		return // the cluster is not used again
	}
	c, kind := t.c, t.out.Pair.Kind
	t.judge()
	for side, e := range c.engines {
		select {
		case <-e.done:
			if kind != engineKinds[side] {
				t.fault("engine %s has ended: %v: %s", e.node, e.cmd.ProcessState, e.said)
			}
			if err := c.startEngine(side); err != nil {
				t.fault("%v", err)
				return
			}
		default:
		}
		if t.dead == side {
			if err := c.startWorker(side); err != nil {
				t.fault("%v", err)
				return
			}
		}
	}
	if kind.of() == "plugin" && t.at != 0 {
		// The back-off doubles with each death, and five within a minute are too many: a fresh engine begins anew.
		if side := kind.side(); c.worn[side] < 2 {
			c.worn[side]++
		} else if err := c.restart(side); err != nil {
			t.fault("%v", err)
			return
		}
	}
	if err := c.awaitEngines(ctx); err != nil {
		t.fault("%v", err)
		return
	}
	if err := c.awaitWorkers(ctx); err != nil {
		t.fault("%v", err)
		return
	}
	for _, w := range c.workers {
		w.tell(order{Check: true})
	}
	bound := time.After(idleBound)
	for checked := 0; checked < len(c.workers); {
		select {
		case ev := <-c.events:
			if ev.worker == c.workers[ev.side] && ev.report.T == "checked" {
				checked++
				t.out.Faults = append(t.out.Faults, ev.report.Faults...)
			}
		case <-bound:
			t.fault("a worker does not answer")
			return
		}
	}
	if err := await(ctx, idleBound, t.held); err != nil {
		t.fault("%v", err)
	}
}

// restart gives an engine's place to a new one, as after a crash.
func (c *cluster) restart(side int) error {
	e := c.engines[side]
	_ = e.cmd.Process.Kill()
	<-e.done
	return c.startEngine(side)
}

// held says what the cluster holds although nothing is under way.
func (t *trial) held(ctx context.Context) string {
	c := t.c
	for _, e := range c.engines {
		st, err := e.admin.Status(ctx)
		if err != nil {
			return fmt.Sprintf("engine %s: %v", e.node, err)
		}
		if st.Rooms != 0 || st.Held != 0 || st.Sessions != 1 || !st.Ready {
			return fmt.Sprintf("engine %s: %d rooms not ended, %d not reusable, %d sessions; %v", e.node, st.Rooms, st.Held, st.Sessions, st.NotReady)
		}
		rooms, err := e.admin.Rooms(ctx, admin.RoomFilter{})
		if err != nil {
			return fmt.Sprintf("engine %s: %v", e.node, err)
		}
		for _, r := range rooms {
			if r.Residency != "released" {
				return fmt.Sprintf("engine %s: room %d is not released: %+v", e.node, r.Room, r)
			}
		}
	}
	want := []int{}
	for _, k := range kinds {
		want = append(want, c.pid(k))
		if dead := zombiesOf(c.pid(k)); len(dead) > 0 {
			return fmt.Sprintf("%s does not reap its children %v", k, dead)
		}
		if base := c.base[k]; base != nil {
			if more := holdingsOf(c.pid(k)).more(base); len(more) > 0 {
				return fmt.Sprintf("%s holds %s", k, strings.Join(more, ", "))
			}
		}
	}
	for _, pid := range processesIn(c.dir) {
		if !slices.Contains(want, pid) {
			return fmt.Sprintf("process %d is left: %s", pid, describe(pid))
		}
	}
	if names := entriesOf(filepath.Join(c.dir, "r")); c.entries != nil && len(names) > len(c.entries) {
		return fmt.Sprintf("the runtime directory has %q instead of %q", names, c.entries)
	}
	return ""
}
