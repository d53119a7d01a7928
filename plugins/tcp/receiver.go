package tcp

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// receiver is the half that is written to: listeners, admitted writers and their connections.
type receiver struct {
	b         *Backend
	listeners []net.Listener
	wg        sync.WaitGroup // accept loops, handshakes, connections

	mu      sync.Mutex
	closed  bool
	total   int                   // connections, also those in the handshake
	opening map[net.Conn]struct{} // in the handshake
	conns   map[*inbound]struct{}
	writers map[writerKey]*writer
	fences  map[string]fencePoint // by node
}

type writerKey struct {
	node        string
	incarnation uint64
	epoch       uint32
}

// writer is an admitted writer epoch.
type writer struct {
	key     writerKey
	token   []byte
	refused atomic.Bool // no slice of it may land any more

	// Guarded by receiver.mu.
	conns   map[uint64]*inbound
	sources map[uint64]*source
}

// fencePoint refuses every epoch of a node up to and including this one.
type fencePoint struct {
	incarnation uint64
	epoch       uint32
}

func (f fencePoint) refuses(k writerKey) bool {
	return k.incarnation < f.incarnation || k.incarnation == f.incarnation && k.epoch <= f.epoch
}

func newReceiver(b *Backend) *receiver {
	return &receiver{
		b:       b,
		opening: map[net.Conn]struct{}{},
		conns:   map[*inbound]struct{}{},
		writers: map[writerKey]*writer{},
		fences:  map[string]fencePoint{},
	}
}

// listen opens the listeners and returns the endpoint that names them.
func (r *receiver) listen() (endpoint, error) {
	b := r.b
	ep := endpoint{
		Version:  endpointVersion,
		Instance: hex.EncodeToString(b.self[:]),
		Host:     b.start.HostID,
		Lock:     b.lock.f.Name(),
		LockDev:  b.lock.dev,
		LockIno:  b.lock.ino,
	}
	l, err := net.Listen("tcp", b.cfg.Listen)
	if err != nil {
		return ep, fmt.Errorf("option listen: %w", err)
	}
	r.listeners = append(r.listeners, l)
	_, port, _ := net.SplitHostPort(l.Addr().String())
	for _, a := range b.cfg.Advertise {
		if h, p, err := net.SplitHostPort(a); err == nil && p == "0" {
			a = net.JoinHostPort(h, port)
		}
		ep.TCP = append(ep.TCP, a)
	}
	if len(ep.TCP) == 0 {
		ep.TCP = []string{l.Addr().String()}
	}
	if b.cfg.Shm {
		path := filepath.Join(b.start.RuntimeDir, "tcp.sock")
		if len(path) > maxUnixPath {
			l.Close()
			return ep, fmt.Errorf("runtime directory: socket path %s has %d bytes, at most %d are possible; use a shorter directory", path, len(path), maxUnixPath)
		}
		u, err := net.Listen("unix", path)
		if err != nil {
			l.Close()
			return ep, fmt.Errorf("runtime directory: %w", err)
		}
		r.listeners = append(r.listeners, u)
		ep.Unix = path
	}
	for _, l := range r.listeners {
		r.wg.Go(func() { r.acceptLoop(l) })
	}
	return ep, nil
}

// acceptLoop serves one listener until it closes.
func (r *receiver) acceptLoop(l net.Listener) {
	slots := make(chan struct{}, maxHandshakes)
	for {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // out of descriptors or memory: wait for some to come back
			r.b.count.connectionsRefused.Add(1)
			r.b.start.Logf(contract.Log_LEVEL_ERROR, "accept on %s: %v", l.Addr(), err)
			select {
			case <-time.After(100 * time.Millisecond):
				continue
			case <-r.b.ctx.Done():
				return
			}
		}
		select {
		case slots <- struct{}{}:
		default:
			r.b.count.connectionsRefused.Add(1)
			c.Close()
			continue
		}
		if !r.open(c) {
			<-slots
			r.b.count.connectionsRefused.Add(1)
			c.Close()
			continue
		}
		r.wg.Go(func() {
			defer r.gone()
			in, err := r.admit(c)
			<-slots
			r.opened(c)
			if err != nil {
				c.Close()
				r.b.count.handshakesRefused.Add(1)
				r.b.start.Logf(contract.Log_LEVEL_DEBUG, "connection from %s refused: %v", c.RemoteAddr(), err)
				return
			}
			in.serve()
			r.leave(in)
		})
	}
}

// open counts a new connection; false when there is no room.
func (r *receiver) open(c net.Conn) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed || r.total >= r.b.cfg.MaxConnections {
		return false
	}
	r.total++
	r.opening[c] = struct{}{}
	return true
}

// opened ends the handshake phase of c.
func (r *receiver) opened(c net.Conn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.opening, c)
}

// gone makes room for another connection.
func (r *receiver) gone() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.total--
}

// admit does the handshake and registers the connection before the writer is told.
func (r *receiver) admit(c net.Conn) (*inbound, error) {
	var w *writer
	timeout := milliseconds(r.b.cfg.HandshakeTimeout)
	if err := tune(c, milliseconds(r.b.cfg.SilenceTimeout)); err != nil {
		return nil, err
	}
	h, givenUp, err := examine(c, timeout, func(h hello) ([]byte, status) {
		if h.target != r.b.self {
			return nil, statusOther
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		switch w = r.writers[writerKey{h.node, h.incarnation, h.epoch}]; {
		case w == nil:
			return nil, statusUnknown
		case w.refused.Load(): // a slice of it may be landing still
			return nil, statusRefused
		}
		return w.token, statusOK
	})
	if err != nil {
		return nil, err
	}
	if !r.finish(w, givenUp, timeout) {
		return nil, errors.New("a connection that the writer gave up is still busy")
	}
	in := newInbound(r.b, w, h.conn, c)
	if s := r.join(in); s != statusOK {
		c.Write([]byte{byte(s)})
		return nil, s
	}
	if _, err = c.Write([]byte{byte(statusOK)}); err == nil {
		err = c.SetDeadline(time.Time{})
	}
	if err != nil {
		r.leave(in)
		in.discard()
		return nil, err
	}
	r.b.count.handshakes.Add(1)
	return in, nil
}

// finish closes connections of w and waits until nothing of them can land.
func (r *receiver) finish(w *writer, numbers []uint64, timeout time.Duration) bool {
	var gone []*inbound
	r.mu.Lock()
	for _, n := range numbers {
		if in := w.conns[n]; in != nil {
			gone = append(gone, in)
		}
	}
	r.mu.Unlock()
	ctx, cancel := context.WithTimeout(r.b.ctx, timeout)
	defer cancel()
	return waitGone(ctx, gone)
}

// waitGone closes connections and waits until their goroutines have ended.
func waitGone(ctx context.Context, conns []*inbound) bool {
	for _, in := range conns {
		in.conn.Close()
	}
	for _, in := range conns {
		select {
		case <-in.done:
		case <-ctx.Done():
			return false
		}
	}
	return true
}

func (r *receiver) join(in *inbound) status {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch w := in.w; {
	case w.refused.Load():
		return statusRefused
	case r.closed:
		return statusFull
	case len(w.conns) >= maxPerWriter || w.conns[in.number] != nil:
		return statusFull
	default:
		w.conns[in.number] = in
		r.conns[in] = struct{}{}
		return statusOK
	}
}

// leave forgets a connection whose goroutine copies nothing any more.
func (r *receiver) leave(in *inbound) {
	r.mu.Lock()
	delete(in.w.conns, in.number)
	delete(r.conns, in)
	r.mu.Unlock()
	close(in.done)
}

func (r *receiver) connections() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.conns)
}

// barrier returns when every slice that was checked before the call has landed. Whoever takes a
// permission away changes it first and passes the barrier then: no later slice can have seen the old
// state. It waits for at most one slice of each connection.
func (r *receiver) barrier() {
	r.mu.Lock()
	conns := make([]*inbound, 0, len(r.conns))
	for in := range r.conns {
		conns = append(conns, in)
	}
	r.mu.Unlock()
	for _, in := range conns {
		in.gate.Lock()
		//lint:ignore SA2001 only passing through
		in.gate.Unlock()
	}
}

func (r *receiver) accept(p *sdk.Peer) error {
	if len(p.Token) != tokenLen {
		return fmt.Errorf("writer %s: token of %d bytes, %d are needed", p.Node, len(p.Token), tokenLen)
	}
	k := writerKey{p.Node, p.Incarnation, p.Epoch}
	r.mu.Lock()
	defer r.mu.Unlock()
	if f, ok := r.fences[k.node]; ok && f.refuses(k) {
		return fmt.Errorf("writer %s incarnation %d epoch %d was fenced", k.node, k.incarnation, k.epoch)
	}
	if _, ok := r.writers[k]; ok {
		return fmt.Errorf("writer %s incarnation %d epoch %d is admitted already", k.node, k.incarnation, k.epoch)
	}
	r.writers[k] = &writer{
		key: k, token: append([]byte(nil), p.Token...),
		conns: map[uint64]*inbound{}, sources: map[uint64]*source{},
	}
	return nil
}

// unaccept refuses a writer and returns when nothing of it can land.
func (r *receiver) unaccept(p *sdk.Peer) {
	k := writerKey{p.Node, p.Incarnation, p.Epoch}
	r.mu.Lock()
	w := r.writers[k]
	var gone []*inbound
	if w != nil {
		w.refused.Store(true)
		for _, in := range w.conns {
			gone = append(gone, in)
		}
	}
	r.mu.Unlock()
	if w == nil {
		return
	}
	for _, in := range gone {
		in.conn.Close()
	}
	r.barrier()
	r.mu.Lock()
	delete(r.writers, k) // only now: "unknown" tells the writer that nothing of it can land
	r.mu.Unlock()
}

// fence refuses for good every epoch of the node up to (incarnation, epoch), 0 meaning all epochs of
// that incarnation, and reports whether all that served them has ended within ctx.
func (r *receiver) fence(ctx context.Context, node string, incarnation uint64, epoch uint32) bool {
	if epoch == 0 {
		epoch = 1<<32 - 1
	}
	point := fencePoint{incarnation, epoch}
	r.mu.Lock()
	old, ok := r.fences[node]
	if !ok && len(r.fences) >= maxFenced {
		r.mu.Unlock()
		return false
	}
	if !ok || !old.refuses(writerKey{node, incarnation, epoch}) {
		r.fences[node] = point
	}
	for k, w := range r.writers {
		if k.node == node && point.refuses(k) {
			w.refused.Store(true)
		}
	}
	var gone []*inbound
	for in := range r.conns {
		if in.w.key.node == node && point.refuses(in.w.key) {
			gone = append(gone, in)
		}
	}
	r.mu.Unlock()
	return waitGone(ctx, gone)
}

// close ends all connections, waits for them, and only then closes the listeners: another process can
// have the address only when this one copies nothing any more.
func (r *receiver) close() error {
	r.mu.Lock()
	r.closed = true
	for c := range r.opening {
		c.Close()
	}
	var gone []*inbound
	for in := range r.conns {
		in.w.refused.Store(true)
		gone = append(gone, in)
	}
	r.mu.Unlock()
	for _, in := range gone {
		in.conn.Close()
	}
	r.barrier()
	var errs []error
	for _, l := range r.listeners {
		errs = append(errs, l.Close())
	}
	r.wg.Wait()
	return errors.Join(errs...)
}
