package tcp

import (
	"bytes"
	"io"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/sdktest"
)

// recordedConn remembers what is written.
type recordedConn struct {
	net.Conn
	writes [][]byte
}

func (c *recordedConn) Write(b []byte) (int, error) {
	c.writes = append(c.writes, append([]byte(nil), b...))
	return c.Conn.Write(b)
}

// TestReplayedHandshake: who has seen a good handshake go by cannot use it for a connection of their own.
func TestReplayedHandshake(t *testing.T) {
	b, h, _, _ := rawTarget(t, options{})
	ep, id, err := decodeEndpoint(h.Response.Endpoint)
	if err != nil {
		t.Fatal(err)
	}
	dial := func() net.Conn {
		c, err := net.Dial("tcp", ep.TCP[0])
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	good := &recordedConn{Conn: dial()}
	if err := introduce(good, hello{target: id, incarnation: 1, epoch: 1, conn: 7, node: "writer"}, make([]byte, tokenLen), nil, 5*time.Second); err != nil {
		t.Fatal(err)
	}
	good.Close()
	eventually(t, "the good connection is over", func() bool { return b.recv.connections() == 0 })

	c := dial()
	c.SetDeadline(time.Now().Add(sdktest.Wait))
	for i, w := range good.writes {
		if _, err := c.Write(w); err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			if _, err := io.ReadFull(c, make([]byte, challengeLen)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if answer, err := io.ReadAll(c); err != nil || len(answer) != 0 {
		t.Errorf("the same words again were answered with %x, %v", answer, err)
	}
	eventually(t, "the refusal is counted", func() bool { return b.Counters()["handshakes_refused"] == 1 })
}

// TestImpostorReceiver: who listens in the place of a peer and accepts everybody is told nothing after the greeting,
// so no page is ever sent to it.
func TestImpostorReceiver(t *testing.T) {
	writer, impostor := net.Pipe()
	defer impostor.Close()
	impostor.SetDeadline(time.Now().Add(sdktest.Wait))
	result := make(chan error, 1)
	go func() {
		result <- introduce(writer, hello{incarnation: 1, epoch: 1, conn: 1, node: "writer"}, bytes.Repeat([]byte{7}, tokenLen), nil, sdktest.Wait)
		writer.Close()
	}()
	if _, _, err := readHello(impostor); err != nil {
		t.Fatal(err)
	}
	challenge := make([]byte, challengeLen)
	challenge[0] = byte(statusOK)
	if _, err := impostor.Write(challenge); err != nil {
		t.Fatal(err)
	}
	if more, err := io.ReadAll(impostor); err != nil || len(more) != 0 {
		t.Errorf("the writer went on with %d bytes, %v", len(more), err)
	}
	if err := <-result; err != errToken {
		t.Errorf("the writer says %v", err)
	}
}

// TestRemovedWriterWithFullBuffers: what a writer sent before it was removed, and what was read of it already, lands
// no more.
func TestRemovedWriterWithFullBuffers(t *testing.T) {
	b, h, r, pool := rawTarget(t, options{})
	h.Grant(sdktest.Destination, pool, sdktest.Pages(0, 16)...)
	w := dialRaw(t, b, h, "writer", make([]byte, tokenLen))
	var in *inbound
	b.recv.mu.Lock()
	for in = range b.recv.conns {
	}
	b.recv.mu.Unlock()
	queued := func(c net.Conn, what uint) int {
		raw, err := c.(*net.TCPConn).SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		n := -1
		raw.Control(func(fd uintptr) { n, err = unix.IoctlGetInt(int(fd), what) })
		if err != nil {
			t.Fatal(err)
		}
		return n
	}

	in.gate.Lock() // its goroutine stands before the first slice
	frames := putBegin(nil, 1, generation, 1<<16, 8<<20)
	for page := range uint64(16) {
		frames = append(frames, data(1, bytes.Repeat([]byte{0xEE}, 4096), piece{r.ID, page * 4096, 4096})...)
	}
	w.send(frames)
	eventually(t, "all of it is read", func() bool { return queued(w.c, unix.SIOCOUTQ) == 0 && queued(in.conn, unix.SIOCINQ) == 0 })
	removed := make(chan struct{})
	go func() {
		b.Unaccept(&sdk.Peer{Node: "writer", Incarnation: 1, Epoch: 1})
		close(removed)
	}()
	eventually(t, "the writer is refused", in.w.refused.Load)
	in.gate.Unlock()
	<-removed
	eventually(t, "the connection is over", func() bool { return b.recv.connections() == 0 })
	if !bytes.Equal(r.Bytes, make([]byte, len(r.Bytes))) {
		t.Error("a slice of a removed writer landed")
	}
}
