package peer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/internal/membership"
	"github.com/terminus-kv/terminus/internal/peer/wire"
)

// Links is the streams to all peers. Methods are safe for concurrent use and never wait for a peer.
type Links struct {
	cfg      Config
	log      *slog.Logger
	tls      *tlsFiles // nil: none
	listener net.Listener
	server   *grpc.Server
	ctx      context.Context // ends when Close wants every goroutine to end
	cancel   context.CancelFunc
	wg       sync.WaitGroup

	lastConn  atomic.Uint64
	met       atomic.Int64 // peers that ever had a stream
	maxMet    int64
	strangers atomic.Int64
	rejected  atomic.Uint64

	mu      sync.Mutex
	closing bool
	// links has every peer that is named or ever had a stream: the order of its streams and what the Sink holds of
	// it must outlive a gap in membership.
	links  map[string]*link
	named  chan struct{} // closed by the next SetPeers
	looked time.Time     // Config.Look was called last
	announcements
}

// maxMet bounds the peers that ever had a stream, since this engine started. What is held of one, here and in the core,
// outlives it: some kilobytes. One that was met stays welcome.
const maxMet = 4096

// New checks cfg and listens. Peers that dial wait until SetPeers names them, for a bounded time.
func New(cfg Config) (*Links, error) {
	setDefaults(&cfg)
	if err := cfg.check(); err != nil {
		return nil, fmt.Errorf("peer links: %w", err)
	}
	l := &Links{cfg: cfg, log: cfg.Log, maxMet: maxMet, links: make(map[string]*link), named: make(chan struct{}), announcements: newAnnouncements()}
	if cfg.TLS != nil { // also of one that listens on a unix socket: it may dial TCP
		var err error
		if l.tls, err = openTLS(*cfg.TLS, cfg.Node); err != nil {
			return nil, fmt.Errorf("peer links: %w", err)
		}
	}
	var err error
	if l.listener, err = listen(cfg.Listen, cfg.Silence, l.log); err != nil {
		return nil, fmt.Errorf("peer links: %w", err)
	}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	l.server = l.newServer()
	l.wg.Add(1)
	go func() {
		defer l.wg.Done()
		if err := l.server.Serve(l.listener); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			l.log.Error("the peer listener ended", "listen", cfg.Listen, "err", err)
		}
	}()
	return l, nil
}

func setDefaults(c *Config) {
	or := func(d *time.Duration, v time.Duration) { *d = cmp.Or(*d, v) }
	or(&c.Beat, 500*time.Millisecond)
	or(&c.Silence, 5*time.Second)
	or(&c.Handshake, 3*time.Second)
	or(&c.NameWait, 2*time.Second)
	or(&c.RedialMin, 50*time.Millisecond)
	or(&c.RedialMax, time.Second)
	or(&c.RefusedWait, 5*time.Second)
	c.QueueFrames = cmp.Or(c.QueueFrames, 16384)
	c.QueueBytes = cmp.Or(c.QueueBytes, 64<<20)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
}

func (c *Config) check() error {
	if err := checkNode("node", c.Node); err != nil {
		return err
	}
	switch {
	case c.Incarnation == 0:
		return errors.New("incarnation is 0: take it from the membership lease")
	case c.Sink == nil:
		return errors.New("no sink")
	case len(c.Backends) > maxBackends || len(c.Features) > maxFeatures:
		return fmt.Errorf("%d backends, %d features: at most %d and %d", len(c.Backends), len(c.Features), maxBackends, maxFeatures)
	case c.Beat <= 0 || c.Silence < c.Beat || c.Handshake <= 0 || c.NameWait <= 0 || c.RedialMin <= 0 || c.RedialMax < c.RedialMin || c.RefusedWait <= 0:
		return errors.New("beat, silence, handshake and redial times must be positive, silence at least one beat, and the longest redial at least the shortest")
	case c.QueueFrames < 1 || c.QueueBytes < maxMessage:
		return fmt.Errorf("queue of %d frames, %d bytes: want at least 1 and %d", c.QueueFrames, c.QueueBytes, maxMessage)
	case c.InsecureListen != "" && c.InsecureListen != InsecureWords:
		return fmt.Errorf("insecure_listen must be exactly %q", InsecureWords)
	}
	if isUnix(c.Listen) {
		return membership.CheckAddress(c.Listen)
	}
	host, _, err := net.SplitHostPort(c.Listen)
	if err != nil {
		return fmt.Errorf("listen %q: want host:port or unix:/path: %w", c.Listen, err)
	}
	ip := net.ParseIP(host)
	if loopback := host == "localhost" || ip != nil && ip.IsLoopback(); !loopback && c.TLS == nil && c.InsecureListen == "" {
		return fmt.Errorf("listen %q is reachable from outside this machine: set peers.tls, or insecure_listen: %q", c.Listen, InsecureWords)
	}
	return nil
}

func isUnix(address string) bool { return strings.HasPrefix(address, "unix:") }

func (l *Links) serverCreds() credentials.TransportCredentials {
	switch {
	case isUnix(l.cfg.Listen):
		return unixCreds{}
	case l.tls != nil:
		return credentials.NewTLS(l.tls.server())
	}
	return insecure.NewCredentials()
}

// client prepares one attempt; nothing is dialled yet. What the transport learns goes to seen.
func (l *Links) client(node, address string) (*grpc.ClientConn, *seenCreds, error) {
	network, target := "tcp", address
	var creds credentials.TransportCredentials
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		network, target = "unix", path
		creds = unixCreds{}
	} else if l.tls != nil {
		cfg, err := l.tls.client(node)
		if err != nil {
			return nil, nil, fmt.Errorf("dial %s: %w", address, err)
		}
		creds = credentials.NewTLS(cfg)
	} else {
		creds = insecure.NewCredentials()
	}
	seen := &seenCreds{}
	cc, err := grpc.NewClient("passthrough:///"+node,
		grpc.WithTransportCredentials(recorder{creds, seen}),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			c, err := (&net.Dialer{}).DialContext(ctx, network, target)
			if err != nil {
				return nil, err
			}
			if err := tune(c, l.cfg.Silence); err != nil {
				c.Close()
				return nil, err
			}
			return c, nil
		}),
		grpc.WithNoProxy(), grpc.WithDisableRetry(), grpc.WithDisableServiceConfig(), grpc.WithDisableHealthCheck(),
		grpc.WithInitialWindowSize(window), grpc.WithInitialConnWindowSize(window),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage), grpc.MaxCallSendMsgSize(maxMessage), grpc.ForceCodecV2(newBatchCodec())),
	)
	if err != nil {
		return nil, nil, fmt.Errorf("dial %s: %w", address, err)
	}
	return cc, seen, nil
}

// Addr is the address that New listens on, e.g. to learn the port of "127.0.0.1:0".
func (l *Links) Addr() string {
	if isUnix(l.cfg.Listen) {
		return l.cfg.Listen
	}
	return l.listener.Addr().String()
}

// SetPeers replaces the peers that are dialled and may dial, as membership names them; this engine's
// own name is ignored. A peer that is no longer named keeps its stream while it lives, because the
// absence of a record proves nothing.
func (l *Links) SetPeers(peers []membership.Peer) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closing {
		return
	}
	named := make(map[string]membership.Peer, len(peers))
	for _, p := range peers {
		if p.Node != l.cfg.Node {
			named[p.Node] = p
		}
	}
	for node, p := range named {
		k := l.links[node]
		if k == nil {
			ctx, stop := context.WithCancel(l.ctx)
			k = &link{links: l, node: node, changed: make(chan struct{}, 1), stop: stop}
			l.links[node] = k
			l.wg.Add(1)
			go func() { defer l.wg.Done(); defer stop(); k.run(ctx) }()
		}
		k.mu.Lock()
		if !k.named && k.cur == nil {
			k.since, k.attempts, k.lastErr, k.refused, k.refusals = time.Now(), 0, "", false, nil
		}
		k.named, k.address, k.want = true, p.Address, p.Incarnation
		k.mu.Unlock()
		k.wake()
	}
	for node, k := range l.links {
		if _, ok := named[node]; !ok {
			k.mu.Lock()
			k.named = false
			if k.seen == 0 { // it never had a stream: nobody holds anything of it
				k.gone = true
				k.stop()
				delete(l.links, node)
			}
			k.mu.Unlock()
			k.wake()
		}
	}
	close(l.named)
	l.named = make(chan struct{})
}

// lookEvery is the least time between two calls of Config.Look: a stranger that dials again and again is no reason to
// read membership all the time.
const lookEvery = time.Second

// await is lookup for a peer that has dialled. An engine that has just started may know of this one before its record
// is read here, or before anything is: it is given some time rather than refused.
func (l *Links) await(ctx context.Context, node string, d time.Duration) *link {
	timer := time.NewTimer(d)
	defer timer.Stop()
	for {
		l.mu.Lock()
		named := l.named
		l.mu.Unlock()
		if k := l.lookup(node); k != nil {
			return k
		}
		l.look()
		select {
		case <-named:
		case <-timer.C:
			return l.lookup(node)
		case <-ctx.Done():
			return nil
		case <-l.ctx.Done():
			return nil
		}
	}
}

// look has membership looked at, if that is not too soon.
func (l *Links) look() {
	if l.cfg.Look == nil {
		return
	}
	l.mu.Lock()
	soon := time.Since(l.looked) < lookEvery
	if !soon {
		l.looked = time.Now()
	}
	l.mu.Unlock()
	if !soon {
		l.cfg.Look()
	}
}

// lookup returns the link of a peer that membership names.
func (l *Links) lookup(node string) *link {
	l.mu.Lock()
	defer l.mu.Unlock()
	k := l.links[node]
	if k == nil {
		return nil
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.named {
		return nil
	}
	return k
}

// enter counts a goroutine of l unless l is closing; the caller ends with l.wg.Done.
func (l *Links) enter() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closing {
		return false
	}
	l.wg.Add(1)
	return true
}

// attach makes c the stream of k and queues the announcements, in one step with respect to new
// announcements.
func (l *Links) attach(k *link, c *conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closing {
		return false
	}
	for _, f := range l.replay(l.cfg.Incarnation, c.hello.node, c.hello.incarnation) {
		c.out.putFirst(f)
	}
	k.mu.Lock()
	k.cur, k.since, k.attempts, k.lastErr, k.refused, k.refusals = c, c.since, 0, "", false, nil
	k.counters.Hellos++
	k.mu.Unlock()
	return true
}

func (l *Links) helloFrame(to string, attempt uint64) *wire.Frame {
	l.mu.Lock()
	backends := l.cfg.Backends
	l.mu.Unlock()
	h := &wire.Hello{
		Versions: wireVersions, Node: l.cfg.Node, Incarnation: l.cfg.Incarnation, HostId: l.cfg.HostID,
		Features: l.cfg.Features, Attempt: attempt, To: to,
	}
	for _, b := range backends {
		h.Backends = append(h.Backends, &wire.Backend{Name: b.Name, Epoch: b.Epoch})
	}
	return &wire.Frame{Frame: &wire.Frame_Hello{Hello: h}}
}

// SetBackends replaces the backends of the next Hello. Peers with a stream learn changes from
// AnnounceEndpoint and AnnounceLost.
func (l *Links) SetBackends(b []Backend) {
	l.mu.Lock()
	l.cfg.Backends = slices.Clone(b[:min(len(b), maxBackends)])
	l.mu.Unlock()
}

// Send queues a room frame for the stream that Hello event conn announced (0: whichever is up). It
// reports whether the frame was queued: false means no such stream, a full queue (the stream is then
// closed), or a frame that this version cannot carry; Resync heals. Nothing of f is kept.
func (l *Links) Send(node string, conn uint64, f core.Frame, urgent bool) bool {
	l.mu.Lock()
	k := l.links[node]
	l.mu.Unlock()
	if k == nil {
		return false
	}
	c := k.current()
	if c == nil || conn != 0 && c.id != conn {
		k.count(func(n *Counters) { n.Dropped++ })
		return false
	}
	w, err := encodeRoom(f)
	if err == nil && sizeOf(w) > maxFrame {
		if n := proto.Size(w); n > maxFrame {
			err = fmt.Errorf("the frame has %d bytes, at most %d", n, maxFrame)
		}
	}
	if err != nil {
		k.count(func(n *Counters) { n.Dropped++ })
		l.log.Error("a room frame cannot be sent", "peer", node, "room", f.Room, "kind", int(f.Kind), "err", err)
		return false
	}
	return c.send(w, urgent)
}

// Drop ends the stream that Hello event conn announced, if it still is the peer's; another is dialled.
func (l *Links) Drop(node string, conn uint64, why string) {
	l.mu.Lock()
	k := l.links[node]
	l.mu.Unlock()
	if k == nil {
		return
	}
	if c := k.current(); c != nil && c.id == conn {
		c.end(why)
	}
}

// Refuse tells a peer that one of its groups cannot be paired with one of ours. The stream lives on;
// Status of both sides shows it until the next Hello.
func (l *Links) Refuse(node string, r Refusal) {
	l.mu.Lock()
	k := l.links[node]
	l.mu.Unlock()
	if k == nil || r.Group == "" && r.PeerGroup == "" {
		return // without a group it would end the stream
	}
	r.ByPeer = false
	r.Code = cmp.Or(r.Code, RefusedFingerprint)
	if c := k.current(); c != nil && k.noteRefusal(r) {
		c.send(encodeRefused(r), false)
	}
}

// Status returns a snapshot, peers sorted by node.
func (l *Links) Status() Status {
	l.mu.Lock()
	links := slices.Collect(maps.Values(l.links))
	l.mu.Unlock()
	s := Status{
		Node: l.cfg.Node, Incarnation: l.cfg.Incarnation, Listen: l.Addr(), TLS: l.tls != nil,
		Rejected: l.rejected.Load(), Peers: make([]PeerStatus, 0, len(links)),
	}
	if l.tls != nil {
		if err := l.tls.lastError(); err != nil {
			s.TLSError = err.Error()
		}
	}
	for _, k := range links {
		if p := k.status(); p.Named || p.State == "up" {
			s.Peers = append(s.Peers, p)
		}
	}
	slices.SortFunc(s.Peers, func(a, b PeerStatus) int { return strings.Compare(a.Node, b.Node) })
	return s
}

func (k *link) status() PeerStatus {
	k.mu.Lock()
	defer k.mu.Unlock()
	s := PeerStatus{
		Node: k.node, Address: k.address, State: "connecting", Since: k.since, Incarnation: k.want, Named: k.named,
		Attempts: k.attempts, LastError: k.lastErr, Refusals: slices.Clone(k.refusals), Counters: k.counters,
	}
	c, heard := k.cur, k.heard
	if c != nil {
		heard = c.heard.Load()
	}
	if heard != 0 {
		s.HeardAgo = max(time.Since(time.Unix(0, heard)), 1)
	}
	switch {
	case c != nil:
		s.State, s.Incarnation, s.HostID, s.Version = "up", c.hello.incarnation, c.hello.hostID, c.hello.version
		s.SameHost = c.hello.hostID != "" && c.hello.hostID == k.links.cfg.HostID
		s.Dialled, s.Credentials, s.Backends, s.Features = c.dialled, c.creds, c.hello.backends, c.hello.features
		s.Counters.Queued = c.out.len()
	case k.refused:
		s.State = "refused"
	case k.address == "":
		s.State = "waiting"
	}
	return s
}

// farewell is how long Close waits for its last frames to leave.
const farewell = 500 * time.Millisecond

// Close tells the peers, stops listening and ends all streams. It returns when every goroutine of l
// has ended or ctx has.
func (l *Links) Close(ctx context.Context) error {
	l.mu.Lock()
	first := !l.closing
	l.closing = true
	var live []*conn
	for _, k := range l.links {
		if c := k.current(); c != nil {
			live = append(live, c)
		}
	}
	l.mu.Unlock()
	if first {
		timer := time.NewTimer(farewell)
		defer timer.Stop()
		bye := encodeRefused(Refusal{Code: RefusedClosing, Detail: "the engine is stopping"})
		for _, c := range live {
			c.send(bye, false) // the peer ends the stream when it reads this
		}
	wait:
		for _, c := range live {
			select {
			case <-c.done:
			case <-timer.C:
				break wait
			case <-ctx.Done():
				break wait
			}
		}
		for _, c := range live {
			c.end("closing")
		}
		l.cancel()
	}
	done := make(chan struct{})
	go func() {
		l.server.Stop()
		l.wg.Wait()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("close peer links: a sink or a stream has not ended: %w", ctx.Err())
	}
}
