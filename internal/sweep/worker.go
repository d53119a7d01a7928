package sweep

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"runtime"
	"sync"
	"time"

	client "github.com/terminus-kv/terminus/clients/go"
)

// Bounds of a worker.
const (
	dialBound  = 20 * time.Second // from its start until its memory is with the engine
	askBound   = 40 * time.Second // for one answer of the engine
	endBound   = 60 * time.Second // for the end of a room: longer than any clock of the sweep's engines
	proofBound = 40 * time.Second // from the end of a room until its pages are its worker's again
)

// order is a line of a worker's standard input.
type order struct {
	Play  []room // play these rooms, each when it is due
	Abort int64  // end this room if it is not bound: what a router does when the other side of a request is lost
	Halt  bool   // end all that are not bound, and open no more
	Check bool   // look at all pages that nobody holds
}

// report is a line of a worker's standard output.
type report struct {
	T string // ready, end (of a room), over (of a play), checked, back (with the next engine)

	Room   int64
	Status string // end: Success, Failed; Refused: it never was open
	Reason string
	Detail string
	At     int64 // end: when the worker saw it, Unix time in ns

	Faults []string // over, checked: what must not be
	Node   uint64   // ready, back: the engine's incarnation
}

// The statuses of a report.
const (
	success = "Success"
	failed  = "Failed"
	refused = "Refused"
)

// worker is one rank.
type worker struct {
	side int
	pool int
	out  *json.Encoder

	mu     sync.Mutex // all below, and out
	link   *client.Client
	old    []*client.Client // whose engines are gone
	mem    *memory
	open   map[int64]*client.Room
	gone   map[int64]bool // withdrawn
	halted bool
	faults []string
	reuse  bool // gives pages back as soon as a room has ended: the sweep must find it
}

// Worker is the whole life of a worker process.
func Worker(args []string, in io.Reader, out io.Writer) error {
	flags := flag.NewFlagSet("sweepworker", flag.ContinueOnError)
	socket := flags.String("socket", "", "the worker socket of the engine")
	side := flags.Int("side", prefill, "0: prefill, 1: decode")
	lost := flags.Duration("lost", 12*time.Second, "how long the engine may be silent")
	reuse := flags.Bool("reuse-at-end", false, "break rule R4: use pages again as soon as their room has ended")
	if err := flags.Parse(args); err != nil {
		return err
	}
	w := &worker{side: *side, out: json.NewEncoder(out), open: map[int64]*client.Room{}, gone: map[int64]bool{}, reuse: *reuse}
	ctx, cancel := context.WithTimeout(context.Background(), dialBound)
	defer cancel()
	role := [2]client.Role{client.Source, client.Destination}[*side]
	var c *client.Client
	for {
		var err error
		c, err = client.Dial(ctx, client.Options{
			Socket: *socket, Group: sides[*side], Role: role, Size: 1, Slots: 4 * roomsOfPlay, Notify: true, SuspectAfter: *lost / 6, LostAfter: *lost,
			Layout: client.Layout{DType: "bf16", Layers: tensors, KVHeads: 1, HeadDim: 64, PageTokens: 16, Kind: "mha"},
		})
		if err == nil {
			break
		}
		// The engine may not have noticed yet that the worker before this one is gone.
		var told *client.Error
		if !errors.As(err, &told) || pause(ctx, 5*time.Millisecond) != nil {
			return fmt.Errorf("dial: %w", err)
		}
	}
	w.link = c
	// One page more than the pool: the client uses the last bytes of a region for its own proof.
	region, err := c.CreateRegion(ctx, (poolPages*tensors+1)*tensorBytes)
	if err != nil {
		return fmt.Errorf("region: %w", err)
	}
	w.mem = newMemory(region.Bytes())
	pool := client.Pool{Pages: poolPages}
	for t := range tensors {
		pool.Tensors = append(pool.Tensors, client.Tensor{Region: region, Offset: int64(t * poolPages * tensorBytes), PageBytes: tensorBytes, Layer: t})
	}
	if w.pool, err = c.AddPool(ctx, pool); err != nil {
		return fmt.Errorf("pool: %w", err)
	}
	w.say(report{T: "ready", Node: c.Incarnation()})
	go w.follow()
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var o order
		if err := json.Unmarshal(lines.Bytes(), &o); err != nil {
			return fmt.Errorf("order: %w", err)
		}
		w.obey(o)
	}
	return lines.Err()
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (w *worker) say(r report) {
	w.mu.Lock()
	defer w.mu.Unlock()
	_ = w.out.Encode(r) // nobody is left to tell
}

func (w *worker) fault(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.faults = append(w.faults, sides[w.side]+" worker: "+fmt.Sprintf(format, args...))
}

// follow goes on with the next engine whenever one is lost.
func (w *worker) follow() {
	for {
		c := w.session()
		<-c.Done()
		next, err := c.Redial(context.Background()) // until there is one
		if err != nil {
			w.fault("redial: %v", err)
			return
		}
		w.mu.Lock()
		w.old, w.link = append(w.old, c), next
		w.mu.Unlock()
		w.say(report{T: "back", Node: next.Incarnation()})
	}
}

func (w *worker) session() *client.Client {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.link
}

func (w *worker) obey(o order) {
	switch {
	case o.Play != nil:
		w.mu.Lock()
		w.halted = false
		clear(w.gone)
		w.mu.Unlock()
		go w.play(o.Play)
	case o.Halt:
		w.mu.Lock()
		w.halted = true
		for _, r := range w.open {
			w.end(r)
		}
		w.mu.Unlock()
	case o.Check:
		w.mu.Lock()
		defer w.mu.Unlock()
		if n := w.mem.check(); n > 0 {
			w.faults = append(w.faults, fmt.Sprintf("%s worker: %d pages were written that nobody held", sides[w.side], n))
		}
		if n := poolPages - len(w.mem.free); n > 0 {
			w.faults = append(w.faults, fmt.Sprintf("%s worker: %d pages did not come back", sides[w.side], n))
		}
		for _, c := range w.old {
			c.Close()
		}
		if w.old != nil {
			w.old = nil
			runtime.GC() // a client's status page stays mapped as long as somebody may look at it
		}
		_ = w.out.Encode(report{T: "checked", Faults: w.faults})
		w.faults = nil
	case o.Abort != 0:
		w.mu.Lock()
		w.gone[o.Abort] = true
		if r := w.open[o.Abort]; r != nil {
			w.end(r)
		}
		w.mu.Unlock()
	}
}

// end aborts a room that is not bound. One that is has to end by itself.
func (w *worker) end(r *client.Room) {
	if r.Poll() != client.Bootstrapping {
		return
	}
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), askBound)
		defer cancel()
		_ = r.Abort(ctx) // it has ended by then, or the engine is lost: its verdict is waited for anyhow
	}()
}

func (w *worker) play(rooms []room) {
	began := time.Now()
	var all sync.WaitGroup
	for _, r := range rooms {
		all.Go(func() {
			time.Sleep(time.Until(began.Add(time.Duration(r.At) * time.Microsecond)))
			w.room(r)
		})
	}
	all.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	_ = w.out.Encode(report{T: "over", Faults: w.faults})
	w.faults = nil
}

// room plays one room from its open until its pages are back.
func (w *worker) room(r room) {
	need := r.Pages
	if w.side == decode {
		need += r.Prefix
	}
	w.mu.Lock()
	c, withdrawn := w.link, w.halted || w.gone[r.ID]
	pages, written, err := w.mem.take(need)
	w.mu.Unlock()
	if written > 0 {
		w.fault("room %d: %d pages were written before it had them", r.ID, written)
	}
	if err != nil {
		w.fault("room %d: %v", r.ID, err)
		withdrawn = true
	}
	defer func() {
		w.mu.Lock()
		w.mem.give(pages)
		w.mu.Unlock()
	}()
	if withdrawn {
		w.say(report{T: "end", Room: r.ID, Status: refused, Reason: "withdrawn", At: time.Now().UnixNano()})
		return
	}
	w.prepare(r, pages)
	ctx, cancel := context.WithTimeout(context.Background(), endBound)
	defer cancel()
	o := client.OpenOptions{Room: r.ID}
	if w.side == decode || r.ID%2 == 0 {
		o.PeerGroup = sides[1-w.side]
	}
	live, err := c.Open(ctx, o)
	if err != nil {
		status, reason := refused, err.Error()
		var ended *client.EndedError
		switch {
		case errors.As(err, &ended):
			status, reason = failed, string(ended.Reason)
		case errors.Is(err, client.ErrEngineLost):
			status, reason = failed, string(client.ReasonEngineLost)
		}
		w.say(report{T: "end", Room: r.ID, Status: status, Reason: reason, At: time.Now().UnixNano()})
		return
	}
	w.mu.Lock()
	w.open[r.ID] = live
	if w.halted || w.gone[r.ID] {
		w.end(live)
	}
	w.mu.Unlock()
	defer func() {
		w.mu.Lock()
		delete(w.open, r.ID)
		w.mu.Unlock()
	}()
	if err := w.act(ctx, live, r, pages); err != nil {
		w.fault("room %d: %v", r.ID, err)
	}
	status, err := live.WaitTerminal(ctx)
	at := time.Now().UnixNano()
	if err != nil {
		w.fault("room %d is still %v: %v", r.ID, live.Poll(), err)
		pages = nil // not ours: they count as lost
		return
	}
	e := report{T: "end", Room: r.ID, Status: failed, At: at}
	if status == client.Success {
		e.Status = success
		w.verify(ctx, live, r, pages)
	}
	if f, err := live.Failure(ctx); err == nil {
		e.Reason, e.Detail = string(f.Reason), f.Detail
	}
	w.say(e)
	if w.reuse {
		w.mu.Lock()
		w.mem.give(pages)
		w.mu.Unlock()
		pages = nil
	}
	// Not endBound: a proof may need processes that are about to be killed.
	proof, cancel := context.WithTimeout(context.Background(), proofBound)
	defer cancel()
	if err := live.WaitReusable(proof); err != nil {
		w.fault("room %d is %v and its pages are %v: %v", r.ID, status, live.Residency(), err)
		pages = nil
		return
	}
	if status == client.Success && !w.intact(r, pages) {
		w.fault("room %d: its pages were written after its end", r.ID)
	}
	if err := live.Release(proof); err != nil {
		w.fault("room %d: release: %v", r.ID, err)
	}
}

// prepare puts the KV into a room's pages: all of the source's, the prefix of the destination's.
func (w *worker) prepare(r room, pages []int32) {
	for i, id := range pages {
		switch {
		case w.side == prefill:
			w.mem.fill(id, r.ID, i)
		case i < r.Prefix:
			w.mem.fill(id, r.ID, prefixPage+i)
		}
	}
}

// intact says whether the pages of a room that succeeded hold what they must, on either side.
func (w *worker) intact(r room, pages []int32) bool {
	for i, id := range pages {
		switch {
		case w.side == prefill:
		case i < r.Prefix:
			i += prefixPage
		default:
			i -= r.Prefix
		}
		if !w.mem.holds(id, r.ID, i) {
			return false
		}
	}
	return true
}

// act is what this side does with an open room: its sends, or its register. Its error is something that must not be.
func (w *worker) act(ctx context.Context, live *client.Room, r room, pages []int32) error {
	abort := r.Abort == sides[w.side]
	if w.side == decode {
		err := live.Register(ctx, client.RegisterPart{Pool: w.pool, Pages: pages, Prefix: r.Prefix})
		if err == nil && abort {
			err = live.Abort(ctx)
		}
		return expected(err)
	}
	for i := range r.Chunks {
		part := pages[i*r.Pages/r.Chunks : (i+1)*r.Pages/r.Chunks]
		ch := client.Chunk{Parts: []client.Part{{Pool: w.pool, Pages: part}}, Last: i == r.Chunks-1}
		if ch.Last {
			ch.Aux = auxOf(r)
		}
		if err := live.Send(ctx, ch); err != nil {
			return expected(err)
		}
		if i == 0 && abort {
			return expected(live.Abort(ctx))
		}
	}
	return nil
}

// expected takes out of the errors of a call what the end of its room, or the loss of the engine, explains.
func expected(err error) error {
	var ended *client.EndedError
	if errors.As(err, &ended) || errors.Is(err, client.ErrEngineLost) {
		return nil
	}
	return err
}

// verify looks at what arrived with Success.
func (w *worker) verify(ctx context.Context, live *client.Room, r room, pages []int32) {
	if !w.intact(r, pages) {
		w.fault("room %d: Success with other pages than were sent", r.ID)
	}
	if w.side != decode {
		return
	}
	aux, err := live.Aux(ctx)
	if err != nil && !errors.Is(err, client.ErrEngineLost) {
		w.fault("room %d: aux: %v", r.ID, err)
	} else if err == nil && !bytes.Equal(aux, auxOf(r)) {
		w.fault("room %d: Success with another aux record than was sent", r.ID)
	}
}
