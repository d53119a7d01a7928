package client

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Client is a session with the engine. All methods may be called from several goroutines, except that
// Changes and Wait are for one consumer at a time.
type Client struct {
	conn        *net.UnixConn
	pidfd       *watchedFD // of the engine; nil where the kernel gives none
	page        *page
	node        string
	incarnation uint64
	limits      Limits

	rooms []atomic.Pointer[Room] // by slot

	mu      sync.Mutex // seq, pending, out, writing, regions, ready, closed
	seq     uint64
	pending map[uint64]*Pending
	out     []outgoing
	writing bool
	regions map[int64]*Region
	ready   []*Region // of these, which the engine took, in that order; for Redial
	lastReg int64
	window  chan struct{} // a token for every unanswered request
	shut    bool

	poolMu sync.Mutex
	pools  []Pool // by number; for Redial

	options Options // for Redial

	group *groupList // nil without Options.GroupList

	free    atomic.Bool // after that: no region can be written by anybody else
	lost    atomic.Bool // the engine is gone: rooms not ended are Failed(engine_lost)
	reason  error       // why; set before done is closed
	done    chan struct{}
	frozen  atomic.Int64 // ns of our own running time since the beat changed
	eventfd *watchedFD   // nil without Options.Notify
	changes changes
	events  broadcaster // something on the page changed, or the engine is gone
	wg      sync.WaitGroup
	once    sync.Once
}

// Bounds of the client.
const (
	dialTimeout   = 10 * time.Second
	writeTimeout  = 15 * time.Second // longer than lostAfter, which decides
	defaultSlots  = 1024
	defaultWindow = 1024
	suspectAfter  = 2 * time.Second  // longer than a scheduling hiccup
	lostAfter     = 12 * time.Second // longer than the 10 s after which other engines give ours up
)

// Dial connects, says hello and maps the status page. It takes at most 10 s, less when ctx says so.
func Dial(ctx context.Context, o Options) (*Client, error) {
	if o.Slots == 0 {
		o.Slots = defaultSlots
	}
	if o.Window <= 0 {
		o.Window = defaultWindow
	}
	o.SuspectAfter, o.LostAfter = cmp.Or(o.SuspectAfter, suspectAfter), cmp.Or(o.LostAfter, lostAfter)
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	var d net.Dialer
	nc, err := d.DialContext(ctx, "unix", o.Socket)
	if err != nil {
		return nil, fmt.Errorf("worker socket: %w (is the engine running, and is its socket this path?)", err)
	}
	conn := nc.(*net.UnixConn)
	c, err := hello(ctx, conn, o)
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("worker socket %s: hello: %w", o.Socket, err)
	}
	return c, nil
}

func hello(ctx context.Context, conn *net.UnixConn, o Options) (*Client, error) {
	// The session's goroutines do not run yet: this connection has one request in flight.
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	m, err := encode(map[string]any{
		"t": "hello", "seq": 1, "v": 1, "group": o.Group, "role": o.Role, "rank": o.Rank, "size": o.Size,
		"slots": o.Slots, "notify": o.Notify, "layout": o.Layout,
	}, nil, nil)
	if err != nil {
		return nil, err
	}
	if _, err := conn.Write(m); err != nil {
		return nil, err
	}
	r, err := newReader(conn)
	if err != nil {
		return nil, err
	}
	a, err := r.next()
	if err != nil {
		closeAll(r.fds)
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return nil, err
	}
	fds := a.fds
	if err := a.err(); err != nil {
		closeAll(fds)
		return nil, err
	}
	if !stop() { // the deadline may be set behind our back
		closeAll(fds)
		return nil, ctx.Err()
	}
	want := 1
	if o.Notify {
		want = 2
	}
	if len(fds) != want {
		closeAll(fds)
		return nil, fmt.Errorf("the engine sent %d descriptors, want %d", len(fds), want)
	}
	p, err := mapPage(fds[0])
	unix.Close(fds[0])
	if err != nil {
		closeAll(fds[1:])
		return nil, err
	}
	if p.slots < o.Slots {
		closeAll(fds[1:])
		return nil, fmt.Errorf("the engine's status page has %d slots, want %d", p.slots, o.Slots)
	}
	c := &Client{
		conn: conn, page: p, node: a.Node, incarnation: a.Incarnation, limits: a.limits(),
		rooms: make([]atomic.Pointer[Room], p.slots), seq: 1,
		pending: make(map[uint64]*Pending), regions: make(map[int64]*Region), done: make(chan struct{}), options: o,
	}
	if n := c.limits.Inflight; n > 0 {
		o.Window = min(o.Window, n)
	}
	c.window = make(chan struct{}, o.Window)
	c.changes.init(c)
	if o.GroupList {
		c.group = newGroupList(o.Rank)
		c.group.cur.n = p.counter()
	}
	c.pidfd = peerPidfd(conn)
	conn.SetDeadline(time.Time{})
	c.wg.Add(2)
	go c.read(r)
	go c.watchBeat()
	if c.pidfd != nil {
		c.wg.Add(1)
		go c.watchExit()
	}
	if o.Notify {
		c.eventfd = watchFD(fds[1], true)
		c.wg.Add(1)
		go c.watchEvents()
	}
	return c, nil
}

// Node returns the engine's node name.
func (c *Client) Node() string { return c.node }

// Incarnation returns the engine's incarnation; a restarted engine has another.
func (c *Client) Incarnation() uint64 { return c.incarnation }

// Limits returns what the engine allows a session.
func (c *Client) Limits() Limits { return c.limits }

// Slots returns how many rooms can be open at once.
func (c *Client) Slots() int { return c.page.slots }

// Done is closed when the engine is gone or the client was closed. Err says why.
func (c *Client) Done() <-chan struct{} { return c.done }

// Err returns nil while the session lives, then ErrClosed or an error that wraps ErrEngineLost.
func (c *Client) Err() error {
	select {
	case <-c.done:
		return c.reason
	default:
		return nil
	}
}

// Unresponsive reports that the engine's beat has stood still for Options.SuspectAfter. Nothing is lost
// yet; after LostAfter the client closes its socket and latches engine_lost.
func (c *Client) Unresponsive() bool { return c.frozen.Load() >= int64(c.options.SuspectAfter) }

// Close ends the session: rooms that have not ended end as worker_lost at the engine. Memory stays
// mapped until Region.Close, because the engine may still write to it.
func (c *Client) Close() error {
	c.end(ErrClosed)
	c.wg.Wait()
	return nil
}

// end latches the session's end, once: first the socket is closed, then rooms read Failed.
func (c *Client) end(why error) {
	c.once.Do(func() {
		c.conn.Close()
		c.mu.Lock()
		c.shut = true
		c.reason = why
		pending := c.pending
		c.pending = nil
		for _, o := range c.out {
			closeAll(o.fds)
		}
		c.out = nil
		c.mu.Unlock()
		c.lost.Store(true)
		close(c.done)
		for _, p := range pending {
			p.finish(answer{}, why)
		}
		c.pidfd.close()
		c.eventfd.close()
		for i := range c.rooms {
			if r := c.rooms[i].Load(); r != nil {
				r.changed.broadcast()
			}
		}
		c.events.broadcast()
	})
}

// watchBeat counts how long the beat has stood still, in our own running time: a tick that comes late
// (we were stopped, or starved) counts as one period.
func (c *Client) watchBeat() {
	defer c.wg.Done()
	const period = 100 * time.Millisecond
	t := time.NewTicker(period)
	defer t.Stop()
	beat := c.page.beat()
	last := time.Now()
	for {
		select {
		case <-c.done:
			return
		case <-t.C:
		}
		now := time.Now()
		ran := min(now.Sub(last), 2*period)
		last = now
		if b := c.page.beat(); b != beat {
			beat = b
			c.frozen.Store(0)
			continue
		}
		if c.frozen.Add(int64(ran)) >= int64(c.options.LostAfter) {
			c.end(fmt.Errorf("%w: its beat stood still for %v", ErrEngineLost, c.options.LostAfter))
			return
		}
	}
}

func (c *Client) watchExit() {
	defer c.wg.Done()
	if c.pidfd.wait() {
		c.end(fmt.Errorf("%w: its process has exited", ErrEngineLost))
	}
}

// AddPool tells the engine about tensors that share page ids and returns the number by which parts
// name the pool. It returns when every backend is ready with it.
func (c *Client) AddPool(ctx context.Context, p Pool) (int, error) {
	type tensor struct {
		Region     int64 `json:"region"`
		Offset     int64 `json:"offset"`
		PageStride int64 `json:"page_stride"`
		PageBytes  int64 `json:"page_bytes"`
		Layer      int   `json:"layer"`
	}
	ts := make([]tensor, 0, len(p.Tensors))
	for i, t := range p.Tensors {
		if t.Region == nil || t.Region.client() != c {
			return 0, fmt.Errorf("pool: tensor %d: its region is not one of this client", i)
		}
		if t.PageStride == 0 {
			t.PageStride = t.PageBytes
		}
		ts = append(ts, tensor{t.Region.id, t.Offset, t.PageStride, t.PageBytes, t.Layer})
	}
	c.poolMu.Lock() // pools are numbered in the order of their requests
	defer c.poolMu.Unlock()
	n := len(c.pools)
	header := map[string]any{"t": "pool_add", "pool": n, "pages": p.Pages, "tensors": ts}
	if p.State {
		header["kind"] = "state"
	}
	pd, err := c.start(ctx, header, nil, nil, nil)
	if err != nil {
		return 0, fmt.Errorf("pool %d: %w", n, err)
	}
	p.Tensors = slices.Clone(p.Tensors)
	c.pools = append(c.pools, p)
	err = pd.Wait(ctx)
	var refused *Error
	if errors.As(err, &refused) || c.Err() != nil {
		c.pools = c.pools[:n] // the engine gave the number back, or is gone
	}
	if err != nil {
		return 0, fmt.Errorf("pool %d: %w", n, err)
	}
	return n, nil
}

// Open opens a room and waits for the engine's answer. An *EndedError means that the attempt has
// ended already; an *Error that it was refused.
func (c *Client) Open(ctx context.Context, o OpenOptions) (*Room, error) {
	p, err := c.StartOpen(ctx, o)
	if err != nil {
		return nil, err
	}
	return p.Room(ctx)
}

// StartOpen sends an open without waiting for its answer, so that many can be on the way at once.
func (c *Client) StartOpen(ctx context.Context, o OpenOptions) (*PendingRoom, error) {
	ms := int64(0)
	if o.Deadline > 0 {
		ms = int64((o.Deadline + time.Millisecond - 1) / time.Millisecond)
	}
	if o.Priority < math.MinInt32 || o.Priority > math.MaxInt32 {
		return nil, fmt.Errorf("open room %d: priority %d does not fit 32 bits", o.Room, o.Priority)
	}
	r := &Room{c: c, id: o.Room, attempt: o.Attempt, listed: Bootstrapping, applied: Bootstrapping}
	if c.group != nil {
		c.group.opening(r)
	}
	pd, err := c.start(ctx, struct {
		T         string `json:"t"`
		Room      int64  `json:"room"`
		Attempt   int64  `json:"attempt"`
		PeerGroup string `json:"peer_group,omitempty"`
		Priority  int    `json:"priority,omitempty"`
		Deadline  int64  `json:"deadline_ms,omitempty"`
	}{T: "open", Room: o.Room, Attempt: o.Attempt, PeerGroup: o.PeerGroup, Priority: o.Priority, Deadline: ms}, nil, nil, r.install)
	if err != nil {
		if c.group != nil && c.Err() != nil {
			c.group.refused(r, err)
		} else if c.group != nil {
			c.group.unsent(r)
		}
		return nil, fmt.Errorf("open room %d: %w", o.Room, err)
	}
	return &PendingRoom{room: r, p: pd}, nil
}

// PendingRoom is an open on its way.
type PendingRoom struct {
	room *Room
	p    *Pending
}

// Room waits for the answer. When ctx ends first the open is still on its way: call Room again.
func (p *PendingRoom) Room(ctx context.Context) (*Room, error) {
	if err := p.p.Wait(ctx); err != nil {
		return nil, fmt.Errorf("open room %d: %w", p.room.id, err)
	}
	return p.room, nil
}

// Pending is a request on its way. Answers may come in any order.
type Pending struct {
	done   chan struct{}
	apply  func(*answer) error // on the reader goroutine, before done
	answer answer
	err    error
}

// Done is closed when the answer is there.
func (p *Pending) Done() <-chan struct{} { return p.done }

// Wait returns nil, an *EndedError, an *Error, ErrClosed or ErrEngineLost; or ctx's error, and then the
// request is still on its way.
func (p *Pending) Wait(ctx context.Context) error {
	select {
	case <-p.done:
		return p.err
	default:
	}
	select {
	case <-p.done:
		return p.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (p *Pending) finish(a answer, err error) {
	p.answer, p.err = a, err
	if err == nil {
		p.err = a.err()
	}
	if p.apply != nil && err == nil {
		if e := p.apply(&a); p.err == nil {
			p.err = e
		}
	}
	close(p.done)
}

// start sends a request. It waits, bounded by ctx, only for a place in the window. It takes over fds:
// they are closed once they are sent, or when they cannot be.
func (c *Client) start(ctx context.Context, header any, payload [][]byte, fds []int, apply func(*answer) error) (*Pending, error) {
	p, err := c.enqueue(ctx, header, payload, fds, apply)
	if err != nil {
		closeAll(fds)
	}
	return p, err
}

func (c *Client) enqueue(ctx context.Context, header any, payload [][]byte, fds []int, apply func(*answer) error) (*Pending, error) {
	select {
	case c.window <- struct{}{}:
	default:
		select {
		case c.window <- struct{}{}:
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-c.done:
			return nil, c.reason
		}
	}
	h, err := json.Marshal(header)
	if err != nil {
		<-c.window
		return nil, err
	}
	p := &Pending{done: make(chan struct{}), apply: apply}
	c.mu.Lock()
	if c.shut {
		err := c.reason
		c.mu.Unlock()
		<-c.window
		return nil, err
	}
	// The number is given and the message queued in one critical section: seq grows on the wire.
	m, err := frame(h, c.seq+1, payload)
	if err != nil {
		c.mu.Unlock()
		<-c.window
		return nil, err
	}
	c.seq++
	c.pending[c.seq] = p
	c.out = append(c.out, outgoing{m, fds})
	if c.writing {
		c.mu.Unlock()
		return p, nil
	}
	c.writing = true
	c.flush()
	return p, nil
}

// flush writes what is queued, and what others queue meanwhile, in as few system calls as possible.
// It is called with mu held and returns with it released.
func (c *Client) flush() {
	for len(c.out) > 0 && !c.shut {
		batch := c.out
		c.out = nil
		c.mu.Unlock()
		c.conn.SetWriteDeadline(time.Now().Add(writeTimeout))
		if err := writeBatch(c.conn, batch); err != nil {
			c.end(fmt.Errorf("%w: %w", ErrEngineLost, err))
		}
		c.mu.Lock()
	}
	c.writing = false
	c.mu.Unlock()
}

// read matches answers to requests until the socket ends.
func (c *Client) read(r *reader) {
	defer c.wg.Done()
	for {
		a, err := r.next()
		if err != nil {
			c.end(fmt.Errorf("%w: %w", ErrEngineLost, err))
			return
		}
		closeAll(a.fds) // only hello is answered with descriptors
		if a.Seq == 0 {
			err := a.err()
			if err == nil {
				err = errors.New("an answer without a number")
			}
			c.end(fmt.Errorf("%w: %w", ErrEngineLost, err))
			return
		}
		c.mu.Lock()
		p := c.pending[a.Seq]
		delete(c.pending, a.Seq)
		c.mu.Unlock()
		if p == nil {
			continue // a second answer changes nothing
		}
		<-c.window
		p.finish(a, nil)
	}
}
