package demo

import (
	"reflect"
	"strings"
	"testing"
	"time"
)

func TestFaultKinds(t *testing.T) {
	for _, c := range []struct {
		text, err string
		want      []string
	}{
		{"all", "", []string{"plugin", "engine", "worker", "pause", "link"}},
		{"store", "without --peers etcd there is no store", nil},
		{"none", "", nil},
		{"", "", nil},
		{"link,engine", "", []string{"link", "engine"}},
		{"link,link", "twice", nil},
		{"fire", `no fault is called "fire"; there are all, none, plugin, engine, worker, pause, link, store`, nil},
		{"link,", `no fault is called ""`, nil},
	} {
		got, err := faultKinds(c.text, PeersLocal)
		if !reflect.DeepEqual(got, c.want) || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%q: %v, %v", c.text, got, err)
		}
	}
}

func TestFaultsWithAStore(t *testing.T) {
	for text, want := range map[string][]string{"all": FaultNames(), "store": {"store"}} {
		if got, err := faultKinds(text, PeersEtcd); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %v, %v", text, got, err)
		}
	}
}

// Every fault has rooms for its burst before the next one, and some are left when the last is over.
func TestFaultsHaveRoom(t *testing.T) {
	orders, targets := map[string]bool{}, map[string]int{}
	for seed := range uint64(200) {
		for _, rooms := range []int{leastRooms(6), 130, 1024} {
			faults := planFaults(FaultNames(), rooms, seed)
			end, order := 0, ""
			for _, f := range faults {
				if f.at < end || f.burst < 1 || f.burst > burstMost || f.delay < 0 || f.delay > strikeMost {
					t.Fatalf("seed %d, %d rooms: %+v after %d", seed, rooms, f, end)
				}
				if f.kind == faultEngine && roles[f.target] != RoleDecode {
					t.Fatalf("seed %d: %+v", seed, f)
				}
				end = f.at + f.burst
				order += f.kind + " "
				targets[f.kind+roles[f.target]]++
			}
			if end+spare > rooms {
				t.Fatalf("seed %d: the last burst ends at %d of %d", seed, end, rooms)
			}
			orders[order] = true
			if again := planFaults(FaultNames(), rooms, seed); !reflect.DeepEqual(faults, again) {
				t.Fatalf("seed %d: not the same twice", seed)
			}
		}
	}
	if len(orders) < 50 || len(targets) != 11 {
		t.Errorf("%d orders, targets %v", len(orders), targets)
	}
}

// table is reports of attempts on both sides.
type reported struct {
	id       attemptID
	src, dst report
	diedSrc  bool
	diedDst  bool
}

func tellSides(rows []reported) [2]*side {
	sides := [2]*side{newSide(RolePrefill), newSide(RoleDecode)}
	for _, r := range rows {
		sides[0].rooms[r.id], sides[1].rooms[r.id] = r.src, r.dst
		if r.diedSrc {
			sides[0].died[r.id] = true
		}
		if r.diedDst {
			sides[1].died[r.id] = true
		}
	}
	return sides
}

func took(status, reason string, opened, ended int64) report {
	return report{Status: status, Reason: reason, Opened: opened * 1e6, Ended: ended * 1e6}
}

func TestFateOfRooms(t *testing.T) {
	f := &fault{kind: faultWorker, struck: 100 * 1e6}
	ok := func(opened, ended int64) report { return took(statusSuccess, reasonSuccess, opened, ended) }
	lost := func(opened, ended int64) report { return took(statusFailed, reasonWorkerLost, opened, ended) }
	got := fateOf(f, tellSides([]reported{
		{attemptID{1, 0}, ok(10, 90), ok(10, 95), false, false},      // over before
		{attemptID{2, 0}, ok(101, 120), ok(102, 130), false, false},  // came later
		{attemptID{3, 0}, ok(50, 110), ok(60, 105), false, false},    // the later side counts
		{attemptID{4, 0}, lost(50, 99), lost(60, 130), false, false}, // one side had seen the end
		{attemptID{5, 0}, lost(0, 0), lost(60, 103), true, false},    // its worker died and saw nothing
		{attemptID{6, 0}, report{}, report{}, false, false},          // never opened
	}))
	want := fate{
		times:   []time.Duration{3 * time.Millisecond, 10 * time.Millisecond, 30 * time.Millisecond},
		reasons: map[string]int{reasonSuccess: 1, reasonWorkerLost: 2},
		longest: map[string]time.Duration{reasonSuccess: 10 * time.Millisecond, reasonWorkerLost: 30 * time.Millisecond},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%+v", got)
	}
	if r := got.result(f.kind); r != (Fault{What: "worker", Rooms: 3, P50: 10, P99: 30, Max: 30}) {
		t.Errorf("%+v", r)
	}
	if r := fateOf(&fault{struck: 1}, tellSides(nil)).result("link"); r != (Fault{What: "link"}) {
		t.Errorf("%+v", r)
	}
}

// A failure counts as a fault's only if its reason is one that this fault gives and the room was open then.
func TestFailureThatNoFaultExplains(t *testing.T) {
	plugin := &fault{kind: faultPlugin, struck: 100e6, over: 200e6}
	worker := &fault{kind: faultWorker, target: 0, struck: 300e6, over: 400e6}
	fail := func(reason string, opened, ended int64) report { return took(statusFailed, reason, opened, ended) }
	for i, c := range []struct {
		row       reported
		asked     bool
		aborted   bool
		explained bool
	}{
		{row: reported{dst: took(statusSuccess, reasonSuccess, 10, 20)}, explained: true},
		{row: reported{dst: fail(reasonPluginLost, 90, 110)}, explained: true},
		{row: reported{dst: fail(reasonPluginLost, 150, 160)}, explained: true},
		{row: reported{dst: fail(reasonPluginLost, 10, 90)}},
		{row: reported{dst: fail(reasonPluginLost, 210, 220)}, explained: true}, // its open was answered before, and read after
		{row: reported{dst: fail(reasonPluginLost, 310, 320)}},
		{row: reported{dst: fail("stalled", 90, 110)}},
		{row: reported{dst: fail(reasonWorkerLost, 90, 110)}},
		{row: reported{dst: fail(reasonWorkerLost, 310, 320)}, explained: true},
		{row: reported{dst: fail(reasonPeerAborted, 310, 320), diedSrc: true}, explained: true},
		{row: reported{dst: fail(reasonPeerAborted, 310, 320)}},
		{row: reported{dst: fail(reasonAborted, 10, 20)}, asked: true, explained: true},
		{row: reported{dst: fail(reasonAborted, 10, 20)}, aborted: true, explained: true},
		{row: reported{dst: fail("protocol", 10, 20)}, aborted: true},
		{row: reported{dst: fail("protocol", 10, 20)}, asked: true},
	} {
		sides := tellSides([]reported{c.row})
		router := &router{attempts: map[attemptID]*attempt{{}: {asked: c.asked, aborted: c.aborted}}}
		wrong := unexplained(&Plan{Rooms: []Room{{ID: 0}}}, sides, router, []*fault{plugin, worker})
		if (len(wrong) == 0) != c.explained {
			t.Errorf("row %d: %v", i, wrong)
		}
	}
}
