package peer

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// maxConns bounds inbound connections; one more is closed at once. Each peer needs one, and for a
// moment two.
const maxConns = 2048

// listen opens the socket. The file of a predecessor that nobody listens on any more is removed.
func listen(address string, silence time.Duration, log *slog.Logger) (net.Listener, error) {
	path, ok := strings.CutPrefix(address, "unix:")
	if !ok {
		ln, err := net.Listen("tcp", address)
		if err != nil {
			return nil, err
		}
		return newBounded(ln, silence, log), nil
	}
	if c, err := net.DialTimeout("unix", path, time.Second); err == nil {
		c.Close()
		return nil, fmt.Errorf("listen %s: another process is listening there", address)
	} else if fi, serr := os.Lstat(path); serr == nil {
		if fi.Mode().Type() != os.ModeSocket {
			return nil, fmt.Errorf("listen %s: the file exists and is no socket", address)
		}
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("listen %s: remove the socket of a predecessor: %w", address, err)
		}
	}
	ln, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o600); err != nil {
		ln.Close()
		return nil, fmt.Errorf("listen %s: %w", address, err)
	}
	return newBounded(ln, silence, log), nil
}

// boundedListener bounds the open connections, and no error but its own Close ends it: a server that
// stops to listen because the machine was short of something would be gone for good.
type boundedListener struct {
	net.Listener
	log     *slog.Logger
	silence time.Duration // see tune
	open    atomic.Int64
	once    sync.Once
	closed  chan struct{}
}

func newBounded(ln net.Listener, silence time.Duration, log *slog.Logger) *boundedListener {
	return &boundedListener{Listener: ln, silence: silence, log: log, closed: make(chan struct{})}
}

// Close implements net.Listener.
func (l *boundedListener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return l.Listener.Close()
}

// Accept implements net.Listener.
func (l *boundedListener) Accept() (net.Conn, error) {
	pause := 5 * time.Millisecond
	for {
		c, err := l.Listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return nil, err
		}
		if err != nil { // out of descriptors or memory: it passes
			l.log.Warn("peer listener: accept failed", "listen", l.Addr().String(), "err", err, "again_in", pause)
			select {
			case <-time.After(pause):
			case <-l.closed:
				return nil, net.ErrClosed
			}
			pause = min(2*pause, time.Second)
			continue
		}
		pause = 5 * time.Millisecond
		if l.open.Add(1) <= maxConns && tune(c, l.silence) == nil {
			return &countedConn{Conn: c, open: &l.open}, nil
		}
		l.open.Add(-1)
		c.Close()
	}
}

type countedConn struct {
	net.Conn
	open *atomic.Int64
	once sync.Once
}

// Close implements net.Conn.
func (c *countedConn) Close() error {
	c.once.Do(func() { c.open.Add(-1) })
	return c.Conn.Close()
}

// NetConn returns the connection underneath, for its credentials.
func (c *countedConn) NetConn() net.Conn { return c.Conn }
