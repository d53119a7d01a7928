package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

// GroupItem is one line of the list by which all ranks of a group act: the room has reached the status. Rank 0
// makes it (PollGroup), and broadcasts it to the other ranks with the batch, in whatever way the ranks talk
// to each other anyway.
type GroupItem struct {
	Room    int64  `json:"room"`
	Attempt int64  `json:"attempt,omitempty"`
	Status  Status `json:"status"`
	// Reason of Failed, as rank 0 knows it; empty when its engine did not tell within two seconds.
	Reason Reason `json:"reason,omitempty"`
}

// GroupChange is an item with this rank's room.
type GroupChange struct {
	GroupItem
	Opened *Room // nil: this rank has not opened that attempt (yet), or its engine refused it
}

// OutcomeUnknown is what EndGroup says of rooms that rank 0 can say no more about.
const OutcomeUnknown Reason = "outcome_unknown"

// ErrGroupList is returned where Options.GroupList does not allow a call.
var ErrGroupList = errors.New("not by this rank's Options.GroupList")

const (
	reasonTimeout = 2 * time.Second // for rank 0's engine to say why a room failed
	maxSaid       = 1 << 16         // rooms whose last item is remembered when they are not open here; the oldest are forgotten
)

type groupKey struct{ room, attempt int64 }

// said is the last item of an attempt.
type said struct {
	status Status
	left   bool // its room was open here and is gone: an open of the same attempt is another one
}

// groupList is what a rank knows of the list. It outlives the session: Redial hands it on.
type groupList struct {
	lists bool // this is rank 0
	mu    sync.Mutex
	rooms map[groupKey]*Room // asked for, and not released

	// The last item by key, also of rooms that are not open here. Two generations, so that the oldest go first.
	said, saidBefore map[groupKey]said

	// Rank 0.
	cur   cursor
	fresh []*Room     // to be looked at whatever the page says
	ready []GroupItem // failed, with their reasons
	lost  bool        // the latch was delivered
}

func newGroupList(rank int) *groupList {
	return &groupList{lists: rank == 0, rooms: make(map[groupKey]*Room), said: make(map[groupKey]said)}
}

// opening makes a room known before its open is sent: the list may name it before the answer is here.
func (g *groupList) opening(r *Room) {
	g.mu.Lock()
	defer g.mu.Unlock()
	k := groupKey{r.id, r.attempt}
	old := g.rooms[k]
	if old != nil && old.leaving.Load() == 0 {
		return // the same attempt twice: the engine refuses this one
	}
	g.rooms[k] = r
	switch last, ok := g.last(k); {
	case ok && (last.left || old != nil):
		delete(g.said, k)
		delete(g.saidBefore, k)
	case ok:
		r.applied = last.status
	}
	r.kept.Store(r.c.options.Role == Destination && !r.applied.Terminal())
}

// opened: the engine has answered with a slot.
func (g *groupList) opened(r *Room) {
	g.mu.Lock()
	r.open = true
	g.look(r)
	g.mu.Unlock()
}

// refused: the open has ended without a room. Rank 0 lists it all the same: the other ranks may have theirs.
func (g *groupList) refused(r *Room, why error) {
	item := GroupItem{Room: r.id, Attempt: r.attempt, Status: Failed}
	var ended *EndedError
	var e *Error
	switch {
	case errors.As(why, &ended):
		item.Reason = ended.Reason
		if ended.Reason == "success" {
			item.Status = Success
		}
	case errors.As(why, &e):
		item.Reason = Reason(e.Code)
	default:
		item.Reason = ReasonEngineLost
	}
	g.mu.Lock()
	if k := (groupKey{r.id, r.attempt}); g.rooms[k] == r {
		delete(g.rooms, k)
		g.list(item)
	}
	g.mu.Unlock()
	r.unkeep()
}

// list puts an item that no look at the page finds on the next list.
func (g *groupList) list(item GroupItem) {
	if g.lists {
		g.ready = append(g.ready, item)
	}
}

// look makes the next list look at a room, whatever the page says.
func (g *groupList) look(r *Room) {
	if g.lists {
		g.fresh = append(g.fresh, r)
	}
}

// unsent: the open was not sent at all, so no engine knows of it.
func (g *groupList) unsent(r *Room) {
	g.mu.Lock()
	if k := (groupKey{r.id, r.attempt}); g.rooms[k] == r {
		delete(g.rooms, k)
	}
	g.mu.Unlock()
	r.unkeep()
}

// released: the room has left its slot.
func (g *groupList) released(r *Room) {
	g.mu.Lock()
	if g.leave(r) {
		if !r.listed.Terminal() { // released sooner than it was listed, as a source may
			g.look(r)
		}
	}
	g.mu.Unlock()
}

// leave forgets a room that was open here. mu is held.
func (g *groupList) leave(r *Room) bool {
	k := groupKey{r.id, r.attempt}
	if g.rooms[k] != r {
		return false
	}
	delete(g.rooms, k)
	g.say(k, said{r.applied, true})
	return true
}

// last returns the last item of an attempt. mu is held, as for say.
func (g *groupList) last(k groupKey) (said, bool) {
	if s, ok := g.said[k]; ok {
		return s, true
	}
	s, ok := g.saidBefore[k]
	return s, ok
}

func (g *groupList) say(k groupKey, s said) {
	if len(g.said) >= maxSaid/2 {
		g.said, g.saidBefore = make(map[groupKey]said), g.said
	}
	g.said[k] = s
}

// unkeep lets the pages follow their residency.
func (r *Room) unkeep() {
	if r.kept.CompareAndSwap(true, false) {
		r.changed.broadcast()
	}
}

// PollGroup returns, on rank 0, what all ranks of the group act on in this tick: rooms whose status is not what
// the last list said. It must reach every rank, in order; each rank, rank 0 too, gives it to ApplyGroup. One
// consumer at a time. It waits for nobody: without news it is two memory reads.
//
// Ranks that each polled their own rooms would see a verdict in different ticks and run different batches.
// The list also names rooms that this rank's engine refused to open, and all that had not ended when the
// engine was lost.
func (c *Client) PollGroup() ([]GroupItem, error) {
	g := c.group
	if g == nil || !g.lists {
		return nil, fmt.Errorf("%w: PollGroup is for rank 0 with GroupList, this is rank %d with GroupList %t", ErrGroupList, c.options.Rank, g != nil)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	var out []GroupItem
	look := func(r *Room) {
		if r.listed.Terminal() {
			return
		}
		st := Failed // what was asked for and never answered, when the engine was lost
		if r.open {
			st = r.Poll()
		}
		if st == r.listed {
			return
		}
		r.listed = st
		if st == Failed {
			g.explain(r)
			return
		}
		out = append(out, GroupItem{Room: r.id, Attempt: r.attempt, Status: st})
	}
	slot := func(slot int32) {
		if r := c.rooms[slot].Load(); r != nil && g.rooms[groupKey{r.id, r.attempt}] == r {
			look(r)
		}
	}
	switch {
	case c.lost.Load():
		if !g.lost {
			g.lost = true
			for _, r := range g.sorted() {
				look(r)
			}
		}
	case !g.cur.next(c.page, slot):
		for i := range c.rooms {
			slot(int32(i))
		}
	}
	fresh := g.fresh
	g.fresh = nil
	for _, r := range fresh {
		look(r)
	}
	out = append(out, g.ready...)
	g.ready = nil
	return out, nil
}

// sorted returns the rooms in the order of their numbers.
func (g *groupList) sorted() []*Room {
	out := make([]*Room, 0, len(g.rooms))
	for _, r := range g.rooms {
		out = append(out, r)
	}
	slices.SortFunc(out, func(a, b *Room) int { return cmp.Or(cmp.Compare(a.id, b.id), cmp.Compare(a.attempt, b.attempt)) })
	return out
}

// explain lists a failed room once its reason is known: the ranks report the same one. mu is held.
func (g *groupList) explain(r *Room) {
	item := GroupItem{Room: r.id, Attempt: r.attempt, Status: Failed}
	if !r.open {
		item.Reason = ReasonEngineLost
		g.list(item)
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), reasonTimeout)
	ask := func() {
		defer cancel()
		if f, err := r.Failure(ctx); err == nil {
			item.Reason = f.Reason
		}
	}
	if r.c.lost.Load() || r.released() || !r.c.spawn(func() {
		ask()
		g.mu.Lock()
		g.list(item)
		g.mu.Unlock()
		r.c.events.broadcast()
	}) {
		ask() // answered by the client itself
		g.list(item)
	}
}

// spawn runs fn on a goroutine that Close waits for; false when the session is over.
func (c *Client) spawn(fn func()) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.shut {
		return false
	}
	c.wg.Add(1)
	go func() {
		defer c.wg.Done()
		fn()
	}()
	return true
}

// ApplyGroup takes rank 0's list of this tick, on every rank of the group, and returns it with this rank's
// rooms. That, and not Poll or Changes, is what the rank's scheduler acts on: the same on all ranks. Where
// the two differ the list is right:
//
//   - Success holds although the own engine has not said so yet, or never will (outcome_unknown,
//     engine_lost): the judge counted every byte of every rank, so the pages are whole.
//   - Failed holds although the own engine may have said Success.
//
// The pages of a destination room are the room's until a list has ended it, whatever the own engine says:
// before, Reusable is false and Release is ErrNotReusable. After Success they are the request's; when it
// needs them no more, and at once after Failed, WaitReusable and Release as ever. An own engine that has not
// ended the room by then does so by the same verdict, or by its clocks.
//
// What the list has ended stays so: later items of that room and attempt are left out of what is returned, as is
// an item that says nothing new, so the same list may be applied twice. Open the room again under a new attempt.
// An error names the item and field that is wrong, and then nothing of the list was applied.
func (c *Client) ApplyGroup(list []GroupItem) ([]GroupChange, error) {
	g := c.group
	if g == nil {
		return nil, fmt.Errorf("%w: ApplyGroup needs it", ErrGroupList)
	}
	for i, item := range list {
		if err := item.check(); err != nil {
			return nil, fmt.Errorf("list[%d].%w", i, err)
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	out := make([]GroupChange, 0, len(list))
	for _, item := range list {
		k := groupKey{item.Room, item.Attempt}
		r := g.rooms[k]
		last, ok := g.last(k)
		switch {
		case r != nil:
			last.status = r.applied
		case !ok:
			last.status = Bootstrapping
		}
		if last.status.Terminal() || !item.Status.Terminal() && item.Status <= last.status {
			continue // a list that was applied before
		}
		ch := GroupChange{GroupItem: item}
		if r != nil && r.open {
			ch.Opened = r
		}
		out = append(out, ch)
		g.say(k, said{item.Status, last.left})
		if r == nil {
			continue
		}
		r.applied = item.Status
		if item.Status.Terminal() {
			r.unkeep()
			if r.c.lost.Load() { // nobody releases it
				g.leave(r)
			}
		}
	}
	return out, nil
}

// check says what is wrong with an item as another rank may have sent it, beginning with the field.
func (i GroupItem) check() error {
	switch {
	case i.Room < 0:
		return fmt.Errorf("room: %d is negative", i.Room)
	case i.Attempt < 0:
		return fmt.Errorf("attempt: %d is negative", i.Attempt)
	case i.Status > Success:
		return fmt.Errorf("status: %d is no status, want 0 to %d", uint8(i.Status), uint8(Success))
	}
	return nil
}

// EndGroup says, on a rank other than 0, that rank 0 is gone and its list with it: rooms that it has not ended
// are Failed (outcome_unknown) for this rank, whatever their own status, and their pages follow the residency
// again. It returns them by number, and is the only way to give such pages up.
func (c *Client) EndGroup() ([]GroupChange, error) {
	g := c.group
	if g == nil || g.lists {
		return nil, fmt.Errorf("%w: EndGroup is for ranks other than 0 with GroupList, this is rank %d with GroupList %t", ErrGroupList, c.options.Rank, g != nil)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	var out []GroupChange
	for _, r := range g.sorted() {
		if r.kept.Load() {
			r.unkeep()
			ch := GroupChange{GroupItem: GroupItem{r.id, r.attempt, Failed, OutcomeUnknown}}
			r.applied = Failed
			g.say(groupKey{r.id, r.attempt}, said{status: Failed})
			if r.open {
				ch.Opened = r
			}
			out = append(out, ch)
		}
	}
	return out, nil
}

// follow hands the list to the session that comes after a loss.
func (g *groupList) follow(c *Client) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, r := range g.sorted() {
		if r.applied.Terminal() { // nobody releases it
			g.leave(r)
		} else if !g.lost { // nobody polled since the loss
			g.look(r)
		}
	}
	g.lost = false
	g.cur.n = c.page.counter()
	c.group = g
}
