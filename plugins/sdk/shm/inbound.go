package shm

import (
	"crypto/subtle"
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// inbound is a connection of a writer, seen by the owner of the regions.
type inbound struct {
	share    *Share
	conn     *net.UnixConn
	pid      int32
	over     chan struct{} // closed when the writer has let go of everything
	writer   uint32        // guarded by share.mu, as admitted
	admitted bool

	mu     sync.Mutex               // also keeps records from overlapping
	mapped map[uint64]chan struct{} // closed when the writer has let go of the region
}

func (h hello) same(o hello) bool {
	return subtle.ConstantTimeCompare(h.token[:], o.token[:]) == 1 && h.incarnation == o.incarnation && h.epoch == o.epoch
}

// errRefused: the writer was told so.
var errRefused = errors.New("not admitted")

func (c *inbound) serve() {
	err := c.admit()
	if err == nil {
		err = c.answer()
	}
	s := c.share
	s.mu.Lock()
	admitted := c.admitted
	if !s.closed && !errors.Is(err, io.EOF) && !errors.Is(err, errRefused) {
		s.counts["broken"]++
	}
	s.mu.Unlock()
	if admitted && !errors.Is(err, io.EOF) {
		// Whatever it was, only the end of the stream proves that the writer has let go.
		_ = c.conn.CloseWrite()
		c.drain()
	}
	c.conn.Close()
	s.mu.Lock()
	delete(s.inbound, c)
	if !admitted {
		s.waiting--
	}
	s.mu.Unlock()
	c.mu.Lock()
	for region, ch := range c.mapped {
		delete(c.mapped, region)
		close(ch)
	}
	c.mu.Unlock()
	close(c.over)
}

// drain reads until the writer is gone.
func (c *inbound) drain() {
	b := make([]byte, helloSize+1)
	for {
		_, fds, err := receive(c.conn, b)
		closeAll(fds)
		if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) {
			return
		}
		select {
		case <-c.share.closing:
			return
		case <-time.After(time.Millisecond): // it may go on talking, at our pace
		}
	}
}

// admit reads who connects and waits until that writer is named by PeerAccept.
func (c *inbound) admit() error {
	if err := c.conn.SetReadDeadline(time.Now().Add(c.share.admit)); err != nil {
		return err
	}
	b := make([]byte, helloSize+1)
	n, fds, err := receive(c.conn, b)
	if err != nil {
		return err
	}
	closeAll(fds)
	h, err := decodeHello(b[:n])
	if err != nil {
		return err
	}
	if err := c.conn.SetReadDeadline(time.Time{}); err != nil {
		return err
	}
	s := c.share
	timeout := time.NewTimer(s.admit)
	defer timeout.Stop()
	for {
		s.mu.Lock()
		handle, has, ok := s.find(h)
		if ok && has < maxOfWriter {
			c.writer, c.admitted = handle, true
			s.waiting--
		}
		changed := s.admitted
		s.mu.Unlock()
		switch {
		case ok && has < maxOfWriter:
			return c.say(record{kind: kindWelcome})
		case ok:
			s.count("refused", 1)
			_ = c.say(record{kind: kindWelcome, code: codeCrowded})
			return errRefused
		}
		select {
		case <-changed:
		case <-s.closing:
			return net.ErrClosed
		case <-timeout.C:
			s.count("refused", 1)
			s.logf(contract.Log_LEVEL_WARN, "shm: process %d is no admitted writer (incarnation %d, epoch %d)", c.pid, h.incarnation, h.epoch)
			_ = c.say(record{kind: kindWelcome, code: codeRefused})
			return errRefused
		}
	}
}

// answer serves the writer until the end of the stream, which is io.EOF.
func (c *inbound) answer() error {
	b := make([]byte, recordSize+1)
	for {
		n, fds, err := receive(c.conn, b)
		if err != nil {
			return err
		}
		closeAll(fds)
		r, err := decodeRecord(b[:n])
		if err != nil {
			return err
		}
		switch r.kind {
		case kindMap:
			err = c.mapRegion(r.region)
		case kindUnmapped:
			err = c.letGo(r.region)
		default:
			err = errors.New("a record of an unknown kind")
		}
		if err != nil {
			return err
		}
	}
}

// mapRegion hands a region over. The descriptors stay open meanwhile: Withdraw waits for c.mu.
func (c *inbound) mapRegion(id uint64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.share.mu.Lock()
	r := c.share.regions[id]
	c.share.mu.Unlock()
	if r == nil {
		return send(c.conn, record{kind: kindMapped, code: codeUnknown, region: id}.encode())
	}
	if c.mapped[id] != nil {
		return errors.New("MAP of a region that is mapped")
	}
	c.mapped[id] = make(chan struct{})
	return send(c.conn, record{kind: kindMapped, region: id, size: r.Size}.encode(), r.FD, r.Lease)
}

func (c *inbound) letGo(id uint64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	ch := c.mapped[id]
	if ch == nil {
		return errors.New("UNMAPPED of a region that is not mapped")
	}
	delete(c.mapped, id)
	close(ch)
	return nil
}

// withdraw asks for a region back. The channel is closed when the writer has let go; nil: it maps none.
func (c *inbound) withdraw(id uint64) <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	ch := c.mapped[id]
	if ch == nil {
		return nil
	}
	if err := send(c.conn, record{kind: kindWithdraw, region: id}.encode()); err != nil {
		_ = c.conn.CloseWrite() // it does not read; when it does, it finds the end
	}
	return ch
}

func (c *inbound) say(r record) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return send(c.conn, r.encode())
}
