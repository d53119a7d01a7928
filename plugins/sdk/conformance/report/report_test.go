package report

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/goccy/go-yaml"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/terminus-kv/terminus/plugins/sdk/conformance"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func entry(ms float64, node string, toHost bool, m proto.Message) conformance.Entry {
	wire, err := proto.Marshal(m)
	if err != nil {
		panic(err)
	}
	return conformance.Entry{At: time.Duration(ms * 1e6), Node: node, ToHost: toHost, Text: conformance.Describe(m), Wire: wire}
}

func submit(op, bytes uint64) *contract.HostEvent {
	return &contract.HostEvent{Event: &contract.HostEvent_Submit{Submit: &contract.Submit{Op: op, Bytes: bytes}}}
}

func accepted(op uint64) *contract.PluginEvent {
	return &contract.PluginEvent{Event: &contract.PluginEvent_Accepted{Accepted: &contract.Accepted{Op: op}}}
}

func done(op, bytes uint64) *contract.PluginEvent {
	return &contract.PluginEvent{Event: &contract.PluginEvent_Done{Done: &contract.Done{Op: op, Bytes: bytes, Quiet: true, Lane: contract.Lane_LANE_SHM}}}
}

func aborted(op uint64) *contract.PluginEvent {
	return &contract.PluginEvent{Event: &contract.PluginEvent_Aborted{Aborted: &contract.Aborted{Op: op, Quiet: true}}}
}

// sample is a run with every outcome, hostile text included.
func sample() *Report {
	kase := func(id, rule string, p conformance.Profile, title string) *conformance.Case {
		return &conformance.Case{ID: id, Rule: rule, Profile: p, Title: title, Script: "> Submit\n< Accepted, <Done>\n= the bytes"}
	}
	pass := []conformance.Entry{entry(0.1, "A", false, submit(1, 4096)), entry(0.4, "A", true, accepted(1)), entry(1.25, "A", true, done(1, 4096))}
	bad := []conformance.Entry{entry(0.1, "A", false, submit(7, 1<<20)), entry(0.3, "A", true, accepted(7)), entry(2, "A", true, aborted(7)), entry(2.5, "A", true, done(7, 1<<20))}
	bad[3].Mark = "R1: done quiet=true after aborted quiet=true (op 7)"
	for i := range 100 {
		bad = append(bad, entry(3+float64(i), "B", true, accepted(uint64(100+i))))
	}
	incident := kase("abort/mid-transfer", "R7", conformance.TransferAbort, "an abort ends an op soon, by one end")
	incident.Incident = "sglang#36707: a status was written after Failed"
	return &Report{
		Engine: "v0.9.0", Flags: []string{"--options", `{"streams":2}`},
		Results: &conformance.Results{
			Plugin: "exec:bin/engine-plugin-demo -- -v", Program: "/opt/bin/engine-plugin-demo", SHA256: strings.Repeat("ab", 32),
			Hello: &contract.HandshakeResponse{
				Version: 1, Name: "demo", PluginVersion: "2.1\x1b[31m", Kinds: []contract.Kind{contract.Kind_KIND_TRANSFER},
				MemoryKinds: []contract.MemoryKind{contract.MemoryKind_MEMORY_KIND_HOST_SHM}, Features: []string{"strided", "byte_progress"},
				Sdk:    &contract.SdkInfo{Language: "go", Version: "0.1"},
				Limits: &contract.Limits{MaxOps: 8192, MaxBytesPerPeer: 1 << 40},
			},
			Seed: 42, Began: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC), Took: 12340 * time.Millisecond,
			Cases: []*conformance.Result{
				{Case: kase("transfer/one-page", "R1", conformance.TransferCore, "one page arrives"), Outcome: conformance.Passed, Took: 12 * time.Millisecond, Trace: pass},
				{Case: kase("transfer/other", "R1", conformance.TransferCore, "another"), Outcome: conformance.Failed, Expected: true, Took: 5 * time.Millisecond,
					Failures: []conformance.Failure{{Rule: "R1", Expected: "an end", Got: "nothing"}}},
				{Case: kase("fence/live", "R4", conformance.TransferCore, "a fence"), Outcome: conformance.Unsupported, Reason: "the plugin does not declare fence_peer"},
				{Case: incident, Outcome: conformance.Failed, Took: 1204 * time.Millisecond, Trace: bad,
					Failures: []conformance.Failure{
						{Rule: "R1", Expected: "exactly one end", Got: "done quiet=true after aborted quiet=true (op 7)\n]]> <b>&"},
						{Rule: "R4", Expected: "nobody to write after quiet", Got: "page 3 changed"},
					},
					Notes: []string{"the op was done before the abort arrived"}, Stderr: map[string]string{"A": "worker 3: \x1b[2Jwrite <again>\n", "B": ""}},
				{Case: kase("abort/twice", "R7", conformance.TransferAbort, "twice"), Outcome: conformance.Passed, Expected: true, Took: time.Millisecond},
				{Case: kase("storm/ops", "R12", conformance.Robustness, "a storm"), Outcome: conformance.Skipped, Reason: "it was to be skipped"},
				{Case: kase("storm/broken", "R12", conformance.Robustness, "another storm"), Outcome: conformance.Errored, Took: 2 * time.Millisecond,
					Failures: []conformance.Failure{{Rule: "-", Expected: "the suite to work", Got: "panic: x"}}},
			},
			Problems: []string{`known-failing pattern "abrt/*" matches no case; take it out of the list`},
			Notes:    []string{`known-failing pattern "fence/*" did not run here: the plugin does not declare fence_peer`},
		},
	}
}

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(file, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s differs (rewrite with -update)\n--- got\n%s\n--- want\n%s", file, got, want)
	}
}

func written(t *testing.T, write func(io.Writer) error) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := write(&b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestGoldens(t *testing.T) {
	r := sample()
	golden(t, "report.txt", written(t, r.Text))
	golden(t, "results.jsonl", written(t, r.JSONLines))
	golden(t, "junit.xml", written(t, r.JUnit))
	golden(t, "report.yaml", written(t, r.YAML))
	golden(t, "report.html", written(t, r.HTML))
}

// TestJUnitCounts: what CI systems add up is what is in the file.
func TestJUnitCounts(t *testing.T) {
	var doc junitSuites
	if err := xml.Unmarshal(written(t, sample().JUnit), &doc); err != nil {
		t.Fatal(err)
	}
	// Failures: the abort, the pass that is listed as failing, the pattern. Skipped: known failing, unsupported, skipped.
	if doc.Tests != 8 || doc.Failures != 3 || doc.Errors != 1 || doc.Skipped != 3 || len(doc.Suites) != 4 {
		t.Errorf("tests %d failures %d errors %d skipped %d suites %d", doc.Tests, doc.Failures, doc.Errors, doc.Skipped, len(doc.Suites))
	}
	if f := doc.Suites[1].Cases[0].Failure; f == nil || f.Type != "R1" || !strings.Contains(f.Text, "reproduce") {
		t.Errorf("failure element: %+v", f)
	}
}

// TestPageIsSelfContained: nothing is loaded from elsewhere, and no text of the plugin becomes markup.
func TestPageIsSelfContained(t *testing.T) {
	page := string(written(t, sample().HTML))
	for _, bad := range []string{"http:", "https:", "src=", "<link", "<script", "url(", "<b>&", "write <again>"} {
		if strings.Contains(page, bad) {
			t.Errorf("the page has %q", bad)
		}
	}
}

// TestNoControlCharacters: what a plugin says in any place drives neither a terminal nor a browser.
func TestNoControlCharacters(t *testing.T) {
	const evil = "\x1b[2J\u009b1m\x7f"
	r := sample()
	bad := r.Cases[3]
	bad.Failures[0].Got += evil
	bad.Failures[1].Expected += evil
	bad.Notes = append(bad.Notes, evil)
	bad.Trace[1].Text += evil
	bad.Trace[3].Mark += evil
	bad.Stderr["B"] = evil
	r.Cases[2].Reason += evil
	r.Hello.Features = append(r.Hello.Features, evil)
	for name, write := range map[string]func(io.Writer) error{"text": r.Text, "html": r.HTML, "junit": r.JUnit} {
		for _, c := range string(written(t, write)) {
			if c != '\n' && unicode.IsControl(c) {
				t.Errorf("%s has %q", name, c)
				break
			}
		}
	}
}

// TestEarlierRuns: the reports that programs add up had the last of several runs only.
func TestEarlierRuns(t *testing.T) {
	first, second, r := sample(), sample(), sample()
	first.Seed, second.Seed = 40, 41
	r.Before = []*Report{first, second}
	runs := 0
	for line := range strings.Lines(string(written(t, r.JSONLines))) {
		var o struct {
			Type string
			Seed uint64
		}
		if err := json.Unmarshal([]byte(line), &o); err != nil {
			t.Fatal(err)
		}
		if o.Type == "run" {
			if want := uint64(40 + runs); o.Seed != want {
				t.Errorf("run %d has seed %d, want %d", runs+1, o.Seed, want)
			}
			runs++
		}
	}
	var doc junitSuites
	if err := xml.Unmarshal(written(t, r.JUnit), &doc); err != nil {
		t.Fatal(err)
	}
	if runs != 3 || doc.Tests != 3*8 || doc.Failures != 3*3 || doc.Errors != 3 || len(doc.Suites) != 3*4 || doc.Time != "37.020" {
		t.Errorf("%d runs as JSON; JUnit: tests %d failures %d errors %d suites %d time %s", runs, doc.Tests, doc.Failures, doc.Errors, len(doc.Suites), doc.Time)
	}
	if a, b := doc.Suites[0].Name, doc.Suites[11].Name; a != "transfer-core, seed 40" || b != "run, seed 42" {
		t.Errorf("the first suite is %q, the last %q", a, b)
	}
}

func TestJSONLinesAreObjects(t *testing.T) {
	lines := strings.Split(strings.TrimSpace(string(written(t, sample().JSONLines))), "\n")
	for i, l := range lines {
		var o struct{ Type string }
		if err := json.Unmarshal([]byte(l), &o); err != nil {
			t.Fatalf("line %d: %v", i+1, err)
		}
		want := "case"
		switch i {
		case 0:
			want = "run"
		case len(lines) - 1:
			want = "summary"
		}
		if o.Type != want {
			t.Errorf("line %d is a %q", i+1, o.Type)
		}
	}
}

func TestWriteDir(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "results")
	files := func() (names []string) {
		err := filepath.WalkDir(dir, func(p string, d os.DirEntry, err error) error {
			if err == nil && !d.IsDir() {
				names = append(names, strings.TrimPrefix(p, dir+"/"))
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return names
	}
	if err := sample().WriteDir(dir, true); err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(files()); got != "[junit.xml report.html report.txt report.yaml results.jsonl traces/abort/mid-transfer.jsonl traces/transfer/one-page.jsonl]" {
		t.Error(got)
	}
	if err := sample().WriteDir(dir, false); err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(files()); strings.Contains(got, "one-page") || !strings.Contains(got, "mid-transfer") {
		t.Error(got)
	}
	f, err := os.Open(filepath.Join(dir, "traces/abort/mid-transfer.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	trace, err := conformance.ReadTrace(f)
	if err != nil || trace.Case != "abort/mid-transfer" || trace.Seed != 42 || len(trace.Entries) != 104 || trace.Entries[3].Mark == "" {
		t.Errorf("%+v %v", trace, err)
	}
	if err := sample().WriteDir(filepath.Join(dir, "report.txt"), false); err == nil {
		t.Error("a file was taken for a directory")
	}
	page := filepath.Join(dir, "report.html")
	if err := errors.Join(os.Remove(page), unix.Mkfifo(page, 0o600)); err != nil {
		t.Fatal(err)
	}
	if err := sample().WriteDir(dir, false); err == nil || !strings.Contains(err.Error(), "report.html is no regular file") {
		t.Errorf("a pipe was taken for a file: %v", err)
	}
}

// TestCompare: what makes a committed report stale, and what does not.
func TestCompare(t *testing.T) {
	file := filepath.Join(t.TempDir(), "conformance.yaml")
	if err := writeFile(file, sample().YAML); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		change func(*Report)
		says   string // "" is not stale
	}{
		{"same", func(*Report) {}, ""},
		{"new digest, seed, date, time, version", func(r *Report) {
			r.SHA256, r.Seed, r.Began, r.Took, r.Engine, r.Hello.PluginVersion = "00", 7, time.Now(), time.Hour, "v2", "3"
			r.Hello.Sdk.Version = "9"
		}, ""},
		{"features in another order", func(r *Report) { r.Hello.Features = []string{"byte_progress", "strided"} }, ""},
		{"contract", func(r *Report) { r.Hello.Version = 2 }, "contract: it says 1, the run 2"},
		{"feature", func(r *Report) { r.Hello.Features = append(r.Hello.Features, "repage") }, "plugin.features"},
		{"limit", func(r *Report) { r.Hello.Limits.MaxOps = 64 }, "plugin.limits: it says map[max_bytes_per_peer:1099511627776 max_ops:8192], the run map[max_bytes_per_peer:1099511627776 max_ops:64]"},
		{"limit of its own no more", func(r *Report) { r.Hello.Limits = nil }, "plugin.limits"},
		{"name", func(r *Report) { r.Hello.Name = "other" }, "plugin.name"},
		{"outcome", func(r *Report) { r.Cases[0].Outcome = conformance.Failed }, "case transfer/one-page: it says passed, the run failed"},
		{"unsupported now", func(r *Report) { r.Cases[0].Outcome = conformance.Unsupported }, "case transfer/one-page: it says passed, the run unsupported"},
		{"new case", func(r *Report) {
			n := *r.Cases[0]
			c := *n.Case
			c.ID, n.Case = "transfer/new", &c
			r.Cases = append(r.Cases, &n)
		}, "case transfer/new: it does not have it, the run says passed"},
		{"case gone", func(r *Report) { r.Cases = r.Cases[1:] }, "case transfer/one-page: it says passed, the suite has no such case"},
	} {
		r := sample()
		c.change(r)
		err := r.compare(file)
		switch {
		case c.says == "" && err != nil:
			t.Errorf("%s: %v", c.name, err)
		case c.says != "" && (!errors.Is(err, ErrStale) || !strings.Contains(err.Error(), c.says)):
			t.Errorf("%s: %v; want %q", c.name, err, c.says)
		}
	}
	if err := sample().compare(file + ".none"); !errors.Is(err, ErrStale) {
		t.Errorf("no file: %v", err)
	}
	if err := os.WriteFile(file, []byte("contract: [\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := sample().compare(file); !errors.Is(err, ErrStale) {
		t.Errorf("not YAML: %v", err)
	}
}

// TestYAMLKeepsText: a version or digest that looks like a number is read back as it was.
func TestYAMLKeepsText(t *testing.T) {
	r := sample()
	r.Hello.PluginVersion, r.SHA256, r.Seed = "2.10", strings.Repeat("1", 30)+"e5", 1<<64-1
	var s Summary
	if err := yaml.Unmarshal(written(t, r.YAML), &s); err != nil {
		t.Fatal(err)
	}
	if s.Plugin.Version != "2.10" || s.Plugin.SHA256 != r.SHA256 || s.Seed != r.Seed {
		t.Errorf("%+v", s)
	}
}

func TestReproduce(t *testing.T) {
	r := sample()
	got := r.Reproduce(r.Cases[0])
	want := `engine conformance run exec:bin/engine-plugin-demo --run transfer/one-page --seed 42 --options '{"streams":2}' -- -v`
	if got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}
