package tcp

import (
	"net"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk/silence"
)

// localBuffer is the size of the socket buffers of a TCP connection that stays on this host. Left alone,
// the kernel makes them so large that each byte goes to memory and back on its way.
const localBuffer = 512 << 10

// tune prepares a connection, at either end. It is over when the other host acknowledges nothing for the time of
// silent.
func tune(c net.Conn, silent time.Duration) error {
	t, ok := c.(*net.TCPConn)
	if !ok {
		return nil
	}
	if err := silence.Bound(t, silent); err != nil {
		return err
	}
	here, _ := t.LocalAddr().(*net.TCPAddr)
	there, _ := t.RemoteAddr().(*net.TCPAddr)
	if here != nil && there != nil && here.IP.Equal(there.IP) {
		_ = t.SetReadBuffer(localBuffer) // a refusal costs speed only
		_ = t.SetWriteBuffer(localBuffer)
	}
	return nil
}
