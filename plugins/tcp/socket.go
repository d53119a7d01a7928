package tcp

import (
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// localBuffer is the size of the socket buffers of a TCP connection that stays on this host. Left alone,
// the kernel makes them so large that each byte goes to memory and back on its way.
const localBuffer = 512 << 10

// longestRetry bounds the kernel's wait before it sends again what was not acknowledged, which else doubles up to two
// minutes: ops that a black hole of seconds has held up go on within one more, long before the host's stall clock.
// Linux 6.15 and newer.
const longestRetry = time.Second

// tune prepares a connection, at either end. The kernel ends it when the other host acknowledges nothing
// for the time of silence: both what is sent and its own probes while nothing is.
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
	err = t.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: silence / 2, Interval: silence / 4, Count: 2})
	if err != nil {
		return fmt.Errorf("keepalive: %w", err)
	}
	here, _ := t.LocalAddr().(*net.TCPAddr)
	there, _ := t.RemoteAddr().(*net.TCPAddr)
	if here != nil && there != nil && here.IP.Equal(there.IP) {
		_ = t.SetReadBuffer(localBuffer) // a refusal costs speed only
		_ = t.SetWriteBuffer(localBuffer)
	}
	return nil
}
