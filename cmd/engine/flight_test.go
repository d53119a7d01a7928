package main

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	client "github.com/terminus-kv/terminus/clients/go"
	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/statemachine"
	"github.com/terminus-kv/terminus/internal/admin"
	"github.com/terminus-kv/terminus/internal/flight"
)

// The history of a room is read after its engine was killed, and after the next one runs.
func TestRoomsOfADeadEngine(t *testing.T) {
	dir := runtimeDir(t)
	env := []string{"XDG_RUNTIME_DIR=" + dir}
	node := filepath.Join(dir, "terminus", "n1")
	run := func() *process {
		p := spawn(t, dir, "run", "--set", "node=n1")
		c := admin.NewClient(filepath.Join(node, "admin.sock"))
		defer c.Close()
		eventually(t, "n1 ready", ready(c))
		return p
	}
	p := run()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	w, err := client.Dial(ctx, client.Options{
		Socket: filepath.Join(node, "worker.sock"), Group: "g", Role: client.Source, Size: 1,
		Layout: client.Layout{DType: "bf16", Layers: 1, KVHeads: 1, HeadDim: 64, PageTokens: 16, Kind: "mha"},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	live, err := w.Open(ctx, client.OpenOptions{Room: 7})
	if err != nil {
		t.Fatal(err)
	}
	ended, err := w.Open(ctx, client.OpenOptions{Room: 8})
	if err != nil {
		t.Fatal(err)
	}
	if err := ended.Abort(ctx); err != nil {
		t.Fatal(err)
	}
	p.cmd.Process.Kill()
	p.cmd.Wait()
	if st, err := live.WaitTerminal(ctx); st != client.Failed || err != nil {
		t.Fatal(st, err)
	}

	say := func(want int, args ...string) (out, errOut string) {
		t.Helper()
		code, out, errOut := command(t, env, args...)
		if code != want {
			t.Fatalf("%v: exit %d\n%s%s", args, code, out, errOut)
		}
		return out, errOut
	}
	has := func(text string, parts ...string) {
		t.Helper()
		for _, part := range parts {
			if !strings.Contains(text, part) {
				t.Errorf("no %q in\n%s", part, text)
			}
		}
	}
	out, errOut := say(exitOK, "rooms", "why", "7", "--node", "n1")
	has(errOut, "engine n1 is not running", "incarnation 1", "last record")
	has(out, "room 7 (source) was unbound", "when the engine died; its worker reads Failed (engine_lost)")
	out, _ = say(exitOK, "rooms", "get", "7", "--node", "n1")
	has(out, "engine_lost", "opened by the worker", "state unbound")
	if strings.Contains(out, "groups") {
		t.Errorf("the recorder knows no groups:\n%s", out)
	}
	out, _ = say(exitOK, "rooms", "why", "8", "--node", "n1")
	has(out, "room 8 (source) ended", "Failed (aborted)")
	_, errOut = say(exitFailed, "rooms", "get", "9", "--node", "n1")
	has(errOut, "is not running", "has nothing of room 9")
	_, errOut = say(exitFailed, "rooms", "get", "9", "--node", "n2")
	has(errOut, "n2")

	p = run()
	out, errOut = say(exitOK, "rooms", "get", "8", "--node", "n1")
	has(errOut, "engine n1 was started again", "incarnation 1")
	has(out, "aborted")
	_, errOut = say(exitFailed, "rooms", "get", "9", "--node", "n1")
	has(errOut, "no record of room 9")
	p.cmd.Process.Kill()
	p.cmd.Wait()
}

// What stands in a damaged file was printed as "(invalid) was  with", and drove the terminal.
func TestDamagedFlightRecorder(t *testing.T) {
	dir := runtimeDir(t)
	node := filepath.Join(dir, "n1")
	if err := os.Mkdir(node, 0o700); err != nil {
		t.Fatal(err)
	}
	f, err := flight.Create(node, "n1\x1b[31m", 3, 8)
	if err != nil {
		t.Fatal(err)
	}
	open := core.Record{Kind: core.RecOpen, Role: statemachine.Source, Room: 7, Own: statemachine.Opener{Inc: 3, Seq: 1}}
	bad, in := open, open
	bad.Role = 9
	in.Kind, in.Frame, in.State, in.Detail = core.RecOpEnd, core.FrameRegister, statemachine.Confirmed, "red \x1b[31m, \u009b2J"
	in.End = core.EndFailed
	only := open
	only.Room = 8
	if err := f.Add(time.Now(), []core.Record{open, bad, in, only}, func(core.PeerID) string { return "d" }); err != nil {
		t.Fatal(err)
	}
	f.Close()
	env := []string{"TERMINUS_RUNTIME_DIR=" + dir}
	for args, want := range map[string][]string{
		"rooms why 7": {"room 7 (source) was confirmed with d"}, "rooms why 8": {"room 8 (source) was open with d"},
		"rooms get 7": {`operation failed (red \u001b[31m, \u009b2J)`}, "rooms get 7 -o yaml": {`red \u001b[31m, \u009b2J`}, "rooms get 7 -o json": {`red \u001b[31m, \u009b2J`},
	} {
		code, out, errOut := command(t, env, append(strings.Fields(args), "--node", "n1")...)
		if code != exitOK || !strings.Contains(errOut, `engine n1\u001b[31m is not running`) || !strings.Contains(errOut, "left out: 1 damaged record") {
			t.Errorf("%s: exit %d: %q", args, code, errOut)
		}
		for _, w := range want {
			if !strings.Contains(out, w) {
				t.Errorf("%s: no %q in\n%s", args, w, out)
			}
		}
		if both := out + errOut; strings.ContainsAny(both, "\x1b\u009b") || strings.Contains(both, "invalid") {
			t.Errorf("%s: %q", args, both)
		}
	}
}
