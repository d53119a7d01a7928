package demo

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"
)

// order is one line of what a router tells a worker on its standard input: play an attempt of a room of
// the schedule, or abort it. The end of the input means that no more rooms come.
type order struct {
	Room    int64 `json:"room"`
	Attempt int64 `json:"attempt,omitempty"`
	Abort   bool  `json:"abort,omitempty"`
}

func (o order) id() attemptID { return attemptID{o.Room, o.Attempt} }

// maxAttempts bounds how often a room is tried.
const maxAttempts = 4

// turn is an attempt that the worker is to play.
type turn struct {
	*Room
	attempt int64
}

func (t turn) id() attemptID { return attemptID{t.ID, t.attempt} }

// scheduled has the worker play every room once, each at its moment.
func (w *worker) scheduled(ctx context.Context) <-chan turn {
	turns := make(chan turn)
	go func() {
		defer close(turns)
		for i := range w.plan.Rooms {
			r := &w.plan.Rooms[i]
			if w.sleepUntil(ctx, w.start.Add(time.Duration(r.At)*time.Microsecond)) != nil {
				return
			}
			select {
			case turns <- turn{Room: r}:
			case <-w.closing:
				return
			case <-ctx.Done():
				return
			}
		}
	}()
	return turns
}

// ordered has the worker play what it reads from in, until that ends. The reader is left behind when the
// worker ends first.
func (w *worker) ordered(ctx context.Context, in io.Reader) <-chan turn {
	turns := make(chan turn, maxAttempts*len(w.plan.Rooms)) // never full: a router that sends more is wrong
	go func() {
		defer close(turns)
		if err := w.readOrders(ctx, in, turns); err != nil {
			w.close(err)
		}
	}()
	return turns
}

func (w *worker) readOrders(ctx context.Context, in io.Reader, turns chan<- turn) error {
	rooms := make(map[int64]*Room, len(w.plan.Rooms))
	for i := range w.plan.Rooms {
		rooms[w.plan.Rooms[i].ID] = &w.plan.Rooms[i]
	}
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		var o order
		if err := json.Unmarshal(lines.Bytes(), &o); err != nil {
			return fmt.Errorf("an order that is no JSON object: %.80q", lines.Text())
		}
		r := rooms[o.Room]
		switch {
		case r == nil:
			return fmt.Errorf("an order for room %d, which the schedule does not have", o.Room)
		case o.Abort:
			w.abortAttempt(ctx, o.id())
			continue
		}
		select {
		case turns <- turn{r, o.Attempt}:
		default:
			return errors.New("more orders than rooms and attempts")
		}
	}
	return lines.Err()
}

// abortAttempt aborts an attempt as soon as it is open.
func (w *worker) abortAttempt(ctx context.Context, id attemptID) {
	w.mu.Lock()
	w.withdrawn[id] = true
	room := w.rooms[id]
	w.mu.Unlock()
	if room != nil {
		go func() { _ = room.Abort(ctx) }() // it has ended, or the engine is lost: its verdict is read anyhow
	}
}
