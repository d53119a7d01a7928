package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	client "github.com/terminus-kv/terminus/clients/go"
)

// testPlan is small enough for a test under the race detector.
func testPlan(t *testing.T, rooms int) *Plan {
	t.Helper()
	p, err := newPlan(planOptions{Rooms: rooms, Bytes: int64(rooms) << 16, Seed: 7, AbortFraction: 0.1, Arrival: ArrivalBurst})
	if err != nil {
		t.Fatal(err)
	}
	p.PoolPages = 4200 // some rooms have to wait for pages, cached blocks are evicted
	for i := range p.Rooms {
		p.Rooms[i].At /= 10
		p.Rooms[i].Hold /= 10
	}
	return p
}

// playPair runs both workers against e and joins what they report.
func playPair(t *testing.T, p *Plan, e *fakeEngine, quiet time.Duration) Result {
	t.Helper()
	sides := playSides(t, p, e, quiet, nil)
	return join(p, sides[RolePrefill], sides[RoleDecode])
}

// playSides runs both workers against e; when one loses its engine, the other is told to stop.
func playSides(t *testing.T, p *Plan, e *fakeEngine, quiet time.Duration, change func(*worker)) map[string]*side {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	workers := map[string]*worker{}
	out := map[string]*bytes.Buffer{}
	for _, role := range []string{RolePrefill, RoleDecode} {
		out[role] = new(bytes.Buffer)
		b := make([]byte, p.poolBytes())
		workers[role] = newWorker(p, role, "", b, 0, e.session(role), e.open(role), newReporter(out[role], t.Output()))
		e.mem[role] = workers[role].mem
		if change != nil {
			change(workers[role])
		}
	}
	e.decode = workers[RoleDecode]
	done := make(chan error, 2)
	for _, w := range workers {
		go func() { done <- w.run(ctx, quiet) }()
	}
	for range 2 {
		err := <-done
		if err != nil {
			t.Log(err)
		}
		if errors.Is(err, client.ErrEngineLost) {
			cancel()
		}
	}
	e.late.Wait()
	sides := map[string]*side{}
	for role, b := range out {
		sides[role] = newSide(role)
		dec := json.NewDecoder(b)
		for {
			var line report
			if err := dec.Decode(&line); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatal(err)
			}
			sides[role].add(line)
		}
	}
	return sides
}

func TestWorkersMoveAndCountEverything(t *testing.T) {
	p := testPlan(t, 100)
	r := playPair(t, p, newFakeEngine(), 20*time.Second)
	if err := r.Err(); err != nil {
		t.Fatal(err)
	}
	if r.Rooms != 100 || r.Success+r.Aborted != 100 || r.Aborted == 0 || r.Bytes == 0 {
		t.Fatalf("%+v", r)
	}
	if r.Reasons[reasonSuccess] != r.Success {
		t.Fatalf("reasons %v", r.Reasons)
	}
}

func TestWorkersCatchBackendThatSkips(t *testing.T) {
	e := newFakeEngine()
	e.skipEvery = 10
	r := playPair(t, testPlan(t, 100), e, 20*time.Second)
	if r.MismatchedPages == 0 || r.WrittenAfterRelease != 0 || r.LeakedPages != 0 || r.Err() == nil {
		t.Fatalf("%+v", r)
	}
}

func TestWorkersCatchBackendThatWritesLate(t *testing.T) {
	e := newFakeEngine()
	e.lateWrite = true
	p := testPlan(t, 100)
	for i := range p.Rooms {
		if i%3 == 0 { // right after the pages were registered
			p.Rooms[i].Aborter, p.Rooms[i].Point = RoleDecode, 0.6
		}
	}
	r := playPair(t, p, e, 20*time.Second)
	if r.WrittenAfterRelease == 0 || r.Err() == nil {
		t.Fatalf("%+v", r)
	}
}

func TestWorkersGiveUpOnRoomsThatNeverEnd(t *testing.T) {
	e := newFakeEngine()
	e.hangEvery = 25
	r := playPair(t, testPlan(t, 50), e, time.Second)
	if r.Nonterminal == 0 || r.LeakedPages == 0 || r.Err() == nil {
		t.Fatalf("%+v", r)
	}
	if !strings.Contains(strings.Join(r.Errors, "\n"), "nothing happened") {
		t.Fatalf("faults %q", r.Errors)
	}
}

// A worker that loses its engine waits for the proof, and only then counts what leaked. Rooms that had
// ended keep their verdict.
func TestWorkerLosesItsEngine(t *testing.T) {
	for _, c := range []struct {
		name   string
		proven bool
	}{{"proven", true}, {"never proven", false}} {
		t.Run(c.name, func(t *testing.T) {
			p, e := testPlan(t, 100), newFakeEngine()
			e.loseAt = 60
			if c.proven {
				time.AfterFunc(300*time.Millisecond, func() { close(e.proven) })
			}
			sides := playSides(t, p, e, 20*time.Second, func(w *worker) {
				if !c.proven {
					w.proof = 300 * time.Millisecond
				}
			})
			s := sides[RolePrefill]
			reasons := map[string]int{}
			for _, line := range s.rooms {
				if !line.terminal() {
					t.Errorf("%+v", line)
				}
				reasons[line.Reason]++
			}
			if reasons[reasonSuccess] == 0 || reasons[reasonEngineLost] == 0 {
				t.Errorf("reasons %v", reasons)
			}
			if s.end == nil || (s.end.Leaked == 0) != c.proven || !strings.Contains(s.end.Error, "lost its engine") {
				t.Errorf("end: %+v", s.end)
			}
			// The other one was told to stop: it ended its rooms and has all pages back.
			if d := sides[RoleDecode]; d.end == nil || d.end.Leaked != 0 || !strings.Contains(d.end.Error, "told to stop") || d.unfinished() != "" {
				t.Errorf("decode: %+v, %s", d.end, d.unfinished())
			}
		})
	}
}

// A worker whose engine dies goes on with the next one: with all its pages, once nobody else can write to
// them, and with the rooms that come then. What was open has failed.
func TestWorkerGoesOnWithTheNextEngine(t *testing.T) {
	p, e := testPlan(t, 100), newFakeEngine()
	e.loseAt = 40
	sides := playSides(t, p, e, 20*time.Second, func(w *worker) {
		if w.role == RolePrefill {
			w.redial = func(ctx context.Context) (link, error) {
				time.Sleep(100 * time.Millisecond)
				close(e.proven)
				return e.next(w.role), nil
			}
		}
	})
	reasons := map[string]int{}
	for id, line := range sides[RolePrefill].rooms {
		if !line.terminal() {
			t.Errorf("%v: %+v", id, line)
		}
		reasons[line.Reason]++
	}
	if len(sides[RolePrefill].rooms) != len(p.Rooms) || reasons[reasonEngineLost] == 0 || reasons[reasonSuccess] < 60 {
		t.Errorf("reasons %v", reasons)
	}
	for role, s := range sides {
		if s.end == nil || s.end.Leaked != 0 || s.end.Written != 0 || s.end.Error != "" {
			t.Errorf("%s: %+v", role, s.end)
		}
	}
}

func TestWorkerGivesUpWhenNoEngineComes(t *testing.T) {
	p, e := testPlan(t, 100), newFakeEngine()
	e.loseAt = 40
	close(e.proven)
	sides := playSides(t, p, e, 20*time.Second, func(w *worker) {
		if w.role == RolePrefill {
			w.redial = func(context.Context) (link, error) { return link{}, errors.New("nobody listens") }
		}
	})
	end := sides[RolePrefill].end
	if end == nil || end.Leaked != 0 || !strings.Contains(end.Error, "lost its engine") || !strings.Contains(end.Error, "nobody listens") {
		t.Errorf("%+v", end)
	}
}

// A worker plays what it is ordered, and nothing else.
func TestWorkerObeysOrders(t *testing.T) {
	p, e := testPlan(t, 20), newFakeEngine()
	in := new(strings.Builder)
	say := func(o order) { in.Write(o.line()) }
	for i := range p.Rooms {
		p.Rooms[i].Aborter = ""
	}
	say(order{Room: p.Rooms[3].ID})
	say(order{Room: p.Rooms[1].ID, Attempt: 2})
	say(order{Room: p.Rooms[5].ID, Attempt: 1, Abort: true}) // before it comes
	say(order{Room: p.Rooms[5].ID, Attempt: 1})
	sides := playSides(t, p, e, 20*time.Second, func(w *worker) { w.orders = strings.NewReader(in.String()) })
	for role, s := range sides {
		if len(s.rooms) != 3 || s.end == nil || s.end.Error != "" || s.end.Leaked != 0 {
			t.Errorf("%s: %d rooms, %+v", role, len(s.rooms), s.end)
		}
		for id, want := range map[attemptID]string{{p.Rooms[3].ID, 0}: statusSuccess, {p.Rooms[1].ID, 2}: statusSuccess, {p.Rooms[5].ID, 1}: statusFailed} {
			if got := s.rooms[id]; got.Status != want {
				t.Errorf("%s: %v: %+v", role, id, got)
			}
		}
	}
}

func TestWorkerRefusesBadOrders(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{"{}", "room 0, which the schedule does not have"},
		{"hello", "no JSON object"},
		{"", ""},
	} {
		p, e := testPlan(t, 5), newFakeEngine()
		w := newWorker(p, RolePrefill, "", make([]byte, p.poolBytes()), 0, e.session(RolePrefill), e.open(RolePrefill), newReporter(io.Discard, t.Output()))
		w.orders = strings.NewReader(c.in)
		if err := w.run(t.Context(), 10*time.Second); (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: %v", c.in, err)
		}
	}
}

func TestWorkerSaysOnceWhatItWaitsFor(t *testing.T) {
	p, e := testPlan(t, 20), newFakeEngine()
	var notes, out bytes.Buffer
	w := newWorker(p, RoleDecode, "", make([]byte, p.poolBytes()), 0, e.session(RoleDecode), e.open(RoleDecode), newReporter(&out, &notes))
	w.waiting = 200 * time.Millisecond
	err := w.run(t.Context(), time.Second)
	if err == nil || !strings.Contains(err.Error(), "nothing happened in any room for 1s") {
		t.Error(err)
	}
	if s := notes.String(); strings.Count(s, "waiting for the prefill worker") != 1 || !strings.Contains(s, "gives up after 1s") {
		t.Errorf("said %q", s)
	}
}
