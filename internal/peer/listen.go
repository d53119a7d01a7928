package peer

import (
	"fmt"
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
func listen(address string) (net.Listener, error) {
	path, ok := strings.CutPrefix(address, "unix:")
	if !ok {
		ln, err := net.Listen("tcp", address)
		return &boundedListener{Listener: ln}, err
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
	return &boundedListener{Listener: ln}, nil
}

type boundedListener struct {
	net.Listener
	open atomic.Int64
}

// Accept implements net.Listener.
func (l *boundedListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if l.open.Add(1) <= maxConns {
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
