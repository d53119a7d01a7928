package node_test

import (
	"fmt"
	"testing"
	"time"

	client "github.com/terminus-kv/terminus/clients/go"
)

// An engine is stopped for longer than its stall clock, and for longer than a stream may be silent,
// while operations run. They end meanwhile: when it wakes up it judges nothing before it has heard so,
// and its peer does not give it up before the dead time.
func TestPausedEngineFailsNoRoom(t *testing.T) {
	for _, c := range []struct {
		who string
		d   time.Duration
	}{{"d", 3 * time.Second}, {"p", 6 * time.Second}} {
		t.Run(fmt.Sprintf("%s for %v", c.who, c.d), func(t *testing.T) {
			t.Parallel()
			dir := tempDir(t)
			set := map[string][]string{"p": breach(t, "slow"), "d": nil}
			set[c.who] = append(set[c.who], "clocks.stall=2s")
			engines := map[string]*engine{"p": spawn(t, dir, "p", set["p"]...), "d": spawn(t, dir, "d", set["d"]...)}
			p, d := dial(t, engines["p"], client.Source, "prefill", 0, 1, 16), dial(t, engines["d"], client.Destination, "decode", 0, 1, 16)
			ctx := short(t)
			var sources, rooms []*client.Room
			for i := range int64(8) {
				rs, rd := bind(t, p, d, i, []int32{int32(i)})
				sources, rooms = append(sources, rs), append(rooms, rs, rd)
			}
			for _, rs := range sources {
				must(t, rs.Send(ctx, client.Chunk{Parts: []client.Part{{Pool: p.pool, Pages: []int32{1}}}, Last: true}))
			}
			for _, r := range rooms { // a busy machine may see the first of them succeed
				eventually(t, "transferring", func() bool { st := r.Poll(); return st == client.Transferring || st == client.Success })
			}
			engines[c.who].pause(t, c.d)
			for _, r := range rooms {
				st, err := r.WaitTerminal(ctx)
				must(t, err)
				if f, _ := r.Failure(ctx); st != client.Success {
					t.Errorf("room %d is %v: %+v\n%s", r.ID(), st, f, explain(r.ID()))
				}
			}
			s, err := engines[c.who].admin.Status(ctx)
			if err != nil || s.Rooms != 0 {
				t.Errorf("%+v, %v", s, err)
			}
		})
	}
}

// An engine that is stopped beyond the dead time is given up by its peer, by the clock: it lives, so
// there is no proof. When it wakes up both sides agree and go on.
func TestPausedBeyondTheDeadTime(t *testing.T) {
	t.Parallel()
	dir := tempDir(t)
	clocks := []string{"clocks.peer_suspect=1s", "clocks.peer_dead=2s"}
	pe, de := spawn(t, dir, "p"), start(t, dir, "d", clocks...)
	p, d := dial(t, pe, client.Source, "prefill", 0, 1, 16), dial(t, de, client.Destination, "decode", 0, 1, 16)
	ctx := short(t)
	rs, rd := bind(t, p, d, 1, []int32{1})
	began := time.Now()
	resumed := make(chan struct{})
	go func() {
		defer close(resumed)
		pe.pause(t, 4*time.Second)
	}()
	st, err := rd.WaitTerminal(ctx)
	must(t, err)
	if f, _ := rd.Failure(ctx); st != client.Failed || f.Reason != "peer_lost" {
		t.Errorf("destination is %v: %+v", st, f)
	}
	took := time.Since(began)
	t.Logf("given up after %v", took)
	if took < 1500*time.Millisecond { // a beat may have been under way
		t.Error("it was given up before the dead time")
	}
	<-resumed
	st, err = rs.WaitTerminal(ctx)
	must(t, err)
	if f, _ := rs.Failure(ctx); st != client.Failed {
		t.Errorf("source is %v: %+v", st, f)
	}
	for _, r := range []*client.Room{rs, rd} {
		must(t, r.WaitReusable(ctx))
		must(t, r.Release(ctx))
	}
	handOver(t, p, d, 2, []int32{1, 2}, []int32{3, 4})
}
