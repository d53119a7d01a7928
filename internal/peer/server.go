package peer

import (
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/terminus-kv/terminus/internal/peer/wire"
)

// maxStrangers bounds inbound streams that have not said Hello yet.
const maxStrangers = 128

const window = 4 << 20

type server struct {
	wire.UnimplementedPeerServer
	links *Links
}

func (l *Links) newServer() *grpc.Server {
	s := grpc.NewServer(
		grpc.Creds(l.serverCreds()),
		grpc.MaxRecvMsgSize(maxMessage), grpc.MaxSendMsgSize(maxMessage), grpc.ForceServerCodecV2(newBatchCodec()),
		grpc.InitialWindowSize(window), grpc.InitialConnWindowSize(window),
		grpc.MaxConcurrentStreams(4), grpc.MaxHeaderListSize(16<<10),
		grpc.ConnectionTimeout(l.cfg.Handshake),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: 30 * time.Second}),
	)
	wire.RegisterPeerServer(s, &server{links: l})
	return s
}

// Link serves an inbound stream.
func (s *server) Link(st wire.Peer_LinkServer) error {
	l := s.links
	if !l.enter() {
		return status.Error(codes.Unavailable, "the engine is stopping")
	}
	defer l.wg.Done()
	if l.strangers.Add(1) > maxStrangers {
		l.strangers.Add(-1)
		l.rejected.Add(1)
		return status.Error(codes.ResourceExhausted, "too many streams that have not said Hello")
	}
	c, pending, refusal, err := s.greet(st)
	l.strangers.Add(-1)
	if err != nil {
		l.rejected.Add(1)
		return status.Error(codes.InvalidArgument, err.Error())
	}
	if refusal != nil {
		if st.Send(&wire.Batch{Frames: []*wire.Frame{encodeRefused(*refusal)}}) != nil {
			return status.Error(codes.FailedPrecondition, refusal.Detail)
		}
		return nil
	}
	c.serve(pending, func() {})
	return status.Error(codes.Unavailable, c.why)
}

// greet waits for the dialler's Hello and makes it the stream of its peer, or says why not.
func (s *server) greet(st wire.Peer_LinkServer) (*conn, []*wire.Frame, *Refusal, error) {
	l := s.links
	type result struct {
		first   *wire.Frame
		pending []*wire.Frame
		err     error
	}
	got := make(chan result, 1)
	l.wg.Add(1)
	go func() {
		defer l.wg.Done()
		first, pending, err := firstFrame(st) // ends at the latest when the handler has returned
		got <- result{first, pending, err}
	}()
	began := time.Now()
	timer := time.NewTimer(l.cfg.Handshake)
	defer timer.Stop()
	var r result
	select {
	case r = <-got:
	case <-timer.C:
		return nil, nil, nil, fmt.Errorf("no Hello within %v", l.cfg.Handshake)
	case <-l.ctx.Done():
		return nil, nil, nil, fmt.Errorf("the engine is stopping")
	}
	if r.err != nil {
		return nil, nil, nil, r.err
	}
	w := r.first.GetHello()
	if w == nil {
		return nil, nil, nil, fmt.Errorf("the first frame is no Hello")
	}
	h, refusal := decodeHello(w)
	var seen seenCreds
	if p, ok := peer.FromContext(st.Context()); ok {
		seen.auth = p.AuthInfo
	}
	if refusal == nil {
		refusal = s.check(h, &seen)
	}
	var k *link
	if refusal != nil {
		k = l.lookup(h.node)
	} else if k = l.await(st.Context(), h.node, min(l.cfg.NameWait, l.cfg.Handshake-time.Since(began))); k == nil {
		if st.Context().Err() != nil {
			return nil, nil, nil, fmt.Errorf("%q left before membership named it", h.node)
		}
		refusal = &Refusal{Code: RefusedUnknown, Field: "hello.node", Detail: fmt.Sprintf("membership of %s does not name %q", l.cfg.Node, h.node)}
	}
	if refusal != nil {
		// Only a stream that proved its name may put something into that peer's status.
		if k != nil && refusal.Code != RefusedNode && seen.checkNode(h.node) == nil {
			k.refusedStream(*refusal)
		} else {
			if n := l.rejected.Add(1); n&(n-1) == 0 { // the first, then ever fewer, with the count
				l.log.Warn("inbound peer refused", "claims", h.node, "credentials", seen.String(), "code", refusal.Code.String(), "detail", refusal.Detail, "count", n)
			}
		}
		return nil, nil, refusal, nil
	}
	c := newConn(k, st, h, false, seen.String())
	c.out.putFirst(l.helloFrame("", 0))
	if refusal := k.install(c); refusal != nil {
		k.refusedStream(*refusal)
		return nil, nil, refusal, nil
	}
	return c, r.pending, nil, nil
}

// check checks what does not need the peer's state.
func (s *server) check(h hello, seen *seenCreds) *Refusal {
	own := s.links.cfg.Node
	switch {
	case h.node == own:
		return &Refusal{Code: RefusedSelf, Field: "hello.node", Detail: fmt.Sprintf("%q is this engine's own name: give every engine its own", own)}
	case h.to != own:
		return &Refusal{Code: RefusedNode, Field: "hello.to", Detail: fmt.Sprintf("this is %q, not %q: correct the peer list", own, h.to)}
	case h.attempt == 0:
		return &Refusal{Code: RefusedHello, Field: "hello.attempt", Detail: "0"}
	}
	return seen.checkNode(h.node)
}
