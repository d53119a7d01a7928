package peer

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	"github.com/terminus-kv/terminus/internal/peer/wire"
)

// link is one peer, across its incarnations and streams. Locks are taken in the order deliverMu,
// Links.mu, mu.
type link struct {
	links *Links
	node  string
	// changed wakes the dialler: the address, or cur, is another one. Capacity 1.
	changed chan struct{}
	stop    context.CancelFunc // ends run

	// deliverMu is held while the Sink runs and while cur changes, so that events come in stream
	// order and an older stream delivers nothing after a newer Hello.
	deliverMu sync.Mutex
	// What the Sink holds of the incarnation that is, or was last, up. deliverMu guards them.
	told uint64 // that incarnation
	held held

	mu       sync.Mutex
	cur      *conn
	named    bool // by membership
	gone     bool // forgotten: no stream is taken any more
	address  string
	want     uint64 // incarnation in membership, 0: unknown
	seen     uint64 // highest incarnation that said Hello
	turn     turn   // of the last stream of that incarnation that was taken
	dialled  uint64 // last Hello.attempt that was said
	since    time.Time
	heard    int64  // UnixNano of the last batch of a stream that is over; 0: none yet
	attempts uint64 // dials since the last Hello
	lastErr  string
	refused  bool // the last attempt was refused for a reason that time does not heal
	refusals []Refusal
	counters Counters
}

func (k *link) count(f func(*Counters)) {
	k.mu.Lock()
	f(&k.counters)
	k.mu.Unlock()
}

func (k *link) wake() {
	select {
	case k.changed <- struct{}{}:
	default:
	}
}

// current returns the live stream, or nil.
func (k *link) current() *conn {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.cur
}

// deliver hands ev to the Sink if c is still the peer's stream.
func (k *link) deliver(c *conn, ev Event) bool {
	k.deliverMu.Lock()
	defer k.deliverMu.Unlock()
	if k.current() != c {
		return false
	}
	// More than both streams of a change may announce: the peer keeps breaking off before Announced.
	if err := k.held.take(&ev, 2); err != nil {
		c.end(err.Error())
		return false
	}
	k.links.cfg.Sink(ev)
	return true
}

// forgotten lists what the Sink holds and c, at the end of its announcements, has not repeated.
func (k *link) forgotten(c *conn) []Event {
	k.deliverMu.Lock()
	defer k.deliverMu.Unlock()
	return k.held.missing(&c.held)
}

// maxAttemptJump is more dials than an engine makes in six years at one every 50 ms. A peer that named a number near
// 2^64 would leave this engine no greater one to dial with.
const maxAttemptJump = 1 << 32

// admit decides whether c may become the stream of this peer. k.mu is held.
func (k *link) admit(c *conn) *Refusal {
	h := &c.hello
	if k.gone {
		return &Refusal{Code: RefusedUnknown, Field: "hello.node", Detail: fmt.Sprintf("membership of %s does not name %q any more", k.links.cfg.Node, k.node)}
	}
	if known := max(k.dialled, k.turn.attempt); h.attempt > known && h.attempt-known > maxAttemptJump {
		return &Refusal{Code: RefusedHello, Field: "hello.attempt",
			Detail: fmt.Sprintf("attempt %d is more than %d above the highest that is known, %d: no engine has dialled so often", h.attempt, uint64(maxAttemptJump), known)}
	}
	if newest := max(k.seen, k.want); h.incarnation < newest {
		return &Refusal{Code: RefusedStale, Field: "hello.incarnation",
			Detail: fmt.Sprintf("incarnation %d of %s is over, %d is known; if its state directory was lost, restart this engine", h.incarnation, k.node, newest)}
	}
	if h.incarnation == k.seen && !c.turn().after(k.turn) {
		return &Refusal{Code: RefusedDuplicate, Field: "hello.attempt", Detail: fmt.Sprintf("attempt %d came after attempt %d", h.attempt, k.turn.attempt)}
	}
	return nil
}

// install makes c the stream of this peer: the old one, if any, is Down first, then c says Hello, and
// the announcements are queued before anything that the Sink's reaction to that Hello sends.
func (k *link) install(c *conn) *Refusal {
	k.deliverMu.Lock()
	defer k.deliverMu.Unlock()
	k.mu.Lock()
	if r := k.admit(c); r != nil {
		k.mu.Unlock()
		return r
	}
	if k.seen == 0 && k.links.met.Add(1) > k.links.maxMet {
		k.links.met.Add(-1)
		k.mu.Unlock()
		return &Refusal{Code: RefusedUnknown, Field: "hello.node",
			Detail: fmt.Sprintf("%s has had streams with %d other engines since it started and takes no new name; restart it, or give engines names that come back", k.links.cfg.Node, k.links.maxMet)}
	}
	old := k.cur
	k.cur = nil
	if old != nil {
		k.heard = old.heard.Load()
	}
	k.seen, k.turn = c.hello.incarnation, c.turn()
	k.mu.Unlock()
	if old != nil {
		old.end("replaced by a newer stream")
		k.links.cfg.Sink(downEvent(old))
	}
	if c.hello.incarnation != k.told {
		k.told, k.held = c.hello.incarnation, newHeld()
	}
	if !k.links.attach(k, c) {
		return &Refusal{Code: RefusedClosing, Detail: "the engine is stopping"}
	}
	k.wake()
	k.links.log.Info("peer is up", "peer", k.node, "incarnation", c.hello.incarnation, "dialled", c.dialled, "credentials", c.creds)
	k.links.cfg.Sink(Event{
		Kind: Hello, Node: k.node, Incarnation: c.hello.incarnation, Conn: c.id, HostID: c.hello.hostID,
		Backends: c.hello.backends, Features: c.hello.features,
	})
	return nil
}

// down takes c away if it is the stream of this peer.
func (k *link) down(c *conn) {
	k.deliverMu.Lock()
	defer k.deliverMu.Unlock()
	k.mu.Lock()
	was := k.cur == c
	if was {
		k.cur, k.heard, k.since, k.lastErr = nil, c.heard.Load(), time.Now(), c.why
	}
	k.mu.Unlock()
	if was {
		k.links.log.Info("peer is down", "peer", k.node, "incarnation", c.hello.incarnation, "why", c.why)
		k.links.cfg.Sink(downEvent(c))
	}
	k.wake()
}

func downEvent(c *conn) Event {
	return Event{Kind: Down, Node: c.link.node, Incarnation: c.hello.incarnation, Conn: c.id, Detail: c.why}
}

// noteRefusal keeps r for Status and reports whether it says something new.
func (k *link) noteRefusal(r Refusal) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if r.Code == RefusedDuplicate {
		return false
	}
	for i, o := range k.refusals {
		if o.Code == r.Code && o.Group == r.Group && o.PeerGroup == r.PeerGroup && o.ByPeer == r.ByPeer {
			k.refusals[i] = r
			return o != r
		}
	}
	if len(k.refusals) == 16 {
		k.refusals = k.refusals[1:]
	}
	k.refusals = append(k.refusals, r)
	return true
}

// refusedStream notes that a stream never came up because of r and tells the Sink once.
func (k *link) refusedStream(r Refusal) {
	if !k.noteRefusal(r) {
		return
	}
	k.deliverMu.Lock()
	defer k.deliverMu.Unlock()
	k.links.cfg.Sink(Event{Kind: Refused, Node: k.node, Refusal: r})
}

// logBad logs the first bad frame and then every power of two, with the count.
func (k *link) logBad(err error) {
	k.mu.Lock()
	n := k.counters.Bad
	k.mu.Unlock()
	if n&(n-1) == 0 {
		k.links.log.Warn("a bad frame was dropped", "peer", k.node, "count", n, "err", err)
	}
}

// run dials whenever membership names the peer, with an address, and there is no stream.
func (k *link) run(ctx context.Context) {
	cfg := &k.links.cfg
	delay := time.Duration(0)
	for ctx.Err() == nil {
		k.mu.Lock()
		address, dialNow := k.address, k.named && k.address != "" && k.cur == nil
		k.mu.Unlock()
		if !dialNow {
			delay = 0
			select {
			case <-ctx.Done():
			case <-k.changed:
			}
			continue
		}
		if wait := k.pause(delay); !k.sleep(ctx, wait, address) {
			delay = 0 // something changed: look again
			continue
		}
		began := time.Now()
		up, refusal, err := k.dial(ctx, address)
		switch {
		case up && time.Since(began) > cfg.RedialMax:
			delay = 0
		default:
			delay = min(max(2*delay, cfg.RedialMin), cfg.RedialMax)
		}
		k.mu.Lock()
		k.refused = refusal != nil && refusal.lasting()
		if refusal != nil && refusal.Code != RefusedDuplicate {
			k.lastErr = refusal.Detail
		} else if err != nil {
			k.lastErr = err.Error()
		}
		if k.refused {
			delay = cfg.RefusedWait
		}
		k.mu.Unlock()
		if refusal != nil {
			k.refusedStream(*refusal)
		}
	}
}

// lasting reports whether only a change of configuration heals r.
func (r Refusal) lasting() bool {
	switch r.Code {
	case RefusedDuplicate, RefusedUnknown, RefusedClosing:
		return false
	}
	return true
}

// pause adds jitter, and a head start for the side whose stream is preferred.
func (k *link) pause(delay time.Duration) time.Duration {
	if delay > 0 {
		delay = delay/2 + rand.N(delay)
	}
	if k.links.cfg.Node > k.node {
		delay += k.links.cfg.RedialMin
	}
	return delay
}

// sleep waits for d. It returns false at once when the peer came up, or its address changed.
func (k *link) sleep(ctx context.Context, d time.Duration, address string) bool {
	if d == 0 {
		return true
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return false
		case <-timer.C:
			return true
		case <-k.changed:
			k.mu.Lock()
			same := k.named && k.address == address && k.cur == nil
			k.mu.Unlock()
			if !same {
				return false
			}
		}
	}
}

// dial makes one attempt and serves the stream until it ends. up says that there was one.
func (k *link) dial(ctx context.Context, address string) (up bool, refusal *Refusal, err error) {
	l := k.links
	k.mu.Lock()
	k.attempts++
	k.dialled = max(k.dialled, k.turn.attempt) + 1
	attempt := k.dialled
	k.mu.Unlock()
	cc, seen, err := l.client(k.node, address)
	if err != nil {
		return false, nil, err
	}
	defer cc.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	timer := time.AfterFunc(l.cfg.Handshake, cancel)
	defer timer.Stop()

	st, first, pending, err := l.greet(ctx, cc, k.node, attempt)
	if r := seen.refusal(); r != nil {
		return false, r, nil
	}
	if err != nil {
		if ctx.Err() != nil {
			return false, nil, fmt.Errorf("dial %s: no Hello within %v", address, l.cfg.Handshake)
		}
		return false, nil, fmt.Errorf("dial %s: %s", address, reason(err))
	}
	if w := first.GetRefused(); w != nil {
		r, err := decodeRefused(w)
		if err != nil {
			return false, nil, fmt.Errorf("dial %s: %w", address, err)
		}
		return false, &r, nil
	}
	w := first.GetHello()
	if w == nil {
		return false, nil, fmt.Errorf("dial %s: the peer broke framing: its first frame is no Hello", address)
	}
	h, refusal := decodeHello(w)
	if refusal == nil && h.node != k.node {
		refusal = &Refusal{Code: RefusedNode, Field: "hello.node", Detail: fmt.Sprintf("%s is the address of %q, not of %q: correct the peer list", address, h.node, k.node)}
	}
	if refusal == nil {
		refusal = seen.checkNode(h.node)
	}
	if refusal != nil {
		sayRefused(st, *refusal)
		return false, refusal, nil
	}
	if !timer.Stop() {
		return false, nil, fmt.Errorf("dial %s: no Hello within %v", address, l.cfg.Handshake)
	}
	h.attempt = attempt
	c := newConn(k, st, h, true, seen.String())
	if refusal := k.install(c); refusal != nil {
		if refusal.Code == RefusedStale {
			timer.Reset(l.cfg.Handshake)
			sayRefused(st, *refusal)
		}
		return false, refusal, nil
	}
	c.serve(pending, cancel)
	return true, nil, nil
}

// greet opens the stream, says Hello and waits for the answer.
func (l *Links) greet(ctx context.Context, cc *grpc.ClientConn, node string, attempt uint64) (wire.Peer_LinkClient, *wire.Frame, []*wire.Frame, error) {
	st, err := wire.NewPeerClient(cc).Link(ctx)
	if err != nil {
		return nil, nil, nil, err
	}
	// A failed Send says only EOF; Recv has the reason.
	_ = st.Send(&wire.Batch{Frames: []*wire.Frame{l.helloFrame(node, attempt)}})
	first, pending, err := firstFrame(st)
	return st, first, pending, err
}

// sayRefused sends the last frame of a stream and waits, within the handshake bound, until the peer
// has ended it.
func sayRefused(st wire.Peer_LinkClient, r Refusal) {
	if st.Send(&wire.Batch{Frames: []*wire.Frame{encodeRefused(r)}}) != nil || st.CloseSend() != nil {
		return
	}
	for {
		if _, err := st.Recv(); err != nil {
			return
		}
	}
}

// reason is the text of a gRPC error without the ornament.
func reason(err error) string {
	if s, ok := status.FromError(err); ok && !errors.Is(err, context.Canceled) {
		return s.Message()
	}
	return err.Error()
}
