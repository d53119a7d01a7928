// Package silence ends a TCP connection whose other host acknowledges nothing any more. Engines use it for the streams
// between them and the tcp plugin for its data; a plugin with TCP connections of its own can do the same.
package silence

import (
	"fmt"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// leastRetry is the shortest bound that Linux takes for its wait before it sends again what was not acknowledged
// (TCP_RTO_MAX_MS, 6.15 and newer). Unbounded it doubles up to two minutes: what a black hole of seconds has held up is
// to go on soon after it, before the clocks of whoever waits for it.
const leastRetry = time.Second

// retries is how often Linux sends something again before it gives the connection up by itself, the first doubling
// waits left out: 15 in all (net.ipv4.tcp_retries2). It is not to do so before the time of silence.
const retries = 12

// Bound has a connection end when the other host acknowledges nothing for the time d: what is sent, which a watch looks
// after until the connection is closed, or the kernel's own probes while nothing is. Reads and writes then fail with
// os.ErrDeadlineExceeded, and Close sends what is left to nobody. It is called once, at either end; the probes count in
// whole seconds.
//
// TCP_USER_TIMEOUT would bound both, and does too much: when a packet cannot leave this host because the link is down
// and none is under way, Linux notes the time, does not forget it when the link is back, and at the next such moment
// takes all the time between for silence. A link that flaps for 300 ms then ends the connection.
func Bound(c *net.TCPConn, d time.Duration) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	if err := raw.Control(func(fd uintptr) {
		// An older kernel refuses it, and is slower to go on.
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_RTO_MAX_MS, int(max(leastRetry, d/retries).Milliseconds()))
	}); err != nil {
		return err
	}
	if err := c.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: d / 2, Interval: d / 4, Count: 2}); err != nil {
		return fmt.Errorf("keepalive: %w", err)
	}
	now := time.Now()
	watch(c, raw, d, now, now)
	return nil
}

// watch ends reads and writes of a connection on which bytes have waited for the time d and nothing was acknowledged:
// seen is when it looked last, since when they have waited. It ends with the connection.
func watch(c *net.TCPConn, raw syscall.RawConn, d time.Duration, seen, since time.Time) {
	time.AfterFunc(d/16, func() {
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
		// With nothing under way what waits has no room at the other end, and the kernel asks for some ever less often.
		answered := info.Unacked == 0 && (info.Notsent_bytes == 0 || info.Probes == 0)
		switch {
		case answered, heard <= now.Sub(seen):
			since = now
		case now.Sub(since) >= d:
			_ = c.SetLinger(0) // what is left is for nobody
			_ = c.SetDeadline(now)
		}
		watch(c, raw, d, now, since)
	})
}
