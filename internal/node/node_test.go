package node_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	client "github.com/terminus-kv/terminus/clients/go"
	"github.com/terminus-kv/terminus/internal/admin"
	"github.com/terminus-kv/terminus/internal/config"
	"github.com/terminus-kv/terminus/internal/node"
	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/tcp"
)

// fewName is the name by which this binary is a plugin without features.
const fewName = "few"

// muteName is the name by which this binary is a plugin that answers for no region.
const muteName = "mute"

// mortalName is the name by which this binary is a plugin that dies when a file appears.
const mortalName = "mortal"

func dieAtMark(path string) {
	for {
		if _, err := os.Stat(path); err == nil {
			os.Exit(1)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// TestMain is also the plugin: the built-in backend is the running binary, executed again.
func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == fewName {
		breacherMain("slow")
		return
	}
	if filepath.Base(os.Args[0]) == muteName {
		breacherMain("mute")
		return
	}
	if filepath.Base(os.Args[0]) == mortalName {
		go dieAtMark(os.Getenv("MORTAL_MARK"))
	}
	if len(os.Args) > 2 && os.Args[1] == "plugin" && os.Args[2] == "tcp" {
		os.Args = append(os.Args[:1], os.Args[3:]...)
		sdk.Main(tcp.New())
	}
	if len(os.Args) > 3 && os.Args[1] == "plugin" && os.Args[2] == "breach" {
		breacherMain(os.Args[3])
		return
	}
	if len(os.Args) > 2 && os.Args[1] == "engine" {
		engineMain(os.Args[2:])
	}
	if len(os.Args) > 2 && os.Args[1] == "worker" {
		workerMain(os.Args[2])
	}
	if len(os.Args) > 2 && os.Args[1] == "rank" {
		rankMain(os.Args[2])
	}
	if len(os.Args) > 1 && os.Args[1] == "squatter" {
		squatterMain()
	}
	// Under the race detector a process sleeps a second before it exits; plugins inherit this.
	os.Setenv("GORACE", "atexit_sleep_ms=0 "+os.Getenv("GORACE"))
	flag.Parse()
	flag.Set("test.parallel", "4") // tests wait, for clocks and processes, more than they work
	goleak.VerifyTestMain(m)
}

var (
	runningMu sync.Mutex
	running   []*engine // all engines of the present tests
)

// engine is a node, with its plugin in a process of its own.
type engine struct {
	cfg    *config.Config
	admin  *admin.Client
	cancel context.CancelFunc // of one that runs in this process
	done   chan error
	cmd    *exec.Cmd // of one in a process of its own
}

// start launches an engine and waits until it is ready.
func start(t *testing.T, dir, name string, set ...string) *engine {
	t.Helper()
	e := launch(t, dir, name, set...)
	e.awaitReady(t)
	return e
}

func (e *engine) awaitReady(t *testing.T) {
	t.Helper()
	eventually(t, e.cfg.Node+" is ready", func() bool {
		r, err := e.admin.Ready(context.Background())
		return err == nil && r.Ready
	})
}

func flagsOf(dir, name string, set []string) []string {
	return append([]string{"node=" + name, "runtime_dir=" + filepath.Join(dir, "r"), "state_dir=" + filepath.Join(dir, "s"), "admin.enable_mutations=true", "drain.budget=1s"}, set...)
}

func launch(t *testing.T, dir, name string, set ...string) *engine {
	t.Helper()
	cfg, err := config.Load(config.LoadOptions{Flags: flagsOf(dir, name, set)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	e := &engine{cfg: cfg, cancel: cancel, done: make(chan error, 1)}
	up := make(chan node.Sockets, 1)
	log := slog.New(slog.NewTextHandler(testWriter{t}, &slog.HandlerOptions{Level: slog.LevelDebug}))
	go func() {
		e.done <- node.Run(ctx, cfg, node.Options{Log: log.With("node", name), Version: "test", Started: func(s node.Sockets) { up <- s }})
	}()
	select {
	case s := <-up:
		e.admin = admin.NewClient(s.Admin)
	case err := <-e.done:
		t.Fatalf("engine %s: %v", name, err)
	case <-time.After(20 * time.Second):
		t.Fatalf("engine %s did not start", name)
	}
	e.register(t, func() { e.stop(t) })
	return e
}

// register makes the engine known to explain until the test ends.
func (e *engine) register(t *testing.T, stop func()) {
	runningMu.Lock()
	running = append(running, e)
	runningMu.Unlock()
	t.Cleanup(func() {
		runningMu.Lock()
		running = slices.DeleteFunc(running, func(r *engine) bool { return r == e })
		runningMu.Unlock()
		stop()
	})
}

func (e *engine) stop(t *testing.T) {
	e.admin.Close()
	e.cancel()
	select {
	case err := <-e.done:
		if err != nil {
			t.Logf("engine ended: %v", err)
		}
		e.done <- nil
	case <-time.After(40 * time.Second):
		t.Error("engine did not stop")
	}
}

type testWriter struct{ t *testing.T }

func (w testWriter) Write(p []byte) (int, error) {
	if os.Getenv("TERMINUS_TEST_LOG") != "" {
		os.Stderr.Write(p)
	}
	return len(p), nil
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("not within 20 s: %s", what)
}

// worker is a client with one region and one pool of pages of 2 tensors.
type worker struct {
	*client.Client
	region *client.Region
	pool   int
	pages  int
}

const (
	pageBytes = 4096
	tensors   = 2
)

func dial(t *testing.T, e *engine, role client.Role, group string, rank, size, pages int) *worker {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	w, err := newWorker(ctx, e.cfg.Worker.Socket, role, group, rank, size, pages)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		w.Close()
		w.region.Close()
	})
	return w
}

func options(socket string, role client.Role, group string, rank, size int) client.Options {
	return client.Options{
		Socket: socket, Group: group, Role: role, Rank: rank, Size: size, Notify: true,
		Layout: client.Layout{DType: "bf16", Layers: tensors, KVHeads: 1, HeadDim: 64, PageTokens: 16, Kind: "mha"},
	}
}

func newWorker(ctx context.Context, socket string, role client.Role, group string, rank, size, pages int) (*worker, error) {
	c, err := client.Dial(ctx, options(socket, role, group, rank, size))
	if err != nil {
		return nil, err
	}
	w := &worker{Client: c}
	if err := w.add(ctx, pages); err != nil {
		c.Close()
		return nil, err
	}
	return w, nil
}

// add gives a worker its memory.
func (w *worker) add(ctx context.Context, pages int) (err error) {
	w.pages = pages
	if w.region, err = w.CreateRegion(ctx, int64(pages*pageBytes*tensors)); err != nil {
		return err
	}
	var ts []client.Tensor
	for i := range tensors {
		ts = append(ts, client.Tensor{Region: w.region, Offset: int64(i * pages * pageBytes), PageStride: pageBytes, PageBytes: pageBytes, Layer: i})
	}
	if w.pool, err = w.AddPool(ctx, client.Pool{Pages: pages, Tensors: ts}); err != nil {
		w.region.Close()
	}
	return err
}

func (w *worker) page(tensor int, id int32) []byte {
	off := (tensor*w.pages + int(id)) * pageBytes
	return w.region.Bytes()[off : off+pageBytes]
}

func fill(w *worker, room int64, ids []int32) {
	for i, id := range ids {
		for k := range tensors {
			copy(w.page(k, id), bytes.Repeat([]byte(fmt.Sprintf("%08d%04d%04d", room, i, k)), pageBytes/16))
		}
	}
}

func check(t *testing.T, w *worker, room int64, ids []int32) {
	t.Helper()
	for i, id := range ids {
		for k := range tensors {
			if want := bytes.Repeat([]byte(fmt.Sprintf("%08d%04d%04d", room, i, k)), pageBytes/16); !bytes.Equal(w.page(k, id), want) {
				t.Fatalf("room %d: page %d (tensor %d) has %.16q, want %.16q", room, i, k, w.page(k, id), want)
			}
		}
	}
}

// explain asks every engine of the test about a room.
func explain(room int64) string {
	var b strings.Builder
	runningMu.Lock()
	defer runningMu.Unlock()
	for _, e := range running {
		why, err := e.admin.Why(context.Background(), room)
		fmt.Fprintln(&b, e.cfg.Node, why, err)
	}
	return b.String()
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func short(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// tempDir is short enough for unix socket paths.
func tempDir(t *testing.T) string {
	dir, err := os.MkdirTemp("", "tn")
	must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// openTo opens a destination room. A machine that is too busy for beats makes peers suspect for a moment.
func openTo(t *testing.T, d *worker, room int64) (rd *client.Room) {
	t.Helper()
	eventually(t, "the source's engine is not suspect", func() (ok bool) {
		var err error
		if rd, err = d.Open(short(t), client.OpenOptions{Room: room, PeerGroup: "prefill"}); err != nil && !strings.Contains(err.Error(), "clocks.peer_suspect") {
			t.Fatal(err)
		}
		return err == nil
	})
	return rd
}

// bind opens a room on both sides and registers pages; it returns once the two are bound.
func bind(t *testing.T, p, d *worker, room int64, pages []int32) (rs, rd *client.Room) {
	t.Helper()
	ctx := short(t)
	rs, err := p.Open(ctx, client.OpenOptions{Room: room})
	must(t, err)
	rd = openTo(t, d, room)
	must(t, rd.Register(ctx, client.RegisterPart{Pool: d.pool, Pages: pages}))
	eventually(t, "bound", func() bool { return rs.Poll() == client.WaitingForInput })
	return rs, rd
}

// handOver moves one room in two chunks and checks every byte.
func handOver(t *testing.T, p, d *worker, room int64, src, dst []int32) {
	t.Helper()
	ctx := short(t)
	fill(p, room, src)
	rs, err := p.Open(ctx, client.OpenOptions{Room: room})
	must(t, err)
	rd := openTo(t, d, room)
	must(t, rd.Register(ctx, client.RegisterPart{Pool: d.pool, Pages: dst}))
	half := len(src) / 2
	must(t, rs.Send(ctx, client.Chunk{Parts: []client.Part{{Pool: p.pool, Pages: src[:half]}}}))
	must(t, rs.Send(ctx, client.Chunk{Parts: []client.Part{{Pool: p.pool, Pages: src[half:]}}, Last: true, Aux: []byte("first token")}))
	for _, r := range []*client.Room{rd, rs} {
		st, err := r.WaitTerminal(ctx)
		must(t, err)
		if st != client.Success {
			f, _ := r.Failure(ctx)
			t.Fatalf("room %d is %v: %+v\n%s", room, st, f, explain(room))
		}
		must(t, r.WaitReusable(ctx))
	}
	aux, err := rd.Aux(ctx)
	must(t, err)
	if string(aux) != "first token" {
		t.Fatalf("aux is %q", aux)
	}
	check(t, d, room, dst)
	must(t, rd.Release(ctx))
	must(t, rs.Release(ctx))
}

func TestRealBytesThroughTwoEngines(t *testing.T) {
	dir := tempDir(t)
	pe, de := start(t, dir, "p"), start(t, dir, "d")
	p, d := dial(t, pe, client.Source, "prefill", 0, 1, 64), dial(t, de, client.Destination, "decode", 0, 1, 64)
	handOver(t, p, d, 7, []int32{3, 4, 5, 9}, []int32{40, 2, 41, 42})
	handOver(t, p, d, 8, []int32{0, 1}, []int32{63, 62})
	why, err := de.admin.Why(short(t), 7)
	must(t, err)
	if len(why) != 1 {
		t.Fatalf("why: %q", why)
	}

}

func TestBothRolesOnOneEngine(t *testing.T) {
	e := start(t, tempDir(t), "one")
	p, d := dial(t, e, client.Source, "prefill", 0, 1, 16), dial(t, e, client.Destination, "decode", 0, 1, 16)
	handOver(t, p, d, 1, []int32{1, 2, 3, 4}, []int32{5, 6, 7, 8})
}

func TestAbortReachesTheOtherSide(t *testing.T) {
	dir := tempDir(t)
	pe, de := start(t, dir, "p"), start(t, dir, "d")
	p, d := dial(t, pe, client.Source, "prefill", 0, 1, 16), dial(t, de, client.Destination, "decode", 0, 1, 16)
	ctx := short(t)
	rs, rd := bind(t, p, d, 5, []int32{1, 2})
	must(t, rd.Abort(ctx))
	st, err := rs.WaitTerminal(ctx)
	must(t, err)
	f, err := rs.Failure(ctx)
	must(t, err)
	if st != client.Failed || f.Reason != "peer_aborted" {
		t.Fatalf("source is %v: %+v", st, f)
	}
	must(t, rd.WaitReusable(ctx))
	must(t, rd.Release(ctx))
	must(t, rs.WaitReusable(ctx))
	must(t, rs.Release(ctx))
	var ended *client.EndedError
	rs2, err := p.Open(ctx, client.OpenOptions{Room: 5, Attempt: 1})
	must(t, err)
	must(t, rs2.Abort(ctx))
	if err := rs2.Send(ctx, client.Chunk{Last: true}); !errors.As(err, &ended) || ended.Reason != "aborted" {
		t.Fatalf("send on an aborted room: %v", err)
	}
}

// A new plugin epoch maps the workers' memory anew, without touching it, and serves.
func TestPluginKilledAndReplaced(t *testing.T) {
	dir := tempDir(t)
	pe, de := start(t, dir, "p"), start(t, dir, "d")
	p, d := dial(t, pe, client.Source, "prefill", 0, 1, 16), dial(t, de, client.Destination, "decode", 0, 1, 16)
	handOver(t, p, d, 1, []int32{1, 2}, []int32{3, 4})
	ctx := short(t)
	rs, rd := bind(t, p, d, 2, []int32{5, 6})
	before := bytes.Clone(d.region.Bytes())
	kill := func(e *engine) {
		t.Helper()
		ps, err := e.admin.Plugins(ctx)
		must(t, err)
		must(t, unix.Kill(ps[0].Epochs[0].PID, unix.SIGKILL))
		eventually(t, "the next epoch serves", func() bool {
			ps, err := e.admin.Plugins(ctx)
			return err == nil && ps[0].Epochs[0].Epoch == 2 && ps[0].Epochs[0].State == "ready"
		})
	}
	kill(de)
	st, err := rd.WaitTerminal(ctx)
	must(t, err)
	if f, _ := rd.Failure(ctx); st != client.Failed || f.Reason != "plugin_lost" {
		t.Fatalf("destination is %v: %+v\n%s", st, f, explain(2))
	}
	must(t, rd.WaitReusable(ctx))
	st, err = rs.WaitTerminal(ctx)
	must(t, err)
	if st != client.Failed {
		t.Fatalf("source is %v", st)
	}
	if !bytes.Equal(before, d.region.Bytes()) {
		t.Error("the new epoch changed the worker's memory")
	}
	must(t, rd.Release(ctx))
	must(t, rs.WaitReusable(ctx))
	must(t, rs.Release(ctx))
	handOver(t, p, d, 3, []int32{1, 2, 9, 10}, []int32{3, 4, 7, 8})
	kill(pe)
	handOver(t, p, d, 4, []int32{1, 2, 9, 10}, []int32{3, 4, 7, 8})
}

func TestWorkerDiesMidRoom(t *testing.T) {
	dir := tempDir(t)
	pe, de := start(t, dir, "p"), start(t, dir, "d")
	p, d := dial(t, pe, client.Source, "prefill", 0, 1, 16), dial(t, de, client.Destination, "decode", 0, 1, 16)
	ctx := short(t)
	_, rd := bind(t, p, d, 1, []int32{5, 6})
	p.Close()
	st, err := rd.WaitTerminal(ctx)
	must(t, err)
	if f, _ := rd.Failure(ctx); st != client.Failed || f.Reason != "worker_lost" {
		t.Fatalf("destination is %v: %+v\n%s", st, f, explain(1))
	}
	must(t, rd.WaitReusable(ctx))
	must(t, rd.Release(ctx))
	eventually(t, "the session's memory is dropped", func() bool {
		s, err := pe.admin.Status(ctx)
		return err == nil && s.Sessions == 0
	})
	p2 := dial(t, pe, client.Source, "prefill", 0, 1, 16)
	handOver(t, p2, d, 2, []int32{1, 2}, []int32{3, 4})
}

func TestPeerEngineRestarts(t *testing.T) {
	dir := tempDir(t)
	pe, de := start(t, dir, "p"), start(t, dir, "d")
	p, d := dial(t, pe, client.Source, "prefill", 0, 1, 16), dial(t, de, client.Destination, "decode", 0, 1, 16)
	ctx := short(t)
	rs, rd := bind(t, p, d, 1, []int32{5, 6})
	de.stop(t)
	st, err := rs.WaitTerminal(ctx)
	must(t, err)
	if st != client.Failed {
		t.Fatalf("source is %v", st)
	}
	must(t, rs.Release(ctx))
	if st := rd.Poll(); st != client.Failed {
		t.Fatalf("destination is %v after its engine stopped", st)
	}
	d.Close()
	de2 := start(t, dir, "d")
	d2 := dial(t, de2, client.Destination, "decode", 0, 1, 16)
	handOver(t, p, d2, 2, []int32{1, 2}, []int32{3, 4})
}

// Two ranks a side on one engine each: one opener, one verdict for both.
func TestTwoRanks(t *testing.T) {
	dir := tempDir(t)
	pe, de := start(t, dir, "p"), start(t, dir, "d")
	var p, d [2]*worker
	for i := range 2 {
		p[i] = dial(t, pe, client.Source, "prefill", i, 2, 16)
		d[i] = dial(t, de, client.Destination, "decode", i, 2, 16)
	}
	ctx := short(t)
	var rs, rd [2]*client.Room
	for i := range 2 {
		var err error
		fill(p[i], int64(100+i), []int32{1, 2})
		rs[i], err = p[i].Open(ctx, client.OpenOptions{Room: 1})
		must(t, err)
		rd[i], err = d[i].Open(ctx, client.OpenOptions{Room: 1, PeerGroup: "prefill"})
		must(t, err)
	}
	for i := range 2 {
		must(t, rd[i].Register(ctx, client.RegisterPart{Pool: d[i].pool, Pages: []int32{int32(5 + i), int32(8 + i)}}))
		must(t, rs[i].Send(ctx, client.Chunk{Parts: []client.Part{{Pool: p[i].pool, Pages: []int32{1, 2}}}, Last: true}))
	}
	for i := range 2 {
		for _, r := range []*client.Room{rs[i], rd[i]} {
			st, err := r.WaitTerminal(ctx)
			must(t, err)
			if st != client.Success {
				t.Fatalf("rank %d is %v\n%s", i, st, explain(1))
			}
			must(t, r.WaitReusable(ctx))
			must(t, r.Release(ctx))
		}
		check(t, d[i], int64(100+i), []int32{int32(5 + i), int32(8 + i)})
	}
}

// With plain data parallelism each process took itself for rank 0, and rooms were refused as misrouted or all
// went to one rank (sglang#29725). Here a rank of a group is connected once, the second is told so; processes
// that are alike are groups of one rank each, and serve their own rooms.
func TestRankIsConnectedOnce(t *testing.T) {
	dir := tempDir(t)
	pe, de := start(t, dir, "p"), start(t, dir, "d")
	d := dial(t, de, client.Destination, "decode", 0, 1, 16)
	var ps []*worker
	for i := range 2 {
		group := fmt.Sprint("prefill-", i)
		ps = append(ps, dial(t, pe, client.Source, group, 0, 1, 16))
		_, err := newWorker(short(t), pe.cfg.Worker.Socket, client.Source, group, 0, 1, 16)
		if want := fmt.Sprintf("rank 0 of group %q is connected already", group); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("a second rank 0 of %s: %v", group, err)
		}
	}
	for room := range int64(16) {
		p := ps[room%2]
		var rd *client.Room
		eventually(t, "the group is known", func() (ok bool) {
			var err error
			rd, err = d.Open(short(t), client.OpenOptions{Room: room, PeerGroup: fmt.Sprint("prefill-", room%2)})
			return err == nil
		})
		must(t, rd.Register(short(t), client.RegisterPart{Pool: d.pool, Pages: []int32{int32(room)}}))
		rs, err := p.Open(short(t), client.OpenOptions{Room: room})
		must(t, err)
		fill(p, room, []int32{1})
		must(t, rs.Send(short(t), client.Chunk{Parts: []client.Part{{Pool: p.pool, Pages: []int32{1}}}, Last: true}))
		for _, r := range []*client.Room{rs, rd} {
			if st, err := r.WaitTerminal(short(t)); err != nil || st != client.Success {
				t.Fatalf("room %d: %v, %v", room, st, err)
			}
			must(t, r.WaitReusable(short(t)))
		}
		check(t, d, room, []int32{int32(room)})
		must(t, rs.Release(short(t)))
		must(t, rd.Release(short(t)))
	}
}

// Two engines that know each other by address, moving bytes by TCP.
func TestStaticPeersOverTCP(t *testing.T) {
	dir := tempDir(t)
	address := map[string]string{"p": freePort(t), "d": freePort(t)}
	flags := func(name, other string) []string {
		return []string{
			"peers.driver=static", "peers.listen=" + address[name], `peers.static=[{node: ` + other + `, address: "` + address[other] + `"}]`,
			"plugins.tcp.options.shm=false", "runtime_dir=" + filepath.Join(dir, name),
		}
	}
	pe, de := start(t, dir, "p", flags("p", "d")...), start(t, dir, "d", flags("d", "p")...)
	p, d := dial(t, pe, client.Source, "prefill", 0, 1, 256), dial(t, de, client.Destination, "decode", 0, 1, 256)
	ids := make([]int32, 200)
	for i := range ids {
		ids[i] = int32((i * 7) % 256)
	}
	handOver(t, p, d, 1, ids[:150], ids[50:])
	rooms, err := de.admin.Plugins(short(t))
	must(t, err)
	if rooms[0].State != "up" {
		t.Errorf("%+v", rooms)
	}
	info, err := pe.admin.Room(short(t), 1)
	must(t, err)
	if info[0].Lane != "tcp" {
		t.Errorf("lane %q, want tcp", info[0].Lane)
	}
}

func freePort(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer l.Close()
	return l.Addr().String()
}

// A pair of groups whose caches differ is refused before any room, naming the field.
func TestLayoutMismatchIsRefusedByName(t *testing.T) {
	dir := tempDir(t)
	pe, de := start(t, dir, "p"), start(t, dir, "d")
	dial(t, pe, client.Source, "prefill", 0, 1, 16)
	c, err := client.Dial(short(t), client.Options{
		Socket: de.cfg.Worker.Socket, Group: "decode", Role: client.Destination, Size: 1,
		Layout: client.Layout{DType: "fp8_e4m3", Layers: tensors, KVHeads: 1, HeadDim: 64, PageTokens: 16, Kind: "mha"},
	})
	must(t, err)
	defer c.Close()
	eventually(t, "the open is refused with the field", func() bool {
		r, err := c.Open(short(t), client.OpenOptions{Room: 1, PeerGroup: "prefill"})
		if err == nil {
			must(t, r.Abort(short(t)))
			must(t, r.WaitReusable(short(t)))
			must(t, r.Release(short(t)))
			return false
		}
		return strings.Contains(err.Error(), "layout.dtype: source has bf16, destination has fp8_e4m3")
	})
	// The source's engine learns of the group by the link, in its own time.
	eventually(t, "groups at the source say why", func() bool {
		gs, err := pe.admin.Groups(short(t))
		must(t, err)
		return strings.Contains(fmt.Sprint(gs), "layout.dtype")
	})
}
