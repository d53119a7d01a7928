package peer

import (
	"net"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk/silence"
)

// tune has a TCP connection end when the other host acknowledges nothing for the time of silent. Else a connection that
// a black hole has left half open, with a full buffer, would be here for a quarter of an hour after its stream is given
// up.
func tune(c net.Conn, silent time.Duration) error {
	t, ok := c.(*net.TCPConn)
	if !ok {
		return nil
	}
	return silence.Bound(t, silent)
}
