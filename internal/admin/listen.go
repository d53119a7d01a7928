package admin

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// maxPath is the longest path that fits into sun_path.
const maxPath = 107

// Listen makes the socket, mode 0600, and its folder, mode 0700. A socket that a dead engine left is
// replaced; one that answers is not.
func Listen(path string) (net.Listener, error) {
	if len(path) > maxPath {
		return nil, fmt.Errorf("admin socket %s has %d bytes, a unix socket allows %d; set admin.socket to a shorter path", path, len(path), maxPath)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("make the folder of the admin socket: %w", err)
	}
	if c, err := net.DialTimeout("unix", path, time.Second); err == nil {
		c.Close()
		return nil, fmt.Errorf("admin socket %s: another engine answers there; give this one another node name or admin.socket", path)
	} else if errors.Is(err, syscall.ECONNREFUSED) {
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("remove the admin socket that a dead engine left: %w", err)
		}
	}
	// The file never exists with wider permissions: it is bound under another name and then renamed.
	tmp := filepath.Join(filepath.Dir(path), fmt.Sprintf(".%d", os.Getpid()))
	_ = os.Remove(tmp) // of an earlier process with this number
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: tmp, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen on the admin socket: %w", err)
	}
	l.SetUnlinkOnClose(false)
	if err := errors.Join(os.Chmod(tmp, 0o600), os.Rename(tmp, path)); err != nil {
		_ = os.Remove(tmp)
		return nil, errors.Join(fmt.Errorf("make the admin socket %s: %w", path, err), l.Close())
	}
	return &listener{UnixListener: l, path: path}, nil
}

// listener removes its socket when it is closed and admits only the engine's own user and root.
type listener struct {
	*net.UnixListener
	path string
	once sync.Once
}

func (l *listener) Accept() (net.Conn, error) {
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			return nil, err
		}
		who, err := peerOf(c)
		if err == nil && (who.UID == 0 || int(who.UID) == os.Getuid()) {
			return c, nil
		}
		c.Close()
	}
}

func (l *listener) Close() error {
	err := l.UnixListener.Close()
	l.once.Do(func() { err = errors.Join(err, os.Remove(l.path)) })
	return err
}

// Caller is the process at the other end of a connection.
type Caller struct {
	UID uint32
	PID int32
}

// String is for the log.
func (c Caller) String() string { return fmt.Sprintf("uid %d pid %d", c.UID, c.PID) }

func peerOf(c *net.UnixConn) (Caller, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return Caller{}, err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return Caller{}, err
	}
	if credErr != nil {
		return Caller{}, credErr
	}
	return Caller{UID: cred.Uid, PID: cred.Pid}, nil
}

type callerKey struct{}

// withCaller puts the caller into the context of a connection.
func withCaller(ctx context.Context, c net.Conn) context.Context {
	if l, ok := c.(*limitedConn); ok {
		c = l.Conn
	}
	if u, ok := c.(*net.UnixConn); ok {
		if who, err := peerOf(u); err == nil {
			return context.WithValue(ctx, callerKey{}, who)
		}
	}
	return ctx
}

func callerOf(ctx context.Context) string {
	if who, ok := ctx.Value(callerKey{}).(Caller); ok {
		return who.String()
	}
	return "unknown"
}

// limit bounds the connections of a listener; further ones wait in the kernel's queue.
type limit struct {
	net.Listener
	free chan struct{}
	done chan struct{}
	once sync.Once
}

func newLimit(l net.Listener, n int) *limit {
	return &limit{Listener: l, free: make(chan struct{}, n), done: make(chan struct{})}
}

func (l *limit) Accept() (net.Conn, error) {
	select {
	case l.free <- struct{}{}:
	case <-l.done:
		return nil, net.ErrClosed
	}
	c, err := l.Listener.Accept()
	if err != nil {
		<-l.free
		return nil, err
	}
	return &limitedConn{Conn: c, release: sync.OnceFunc(func() { <-l.free })}, nil
}

func (l *limit) Close() error {
	l.once.Do(func() { close(l.done) })
	return l.Listener.Close()
}

type limitedConn struct {
	net.Conn
	release func()
}

func (c *limitedConn) Close() error {
	err := c.Conn.Close()
	c.release()
	return err
}
