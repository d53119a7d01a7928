package peer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/internal/peer/wire"
)

// stream is what both ends of the gRPC call have in common.
type stream interface {
	Send(*wire.Batch) error
	Recv() (*wire.Batch, error)
	Context() context.Context
}

// conn is one stream whose Hellos are exchanged. Three goroutines serve it: a reader, a writer, and
// the one that called serve, which beats and watches the other two.
type conn struct {
	id      uint64
	link    *link
	stream  stream
	dialled bool
	hello   hello  // the peer's, with the attempt of whoever dialled
	creds   string // who the transport says the peer is
	out     *queue
	since   time.Time

	heard   atomic.Int64 // UnixNano of the last batch, for Status
	batches atomic.Int64 // read so far
	writing atomic.Bool  // the writer is inside Send
	written atomic.Int64 // batches written so far

	once sync.Once
	done chan struct{}
	why  string // valid after done

	held held // what this stream announced; only the reader touches it
}

func newConn(k *link, st stream, h hello, dialled bool, creds string) *conn {
	c := &conn{
		id: k.links.lastConn.Add(1), link: k, stream: st, dialled: dialled, hello: h, creds: creds,
		out: newQueue(k.links.cfg.QueueFrames, k.links.cfg.QueueBytes), since: time.Now(),
		done: make(chan struct{}), held: newHeld(),
	}
	c.heard.Store(time.Now().UnixNano())
	return c
}

// end closes the stream, once; why is for people.
func (c *conn) end(why string) {
	c.once.Do(func() {
		c.why = why
		c.out.close()
		close(c.done)
	})
}

// turn is the place of a stream among those of one pair of incarnations. Both ends see the same one and
// take streams only in this order, so what is sent on one stream is delivered before anything of the next, or
// not at all. A dialler's attempt exceeds every attempt, of either side, that it knows of: of two streams that
// do not know of each other, the ends may meet either first, but keep the same one.
type turn struct {
	attempt uint64
	smaller bool // the smaller name dialled: it is later than an equal attempt of the other side
}

func (t turn) after(o turn) bool {
	return t.attempt > o.attempt || t.attempt == o.attempt && t.smaller && !o.smaller
}

func (c *conn) turn() turn {
	return turn{c.hello.attempt, c.dialled == (c.link.links.cfg.Node < c.link.node)}
}

// serve runs the stream until it ends. pending are frames that came in one batch with the Hello.
// cancel interrupts the stream's Recv and Send.
func (c *conn) serve(pending []*wire.Frame, cancel func()) {
	var wg sync.WaitGroup
	wg.Add(2)
	go func() { defer wg.Done(); c.read(pending) }()
	go func() { defer wg.Done(); c.write() }()
	c.watch()
	c.link.down(c)
	cancel()
	// On the accepting side Recv returns only after the handler has; Links waits for both.
	c.link.links.wg.Add(1)
	go func() { defer c.link.links.wg.Done(); wg.Wait() }()
}

// watch beats, and ends the stream when nothing was heard, or nothing could be written, for the
// silence bound. It counts ticks, not time, so a pause of this process alone ends nothing.
func (c *conn) watch() {
	cfg := &c.link.links.cfg
	bound := max(int(cfg.Silence/cfg.Beat), 2)
	tick := time.NewTicker(cfg.Beat)
	defer tick.Stop()
	silent, stuck := 0, 0
	var read, wrote int64
	for {
		select {
		case <-c.done:
			return
		case <-tick.C:
		}
		silent++
		if n := c.batches.Load(); n != read {
			read, silent = n, 0
		}
		stuck++
		if n := c.written.Load(); n != wrote || !c.writing.Load() {
			wrote, stuck = n, 0
		}
		switch {
		case silent > bound:
			c.end(fmt.Sprintf("nothing heard for %v", cfg.Silence))
			return
		case stuck > bound:
			c.link.count(func(n *Counters) { n.Overflows++ })
			c.end(fmt.Sprintf("the peer read nothing for %v", cfg.Silence))
			return
		}
		if cfg.Alive == nil || cfg.Alive() {
			c.out.beat()
		}
	}
}

func (c *conn) write() {
	for {
		b := c.out.take()
		if b == nil {
			select {
			case <-c.done:
				return
			case <-c.out.wake:
			}
			continue
		}
		c.writing.Store(true)
		err := c.stream.Send(b)
		c.writing.Store(false)
		if err != nil {
			c.end("write: " + reason(err))
			return
		}
		c.written.Add(1)
		c.link.count(func(n *Counters) { n.Sent += uint64(len(b.Frames)) })
		if last := b.Frames[len(b.Frames)-1].GetRefused(); last != nil && last.GetGroup() == "" && last.GetPeerGroup() == "" {
			return // the last frame of this stream: the peer ends it, or Close after a bound
		}
	}
}

func (c *conn) read(frames []*wire.Frame) {
	for {
		c.batches.Add(1)
		c.heard.Store(time.Now().UnixNano())
		c.link.count(func(n *Counters) { n.Received += uint64(len(frames)) })
		for _, f := range frames {
			if err := c.take(f); err != nil {
				c.end(err.Error())
				return
			}
		}
		b, err := c.stream.Recv()
		if err != nil {
			c.end("read: " + reason(err))
			return
		}
		if len(b.GetFrames()) == 0 {
			c.end("the peer broke framing: an empty batch")
			return
		}
		frames = b.GetFrames()
	}
}

// errOver ends the reading of a stream that is not the peer's current one any more.
var errOver = errors.New("the stream was replaced")

// take handles one frame. An error ends the stream.
func (c *conn) take(f *wire.Frame) error {
	ev := Event{Node: c.hello.node, Incarnation: c.hello.incarnation, Conn: c.id}
	var err error
	switch m := f.GetFrame().(type) {
	case *wire.Frame_Beat:
		ev.Kind = Heard
	case *wire.Frame_Room:
		if ev.Frame, err = decodeRoom(m.Room); err == nil {
			err = c.checkPages(ev.Frame)
		}
		ev.Kind = Frame
		if err != nil {
			if ev.Frame.Kind == 0 {
				c.link.count(func(n *Counters) { n.Unknown++ })
				return nil
			}
			c.bad(err)
			if ev.Frame.Room < 0 {
				return nil
			}
			ev.Kind, ev.Detail = BadFrame, err.Error()
			ev.Frame = core.Frame{Kind: ev.Frame.Kind, Room: ev.Frame.Room, S: ev.Frame.S, D: ev.Frame.D}
			err = nil
		}
	case *wire.Frame_Group:
		ev.Kind = GroupUp
		if ev.Group, err = decodeGroup(m.Group); err != nil {
			c.refuseGroup(ev.Group, err)
		}
	case *wire.Frame_GroupGone:
		ev.Kind = GroupGone
		ev.Group.Name = m.GroupGone.GetName()
		if ev.Group.Role, err = decodeRole("group_gone.role", m.GroupGone.GetRole()); err == nil {
			err = checkName("group_gone.name", ev.Group.Name)
		}
	case *wire.Frame_Pool:
		ev.Kind = PoolUp
		ev.Pool, err = decodePool(m.Pool)
	case *wire.Frame_PoolGone:
		ev.Kind = PoolGone
		ev.Pool.ID = m.PoolGone.GetPool()
	case *wire.Frame_Endpoint:
		ev.Kind = EndpointUp
		ev.Endpoint, err = decodeEndpoint(m.Endpoint, c.hello.incarnation)
	case *wire.Frame_Lost:
		ev.Kind = Lost
		ev.Endpoint, err = decodeLost(m.Lost)
	case *wire.Frame_Draining:
		ev.Kind = Draining
	case *wire.Frame_Announced:
		for _, gone := range c.link.forgotten(c) {
			gone.Node, gone.Incarnation, gone.Conn = ev.Node, ev.Incarnation, ev.Conn
			if !c.link.deliver(c, gone) {
				return errOver
			}
		}
		return nil
	case *wire.Frame_Refused:
		ev.Kind = Refused
		if ev.Refusal, err = decodeRefused(m.Refused); err == nil {
			c.link.noteRefusal(ev.Refusal)
			if ev.Refusal.Group == "" && ev.Refusal.PeerGroup == "" {
				c.link.deliver(c, ev)
				return fmt.Errorf("refused by the peer: %s: %s", ev.Refusal.Code, ev.Refusal.Detail)
			}
		}
	case *wire.Frame_Hello:
		return errors.New("the peer broke framing: a second Hello")
	default:
		c.link.count(func(n *Counters) { n.Unknown++ })
		return nil
	}
	if err != nil {
		c.bad(err)
		return nil
	}
	if err := c.held.take(&ev, 1); err != nil {
		return err
	}
	if !c.link.deliver(c, ev) {
		return errOver
	}
	return nil
}

func (c *conn) bad(err error) {
	c.link.count(func(n *Counters) { n.Bad++ })
	c.link.logBad(err)
}

// refuseGroup answers a malformed group, so that its owner sees why nothing pairs with it.
func (c *conn) refuseGroup(g Group, err error) {
	r := Refusal{Code: RefusedFingerprint, PeerGroup: g.Name, Detail: err.Error()}
	var fe *fieldError
	if errors.As(err, &fe) {
		r.Field = fe.field
	}
	if r.PeerGroup == "" || len(r.PeerGroup) > maxName {
		return // it cannot be named; the count has to do
	}
	c.link.noteRefusal(r)
	c.send(encodeRefused(r), false)
}

// checkPages checks the destination's pages against the pools that this stream announced.
func (c *conn) checkPages(f core.Frame) error {
	for _, r := range f.Ranks {
		for _, p := range r.Parts {
			pool, ok := c.held.pools[p.Pool]
			if !ok {
				return bad("pages.pool", "pool %d was not announced", p.Pool)
			}
			for _, run := range p.Runs {
				if last := int64(run.Start) + int64(run.Count-1)*int64(run.Stride); last >= int64(pool.pages) {
					return bad("pages", "page %d is outside pool %d of %d pages", last, p.Pool, pool.pages)
				}
			}
		}
	}
	return nil
}

// send queues a frame. A full queue means that the peer reads too slowly: the stream ends, and Resync
// heals what was lost.
func (c *conn) send(f *wire.Frame, urgent bool) bool {
	if c.out.put(f, urgent) {
		return true
	}
	c.link.count(func(n *Counters) { n.Overflows++ })
	c.end("overflow: the peer reads too slowly")
	return false
}

// firstFrame receives the first batch and returns its first frame and the rest.
func firstFrame(st stream) (*wire.Frame, []*wire.Frame, error) {
	b, err := st.Recv()
	if err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return nil, nil, err
	}
	if len(b.GetFrames()) == 0 {
		return nil, nil, errors.New("the peer broke framing: an empty batch")
	}
	return b.Frames[0], b.Frames[1:], nil
}
