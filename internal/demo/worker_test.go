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
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	workers := map[string]*worker{}
	out := map[string]*bytes.Buffer{}
	for _, role := range []string{RolePrefill, RoleDecode} {
		out[role] = new(bytes.Buffer)
		b := make([]byte, p.poolBytes())
		workers[role] = newWorker(p, role, "", b, 0, e.open(role), newReporter(out[role]))
		e.mem[role] = workers[role].mem
	}
	e.decode = workers[RoleDecode]
	done := make(chan error, 2)
	for _, w := range workers {
		go func() { done <- w.run(ctx, quiet) }()
	}
	for range 2 {
		if err := <-done; err != nil {
			t.Log(err)
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
	return join(p, sides[RolePrefill], sides[RoleDecode])
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
	r := playPair(t, testPlan(t, 100), e, 20*time.Second)
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
	if !strings.Contains(strings.Join(r.Faults, "\n"), "nothing happened") {
		t.Fatalf("faults %q", r.Faults)
	}
}
