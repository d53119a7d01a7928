package shm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

const (
	// lateBound is how long peers may take to let go of what they map before they are named in the log. It is
	// longer than an engine lets a plugin be silent before it kills it.
	lateBound = 15 * time.Second
	// admitBound is how long a writer that connects waits for the PeerAccept that names it, after it took
	// at most as long to say who it is.
	admitBound = 5 * time.Second
	// maxInbound and maxWaiting bound the connections: in all, and not yet admitted.
	maxInbound = 1024
	maxWaiting = 64
	// maxOfWriter bounds the connections of one writer; it needs one, and one more while it reconnects.
	maxOfWriter = 4
	// closeBound is how long Close waits for goroutines.
	closeBound = 5 * time.Second
)

// Share is what this plugin process shares with its peers, and what it maps of theirs. Its methods are
// those of sdk.Backend and sdk.Accepter of the same names, to be embedded or called; all may be called
// from any goroutine.
type Share struct {
	start    sdk.Start
	path     string
	listener *net.UnixListener
	closing  chan struct{}
	late     time.Duration // lateBound
	admit    time.Duration // admitBound
	running  sync.WaitGroup

	mu       sync.Mutex
	regions  map[uint64]*sdk.Region
	writers  map[uint32]hello // by the handle of PeerAccept
	admitted chan struct{}    // closed and renewed when a writer is added
	inbound  map[*inbound]struct{}
	waiting  int // of inbound, those without a writer
	remotes  map[*Remote]struct{}
	closed   bool
	counts   map[string]uint64
}

// Listen opens the socket. Call it from Backend.Start and return Endpoint from there.
func Listen(s sdk.Start) (*Share, error) {
	path, err := filepath.Abs(filepath.Join(s.RuntimeDir, "shm"))
	if err != nil {
		return nil, fmt.Errorf("shm: %w", err)
	}
	if len(path) > maxPath {
		return nil, fmt.Errorf("shm: socket path %s has %d bytes, at most %d are possible; use a shorter runtime directory", path, len(path), maxPath)
	}
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		return nil, fmt.Errorf("shm: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		l.Close()
		return nil, fmt.Errorf("shm: %w", err)
	}
	share := &Share{
		start: s, path: path, listener: l, closing: make(chan struct{}), late: lateBound, admit: admitBound, regions: map[uint64]*sdk.Region{},
		writers: map[uint32]hello{}, admitted: make(chan struct{}), inbound: map[*inbound]struct{}{},
		remotes: map[*Remote]struct{}{}, counts: map[string]uint64{},
	}
	share.running.Go(share.accept)
	return share, nil
}

// Endpoint is what Backend.Start returns. Of a nil Share (Listen failed) it is nil.
func (s *Share) Endpoint() []byte {
	if s == nil {
		return nil
	}
	return []byte(scheme + s.path)
}

// AddRegion lets admitted peers map the region. Its error is always nil.
func (s *Share) AddRegion(r *sdk.Region) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.regions[r.ID] = r
	return nil
}

// RemoveRegion is Withdraw.
func (s *Share) RemoveRegion(r *sdk.Region) { _ = s.Withdraw(r) }

// Withdraw takes the region away from all peers. When it returns nil no peer maps it any more: each has
// said so, or its process is gone. No time proves that (R4), so it waits as long as that takes: a peer that
// stands still is named in the log, and ended by its own engine. The error is the end of the session.
func (s *Share) Withdraw(r *sdk.Region) error {
	s.mu.Lock()
	delete(s.regions, r.ID)
	conns := make([]*inbound, 0, len(s.inbound))
	for c := range s.inbound {
		conns = append(conns, c)
	}
	s.mu.Unlock()

	var gone []<-chan struct{}
	var pids []int32
	for _, c := range conns {
		// Under the lock of c, so that its descriptor is not being sent when the caller closes it.
		if ch := c.withdraw(r.ID); ch != nil {
			gone, pids = append(gone, ch), append(pids, c.pid)
		}
	}
	return s.await(fmt.Sprintf("region %d", r.ID), gone, pids)
}

// await returns when all channels are closed, or the session is over. Who lets lateBound pass is logged.
func (s *Share) await(what string, gone []<-chan struct{}, pids []int32) error {
	late := time.NewTimer(s.late)
	defer late.Stop()
	for i := 0; i < len(gone); {
		select {
		case <-gone[i]:
			i++
		case <-late.C:
			s.count("withdraw_late", 1)
			s.logf(contract.Log_LEVEL_ERROR, "shm: %s: process %d, at least, has not let go of it after %v; its engine ends one that stands still", what, pids[i], s.late)
		case <-s.start.Over:
			return errClosed
		case <-s.closing:
			return errClosed
		}
	}
	return nil
}

// Accept admits a writer.
func (s *Share) Accept(p *sdk.Peer) error {
	if len(p.Token) != tokenSize {
		return fmt.Errorf("shm: the token of peer %d has %d bytes, not %d", p.Handle, len(p.Token), tokenSize)
	}
	h := hello{incarnation: p.Incarnation, epoch: p.Epoch}
	copy(h.token[:], p.Token)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.writers[p.Handle] = h
	close(s.admitted)
	s.admitted = make(chan struct{})
	return nil
}

// Unaccept dismisses the writer and waits, as Withdraw does, until it maps nothing any more.
func (s *Share) Unaccept(p *sdk.Peer) {
	s.mu.Lock()
	delete(s.writers, p.Handle)
	var gone []<-chan struct{}
	var pids []int32
	for c := range s.inbound {
		if c.writer == p.Handle && c.admitted {
			_ = c.conn.CloseWrite()
			gone, pids = append(gone, c.over), append(pids, c.pid)
		}
	}
	s.mu.Unlock()
	_ = s.await(fmt.Sprintf("what writer %s (peer %d) maps", p.Node, p.Handle), gone, pids)
}

// AddPeer dials the peer and keeps the Remote in p.Data.
func (s *Share) AddPeer(p *sdk.Peer) (contract.Lane, error) {
	r, err := s.Dial(p)
	if err != nil {
		return 0, err
	}
	p.Data = r
	return contract.Lane_LANE_SHM, nil
}

// RemovePeer closes the Remote that AddPeer made.
func (s *Share) RemovePeer(p *sdk.Peer) {
	if r, ok := p.Data.(*Remote); ok {
		r.Close()
	}
}

// Dial connects to the share of the peer's plugin; the peer's engine may admit us later. The caller
// closes the Remote.
func (s *Share) Dial(p *sdk.Peer) (*Remote, error) {
	path, ok := strings.CutPrefix(string(p.Endpoint), scheme)
	switch {
	case !p.SameHost:
		return nil, failure(contract.Cause_CAUSE_PEER_UNREACHABLE, "engine %s is on another machine, shared memory ends at this one; choose another backend for the pair", p.Node)
	case !ok || !filepath.IsAbs(path) || len(path) > maxPath:
		return nil, failure(contract.Cause_CAUSE_PEER_UNREACHABLE, "the endpoint of engine %s is not one of this backend: %q", p.Node, cut(p.Endpoint))
	case len(p.Token) != tokenSize:
		return nil, failure(contract.Cause_CAUSE_PROTOCOL, "the token of peer %d has %d bytes, not %d", p.Handle, len(p.Token), tokenSize)
	}
	r := &Remote{share: s, node: p.Node, path: path, hello: hello{incarnation: s.start.Incarnation, epoch: s.start.Epoch}}
	copy(r.hello.token[:], p.Token)
	ctx, cancel := context.WithTimeout(context.Background(), dialBound)
	defer cancel()
	if _, err := r.connected(ctx); err != nil {
		return nil, err
	}
	s.mu.Lock()
	closed := s.closed
	s.remotes[r] = struct{}{}
	s.mu.Unlock()
	if closed {
		r.Close()
		return nil, errClosed
	}
	return r, nil
}

var errClosed = &sdk.Error{Cause: contract.Cause_CAUSE_SHUTDOWN, Err: errors.New("shm: closed")}

// Counters counts what went wrong; StatsReporter.
func (s *Share) Counters() map[string]uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make(map[string]uint64, len(s.counts))
	for name, n := range s.counts {
		all["shm."+name] = n
	}
	return all
}

// Close unmaps everything of others, and forgets what was shared. Closing a nil Share does nothing.
func (s *Share) Close() error {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	close(s.closing)
	remotes := make([]*Remote, 0, len(s.remotes))
	for r := range s.remotes {
		remotes = append(remotes, r)
	}
	for c := range s.inbound {
		c.conn.Close()
	}
	s.mu.Unlock()
	err := s.listener.Close()
	for _, r := range remotes {
		r.Close()
	}
	done := make(chan struct{})
	go func() { s.running.Wait(); close(done) }()
	select {
	case <-done:
		return err
	case <-time.After(closeBound):
		return errors.Join(err, errors.New("shm: a copy into the memory of a peer does not end"))
	}
}

// spawn runs f on a goroutine that Close waits for; false after Close.
func (s *Share) spawn(f func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.running.Go(f)
	}
	return !s.closed
}

func (s *Share) count(name string, n uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts[name] += n
}

func (s *Share) logf(level contract.Log_Level, format string, args ...any) {
	if s.start.Logf != nil {
		s.start.Logf(level, format, args...)
	}
}

func failure(cause contract.Cause, format string, args ...any) error {
	return &sdk.Error{Cause: cause, Err: fmt.Errorf("shm: "+format, args...)}
}

func cut(b []byte) []byte { return b[:min(len(b), 64)] }

// find returns the handle of the writer that h names, and how many connections it has. s.mu is held.
func (s *Share) find(h hello) (handle uint32, has int, ok bool) {
	for handle, w := range s.writers {
		if !w.same(h) {
			continue
		}
		for c := range s.inbound {
			if c.admitted && c.writer == handle {
				has++
			}
		}
		return handle, has, true
	}
	return 0, 0, false
}

// accept runs until Close.
func (s *Share) accept() {
	for {
		c, err := s.listener.AcceptUnix()
		select {
		case <-s.closing:
			if err == nil {
				c.Close()
			}
			return
		default:
		}
		if err != nil {
			s.count("accept_errors", 1)
			select { // out of descriptors, most likely: others may give some back
			case <-time.After(50 * time.Millisecond):
			case <-s.closing:
				return
			}
			continue
		}
		s.enter(c)
	}
}

// enter takes a connection in, if there is room for it.
func (s *Share) enter(c *net.UnixConn) {
	pid, err := ofThisUser(c)
	if err != nil {
		s.count("refused", 1)
		s.logf(contract.Log_LEVEL_WARN, "shm: connection refused: %v", err)
		c.Close()
		return
	}
	in := &inbound{share: s, conn: c, pid: pid, mapped: map[uint64]chan struct{}{}, over: make(chan struct{})}
	s.mu.Lock()
	full := len(s.inbound) >= maxInbound || s.waiting >= maxWaiting
	if full {
		s.counts["refused"]++
	}
	if !full && !s.closed {
		s.inbound[in] = struct{}{}
		s.waiting++
		s.running.Go(in.serve)
		s.mu.Unlock()
		return
	}
	s.mu.Unlock()
	if full {
		_ = send(c, record{kind: kindWelcome, code: codeCrowded}.encode())
	}
	c.Close()
}

var (
	_ sdk.Accepter      = (*Share)(nil)
	_ sdk.StatsReporter = (*Share)(nil)
)
