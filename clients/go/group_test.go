package client_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"testing"

	client "github.com/terminus-kv/terminus/clients/go"
	sm "github.com/terminus-kv/terminus/core/statemachine"
	"github.com/terminus-kv/terminus/internal/workerapi/workertest"
)

// ranks dials size ranks of a group that acts by rank 0's list.
func ranks(t *testing.T, e *workertest.Engine, role client.Role, size int) []*client.Client {
	t.Helper()
	out := make([]*client.Client, size)
	for rank := range out {
		c, err := client.Dial(within(t), client.Options{Socket: e.Config.Socket, Group: "g", Role: role, Rank: rank, Size: size, Layout: layout, Slots: 8, GroupList: true})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		out[rank] = c
	}
	return out
}

// list waits for rank 0's next list that is not empty.
func list(t *testing.T, c *client.Client) (out []client.GroupItem) {
	t.Helper()
	workertest.WaitFor(t, "a list", func() bool {
		var err error
		if out, err = c.PollGroup(); err != nil {
			t.Fatal(err)
		}
		return len(out) > 0
	})
	return out
}

func apply(t *testing.T, c *client.Client, l []client.GroupItem) []client.GroupChange {
	t.Helper()
	b, err := json.Marshal(l) // as it goes from rank to rank
	if err != nil {
		t.Fatal(err)
	}
	var got []client.GroupItem
	if err := json.Unmarshal(b, &got); err != nil || !reflect.DeepEqual(got, l) {
		t.Fatalf("%s: %v", b, err)
	}
	out, err := c.ApplyGroup(got)
	if err != nil || len(out) != len(l) {
		t.Fatalf("%v, %v", out, err)
	}
	return out
}

// TestGroupListDecides: a rank acts on rank 0's list when its own engine says otherwise, or nothing yet; until the
// list has ended a room its pages are not given up.
func TestGroupListDecides(t *testing.T) {
	e := workertest.Start(t, &workertest.Engine{})
	ctx := within(t)
	rs := ranks(t, e, client.Destination, 2)
	sessions, _ := e.Sessions()
	var rooms [2][]*client.Room
	for i, c := range rs {
		_, p := pool(t, c)
		for room := range int64(3) {
			r := open(t, c, room)
			if err := r.Register(ctx, client.RegisterPart{Pool: p, Pages: []int32{int32(room)}}); err != nil {
				t.Fatal(err)
			}
			rooms[i] = append(rooms[i], r)
		}
	}
	l := list(t, rs[0])
	if len(l) != 3 || l[0].Status != client.WaitingForInput {
		t.Fatalf("%+v", l)
	}
	for i, c := range rs {
		for k, ch := range apply(t, c, l) {
			if ch.Opened != rooms[i][k] {
				t.Errorf("rank %d: %+v is not its room", i, ch)
			}
		}
	}
	if l, err := rs[0].PollGroup(); len(l) != 0 || err != nil {
		t.Errorf("without news: %v, %v", l, err)
	}

	set := func(rank, room int, st sm.KVPoll, res sm.Residency, why sm.Reason) {
		e.Set(sessions[rank].ID, rooms[rank][room].Slot(), st, res, why)
	}
	set(1, 0, sm.Failed, sm.Quiet, sm.OutcomeUnknown) // room 0: rank 0 will say Success
	set(1, 1, sm.Succeeded, sm.Quiet, sm.Success)     // room 1: rank 0 will say Failed
	set(0, 2, sm.Succeeded, sm.Quiet, sm.Success)     // room 2: rank 0 has heard it first
	set(0, 1, sm.Failed, sm.Quiet, sm.WorkerLost)     //
	for _, r := range rooms[1][:2] {
		workertest.WaitFor(t, "its own word", func() bool { return r.Poll().Terminal() && r.Residency() == client.Quiet })
		if r.Reusable() {
			t.Errorf("room %d: reusable before the list has ended it", r.ID())
		}
		if err := r.Release(ctx); !errors.Is(err, client.ErrNotReusable) {
			t.Errorf("room %d: release: %v", r.ID(), err)
		}
	}
	l = list(t, rs[0])
	if !slices.Contains(l, client.GroupItem{Room: 2, Status: client.Success}) {
		t.Errorf("%+v", l)
	}
	for !slices.ContainsFunc(l, func(i client.GroupItem) bool { return i.Room == 1 }) {
		l = append(l, list(t, rs[0])...)
	}
	if len(l) != 2 || !slices.Contains(l, client.GroupItem{Room: 1, Status: client.Failed, Reason: "worker_lost"}) {
		t.Errorf("%+v", l)
	}
	waited := make(chan error)
	go func() { waited <- rooms[1][1].WaitReusable(ctx) }()
	for i, c := range rs {
		apply(t, c, l)
		if r := rooms[i][1]; !r.Reusable() {
			t.Errorf("rank %d: not reusable after the list said %v", i, l)
		}
	}
	if err := <-waited; err != nil {
		t.Error(err)
	}
	if r := rooms[1][2]; r.Reusable() || r.Poll().Terminal() {
		t.Error("room 2 is not at its end on rank 1: its own engine still has the pages")
	}
	if rooms[1][0].Reusable() {
		t.Error("room 0 was given up without the list")
	}
	set(0, 0, sm.Succeeded, sm.Quiet, sm.Success)
	if l = list(t, rs[0]); !reflect.DeepEqual(l, []client.GroupItem{{Room: 0, Status: client.Success}}) {
		t.Errorf("%+v", l)
	}
	apply(t, rs[0], l)
	if ch := apply(t, rs[1], l); ch[0].Opened != rooms[1][0] || ch[0].Status != client.Success || ch[0].Opened.Poll() != client.Failed || !ch[0].Opened.Reusable() {
		t.Errorf("%+v", ch)
	}
	for i := range rs {
		for _, r := range rooms[i][:2] {
			if err := r.Release(ctx); err != nil {
				t.Error(err)
			}
		}
	}
}

// TestGroupListNamesRefusedOpens: a room that rank 0 did not get is on the list, since the other ranks may have
// theirs and wait for it; one that the list ended before a rank opened it does not keep that rank's pages.
func TestGroupListNamesRefusedOpens(t *testing.T) {
	e := workertest.Start(t, &workertest.Engine{})
	rs := ranks(t, e, client.Destination, 2)
	for rank, c := range rs {
		for room := range int64(8) {
			open(t, c, room)
		}
		_, err := c.Open(within(t), client.OpenOptions{Room: 8, PeerGroup: "p", Attempt: 3}) // all slots are taken
		if err == nil {
			t.Errorf("rank %d has a ninth slot", rank)
		}
	}
	l := list(t, rs[0])
	if want := []client.GroupItem{{Room: 8, Attempt: 3, Status: client.Failed, Reason: "limit"}}; !reflect.DeepEqual(l, want) {
		t.Errorf("%+v, want %+v", l, want)
	}
	if ch := apply(t, rs[1], l); ch[0].Opened != nil {
		t.Errorf("%+v", ch)
	}
	others := ranks(t, e, client.Destination, 2)
	var ended *client.EndedError
	if _, err := others[0].Open(within(t), client.OpenOptions{Room: workertest.EndedRoom, PeerGroup: "p"}); !errors.As(err, &ended) {
		t.Error(err)
	}
	if l = list(t, others[0]); !reflect.DeepEqual(l, []client.GroupItem{{Room: workertest.EndedRoom, Status: client.Failed, Reason: "peer_aborted"}}) {
		t.Errorf("%+v", l)
	}

	late := others[1]
	apply(t, late, []client.GroupItem{{Room: 1, Status: client.Failed, Reason: "aborted"}, {Room: 2, Status: client.Transferring}})
	if r := open(t, late, 1); !r.Reusable() {
		t.Error("the list had ended it before")
	}
	if r := open(t, late, 2); r.Reusable() {
		t.Error("the list had not ended it")
	}
}

// TestGroupListOutlivesTheEngine: when an engine is lost, rank 0 lists what it had, and another rank's rooms are
// what the list says, also on the session that follows.
func TestGroupListOutlivesTheEngine(t *testing.T) {
	sock := socketPath(t)
	engine := spawn(t, sock)
	var rs [2]*client.Client
	for rank := range rs {
		rs[rank] = engine.client(t, client.Options{Role: client.Destination, Rank: rank, Size: 2, GroupList: true})
		for room := range int64(3) {
			open(t, rs[rank], room)
		}
	}
	left := open(t, rs[1], 7)
	engine.kill()
	lost := []client.GroupItem{{Room: 0, Status: client.Failed, Reason: "engine_lost"}, {Room: 1, Status: client.Failed, Reason: "engine_lost"}, {Room: 2, Status: client.Failed, Reason: "engine_lost"}}
	for _, c := range rs {
		<-c.Done()
	}
	spawn(t, sock)
	var next [2]*client.Client
	for rank, c := range rs {
		var err error
		if next[rank], err = c.Redial(within(t)); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { next[rank].Close() })
	}
	r := open(t, next[0], 9)
	if l := list(t, next[0]); !reflect.DeepEqual(l, lost) {
		t.Errorf("%+v, want %+v", l, lost)
	}
	if l, err := next[0].PollGroup(); len(l) != 0 || err != nil {
		t.Errorf("again: %+v, %v", l, err)
	}
	if r.Reusable() {
		t.Error("the room of the new session has not ended")
	}
	if left.Reusable() || left.Poll() != client.Failed {
		t.Error("a room that the list has not ended was given up with the engine")
	}
	for i, ch := range apply(t, next[1], append(lost[:2:2], client.GroupItem{Room: 2, Status: client.Success})) {
		if ch.Opened == nil || ch.Opened.ID() != int64(i) || !ch.Opened.Reusable() {
			t.Errorf("%+v", ch)
		}
	}
	if end, err := next[1].EndGroup(); err != nil || len(end) != 1 || end[0].Opened != left || end[0].Status != client.Failed || end[0].Reason != client.OutcomeUnknown {
		t.Errorf("%+v", end)
	}
	if !left.Reusable() {
		t.Error("rank 0 is gone, and the pages are still kept")
	}
	if end, err := next[1].EndGroup(); err != nil || len(end) != 0 {
		t.Errorf("twice: %+v", end)
	}
}

// TestGroupListIsForItsRanks: calls that do not fit the rank are refused, and without the option nothing is kept.
func TestGroupListIsForItsRanks(t *testing.T) {
	e := workertest.Start(t, &workertest.Engine{})
	rs := ranks(t, e, client.Destination, 2)
	plain := dial(t, e, client.Options{Role: client.Destination})
	for i, c := range []*client.Client{rs[1], plain} {
		if _, err := c.PollGroup(); !errors.Is(err, client.ErrGroupList) {
			t.Errorf("%d: %v", i, err)
		}
	}
	if _, err := plain.ApplyGroup(nil); !errors.Is(err, client.ErrGroupList) {
		t.Error(err)
	}
	for i, c := range []*client.Client{rs[0], plain} {
		if _, err := c.EndGroup(); !errors.Is(err, client.ErrGroupList) {
			t.Errorf("%d: %v", i, err)
		}
	}
	if !open(t, plain, 1).Reusable() {
		t.Error("kept without the option")
	}
	src := ranks(t, e, client.Source, 2)
	for _, c := range src {
		r := open(t, c, 5) // a source's pages are only read
		if !r.Reusable() {
			t.Error("a source's pages are kept")
		}
		if err := r.Abort(within(t)); err != nil {
			t.Fatal(err)
		}
		if err := r.Release(within(t)); err != nil {
			t.Fatal(err)
		}
	}
	// Released before it was listed: its reason went with it.
	l := list(t, src[0])
	if len(l) != 1 || l[0].Room != 5 || l[0].Status != client.Failed {
		t.Errorf("%+v", l)
	}
}

// TestGroupListAppliedTwiceChangesNothing: a verdict that was applied stays, and a list that arrives twice says
// nothing new, whether the room is open here, was, or never has been.
func TestGroupListAppliedTwiceChangesNothing(t *testing.T) {
	e := workertest.Start(t, &workertest.Engine{})
	rs := ranks(t, e, client.Destination, 2)
	c := rs[1]
	changes := func(want int, items ...client.GroupItem) []client.GroupChange {
		t.Helper()
		out, err := c.ApplyGroup(items)
		if err != nil || len(out) != want {
			t.Fatalf("%v, %v, want %d changes of %v", out, err, want, items)
		}
		return out
	}
	r := open(t, c, 1)
	first := []client.GroupItem{{Room: 1, Status: client.Transferring}, {Room: 2, Status: client.WaitingForInput}}
	changes(2, first...)
	changes(0, first...)
	ended := []client.GroupItem{{Room: 1, Status: client.Failed, Reason: "aborted"}, {Room: 2, Status: client.Failed, Reason: "aborted"}}
	if ch := changes(2, append(ended, ended...)...); ch[0].Opened != r || ch[1].Opened != nil {
		t.Errorf("%+v", ch)
	}
	changes(0, ended...)
	changes(0, first...)
	success := []client.GroupItem{{Room: 1, Status: client.Success}, {Room: 2, Status: client.Success}}
	changes(0, success...)
	if !open(t, c, 2).Reusable() {
		t.Error("the list had ended it before")
	}
	changes(0, success...)
	changes(1, client.GroupItem{Room: 2, Attempt: 1, Status: client.Success})

	open(t, c, 3)
	if end, err := c.EndGroup(); err != nil || len(end) != 1 {
		t.Errorf("%+v, %v", end, err)
	}
	changes(0, client.GroupItem{Room: 3, Status: client.Success})

	if err := r.Abort(within(t)); err != nil {
		t.Fatal(err)
	}
	if err := r.Release(within(t)); err != nil {
		t.Fatal(err)
	}
	changes(0, success...) // released, and the verdict forgotten
	again := open(t, c, 1) // another open of a number that was in use here is another room
	if again.Reusable() {
		t.Error("the list has not ended the second room")
	}
	if ch := changes(1, success[0]); ch[0].Opened != again {
		t.Errorf("%+v", ch)
	}
}

// TestGroupListRefusesBadItems: by item and field, and nothing of the list is applied.
func TestGroupListRefusesBadItems(t *testing.T) {
	e := workertest.Start(t, &workertest.Engine{})
	c := ranks(t, e, client.Destination, 2)[1]
	r := open(t, c, 1)
	for _, bad := range []struct {
		item client.GroupItem
		want string
	}{
		{client.GroupItem{Room: -1}, "list[1].room: -1 is negative"},
		{client.GroupItem{Attempt: -1}, "list[1].attempt: -1 is negative"},
		{client.GroupItem{Status: 99}, "list[1].status: 99 is no status, want 0 to 4"},
	} {
		if _, err := c.ApplyGroup([]client.GroupItem{{Room: 1, Status: client.Failed}, bad.item}); err == nil || err.Error() != bad.want {
			t.Errorf("%v, want %s", err, bad.want)
		}
	}
	if r.Reusable() {
		t.Error("the list was applied in part")
	}
}

// BenchmarkPollGroup: a tick without news, and one with a change among as many rooms as the name says.
func BenchmarkPollGroup(b *testing.B) {
	for _, n := range []int{1, 1000} {
		for _, news := range []bool{false, true} {
			b.Run(fmt.Sprintf("rooms=%d/news=%t", n, news), func(b *testing.B) {
				e := workertest.Start(b, &workertest.Engine{})
				c, err := client.Dial(within(b), client.Options{Socket: e.Config.Socket, Group: "g", Role: client.Source, Size: 1, Layout: layout, GroupList: true})
				if err != nil {
					b.Fatal(err)
				}
				defer c.Close()
				for i := range n {
					if _, err := c.Open(context.Background(), client.OpenOptions{Room: int64(i)}); err != nil {
						b.Fatal(err)
					}
				}
				sessions, _ := e.Sessions()
				for i := 0; b.Loop(); i++ {
					if news {
						b.StopTimer()
						e.Set(sessions[0].ID, 0, sm.WaitingForInput+sm.KVPoll(i%2), sm.NoPages, sm.None)
						b.StartTimer()
					}
					if l, _ := c.PollGroup(); len(l) > 1 {
						b.Fatal(l)
					}
				}
			})
		}
	}
}
