package netfault

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	client "github.com/terminus-kv/terminus/clients/go"
)

// The sides of a room: a is the prefill host, b the decode host.
const (
	source      = 0
	destination = 1
)

// Sizes of the workers' memory and of their rooms.
const (
	tensorBytes = 4 << 10 // of a page, in each of its two tensors
	poolPages   = 4096
	mostPages   = 24 // of a room
	lanesAtOnce = 16 // rooms under way, more or less
	canary      = 0xc5
)

// worker is an inference process of one side. It lives in this process, which is on neither host.
type worker struct {
	*client.Client
	side   int
	region *client.Region
	pool   int

	mu    sync.Mutex
	free  []int32 // taken from the front, so that a page rests as long as it can
	wrong []string
}

func dial(t *testing.T, e *engine, side int) *worker {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	c, err := client.Dial(ctx, client.Options{
		Socket: e.worker, Group: group(side), Role: [2]client.Role{client.Source, client.Destination}[side], Size: 1, Slots: 4096, Notify: true,
		Layout: client.Layout{DType: "bf16", Layers: 1, KVHeads: 1, HeadDim: 128, PageTokens: 16, Kind: "mha"},
	})
	must(t, err)
	t.Cleanup(func() { c.Close() })
	// The last bytes are the client's own.
	region, err := c.CreateRegion(ctx, 2*poolPages*tensorBytes+4096)
	must(t, err)
	t.Cleanup(func() { region.Close() })
	pool, err := c.AddPool(ctx, client.Pool{Pages: poolPages, Tensors: []client.Tensor{
		{Region: region, PageBytes: tensorBytes}, {Region: region, Offset: poolPages * tensorBytes, PageBytes: tensorBytes},
	}})
	must(t, err)
	w := &worker{Client: c, side: side, region: region, pool: pool}
	for id := range int32(poolPages) {
		w.paint(id)
		w.free = append(w.free, id)
	}
	return w
}

func group(side int) string { return [2]string{"prefill", "decode"}[side] }

func (w *worker) tensors(id int32) [2][]byte {
	b, at := w.region.Bytes(), int(id)*tensorBytes
	return [2][]byte{b[at : at+tensorBytes], b[poolPages*tensorBytes+at : poolPages*tensorBytes+at+tensorBytes]}
}

var painted = bytes.Repeat([]byte{canary}, tensorBytes)

func (w *worker) paint(id int32) {
	for _, b := range w.tensors(id) {
		copy(b, painted)
	}
}

// intact notes a page that was written while nobody held it. w.mu is held.
func (w *worker) intact(id int32) {
	for _, b := range w.tensors(id) {
		if !bytes.Equal(b, painted) {
			w.wrong = append(w.wrong, fmt.Sprintf("page %d of the %s was written after it was released", id, group(w.side)))
			return
		}
	}
}

// take hands out n pages; nil: there are not as many.
func (w *worker) take(n int) []int32 {
	w.mu.Lock()
	defer w.mu.Unlock()
	if n > len(w.free) {
		return nil
	}
	ids := slices.Clone(w.free[:n])
	w.free = w.free[n:]
	for _, id := range ids {
		w.intact(id)
	}
	return ids
}

func (w *worker) give(ids []int32) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, id := range ids {
		w.paint(id)
	}
	w.free = append(w.free, ids...)
}

// audit returns what was wrong with the pages up to now.
func (w *worker) audit() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, id := range w.free {
		w.intact(id)
	}
	if n := poolPages - len(w.free); n > 0 {
		w.wrong = append(w.wrong, fmt.Sprintf("%d pages of the %s did not come back", n, group(w.side)))
	}
	return w.wrong
}

// content is what one tensor of a page holds.
func content(b []byte, room int64, page, tensor int) {
	x := uint64(room)<<20 ^ uint64(page)<<1 ^ uint64(tensor)
	for at := 0; at < len(b); at += 8 {
		x += 0x9e3779b97f4a7c15
		y := (x ^ x>>30) * 0xbf58476d1ce4e5b9
		binary.LittleEndian.PutUint64(b[at:], y^y>>27)
	}
}

// end is how one side of a room ended.
type end struct {
	reason string // "success" of one that did; "": not opened
	at     time.Time
	detail string
}

// outcome is a room that was played.
type outcome struct {
	room   int64
	opened time.Time
	ends   [2]end
	// withdrawn: one side could not open, so the router aborted the other.
	withdrawn bool
	refused   string // why
}

// verdict is when both sides had ended.
func (o *outcome) verdict() time.Time {
	if o.ends[0].at.After(o.ends[1].at) {
		return o.ends[0].at
	}
	return o.ends[1].at
}

func (o *outcome) success() bool {
	return o.ends[source].reason == "success" && o.ends[destination].reason == "success"
}

// traffic plays rooms, lane by lane, until it is stopped.
type traffic struct {
	workers  [2]*worker
	engines  [2]*engine
	terminal time.Duration // bound of every wait for a status
	reusable time.Duration // and for pages
	stop     chan struct{}
	wg       sync.WaitGroup

	mu       sync.Mutex
	next     int64
	outcomes []*outcome
	wrong    []string
	bytes    int64 // of rooms that succeeded
}

func newTraffic(t *testing.T, engines [2]*engine) *traffic {
	tr := &traffic{engines: engines, stop: make(chan struct{})}
	for side := range engines {
		tr.workers[side] = dial(t, engines[side], side)
	}
	return tr
}

func (tr *traffic) start(seed uint64) {
	tr.stop = make(chan struct{})
	for l := range lanesAtOnce {
		tr.wg.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(l)))
			for {
				o := tr.play(rng)
				pause := time.Duration(50+rng.IntN(150)) * time.Millisecond
				if o != nil && o.withdrawn {
					pause = 100 * time.Millisecond
				}
				select {
				case <-tr.stop:
					return
				case <-time.After(pause):
				}
			}
		})
	}
}

// finish lets the rooms that are open end, and their pages come back.
func (tr *traffic) finish() []*outcome {
	close(tr.stop)
	tr.wg.Wait()
	tr.mu.Lock()
	defer tr.mu.Unlock()
	list := tr.outcomes
	tr.outcomes = nil
	return list
}

func (tr *traffic) fault(format string, args ...any) {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	tr.wrong = append(tr.wrong, fmt.Sprintf(format, args...))
}

// succeeded reports whether a room that was opened after a moment has succeeded, and when it was opened.
func (tr *traffic) succeeded(after time.Time) (opened time.Time, ok bool) {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	for _, o := range tr.outcomes {
		if o.opened.After(after) && o.success() && (!ok || o.opened.Before(opened)) {
			opened, ok = o.opened, true
		}
	}
	return opened, ok
}

// play is the life of one room, as a router and two workers see it. It returns when both sides have a verdict; the
// pages come back later.
func (tr *traffic) play(rng *rand.Rand) *outcome {
	n := 1 + rng.IntN(mostPages)
	var pages [2][]int32
	for side, w := range tr.workers {
		if pages[side] = w.take(n); pages[side] == nil {
			if side == 1 {
				tr.workers[0].give(pages[0])
			}
			return nil // quarantined ones come back when the fault is over
		}
	}
	tr.mu.Lock()
	tr.next++
	o := &outcome{room: tr.next, opened: time.Now()}
	tr.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), tr.terminal+5*time.Second)
	defer cancel()

	var rooms [2]*client.Room
	for _, side := range rng.Perm(2) {
		var err error
		rooms[side], err = tr.workers[side].Open(ctx, client.OpenOptions{Room: o.room, PeerGroup: group(1 - side)})
		var ended *client.EndedError
		var refused *client.Error
		switch {
		case errors.As(err, &ended):
			o.ends[side] = end{reason: string(ended.Reason), at: time.Now()}
		case errors.As(err, &refused) && refused.Code == "refused":
			o.withdrawn, o.refused = true, refused.Message
		case err != nil:
			tr.fault("room %d: open at the %s: %v", o.room, group(side), err)
			o.withdrawn = true
		}
		if rooms[side] == nil {
			break
		}
	}
	if rooms[source] == nil || rooms[destination] == nil {
		o.withdrawn = true
	}
	var steps sync.WaitGroup
	for side, r := range rooms {
		if r == nil {
			tr.workers[side].give(pages[side])
			continue
		}
		seed := rng.Uint64()
		steps.Go(func() {
			if err := tr.side(ctx, o, side, r, pages[side], rand.New(rand.NewPCG(seed, 1))); err != nil {
				tr.fault("room %d at the %s: %v; %s", o.room, group(side), err, tr.why(side, o.room))
			}
		})
	}
	steps.Wait()
	tr.mu.Lock()
	tr.outcomes = append(tr.outcomes, o)
	if o.success() {
		tr.bytes += int64(n) * 2 * tensorBytes
	}
	tr.mu.Unlock()
	return o
}

func (tr *traffic) why(side int, room int64) string {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	text, err := tr.engines[side].admin.Why(ctx, room)
	if err != nil {
		return err.Error()
	}
	return strings.Join(text, "; ")
}

// side plays one side up to its verdict. The error is one that no fault of a network excuses.
func (tr *traffic) side(ctx context.Context, o *outcome, side int, r *client.Room, pages []int32, rng *rand.Rand) error {
	w := tr.workers[side]
	var err error
	switch {
	case o.withdrawn:
		err = r.Abort(ctx)
	case side == source:
		err = tr.send(ctx, o, r, pages, rng)
	default:
		err = r.Register(ctx, client.RegisterPart{Pool: w.pool, Pages: pages})
	}
	var ended *client.EndedError
	if err != nil && !errors.As(err, &ended) {
		return err
	}
	status, err := r.WaitTerminal(ctx)
	if err != nil {
		return fmt.Errorf("no terminal status: %w", err)
	}
	e := end{reason: "success", at: time.Now()}
	if status != client.Success {
		f, err := r.Failure(ctx)
		if err != nil {
			return err
		}
		e.reason, e.detail = string(f.Reason), f.Detail
		if strings.Contains(f.Detail, "process has ended") {
			tr.fault("room %d at the %s: %s: nobody's process has", o.room, group(side), f.Detail)
		}
	} else if side == destination {
		want := make([]byte, tensorBytes)
		for k, id := range pages {
			for t, got := range w.tensors(id) {
				if content(want, o.room, k, t); !bytes.Equal(got, want) {
					tr.fault("room %d: page %d holds other bytes than were sent", o.room, k)
				}
			}
		}
		if aux, err := r.Aux(ctx); err != nil || !bytes.Equal(aux, auxOf(o.room)) {
			tr.fault("room %d: aux is %x, %v", o.room, aux, err)
		}
	}
	o.ends[side] = e
	tr.wg.Go(func() {
		if err := tr.reclaim(r); err != nil {
			tr.fault("room %d at the %s: pages of a room that ended as %s: %v; %s", o.room, group(side), e.reason, err, tr.why(side, o.room))
			return
		}
		w.give(pages)
	})
	return nil
}

func auxOf(room int64) []byte {
	return bytes.Repeat(binary.LittleEndian.AppendUint64(nil, uint64(room)), 8)
}

// reclaim waits until nobody can touch the room's pages.
func (tr *traffic) reclaim(r *client.Room) error {
	ctx, cancel := context.WithTimeout(context.Background(), tr.reusable)
	defer cancel()
	if err := r.WaitReusable(ctx); err != nil {
		return err
	}
	return r.Release(ctx)
}

// send computes and sends the room's pages in up to four chunks.
func (tr *traffic) send(ctx context.Context, o *outcome, r *client.Room, pages []int32, rng *rand.Rand) error {
	w := tr.workers[source]
	for at := 0; at < len(pages); {
		n := min(1+rng.IntN(len(pages)), len(pages)-at)
		if at > 0 || rng.IntN(2) == 0 {
			time.Sleep(time.Duration(rng.IntN(80)) * time.Millisecond)
		}
		for k := at; k < at+n; k++ {
			for t, b := range w.tensors(pages[k]) {
				content(b, o.room, k, t)
			}
		}
		c := client.Chunk{Parts: []client.Part{{Pool: w.pool, Pages: pages[at : at+n]}}}
		if at += n; at == len(pages) {
			c.Last, c.Aux = true, auxOf(o.room)
		}
		if err := r.Send(ctx, c); err != nil {
			return err
		}
	}
	return nil
}
