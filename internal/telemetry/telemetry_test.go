package telemetry

import (
	"context"
	"errors"
	"flag"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
)

var update = flag.Bool("update", false, "rewrite the golden file")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type fixed struct {
	s   Snapshot
	err error
}

func (f *fixed) Snapshot(context.Context) (Snapshot, error) { return f.s, f.err }

func sample() Snapshot {
	return Snapshot{
		Rooms: []RoomsBy{
			{Role: "source", State: "confirmed", Count: 3, Oldest: 12400 * time.Millisecond},
			{Role: "source", State: "unbound", Count: 1, Oldest: 2 * time.Second},
			{Role: "destination", State: "bound", Count: 2, Oldest: time.Second},
			{Role: "destination", State: "ended", Count: 40},
		},
		Unreleased: 4, OldestUnreleased: 90 * time.Second,
		Opened:   map[RoleBackend]uint64{{"source", "tcp"}: 44, {"destination", "tcp"}: 42},
		Verdicts: map[Verdict]uint64{{"source", "success"}: 38, {"source", "stalled"}: 1, {"destination", "bootstrap_timeout"}: 2, {"source", "aborted"}: 1},
		Stages:   map[RoomStage]Histogram{{"source", "transfer"}: took(0, time.Millisecond, 3*time.Millisecond, 20*time.Second, time.Hour), {"destination", "queued"}: took(time.Second)},
		Late:     map[string]uint64{"verdict": 1, "op_end": 2},
		Rungs:    map[string]Rung{"1": {Entered: 3, Left: 2, Time: 7 * time.Second}, "4": {Entered: 1}}, Replaced: 1, Retired: 2, RetireCut: 3,
		PinnedBytes: 283 << 20, QuarantinedBytes: 1 << 20, RegisteredBytes: 4 << 30, OldestPinned: 3 * time.Second, OldestQuarantine: time.Minute,
		OpsOut: map[string]int{"tcp": 5}, OldestOp: map[string]time.Duration{"tcp": 1500 * time.Millisecond}, OpsHeld: 2, QueueDepth: 1,
		OpsTotal:   map[OpEnd]uint64{{"tcp", "done"}: 90, {"tcp", "aborted"}: 1},
		MovedBytes: map[Moved]uint64{{"out", "tcp", "shm"}: 3 << 30},
		Refused:    map[string]uint64{"inflight_rooms": 1},
		Plugins:    []Plugin{{Name: "tcp", Version: "0.1.0", Up: true, Epoch: 2, BeatAge: 300 * time.Millisecond, Restarts: 1}},
		Peers:      map[string]int{"ready": 1, "dead": 1}, Sessions: map[string]int{"source": 1},
		BadFrames: map[BadFrame]uint64{{"worker", "bad_field"}: 3},
		Lag:       700 * time.Millisecond, LagTotal: 1, Steps: 1234,
	}
}

func took(all ...time.Duration) (h Histogram) {
	for _, d := range all {
		h.Observe(d)
	}
	return h
}

func scrape(t *testing.T, h http.Handler) string {
	t.Helper()
	rec := httptest.NewRecorder()
	h.ServeHTTP(rec, httptest.NewRequest("GET", "/metrics", nil))
	b, err := io.ReadAll(rec.Body)
	if err != nil || rec.Code != 200 {
		t.Fatalf("%d %v\n%s", rec.Code, err, b)
	}
	return string(b)
}

// bare is a registry without the runtime's own metrics, which differ from run to run.
func bare(src Source) http.Handler {
	reg := prometheus.NewRegistry()
	reg.MustRegister(newCollector(src, Build{Version: "v0", Node: "n0"}, NewLimiter(nil, time.Now)))
	return Handler(reg)
}

func TestExposition(t *testing.T) {
	got := scrape(t, bare(&fixed{s: sample()}))
	const file = "testdata/metrics.txt"
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("differs from %s (rewrite with -update):\n%s", file, got)
	}
}

// TestNames holds the names to their rules: a prefix, a unit, _total on counters only, bounded labels.
func TestNames(t *testing.T) {
	kinds := map[string]string{}
	for line := range strings.SplitSeq(scrape(t, bare(&fixed{s: sample()})), "\n") {
		if f := strings.Fields(line); len(f) == 4 && f[1] == "TYPE" {
			kinds[f[2]] = f[3]
		}
	}
	for name, kind := range kinds {
		if !strings.HasPrefix(name, Prefix) && !strings.HasPrefix(name, "sglang:") {
			t.Errorf("%s has no prefix", name)
		}
		if strings.HasSuffix(name, "_total") != (kind == "counter") {
			t.Errorf("%s is a %s", name, kind)
		}
	}
	for _, m := range families() {
		if d := m.desc.String(); strings.Contains(d, "room}") || strings.Contains(d, "room,") {
			t.Errorf("a label names a room: %s", d)
		}
	}
}

// TestZeros: what alerts stand on is there before the first room.
func TestZeros(t *testing.T) {
	got := scrape(t, bare(&fixed{}))
	for _, want := range []string{
		`terminus_rooms{role="source",state="confirmed"} 0`,
		`terminus_rooms_oldest_nonterminal_age_seconds{role="destination",state="bound"} 0`,
		`terminus_rooms_overdue 0`, `terminus_rooms_ended_total{reason="stalled",role="source"} 0`,
		`terminus_room_stage_seconds_count{role="destination",stage="drain"} 0`, `terminus_room_stage_seconds_bucket{role="source",stage="queued",le="0.001"} 0`,
		`terminus_quarantined_bytes 0`, `terminus_up 1`, `sglang:num_prefill_inflight_queue_reqs 0`,
	} {
		if !strings.Contains(got, want+"\n") {
			t.Errorf("no %s", want)
		}
	}
	if strings.Contains(got, `state="ended"`) && strings.Contains(got, `age_seconds{role="source",state="ended"}`) {
		t.Error("an ended room has a non-terminal age")
	}
}

func TestStuckEngine(t *testing.T) {
	got := scrape(t, bare(&fixed{err: errors.New("stuck")}))
	if !strings.Contains(got, "terminus_up 0\n") || strings.Contains(got, "terminus_rooms") {
		t.Errorf("got\n%s", got)
	}
}

func TestRegistry(t *testing.T) {
	got := scrape(t, Handler(NewRegistry(&fixed{s: sample()}, Build{}, nil)))
	for _, want := range []string{"go_goroutines", "process_open_fds", "terminus_core_steps_total 1234"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %s", want)
		}
	}
}

// TestComputedAtScrape: in a serving stack gauges were set when something happened, so an idle engine showed its
// last busy moment for ever, and counters were declared and never incremented (sglang#7317, sglang#8627). Here
// nothing is kept between scrapes.
func TestComputedAtScrape(t *testing.T) {
	src := &fixed{}
	h := bare(src)
	expect := func(when, queued, failed string) {
		t.Helper()
		got := scrape(t, h)
		for _, want := range []string{
			`terminus_rooms{role="source",state="unbound"} ` + queued, "terminus_admission_queue " + queued,
			`terminus_rooms_ended_total{reason="stalled",role="source"} ` + failed,
			"sglang:num_prefill_bootstrap_queue_reqs " + queued, "sglang:num_transfer_failed_reqs_total " + failed,
		} {
			if !strings.Contains(got, want+"\n") {
				t.Errorf("%s: no %s in\n%s", when, want, got)
			}
		}
	}
	expect("before the first room", "0", "0")
	src.s = Snapshot{
		Rooms:      []RoomsBy{{Role: "source", State: "unbound", Count: 5, Oldest: time.Second}},
		QueueDepth: 5,
	}
	expect("busy", "5", "0")
	src.s = Snapshot{Verdicts: map[Verdict]uint64{{"source", "stalled"}: 2}}
	expect("idle again", "0", "2")
}

// TestStages: a metric of a queue's time showed the value of one request (sglang#19009). Here it is a histogram of
// all that left a stage, a duration in the first bucket whose bound it does not exceed.
func TestStages(t *testing.T) {
	h := took(0, time.Millisecond, time.Millisecond+1, 5*time.Minute, time.Hour)
	then := h.Clone()
	h.Observe(time.Second)
	got := scrape(t, bare(&fixed{s: Snapshot{Stages: map[RoomStage]Histogram{{"source", "verdict"}: then}}}))
	for _, want := range []string{
		`bucket{role="source",stage="verdict",le="0.001"} 2`, `bucket{role="source",stage="verdict",le="0.005"} 3`,
		`bucket{role="source",stage="verdict",le="60"} 3`, `bucket{role="source",stage="verdict",le="300"} 4`,
		`bucket{role="source",stage="verdict",le="+Inf"} 5`, `count{role="source",stage="verdict"} 5`,
		`sum{role="source",stage="verdict"} 3900.002000001`, `count{role="source",stage="queued"} 0`,
	} {
		if !strings.Contains(got, "terminus_room_stage_seconds_"+want+"\n") {
			t.Errorf("no %s in\n%s", want, got)
		}
	}
}

// TestLabelsAreBounded: a label of tenants made series without bound (llm-d-batch-gateway#202). Here a label is
// one of these, and whatever a peer or a worker may name freely is none of them.
func TestLabelsAreBounded(t *testing.T) {
	bounded := map[string]bool{
		"role": true, "state": true, "reason": true, "kind": true, "direction": true, "lane": true, "end": true, "stage": true, // closed enums
		"code": true, "source": true, "cause": true, "rung": true,
		"backend": true, "plugin": true, "version": true, "node": true, // of the configuration
	}
	const names = "variableLabels: {"
	for _, m := range append(families(), metric{desc: stagesDesc}) {
		_, labels, ok := strings.Cut(m.desc.String(), names)
		if !ok {
			t.Fatalf("no labels in %s", m.desc)
		}
		labels, _, _ = strings.Cut(labels, "}")
		for label := range strings.FieldsFuncSeq(labels, func(r rune) bool { return r == ',' }) {
			if !bounded[label] {
				t.Errorf("label %q: %s", label, m.desc)
			}
		}
	}
	hostile := sample()
	hostile.Plugins[0].Version = "1.0\"} 1\nterminus_up 7\n"
	if got := scrape(t, bare(&fixed{s: hostile})); strings.Contains(got, "\nterminus_up 7\n") {
		t.Error("a version wrote a line of its own")
	}
}
