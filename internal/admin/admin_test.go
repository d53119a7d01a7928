package admin_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/terminus-kv/terminus/internal/admin"
	"github.com/terminus-kv/terminus/internal/admin/admintest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// start serves an engine on a real socket.
func start(t *testing.T, o admin.Options) (*admin.Client, string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "t")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket := filepath.Join(dir, "node", "a.sock")
	l, err := admin.Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	s := admin.NewServer(o)
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	c := admin.NewClient(socket)
	t.Cleanup(func() {
		c.Close()
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := s.Shutdown(ctx); err != nil {
			t.Error(err)
		}
		if err := <-served; err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(socket); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the socket is left behind: %v", err)
		}
	})
	return c, socket
}

func soon(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func TestReads(t *testing.T) {
	e := admintest.Sample()
	c, socket := start(t, admin.Options{Engine: e})
	ctx := soon(t)

	if info, err := os.Stat(socket); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("socket: %v, %v", info.Mode(), err)
	}
	if st, err := c.Status(ctx); err != nil || !reflect.DeepEqual(st, e.State) {
		t.Errorf("status %+v, %v", st, err)
	}
	if r, err := c.Ready(ctx); err != nil || !r.Ready {
		t.Errorf("ready %+v, %v", r, err)
	}
	if rs, err := c.Rooms(ctx, admin.RoomFilter{}); err != nil || len(rs) != 3 {
		t.Errorf("rooms %+v, %v", rs, err)
	}
	rs, err := c.Room(ctx, 9223372036854775807)
	if err != nil || len(rs) != 1 || rs[0].Room != 9223372036854775807 || !reflect.DeepEqual(rs[0], e.Records[1]) {
		t.Errorf("room %+v, %v", rs, err)
	}
	if why, err := c.Why(ctx, 8131776411); err != nil || !reflect.DeepEqual(why, e.Reasons[8131776411]) {
		t.Errorf("why %q, %v", why, err)
	}
	if ps, err := c.Plugins(ctx); err != nil || !reflect.DeepEqual(ps, e.Plugs) {
		t.Errorf("plugins %+v, %v", ps, err)
	}
	if ps, err := c.Peers(ctx); err != nil || !reflect.DeepEqual(ps, e.Engines) {
		t.Errorf("peers %+v, %v", ps, err)
	}
	if gs, err := c.Groups(ctx); err != nil || !reflect.DeepEqual(gs, e.Models) {
		t.Errorf("groups %+v, %v", gs, err)
	}
	e.Grounds["a/b &?#"] = []string{"waits"}
	for _, name := range []string{"llama-d", "a/b &?#"} {
		if why, err := c.GroupWhy(ctx, name); err != nil || !reflect.DeepEqual(why, e.Grounds[name]) {
			t.Errorf("why of group %q: %q, %v", name, why, err)
		}
	}
	if why, err := c.GroupWhy(ctx, "llama"); !errors.Is(err, admin.ErrNotFound) {
		t.Errorf("why of an unknown group: %q, %v", why, err)
	}
	if why, err := c.GroupWhy(ctx, ""); err == nil || !strings.Contains(err.Error(), "?group=NAME") {
		t.Errorf("why of no group: %q, %v", why, err)
	}
	for _, f := range []struct {
		filter admin.RoomFilter
		want   int
	}{
		{admin.RoomFilter{Live: true}, 2},
		{admin.RoomFilter{Role: "destination"}, 1},
		{admin.RoomFilter{Status: "Transferring", Peer: "decode-0", State: "confirmed"}, 1},
		{admin.RoomFilter{OlderNS: int64(time.Minute), Group: "llama-p"}, 2},
		{admin.RoomFilter{Limit: 1}, 1},
		{admin.RoomFilter{Reason: "stalled", Residency: "armed"}, 0},
	} {
		if rs, err := c.Rooms(ctx, f.filter); err != nil || len(rs) != f.want {
			t.Errorf("%+v: %d rooms, %v", f.filter, len(rs), err)
		}
	}
}

func TestErrors(t *testing.T) {
	e := admintest.Sample()
	c, _ := start(t, admin.Options{Engine: e})
	ctx := soon(t)
	if _, err := c.Room(ctx, 1); !errors.Is(err, admin.ErrNotFound) {
		t.Errorf("got %v", err)
	}
	if _, err := c.AbortRoom(ctx, 8131776411, ""); !errors.Is(err, admin.ErrReadOnly) || !strings.Contains(err.Error(), "enable_mutations") {
		t.Errorf("got %v", err)
	}
	if _, err := c.Drain(ctx); !errors.Is(err, admin.ErrReadOnly) {
		t.Errorf("got %v", err)
	}
	if calls := e.Calls(); len(calls) != 0 {
		t.Errorf("a read-only API let through %q", calls)
	}
	if _, err := admin.NewClient(filepath.Join(t.TempDir(), "none")).Status(ctx); err == nil || !strings.Contains(err.Error(), "ask the engine at") {
		t.Errorf("got %v", err)
	}
}

func TestStuckEngine(t *testing.T) {
	e := admintest.Sample()
	e.Err = errors.New("the owner loop did not answer in 5s")
	c, _ := start(t, admin.Options{Engine: e})
	ctx := soon(t)
	if r, err := c.Ready(ctx); err != nil || r.Ready || len(r.Reasons) != 1 {
		t.Errorf("ready %+v, %v", r, err)
	}
	if _, err := c.Rooms(ctx, admin.RoomFilter{}); err == nil || err.Error() != e.Err.Error() {
		t.Errorf("got %v", err)
	}
	if err := c.WatchRooms(ctx, -1, nil); err == nil {
		t.Error("a watch of a stuck engine began")
	}
}

func TestNotReady(t *testing.T) {
	e := admintest.Sample()
	e.State.Ready, e.State.NotReady = false, []string{"no transfer backend is up"}
	_, socket := start(t, admin.Options{Engine: e})
	for path, want := range map[string]int{"/live": 200, "/ready": 503, "/v1/status": 200} {
		if status, body := raw(t, socket, "GET", path, ""); status != want {
			t.Errorf("%s: %d %s", path, status, body)
		}
	}
}

func TestMutations(t *testing.T) {
	e := admintest.Sample()
	var log strings.Builder
	c, _ := start(t, admin.Options{Engine: e, Mutations: true, Log: slog.New(slog.NewTextHandler(&log, nil))})
	ctx := soon(t)
	if r, err := c.AbortRoom(ctx, 8131776411, "source"); err != nil || r.Ended != 1 {
		t.Errorf("abort %+v, %v", r, err)
	}
	if r, err := c.AbortRoom(ctx, 77, ""); err != nil || r.Ended != 0 || !reflect.DeepEqual(r.Already, []string{"peer_lost"}) {
		t.Errorf("abort %+v, %v", r, err)
	}
	if r, err := c.Drain(ctx); err != nil || !r.Clean {
		t.Errorf("drain %+v, %v", r, err)
	}
	if want := []string{`abort 8131776411 "source"`, `abort 77 ""`, "drain"}; !reflect.DeepEqual(e.Calls(), want) {
		t.Errorf("calls %q", e.Calls())
	}
	if strings.Count(log.String(), "caller=\"uid ") != 3 {
		t.Errorf("the log does not name the caller:\n%s", log.String())
	}
}

func TestWatch(t *testing.T) {
	e := admintest.Sample()
	for i, r := range e.Records {
		e.Changes = append(e.Changes, admin.RoomChange{RoomInfo: r, What: "opened", Missed: i})
	}
	c, _ := start(t, admin.Options{Engine: e})
	ctx, cancel := context.WithCancel(soon(t))
	var got []admin.RoomChange
	err := c.WatchRooms(ctx, -1, func(ch admin.RoomChange) error {
		if got = append(got, ch); len(got) == 3 {
			cancel()
		}
		return nil
	})
	if err != nil || !reflect.DeepEqual(got, e.Changes) {
		t.Errorf("watched %+v, %v", got, err)
	}
	stop := errors.New("stop")
	err = c.WatchRooms(soon(t), 77, func(ch admin.RoomChange) error {
		if ch.Room != 77 {
			t.Errorf("another room: %+v", ch)
		}
		return stop
	})
	if !errors.Is(err, stop) {
		t.Errorf("got %v", err)
	}
}

// TestShutdownEndsWatches: a watch does not hold the engine up.
func TestShutdownEndsWatches(t *testing.T) {
	dir, err := os.MkdirTemp("", "t")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	socket := filepath.Join(dir, "a.sock")
	l, err := admin.Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	e := admintest.Sample()
	e.Changes = []admin.RoomChange{{RoomInfo: e.Records[0]}}
	s := admin.NewServer(admin.Options{Engine: e})
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	c := admin.NewClient(socket)
	defer c.Close()
	seen, watched := make(chan struct{}), make(chan error, 1)
	go func() {
		watched <- c.WatchRooms(soon(t), -1, func(admin.RoomChange) error { close(seen); return nil })
	}()
	<-seen
	if err := s.Shutdown(soon(t)); err != nil {
		t.Error(err)
	}
	if err := <-watched; !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("the watch ended with %v", err)
	}
	if err := <-served; err != nil {
		t.Error(err)
	}
}

// TestBadRequests: each is answered with a 4xx that says what is wrong.
func TestBadRequests(t *testing.T) {
	_, socket := start(t, admin.Options{Engine: admintest.Sample(), Mutations: true})
	for _, r := range []struct {
		method, path, body string
		status             int
		want               string
	}{
		{"GET", "/v1/rooms?colour=red", "", 400, "unknown filter"},
		{"GET", "/v1/rooms?limit=0", "", 400, "limit"},
		{"GET", "/v1/rooms?limit=99999999", "", 400, "limit"},
		{"GET", "/v1/rooms?role=a&role=b", "", 400, "more than once"},
		{"GET", "/v1/rooms?older=5", "", 400, "older"},
		{"GET", "/v1/rooms?live=perhaps", "", 400, "live"},
		{"GET", "/v1/rooms/-1", "", 400, "not a room"},
		{"GET", "/v1/rooms/9223372036854775808", "", 400, "not a room"},
		{"GET", "/v1/rooms/x/why", "", 400, "not a room"},
		{"GET", "/v1/watch?room=x", "", 400, "not a room"},
		{"POST", "/v1/rooms/77/abort?role=prefill", "", 400, "role"},
		{"POST", "/v1/drain", "now", 400, "body"},
		{"GET", "/v1/rooms/77/abort", "", 405, ""},
		{"GET", "/nothing", "", 404, ""},
		{"GET", "/metrics", "", 404, ""},
	} {
		if status, body := raw(t, socket, r.method, r.path, r.body); status != r.status || !strings.Contains(body, r.want) {
			t.Errorf("%s %s: %d %s", r.method, r.path, status, body)
		}
	}
}

func TestListen(t *testing.T) {
	dir, err := os.MkdirTemp("", "t")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "a.sock")
	first, err := admin.Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := admin.Listen(path); err == nil || !strings.Contains(err.Error(), "another engine") {
		t.Errorf("two engines on one socket: %v", err)
	}
	first.Close()
	// What a killed engine leaves: a socket file that nobody listens on.
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	dead.SetUnlinkOnClose(false)
	dead.Close()
	second, err := admin.Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	second.Close()
	if _, err := admin.Listen(filepath.Join(dir, strings.Repeat("x", 200))); err == nil {
		t.Error("a path that is too long was accepted")
	}
}

// raw sends one request as any program would.
func raw(t *testing.T, socket, method, path, body string) (int, string) {
	t.Helper()
	tr := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}}
	defer tr.CloseIdleConnections()
	u, err := url.Parse("http://engine" + path)
	if err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(soon(t), method, u.String(), strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	res, err := (&http.Client{Transport: tr}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res.StatusCode, string(b)
}
