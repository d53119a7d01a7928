package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/conformance"
	"github.com/terminus-kv/terminus/plugins/sdk/conformance/report"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// liar is a backend that says Done and moves nothing: this test binary as `plugin liar`.
type liar struct{}

func (*liar) Info() sdk.Info {
	return sdk.Info{Name: "liar", Version: "1.0", Features: []string{sdk.FeatureLayerRange}}
}
func (*liar) Start(context.Context, sdk.Start) ([]byte, error) {
	fmt.Fprintln(os.Stderr, "liar: here I am")
	return nil, nil
}
func (*liar) AddRegion(*sdk.Region) error              { return nil }
func (*liar) RemoveRegion(*sdk.Region)                 {}
func (*liar) AddPeer(*sdk.Peer) (contract.Lane, error) { return contract.Lane_LANE_SHM, nil }
func (*liar) RemovePeer(*sdk.Peer)                     {}
func (*liar) Transfer(op *sdk.Op)                      { op.Done(contract.Lane_LANE_SHM) }
func (*liar) Close() error                             { return nil }

// Two cases: the liar fails the first and passes the second.
const (
	lieCase    = "transfer/one-page"
	honestCase = "region/canary-both-ways"
)

// runLiar runs both cases, with further flags, in this process.
func runLiar(t *testing.T, flags ...string) (code int, stdout, stderr string) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	args := append([]string{"conformance", "run", "exec:" + exe, "--run", lieCase + "," + honestCase, "--seed", "7"}, flags...)
	return command(t, nil, append(args, "--", "plugin", "liar")...)
}

func mention(t *testing.T, what, text string, words ...string) {
	t.Helper()
	for _, w := range words {
		if !strings.Contains(text, w) {
			t.Errorf("%s does not say %q:\n%s", what, w, text)
		}
	}
}

// TestConformanceFailure: exit 1, everything that one needs to act, every report, a trace that replays.
func TestConformanceFailure(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "results")
	code, out, errOut := runLiar(t, "--results", dir)
	if code != exitFailed {
		t.Errorf("exit %d\n%s", code, errOut)
	}
	mention(t, "stdout", out, "liar 1.0 (exec:", "FAILED           "+lieCase, "passed           "+honestCase, "expected  every byte", "==>", "Done(op=",
		"stderr of A", "here I am", "--run "+lieCase+" --seed 7 -- plugin liar", "1 passed, ", "1 failed in ", ": not conformant\n")
	mention(t, "stderr", errOut, "FAILED           "+lieCase, "reports are in "+dir)
	for _, name := range []string{"report.txt", "results.jsonl", "junit.xml", "report.yaml", "report.html"} {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Error(err)
		}
		mention(t, name, string(b), lieCase)
	}
	trace := filepath.Join(dir, "traces", lieCase+".jsonl")
	code, out, errOut = command(t, nil, "conformance", "replay", trace)
	if code != exitOK { // a lie about bytes is in memory, not in the order of events
		t.Errorf("replay: exit %d\n%s%s", code, out, errOut)
	}
	mention(t, "replay", out, lieCase+"  failed  exec:", "<== R4: ", "no breach of the order of events")

	// The same trace with its end cut off, and with one end twice.
	b, err := os.ReadFile(trace)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.SplitAfter(string(b), "\n")
	done := slices.IndexFunc(lines, func(l string) bool { return strings.Contains(l, "Done(op=") })
	again := filepath.Join(dir, "again.jsonl")
	if err := os.WriteFile(again, []byte(strings.Join(slices.Insert(lines, done, lines[done]), "")), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, out, _ = command(t, nil, "conformance", "replay", again); code != exitFailed || !strings.Contains(out, "^ R1: expected exactly one end") {
		t.Errorf("replay of two ends: exit %d\n%s", code, out)
	}
	if err := os.WriteFile(again, b[:len(b)-9], 0o600); err != nil {
		t.Fatal(err)
	}
	if code, _, errOut = command(t, nil, "conformance", "replay", again); code != exitUsage || !strings.Contains(errOut, "not a trace file: line ") {
		t.Errorf("replay of a cut file: exit %d\n%s", code, errOut)
	}
}

// TestConformanceKnownFailing: a listed failure is none; a listed pass and a pattern without a case are.
func TestConformanceKnownFailing(t *testing.T) {
	file := filepath.Join(t.TempDir(), "known.txt")
	write := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("# bytes are not moved yet\n\ntransfer/one-*  # soon\n")
	code, out, errOut := runLiar(t, "--known-failing", "@"+file)
	if code != exitOK {
		t.Errorf("exit %d\n%s", code, errOut)
	}
	mention(t, "stdout", out, "known failing    "+lieCase, "1 known failing, 0 failed", ": partial\n", "PARTIAL: ")
	write("transfer/one-page\nregion/canary-both-ways\nabrt/*\n")
	if code, out, _ = runLiar(t, "--known-failing", "@"+file); code != exitFailed {
		t.Errorf("exit %d", code)
	}
	mention(t, "stdout", out, "UNEXPECTED PASS  "+honestCase, `problem: known-failing pattern "abrt/*" matches no case`, "not conformant")
}

// TestConformanceInterrupted: what was cut short is no failure, the report says how far the run came.
func TestConformanceInterrupted(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	var out bytes.Buffer
	errOut := &cancelling{cancel: cancel}
	code := execute(ctx, newApp(&out, errOut, nil), []string{"conformance", "run", "exec:" + exe, "--profile", "transfer-core", "--", "plugin", "liar"})
	if code != exitFailed {
		t.Errorf("exit %d\n%s", code, &errOut.text)
	}
	mention(t, "stdout", out.String(), "1 failed in ", "the run was interrupted", "The run was interrupted: it decides nothing.")
}

// cancelling cancels at the first write: the first failure.
type cancelling struct {
	text   bytes.Buffer
	cancel func()
}

func (c *cancelling) Write(b []byte) (int, error) {
	c.cancel()
	return c.text.Write(b)
}

// TestConformanceRepeat: one run after the other, each with its seed, all of them as JSON lines.
func TestConformanceRepeat(t *testing.T) {
	code, out, errOut := command(t, nil, "conformance", "run", "tcp", "--run", honestCase, "--seed", "40", "--repeat", "2", "-o", "json")
	if code != exitOK {
		t.Errorf("exit %d\n%s", code, errOut)
	}
	mention(t, "stderr", errOut, "run 1 of 2: 1 passed", "seed 40", "run 2 of 2: 1 passed", "seed 41")
	var last struct {
		Type, Verdict string
		Counts        report.Counts
	}
	lines := strings.Split(strings.TrimSpace(out), "\n")
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &last); err != nil {
		t.Fatal(err)
	}
	if last.Type != "summary" || last.Verdict != "partial" || last.Counts.Passed != 1 || len(lines) != 2*(len(conformance.Cases())+2) {
		t.Errorf("%d lines, the last %+v", len(lines), last)
	}
}

// TestConformanceNotReady: one line with the cause, exit 3, never a hang.
func TestConformanceNotReady(t *testing.T) {
	sleep, err := filepath.EvalSymlinks("/bin/sleep")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		says string
	}{
		{[]string{"exec:/nonexistent/plugin"}, "no such file"},
		{[]string{"exec:" + sleep, "--scale", "0.1", "--", "600"}, "never became ready"},
		{[]string{"tcp", "--options", `{"conections": 2}`}, "conections"},
	} {
		code, out, errOut := command(t, nil, append([]string{"conformance", "run"}, c.args...)...)
		if code != exitNotReady || out != "" || strings.Count(errOut, "\n") != 1 || !strings.Contains(errOut, c.says) {
			t.Errorf("%v: exit %d\n%s%s", c.args, code, out, errOut)
		}
	}
}

func TestVerdictCode(t *testing.T) {
	of := func(outcomes ...conformance.Outcome) *report.Report {
		r := &report.Report{Results: &conformance.Results{}}
		for _, o := range outcomes {
			r.Cases = append(r.Cases, &conformance.Result{Case: &conformance.Case{}, Outcome: o})
		}
		return r
	}
	stopped := of(conformance.Passed, conformance.Skipped)
	stopped.Interrupted = true
	for _, c := range []struct {
		name string
		r    *report.Report
		want int
	}{
		{"conformant", of(conformance.Passed, conformance.Unsupported), exitOK},
		{"partial", of(conformance.Passed, conformance.Skipped), exitOK},
		{"failed", of(conformance.Passed, conformance.Failed, conformance.Skipped), exitFailed},
		{"interrupted", stopped, exitFailed},
		{"broken", of(conformance.Failed, conformance.Errored), exitBroken},
	} {
		if got := verdictCode(c.r); got != c.want {
			t.Errorf("%s: %d, want %d", c.name, got, c.want)
		}
	}
}

func TestConformanceGoldens(t *testing.T) {
	for _, g := range []struct{ name, args string }{
		{"conformance", "conformance"},
		{"conformance_explain", "conformance explain skip/empty-range"},
		{"conformance_explain_yaml", "conformance explain skip/empty-range -o yaml"},
		{"conformance_explain_near", "conformance explain skip/empty-rnge"},
		{"conformance_explain_unknown", "conformance explain nothing/like-it"},
		{"conformance_replay", "conformance replay testdata/trace.jsonl"},
		{"conformance_replay_none", "conformance replay testdata/none.jsonl"},
		{"conformance_no_plugin", "conformance run"},
		{"conformance_bad_plugin", "conformance run bin/engine-plugin-tcp"},
		{"conformance_bad_run", "conformance run tcp --run abrt/*"},
		{"conformance_bad_profile", "conformance run tcp --profile transfer-cor"},
		{"conformance_bad_options", "conformance run tcp --options []"},
		{"conformance_bad_scale", "conformance run tcp --scale 0"},
		{"conformance_bad_trace", "conformance run tcp --trace"},
		{"conformance_unread_config", "conformance run exec:bin/engine-plugin-mine -c testdata/none.yaml"},
		{"conformance_two_args", "conformance run mine -c testdata/none.yaml -- --verbose"},
		{"conformance_bad_output", "conformance run tcp -o jnit"},
		{"conformance_no_list", "conformance run tcp --known-failing @testdata/none.txt"},
	} {
		t.Run(g.name, func(t *testing.T) {
			code, out, errOut := command(t, nil, strings.Fields(g.args)...)
			golden(t, g.name, fmt.Sprintf("$ engine %s\n%s--- stderr\n%s--- exit %d\n", g.args, out, errOut, code))
		})
	}
}

// TestConformanceUnwritten: a full disk made a plugin that passed look like one that broke the contract.
func TestConformanceUnwritten(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	run := func(out io.Writer, args ...string) (int, string) {
		var errOut bytes.Buffer
		return execute(t.Context(), newApp(out, &errOut, nil), append([]string{"conformance"}, args...)), errOut.String()
	}
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "junit.xml"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"-o", "text"}, {"-o", "json"}, {"-o", "junit"}, {"-o", "yaml"}, {"-o", "html"}, {"--results", dir}} {
		code, errOut := run(full, append([]string{"run", "tcp", "--run", honestCase}, args...)...)
		if code != exitBroken || strings.Count(errOut, "\n") != 1 || !strings.HasPrefix(errOut, "engine: ") {
			t.Errorf("%v: exit %d\n%s", args, code, errOut)
		}
	}
	if code, errOut := run(full, "replay", "testdata/trace.jsonl"); code != exitBroken || !strings.Contains(errOut, "no space left") {
		t.Errorf("replay: exit %d\n%s", code, errOut)
	}
}

// TestConformancePipes: a command that was given a named pipe waited for a writer, deaf to SIGTERM.
func TestConformancePipes(t *testing.T) {
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"replay", fifo},
		{"replay", "/dev/zero"},
		{"replay", t.TempDir()},
		{"run", "tcp", "--known-failing", "@" + fifo},
		{"run", "tcp", "--known-failing", "@/dev/zero"},
		{"run", "tcp", "--results", fifo},
		{"run", "tcp", "-c", fifo},
		{"run", "tcp", "-c", "/dev/zero"},
	} {
		type ended struct {
			code   int
			errOut string
		}
		done := make(chan ended, 1)
		go func() {
			code, _, errOut := command(t, nil, append([]string{"conformance"}, args...)...)
			done <- ended{code, errOut}
		}()
		select {
		case e := <-done:
			if e.code != exitUsage || !strings.Contains(e.errOut, args[len(args)-1][1:]) {
				t.Errorf("%v: exit %d\n%s", args, e.code, e.errOut)
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("%v waits for a writer", args)
		}
	}
}

// TestConformanceOfNothing: a run in which no case met the plugin exited 0.
func TestConformanceOfNothing(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		says string
	}{
		{[]string{"tcp", "--profile", "collective-core"}, "profile collective-core has no cases"},
		{[]string{"tcp", "--run", "abort/*", "--skip", "abort/*"}, "leave out all"},
		{[]string{"tcp", "--run", "abort/*", "--profile", "transfer-core"}, "leave out all"},
		{[]string{"exec:" + exe, "--run", "fence/outlives-the-answer", "--", "plugin", "liar"}, "the plugin does not declare fence_peer"},
	} {
		code, out, errOut := command(t, nil, append([]string{"conformance", "run"}, c.args...)...)
		if code != exitUsage || out != "" || !strings.Contains(errOut, "no case is left to run: ") || !strings.Contains(errOut, c.says) {
			t.Errorf("%v: exit %d\n%s%s", c.args, code, out, errOut)
		}
	}
}

func TestConformanceList(t *testing.T) {
	code, out, _ := command(t, nil, "conformance", "list", "-o", "json")
	var all struct{ Items []caseJSON }
	if err := json.Unmarshal([]byte(out), &all); code != exitOK || err != nil {
		t.Fatalf("exit %d, %v", code, err)
	}
	const promised = 60
	if len(all.Items) < promised || len(all.Items) != len(conformance.Cases()) {
		t.Errorf("%d cases", len(all.Items))
	}
	_, out, _ = command(t, nil, "conformance", "list", "--profile", "transfer-abort")
	if !strings.Contains(out, "abort/unknown") || strings.Contains(out, lieCase) {
		t.Errorf("the cases of a profile:\n%s", out)
	}
}

// TestProgress: on a terminal one line that is written over; a failure stays.
func TestProgress(t *testing.T) {
	var b bytes.Buffer
	p := &progress{w: &b, terminal: true, total: 2}
	one, two := &conformance.Case{ID: "a/one"}, &conformance.Case{ID: "a/two"}
	p.start(one)
	p.result(&conformance.Result{Case: one, Outcome: conformance.Failed, Reason: "\x1b[2J"})
	p.start(two)
	p.result(&conformance.Result{Case: two, Outcome: conformance.Passed})
	p.clear()
	const wipe = "\r\x1b[K"
	want := wipe + "1 of 2  a/one" + wipe + strings.TrimRight(fmt.Sprintf("  %-15s  %-36s  %7s  ", "FAILED", "a/one", "0s"), " ") +
		"  \uFFFD[2J\n" + wipe + "2 of 2, 1 failed  a/two" + wipe
	if b.String() != want {
		t.Errorf("got  %q\nwant %q", b.String(), want)
	}
	b.Reset()
	p = &progress{w: io.Discard}
	p.start(one)
}

// TestMistakesOfTheOperatorAreUsage: a bad directory for reports, a missing trace and an empty pattern ended
// with the code of a plugin that broke the contract, or with a run of everything.
func TestMistakesOfTheOperatorAreUsage(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"conformance", "run", "tcp", "--results", filepath.Join(file, "below")},
		{"conformance", "run", "tcp", "--run", ""},
		{"conformance", "replay", file + ".missing"},
	} {
		if code, out, errOut := command(t, nil, args...); code != exitUsage || errOut == "" {
			t.Errorf("%v: exit %d\n%s%s", args, code, out, errOut)
		}
	}
}
