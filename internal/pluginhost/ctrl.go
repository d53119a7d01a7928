package pluginhost

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// ctrl is the host's end of the control socketpair. The plugin's end is the host-death lease (EOF there
// means that the host is gone), the way of descriptors, and, seen from here, the proof that no process
// of the epoch is left that inherited it (EOF here).
type ctrl struct {
	conn *net.UnixConn
	gone chan struct{} // closed at EOF: nobody holds the plugin's end
}

// newCtrl returns the host's end and the plugin's end, both close-on-exec. The caller closes child
// once the plugin is started.
func newCtrl() (c *ctrl, child *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("control socketpair: %w", err)
	}
	host := os.NewFile(uintptr(fds[0]), "control")
	child = os.NewFile(uintptr(fds[1]), "control-plugin")
	defer host.Close()
	conn, err := net.FileConn(host)
	if err != nil {
		child.Close()
		return nil, nil, fmt.Errorf("control socketpair: %w", err)
	}
	return &ctrl{conn: conn.(*net.UnixConn), gone: make(chan struct{})}, child, nil
}

// sendRegion sends the region id with its two descriptors, without blocking; memory that is opened by a handle has
// none of its own (mem below 0).
func (c *ctrl) sendRegion(region uint64, mem, lease int) error {
	raw, err := c.conn.SyscallConn()
	if err != nil {
		return fmt.Errorf("send region %d: %w", region, err)
	}
	id := binary.LittleEndian.AppendUint64(nil, region)
	rights := unix.UnixRights(mem, lease)
	if mem < 0 {
		rights = unix.UnixRights(lease)
	}
	var sendErr error
	err = raw.Control(func(fd uintptr) {
		for {
			sendErr = unix.Sendmsg(int(fd), id, rights, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
			if sendErr != unix.EINTR {
				return
			}
		}
	})
	if err == nil {
		err = sendErr
	}
	switch err {
	case nil:
		return nil
	case unix.EAGAIN, unix.ENOBUFS, unix.ETOOMANYREFS:
		return fmt.Errorf("send region %d on the control socket: %w (%v)", region, ErrFull, err)
	case unix.EPIPE, unix.ECONNRESET:
		return fmt.Errorf("send region %d on the control socket: %w (%v)", region, ErrEpoch, err)
	}
	return fmt.Errorf("send region %d on the control socket: %w", region, err)
}

// read consumes what the plugin sends until EOF, or until close; it returns whether it was EOF.
// Version 1 serves nothing in this direction: descriptors are closed at once.
func (c *ctrl) read() (gone bool) {
	buf := make([]byte, 64)
	oob := make([]byte, unix.CmsgSpace(16*4))
	for {
		_, oobn, _, _, err := c.conn.ReadMsgUnix(buf, oob)
		if oobn > 0 {
			closeRights(oob[:oobn])
		}
		switch {
		case err == nil:
		case errors.Is(err, net.ErrClosed):
			return false
		case !errors.Is(err, io.EOF) || c.hungUp():
			close(c.gone)
			return true
		}
	}
}

// hungUp tells the end of the connection from an empty message, which reads the same.
func (c *ctrl) hungUp() bool {
	raw, err := c.conn.SyscallConn()
	if err != nil {
		return true
	}
	hup := true
	err = raw.Control(func(fd uintptr) {
		fds := []unix.PollFd{{Fd: int32(fd)}}
		if n, err := unix.Poll(fds, 0); err == nil {
			hup = n > 0 && fds[0].Revents&unix.POLLHUP != 0
		}
	})
	return err != nil || hup
}

func closeRights(oob []byte) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return
	}
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			continue
		}
		for _, fd := range fds {
			unix.Close(fd)
		}
	}
}

func (c *ctrl) close() { c.conn.Close() }
