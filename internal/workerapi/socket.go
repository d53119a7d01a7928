package workerapi

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// listen takes the lock beside the socket and binds it. Only the holder of the lock removes a socket
// file, so that a live engine's is never removed; the lock file itself stays for ever.
func listen(path string, group *int) (*net.UnixListener, *os.File, error) {
	if n := len(path); n == 0 || n > 107 {
		return nil, nil, fmt.Errorf("the path has %d bytes; a unix socket path has 1 to 107", n)
	}
	lock, err := os.OpenFile(path+".lock", os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, nil, fmt.Errorf("lock file: %w", err)
	}
	lis, err := bind(path, group, lock)
	if err != nil {
		lock.Close()
		return nil, nil, err
	}
	return lis, lock, nil
}

func bind(path string, group *int, lock *os.File) (*net.UnixListener, error) {
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, errors.New("another engine serves it; stop that one or choose another path")
		}
		return nil, fmt.Errorf("lock file: %w", err)
	}
	st, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, err
	case st.Mode()&fs.ModeSocket == 0:
		return nil, fmt.Errorf("there is a file that is no socket (%s); move it away or choose another path", st.Mode())
	default:
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("remove the stale socket: %w", err)
		}
	}
	return listenPrivate(path, group)
}

// listenPrivate binds so that at no moment somebody can connect who may not: on Linux the mode of the
// socket before bind is the mode of its file.
func listenPrivate(path string, group *int) (*net.UnixListener, error) {
	lc := net.ListenConfig{Control: func(_, _ string, rc syscall.RawConn) (err error) {
		cerr := rc.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), 0o600) })
		return errors.Join(err, cerr)
	}}
	l, err := lc.Listen(context.Background(), "unix", path)
	if err != nil {
		return nil, err
	}
	if group != nil {
		if err = os.Chown(path, -1, *group); err == nil {
			err = os.Chmod(path, 0o660)
		}
	} else {
		err = os.Chmod(path, 0o600) // whatever the umask took away
	}
	if err != nil {
		l.Close()
		return nil, fmt.Errorf("access rights: %w", err)
	}
	return l.(*net.UnixListener), nil
}

// peerOf returns who is at the other end, and a pidfd of it or -1 where the kernel gives none.
func peerOf(conn *net.UnixConn) (cred *unix.Ucred, pidfd int, err error) {
	rc, err := conn.SyscallConn()
	if err != nil {
		return nil, -1, err
	}
	pidfd = -1
	cerr := rc.Control(func(s uintptr) {
		if cred, err = unix.GetsockoptUcred(int(s), unix.SOL_SOCKET, unix.SO_PEERCRED); err != nil {
			err = fmt.Errorf("credentials of the worker: %w", err)
			return
		}
		// SO_PEERPIDFD (Linux 6.5) names the process that connected, even when its number was reused.
		if fd, e := unix.GetsockoptInt(int(s), unix.SOL_SOCKET, unix.SO_PEERPIDFD); e == nil {
			pidfd = fd
		} else if fd, e := unix.PidfdOpen(int(cred.Pid), 0); e == nil {
			pidfd = fd
		}
	})
	return cred, pidfd, errors.Join(err, cerr)
}

// hungUp reports whether the other end of a connection is closed, or this one.
func hungUp(conn *net.UnixConn) bool {
	rc, err := conn.SyscallConn()
	if err != nil {
		return true
	}
	hup := true
	if err := rc.Control(func(fd uintptr) { hup = ready(fd, unix.POLLRDHUP) }); err != nil {
		return true
	}
	return hup
}

// ready reports whether one of the events, or an error, waits at a descriptor.
func ready(fd uintptr, events int16) bool {
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: events}}, 0)
	return err == nil && n == 1
}

// exitWatch waits for the end of a process without holding a thread.
type exitWatch struct{ f *os.File }

func watchExit(pidfd int) *exitWatch {
	if pidfd < 0 {
		return nil
	}
	if err := unix.SetNonblock(pidfd, true); err != nil {
		unix.Close(pidfd)
		return nil
	}
	return &exitWatch{os.NewFile(uintptr(pidfd), "pidfd")}
}

// wait returns true when the process has exited and false after close.
func (w *exitWatch) wait() bool {
	rc, err := w.f.SyscallConn()
	if err != nil {
		return false
	}
	return rc.Read(func(fd uintptr) bool { return ready(fd, unix.POLLIN) }) == nil
}

// exited reports whether the process is known to have exited.
func (w *exitWatch) exited() bool {
	if w == nil {
		return false
	}
	rc, err := w.f.SyscallConn()
	if err != nil {
		return false
	}
	gone := false
	rc.Control(func(fd uintptr) { gone = ready(fd, unix.POLLIN) })
	return gone
}

func (w *exitWatch) close() {
	if w != nil {
		w.f.Close()
	}
}
