package tcp

import (
	"fmt"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// localBuffer is the size of the socket buffers of a TCP connection that stays on this host. Left alone,
// the kernel makes them so large that each byte goes to memory and back on its way.
const localBuffer = 512 << 10

// leastRetry is the shortest bound that Linux takes for its wait before it sends again what was not acknowledged
// (TCP_RTO_MAX_MS, 6.15 and newer). Unbounded it doubles up to two minutes: ops that a black hole of seconds has held
// up are to go on soon after it, before the host's stall clock.
const leastRetry = time.Second

// retries is how often Linux sends something again before it gives the connection up by itself, the first doubling
// waits left out: 15 in all (net.ipv4.tcp_retries2). It is not to do so before the time of silence.
const retries = 12

// tune prepares a connection, at either end. It is over when the other host acknowledges nothing for the time of
// silence: what is sent, which watch looks after, or the kernel's own probes while nothing is.
//
// TCP_USER_TIMEOUT would bound both, and does too much: when a packet cannot leave this host because the link is down
// and none is under way, Linux notes the time, does not forget it when the link is back, and at the next such moment
// takes all the time between for silence. A link that flaps for 300 ms then ends the connection.
func tune(c net.Conn, silence time.Duration) error {
	t, ok := c.(*net.TCPConn)
	if !ok {
		return nil
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return err
	}
	if err := raw.Control(func(fd uintptr) {
		// An older kernel refuses it, and is slower to go on.
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_RTO_MAX_MS, int(max(leastRetry, silence/retries).Milliseconds()))
	}); err != nil {
		return err
	}
	err = t.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: silence / 2, Interval: silence / 4, Count: 2})
	if err != nil {
		return fmt.Errorf("keepalive: %w", err)
	}
	now := time.Now()
	watch(t, raw, silence, now, now)
	here, _ := t.LocalAddr().(*net.TCPAddr)
	there, _ := t.RemoteAddr().(*net.TCPAddr)
	if here != nil && there != nil && here.IP.Equal(there.IP) {
		_ = t.SetReadBuffer(localBuffer) // a refusal costs speed only
		_ = t.SetWriteBuffer(localBuffer)
	}
	return nil
}

// watch ends reads and writes of a connection on which bytes have waited for the time of silence and nothing was
// acknowledged: seen is when it looked last, since when they have waited. It ends with the connection.
func watch(c *net.TCPConn, raw syscall.RawConn, silence time.Duration, seen, since time.Time) {
	time.AfterFunc(silence/8, func() {
		var (
			info *unix.TCPInfo
			err  error
		)
		if cerr := raw.Control(func(fd uintptr) {
			info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		}); cerr != nil || err != nil {
			return // it is closed
		}
		now := time.Now()
		heard := time.Duration(min(info.Last_ack_recv, info.Last_data_recv)) * time.Millisecond
		switch {
		case info.Unacked == 0 && info.Notsent_bytes == 0, heard <= now.Sub(seen):
			since = now
		case now.Sub(since) >= silence:
			_ = c.SetLinger(0) // what is left is for nobody
			_ = c.SetDeadline(now)
		}
		watch(c, raw, silence, now, since)
	})
}
