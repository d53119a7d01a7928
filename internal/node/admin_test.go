package node_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	client "github.com/terminus-kv/terminus/clients/go"
	"github.com/terminus-kv/terminus/internal/admin"
)

// A reader of changes that does not read costs the engine nothing, however many records a room has.
func TestWatchWithoutReaderDoesNotStopTheEngine(t *testing.T) {
	e := start(t, tempDir(t), "p")
	p := dial(t, e, client.Source, "prefill", 0, 1, 16)
	ctx := short(t)
	for i := range int64(300) {
		r, err := p.Open(ctx, client.OpenOptions{Room: 7, Attempt: i})
		must(t, err)
		must(t, r.Abort(ctx))
		must(t, r.Release(ctx))
	}
	watch, stop := context.WithCancel(ctx)
	first := make(chan struct{})
	done := make(chan error, 1)
	go func() {
		var once bool
		done <- e.admin.WatchRooms(watch, 7, func(admin.RoomChange) error {
			if !once {
				once = true
				close(first)
				<-watch.Done() // reads no further
			}
			return nil
		})
	}()
	<-first
	for i := range int64(600) {
		r, err := p.Open(ctx, client.OpenOptions{Room: 7, Attempt: 1000 + i})
		must(t, err)
		must(t, r.Abort(ctx))
		must(t, r.Release(ctx))
	}
	st, err := e.admin.Status(ctx)
	must(t, err)
	if !st.Ready {
		t.Errorf("%+v", st)
	}
	stop()
	<-done
}

func TestHistoryBeginsWithTheOpen(t *testing.T) {
	e := start(t, tempDir(t), "p")
	p := dial(t, e, client.Source, "prefill", 0, 1, 16)
	r, err := p.Open(short(t), client.OpenOptions{Room: 7})
	must(t, err)
	must(t, r.Abort(short(t)))
	rooms, err := e.admin.Room(short(t), 7)
	must(t, err)
	var opened bool
	for _, c := range rooms[0].History {
		opened = opened || c.What == "opened by the worker"
	}
	if !opened {
		t.Errorf("no open in %+v", rooms[0].History)
	}
}

// An engine that drains waits for its workers to take what is theirs: verdict, aux record, pages.
func TestDrainWaitsForRelease(t *testing.T) {
	dir := tempDir(t)
	pe, de := start(t, dir, "p"), start(t, dir, "d", "drain.budget=20s")
	p, d := dial(t, pe, client.Source, "prefill", 0, 1, 16), dial(t, de, client.Destination, "decode", 0, 1, 16)
	ctx := short(t)
	rs, err := p.Open(ctx, client.OpenOptions{Room: 1})
	must(t, err)
	rd, err := d.Open(ctx, client.OpenOptions{Room: 1, PeerGroup: "prefill"})
	must(t, err)
	must(t, rd.Register(ctx, client.RegisterPart{Pool: d.pool, Pages: []int32{5}}))
	must(t, rs.Send(ctx, client.Chunk{Parts: []client.Part{{Pool: p.pool, Pages: []int32{1}}}, Last: true, Aux: []byte("token")}))
	st, err := rd.WaitTerminal(ctx)
	must(t, err)
	if st != client.Success {
		t.Fatal(explain(1))
	}
	result := make(chan admin.DrainResult, 1)
	go func() {
		r, err := de.admin.Drain(ctx)
		if err != nil {
			t.Error(err)
		}
		result <- r
	}()
	eventually(t, "draining", func() bool { s, err := de.admin.Status(ctx); return err == nil && s.Draining })
	select {
	case r := <-result:
		t.Fatalf("drained before the room was released: %+v", r)
	case <-time.After(300 * time.Millisecond):
	}
	aux, err := rd.Aux(ctx)
	must(t, err)
	if string(aux) != "token" {
		t.Errorf("aux %q", aux)
	}
	must(t, rd.Release(ctx))
	if r := <-result; !r.Clean || r.Cut != 0 || r.Unreleased != 0 {
		t.Errorf("%+v", r)
	}
}

// With every backend down for good a worker is told so at once.
func TestRegionWithoutBackendIsRefusedAtOnce(t *testing.T) {
	dir := tempDir(t)
	self, err := os.Executable()
	must(t, err)
	e := launch(t, dir, "p", "plugins.tcp.exec="+self, `plugins.tcp.args=["plugin","breach","refuses"]`)
	ctx := short(t)
	eventually(t, "the backend is down", func() bool {
		ps, err := e.admin.Plugins(ctx)
		return err == nil && ps[0].State == "down"
	})
	c, err := client.Dial(ctx, client.Options{
		Socket: filepath.Join(dir, "r", "p", "worker.sock"), Group: "prefill", Role: client.Source, Size: 1,
		Layout: client.Layout{DType: "bf16", Layers: 1, KVHeads: 1, HeadDim: 64, PageTokens: 16, Kind: "mha"},
	})
	must(t, err)
	defer c.Close()
	begin := time.Now()
	_, err = c.CreateRegion(ctx, 1<<16)
	var refused *client.Error
	if !errors.As(err, &refused) || refused.Code != "no_backend" || time.Since(begin) > 10*time.Second {
		t.Errorf("%v after %v", err, time.Since(begin))
	}
	r, err := e.admin.Ready(ctx)
	must(t, err)
	if r.Ready || !strings.Contains(strings.Join(r.Reasons, " "), "no transfer backend is up") {
		t.Errorf("%+v", r)
	}
}

// An engine that has died was not listed any more, as if it had never been.
func TestPeersNamesAnEngineThatDied(t *testing.T) {
	t.Parallel()
	dir := tempDir(t)
	pe, de := start(t, dir, "p"), start(t, dir, "d")
	p, d := dial(t, pe, client.Source, "prefill", 0, 1, 16), dial(t, de, client.Destination, "decode", 0, 1, 16)
	handOver(t, p, d, 1, []int32{1, 2}, []int32{3, 4})
	de.stop(t)
	state := func() string {
		ps, err := pe.admin.Peers(short(t))
		if err != nil || len(ps) != 1 || ps[0].Node != "d" {
			t.Fatalf("%+v, %v", ps, err)
		}
		return ps[0].State
	}
	eventually(t, "the peer reads dead", func() bool { return state() == "dead" })
	start(t, dir, "d")
	eventually(t, "its successor is ready", func() bool { return state() == "ready" })
}

// A stopped engine was listed as dead for as long as its stream was down, and as heard of just now.
func TestPeersTellsHowLongAStoppedEngineIsSilent(t *testing.T) {
	t.Parallel()
	dir := tempDir(t)
	const dead = 6500 * time.Millisecond // later than the stream ends of silence
	pe, de := start(t, dir, "p", "clocks.peer_suspect=1s", "clocks.peer_dead=6500ms"), spawn(t, dir, "d")
	peer := func() admin.PeerInfo {
		ps, err := pe.admin.Peers(short(t))
		if err != nil || len(ps) != 1 {
			t.Fatalf("%+v, %v", ps, err)
		}
		return ps[0]
	}
	eventually(t, "ready", func() bool { return peer().State == "ready" })
	de.signal(t, unix.SIGSTOP)
	for _, c := range []struct {
		state string
		after time.Duration // of silence
	}{{"suspect", time.Second}, {"dead", dead}} {
		var p admin.PeerInfo
		eventually(t, "the peer reads "+c.state, func() bool { p = peer(); return p.State == c.state })
		// However late this looks, between the last word and the verdict is the clock.
		if was := time.Duration(p.HeardNS - p.SinceNS); was < c.after-300*time.Millisecond || was > c.after+3*time.Second {
			t.Errorf("%s for %v, heard %v ago: want the change %v after that", c.state, time.Duration(p.SinceNS), time.Duration(p.HeardNS), c.after)
		}
	}
	de.signal(t, unix.SIGCONT)
	var p admin.PeerInfo
	eventually(t, "ready again", func() bool { p = peer(); return p.State == "ready" })
	if p.SinceNS > int64(3*time.Second) || p.HeardNS > int64(3*time.Second) {
		t.Errorf("ready for %v, heard %v ago", time.Duration(p.SinceNS), time.Duration(p.HeardNS))
	}
}

// An engine that never answered was listed as heard of just now.
func TestPeersTellsThatAnEngineWasNeverHeard(t *testing.T) {
	t.Parallel()
	e := start(t, tempDir(t), "p", "peers.driver=static", "peers.listen="+freePort(t), `peers.static=[{node: d, address: "`+freePort(t)+`"}]`)
	ps, err := e.admin.Peers(short(t))
	if err != nil || len(ps) != 1 || ps[0].State != "connecting" || ps[0].HeardNS != 0 {
		t.Errorf("%+v, %v", ps, err)
	}
}

// The next clock of a room in an engine that drains is the drain's.
func TestDrainIsTheNextClock(t *testing.T) {
	t.Parallel()
	e := start(t, tempDir(t), "p", "drain.budget=20s")
	p := dial(t, e, client.Source, "prefill", 0, 1, 16)
	ctx := short(t)
	r, err := p.Open(ctx, client.OpenOptions{Room: 7})
	must(t, err)
	drained := make(chan error, 1)
	go func() { _, err := e.admin.Drain(ctx); drained <- err }()
	eventually(t, "draining", func() bool { s, err := e.admin.Status(ctx); return err == nil && s.Draining })
	rooms, err := e.admin.Room(ctx, 7)
	must(t, err)
	if c := rooms[0].Clock; c == nil || c.Name != "drain.budget" || c.RemainingNS <= 0 || c.RemainingNS > int64(20*time.Second) {
		t.Errorf("%+v", c)
	}
	why, err := e.admin.Why(ctx, 7)
	must(t, err)
	if !strings.Contains(why[0], "it ends Failed (draining) in ") || strings.Contains(why[0], "bootstrap clock") {
		t.Errorf("%q", why)
	}
	if _, err := p.Open(ctx, client.OpenOptions{Room: 8}); err == nil || !strings.Contains(err.Error(), "draining") {
		t.Errorf("an open: %v", err)
	}
	for _, want := range []string{`{cause="draining"} 1`, `{cause="inflight_rooms"} 0`} { // a cause that has not been is there, too
		if got := e.metrics(t); !strings.Contains(got, "terminus_requests_refused_total"+want+"\n") {
			t.Errorf("no %s in\n%s", want, grep(got, "requests_refused"))
		}
	}
	must(t, r.Abort(ctx))
	must(t, r.Release(ctx))
	must(t, <-drained)
}

// TestStageMetrics: what rooms spent their time in is at /metrics, of both engines.
func TestStageMetrics(t *testing.T) {
	dir := tempDir(t)
	pe, de := start(t, dir, "p"), start(t, dir, "d")
	p, d := dial(t, pe, client.Source, "prefill", 0, 1, 16), dial(t, de, client.Destination, "decode", 0, 1, 16)
	handOver(t, p, d, 1, []int32{1, 2}, []int32{3, 4})
	for _, c := range []struct {
		e    *engine
		want string
	}{
		{pe, `terminus_room_stage_seconds_count{role="source",stage="transfer"} 1`},
		{pe, `terminus_room_stage_seconds_count{role="source",stage="verdict"} 1`},
		{de, `terminus_room_stage_seconds_count{role="destination",stage="bootstrap"} 1`},
		{de, `terminus_room_stage_seconds_count{role="destination",stage="transfer"} 1`},
		{de, `terminus_room_stage_seconds_count{role="source",stage="transfer"} 0`},
	} {
		if got := c.e.metrics(t); !strings.Contains(got, c.want+"\n") {
			t.Errorf("no %s in\n%s", c.want, got)
		}
	}
}

// metrics is what a scrape of the admin socket gives.
func (e *engine) metrics(t *testing.T) string {
	t.Helper()
	socket := e.cfg.Admin.Socket
	c := http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}}
	defer c.CloseIdleConnections()
	req, err := http.NewRequestWithContext(short(t), http.MethodGet, "http://engine/metrics", nil)
	must(t, err)
	res, err := c.Do(req)
	must(t, err)
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	must(t, err)
	return string(body)
}
