package sweep

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// The sweep that `make test` runs is a sample; `make sweep` sets the flags.
var (
	out      = flag.String("out", "", "of TestSweep: write the results there, and hold the time to verdict to the product's target")
	modes    = flag.String("modes", "kill", "of TestSweep: kill, stop, freeze, with commas in between")
	pairs    = flag.Int("pairs", 500, "of TestSweep: so many of each mode; 0: all")
	seed     = flag.Uint64("seed", 0, "of TestSweep: which; 0: it makes one, and says it")
	clusters = flag.Int("clusters", 3, "of TestSweep: at once; four times as many in the modes that wait")
	within   = flag.Duration("within", 60*time.Second, "of TestSweep: begins no pair later than that; 0: takes the time that it takes")
	version  = flag.String("version", "", "of TestSweep: of the product, for the results")
)

// available skips where a process cannot be traced, unless this is CI.
func available(t *testing.T) {
	t.Helper()
	err := Available()
	if err == nil {
		return
	}
	if os.Getenv("CI") != "" {
		t.Fatal(err)
	}
	t.Skip("unavailable here: ", err)
}

// build returns the directory with the engine and the worker.
func build(t *testing.T, args ...string) string {
	t.Helper()
	dir := t.TempDir()
	for _, pkg := range []string{"../../cmd/engine", "./sweepworker"} {
		out, err := exec.CommandContext(t.Context(), "go", append(append([]string{"build"}, args...), "-o", filepath.Join(dir, filepath.Base(pkg)), pkg)...).CombinedOutput()
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	return dir
}

func TestSweep(t *testing.T) {
	available(t)
	dir := build(t)
	if *seed == 0 {
		*seed = uint64(time.Now().UnixNano())
	}
	target := float64(Busy)
	if *out != "" {
		target = Target
	}
	var results []*Result
	for _, mode := range strings.Split(*modes, ",") {
		o := Options{
			Engine: filepath.Join(dir, "engine"), Worker: filepath.Join(dir, "sweepworker"), Mode: Mode(mode), Lanes: []string{"shm", "tcp"},
			Pairs: *pairs, Seed: *seed, Parallel: *clusters, CleanRuns: 2, Progress: t.Output(), Verbose: *out != "",
		}
		if *within > 0 {
			o.Until = time.Now().Add(*within)
		}
		again := fmt.Sprintf("go test ./internal/sweep -run TestSweep -modes %s -pairs %d -seed %d -within %v -clusters %d", mode, *pairs, *seed, *within, *clusters)
		if o.Mode != Kill {
			o.Parallel *= 4
		}
		r, err := Run(t.Context(), o)
		if err != nil {
			t.Fatalf("%v\n%s", err, again)
		}
		r.Version, r.Command = *version, again
		t.Logf("%s: %d of %d pairs, %d hit, %d rooms ended by it, %d not harmed, verdicts after %.1f ms p50, %.1f p99, %.1f max; %v\n%s",
			mode, r.Pairs, r.Known, r.Hit, r.Ended, r.Unharmed, r.P50, r.P99, r.Max, r.Reasons, again)
		if err := r.Err(target); err != nil {
			t.Errorf("%s: %v", mode, err)
		}
		results = append(results, r)
	}
	if *out != "" {
		b, err := json.MarshalIndent(results, "", "  ")
		if err == nil {
			err = os.WriteFile(*out, append(b, '\n'), 0o644)
		}
		if err != nil {
			t.Error(err)
		}
	}
}
