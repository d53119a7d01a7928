package config

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// golden compares got with a file and rewrites it under -update.
func golden(t *testing.T, file, got string) {
	t.Helper()
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

// TestBad loads each file of testdata/bad and compares all of its problems with the .txt beside it.
func TestBad(t *testing.T) {
	files, err := filepath.Glob("testdata/bad/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no files: %v", err)
	}
	cwd, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		t.Run(filepath.Base(f), func(t *testing.T) {
			_, err := Load(LoadOptions{Files: []string{f}, Env: []string{"XDG_RUNTIME_DIR=/run/user/1000"}})
			var ps Problems
			if !errors.As(err, &ps) {
				t.Fatalf("got %v, want Problems", err)
			}
			for _, p := range ps {
				if p.Fix == "" {
					t.Errorf("no fix: %v", p)
				}
				if p.Source.Kind == FromFile && p.Source.Line == 0 && p.Key != "" {
					t.Errorf("no line: %v", p)
				}
			}
			got := strings.ReplaceAll(err.Error(), cwd, "$PWD") + "\n"
			golden(t, strings.TrimSuffix(f, ".yaml")+".txt", got)
		})
	}
}

func TestUnreadable(t *testing.T) {
	dir := t.TempDir()
	big := filepath.Join(dir, "big.yaml")
	if err := os.WriteFile(big, make([]byte, MaxFileBytes+1), 0o600); err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]string{
		filepath.Join(dir, "absent.yaml"): "no such file",
		dir:                               "not a regular file",
		big:                               "more than",
	} {
		_, err := Load(LoadOptions{Files: []string{file}})
		if err == nil || !strings.Contains(err.Error(), want) || !strings.HasPrefix(err.Error(), file+":") {
			t.Errorf("%s: got %v, want %q", file, err, want)
		}
	}
}

func write(t *testing.T, name, text string) string {
	t.Helper()
	f := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(f, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return f
}

func TestPrecedence(t *testing.T) {
	a := write(t, "a.yaml", "node: a\nlimits: {peer_ops: 2, inflight_rooms: 5}\ntransfer: {backend: [nixl, tcp]}\nplugins: {nixl: {options: {x: 1, y: [a, b]}}}\n")
	b := write(t, "b.yaml", "limits: {peer_ops: 3}\ntransfer: {backend: tcp}\nplugins: {nixl: {exec: /opt/nixl, options: {x: 2}}}\n")
	c, err := Load(LoadOptions{
		Files:     []string{a, b},
		Env:       []string{"TERMINUS_LIMITS__PEER_OPS=4", "TERMINUS_CLOCKS__STALL=20s", "OTHER=1", "TERMINUS_NODE=007"},
		Flags:     []string{"limits.peer_ops=5", "plugins.nixl.options.deep.er=[1, 2]"},
		Elsewhere: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	if c.Node != "007" || c.Limits.PeerOps != 5 || c.Limits.InflightRooms != 5 || c.Clocks.Stall.Std() != 20*time.Second {
		t.Errorf("node %q, limits %+v, stall %v", c.Node, c.Limits, c.Clocks.Stall)
	}
	if !reflect.DeepEqual(c.Transfer.Backend, Names{"tcp"}) {
		t.Errorf("backend %v: lists are replaced, not merged", c.Transfer.Backend)
	}
	want := Plugin{Exec: "/opt/nixl", Options: map[string]any{"x": 2, "y": []any{"a", "b"}, "deep": map[string]any{"er": []any{1, 2}}}}
	if !reflect.DeepEqual(c.Plugins["nixl"], want) {
		t.Errorf("plugin %#v\nwant   %#v", c.Plugins["nixl"], want)
	}
	got := map[string]string{}
	for _, v := range c.Effective() {
		got[v.Key] = v.Value + " " + v.Source.String()
	}
	for key, want := range map[string]string{
		"limits.peer_ops":              "5 --set limits.peer_ops",
		"limits.inflight_rooms":        "5 " + a + ":2:39",
		"clocks.stall":                 "20s TERMINUS_CLOCKS__STALL",
		"clocks.queue":                 "300s default",
		"plugins.nixl.options.x":       "2 " + b + ":3:48",
		"plugins.nixl.options.deep.er": "[1,2] --set plugins.nixl.options.deep.er",
		"transfer.backend":             "[tcp] " + b + ":2:21",
		"node":                         `"007" TERMINUS_NODE`,
	} {
		if got[key] != want {
			t.Errorf("%s: got %q, want %q", key, got[key], want)
		}
	}
}

// TestEnvAndFlagProblems: the source that is named is the variable or the flag.
func TestEnvAndFlagProblems(t *testing.T) {
	_, err := Load(LoadOptions{
		Env: []string{"TERMINUS_LIMITS__INFLIGHT_ROOM=3", "TERMINUS_CLOCKS__STALL=5", "TERMINUS_NODE__X=1",
			"TERMINUS_LIMITS__PEER_OPS=", "TERMINUS_PEERS__DRIVER=lcal"},
		Flags: []string{"clocks.peer_dead=1s", "limits", "=3", "drain.budget=forever", "plugins.a.options.b={c", "worker.mode=0777"},
	})
	if err == nil {
		t.Fatal("no error")
	}
	golden(t, "testdata/env_and_flags.txt", err.Error()+"\n")
}

func TestRelativePathsAreOfTheFile(t *testing.T) {
	f := write(t, "a.yaml", "runtime_dir: run\nplugins: {x: {exec: bin/x}, y: {exec: y, script: y.py}, z: {wasm: z.wasm, options: {wasm: z}}}\npeers: {tls: {cert: c, key: k, ca: a}}\n")
	c, err := Load(LoadOptions{Files: []string{f}, Elsewhere: true})
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Dir(f)
	for got, want := range map[string]string{
		c.RuntimeDir: dir + "/run", c.Plugins["x"].Exec: dir + "/bin/x", c.Plugins["y"].Exec: "y", c.Plugins["y"].Script: dir + "/y.py", c.Plugins["z"].Wasm: dir + "/z.wasm", c.Plugins["z"].Options["wasm"].(string): "z", c.Plugins["z"].Exec: "", c.Peers.TLS.Key: dir + "/k",
	} {
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	if err := c.CheckMachine(); err == nil || strings.Count(err.Error(), "\n") != 4 {
		t.Errorf("got %v, want five missing files", err)
	}
}

// A pipe that the configuration named was waited for, for ever.
func TestCheckMachineWaitsForNoPipe(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	f := write(t, "a.yaml", fmt.Sprintf("peers: {tls: {cert: %s, key: %s, ca: %s}}\n", pipe, pipe, pipe))
	c, err := Load(LoadOptions{Files: []string{f}, Elsewhere: true})
	if err != nil {
		t.Fatal(err)
	}
	got := make(chan error, 1)
	go func() { got <- c.CheckMachine() }()
	select {
	case err := <-got:
		if err == nil || strings.Count(err.Error(), "no regular file") != 3 {
			t.Errorf("got %v, want three files that are none", err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("a pipe is waited for")
	}
}

func TestDefaults(t *testing.T) {
	c, err := Load(LoadOptions{Env: []string{"XDG_RUNTIME_DIR=/run/user/7", "HOME=/home/u"}})
	if err != nil {
		t.Fatal(err)
	}
	if c.RuntimeDir != "/run/user/7/terminus" || c.Worker.Socket != filepath.Join(c.RuntimeDir, c.Node, "worker.sock") || c.StateDir == "" {
		t.Errorf("%+v", c)
	}
	// The numbers of docs/protocol.md: a change here is a change of the promise.
	want := Default().Clocks
	if c.Clocks != want || want.Stall.Std() != 15*time.Second || want.TransferFloorRate != 50_000_000 {
		t.Errorf("clocks %+v", c.Clocks)
	}
}

func TestCheckBackend(t *testing.T) {
	f := write(t, "a.yaml", "clocks: {stall: 20s}\n")
	c, err := Load(LoadOptions{Files: []string{f}})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.CheckBackend("nixl", Duration(10*time.Second)); err != nil {
		t.Error(err)
	}
	err = c.CheckBackend("nixl", Duration(20*time.Second))
	if err == nil || !strings.HasPrefix(err.Error(), f+":1:17: clocks.stall: ") {
		t.Errorf("got %v", err)
	}
}

// TestConfigs loads every example and holds full.yaml to its word.
func TestConfigs(t *testing.T) {
	files, err := filepath.Glob("../../configs/*.yaml")
	if err != nil || len(files) < 5 {
		t.Fatalf("found %v: %v", files, err)
	}
	for _, f := range files {
		if _, err := Load(LoadOptions{Files: []string{f}, Elsewhere: true}); err != nil {
			t.Error(err)
		}
	}
	c, err := Load(LoadOptions{Files: []string{"../../configs/full.yaml"}, Elsewhere: true})
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range c.Effective() {
		if v.Source.Kind != FromFile {
			t.Errorf("full.yaml lacks %s", v.Key)
		}
	}
	d := Default()
	if c.Limits != d.Limits || c.Clocks != d.Clocks || c.Scheduler != d.Scheduler || c.Drain != d.Drain || c.Log != d.Log ||
		c.Worker.MaxSessions != d.Worker.MaxSessions || c.Worker.SlotsMax != d.Worker.SlotsMax || c.Worker.Mode != d.Worker.Mode {
		t.Error("full.yaml does not show the defaults")
	}
}

// TestPair: the two examples find each other.
func TestPair(t *testing.T) {
	env := []string{"XDG_RUNTIME_DIR=/run/user/7"}
	p, err := Load(LoadOptions{Files: []string{"../../configs/prefill.yaml"}, Env: env})
	if err != nil {
		t.Fatal(err)
	}
	d, err := Load(LoadOptions{Files: []string{"../../configs/decode.yaml"}, Env: env})
	if err != nil {
		t.Fatal(err)
	}
	if p.RuntimeDir != d.RuntimeDir || p.Node == d.Node || p.Worker.Socket == d.Worker.Socket || p.Peers.Driver != "local" {
		t.Errorf("prefill %+v\ndecode %+v", p, d)
	}
}

func TestValues(t *testing.T) {
	for text, want := range map[string]Bytes{"1B": 1, "64MiB": 64 << 20, "1.5 KiB": 1536, "2GB": 2e9, "3kB": 3000, "1TiB": 1 << 40} {
		var b Bytes
		if err := b.UnmarshalText([]byte(text)); err != nil || b != want {
			t.Errorf("%s: %d, %v", text, b, err)
		}
	}
	for _, text := range []string{"", "B", "1", "-1B", "+1B", "0B", "0.4B", "1e3B", "0x1B", "1_0B", "NaNB", "infB", "9999999999TiB", "1 MIB", "1Mib"} {
		var b Bytes
		if err := b.UnmarshalText([]byte(text)); err == nil {
			t.Errorf("%q was read as %d", text, b)
		}
	}
	for _, text := range []string{"10", "", "%", "101%", "-1%", "NaN%", "1e1%"} {
		var p Percent
		if err := p.UnmarshalText([]byte(text)); err == nil {
			t.Errorf("%q was read as %v", text, p)
		}
	}
	for _, v := range []interface{ MarshalText() ([]byte, error) }{Duration(time.Minute), Duration(1500 * time.Microsecond), Bytes(4 << 20), Bytes(1000), Rate(50e6), Percent(12.5)} {
		text, _ := v.MarshalText()
		back := reflect.New(reflect.TypeOf(v))
		if err := back.Interface().(interface{ UnmarshalText([]byte) error }).UnmarshalText(text); err != nil || !reflect.DeepEqual(back.Elem().Interface(), v) {
			t.Errorf("%s does not read back: %v, %v", text, back.Elem(), err)
		}
	}
	if p := Percent(10); p.Of(250) != 25 {
		t.Errorf("10%% of 250 is %d", p.Of(250))
	}
}

// TestHostile: texts that cost a YAML parser much cost this one little, and end in a problem.
func TestHostile(t *testing.T) {
	const n = MaxFileBytes
	lines := func(line string) string { return strings.Repeat(line+"\n", n/(len(line)+1)) }
	for name, text := range map[string]string{
		"flow":           strings.Repeat("[", n),
		"flow lines":     lines("["),
		"maps":           lines("{a: "),
		"options":        "plugins: {x: {options: {a: " + strings.Repeat("[\n", n/8) + strings.Repeat("]\n", n/8) + "}}}",
		"sequences":      lines(strings.Repeat("- ", maxLineBytes/2-1)),
		"colons":         lines(strings.Repeat("a: ", maxLineBytes/3-1)),
		"anchors":        lines("a: " + strings.Repeat("&a ", maxLineBytes/3-2)),
		"questions":      lines(strings.Repeat("? ", maxLineBytes/2-1)),
		"same key":       lines("a: b")[:n/4],
		"documents":      lines("---\na: b")[:n/4],
		"quotes":         lines("a: \"b"),
		"literal":        "a: |\n" + lines("  b"),
		"one long line":  "node: " + strings.Repeat("a", n-10),
		"indented":       indented(300),
		"binary":         strings.Repeat("\x00\xff", n/2),
		"carriage":       strings.Repeat("a: b\r", n/5),
		"alias of alias": lines("a: &b *b"),
	} {
		t.Run(name, func(t *testing.T) {
			start := time.Now()
			_, err := Load(LoadOptions{Files: []string{write(t, "a.yaml", text)}, Elsewhere: true})
			if err == nil {
				t.Error("it was accepted")
			}
			if d := time.Since(start); d > 30*time.Second {
				t.Errorf("it took %v", d)
			} else {
				t.Log(d)
			}
		})
	}
}

func indented(depth int) string {
	var b strings.Builder
	for i := range depth {
		b.WriteString(strings.Repeat(" ", i) + "a:\n")
	}
	return b.String()
}

// FuzzSet: any flag and variable give a configuration or problems.
func FuzzSet(f *testing.F) {
	for _, kv := range []string{"limits.peer_ops=8", "node=", "=", "transfer.backend=[a, b", "plugins.x.options.y.z={a: [1]}", "plugins={x: {exec: y}}", "clocks.stall=5", "peers.static=[{node: a}]", "a.b.c=d", "plugins..=1"} {
		f.Add(kv)
	}
	f.Fuzz(func(t *testing.T, kv string) {
		key, value, _ := strings.Cut(kv, "=")
		env := EnvPrefix + strings.ReplaceAll(strings.ToUpper(key), ".", "__") + "=" + value
		for _, o := range []LoadOptions{{Flags: []string{kv}, Elsewhere: true}, {Env: []string{env}, Elsewhere: true}} {
			if c, err := Load(o); err == nil {
				c.Effective()
			} else if ps := (Problems{}); !errors.As(err, &ps) {
				t.Fatalf("not Problems: %v", err)
			}
		}
	})
}

// FuzzLoad: any bytes give a configuration or problems with fixes, never a panic; what loads keeps its promises.
func FuzzLoad(f *testing.F) {
	for _, pattern := range []string{"testdata/bad/*.yaml", "../../configs/*.yaml"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			f.Fatal(err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				f.Fatal(err)
			}
			f.Add(text)
		}
	}
	f.Add([]byte("a: &a [*a]\n? b\n: c\n%YAML 1.2\n"))
	f.Add([]byte("[[[[{{{{"))
	name := filepath.Join(f.TempDir(), "fuzz.yaml")
	f.Fuzz(func(t *testing.T, text []byte) {
		if err := os.WriteFile(name, text, 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := Load(LoadOptions{Files: []string{name}, Elsewhere: true})
		if err != nil {
			var ps Problems
			if !errors.As(err, &ps) {
				t.Fatalf("not Problems: %v", err)
			}
			return
		}
		if len(c.Transfer.Backend) == 0 || c.Clocks.Stall <= 0 || c.Limits.OpBytes <= 0 || len(c.Worker.Socket) > maxSocketPath {
			t.Fatalf("loaded %+v", c)
		}
		c.Effective()
	})
}

// TestEveryKeyHasItsVariable: documented variables were not wired to their options, and setting one changed
// nothing, silently (dynamo#4430). Here each key of full.yaml is set by its variable, and says so. Those that
// it leaves empty are not tried: an empty variable is refused.
func TestEveryKeyHasItsVariable(t *testing.T) {
	const full = "../../configs/full.yaml"
	load := func(env ...string) []Value {
		c, err := Load(LoadOptions{Files: []string{full}, Env: env, Elsewhere: true})
		if err != nil {
			t.Fatalf("%s: %v", env, err)
		}
		return c.Effective()
	}
	tried := 0
	for _, v := range load() {
		text := v.Value
		if s, err := strconv.Unquote(text); err == nil {
			text = s // a scalar needs no quotes in a variable
		}
		if text == "" || v.Key == "collective.backend" { // which this version refuses
			continue
		}
		name := EnvPrefix + strings.ReplaceAll(strings.ToUpper(v.Key), ".", "__")
		found := false
		for _, got := range load(name + "=" + text) {
			if got.Key != v.Key {
				continue
			}
			if found = true; got.Value != v.Value || got.Source.String() != name {
				t.Errorf("%s=%s: %s is %s from %s", name, text, v.Key, got.Value, got.Source)
			}
		}
		if !found {
			t.Errorf("%s: no key %s any more", name, v.Key)
		}
		tried++
	}
	if tried < 40 {
		t.Errorf("only %d keys were tried", tried)
	}
}
