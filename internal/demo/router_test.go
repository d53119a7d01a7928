package demo

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// routerTest is a router whose orders are kept.
type routerTest struct {
	*router
	t      *testing.T
	now    time.Time
	orders []string
}

func newRouterTest(t *testing.T, rooms int) *routerTest {
	p := &Plan{}
	for i := range rooms {
		p.Rooms = append(p.Rooms, Room{ID: int64(i + 1), At: int64(i) * 10_000})
	}
	rt := &routerTest{t: t, now: time.Unix(1000, 0)}
	rt.router = newRouter(p, [2]*side{newSide(RolePrefill), newSide(RoleDecode)}, func(worker int, o order) error {
		text := fmt.Sprintf("%c%d.%d", roles[worker][0], o.Room, o.Attempt)
		if o.Abort {
			text += "!"
		}
		rt.orders = append(rt.orders, text)
		return nil
	})
	return rt
}

// pass lets time go by and returns what was ordered meanwhile.
func (rt *routerTest) pass(d time.Duration) string {
	rt.t.Helper()
	for end := rt.now.Add(d); ; rt.now = rt.now.Add(time.Millisecond) {
		if err := rt.step(rt.now); err != nil {
			rt.t.Fatal(err)
		}
		if !rt.now.Before(end) {
			return rt.said()
		}
	}
}

func (rt *routerTest) said() string {
	text := strings.Join(rt.orders, " ")
	rt.orders = nil
	return text
}

func (rt *routerTest) tell(worker int, lines ...report) {
	for _, line := range lines {
		rt.sides[worker].add(line)
		rt.report(worker, line, rt.now)
	}
}

// opens and ends are what a worker says of a room.
func opens(room, attempt int64) report { return report{T: "open", Room: room, Attempt: attempt} }

func ends(room, attempt int64, reason string) report {
	status := statusFailed
	if reason == reasonSuccess {
		status = statusSuccess
	}
	return report{T: "room", Room: room, Attempt: attempt, Status: status, Reason: reason}
}

func TestRouterOrdersRoomsAtTheirMoments(t *testing.T) {
	rt := newRouterTest(t, 3)
	if got := rt.pass(5 * time.Millisecond); got != "p1.0 d1.0" {
		t.Errorf("at 5 ms: %s", got)
	}
	if got := rt.pass(20 * time.Millisecond); got != "p2.0 d2.0 p3.0 d3.0" {
		t.Errorf("at 25 ms: %s", got)
	}
	for room := range int64(3) {
		if rt.done() {
			t.Error("done too early")
		}
		rt.tell(0, opens(room+1, 0), ends(room+1, 0, reasonSuccess))
		rt.tell(1, opens(room+1, 0), ends(room+1, 0, reasonSuccess))
	}
	if got := rt.pass(time.Second); got != "" || !rt.done() {
		t.Errorf("afterwards: %s, done %t", got, rt.done())
	}
}

func TestRouterTriesAgainWhatAFaultEnded(t *testing.T) {
	asked := ends(1, 0, reasonEngineLost)
	asked.Asked = true
	noAux := ends(1, 0, reasonSuccess)
	noAux.NoAux = true
	aborted := ends(1, 0, reasonAborted)
	aborted.Asked = true
	for _, c := range []struct {
		name     string
		src, dst report
		again    bool
	}{
		{"success", ends(1, 0, reasonSuccess), ends(1, 0, reasonSuccess), false},
		{"source in doubt", ends(1, 0, reasonOutcomeUnknown), ends(1, 0, reasonSuccess), false},
		{"plugin", ends(1, 0, reasonPluginLost), ends(1, 0, reasonPluginLost), true},
		{"plugin, seen by the other first", ends(1, 0, reasonPluginLost), ends(1, 0, reasonTransferFailed), true},
		{"engine, before the aux record was taken", ends(1, 0, reasonSuccess), noAux, true},
		{"plugin, seen by the other first on both sides", ends(1, 0, reasonTransferFailed), ends(1, 0, reasonTransferFailed), true},
		{"engine", ends(1, 0, reasonPeerLost), ends(1, 0, reasonEngineLost), true},
		{"engine, before an abort was heard", asked, ends(1, 0, reasonEngineLost), true},
		{"abort", ends(1, 0, reasonPeerAborted), aborted, false},
		{"abort that nobody asked for", ends(1, 0, reasonPeerAborted), ends(1, 0, reasonAborted), false},
		{"the room's own failure", ends(1, 0, "stalled"), ends(1, 0, "stalled"), false},
		{"given up", report{T: "room", Room: 1}, ends(1, 0, reasonPeerLost), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			rt := newRouterTest(t, 1)
			rt.pass(0)
			rt.said()
			rt.tell(0, opens(1, 0), c.src)
			rt.tell(1, opens(1, 0), c.dst)
			want := ""
			if c.again {
				want = "p1.1 d1.1"
			}
			if got := rt.pass(retryPause); got != want || rt.done() == c.again {
				t.Errorf("ordered %q, done %t", got, rt.done())
			}
		})
	}
}

func TestRouterGivesUpARoomAtLast(t *testing.T) {
	rt := newRouterTest(t, 1)
	rt.pass(0)
	for n := range int64(maxAttempts) {
		if rt.done() {
			t.Fatalf("given up before attempt %d", n)
		}
		rt.tell(0, opens(1, n), ends(1, n, reasonPluginLost))
		rt.tell(1, opens(1, n), ends(1, n, reasonPluginLost))
		rt.pass(retryPause)
	}
	if !rt.done() {
		t.Error("not given up")
	}
}

// What has ended on one side is aborted on the other, a little later, and then tried again.
func TestRouterAbortsWhatLivesOnAlone(t *testing.T) {
	rt := newRouterTest(t, 1)
	rt.pass(0)
	rt.said()
	rt.tell(0, opens(1, 0))
	rt.tell(1, opens(1, 0), report{T: "ended", Room: 1, Status: statusFailed})
	if got := rt.pass(abortGrace); got != "" {
		t.Errorf("within the grace: %s", got)
	}
	if got := rt.pass(time.Millisecond); got != "p1.0!" {
		t.Errorf("after the grace: %s", got)
	}
	rt.tell(1, ends(1, 0, reasonEngineLost))
	rt.tell(0, ends(1, 0, reasonAborted))
	if got := rt.pass(retryPause); got != "p1.1 d1.1" {
		t.Errorf("then: %s", got)
	}
}

// A worker dies: what was open at it is lost, what it had not opened is its successor's, in order.
func TestRouterReplacesAWorker(t *testing.T) {
	rt := newRouterTest(t, 5)
	rt.pass(time.Second)
	rt.said()
	rt.tell(1, opens(1, 0), opens(3, 0), opens(2, 0), ends(1, 0, reasonSuccess))
	rt.tell(0, opens(1, 0), ends(1, 0, reasonSuccess), opens(2, 0), ends(2, 0, reasonSuccess), opens(4, 0), ends(4, 0, reasonAborted))
	rt.pass(2 * abortGrace) // room 4 is aborted at the worker that is to die
	rt.died(1, rt.now)
	if got := slices.Collect(func(yield func(attemptID) bool) {
		for id := range rt.sides[1].died {
			if !yield(id) {
				return
			}
		}
	}); len(got) != 2 || !rt.sides[1].died[attemptID{2, 0}] || !rt.sides[1].died[attemptID{3, 0}] {
		t.Errorf("died: %v", got)
	}
	rt.said()
	if err := rt.reorder(1); err != nil {
		t.Fatal(err)
	}
	if got := rt.said(); got != "d4.0 d4.0! d5.0" {
		t.Errorf("ordered again: %s", got)
	}
	// Room 2 had succeeded at the source: its pages died with the decode worker all the same.
	if got := rt.pass(retryPause); got != "p2.1 d2.1" {
		t.Errorf("tried again: %s", got)
	}
	if got := rt.pass(abortGrace); got != "p3.0!" {
		t.Errorf("aborted: %s", got)
	}
}

func TestRouterHoldsArrivalsUp(t *testing.T) {
	rt := newRouterTest(t, 10)
	rt.hold = 2
	if got := rt.pass(15 * time.Millisecond); got != "p1.0 d1.0 p2.0 d2.0" {
		t.Errorf("before: %s", got)
	}
	if got := rt.pass(2 * probePause); got != "" {
		t.Errorf("held up: %s", got)
	}
	rt.probing = true
	if got := rt.pass(probePause + time.Millisecond); got != "p3.0 d3.0 p4.0 d4.0" {
		t.Errorf("held up, but for a few: %s", got)
	}
	ids, err := rt.burst(rt.now, 2)
	if err != nil || len(ids) != 2 || rt.said() != "d5.0 d6.0" {
		t.Errorf("burst: %v, %v", ids, err)
	}
	if got := rt.pass(5 * time.Millisecond); got != "d7.0" {
		t.Errorf("while the source lags: %s", got)
	}
	if err := rt.catchUp(); err != nil || rt.said() != "p5.0 p6.0 p7.0" {
		t.Errorf("catching up: %v", err)
	}
	if got := rt.pass(10 * time.Millisecond); got != "p8.0 d8.0" {
		t.Errorf("afterwards: %s", got)
	}
}
