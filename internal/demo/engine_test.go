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
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", path, module+pkg).CombinedOutput(); err != nil {
		t.Fatalf("go build %s: %v\n%s", pkg, err, out)
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
	want := FaultNames()
	slices.Sort(want)
	if !slices.Equal(struck, want) {
		t.Errorf("faults %v", struck)
	}
	if r.Rooms != 150 || r.Success+r.Aborted+r.Failed != 150 || r.Success < 120 || r.Retried == 0 || r.RetriedSuccess == 0 || r.Bytes < 16<<20 {
		t.Errorf("%+v", r)
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
	e, err := newEngine(dir, "n", "", "")
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
