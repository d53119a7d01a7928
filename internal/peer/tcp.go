package peer

import (
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// longestRetry bounds the kernel's wait before it sends again what was not acknowledged, which else doubles up to two
// minutes: after a black hole of seconds a stream goes on within one more. Linux 6.15 and newer.
const longestRetry = time.Second

// tune has the kernel end a TCP connection whose other host acknowledges nothing for the time of silence: what is
// sent, or its own probes while nothing is. Else a connection that a black hole has left half open, with a full
// buffer, would be here for a quarter of an hour after its stream is given up.
func tune(c net.Conn, silence time.Duration) error {
	t, ok := c.(*net.TCPConn)
	if !ok {
		return nil
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return err
	}
	if cerr := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(silence.Milliseconds()))
		// An older kernel refuses it, and is slower to go on.
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_RTO_MAX_MS, int(longestRetry.Milliseconds()))
	}); cerr != nil {
		return cerr
	}
	if err != nil {
		return fmt.Errorf("TCP_USER_TIMEOUT: %w", err)
	}
	// In whole seconds, at least one each.
	if err := t.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: silence / 2, Interval: silence / 4, Count: 2}); err != nil {
		return fmt.Errorf("keepalive: %w", err)
	}
	return nil
}
