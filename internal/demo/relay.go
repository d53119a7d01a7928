package demo

import (
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"time"
)

// relayDial bounds how long a relay waits for the engine behind it.
const relayDial = 3 * time.Second

// relay is the cable to one engine: the engine advertises the relay's address to the others, and the
// relay passes on what they send to the engine's own socket and back. The cable can be cut.
type relay struct {
	ln     net.Listener
	target string // as peers.advertise would say it
	wg     sync.WaitGroup

	mu    sync.Mutex
	cut   bool
	ended bool
	conns map[net.Conn]struct{} // both ends of every connection
}

// newRelay listens on a free port of the loopback interface.
func newRelay(target string) (*relay, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("relay to %s: %w", target, err)
	}
	r := &relay{ln: ln, target: target, conns: make(map[net.Conn]struct{})}
	r.wg.Go(r.accept)
	return r, nil
}

func (r *relay) addr() string { return r.ln.Addr().String() }

func (r *relay) accept() {
	for {
		c, err := r.ln.Accept()
		if err != nil {
			return // closed
		}
		r.wg.Go(func() { r.serve(c) })
	}
}

// serve passes bytes on both ways until either end closes or the cable is cut.
func (r *relay) serve(near net.Conn) {
	if !r.join(near) {
		return
	}
	defer r.leave(near)
	network, target := "tcp", r.target
	if path, ok := strings.CutPrefix(target, "unix:"); ok {
		network, target = "unix", path
	}
	far, err := net.DialTimeout(network, target, relayDial)
	if err != nil || !r.join(far) {
		return
	}
	defer r.leave(far)
	back := make(chan struct{})
	go func() {
		defer close(back)
		_, _ = io.Copy(near, far)
		near.Close()
	}()
	_, _ = io.Copy(far, near)
	far.Close()
	<-back
}

// join keeps a connection for as long as the cable is whole; else it is reset at once.
func (r *relay) join(c net.Conn) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.cut || r.ended {
		reset(c)
		return false
	}
	r.conns[c] = struct{}{}
	return true
}

func (r *relay) leave(c net.Conn) {
	c.Close()
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.conns, c)
}

// sever cuts the cable: every connection is reset, and every new one, until mend. It returns how many
// ends it has reset.
func (r *relay) sever() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cut = true
	for c := range r.conns {
		reset(c)
	}
	return len(r.conns)
}

func (r *relay) mend() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cut = false
}

// close ends the relay and everything that goes through it.
func (r *relay) close() {
	r.mu.Lock()
	r.ended = true
	for c := range r.conns {
		reset(c)
	}
	r.mu.Unlock()
	r.ln.Close()
	r.wg.Wait()
}

// reset closes c without a farewell: what was on the way is lost.
func reset(c net.Conn) {
	if t, ok := c.(*net.TCPConn); ok {
		_ = t.SetLinger(0)
	}
	c.Close()
}
