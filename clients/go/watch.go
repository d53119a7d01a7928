package client

import (
	"math/bits"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// watchedFD is a descriptor whose readability a goroutine can wait for without holding a thread.
type watchedFD struct {
	f    *os.File
	read bool // take eight bytes (an eventfd), instead of only waiting (a pidfd)
}

func watchFD(fd int, read bool) *watchedFD {
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil
	}
	return &watchedFD{os.NewFile(uintptr(fd), "watched"), read}
}

// wait returns true when the descriptor is readable and false when it was closed.
func (w *watchedFD) wait() bool {
	if w.read {
		var b [8]byte
		_, err := w.f.Read(b[:])
		return err == nil
	}
	rc, err := w.f.SyscallConn()
	if err != nil {
		return false
	}
	return rc.Read(readable) == nil
}

func readable(fd uintptr) bool {
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, err := unix.Poll(p, 0)
	return err == nil && n == 1
}

func (w *watchedFD) close() {
	if w != nil {
		w.f.Close()
	}
}

// peerPidfd returns a pidfd of the process that listens at the other end, or nil where the kernel
// gives none: then the end of the socket is the only sign.
func peerPidfd(conn *net.UnixConn) *watchedFD {
	rc, err := conn.SyscallConn()
	if err != nil {
		return nil
	}
	fd := -1
	rc.Control(func(s uintptr) {
		if v, err := unix.GetsockoptInt(int(s), unix.SOL_SOCKET, unix.SO_PEERPIDFD); err == nil {
			fd = v
			return
		}
		if cred, err := unix.GetsockoptUcred(int(s), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil && cred.Pid > 0 {
			if v, err := unix.PidfdOpen(int(cred.Pid), 0); err == nil {
				fd = v
			}
		}
	})
	if fd < 0 {
		return nil
	}
	return watchFD(fd, false)
}

// trailingByte returns the index of the lowest byte of d that is not zero.
func trailingByte(d uint64) int { return bits.TrailingZeros64(d) / 8 }
