package bench

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/terminus-kv/terminus/internal/config"
	"github.com/terminus-kv/terminus/internal/node"
	"github.com/terminus-kv/terminus/internal/wasmhost"
	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/tcp"
)

// TestMain makes this test binary the child process of a benchmark, an engine, or the built-in plugin, when
// it is started as one.
func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "plugin" && os.Args[2] == "tcp" {
		sdk.Main(tcp.New())
	}
	if len(os.Args) > 2 && os.Args[1] == "plugin" && os.Args[2] == "wasm" {
		wasmhost.Main(os.Args[3:])
	}
	if len(os.Args) > 3 && os.Args[1] == "run" && os.Args[2] == "-c" {
		if err := runEngine(os.Args[3]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if len(os.Args) > 1 && os.Args[1] == ChildCommand {
		if err := Child(context.Background(), os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// runEngine is `engine run -c`.
func runEngine(file string) error {
	cfg, err := config.Load(config.LoadOptions{Files: []string{file}})
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	return node.Run(ctx, cfg, node.Options{Log: slog.New(slog.NewTextHandler(os.Stderr, nil))})
}

// testOptions are those of a tiny run. Timings mean nothing at this size and are not looked at.
func testOptions(t *testing.T) Options {
	t.Helper()
	engine, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "b")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return Options{Engine: engine, Dir: dir, Backend: "tcp", Duration: 50 * time.Millisecond, Seed: 1, Stderr: t.Output()}
}

// measure runs a benchmark at a tiny size and wants exactly these figures.
func measure(t *testing.T, b Bench, names ...string) Report {
	t.Helper()
	return measureWith(t, b, testOptions(t), names...)
}

func measureWith(t *testing.T, b Bench, o Options, names ...string) Report {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	report, err := b.Measure(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, r := range report.Results {
		if r.Name != "iperf3" { // another program, which may be absent, or report nothing on a busy machine
			got = append(got, r.Name)
		}
	}
	if strings.Join(got, " ") != strings.Join(names, " ") {
		t.Errorf("figures %v, want %v", got, names)
	}
	return report
}

var benchName = regexp.MustCompile(`^[a-z][a-z0-9]*$`)

// TestAll: every benchmark that can be named can be found, and says what it measures.
func TestAll(t *testing.T) {
	seen := map[string]bool{}
	for _, b := range All() {
		if !benchName.MatchString(b.Name) || b.Short == "" || b.Long == "" || b.Run == nil {
			t.Errorf("%q is not complete", b.Name)
		}
		for _, text := range []string{b.Short, b.Long} {
			if strings.HasSuffix(text, ".") || strings.Contains(text, "\n") {
				t.Errorf("%s: want one line without a full stop at its end: %q", b.Name, text)
			}
		}
		if seen[b.Name] {
			t.Errorf("%s comes twice", b.Name)
		}
		seen[b.Name] = true
		if found, ok := Find(b.Name); !ok || found.Name != b.Name {
			t.Errorf("%s is not found", b.Name)
		}
		guide, err := os.ReadFile(filepath.Join("..", "..", "docs", "benchmarks.md"))
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(guide), "`"+b.Name+"`") {
			t.Errorf("docs/benchmarks.md does not describe %s", b.Name)
		}
	}
	if err := Child(t.Context(), []string{"none"}); err == nil || Child(t.Context(), nil) == nil {
		t.Error("a child process of an unknown benchmark")
	}
}

func TestMeasure(t *testing.T) {
	good := func() Result {
		return Result{Name: "a_1", Value: 6, Unit: "µs", Better: Lower, Reference: &Reference{"other", 4}, Target: &Target{OfRatio, 1.5}}
	}
	run := func(results ...Result) (Report, error) {
		b := Bench{Name: "x", Run: func(context.Context, Options) ([]Result, error) { return results, nil }}
		return b.Measure(t.Context(), Options{})
	}
	report, err := run(good())
	if err != nil || report.Results[0].Ratio == nil || *report.Results[0].Ratio != 1.5 {
		t.Fatalf("%+v, %v", report, err)
	}
	for _, c := range []struct {
		name   string
		change func(r *Result)
		want   string
	}{
		{"name", func(r *Result) { r.Name = "A b" }, "want a name"},
		{"unit", func(r *Result) { r.Unit = "" }, "has no unit"},
		{"better", func(r *Result) { r.Better = "" }, "better is"},
		{"not a number", func(r *Result) { r.Value = math.NaN() }, "is NaN"},
		{"infinite", func(r *Result) { r.Value = math.Inf(1) }, "is +Inf"},
		{"reference of nothing", func(r *Result) { r.Reference.Value = 0 }, "reference"},
		{"target of nothing", func(r *Result) { r.Target.Of = "" }, "the target is of"},
		{"ratio of nothing", func(r *Result) { r.Reference = nil }, "needs a reference"},
	} {
		r := good()
		c.change(&r)
		if _, err := run(r); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	if _, err := run(); err == nil {
		t.Error("no result is no error")
	}
	if _, err := run(good(), good()); err == nil || !strings.Contains(err.Error(), "twice") {
		t.Errorf("two of a name: %v", err)
	}
}

func TestMet(t *testing.T) {
	ratio := 1.5
	for _, c := range []struct {
		r       Result
		met, ok bool
	}{
		{Result{Value: 2, Better: Lower}, false, false},
		{Result{Value: 2, Better: Lower, Target: &Target{OfValue, 2}}, true, true},
		{Result{Value: 2, Better: Lower, Target: &Target{OfValue, 1.9}}, false, true},
		{Result{Value: 2, Better: Higher, Target: &Target{OfValue, 2.1}}, false, true},
		{Result{Value: 2, Better: Higher, Target: &Target{OfValue, 2}}, true, true},
		{Result{Value: 9, Better: Lower, Ratio: &ratio, Target: &Target{OfRatio, 1.5}}, true, true},
		{Result{Value: 0, Better: Lower, Target: &Target{OfRatio, 1.5}}, false, false},
	} {
		if met, ok := c.r.Met(); met != c.met || ok != c.ok {
			t.Errorf("%+v: %v, %v", c.r, met, ok)
		}
	}
}
