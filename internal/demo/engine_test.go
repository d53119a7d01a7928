package demo

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	client "github.com/terminus-kv/terminus/clients/go"
)

const module = "github.com/terminus-kv/terminus/"

// built holds programs that tests need, made once. TestMain removes them.
var built struct {
	sync.Mutex
	dir string
}

// build returns the path of a program of this module.
func build(t *testing.T, pkg, name string) string {
	t.Helper()
	return goBuild(t, name, module+pkg)
}

// goBuild returns the path of a program that `go build ARGS` makes.
func goBuild(t *testing.T, name string, args ...string) string {
	t.Helper()
	built.Lock()
	defer built.Unlock()
	if built.dir == "" {
		dir, err := os.MkdirTemp("", "demo-test-")
		if err != nil {
			t.Fatal(err)
		}
		built.dir = dir
	}
	path := filepath.Join(built.dir, name)
	if _, err := os.Stat(path); err == nil {
		return path
	}
	if out, err := exec.CommandContext(t.Context(), "go", append(append([]string{"build"}, args[:len(args)-1]...), "-o", path, args[len(args)-1])...).CombinedOutput(); err != nil {
		t.Fatalf("go build %s: %v\n%s", args, err, out)
	}
	return path
}

// runJSON runs the demo for real, in small, and returns what it printed.
func runJSON(t *testing.T, change func(*Options)) (Result, error) {
	t.Helper()
	o := smallRun(t, build(t, "cmd/engine", "engine"))
	var out bytes.Buffer
	o.Rooms, o.Bytes, o.AbortFraction, o.Output, o.Stdout = 80, 24<<20, 0.1, "json", &out
	change(&o)
	want, err := Run(t.Context(), o)
	if o.Faults == faultsNone && !strings.Contains(out.String(), `"faults":[]`) {
		t.Errorf("no empty list of faults in %s", &out)
	}
	var got Result
	dec := json.NewDecoder(&out)
	dec.DisallowUnknownFields()
	if e := dec.Decode(&got); e != nil {
		t.Fatalf("standard output is not the result: %v (run: %v)", e, err)
	}
	if asJSON(t, got) != asJSON(t, want) || dec.More() {
		t.Errorf("printed %s, returned %s", asJSON(t, got), asJSON(t, want))
	}
	return got, err
}

func TestDemoMovesRealKV(t *testing.T) {
	t.Parallel()
	r, err := runJSON(t, func(o *Options) {})
	if err != nil {
		t.Fatal(err)
	}
	if r.Rooms != 80 || r.Success < 70 || r.Aborted == 0 || r.Failed != 0 || r.Retried != 0 || r.Bytes < 8<<20 {
		t.Errorf("%+v", r)
	}
}

// Two prefill ranks and four decode ranks share the heads; all the decode ranks die at once, and the plugin of one
// side is upgraded: only the death fails rooms.
func TestDemoOfRanks(t *testing.T) {
	t.Parallel()
	r, err := runJSON(t, func(o *Options) {
		o.Ranks, o.Faults, o.Upgrade, o.Rooms, o.Bytes = "2:4", faultWorker, true, 40, 12<<20
	})
	if err != nil {
		t.Fatal(err)
	}
	if r.Rooms != 40 || r.Success < 30 || r.LostAttempts[reasonWorkerLost] == 0 || r.Failed != 0 || r.Bytes < 2<<20 {
		t.Errorf("%+v", r)
	}
	if len(r.Faults) != 2 || !slices.ContainsFunc(r.Faults, func(f Fault) bool { return f.What == faultUpgrade && f.Rooms > 0 }) {
		t.Errorf("faults %+v", r.Faults)
	}
	for reason := range r.LostAttempts {
		if reason != reasonWorkerLost && reason != reasonAborted && reason != reasonPeerAborted {
			t.Errorf("attempts ended as %s", reason)
		}
	}
}

// Both workers in Go, of which one goes on with the next engine, as the Python worker does elsewhere.
func TestDemoInGoSurvivesItsEngine(t *testing.T) {
	t.Parallel()
	r, err := runJSON(t, func(o *Options) { o.Faults, o.NoPython = faultEngine, true })
	if err != nil {
		t.Fatal(err)
	}
	if r.Rooms != 80 || r.Success < 60 || r.LostAttempts[reasonEngineLost] == 0 || r.RetriedSuccess == 0 || r.Bytes < 8<<20 {
		t.Errorf("%+v", r)
	}
}

// Everything that can die dies once, and all figures are as they must be.
func TestDemoSurvivesEveryFault(t *testing.T) {
	t.Parallel()
	r, err := runJSON(t, func(o *Options) { o.Faults, o.Rooms, o.Bytes = faultsAll, 150, 48<<20 })
	if err != nil {
		t.Fatal(err)
	}
	var struck []string
	for _, f := range r.Faults {
		struck = append(struck, f.What)
		if f.Rooms == 0 || f.P50 <= 0 || f.P99 < f.P50 || f.Max < f.P99 {
			t.Errorf("%+v", f)
		}
		if f.What == faultPause && f.Max < 2500 {
			t.Errorf("rooms did not feel the pause: %+v", f)
		}
	}
	slices.Sort(struck)
	want := allFaults(PeersLocal)
	slices.Sort(want)
	if !slices.Equal(struck, want) {
		t.Errorf("faults %v", struck)
	}
	if r.Rooms != 150 || r.Success+r.Aborted+r.Failed != 150 || r.Success < 120 || r.Retried == 0 || r.RetriedSuccess == 0 || r.Bytes < 16<<20 {
		t.Errorf("%+v", r)
	}
}

// The store is killed under load and stays away for longer than a lease: no room fails of that. An engine that is
// killed comes back under its name at once.
func TestDemoByEtcdSurvivesItsStore(t *testing.T) {
	t.Parallel()
	buildStore(t)
	r, err := runJSON(t, func(o *Options) { o.Peers, o.Faults, o.Rooms = PeersEtcd, faultStore+","+faultEngine, 120 })
	if err != nil {
		t.Fatal(err)
	}
	if r.Rooms != 120 || r.Success < 100 || r.LostAttempts[reasonEngineLost] == 0 || r.RetriedSuccess == 0 || len(r.Faults) != 2 {
		t.Errorf("%+v", r)
	}
}

// buildStore puts the etcd beside the engine.
func buildStore(t *testing.T) {
	t.Helper()
	goBuild(t, storeProgram, "-C", "../membership/etcdtest", "-ldflags", "-s -w", ".")
}

// An engine publishes its groups, stops at once when the store says that its record is gone, and does not start
// without a store.
func TestEngineObeysItsStore(t *testing.T) {
	t.Parallel()
	buildStore(t)
	binary, dir := build(t, "cmd/engine", "engine"), t.TempDir()
	for _, d := range []string{"run", "state"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	s, err := newStore(t.Context(), binary, dir, os.Environ())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { s.proc.kill(); <-s.proc.done }()
	peers, err := (&run{dir: dir, store: s}).peers(0, "n", false)
	if err != nil {
		t.Fatal(err)
	}
	e, err := newEngine(dir, "n", "", peers)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.start(binary, os.Environ()); err != nil {
		t.Fatal(err)
	}
	defer func() { e.proc.stop(stopGrace) }()
	if err := e.waitReady(t.Context()); err != nil {
		t.Fatal(err, e.proc.lastWords())
	}
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{"http://" + s.addr}, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	get := func(key string) []*mvccpb.KeyValue {
		resp, err := c.Get(t.Context(), key)
		if err != nil {
			t.Fatal(err)
		}
		return resp.Kvs
	}
	w, err := dialWorker(t.Context(), client.Options{Socket: e.worker, Group: "m", Role: client.Source, Size: 1, Layout: client.Layout{DType: "bf16", Layers: 2, KVHeads: 1, HeadDim: 8, PageTokens: 64, Kind: "mha"}})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	for give := time.Now().Add(10 * time.Second); len(get("/terminus/groups/n/m")) == 0; time.Sleep(readyPoll) {
		if time.Now().After(give) {
			t.Fatal("the group is not published")
		}
	}

	record := get("/terminus/peers/n")
	if len(record) != 1 || uint64(record[0].CreateRevision) != w.Incarnation() {
		t.Fatalf("%+v, incarnation %d", record, w.Incarnation())
	}
	if _, err := c.Revoke(t.Context(), clientv3.LeaseID(record[0].Lease)); err != nil {
		t.Fatal(err)
	}
	ends := func(want string) {
		t.Helper()
		select {
		case <-e.proc.done:
		case <-time.After(30 * time.Second):
			t.Fatal("the engine goes on")
		}
		words := strings.Split(strings.TrimSpace(e.proc.lastWords()), "\n")
		if last := words[len(words)-1]; e.proc.err == nil || e.proc.cmd.ProcessState.ExitCode() != 1 || !strings.Contains(last, want) {
			t.Errorf("ended by %v: %s", e.proc.err, last)
		}
	}
	ends("membership: another engine may act under this node's name, stopped at once: the store has no record /terminus/peers/n any more")

	s.proc.kill()
	<-s.proc.done
	if err := e.start(binary, os.Environ()); err != nil {
		t.Fatal(err)
	}
	ends("connection refused; fix: see that peers.etcd.endpoints can be reached")
}

func TestDemoSaysThatThereIsNoStoreToStart(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	o := smallRun(t, script(t, "exit 3"))
	o.Peers = PeersEtcd
	if _, err := Run(t.Context(), o); err == nil || !strings.HasSuffix(err.Error(), "no such file or directory; build it with: make demo PEERS=etcd") {
		t.Errorf("got %v", err)
	}
}

// A worker that was started before its engine had noticed that the one before it was dead gave up at once.
func TestWorkerWaitsForThePlaceOfADeadOne(t *testing.T) {
	t.Parallel()
	binary := build(t, "cmd/engine", "engine")
	dir := t.TempDir()
	for _, d := range []string{"run", "state"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	e, err := newEngine(dir, "n", "", "{driver: local}")
	if err != nil {
		t.Fatal(err)
	}
	if err := e.start(binary, os.Environ()); err != nil {
		t.Fatal(err)
	}
	defer e.proc.stop(stopGrace)
	if err := e.waitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	o := client.Options{Socket: e.worker, Group: RolePrefill, Role: client.Source, Size: 1, Layout: client.Layout{DType: "bf16", Layers: 2, KVHeads: 1, HeadDim: 8, PageTokens: 64, Kind: "mha"}}
	first, err := dialWorker(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(300*time.Millisecond, func() { first.Close() })
	second, err := dialWorker(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	second.Close()
	if second.Incarnation() != first.Incarnation() {
		t.Error("the engine is another one")
	}
}

// The demo must not pass with a backend that breaks its promises.
func TestDemoCatchesBackendThatWritesLate(t *testing.T) {
	t.Parallel()
	r, err := runJSON(t, func(o *Options) {
		o.Plugin = "exec:" + build(t, "internal/demo/testdata/badplugin", "engine-plugin-late")
	})
	if err == nil || !strings.Contains(err.Error(), "written after they were released") || r.WrittenAfterRelease == 0 {
		t.Fatalf("%+v, %v", r, err)
	}
}

func TestDemoCatchesBackendThatSkips(t *testing.T) {
	t.Parallel()
	r, err := runJSON(t, func(o *Options) {
		o.Plugin = "exec:" + build(t, "internal/demo/testdata/badplugin", "engine-plugin-skip")
	})
	if err == nil || !strings.Contains(err.Error(), "hold other content") || r.MismatchedPages == 0 || r.WrittenAfterRelease != 0 {
		t.Fatalf("%+v, %v", r, err)
	}
}

// A backend that cannot start ends the demo as soon as the engine gives it up.
func TestDemoSaysThatTheBackendIsDown(t *testing.T) {
	t.Parallel()
	r, err := runJSON(t, func(o *Options) { o.Plugin = "exec:/bin/false" })
	const want = "the backend is down at prefill-0: plugin custom (/bin/false): restart budget used up"
	if err == nil || !strings.HasPrefix(err.Error(), want) || strings.Contains(err.Error(), "\n") {
		t.Errorf("got %v", err)
	}
	if r.Rooms != 0 || len(r.Errors) != 1 || r.Errors[0] != err.Error() || r.Reasons == nil {
		t.Errorf("%+v", r)
	}
}

// An engine that is killed is no reason for a page to count as leaked. (The Go worker: TestWorkerLosesItsEngine.)
func TestDemoCountsNoLeakOfALostEngine(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	binary := script(t, `if [ "$1" = run ]; then echo $$ > `+dir+`/$(basename "$3"); fi
exec `+build(t, "cmd/engine", "engine")+` "$@"`)
	var killed atomic.Bool
	r, err := runJSON(t, func(o *Options) {
		o.Executable, o.Rooms = binary, 250
		o.Stderr = writerFunc(func(b []byte) (int, error) {
			// A line of progress with bytes: the rooms are under way.
			if line := string(b); strings.Contains(line, " of 250 rooms") && !strings.Contains(line, ", 0 B,") && !killed.Swap(true) {
				killNode(t, filepath.Join(dir, "decode-0.yaml"))
			}
			return t.Output().Write(b)
		})
	})
	if err == nil || !strings.Contains(err.Error(), "engine decode-0 ended: signal: killed") {
		t.Errorf("got %v", err)
	}
	if r.LeakedPages != 0 || r.WrittenAfterRelease != 0 || r.MismatchedPages != 0 || r.Success == 0 {
		t.Errorf("%+v", r)
	}
}

// killNode kills the engine whose process id is in a file.
func killNode(t *testing.T, file string) {
	b, err := os.ReadFile(file)
	if err != nil {
		t.Error(err)
		return
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		t.Error(err)
		return
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Error(err)
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }
