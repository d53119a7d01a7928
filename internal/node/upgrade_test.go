package node_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	client "github.com/terminus-kv/terminus/clients/go"
	"github.com/terminus-kv/terminus/internal/admin"
)

// upgrade replaces the plugin tcp of an engine and returns the steps.
func (e *engine) upgrade(u admin.Upgrade) (steps []string, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	c := admin.NewClient(e.cfg.Admin.Socket)
	defer c.Close()
	err = c.UpgradePlugin(ctx, "tcp", u, func(s admin.UpgradeStep) { steps = append(steps, s.What) })
	return steps, err
}

// epochs are those of the plugin tcp, the newest first.
func (e *engine) epochs(t *testing.T) []admin.PluginEpoch {
	t.Helper()
	ps, err := e.admin.Plugins(context.Background())
	must(t, err)
	return ps[0].Epochs
}

// errSuspect: an open was refused because the other engine has not beaten for clocks.peer_suspect. A machine that is too
// busy for beats does that to healthy engines; no room was under way.
var errSuspect = errors.New("the other engine is suspect")

// withdraw ends a room that only the source has opened.
func withdraw(ctx context.Context, rs *client.Room) error {
	if err := rs.Abort(ctx); err != nil {
		return err
	}
	if err := rs.WaitReusable(ctx); err != nil {
		return err
	}
	return rs.Release(ctx)
}

// move hands one room over and checks its bytes; for goroutines that must not end the test.
func move(ctx context.Context, p, d *worker, room int64, src, dst []int32) error {
	fill(p, room, src)
	rs, err := p.Open(ctx, client.OpenOptions{Room: room})
	if err != nil {
		return err
	}
	rd, err := d.Open(ctx, client.OpenOptions{Room: room, PeerGroup: "prefill"})
	if err != nil {
		var refused *client.Error
		if errors.As(err, &refused) && strings.Contains(refused.Message, "clocks.peer_suspect") {
			err = fmt.Errorf("room %d: %w: %s", room, errSuspect, refused.Message)
		}
		if werr := withdraw(ctx, rs); werr != nil {
			return fmt.Errorf("room %d: %v; and its source does not end: %w", room, err, werr)
		}
		return err
	}
	if err := rd.Register(ctx, client.RegisterPart{Pool: d.pool, Pages: dst}); err != nil {
		return err
	}
	for i := range src {
		if err := rs.Send(ctx, client.Chunk{Parts: []client.Part{{Pool: p.pool, Pages: src[i : i+1]}}, Last: i == len(src)-1}); err != nil {
			return err
		}
	}
	for _, r := range []*client.Room{rd, rs} {
		st, err := r.WaitTerminal(ctx)
		if err != nil {
			return err
		}
		if st != client.Success {
			f, _ := r.Failure(ctx)
			return fmt.Errorf("room %d is %v: %+v\n%s", room, st, f, explain(room))
		}
		if err := r.WaitReusable(ctx); err != nil {
			return err
		}
	}
	for i, id := range dst {
		for k := range tensors {
			if want := bytes.Repeat([]byte(fmt.Sprintf("%08d%04d%04d", room, i, k)), pageBytes/16); !bytes.Equal(d.page(k, id), want) {
				return fmt.Errorf("room %d: page %d (tensor %d) has %.16q", room, i, k, d.page(k, id))
			}
		}
	}
	return errors.Join(rd.Release(ctx), rs.Release(ctx))
}

// Rooms without a pause, while the plugins of both engines are replaced again and again, by the program
// itself and by a copy of it: no room fails, and every byte is right.
func TestUpgradeUnderLoad(t *testing.T) {
	self, err := os.Executable()
	must(t, err)
	for _, lane := range []string{"shm", "tcp"} {
		t.Run(lane, func(t *testing.T) {
			t.Parallel()
			dir := tempDir(t)
			copied := filepath.Join(dir, "copy")
			b, err := os.ReadFile(self)
			must(t, err)
			must(t, os.WriteFile(copied, b, 0o755))
			set := []string{"plugins.tcp.exec=" + self, `plugins.tcp.args=["plugin","tcp"]`, "plugins.tcp.options.shm=" + fmt.Sprint(lane == "shm")}
			pe, de := start(t, dir, "p", set...), start(t, dir, "d", set...)
			const loops, pages = 6, 4
			p, d := dial(t, pe, client.Source, "prefill", 0, 1, loops*pages), dial(t, de, client.Destination, "decode", 0, 1, loops*pages)
			var stop atomic.Bool
			var rooms, moved, suspect atomic.Int64
			var wg sync.WaitGroup
			for l := range loops {
				ids := make([]int32, pages)
				for i := range ids {
					ids[i] = int32(l*pages + i)
				}
				wg.Go(func() {
					for !stop.Load() {
						ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
						err := move(ctx, p, d, rooms.Add(1), ids, ids)
						cancel()
						switch {
						case err == nil:
							moved.Add(1)
						case errors.Is(err, errSuspect): // and nothing else
							suspect.Add(1)
						default:
							t.Error(err)
							return
						}
					}
				})
			}
			defer wg.Wait()
			defer stop.Store(true)
			before := int64(0)
			for round, u := range []admin.Upgrade{{}, {Exec: copied}, {Exec: self}} {
				var both sync.WaitGroup
				for _, e := range []*engine{pe, de} {
					both.Go(func() {
						if steps, err := e.upgrade(u); err != nil {
							t.Errorf("%s, round %d: %v\n%s", e.cfg.Node, round, err, strings.Join(steps, "\n"))
						}
					})
				}
				both.Wait()
				for _, e := range []*engine{pe, de} {
					if es := e.epochs(t); len(es) != 1 || es[0].State != "ready" || es[0].Epoch != uint32(round+2) {
						t.Errorf("%s, round %d: %+v", e.cfg.Node, round, es)
					}
				}
				eventually(t, "rooms go on", func() bool { return t.Failed() || moved.Load() > before+2*loops })
				before = moved.Load()
			}
			stop.Store(true)
			wg.Wait()
			t.Logf("%d rooms; %d opens were refused because the other engine was suspect", moved.Load(), suspect.Load())
			if suspect.Load() > moved.Load() {
				t.Error("most opens were refused")
			}
			for _, e := range []*engine{pe, de} {
				if s := e.metrics(t); !strings.Contains(s, "terminus_plugin_retired_total 3\n") || !strings.Contains(s, "terminus_plugin_retired_cut_total 0\n") {
					t.Errorf("%s: metrics:\n%s", e.cfg.Node, grep(s, "retired"))
				}
			}
		})
	}
}

// grep returns the lines with a word.
func grep(text, word string) string {
	var out []string
	for _, l := range strings.Split(text, "\n") {
		if strings.Contains(l, word) && !strings.HasPrefix(l, "#") {
			out = append(out, l)
		}
	}
	return strings.Join(out, "\n")
}

// A room that is under way when its plugin is upgraded, on both sides, ends in the old process; what comes after
// goes through the new one; the command ends when the room does.
func TestUpgradeWaitsForItsRooms(t *testing.T) {
	dir := tempDir(t)
	pe, de := start(t, dir, "p"), start(t, dir, "d")
	p, d := dial(t, pe, client.Source, "prefill", 0, 1, 16), dial(t, de, client.Destination, "decode", 0, 1, 16)
	ctx := short(t)
	fill(p, 1, []int32{1, 2})
	rs, rd := bind(t, p, d, 1, []int32{5, 6})
	must(t, rs.Send(ctx, client.Chunk{Parts: []client.Part{{Pool: p.pool, Pages: []int32{1}}}}))
	done := make(chan error, 1)
	go func() {
		_, err := de.upgrade(admin.Upgrade{})
		done <- err
	}()
	eventually(t, "the new process serves", func() bool { es := de.epochs(t); return len(es) == 2 && es[0].State == "ready" && es[0].Epoch == 2 })
	if es := de.epochs(t); es[1].State != "retiring" || es[1].Rooms != 1 || es[1].EndsInNS <= 0 || es[1].PID == es[0].PID {
		t.Errorf("%+v", es)
	}
	if _, err := de.upgrade(admin.Upgrade{}); !errors.Is(err, admin.ErrRefused) {
		t.Errorf("a second one at the same time: %v", err)
	}
	// The source's plugin, too: what room 1 has not sent goes by the new process to the old one of the destination.
	if _, err := pe.upgrade(admin.Upgrade{}); err != nil {
		t.Fatal(err)
	}
	handOver(t, p, d, 2, []int32{9, 10}, []int32{11, 12})
	select {
	case err := <-done:
		t.Fatalf("the upgrade ended before the room: %v", err)
	default:
	}
	must(t, rs.Send(ctx, client.Chunk{Parts: []client.Part{{Pool: p.pool, Pages: []int32{2}}}, Last: true}))
	for _, r := range []*client.Room{rd, rs} {
		if st, err := r.WaitTerminal(ctx); err != nil || st != client.Success {
			f, _ := r.Failure(ctx)
			t.Fatalf("%v, %v: %+v\n%s", st, err, f, explain(1))
		}
	}
	check(t, d, 1, []int32{5, 6})
	must(t, <-done)
	if es := de.epochs(t); len(es) != 1 || es[0].Epoch != 2 {
		t.Errorf("%+v", es)
	}
	// A region that comes later reaches the new process alone, and a worker that leaves is forgotten by it.
	late := dial(t, de, client.Destination, "late", 0, 1, 16)
	late.Close()
	handOver(t, p, d, 3, []int32{1, 2, 9, 10}, []int32{5, 6, 11, 12})
}

// Whatever is wrong with the program, nothing changes, and the command says what.
func TestBadUpgradeChangesNothing(t *testing.T) {
	self, err := os.Executable()
	must(t, err)
	dir := tempDir(t)
	script := func(name, args string) string {
		path := filepath.Join(dir, name)
		must(t, os.WriteFile(path, []byte(args), 0o755))
		return path
	}
	few := filepath.Join(dir, fewName)
	must(t, os.Symlink(self, few))
	set := []string{"plugins.tcp.exec=" + self, `plugins.tcp.args=["plugin","tcp"]`}
	pe, de := start(t, dir, "p"), start(t, dir, "d", set...)
	p, d := dial(t, pe, client.Source, "prefill", 0, 1, 16), dial(t, de, client.Destination, "decode", 0, 1, 16)
	pid := de.epochs(t)[0].PID
	for i, c := range []struct {
		u    admin.Upgrade
		says string
	}{
		{admin.Upgrade{Exec: "/nowhere/plugin"}, "no such file"},
		{admin.Upgrade{Exec: "plugin"}, "give the full path"},
		{admin.Upgrade{Exec: "/bin/false"}, "ended before its handshake"},
		{admin.Upgrade{SHA256: strings.Repeat("0", 64)}, "sha256"},
		{admin.Upgrade{Exec: script("script", "#!/bin/sh\n")}, "interpreter"},
		{admin.Upgrade{Exec: few}, "it lacks receiver_checked, "},
	} {
		steps, err := de.upgrade(c.u)
		if err == nil || !strings.Contains(strings.ToLower(err.Error()), c.says) {
			t.Errorf("%+v: %v, want %q\n%s", c.u, err, c.says, strings.Join(steps, "\n"))
		}
		if es := de.epochs(t); len(es) != 1 || es[0].PID != pid || es[0].State != "ready" {
			t.Errorf("%+v: %+v", c.u, es)
		}
		handOver(t, p, d, int64(i+1), []int32{1, 2}, []int32{3, 4})
	}
	if _, err := de.admin.Plugins(context.Background()); err != nil {
		t.Error(err)
	}
	c := admin.NewClient(de.cfg.Admin.Socket)
	defer c.Close()
	if err := c.UpgradePlugin(context.Background(), "nixl", admin.Upgrade{}, func(admin.UpgradeStep) {}); !errors.Is(err, admin.ErrNotFound) {
		t.Errorf("unknown plugin: %v", err)
	}
}

// The plugins of both engines prove nothing, and the source's never ends an op: a room that is aborted leaves its
// pages in quarantine. Beyond the budget the engine is not ready and gives the worker no rooms, while the next
// process of the plugin is started; when the old one is gone the pages are fenced and all is well again.
func TestQuarantineBeyondItsBudgetIsRetired(t *testing.T) {
	self, err := os.Executable()
	must(t, err)
	dir := tempDir(t)
	gate := filepath.Join(dir, "gate")
	submitted := filepath.Join(dir, "submitted")
	pe := start(t, dir, "p", "plugins.tcp.exec="+self, `plugins.tcp.args=["plugin","breach","stuck","`+submitted+`"]`)
	de := start(t, dir, "d", "plugins.tcp.exec="+self, `plugins.tcp.args=["plugin","breach","gated","`+gate+`"]`, "limits.quarantine=10%", "clocks.drain=200ms")
	p, d := dial(t, pe, client.Source, "prefill", 0, 1, 16), dial(t, de, client.Destination, "decode", 0, 1, 16)
	ctx := short(t)
	rs, rd := bind(t, p, d, 1, []int32{1, 2, 3, 4})
	must(t, rs.Send(ctx, client.Chunk{Parts: []client.Part{{Pool: p.pool, Pages: []int32{1, 2, 3, 4}}}, Last: true}))
	eventually(t, "the plugin has the op", func() bool { _, err := os.Stat(submitted); return err == nil })
	must(t, rd.Abort(ctx))

	ended := time.Now()
	eventually(t, "the pages rest in quarantine", func() bool {
		if time.Since(ended) > 15*time.Second {
			t.Fatalf("pages are %v\n%s", rd.Residency(), explain(1))
		}
		return rd.Residency() == client.Quarantined
	})
	if err := rd.Release(ctx); err == nil {
		t.Error("pages in quarantine were released")
	}
	r, err := de.admin.Ready(ctx)
	must(t, err)
	if reasons := strings.Join(r.Reasons, "; "); r.Ready || !strings.Contains(reasons, "limits.quarantine") || !strings.Contains(reasons, "group decode") {
		t.Errorf("%+v", r)
	}
	why, err := de.admin.Why(ctx, 1)
	must(t, err)
	if !strings.Contains(why[0], "rung 4") || !strings.Contains(why[0], "next epoch of plugin tcp is being started") {
		t.Errorf("%q", why)
	}
	rd2 := openTo(t, d, 2)
	must(t, rd2.Register(ctx, client.RegisterPart{Pool: d.pool, Pages: []int32{8, 9}}))
	if why, err = de.admin.Why(ctx, 2); err != nil || !strings.Contains(why[0], "waiting for admission") || !strings.Contains(why[0], "limits.quarantine") {
		t.Errorf("%q, %v", why, err)
	}
	if _, err := de.upgrade(admin.Upgrade{}); !errors.Is(err, admin.ErrRefused) {
		t.Errorf("an upgrade beside a replacement: %v", err)
	}
	// A source worker of the same engine is not meant.
	src := dial(t, de, client.Source, "other", 0, 1, 16)
	r3, err := src.Open(ctx, client.OpenOptions{Room: 3})
	must(t, err)
	if why, err = de.admin.Why(ctx, 3); err != nil || strings.Contains(why[0], "admission") {
		t.Errorf("%q, %v", why, err)
	}
	must(t, r3.Abort(ctx))

	must(t, os.WriteFile(gate, nil, 0o600))
	must(t, rd.WaitReusable(ctx))
	if rd.Residency() != client.Fenced {
		t.Errorf("pages are %v", rd.Residency())
	}
	de.awaitReady(t)
	must(t, rd.Release(ctx))
	eventually(t, "room 2 is admitted", func() bool {
		why, err := de.admin.Why(ctx, 2)
		return err == nil && !strings.Contains(why[0], "admission")
	})
	eventually(t, "one process is left", func() bool { es := de.epochs(t); return len(es) == 1 && es[0].Epoch == 2 })
	m := de.metrics(t)
	for _, line := range []string{
		`terminus_rung_entered_total{rung="1"} 1`, `terminus_rung_left_total{rung="3"} 1`, `terminus_rung_entered_total{rung="4"} 1`,
		`terminus_rung_left_total{rung="5"} 1`, `terminus_plugin_replacements_total 1`, `terminus_plugin_retired_total 1`, `terminus_quarantined_bytes 0`,
	} {
		if !strings.Contains(m, line+"\n") {
			t.Errorf("no %q in\n%s", line, grep(m, "rung_")+"\n"+grep(m, "plugin_re"))
		}
	}
	if rungs := grep(m, `rung_seconds_total{rung="1"}`); strings.HasSuffix(rungs, " 0") {
		t.Errorf("%q", rungs)
	}
}

// Regions that workers add without a pause while the plugin is upgraded: the end of the old process must fail none.
func TestRegionAddUnderUpgrades(t *testing.T) {
	t.Parallel()
	e := start(t, tempDir(t), "e")
	var stop atomic.Bool
	var added atomic.Int64
	var wg sync.WaitGroup
	for i := range 2 {
		wg.Go(func() {
			for k := 0; !stop.Load(); k++ {
				ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
				w, err := newWorker(ctx, e.cfg.Worker.Socket, client.Destination, fmt.Sprintf("g%d", i), 0, 1, 512)
				cancel()
				if err != nil && !strings.Contains(err.Error(), "connected already") {
					t.Error(err)
					return
				}
				if err == nil {
					added.Add(1)
					w.Close()
					w.region.Close()
				}
			}
		})
	}
	defer wg.Wait()
	defer stop.Store(true)
	for range 6 {
		if steps, err := e.upgrade(admin.Upgrade{}); err != nil {
			t.Fatalf("%v\n%s", err, strings.Join(steps, "\n"))
		}
	}
	stop.Store(true)
	wg.Wait()
	t.Logf("%d regions", added.Load())
}

// A plugin that dies while it takes a region is asked again when it is back, whether or not it has answered the
// canary. Only a region that kills the next one, too, fails.
func TestRegionAddOutlivesThePlugin(t *testing.T) {
	self, err := os.Executable()
	must(t, err)
	for _, mode := range []string{"dies-before-canary", "dies-after-canary", "dies-always"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			dir := tempDir(t)
			e := start(t, dir, "e", "plugins.tcp.exec="+self, `plugins.tcp.args=["plugin","breach","`+mode+`","`+filepath.Join(dir, "mark")+`"]`)
			w, err := newWorker(short(t), e.cfg.Worker.Socket, client.Destination, "decode", 0, 1, 16)
			if err == nil {
				w.Close()
				w.region.Close()
			}
			if mode == "dies-always" && (err == nil || !strings.Contains(err.Error(), "died twice")) || mode != "dies-always" && err != nil {
				t.Errorf("%v", err)
			}
			if es := e.epochs(t); es[0].Epoch < 2 {
				t.Errorf("nothing died: %+v", es)
			}
		})
	}
}

// A program that dies soon after it took over is not tried again: the one before it serves, and `plugins list` says why.
// If the command still waits for the old process, it says so, too.
func TestUpgradeGoesBack(t *testing.T) {
	t.Parallel()
	self, err := os.Executable()
	must(t, err)
	dir := tempDir(t)
	mortal, mark := filepath.Join(dir, mortalName), filepath.Join(dir, "mark")
	must(t, os.Symlink(self, mortal))
	pe, de := start(t, dir, "p"), start(t, dir, "d", "plugins.tcp.exec="+self, `plugins.tcp.args=["plugin","tcp"]`, "plugins.tcp.env.MORTAL_MARK="+mark)
	p, d := dial(t, pe, client.Source, "prefill", 0, 1, 16), dial(t, de, client.Destination, "decode", 0, 1, 16)
	dies := func(epoch uint32) {
		t.Helper()
		must(t, os.WriteFile(mark, nil, 0o600))
		eventually(t, "the previous program serves", func() bool {
			es := de.epochs(t)
			return es[0].Epoch == epoch && es[0].State == "ready"
		})
		must(t, os.Remove(mark))
		ps, err := de.admin.Plugins(context.Background())
		must(t, err)
		if ps[0].Exec != self || !strings.Contains(ps[0].Detail, "the previous one is started again") {
			t.Errorf("%+v", ps[0])
		}
	}
	if steps, err := de.upgrade(admin.Upgrade{Exec: mortal}); err != nil {
		t.Fatalf("%v\n%s", err, strings.Join(steps, "\n"))
	}
	handOver(t, p, d, 1, []int32{1, 2}, []int32{3, 4})
	dies(3)
	handOver(t, p, d, 2, []int32{1, 2}, []int32{3, 4})

	// A room holds the old process, and with it the command.
	rs, rd := bind(t, p, d, 3, []int32{5, 6})
	must(t, rs.Send(short(t), client.Chunk{Parts: []client.Part{{Pool: p.pool, Pages: []int32{1}}}}))
	done := make(chan error, 1)
	go func() {
		_, err := de.upgrade(admin.Upgrade{Exec: mortal})
		done <- err
	}()
	eventually(t, "the new process serves", func() bool { es := de.epochs(t); return es[0].State == "ready" && es[0].Epoch == 4 })
	dies(5)
	if err := <-done; err == nil || !strings.Contains(err.Error(), "epoch 4 died after it had taken over, tcp went back to the previous program") {
		t.Error(err)
	}
	must(t, rd.Abort(short(t)))
}

// A pin that the configuration has is not lost by another program, nor by the file that lies there now.
func TestUpgradeKeepsThePin(t *testing.T) {
	t.Parallel()
	self, err := os.Executable()
	must(t, err)
	b, err := os.ReadFile(self)
	must(t, err)
	sum := fmt.Sprintf("%x", sha256.Sum256(b))
	e := start(t, tempDir(t), "e", "plugins.tcp.exec="+self, `plugins.tcp.args=["plugin","tcp"]`, "plugins.tcp.sha256="+sum)
	for _, u := range []admin.Upgrade{{Exec: self}, {Wasm: "/tmp/x.wasm"}} {
		if _, err := e.upgrade(u); !errors.Is(err, admin.ErrRefused) || !strings.Contains(err.Error(), "give --sha256 of the new program") {
			t.Errorf("%+v: %v", u, err)
		}
	}
	for _, u := range []admin.Upgrade{{Exec: self, SHA256: sum}, {}} {
		if _, err := e.upgrade(u); err != nil {
			t.Errorf("%+v: %v", u, err)
		}
		if ps, err := e.admin.Plugins(context.Background()); err != nil || ps[0].SHA256 != sum {
			t.Errorf("%+v: %+v, %v", u, ps, err)
		}
	}
}

// A client that goes away leaves no process behind: the next upgrade is refused until the candidate is gone, which
// is stopped and must be killed.
func TestUpgradeAbandoned(t *testing.T) {
	t.Parallel()
	self, err := os.Executable()
	must(t, err)
	dir := tempDir(t)
	mute := filepath.Join(dir, muteName)
	must(t, os.Symlink(self, mute))
	e := start(t, dir, "e", "plugins.tcp.exec="+self, `plugins.tcp.args=["plugin","breach","slow"]`, "clocks.drain=200ms")
	dial(t, e, client.Destination, "decode", 0, 1, 16)
	ctx, leave := context.WithCancel(context.Background())
	c := admin.NewClient(e.cfg.Admin.Socket)
	defer c.Close()
	done := make(chan error, 1)
	go func() { done <- c.UpgradePlugin(ctx, "tcp", admin.Upgrade{Exec: mute}, func(admin.UpgradeStep) {}) }()
	eventually(t, "the candidate is there", func() bool { return len(e.epochs(t)) == 2 })
	pid := e.epochs(t)[0].PID
	must(t, unix.Kill(pid, unix.SIGSTOP))
	leave()
	<-done
	eventually(t, "the next upgrade is let in", func() bool {
		_, err := e.upgrade(admin.Upgrade{})
		if err != nil && !errors.Is(err, admin.ErrRefused) {
			t.Error(err)
		}
		if err == nil && unix.Kill(pid, 0) == nil {
			t.Error("the candidate was still there")
		}
		return err == nil
	})
}
