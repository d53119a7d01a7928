// Package workerapi is the engine's side of the worker API (docs/worker-api.md): a unix socket on
// which inference processes open rooms, and one status page a session that they poll without a
// system call.
//
// The package validates everything that a worker sends and turns it into core events; the node
// (Config.Node, Config.Post) owns the core, the plugins and the memory. Effects come back through
// Apply, which the node's owner goroutine calls after each Step.
package workerapi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
	"golang.org/x/sys/unix"
)

// Config is what Listen needs. Socket, Node and Post are required; zero values of the rest mean the
// defaults that stand beside them.
type Config struct {
	// Socket is the path of the unix socket, at most 107 bytes. Socket+".lock" is held (flock) while
	// the server lives and is never removed.
	Socket string
	// Group, when not nil, is the group id that may connect: the socket gets mode 0660 and that
	// group. Nil: mode 0600, and only the engine's own user and root are served.
	Group *int
	// Node owns memory and admits sessions.
	Node Node
	// Post hands an event to the core. It is called in order for one session and concurrently for
	// several. It may block to slow a worker down, but not for ever, and must not call back.
	Post func(core.Event)
	// Alive, when not nil, is asked before each beat; while it returns false the beat of every status
	// page stands still and workers see the engine as unresponsive. For a host that wants its owner
	// goroutine to be part of the beat.
	Alive func() bool
	Log   *slog.Logger // slog.Default()

	// RequirePeerGroup refuses rooms of sources that name no peer_group.
	RequirePeerGroup bool

	MaxSessions    int           // 64
	MaxRegions     int           // 64 a session
	MaxPools       int           // 16 a session
	MaxInflight    int           // 4096 unanswered requests a session; more are not read
	HelloTimeout   time.Duration // 5 s from accept to a valid hello
	WriteTimeout   time.Duration // 10 s for a worker to take its answers
	MaxRegionBytes int64         // 0: no limit
}

// Node is what the session server needs of the engine's node. Methods are called from session
// goroutines, for one session never two at a time (but done callbacks may be called from anywhere).
type Node interface {
	// Hello admits or refuses a worker: rank taken, group known with another size or role, layout
	// refused, draining. An *Error is passed on as it is, any other error as code "refused". A nil
	// error is followed by the event SessionUp and, at the end, by SessionClosed.
	Hello(s Session) (HelloReply, error)
	// AddRegion makes memory known to every backend. The node owns both descriptors from this call on
	// and closes them when no backend can touch the memory any more, at the latest when it decides so
	// after SessionClosed. done is called exactly once, from any goroutine, in bounded time, also
	// after the session ended; a nil error means that every backend is ready with the region and that
	// the canary was answered.
	AddRegion(s core.SessionID, r Region, done func(error))
	// AddPool makes a pool known to every backend. The node gives it an engine-wide id, resolves the
	// tensors' local region numbers and posts PoolUp before it calls done(nil). done as in AddRegion.
	AddPool(s core.SessionID, p Pool, done func(error))
	// SessionClosed is called once after the event SessionDown was posted. No call for the session
	// follows.
	SessionClosed(s core.SessionID)
}

// Session describes a worker that said hello.
type Session struct {
	ID     core.SessionID
	Group  string
	Role   statemachine.Role
	Rank   int32
	Size   int32
	Slots  int32
	Notify bool
	Layout Layout
	PID    int32 // of SO_PEERCRED; never used as a proof of anything
	UID    uint32
	GID    uint32
}

// HelloReply is the node's part of the answer to hello.
type HelloReply struct {
	Node        string
	Incarnation uint64
}

// Layout says what the bytes of a group's pages mean. It does not depend on the tensor-parallel size.
type Layout = layout.Cache

// Region is memory that a worker handed out: a sealed memfd of exactly Size bytes, opened read-write.
type Region struct {
	ID           int64 // the worker's own number
	Size         int64
	CanaryOffset int64
	Canary       uint64 // stands at CanaryOffset; its complement must stand there before done(nil)
	MemFD        int    // close-on-exec, owned by the node
	LeaseFD      int    // close-on-exec, owned by the node, which holds it while it has the memory
}

// Pool is the tensors that share page ids. Every page of every tensor lies inside its region.
type Pool struct {
	Ordinal int32
	Pages   int32
	State   bool // not pages of tokens but state of a fixed size per request
	Tensors []Tensor
}

// Tensor is one layer's K or V: page i occupies [Offset+i*PageStride, +PageBytes) of the region.
type Tensor struct {
	Region     int64 // the worker's own number
	Offset     int64
	PageStride int64
	PageBytes  int64
	Layer      int32
}

// Counters is a snapshot of what the server has seen since Listen.
type Counters struct {
	Sessions     int               // connected now, hello said
	Connections  uint64            // accepted
	Refused      uint64            // connections refused: credentials or MaxSessions
	HelloTimeout uint64            // connections closed because no hello came
	Frames       uint64            // well-formed requests
	Answers      uint64            // answers written
	Wakeups      uint64            // eventfd writes
	Words        uint64            // status words written
	SlowWorkers  uint64            // sessions closed because the worker did not take its answers
	Unmatched    uint64            // replies of the core without an open request: a bug
	Errors       map[string]uint64 // error answers by code
}

// Server serves the worker socket.
type Server struct {
	cfg   Config
	log   *slog.Logger
	lis   *net.UnixListener
	lock  *os.File
	limit Limits

	mu       sync.RWMutex                // the next three
	sessions map[core.SessionID]*session // hello said
	leaving  map[core.SessionID]struct{} // their SessionDown is being posted
	conns    map[*session]struct{}       // these and those that have not
	closed   bool

	nextID atomic.Uint64
	n      counters
	warned atomic.Int64 // when a line was last logged, unix ns
	unsaid atomic.Int64 // lines left out since
	wg     sync.WaitGroup
	stop   chan struct{}
	// Apply's own: sessions with new words, and with new answers.
	touched, answered []*session
}

type counters struct {
	connections, refused, helloTimeout, frames, answers, wakeups, words, slow, unmatched atomic.Uint64

	errors [len(codes)]atomic.Uint64
}

// Listen takes the socket's lock, removes a stale socket and starts serving. A socket that a live
// engine serves is never removed: the error names it.
func Listen(cfg Config) (*Server, error) {
	if cfg.Node == nil || cfg.Post == nil {
		return nil, errors.New("worker socket: Config.Node and Config.Post are required")
	}
	setDefault(&cfg.MaxSessions, 64)
	setDefault(&cfg.MaxRegions, 64)
	setDefault(&cfg.MaxPools, 16)
	setDefault(&cfg.MaxInflight, 4096)
	setDefault(&cfg.HelloTimeout, 5*time.Second)
	setDefault(&cfg.WriteTimeout, 10*time.Second)
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	lis, lock, err := listen(cfg.Socket, cfg.Group)
	if err != nil {
		return nil, fmt.Errorf("worker socket %s: %w", cfg.Socket, err)
	}
	s := &Server{
		cfg: cfg, log: cfg.Log, lis: lis, lock: lock,
		sessions: make(map[core.SessionID]*session),
		leaving:  make(map[core.SessionID]struct{}),
		conns:    make(map[*session]struct{}),
		stop:     make(chan struct{}),
		limit: Limits{
			HeaderBytes: maxHeader, PayloadBytes: maxPayload, AuxBytes: maxAux,
			Inflight: cfg.MaxInflight, Regions: cfg.MaxRegions, Pools: cfg.MaxPools, RegionBytes: cfg.MaxRegionBytes,
		},
	}
	s.wg.Add(2)
	go s.accept()
	go s.beat()
	return s, nil
}

func setDefault[T int | time.Duration](v *T, def T) {
	if *v <= 0 {
		*v = def
	}
}

// Close stops accepting, ends every session and waits for them until ctx is done. The status pages
// are unmapped here; workers see the end of their sockets.
func (s *Server) Close(ctx context.Context) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	close(s.stop)
	live := slices.Collect(maps.Keys(s.conns))
	s.mu.Unlock()
	err := s.lis.Close()
	for _, ss := range live {
		ss.hangUp()
	}
	done := make(chan struct{})
	go func() {
		s.wg.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-ctx.Done():
		return fmt.Errorf("worker socket %s: sessions still ending: %w", s.cfg.Socket, ctx.Err())
	}
	return errors.Join(err, s.lock.Close())
}

// Counters returns a snapshot for metrics.
func (s *Server) Counters() Counters {
	s.mu.RLock()
	up := len(s.sessions)
	s.mu.RUnlock()
	c := Counters{
		Sessions: up, Connections: s.n.connections.Load(), Refused: s.n.refused.Load(),
		HelloTimeout: s.n.helloTimeout.Load(), Frames: s.n.frames.Load(), Answers: s.n.answers.Load(),
		Wakeups: s.n.wakeups.Load(), Words: s.n.words.Load(), SlowWorkers: s.n.slow.Load(), Unmatched: s.n.unmatched.Load(),
		Errors: make(map[string]uint64, len(codes)),
	}
	for i, code := range codes {
		if v := s.n.errors[i].Load(); v > 0 {
			c.Errors[string(code)] = v
		}
	}
	return c
}

// Apply carries out the worker effects of one Step: aux records, words, replies, in this order. Only
// the owner goroutine calls it. It never waits for a worker: words are stores to memory, replies go
// to bounded queues, and there is at most one eventfd write a session. An aux record is kept, not
// copied, until its slot is released. Effects of a session that has ended are dropped.
func (s *Server) Apply(e *core.Effects) {
	if len(e.Auxes) == 0 && len(e.Words) == 0 && len(e.Replies) == 0 {
		return
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	var ss *session // of the effect before: effects of a session stand together
	find := func(id core.SessionID) *session {
		if ss == nil || ss.id != id {
			ss = s.sessions[id]
		}
		return ss
	}
	for i := range e.Auxes {
		if a := &e.Auxes[i]; find(a.Session) != nil {
			ss.setAux(a.Slot, a.Room, a.Aux)
		}
	}
	for i := range e.Words {
		if w := &e.Words[i]; find(w.Session) != nil && ss.setWord(w) {
			s.touched = append(s.touched, ss)
		}
	}
	s.n.words.Add(uint64(len(e.Words)))
	for i := range e.Replies {
		if r := &e.Replies[i]; find(r.Session) != nil && ss.reply(r) && !ss.answered {
			ss.answered = true
			s.answered = append(s.answered, ss)
		}
	}
	for i, a := range s.answered { // once a step, so that its answers leave together
		a.answered = false
		a.signal()
		s.answered[i] = nil
	}
	s.answered = s.answered[:0]
	for i, t := range s.touched {
		t.wake()
		s.touched[i] = nil
	}
	s.touched = s.touched[:0]
}

// HungUp returns the sessions whose worker has closed its socket or exited, although what it sent
// before may not be read yet. For the owner after a pause of the whole process: the session's own
// goroutine says SessionDown later, in its own time. A session that has left and is not returned has
// its SessionDown posted already.
func (s *Server) HungUp() []core.SessionID {
	s.mu.RLock()
	defer s.mu.RUnlock()
	var gone []core.SessionID
	for id, ss := range s.sessions {
		if hungUp(ss.conn) || ss.exit.exited() {
			gone = append(gone, id)
		}
	}
	for id := range s.leaving {
		gone = append(gone, id)
	}
	return gone
}

// accept serves connections until the listener is closed.
func (s *Server) accept() {
	defer s.wg.Done()
	pause := 5 * time.Millisecond
	for {
		conn, err := s.lis.AcceptUnix()
		if err == nil {
			pause = 5 * time.Millisecond
			s.n.connections.Add(1)
			s.admit(conn)
			continue
		}
		if errors.Is(err, net.ErrClosed) {
			return
		}
		// Out of descriptors or memory: it passes, and the loop must not die of it.
		s.log.Warn("worker socket: accept failed", "err", err, "again_in", pause)
		select {
		case <-time.After(pause):
		case <-s.stop:
			return
		}
		pause = min(2*pause, time.Second)
	}
}

// admit checks who connected and starts the session.
func (s *Server) admit(conn *net.UnixConn) {
	cred, pidfd, err := peerOf(conn)
	if err == nil && s.cfg.Group == nil && cred.Uid != 0 && int(cred.Uid) != os.Getuid() {
		err = bad(Refused, "uid", RuleAccess, "user %d may not use this engine; it serves user %d: run as that user, or set the socket's group", cred.Uid, os.Getuid())
	}
	var ss *session
	s.mu.Lock()
	switch n := len(s.conns); {
	case s.closed:
		err = bad(Draining, "", RuleAccess, "the engine is shutting down")
	case err == nil && n >= s.cfg.MaxSessions:
		err = bad(Limit, "sessions", RuleLimits, "%d workers are connected, the most that are allowed", n)
	}
	if err == nil {
		ss = newSession(s, conn, cred, pidfd)
		s.conns[ss] = struct{}{}
		s.wg.Add(1)
	}
	s.mu.Unlock()
	if err != nil {
		s.n.refused.Add(1)
		e := asError(err)
		s.countError(e.Code)
		conn.SetWriteDeadline(time.Now().Add(time.Second))
		conn.Write(encode(errorAnswer(0, e), nil))
		conn.Close()
		if pidfd >= 0 {
			unix.Close(pidfd)
		}
		return
	}
	go func() {
		defer s.wg.Done()
		ss.serve()
		s.mu.Lock()
		delete(s.conns, ss)
		s.mu.Unlock()
	}()
}

// up makes a session visible to Apply and beat; down takes it away. Between down and posted its SessionDown is
// under way.
func (s *Server) up(ss *session) {
	s.mu.Lock()
	s.sessions[ss.id] = ss
	s.mu.Unlock()
}

func (s *Server) down(ss *session) {
	s.mu.Lock()
	delete(s.sessions, ss.id)
	s.leaving[ss.id] = struct{}{}
	s.mu.Unlock()
}

func (s *Server) posted(ss *session) {
	s.mu.Lock()
	delete(s.leaving, ss.id)
	s.mu.Unlock()
}

// warn logs what a worker can cause, at most once a second, with the number of lines left out.
func (s *Server) warn(msg string, args ...any) {
	now := time.Now().UnixNano()
	last := s.warned.Load()
	if now-last < int64(time.Second) || !s.warned.CompareAndSwap(last, now) {
		s.unsaid.Add(1)
		return
	}
	if n := s.unsaid.Swap(0); n > 0 {
		args = append(args, "left_out", n)
	}
	s.log.Warn(msg, args...)
}

func (s *Server) countError(c Code) {
	for i, code := range codes {
		if code == c {
			s.n.errors[i].Add(1)
		}
	}
}

// beatEvery is the period of the status pages' beat.
const beatEvery = 100 * time.Millisecond

// beat writes the monotonic clock into every status page.
func (s *Server) beat() {
	defer s.wg.Done()
	t := time.NewTicker(beatEvery)
	defer t.Stop()
	for {
		select {
		case <-s.stop:
			return
		case <-t.C:
		}
		if s.cfg.Alive != nil && !s.cfg.Alive() {
			continue
		}
		now := monotonic()
		s.mu.RLock()
		for _, ss := range s.sessions {
			ss.beat(now)
		}
		s.mu.RUnlock()
	}
}

// monotonic returns CLOCK_MONOTONIC in nanoseconds.
func monotonic() uint64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		return 0
	}
	return uint64(t.Nano())
}
