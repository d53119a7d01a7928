package demo

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	client "github.com/terminus-kv/terminus/clients/go"
)

// kvRoom is what a worker needs of client.Room.
type kvRoom interface {
	Register(ctx context.Context, parts ...client.RegisterPart) error
	Send(ctx context.Context, chunk client.Chunk) error
	Abort(ctx context.Context) error
	WaitTerminal(ctx context.Context) (client.Status, error)
	WaitReusable(ctx context.Context) error
	Release(ctx context.Context) error
	Failure(ctx context.Context) (client.Failure, error)
	Aux(ctx context.Context) ([]byte, error)
}

// session is what a worker needs of client.Client.
type session interface {
	Done() <-chan struct{} // closed when the engine is gone
	Err() error            // why
}

// openFunc opens a room of a session.
type openFunc func(ctx context.Context, o client.OpenOptions) (kvRoom, error)

// link is the session with one engine.
type link struct {
	session session
	open    openFunc
}

// Bounds of a worker.
const (
	maxLive       = 512 // rooms that one worker has open at once
	progressEvery = 200 * time.Millisecond
	dialTimeout   = 30 * time.Second
	redialTimeout = time.Minute      // from the loss of the engine until the next one has the worker's memory
	openTimeout   = 20 * time.Second // as long as the engine says that it takes no room now, for it may later
	openPause     = 100 * time.Millisecond
	proofTimeout  = 20 * time.Second // from the loss of the engine until the kernel proves that no page is written any more
	abortTimeout  = 12 * time.Second // from being told to stop until the open rooms have ended and their pages are back
	waitingAfter  = 10 * time.Second // without a change: say once what is waited for
)

// worker plays one role of a plan. Rooms run on goroutines of their own; pages are admitted strictly
// in the order in which the rooms come, on both sides, so that two workers never wait for each other's
// pages. A worker survives its engine: it keeps its pages until nobody else can write to them, connects
// to the next engine with the same memory, and goes on.
type worker struct {
	plan      *Plan
	role      string
	rank      int // of size; plan's header is this rank's
	size      int
	peerGroup string
	pool      int
	orders    io.Reader                           // what to play; nil: every room of the plan at its moment
	redial    func(context.Context) (link, error) // after the loss of the engine; nil: that ends the worker
	content   *content
	mem       memory
	reports   *reporter
	start     time.Time
	proof     time.Duration // proofTimeout, shorter in tests
	waiting   time.Duration // waitingAfter, shorter in tests

	closing chan struct{} // closed when no more rooms are played: the engine is lost for good, or the worker was told to stop
	why     error         // set before closing is closed
	once    sync.Once     // closes closing

	mu        sync.Mutex // the rest up to live
	link      link
	relinked  chan struct{}        // closed when link is another one
	rooms     map[attemptID]kvRoom // open
	withdrawn map[attemptID]bool   // to be aborted, by order
	told      bool                 // all are
	alloc     *allocator
	cache     *prefixCache // decode
	freed     chan struct{}
	runs      int64 // of consecutive pages in all page lists
	pages     int64

	live  chan struct{} // one token a room that is open
	ended atomic.Int64
	bytes atomic.Int64
	moved atomic.Int64 // changes whenever something happens in any room
}

// newWorker prepares a worker on memory b of a session.
func newWorker(plan *Plan, role, peerGroup string, b []byte, pool int, s session, open openFunc, reports *reporter) *worker {
	w := &worker{
		plan: plan, role: role, size: 1, peerGroup: peerGroup, link: link{s, open}, relinked: make(chan struct{}), pool: pool,
		proof: proofTimeout, waiting: waitingAfter, closing: make(chan struct{}),
		rooms: make(map[attemptID]kvRoom), withdrawn: make(map[attemptID]bool),
		content: newContent(plan.PlanHeader, 0, 1), mem: newMemory(b, plan.PlanHeader), reports: reports,
		freed: make(chan struct{}, 1), live: make(chan struct{}, maxLive),
	}
	w.alloc = newAllocator(w.mem, plan.BlockPages, plan.Seed)
	w.cache = newPrefixCache(w.alloc)
	return w
}

// runWorker is Worker after the options are checked and the plan is known.
func runWorker(ctx context.Context, o WorkerOptions, plan *Plan) error {
	reports := newReporter(o.Stdout, o.Stderr)
	dial, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	role := map[string]client.Role{RolePrefill: client.Source, RoleDecode: client.Destination}[o.Role]
	model, own := plan.PlanHeader, plan.PlanHeader.ofRank(o.Size)
	own.Seed += uint64(o.Rank) // no two ranks have a room in the same pages
	plan = &Plan{own, plan.Rooms}
	layout := client.Layout{
		DType: "bf16", Layers: model.Tensors / 2, KVHeads: model.Heads, HeadDim: model.PageBytes / model.Heads / model.PageTokens / 2,
		PageTokens: model.PageTokens, Kind: "mha",
	}
	if model.Heads > 1 {
		layout.Order = "nhd" // as content has it; the Python worker, of one head, does not say
	}
	c, err := dialWorker(dial, client.Options{
		Socket: o.Socket, Group: o.Group, Role: role, Rank: o.Rank, Size: o.Size, Slots: 2 * maxLive, Notify: true, Layout: layout,
	})
	if err != nil {
		return fmt.Errorf("worker socket %s: %w", o.Socket, err)
	}
	defer func() { c.Close() }()
	// One page of memory more than the pool: the client proves with the last bytes of a region that engine and
	// worker see the same memory, also when rooms of an engine that was lost are looked at still.
	region, err := c.CreateRegion(dial, plan.poolBytes()+4096)
	if err != nil {
		return fmt.Errorf("register %d bytes of memory: %w", plan.poolBytes(), err)
	}
	pool := client.Pool{Pages: plan.PoolPages}
	for t := range plan.Tensors {
		pool.Tensors = append(pool.Tensors, client.Tensor{
			Region: region, Offset: int64(t) * int64(plan.PoolPages) * int64(plan.PageBytes), PageBytes: int64(plan.PageBytes), Layer: t / 2,
		})
	}
	id, err := c.AddPool(dial, pool)
	if err != nil {
		return fmt.Errorf("add a pool of %d pages: %w", plan.PoolPages, err)
	}
	open := func(c *client.Client) openFunc {
		return func(ctx context.Context, oo client.OpenOptions) (kvRoom, error) { return c.Open(ctx, oo) }
	}
	w := newWorker(plan, o.Role, o.PeerGroup, region.Bytes(), id, c, open(c), reports)
	w.rank, w.size, w.content = o.Rank, o.Size, newContent(model, o.Rank, o.Size)
	w.redial = func(ctx context.Context) (link, error) {
		next, err := c.Redial(ctx)
		if err != nil {
			return link{}, err
		}
		c = next // the old one's rooms live on until their pages are given back
		return link{c, open(c)}, nil
	}
	if o.Orders {
		w.orders = o.Stdin
	}
	reports.send(report{T: "ready", Language: "go"})
	err = w.run(ctx, o.Quiet)
	fmt.Fprintln(o.Stderr, &reports.sum)
	if err != nil {
		return err
	}
	return reports.sum.err()
}

// dialWorker is client.Dial for a worker that may take the place of one that has just died: the engine may
// not have noticed yet, and refuses a second process of one rank.
func dialWorker(ctx context.Context, o client.Options) (*client.Client, error) {
	for {
		c, err := client.Dial(ctx, o)
		var refused *client.Error
		if !errors.As(err, &refused) || refused.Code != "refused" || refused.Field != "rank" {
			return c, err
		}
		if sleep(ctx, openPause) != nil {
			return nil, err
		}
	}
}

// run plays all rooms and reports. The error says why the worker stopped early; the report says the
// same. When the engine is lost for good, or told ends, no more rooms are played, and those that are open
// are seen to their end, within proofTimeout or abortTimeout.
func (w *worker) run(told context.Context, quiet time.Duration) error {
	ctx, stop := context.WithCancelCause(context.WithoutCancel(told))
	defer stop(nil)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		w.watch(ctx, told, stop, quiet)
	}()

	w.start = time.Now()
	var turns <-chan turn
	if w.orders != nil {
		turns = w.ordered(ctx, w.orders)
	} else {
		turns = w.scheduled(ctx)
	}
	var rooms sync.WaitGroup
	for {
		t, ok := w.next(ctx, turns)
		if !ok {
			break
		}
		l, pages, err := w.arrive(ctx, t)
		if err != nil {
			if !errors.Is(err, w.closed()) {
				stop(err)
			}
			break
		}
		rooms.Go(func() {
			w.room(ctx, t, l, pages)
			<-w.live
		})
	}
	rooms.Wait()
	err := context.Cause(ctx)
	stop(nil)
	<-watched
	if err == nil && w.redial == nil && w.current().session.Err() != nil {
		err = w.lost()
	} else if err == nil {
		err = w.closed()
	}
	w.reports.send(w.progress())

	w.mu.Lock()
	defer w.mu.Unlock()
	err = errors.Join(err, w.cache.flush())
	end := report{T: "end", Pages: w.pages, Runs: w.runs}
	end.Written, end.Leaked = w.alloc.finish()
	if err != nil {
		end.Error = err.Error()
	}
	w.reports.send(end)
	return errors.Join(err, w.reports.err)
}

// next waits for the next turn; false: there is none.
func (w *worker) next(ctx context.Context, turns <-chan turn) (turn, bool) {
	select {
	case t, ok := <-turns:
		return t, ok
	case <-w.closing:
	case <-ctx.Done():
	}
	return turn{}, false
}

func (w *worker) progress() report {
	w.mu.Lock()
	defer w.mu.Unlock()
	return report{T: "progress", Done: w.ended.Load(), Bytes: w.bytes.Load(), Written: w.alloc.written}
}

// roomPages are the pages that a room holds at a worker: of the whole prompt at the decode worker, of
// the part that moves at the prefill worker.
type roomPages struct {
	ids    []int32
	shared []blockKey // blocks of the prefix cache that the room uses
	own    []int32    // the rest of ids: given back by the room itself
}

// arrive waits for a place among the live rooms, an engine, and a room's pages.
func (w *worker) arrive(ctx context.Context, t turn) (link, roomPages, error) {
	if err := w.closed(); err != nil {
		return link{}, roomPages{}, err
	}
	select {
	case w.live <- struct{}{}:
	case <-w.closing:
		return link{}, roomPages{}, w.why
	case <-ctx.Done():
		return link{}, roomPages{}, context.Cause(ctx)
	}
	pages, err := w.admit(ctx, t.Room)
	if err != nil {
		return link{}, roomPages{}, err
	}
	l, err := w.connected(ctx)
	if err != nil {
		err = errors.Join(err, w.giveBack(t.Room, pages, false))
	}
	return l, pages, err
}

// admit waits for a room's pages. Prefix blocks that are not cached (evicted, or the room that was to
// bring them failed) are computed here, as an engine would.
func (w *worker) admit(ctx context.Context, r *Room) (roomPages, error) {
	for {
		pages, ok, err := w.tryAdmit(r)
		if ok || err != nil {
			return pages, err
		}
		select {
		case <-w.freed:
		case <-w.closing:
			return roomPages{}, w.why
		case <-ctx.Done():
			return roomPages{}, context.Cause(ctx)
		}
	}
}

func (w *worker) tryAdmit(r *Room) (p roomPages, ok bool, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.role == RolePrefill {
		if w.alloc.available() < r.Moved() {
			return p, false, nil
		}
		p.own = w.alloc.take(r.Moved())
		p.ids = p.own
		w.count(p.ids)
		return p, true, nil
	}
	// First hold what is cached, then see whether the rest fits.
	need := r.Moved()
	bp := w.plan.BlockPages
	var hits [][]int32
	for at := 0; at < r.Cached; at += bp {
		k := blockKey{r.Owner(at), at / bp}
		hit := w.cache.use(k)
		hits = append(hits, hit)
		if hit == nil {
			need += min(bp, r.Cached-at)
		} else {
			p.shared = append(p.shared, k)
		}
	}
	if err := w.cache.shrink(need); err != nil {
		return p, false, err
	}
	if w.alloc.available() < need {
		for _, k := range p.shared {
			w.cache.drop(k)
		}
		return roomPages{}, false, nil
	}
	for b, hit := range hits {
		if hit == nil {
			at := b * bp
			k := blockKey{r.Owner(at), b}
			hit = w.alloc.take(min(bp, r.Cached-at))
			for j, id := range hit {
				w.fill(id, k.owner, at+j)
			}
			if w.cache.put(k, hit) {
				p.shared = append(p.shared, k)
			}
		}
		p.ids = append(p.ids, hit...)
	}
	p.own = w.alloc.take(r.Moved())
	p.ids = append(p.ids, p.own...)
	w.count(p.ids)
	return p, true, nil
}

func (w *worker) count(ids []int32) {
	w.pages += int64(len(ids))
	w.runs += countRuns(ids)
}

// giveBack ends the room's use of its pages. Of a room that succeeded, the blocks that later rooms
// share stay in the cache.
func (w *worker) giveBack(r *Room, p roomPages, success bool) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, k := range p.shared {
		w.cache.drop(k)
	}
	rest := p.own
	if w.role == RoleDecode && success {
		rest = nil
		bp := w.plan.BlockPages
		for at := r.Cached; at < r.Pages; at += bp {
			block := p.ids[at:min(at+bp, r.Pages)]
			k := blockKey{r.ID, at / bp}
			if at < r.Keep && w.cache.put(k, block) {
				w.cache.drop(k)
			} else {
				rest = append(rest, block...)
			}
		}
	}
	err := w.alloc.give(rest)
	select {
	case w.freed <- struct{}{}:
	default:
	}
	return err
}

func countRuns(ids []int32) int64 {
	var n int64
	for i, id := range ids {
		if i == 0 || id != ids[i-1]+1 {
			n++
		}
	}
	return n
}

func (w *worker) fill(id int32, room int64, page int) {
	for t := range w.mem.tensors {
		w.content.fill(w.mem.page(t, id), room, page, t)
	}
}

func (w *worker) holds(id int32, room int64, page int) bool {
	for t := range w.mem.tensors {
		if !w.content.holds(w.mem.page(t, id), room, page, t) {
			return false
		}
	}
	return true
}

// aux is the record that travels with a room: as a serving stack's first token and its state would.
func (c *content) aux(room int64) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(room))
	return binary.LittleEndian.AppendUint64(b, mix(c.seed^uint64(room)))
}

// aux is what this rank sends with the last chunk: rank 0 the record.
func (w *worker) aux(r *Room) []byte {
	if w.rank != 0 {
		return nil
	}
	return w.content.aux(r.ID)
}

// aborts says that it is this rank that aborts the room.
func (w *worker) aborts(r *Room) bool {
	return r.Aborter == w.role && int(r.ID%int64(w.size)) == w.rank
}

// room plays one room from open to release and reports it. Pages of a room that could not be seen to
// its end are not given back: they count as leaked, which they are.
func (w *worker) room(ctx context.Context, t turn, l link, pages roomPages) {
	line := report{T: "room", Room: t.ID, Attempt: t.attempt}
	err := w.play(ctx, t, l, pages, &line)
	if err != nil && line.Detail == "" {
		line.Detail = err.Error()
	}
	if line.terminal() {
		w.ended.Add(1)
	}
	w.moved.Add(1)
	w.reports.send(line)
}

func (w *worker) play(ctx context.Context, t turn, l link, pages roomPages, line *report) error {
	r := t.Room
	w.reports.send(report{T: "open", Room: t.ID, Attempt: t.attempt})
	line.Opened = monotonic()
	room, err := w.openRoom(ctx, t, l)
	var ended *client.EndedError
	if errors.As(err, &ended) { // the other side was faster
		line.Status, line.Reason, line.Ended = statusFailed, string(ended.Reason), monotonic()
		return w.giveBack(r, pages, false)
	}
	if err != nil { // nothing was armed
		if errors.Is(err, client.ErrEngineLost) {
			line.Status, line.Reason, line.Ended = statusFailed, reasonEngineLost, monotonic()
		}
		return errors.Join(fmt.Errorf("open: %w", err), w.giveBack(r, pages, false))
	}
	w.moved.Add(1)
	defer w.opened(ctx, t.id(), room)()

	abort := newAborter(w, r, room)
	defer abort.wait()
	if w.role == RolePrefill {
		err = w.send(ctx, r, pages, room, abort)
	} else {
		err = w.receive(ctx, r, pages, room, abort)
	}
	if err != nil {
		return err
	}
	status, err := room.WaitTerminal(ctx)
	if err != nil {
		if !status.Terminal() {
			line.Status = status.String()
		}
		return fmt.Errorf("wait for a terminal status: %w", err)
	}
	line.Status, line.Ended = status.String(), monotonic()
	w.reports.send(report{T: "ended", Room: t.ID, Attempt: t.attempt, Status: line.Status, Opened: line.Opened})
	line.Asked = abort.wait()
	w.moved.Add(1)
	if err := w.outcome(ctx, r, pages, room, status, line); err != nil {
		return err
	}
	if err := room.WaitReusable(ctx); err != nil {
		return fmt.Errorf("wait until pages are reusable: %w", err)
	}
	if err := room.Release(ctx); err != nil {
		return fmt.Errorf("release: %w", err)
	}
	return w.giveBack(r, pages, status == client.Success)
}

// openRoom asks the engine for the room, again while it refuses: it has not heard of the other engine for
// a while, say. Any other answer is passed on.
func (w *worker) openRoom(ctx context.Context, t turn, l link) (kvRoom, error) {
	for until := time.Now().Add(openTimeout); ; {
		room, err := l.open(ctx, client.OpenOptions{Room: t.ID, Attempt: t.attempt, PeerGroup: w.peerGroup})
		var refused *client.Error
		if !errors.As(err, &refused) || refused.Code != "refused" || time.Now().After(until) || w.closed() != nil {
			return room, err
		}
		if err := w.sleepUntil(ctx, time.Now().Add(openPause)); err != nil {
			return nil, err
		}
	}
}

// outcome explains a failure; of a success the decode worker checks every page of the prompt and
// holds it for as long as it generates.
func (w *worker) outcome(ctx context.Context, r *Room, pages roomPages, room kvRoom, status client.Status, line *report) error {
	if status != client.Success {
		f, err := room.Failure(ctx)
		if err != nil {
			return fmt.Errorf("ask for the reason: %w", err)
		}
		line.Reason, line.Detail = string(f.Reason), f.Detail
		return nil
	}
	line.Reason = reasonSuccess
	line.Bytes = int64(r.Moved()) * w.plan.PageBytesAll()
	if w.role == RoleDecode {
		for k, id := range pages.ids {
			if !w.holds(id, r.Owner(k), k) {
				line.Mismatched++
			}
		}
		if err := w.takeAux(ctx, r, room, line); err != nil {
			return err
		}
		w.bytes.Add(line.Bytes - line.Mismatched*w.plan.PageBytesAll())
		return w.sleepUntil(ctx, time.Now().Add(time.Duration(r.Hold)*time.Microsecond))
	}
	w.bytes.Add(line.Bytes)
	return nil
}

// takeAux looks at the record that came with the room's pages: the group's rank 0 has it.
func (w *worker) takeAux(ctx context.Context, r *Room, room kvRoom, line *report) error {
	if w.rank != 0 {
		return nil
	}
	aux, err := room.Aux(ctx)
	switch {
	case errors.Is(err, client.ErrEngineLost):
		line.NoAux, line.Detail = true, "the engine was lost before the aux record was taken"
	case err != nil:
		return fmt.Errorf("take the aux record: %w", err)
	default:
		line.BadAux = string(aux) != string(w.content.aux(r.ID))
	}
	return nil
}

// send computes and sends a room's chunks.
func (w *worker) send(ctx context.Context, r *Room, pages roomPages, room kvRoom, abort *aborter) error {
	pause := time.Duration(r.Pause) * time.Microsecond
	step := int(r.Point * float64(len(r.Chunks)+1)) // the abort comes after this many chunks
	if len(r.Chunks) == 0 {
		abort.after(ctx, time.Duration(r.Point*float64(pause)))
		return unlessOver(room.Send(ctx, client.Chunk{Last: true, Aux: w.aux(r)}))
	}
	at := 0
	for i, n := range r.Chunks {
		if i == step {
			abort.after(ctx, time.Duration((r.Point*float64(len(r.Chunks)+1)-float64(step))*float64(pause)))
		}
		if err := w.sleepUntil(ctx, time.Now().Add(pause)); err != nil {
			return err
		}
		ids := pages.ids[at : at+n]
		for k, id := range ids {
			w.fill(id, r.ID, r.Cached+at+k)
		}
		at += n
		chunk := client.Chunk{Parts: []client.Part{{Pool: w.pool, Pages: ids}}}
		if i == len(r.Chunks)-1 {
			chunk.Last, chunk.Aux = true, w.aux(r)
		}
		err := room.Send(ctx, chunk)
		w.moved.Add(1)
		if over(err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("send chunk %d: %w", i, err)
		}
	}
	if step == len(r.Chunks) {
		abort.after(ctx, 0)
	}
	return nil
}

// receive registers a room's pages. Of the aborts half come before that, a quarter right after it, and
// a quarter somewhere on the way that the room has then.
func (w *worker) receive(ctx context.Context, r *Room, pages roomPages, room kvRoom, abort *aborter) error {
	if r.Point < 0.5 {
		abort.after(ctx, 0)
	}
	err := room.Register(ctx, client.RegisterPart{Pool: w.pool, Pages: pages.ids, Prefix: r.Cached})
	way := time.Duration(r.Pause*int64(len(r.Chunks))) * time.Microsecond
	abort.after(ctx, time.Duration(max(0, r.Point-0.75)/0.25*float64(way)))
	return unlessOver(err)
}

// over reports that a room ended meanwhile or its engine is lost: its verdict is read next.
func over(err error) bool {
	var ended *client.EndedError
	return errors.As(err, &ended) || errors.Is(err, client.ErrEngineLost)
}

func unlessOver(err error) error {
	if over(err) {
		return nil
	}
	return err
}
