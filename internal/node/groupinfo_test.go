package node_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	client "github.com/terminus-kv/terminus/clients/go"
	"github.com/terminus-kv/terminus/internal/admin"
)

// TestGroupAtTwoEngines: a group whose ranks connect to two engines is shown by every engine and works, and it works
// once its ranks sit on one.
func TestGroupAtTwoEngines(t *testing.T) {
	t.Parallel()
	dir := tempDir(t)
	a, b, c := start(t, dir, "a"), start(t, dir, "b"), start(t, dir, "c")
	prefill := []*worker{dial(t, a, client.Source, "prefill", 0, 2, 4), dial(t, a, client.Source, "prefill", 1, 2, 4)}
	first := dial(t, b, client.Destination, "decode", 0, 2, 4)
	shown := func(e *engine, want string) {
		t.Helper()
		got := ""
		defer func() {
			if t.Failed() {
				t.Logf("%s shows %s, want %s", e.cfg.Node, got, want)
			}
		}()
		eventually(t, fmt.Sprintf("%s shows %s", e.cfg.Node, want), func() bool {
			got = groups(t, e)
			return got == want
		})
	}
	shown(a, "decode@b [0] here=false elsewhere=[] missing=[1] pools=0 with prefill@a waits; prefill@a [0 1] here=true elsewhere=[] missing=[] pools=2 with decode@b waits")
	// list and why say the same.
	gs, err := a.admin.Groups(context.Background())
	must(t, err)
	why, err := a.admin.GroupWhy(context.Background(), "prefill")
	if want := `for rank 1 of "decode"`; err != nil || len(why) != 2 || !strings.Contains(why[1], "waits "+want) || gs[1].Pairs[0].Detail != want {
		t.Errorf("why %q, %v; list %+v", why, err, gs[1].Pairs)
	}
	second := dial(t, c, client.Destination, "decode", 1, 2, 4)
	for _, e := range []*engine{a, b, c} {
		want := "decode@b [0] here=false elsewhere=[1] missing=[] pools=0"
		if e == b {
			want = "decode@b [0] here=true elsewhere=[1] missing=[] pools=1 with prefill@a usable"
		} else if e == a {
			want += " with prefill@a usable"
		}
		want += "; decode@c [1]"
		switch e {
		case a:
			want += " here=false elsewhere=[0] missing=[] pools=0 with prefill@a usable; prefill@a [0 1] here=true elsewhere=[] missing=[] pools=2 with decode@b usable with decode@c usable"
		case b:
			want += " here=false elsewhere=[0] missing=[] pools=0; prefill@a [0 1] here=false elsewhere=[] missing=[] pools=0 with decode@b usable"
		case c:
			want += " here=true elsewhere=[0] missing=[] pools=1 with prefill@a usable; prefill@a [0 1] here=false elsewhere=[] missing=[] pools=0 with decode@c usable"
		}
		shown(e, want)
		why, err := e.admin.GroupWhy(context.Background(), "decode")
		if want := `group "decode" (destination, 2 ranks) is complete: rank 0 at "b", rank 1 at "c".`; err != nil || len(why) == 0 || !strings.HasPrefix(why[0], strings.TrimSuffix(want, ".")) {
			t.Errorf("why at %s: %q, %v", e.cfg.Node, why, err)
		}
	}
	handOverRanks := func(room int64, decode ...*worker) {
		t.Helper()
		rooms := make([]*client.Room, 0, 4)
		for rank, d := range decode {
			r := openTo(t, d, room)
			must(t, r.Register(short(t), client.RegisterPart{Pool: d.pool, Pages: []int32{1}}))
			s, err := prefill[rank].Open(short(t), client.OpenOptions{Room: room})
			must(t, err)
			rooms = append(rooms, r, s)
		}
		eventually(t, "a room between them is counted", func() bool {
			gs, err := b.admin.Groups(context.Background())
			return err == nil && len(gs[0].Pairs) == 1 && gs[0].Pairs[0].Rooms == 1 && gs[len(gs)-1].Pairs[0].Rooms == 1
		})
		for i := range prefill {
			must(t, rooms[2*i+1].Send(short(t), client.Chunk{Parts: []client.Part{{Pool: prefill[i].pool, Pages: []int32{2}}}, Last: true}))
		}
		for _, r := range rooms {
			if st, err := r.WaitTerminal(short(t)); err != nil || st != client.Success {
				t.Fatalf("%v, %v\n%s", st, err, explain(room))
			}
			must(t, r.WaitReusable(short(t)))
			must(t, r.Release(short(t)))
		}
	}
	handOverRanks(1, first, second)
	var e *client.Error
	_, err = client.Dial(short(t), options(a.cfg.Worker.Socket, client.Destination, "decode", 1, 2))
	if !errors.As(err, &e) || e.Code != "refused" || e.Field != "rank" || !strings.Contains(e.Message, `rank 1 of group "decode" is at engine "a" and at engine "c"`) {
		t.Errorf("a rank that is elsewhere already: %v", err)
	}
	wrong := options(a.cfg.Worker.Socket, client.Destination, "decode", 2, 4)
	if _, err = client.Dial(short(t), wrong); !errors.As(err, &e) || e.Field != "size" {
		t.Errorf("another size: %v", err)
	}

	second.Close()
	shown(b, "decode@b [0] here=true elsewhere=[] missing=[1] pools=1 with prefill@a waits; prefill@a [0 1] here=false elsewhere=[] missing=[] pools=0 with decode@b waits")
	moved := dial(t, b, client.Destination, "decode", 1, 2, 4)
	shown(b, "decode@b [0 1] here=true elsewhere=[] missing=[] pools=2 with prefill@a usable; prefill@a [0 1] here=false elsewhere=[] missing=[] pools=0 with decode@b usable")
	shown(a, "decode@b [0 1] here=false elsewhere=[] missing=[] pools=0 with prefill@a usable; prefill@a [0 1] here=true elsewhere=[] missing=[] pools=2 with decode@b usable")
	handOverRanks(2, first, moved)
	if _, err := b.admin.GroupWhy(context.Background(), "nobody"); !errors.Is(err, admin.ErrNotFound) {
		t.Errorf("why of a group that nobody hosts: %v", err)
	}
}

// groups describes what an engine knows of groups, on one line.
func groups(t *testing.T, e *engine) string {
	gs, err := e.admin.Groups(context.Background())
	must(t, err)
	var out []string
	for _, g := range gs {
		s := fmt.Sprintf("%s@%s %v here=%t elsewhere=%v missing=%v pools=%d", g.Name, g.Node, g.Ranks, g.Here, g.Elsewhere, g.Missing, g.Pools)
		for _, p := range g.Pairs {
			s += strings.TrimRight(fmt.Sprintf(" with %s@%s %s %s %s", p.Group, p.Node, p.Verdict, p.Reason, p.Field), " ")
		}
		out = append(out, s)
	}
	return strings.Join(out, "; ")
}

// TestDeadGroupIsNotUsable: a group of which every engine was dead was listed as complete and working.
func TestDeadGroupIsNotUsable(t *testing.T) {
	t.Parallel()
	dir := tempDir(t)
	a, b, c := start(t, dir, "a"), spawn(t, dir, "b"), spawn(t, dir, "c")
	dial(t, a, client.Source, "prefill", 0, 1, 4)
	dial(t, b, client.Destination, "decode", 0, 2, 4)
	dial(t, c, client.Destination, "decode", 1, 2, 4)
	list := func() (text string) {
		gs, err := a.admin.Groups(short(t))
		must(t, err)
		for _, g := range gs {
			for _, p := range g.Pairs {
				text += fmt.Sprintf("%s@%s with %s: %s; ", g.Name, g.Node, p.Node, p.Verdict)
			}
		}
		return text
	}
	eventually(t, "both are listed as usable", func() bool { return strings.Count(list(), "usable") == 4 })
	b.kill()
	c.kill()
	eventually(t, "neither is", func() bool { return strings.Count(list(), "waits") == 4 })
	gs, err := a.admin.Groups(short(t))
	must(t, err)
	why, err := a.admin.GroupWhy(short(t), "decode")
	must(t, err)
	if !strings.Contains(gs[0].Detail, `engine "b" is dead`) || strings.Contains(strings.Join(why, " "), "works") {
		t.Errorf("list says %q, why says %q", gs[0].Detail, why)
	}
}
