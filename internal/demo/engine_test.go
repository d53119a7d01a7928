package demo

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
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
	if err == nil && !strings.Contains(out.String(), `"faults":[]`) {
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
	for name, noPython := range map[string]bool{"python": false, "go": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, err := runJSON(t, func(o *Options) { o.NoPython = noPython })
			if err != nil {
				t.Fatal(err)
			}
			if r.Rooms != 80 || r.Success < 70 || r.Aborted == 0 || r.Failed != 0 || r.Bytes < 8<<20 {
				t.Errorf("%+v", r)
			}
		})
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
