package demo

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		os.RemoveAll(built.dir)
		os.Exit(code)
	}))
}

func contentSum() string {
	c := newContent(PlanHeader{Seed: 5, PageBytes: 512, Heads: 1}, 0, 1)
	h := sha256.New()
	b := make([]byte, 512)
	for _, room := range []int64{0, 7, 1<<62 - 1} {
		for _, page := range []int{0, 3, 70000} {
			for tensor := range 4 {
				c.fill(b, room, page, tensor)
				h.Write(b)
			}
		}
		h.Write(c.aux(room))
	}
	return hex.EncodeToString(h.Sum(nil))
}

func TestJoin(t *testing.T) {
	ok := report{Status: "Success", Reason: "success", Bytes: 10}
	failed := func(reason string) report { return report{Status: "Failed", Reason: reason} }
	rows := []struct {
		src, dst report
		want     Result // of this room alone
	}{
		{ok, ok, Result{Success: 1, Bytes: 10}},
		{failed("aborted"), failed("peer_aborted"), Result{Aborted: 1}},
		{failed("peer_aborted"), failed("aborted"), Result{Aborted: 1}},
		{failed("plugin_lost"), failed("plugin_lost"), Result{Failed: 1}},
		{failed("outcome_unknown"), ok, Result{Success: 1, Unknown: 1, Bytes: 10}},
		{failed("engine_lost"), ok, Result{Success: 1, Unknown: 1, Bytes: 10}},
		{failed("aborted"), ok, Result{Success: 1, Disagreed: 1, Bytes: 10}},
		{ok, failed("outcome_unknown"), Result{Failed: 1, Disagreed: 1}},
		{report{}, ok, Result{Success: 1, Disagreed: 1, Bytes: 10}},
		{ok, report{Status: "Transferring"}, Result{Nonterminal: 1}},
		{report{}, report{}, Result{Nonterminal: 1}},
		{ok, report{Status: "Success", Reason: "success", Mismatched: 3}, Result{Success: 1, MismatchedPages: 3}},
	}
	for i, row := range rows {
		p := &Plan{Rooms: []Room{{ID: 5}}}
		src, dst := newSide(RolePrefill), newSide(RoleDecode)
		row.src.T, row.src.Room, row.dst.T, row.dst.Room = "room", 5, "room", 5
		for _, line := range []report{row.src, {T: "end"}} {
			src.add(line)
		}
		for _, line := range []report{row.dst, {T: "end"}} {
			dst.add(line)
		}
		got := join(p, src, dst)
		got.Reasons, got.Errors, got.Faults, got.LostAttempts = nil, nil, nil, nil
		row.want.Rooms = 1
		if a, b := asJSON(t, got), asJSON(t, row.want); a != b {
			t.Errorf("row %d: %s, want %s", i, a, b)
		}
	}
}

// Of a room that was tried again the last attempt counts; every attempt must have ended alike on both
// sides, unless one died with its worker.
func TestJoinCountsEveryAttempt(t *testing.T) {
	ok := report{Status: statusSuccess, Reason: reasonSuccess, Bytes: 10}
	noAux := report{Status: statusSuccess, Reason: reasonSuccess, Bytes: 10, NoAux: true}
	failed := func(reason string) report { return report{Status: statusFailed, Reason: reason} }
	id := func(n int64) attemptID { return attemptID{5, n} }
	for i, c := range []struct {
		rows []reported
		want Result
	}{
		{
			[]reported{{id: id(0), src: failed(reasonPluginLost), dst: failed(reasonPluginLost)}, {id: id(1), src: ok, dst: ok}},
			Result{Success: 1, Retried: 1, RetriedSuccess: 1, Bytes: 10, LostAttempts: map[string]int{reasonPluginLost: 1}},
		},
		{
			[]reported{{id: id(0), src: failed(reasonPeerLost), dst: failed(reasonEngineLost)}, {id: id(1), src: failed(reasonPluginLost), dst: failed(reasonPluginLost)}, {id: id(2), src: failed(reasonAborted), dst: failed(reasonPeerAborted)}},
			Result{Aborted: 1, Retried: 1, RetriedAborted: 1, LostAttempts: map[string]int{reasonEngineLost: 1, reasonPluginLost: 1}},
		},
		{ // died with its worker: no verdict to compare
			[]reported{{id: id(0), src: ok, dst: failed(reasonWorkerLost), diedDst: true}, {id: id(1), src: ok, dst: ok}},
			Result{Success: 1, Retried: 1, RetriedSuccess: 1, Bytes: 10, LostAttempts: map[string]int{reasonWorkerLost: 1}},
		},
		{
			[]reported{{id: id(0), src: ok, dst: noAux}, {id: id(1), src: ok, dst: ok}},
			Result{Success: 1, Retried: 1, RetriedSuccess: 1, Bytes: 10, LostAttempts: map[string]int{reasonEngineLost: 1}},
		},
		{ // a lie in the first attempt is one
			[]reported{{id: id(0), src: ok, dst: failed(reasonPluginLost)}, {id: id(1), src: ok, dst: ok}},
			Result{Success: 1, Retried: 1, RetriedSuccess: 1, Disagreed: 1, Bytes: 10, LostAttempts: map[string]int{reasonPluginLost: 1}},
		},
		{ // and so is a wrong page
			[]reported{{id: id(0), src: failed(reasonPluginLost), dst: report{Status: statusFailed, Reason: reasonPluginLost, Mismatched: 2}}, {id: id(1), src: ok, dst: ok}},
			Result{Success: 1, Retried: 1, RetriedSuccess: 1, MismatchedPages: 2, Bytes: 10, LostAttempts: map[string]int{reasonPluginLost: 1}},
		},
		{ // ordered and never heard of again
			[]reported{{id: id(0), src: failed(reasonPluginLost), dst: failed(reasonPluginLost)}, {id: id(1)}},
			Result{Nonterminal: 1, Retried: 1, LostAttempts: map[string]int{reasonPluginLost: 1}},
		},
	} {
		sides := tellSides(c.rows)
		sides[0].end, sides[1].end = &report{}, &report{}
		got := join(&Plan{Rooms: []Room{{ID: 5}}}, sides[0], sides[1])
		got.Reasons, got.Faults = nil, nil
		c.want.Rooms = 1
		if a, b := asJSON(t, got), asJSON(t, c.want); a != b {
			t.Errorf("row %d: %s, want %s", i, a, b)
		}
	}
}

// What a worker had found out about its pages before it was killed counts.
func TestKilledWorkerTestifies(t *testing.T) {
	sides := tellSides(nil)
	sides[0].end, sides[1].end = &report{}, &report{Written: 2}
	sides[1].written = 3
	if got := join(&Plan{}, sides[0], sides[1]); got.WrittenAfterRelease != 5 {
		t.Errorf("%+v", got)
	}
}

func asJSON(t *testing.T, v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestResultJSONIsThePublishedOne(t *testing.T) {
	const want = `{"rooms":0,"success":0,"failed":0,"aborted":0,"nonterminal":0,"unknown":0,"disagreed":0,"bytes":0,"mismatched_pages":0,"leaked_pages":0,"written_after_release":0,"reasons":{},"faults":[],"retried":0,"retried_success":0,"retried_aborted":0,"lost_attempts":{}}`
	got := join(&Plan{}, &side{end: &report{}}, &side{end: &report{}})
	if s := asJSON(t, got); s != want {
		t.Fatalf("%s", s)
	}
}

func TestResultErrNamesEveryWrongFigure(t *testing.T) {
	good := Result{Rooms: 2, Success: 2, Reasons: map[string]int{"success": 2}}
	if err := good.Err(); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		change func(*Result)
		want   string
	}{
		{func(r *Result) { r.Rooms = 0 }, "no room"},
		{func(r *Result) { r.Nonterminal = 1 }, "1 rooms reached no terminal status"},
		{func(r *Result) { r.Disagreed = 2 }, "2 rooms ended differently"},
		{func(r *Result) { r.MismatchedPages = 3 }, "3 pages hold other content"},
		{func(r *Result) { r.LeakedPages = 4 }, "4 pages were not given back"},
		{func(r *Result) { r.WrittenAfterRelease = 5 }, "5 pages were written after"},
		{func(r *Result) { r.Reasons = nil }, "2 rooms ended without a reason"},
		{func(r *Result) { r.Errors = []string{"an engine died"} }, "an engine died"},
	} {
		r := good
		c.change(&r)
		if err := r.Err(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("got %v, want %q", err, c.want)
		}
	}
}

func TestProcessIsBounded(t *testing.T) {
	var lines []string
	p, err := startProcess("sh", []string{"/bin/sh", "-c", "echo out; echo problem >&2; trap '' TERM; sleep 100 & wait; sleep 100"}, nil, func(b []byte) { lines = append(lines, string(b)) })
	if err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(10 * time.Second); !strings.Contains(p.lastWords(), "problem"); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("nothing on standard error")
		}
	}
	start := time.Now()
	p.stop(100 * time.Millisecond)
	if took := time.Since(start); took > 10*time.Second {
		t.Fatalf("stop took %v", took)
	}
	if len(lines) != 1 || lines[0] != "out\n" {
		t.Fatalf("%q", lines)
	}
	if err := p.obituary(); !strings.Contains(err.Error(), "killed") {
		t.Fatal(err)
	}
}
