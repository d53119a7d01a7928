package nixl

import (
	"crypto/hmac"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// receiver serves the writers of this process's regions. Each link has an agent of its own: to destroy it is the only
// proof that nothing of its writer lands any more, and must not cost the other writers anything.
type receiver struct {
	b        *Backend
	listener net.Listener
	admit    time.Duration // how long a writer that nobody has named yet is waited for
	work     sync.WaitGroup

	mu       sync.Mutex
	closed   bool
	writers  map[uint32]*writer // admitted, by handle
	past     []*writer          // dropped, so that they can be told that they were
	sessions map[string]*session
	fences   map[string]fence // by node
	changed  chan struct{}    // closed when a writer is admitted
	conns    map[net.Conn]struct{}
	open     map[*inbound]struct{}
	links    uint64 // so far; part of the agents' names
}

// writer is an admitted one. Guarded by receiver.mu, but for links.
type writer struct {
	peer  *sdk.Peer
	gone  bool
	conns map[net.Conn]struct{}
	links sync.WaitGroup // that may have an agent; none is added when gone
}

// session is the links of one peer that the writer was told of (greeting.Session): there is one at a time.
type session struct {
	turn sync.Mutex // held until the agent of a link is destroyed
	conn net.Conn   // of the newest link; guarded by receiver.mu
	refs int        // guarded by receiver.mu
}

// fence refuses the epochs of a node up to one, for good.
type fence struct {
	incarnation uint64
	epoch       uint32
}

func (f fence) covers(p *sdk.Peer) bool {
	return p.Incarnation < f.incarnation || p.Incarnation == f.incarnation && p.Epoch <= f.epoch
}

const (
	maxConns  = 4096
	maxLinks  = 16 // of one writer
	maxPast   = 4096
	maxFences = 4096
)

// inbound is a link, seen by its receiver.
type inbound struct {
	r     *receiver
	s     *stream
	agent *agent

	mu      sync.Mutex
	over    bool
	regions map[uint64]*lent
	ended   chan struct{} // closed when the agent is destroyed
}

type lent struct {
	reg  registration
	back chan struct{} // closed when the writer has given it back
}

func (r *receiver) serve() {
	for {
		conn, err := r.listener.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			time.Sleep(10 * time.Millisecond) // out of descriptors
			continue
		}
		r.mu.Lock()
		full := r.closed || len(r.conns) >= maxConns
		if !full {
			r.conns[conn] = struct{}{}
			r.work.Add(1)
		}
		r.mu.Unlock()
		if full {
			conn.Close()
			continue
		}
		go func() {
			defer r.work.Done()
			err := r.link(conn)
			conn.Close()
			r.mu.Lock()
			delete(r.conns, conn)
			quiet := r.closed || err == nil
			r.mu.Unlock()
			if !quiet {
				r.b.count.linksLost.Add(1)
			}
		}()
	}
}

// link serves one connection until it ends.
func (r *receiver) link(conn net.Conn) error {
	_ = conn.SetDeadline(time.Now().Add(handshakeBound))
	s := &stream{conn: conn, in: toReceiver}
	var g greeting
	if err := s.read(&g); err != nil {
		return err
	}
	if g.Version != wireVersion || g.Instance != r.b.instance || len(g.Nonce) != 16 {
		return s.write(challenge{Refused: fmt.Sprintf("this is version %d of another process", wireVersion)})
	}
	mine := nonce()
	if err := s.write(challenge{Nonce: mine}); err != nil {
		return err
	}
	var p proof
	if err := s.read(&p); err != nil {
		return err
	}
	_ = conn.SetDeadline(time.Now().Add(r.admit + handshakeBound))
	w, err := r.find(g, mine, p.MAC)
	if err != nil {
		r.b.count.refused.Add(1)
		return err
	}
	key := fmt.Sprintf("%d %d %s", g.Incarnation, g.Epoch, g.Session)
	r.mu.Lock()
	ses := r.sessions[key]
	if ses == nil {
		ses = &session{}
		r.sessions[key] = ses
	}
	ses.refs++
	if ses.conn != nil { // the writer makes another link only when it has given up the one before
		ses.conn.Close()
	}
	ses.conn = conn
	gone, crowded := w.gone, len(w.conns) >= maxLinks
	if !gone {
		w.links.Add(1)
		defer w.links.Done()
		w.conns[conn] = struct{}{}
	}
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		delete(w.conns, conn)
		if ses.refs--; ses.refs == 0 {
			delete(r.sessions, key)
		}
		r.mu.Unlock()
	}()
	ses.turn.Lock()
	defer ses.turn.Unlock()
	s.key = derive(w.peer.Token, "key", g, mine)
	_ = conn.SetDeadline(time.Now().Add(handshakeBound))
	switch {
	case gone:
		return s.write(message{Kind: kindFarewell, Detail: "the receiver has dropped this writer"})
	case crowded:
		return s.write(message{Kind: kindFailed, Detail: fmt.Sprintf("%d links of this writer are open", maxLinks)})
	}
	return r.serveLink(s, w)
}

// find waits until PeerAccept names the writer that knows this token.
func (r *receiver) find(g greeting, mine, mac []byte) (*writer, error) {
	timeout := time.NewTimer(r.admit)
	defer timeout.Stop()
	is := func(w *writer) bool {
		return w.peer.Incarnation == g.Incarnation && w.peer.Epoch == g.Epoch && hmac.Equal(mac, derive(w.peer.Token, "proof", g, mine))
	}
	for {
		r.mu.Lock()
		for _, w := range r.writers {
			if is(w) {
				r.mu.Unlock()
				return w, nil
			}
		}
		for _, w := range r.past {
			if is(w) {
				r.mu.Unlock()
				return w, nil
			}
		}
		changed := r.changed
		closed := r.closed
		r.mu.Unlock()
		if closed {
			return nil, net.ErrClosed
		}
		select {
		case <-changed:
		case <-r.b.start.Over:
			return nil, net.ErrClosed
		case <-timeout.C:
			return nil, fmt.Errorf("incarnation %d, epoch %d is no admitted writer", g.Incarnation, g.Epoch)
		}
	}
}

// serveLink makes the agent of a link and serves the writer until one of them ends it.
func (r *receiver) serveLink(s *stream, w *writer) error {
	r.mu.Lock()
	r.links++
	name := fmt.Sprintf("%s-r%d", r.b.agentName, r.links)
	r.mu.Unlock()
	a, err := r.b.lib.newAgent(name, r.b.cfg.ProgressDelay)
	if err != nil {
		r.b.start.Logf(contract.Log_LEVEL_ERROR, "writer %s: %v", w.peer.Node, err)
		return errors.Join(err, s.write(message{Kind: kindFailed, Detail: err.Error()}))
	}
	in := &inbound{r: r, s: s, agent: a, regions: map[uint64]*lent{}, ended: make(chan struct{})}
	r.mu.Lock()
	r.open[in] = struct{}{}
	r.mu.Unlock()
	defer in.end()
	md, err := a.metadata()
	if err != nil {
		return err
	}
	if err := s.write(message{Kind: kindWelcome, Agent: name, Metadata: md}); err != nil {
		return err
	}
	_ = s.conn.SetDeadline(time.Time{})
	for {
		var m message
		if err := s.read(&m); err != nil {
			return err
		}
		switch m.Kind {
		case kindMap:
			err = in.lend(m.Region)
		case kindUnmapped:
			in.back(m.Region)
		default:
			err = errFrame
		}
		if err != nil {
			return err
		}
	}
}

// end destroys the agent: the proof that nothing of this link lands any more.
func (in *inbound) end() {
	in.s.conn.Close()
	in.mu.Lock()
	in.over = true
	in.agent.destroy()
	for id, l := range in.regions {
		_ = in.agent.deregister(l.reg) // of a destroyed agent: frees the list
		delete(in.regions, id)
		close(l.back)
	}
	in.mu.Unlock()
	in.r.mu.Lock()
	delete(in.r.open, in)
	in.r.mu.Unlock()
	close(in.ended)
}

// lend registers a region for the writer. The region stays meanwhile: takeBack waits for in.mu.
func (in *inbound) lend(id uint64) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	region := in.r.b.region(id)
	if region == nil {
		return in.s.write(message{Kind: kindUnknown, Region: id})
	}
	if in.over || in.regions[id] != nil {
		return errFrame
	}
	reg, err := in.agent.register(region.bytes)
	if err != nil {
		return err
	}
	md, err := in.agent.metadataOf(reg)
	if err != nil {
		_ = in.agent.deregister(reg)
		return err
	}
	in.regions[id] = &lent{reg: reg, back: make(chan struct{})}
	return in.s.write(message{Kind: kindMapped, Region: id, Address: uint64(address(region.bytes)), Size: uint64(len(region.bytes)), Metadata: md})
}

// back notes that no request of the writer is on its way to the region.
func (in *inbound) back(id uint64) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if l := in.regions[id]; l != nil {
		_ = in.agent.deregister(l.reg)
		delete(in.regions, id)
		close(l.back)
	}
}

// takeBack ends the writer's use of a region, if need be by ending the link.
func (in *inbound) takeBack(id uint64) {
	in.mu.Lock()
	l := in.regions[id]
	in.mu.Unlock()
	if l == nil {
		return
	}
	_ = in.s.conn.SetWriteDeadline(time.Now().Add(withdrawBound))
	if in.s.write(message{Kind: kindWithdraw, Region: id}) == nil {
		_ = in.s.conn.SetWriteDeadline(time.Time{})
		select {
		case <-l.back:
			return
		case <-in.r.b.start.Over:
		case <-time.After(withdrawBound):
			in.r.b.start.Logf(contract.Log_LEVEL_WARN, "region %d: a writer does not let go of it; its link is ended", id)
		}
	}
	in.s.conn.Close()
	<-in.ended
}

// removeRegion returns when nothing of any writer can land in the region, which lend does not find any more.
func (r *receiver) removeRegion(id uint64) {
	r.mu.Lock()
	all := slices.Collect(maps.Keys(r.open))
	r.mu.Unlock()
	var work sync.WaitGroup
	for _, in := range all {
		work.Go(func() { in.takeBack(id) })
	}
	work.Wait()
}

func (r *receiver) accept(p *sdk.Peer) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fences[p.Node].covers(p) {
		return &sdk.Error{Cause: contract.Cause_CAUSE_REFUSED, Err: fmt.Errorf("incarnation %d, epoch %d of %s is fenced", p.Incarnation, p.Epoch, p.Node)}
	}
	r.writers[p.Handle] = &writer{peer: p, conns: map[net.Conn]struct{}{}}
	close(r.changed)
	r.changed = make(chan struct{})
	return nil
}

// unaccept returns when nothing of the writer can land any more.
func (r *receiver) unaccept(p *sdk.Peer) {
	r.mu.Lock()
	w := r.writers[p.Handle]
	if w == nil || w.peer != p {
		r.mu.Unlock()
		return
	}
	delete(r.writers, p.Handle)
	r.dropLocked(w)
	r.mu.Unlock()
	w.links.Wait()
}

// dropLocked ends the links of a writer and lets it make no other. r.mu is held.
func (r *receiver) dropLocked(w *writer) {
	w.gone = true
	for conn := range w.conns {
		conn.Close()
	}
	r.past = append(r.past, w)
	if len(r.past) > maxPast {
		r.past = append([]*writer(nil), r.past[len(r.past)-maxPast/2:]...)
	}
}

// fence refuses the epochs of a node for good, and returns when nothing of them can land any more.
func (r *receiver) fence(node string, incarnation uint64, epoch uint32) bool {
	f := fence{incarnation, epoch}
	r.mu.Lock()
	if old, ok := r.fences[node]; ok {
		if old.covers(&sdk.Peer{Incarnation: incarnation, Epoch: epoch}) {
			f = old
		}
	} else if len(r.fences) >= maxFences {
		r.mu.Unlock()
		return false
	}
	r.fences[node] = f
	var dropped []*writer
	for handle, w := range r.writers {
		if w.peer.Node == node && f.covers(w.peer) {
			delete(r.writers, handle)
			r.dropLocked(w)
			dropped = append(dropped, w)
		}
	}
	for _, w := range r.past {
		if w.peer.Node == node && f.covers(w.peer) {
			dropped = append(dropped, w)
		}
	}
	r.mu.Unlock()
	for _, w := range dropped {
		w.links.Wait()
	}
	return true
}

// close ends every link and returns when all agents are destroyed.
func (r *receiver) close() error {
	r.mu.Lock()
	r.closed = true
	for conn := range r.conns {
		conn.Close()
	}
	r.mu.Unlock()
	err := r.listener.Close()
	r.work.Wait()
	return err
}
