package demo

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"time"
)

// Bounds of the router.
const (
	// abortGrace is how long the router waits for the engines to end an attempt on one side when it has
	// ended on the other; then it aborts it, as a router does with a request that has failed.
	abortGrace = 500 * time.Millisecond
	// retryPause is what an attempt that a fault ended waits for the next.
	retryPause = 100 * time.Millisecond
	// probePause lies between two rooms that come while arrivals are held up.
	probePause = 100 * time.Millisecond
)

// router is what stands before a pair of workers in a serving stack: it has every request opened on both,
// at the same time and in the same order, aborts on one side what has ended on the other, and tries
// again what a fault ended. It is its caller's alone; all its times are passed in.
type router struct {
	plan    *Plan
	sides   [2]*side
	send    func(worker int, o order) error
	several [2]bool // workers are ranks of the side: a room that failed at one may live at another

	next     int       // room of the plan that comes next
	base     time.Time // moment 0 of the plan
	hold     int       // arrivals are held up at this room
	probing  bool      // one may come nevertheless, now and then
	probe    time.Time // when the last such came, and the pause since is over
	attempts map[attemptID]*attempt
	queue    [2][]attemptID // ordered and not opened yet, in order
	waiting  []*attempt     // ended on one side, young
	retries  []retry
	active   int  // attempts that were begun and are not over
	final    int  // rooms that are over
	lagging  bool // what the prefill worker is to play is kept back, in lag, until catchUp
	lag      []order
}

// attempt is one attempt of one room, as the router sees it.
type attempt struct {
	attemptID
	opened  [2]bool
	over    [2]bool   // released, given up, or died with its worker
	ended   [2]bool   // a terminal status was reported
	failed  [2]bool   // it was Failed
	asked   bool      // a worker aborted it
	aborted bool      // the router did
	since   time.Time // when it ended on the first side
}

type retry struct {
	attemptID
	at time.Time
}

func newRouter(p *Plan, sides [2]*side, send func(int, order) error) *router {
	return &router{plan: p, sides: sides, send: send, hold: math.MaxInt, attempts: make(map[attemptID]*attempt)}
}

// done says that every room is over.
func (r *router) done() bool { return r.final == len(r.plan.Rooms) }

// step orders what is due.
func (r *router) step(now time.Time) error {
	if r.base.IsZero() {
		r.base = now
	}
	for r.next < min(r.hold, len(r.plan.Rooms)) && !r.due().After(now) {
		if err := r.arrive(); err != nil {
			return err
		}
	}
	if r.probing && r.next >= r.hold && r.next < len(r.plan.Rooms) && now.After(r.probe) && !r.due().After(now) {
		r.probe = now.Add(probePause)
		if err := r.arrive(); err != nil {
			return err
		}
	}
	for len(r.retries) > 0 && !r.retries[0].at.After(now) {
		id := r.retries[0].attemptID
		r.retries = r.retries[1:]
		if err := r.begin(id); err != nil {
			return err
		}
	}
	return r.abortLate(now)
}

func (r *router) due() time.Time {
	return r.base.Add(time.Duration(r.plan.Rooms[r.next].At) * time.Microsecond)
}

// arrive has the next room played now.
func (r *router) arrive() error {
	id := attemptID{room: r.plan.Rooms[r.next].ID}
	r.next++
	return r.begin(id)
}

// burst has the next n rooms played now, at first at the decode worker alone: so that many are in flight
// at once, which rooms as short as these are not otherwise. The rooms after them keep their distance.
func (r *router) burst(now time.Time, n int) ([]attemptID, error) {
	var ids []attemptID
	r.lagging = true
	for ; n > 0 && r.next < len(r.plan.Rooms); n-- {
		ids = append(ids, attemptID{room: r.plan.Rooms[r.next].ID})
		if err := r.arrive(); err != nil {
			return ids, err
		}
	}
	r.resume(now)
	return ids, nil
}

// catchUp lets the prefill worker play what it was not told since burst.
func (r *router) catchUp() error {
	r.lagging = false
	for _, o := range r.lag {
		if err := r.send(0, o); err != nil {
			return err
		}
	}
	r.lag = nil
	return nil
}

// tell sends a worker an order, the prefill worker perhaps later.
func (r *router) tell(worker int, o order) error {
	if worker == 0 && r.lagging {
		r.lag = append(r.lag, o)
		return nil
	}
	return r.send(worker, o)
}

// resume lets the rest of the plan begin now.
func (r *router) resume(now time.Time) {
	r.hold = math.MaxInt
	if r.next < len(r.plan.Rooms) {
		r.base = now.Add(-time.Duration(r.plan.Rooms[r.next].At) * time.Microsecond)
	}
}

func (r *router) begin(id attemptID) error {
	r.attempts[id] = &attempt{attemptID: id}
	r.active++
	for i, s := range r.sides {
		s.rooms[id] = report{Room: id.room, Attempt: id.attempt}
		r.queue[i] = append(r.queue[i], id)
		if err := r.tell(i, order{Room: id.room, Attempt: id.attempt}); err != nil {
			return err
		}
	}
	return nil
}

// report takes a line that the side has been told.
func (r *router) report(worker int, line report, now time.Time) {
	a := r.attempts[line.id()]
	if a == nil {
		return // no line of a room, or one of a room that was not ordered: it counts nowhere
	}
	switch line.T {
	case "open":
		a.opened[worker] = true
		if k := slices.Index(r.queue[worker], a.attemptID); k >= 0 { // near the front
			r.queue[worker] = slices.Delete(r.queue[worker], k, k+1)
		}
	case "ended":
		a.failed[worker] = line.Status == statusFailed
		r.endedAt(a, worker, now)
	case "room":
		r.endedAt(a, worker, now)
		a.over[worker] = true
		a.asked = a.asked || line.Asked
		r.finish(a, now)
	}
}

func (r *router) endedAt(a *attempt, worker int, now time.Time) {
	if a.since.IsZero() {
		a.since = now
		r.waiting = append(r.waiting, a)
	}
	a.ended[worker] = true
}

// abortLate aborts what has ended on one side abortGrace ago and lives on the other.
func (r *router) abortLate(now time.Time) error {
	for len(r.waiting) > 0 && now.Sub(r.waiting[0].since) > abortGrace {
		a := r.waiting[0]
		r.waiting = r.waiting[1:]
		for i := range r.sides {
			if a.over[i] || a.ended[i] && !(r.several[i] && a.failed[i]) {
				continue
			}
			a.aborted = true
			if err := r.tell(i, order{Room: a.room, Attempt: a.attempt, Abort: true}); err != nil {
				return err
			}
		}
	}
	return nil
}

// died takes the death of a worker: what was open at it is lost, what was not is to be ordered again, of
// its successor, by reorder.
func (r *router) died(worker int, now time.Time) {
	s := r.sides[worker]
	for _, a := range r.attempts {
		if !a.opened[worker] || a.over[worker] {
			continue
		}
		s.died[a.attemptID] = true
		s.rooms[a.attemptID] = report{T: "room", Room: a.room, Attempt: a.attempt, Status: statusFailed, Reason: reasonWorkerLost, Detail: "it was open at a worker that was killed"}
		r.endedAt(a, worker, now)
		a.over[worker] = true
		r.finish(a, now)
	}
}

// reorder tells a worker that took the place of another what that one had not opened.
func (r *router) reorder(worker int) error {
	for _, id := range r.queue[worker] {
		if err := r.send(worker, order{Room: id.room, Attempt: id.attempt}); err != nil {
			return err
		}
		if !r.attempts[id].aborted {
			continue
		}
		if err := r.send(worker, order{Room: id.room, Attempt: id.attempt, Abort: true}); err != nil {
			return err
		}
	}
	return nil
}

// finish looks at an attempt that may be over on both sides: the room is, or it is tried again.
func (r *router) finish(a *attempt, now time.Time) {
	if !a.over[0] || !a.over[1] {
		return
	}
	r.active--
	if a.attempt+1 < maxAttempts && r.again(a) {
		r.retries = append(r.retries, retry{attemptID{a.room, a.attempt + 1}, now.Add(retryPause)})
		return
	}
	r.final++
}

// again reports whether a fault ended the attempt, and not a worker or the room's own failure.
func (r *router) again(a *attempt) bool {
	src, dst := r.sides[0].rooms[a.attemptID], r.sides[1].rooms[a.attemptID]
	switch {
	case !src.terminal() || !dst.terminal() || a.asked && dst.aborted():
		return false
	case r.sides[1].died[a.attemptID]:
		return true // whatever it came to: its pages died with the worker
	case dst.NoAux:
		return true // every page is there, and what the source said with them is not
	case dst.Status == statusSuccess:
		return false
	case a.aborted || r.sides[0].died[a.attemptID]:
		return true
	}
	return ofFault(dst.Reason) || ofFault(src.Reason)
}

// ofFault tells the reasons that name a loss, and that of an operation that the other side's plugin did
// not live to end.
func ofFault(reason string) bool {
	switch reason {
	case reasonPluginLost, reasonWorkerLost, reasonEngineLost, reasonPeerLost, reasonSuperseded, reasonStaleRoom, reasonOutcomeUnknown, reasonTransferFailed:
		return true
	}
	return false
}

func (o order) line() []byte {
	b, err := json.Marshal(o)
	if err != nil {
		panic(fmt.Sprint("demo: order: ", err)) // three plain fields
	}
	return append(b, '\n')
}
