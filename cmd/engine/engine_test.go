package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/terminus-kv/terminus/internal/admin"
	"github.com/terminus-kv/terminus/internal/admin/admintest"
	"github.com/terminus-kv/terminus/internal/config"
	"github.com/terminus-kv/terminus/internal/peer"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// runtimeDir is a short directory: sockets are in it.
func runtimeDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "t")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// serve runs the admin API of a node below dir, on a real socket.
func serve(t *testing.T, dir, node string, e admin.Engine, mutations bool) string {
	t.Helper()
	socket := filepath.Join(dir, node, "admin.sock")
	l, err := admin.Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	s := admin.NewServer(admin.Options{Engine: e, Mutations: mutations, Log: slog.New(slog.DiscardHandler)})
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := errors.Join(s.Shutdown(ctx), <-served); err != nil {
			t.Error(err)
		}
	})
	return socket
}

// command runs one command line in this process.
func command(t *testing.T, env []string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	var out, errOut bytes.Buffer
	code = execute(ctx, newApp(&out, &errOut, env), args)
	return code, out.String(), errOut.String()
}

// golden compares a whole run with testdata/NAME.txt.
func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name+".txt")
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs (rewrite with -update)\n--- got\n%s\n--- want\n%s", file, got, want)
	}
}

func TestGoldens(t *testing.T) {
	dir := runtimeDir(t)
	e := admintest.Sample()
	for _, r := range e.Records {
		e.Changes = append(e.Changes, admin.RoomChange{RoomInfo: r})
	}
	socket := serve(t, dir, "prefill-0", e, true)
	for _, g := range []struct {
		name string
		args string
	}{
		{"rooms_list", "rooms list"},
		{"rooms_list_live_yaml", "rooms list --live --role source -o yaml"},
		{"rooms_list_limited", "rooms list --limit 1"},
		{"rooms_get", "rooms get 8131776411"},
		{"rooms_get_ended", "rooms get 77"},
		{"rooms_get_json", "rooms get 9223372036854775807 -o json"},
		{"rooms_get_unknown", "rooms get 1"},
		{"rooms_get_bad", "rooms get prefill"},
		{"rooms_why", "rooms why 8131776411"},
		{"rooms_why_json", "rooms why 8131776411 -o json"},
		{"rooms_abort", "rooms abort 8131776411"},
		{"rooms_abort_ended", "rooms abort 77 --role destination"},
		{"plugins_list", "plugins list"},
		{"plugins_upgrade", "plugins upgrade tcp"},
		{"plugins_upgrade_two", "plugins upgrade tcp --exec a --wasm b"},
		{"plugins_upgrade_pin", "plugins upgrade tcp --sha256 abc"},
		{"plugins_upgrade_none", "plugins upgrade"},
		{"peers", "peers"},
		{"groups_list", "groups list"},
		{"groups_list_yaml", "groups list -o yaml"},
		{"groups_why", "groups why llama-d"},
		{"groups_why_json", "groups why llama-d -o json"},
		{"groups_why_unknown", "groups why llama"},
		{"groups_help", "groups why --help"},
		{"status", "status"},
		{"drain", "drain"},
		{"unknown_command", "room list"},
		{"unknown_subcommand", "rooms lst"},
		{"unknown_flag", "rooms list --lve"},
		{"bad_output", "rooms list -o jsn"},
		{"bad_status", "rooms list --status transferring"},
		{"too_many", "peers all"},
		{"no_file", "validate"},
		{"completions_bad", "completions csh"},
		{"bench_unknown", "bench boundry"},
		{"bench_duration", "bench boundary --duration 0s"},
		{"sim_policies_no_file", "sim policies --trace testdata/absent.jsonl"},
		{"sim_policies_bad_line", "sim policies --trace testdata/badtrace.jsonl"},
		{"sim_policies_no_peer", "sim policies --peers 0"},
		{"sim_policies_bad_arrival", "sim policies --arrival brust"},
		{"sim_policies", "sim policies --trace testdata/requests.jsonl --seed 5 --peers 2"},
		{"sim_policies_json", "sim policies --trace testdata/requests.jsonl --arrival burst --peers 2 --bytes-per-token 1000 -o json"},
	} {
		t.Run(g.name, func(t *testing.T) {
			code, out, errOut := command(t, []string{"TERMINUS_ADMIN__SOCKET=" + socket}, strings.Fields(g.args)...)
			golden(t, g.name, fmt.Sprintf("$ engine %s\n%s--- stderr\n%s--- exit %d\n", g.args, out, errOut, code))
		})
	}
}

func TestValidate(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		f := filepath.Join(dir, name)
		if err := os.WriteFile(f, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return f
	}
	good := write("good.yaml", "node: n0\nruntime_dir: /run/t\nstate_dir: /var/t\nlimits: {peer_ops: 8}\npeers: {tls: {cert: c.crt, key: c.key, ca: ca.crt}}\n")
	bad := write("bad.yaml", "node: n0\nlimts: {}\nclocks: {stall: 5}\n")
	for _, v := range []struct {
		name string
		args []string
	}{
		{"validate_good", []string{good}},
		{"validate_here", []string{"--here", good}},
		{"validate_bad", []string{good, bad}},
		{"validate_bad_json", []string{bad, "-o", "json"}},
		{"validate_effective", []string{"--effective", "testdata/plain.yaml"}},
		{"validate_absent", []string{filepath.Join(dir, "absent.yaml")}},
	} {
		t.Run(v.name, func(t *testing.T) {
			code, out, errOut := command(t, nil, append([]string{"validate"}, v.args...)...)
			got := fmt.Sprintf("$ engine validate %s\n%s--- stderr\n%s--- exit %d\n", strings.Join(v.args, " "), out, errOut, code)
			golden(t, v.name, strings.ReplaceAll(got, dir, "DIR"))
		})
	}
}

// TestExampleConfigs: the files of the repository are right as they are.
func TestExampleConfigs(t *testing.T) {
	files, err := filepath.Glob("../../configs/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("%v, %v", files, err)
	}
	if code, out, errOut := command(t, nil, append([]string{"validate"}, files...)...); code != exitOK || out != "" {
		t.Errorf("exit %d\n%s%s", code, out, errOut)
	}
}

// TestJSONIsJSON: what -o json prints parses, -o yaml says the same, and stderr is empty.
func TestJSONIsJSON(t *testing.T) {
	socket := serve(t, runtimeDir(t), "n", admintest.Sample(), true)
	env := []string{"TERMINUS_ADMIN__SOCKET=" + socket}
	for _, args := range [][]string{
		{"rooms", "list"}, {"rooms", "get", "77"}, {"rooms", "why", "8131776411"}, {"rooms", "abort", "77"},
		{"plugins", "list"}, {"peers"}, {"groups", "list"}, {"groups", "why", "llama-d"}, {"status"}, {"drain"}, {"version"},
	} {
		code, out, errOut := command(t, env, append(args, "-o", "json")...)
		var v any
		if err := json.Unmarshal([]byte(out), &v); err != nil || code != exitOK || errOut != "" {
			t.Errorf("%v: exit %d, %v\n%s%s", args, code, err, out, errOut)
		}
		_, out, _ = command(t, env, append(args, "-o", "yaml")...)
		back, err := yaml.YAMLToJSON([]byte(out))
		if err != nil {
			t.Errorf("%v: %v\n%s", args, err, out)
			continue
		}
		var w any
		if err := json.Unmarshal(back, &w); err != nil || fmt.Sprint(v) != fmt.Sprint(w) {
			t.Errorf("%v: JSON and YAML differ: %v\n%v\n%v", args, err, v, w)
		}
	}
}

func TestFindEngine(t *testing.T) {
	dir := runtimeDir(t)
	env := []string{"TERMINUS_RUNTIME_DIR=" + dir}
	if code, _, errOut := command(t, env, "status"); code != exitFailed || !strings.Contains(errOut, "no engine answers in "+dir) {
		t.Errorf("none: exit %d: %s", code, errOut)
	}
	serve(t, dir, "prefill-0", admintest.Sample(), false)
	if code, out, errOut := command(t, env, "status"); code != exitOK || !strings.Contains(out, "prefill-0") {
		t.Errorf("one: exit %d: %s", code, errOut)
	}
	other := admintest.Sample()
	other.State.Node, other.State.Ready, other.State.NotReady = "decode-0", false, []string{"no transfer backend is up"}
	other.State.Frozen = "etcd at http://127.0.0.1:1: connection refused"
	socket := serve(t, dir, "decode-0", other, false)
	if code, _, errOut := command(t, env, "status"); code != exitFailed || !strings.Contains(errOut, "--node decode-0 or --node prefill-0") {
		t.Errorf("two: exit %d: %s", code, errOut)
	}
	// A node that is not ready: the state is printed, and the exit code says it.
	if code, out, _ := command(t, env, "status", "--node", "decode-0"); code != exitFailed || !strings.Contains(out, "no transfer backend is up") || !strings.Contains(out, "frozen, rooms go on: "+other.State.Frozen) {
		t.Errorf("--node: exit %d: %s", code, out)
	}
	if code, out, _ := command(t, nil, "status", "--socket", socket); code != exitFailed || !strings.Contains(out, "decode-0") {
		t.Errorf("--socket: exit %d: %s", code, out)
	}
	file := filepath.Join(dir, "c.yaml")
	if err := os.WriteFile(file, []byte("node: prefill-0\nruntime_dir: "+dir+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, out, errOut := command(t, nil, "status", "-c", file); code != exitOK || !strings.Contains(out, "prefill-0") {
		t.Errorf("-c: exit %d: %s%s", code, out, errOut)
	}
	// An engine that does not allow mutations says how to allow them.
	if code, _, errOut := command(t, nil, "rooms", "abort", "77", "-c", file); code != exitFailed || !strings.Contains(errOut, "enable_mutations") {
		t.Errorf("abort: exit %d: %s", code, errOut)
	}
}

func TestDrainThatCuts(t *testing.T) {
	for _, c := range []struct {
		res  admin.DrainResult
		want string
	}{
		{admin.DrainResult{Cut: 3}, "3 rooms ended as draining\n"},
		{admin.DrainResult{Unreleased: 1}, "1 ended room had not been released by the worker\n"},
		{admin.DrainResult{Cut: 1, Unreleased: 2}, "1 room ended as draining, 2 ended rooms had not been released by the worker\n"},
	} {
		e := admintest.Sample()
		e.Drained = c.res
		socket := serve(t, runtimeDir(t), "n", e, true)
		code, out, _ := command(t, nil, "drain", "--socket", socket)
		if code != exitFailed || out != "drained: the budget was over, "+c.want {
			t.Errorf("exit %d: %s", code, out)
		}
	}
}

// slowDrain is an engine that drains until release is closed.
type slowDrain struct {
	*admintest.Engine
	release chan struct{}
	stuck   atomic.Bool // the owner loop
}

func (e *slowDrain) Plugins(ctx context.Context) ([]admin.PluginInfo, error) {
	if e.stuck.Load() {
		return nil, errors.New("the owner loop did not answer")
	}
	return e.Engine.Plugins(ctx)
}

func (e *slowDrain) Drain(ctx context.Context) (admin.DrainResult, error) {
	select {
	case <-e.release:
	case <-ctx.Done():
		return admin.DrainResult{}, ctx.Err()
	}
	return e.Engine.Drain(ctx)
}

func TestDrainSaysWhatItWaitsFor(t *testing.T) {
	e := &slowDrain{Engine: admintest.Sample(), release: make(chan struct{})}
	socket := serve(t, runtimeDir(t), "n", e, true)
	time.AfterFunc(2*drainQuiet, func() { close(e.release) })
	code, out, errOut := command(t, nil, "drain", "--socket", socket, "--timeout", "20s")
	if code != exitOK || out != "drained: every room had ended\n" || errOut != "draining prefill-0: 2 rooms to end within drain.budget, 1 ended room with pages not free yet\n" {
		t.Errorf("exit %d: %s%s", code, out, errOut)
	}
}

// TestDrainOfAnEngineThatHangs: it takes connections and never answers, or its owner loop hangs, at once or later.
func TestDrainOfAnEngineThatHangs(t *testing.T) {
	l, err := net.Listen("unix", filepath.Join(runtimeDir(t), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	code, _, errOut := command(t, nil, "drain", "--socket", l.Addr().String(), "--timeout", "200ms")
	if code != exitFailed || !strings.Contains(errOut, "no answer within 200ms (--timeout)") {
		t.Errorf("stopped: exit %d: %s", code, errOut)
	}

	e := &slowDrain{Engine: admintest.Sample(), release: make(chan struct{})}
	socket := serve(t, runtimeDir(t), "n", e, true)
	e.stuck.Store(true)
	code, _, errOut = command(t, nil, "drain", "--socket", socket)
	if code != exitFailed || !strings.Contains(errOut, "the owner loop did not answer") || len(e.Calls()) > 0 {
		t.Errorf("stuck: exit %d: %s", code, errOut)
	}
	e.stuck.Store(false)
	time.AfterFunc(drainQuiet, func() { e.stuck.Store(true) })
	code, _, errOut = command(t, nil, "drain", "--socket", socket, "--timeout", "500ms")
	if code != exitFailed || !strings.Contains(errOut, "prefill-0 gave no sign of life for 500ms (--timeout); it may still be draining: the owner loop did not answer") {
		t.Errorf("stuck later: exit %d: %s", code, errOut)
	}
}

func TestWatch(t *testing.T) {
	e := admintest.Sample()
	for _, r := range e.Records {
		r.History = nil
		e.Changes = append(e.Changes, admin.RoomChange{RoomInfo: r, What: "op ended", Missed: 2})
	}
	socket := serve(t, runtimeDir(t), "n", e, false)
	for format, sep := range map[string]string{"table": "op ended\n", "json": "}\n", "yaml": "---\n"} {
		ctx, cancel := context.WithCancel(context.Background())
		out := &untilWriter{done: cancel, sep: sep, n: 3}
		var errOut bytes.Buffer
		guard := time.AfterFunc(20*time.Second, cancel)
		if code := execute(ctx, newApp(out, &errOut, nil), []string{"rooms", "watch", "--socket", socket, "-o", format}); code != exitOK {
			t.Errorf("%s: exit %d: %s", format, code, errOut.String())
		}
		guard.Stop()
		cancel()
		if strings.Count(out.text.String(), sep) != 3 {
			t.Errorf("%s:\n%s", format, out.text.String())
		}
		if format != "table" {
			continue
		}
		if strings.Count(errOut.String(), "2 changes missed") != 3 {
			t.Errorf("stderr: %s", errOut.String())
		}
		// One header, and columns below it.
		lines := strings.Split(out.text.String(), "\n")
		at := strings.Index(lines[0], "WHAT")
		if strings.Count(out.text.String(), "ROOM ") != 1 || at < 0 || len(lines) < 4 {
			t.Fatalf("no header:\n%s", out.text.String())
		}
		for _, line := range lines[1:4] {
			if strings.Index(line, "op ended") != at {
				t.Errorf("not below the header:\n%s", out.text.String())
			}
		}
	}
}

// untilWriter calls done when it has seen sep n times.
type untilWriter struct {
	text strings.Builder
	done func()
	sep  string
	n    int
}

func (w *untilWriter) Write(p []byte) (int, error) {
	n, err := w.text.Write(p)
	if strings.Count(w.text.String(), w.sep) >= w.n {
		w.done()
	}
	return n, err
}

func TestColour(t *testing.T) {
	var out bytes.Buffer
	tab := &table{colour: true}
	tab.row("A", statusCell("Failed"), "b")
	tab.row("AAA", statusCell("Success"), "")
	if err := tab.write(&out); err != nil {
		t.Fatal(err)
	}
	if got := out.String(); got != "A    \x1b[31mFailed\x1b[0m   b\nAAA  \x1b[32mSuccess\x1b[0m  -\n" {
		t.Errorf("%q", got)
	}
	if a := newApp(&out, &out, nil); a.colour || a.terminal {
		t.Error("colour without a terminal")
	}
}

func TestCompletions(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		if code, out, _ := command(t, nil, "completions", shell); code != exitOK || !strings.Contains(out, "engine") {
			t.Errorf("%s: exit %d", shell, code)
		}
	}
}

// TestHelp: every help starts with examples that parse, says what the command changes, and is short.
func TestHelp(t *testing.T) {
	root := newRoot(newApp(&bytes.Buffer{}, &bytes.Buffer{}, nil))
	var visit func(c *cobra.Command)
	visit = func(c *cobra.Command) {
		for _, sub := range c.Commands() {
			visit(sub)
		}
		if c.Hidden || (c.HasParent() && c.Parent().Hidden) {
			return
		}
		path := strings.Fields(c.CommandPath())[1:]
		code, out, errOut := command(t, nil, append(path, "--help")...)
		if code != exitOK || errOut != "" || !strings.HasPrefix(out, "Examples:\n  ") {
			t.Errorf("%v: exit %d\n%s%s", path, code, out, errOut)
		}
		if n := strings.Count(out, "\n"); n > 40 {
			t.Errorf("%v: %d lines of help", path, n)
		}
		if !c.HasSubCommands() && !strings.Contains(out, "\nEffect: ") {
			t.Errorf("%v does not say what it changes", path)
		}
		for line := range strings.SplitSeq(c.Example, "\n") {
			checkExample(t, root, line)
		}
	}
	visit(root)
}

// checkExample finds the command and the flags of an example line.
func checkExample(t *testing.T, root *cobra.Command, line string) {
	t.Helper()
	_, rest, ok := strings.Cut(line, "engine ")
	if !ok {
		t.Errorf("no command in the example %q", line)
		return
	}
	words := strings.Fields(strings.NewReplacer("(", " ", ")", " ").Replace(rest))
	c, args, err := root.Find(words)
	if err != nil || c == root {
		t.Errorf("example %q: %v", line, err)
		return
	}
	for _, w := range args {
		if w == "--" {
			break // the rest is of the plugin's program
		}
		if name, isLong := strings.CutPrefix(w, "--"); isLong && c.Flags().Lookup(name) == nil {
			t.Errorf("example %q: no flag --%s", line, name)
		} else if len(w) == 2 && w[0] == '-' && w[1] != '-' && shorthand(c.Flags(), w[1:]) == nil {
			t.Errorf("example %q: no flag %s", line, w)
		}
	}
}

func shorthand(f *pflag.FlagSet, s string) *pflag.Flag { return f.ShorthandLookup(s) }

// TestInsecureWords: the configuration and the listener ask for the same words.
func TestInsecureWords(t *testing.T) {
	if config.InsecureWords != peer.InsecureWords {
		t.Errorf("config: %q\npeer:   %q", config.InsecureWords, peer.InsecureWords)
	}
}

func TestVersion(t *testing.T) {
	if code, out, _ := command(t, nil, "version"); code != exitOK || !strings.HasPrefix(out, "engine ") {
		t.Errorf("exit %d: %s", code, out)
	}
}

// TestBareCommands show their help.
func TestBareCommands(t *testing.T) {
	for _, args := range [][]string{{}, {"rooms"}, {"plugins"}} {
		if code, out, _ := command(t, nil, args...); code != exitOK || !strings.HasPrefix(out, "Examples:") {
			t.Errorf("%v: exit %d: %s", args, code, out)
		}
	}
}

// `engine run -c "$UNSET"` started an engine with the defaults, `plugins upgrade --sha256 ""` one without its checksum.
func TestEmptyFlags(t *testing.T) {
	for _, args := range [][]string{
		{"run", "-c", ""}, {"rooms", "list", "--node", ""}, {"plugins", "upgrade", "tcp", "--exec", ""},
		{"plugins", "upgrade", "tcp", "--wasm="}, {"plugins", "upgrade", "tcp", "--sha256", ""}, {"demo", "--trace", ""},
	} {
		code, stdout, stderr := command(t, nil, args...)
		if code != exitUsage || stdout != "" || !strings.Contains(stderr, "is empty: give it a value, or leave it out") {
			t.Errorf("%q: exit code %d, %q, %q", args, code, stdout, stderr)
		}
	}
}
