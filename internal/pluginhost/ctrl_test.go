package pluginhost

import (
	"encoding/binary"
	"testing"

	"golang.org/x/sys/unix"
)

// TestSendRegion: memory comes as the region id with two descriptors, memory with a handle with the lease alone.
func TestSendRegion(t *testing.T) {
	c, child, err := newCtrl()
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	defer child.Close()
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pipe[0])
	defer unix.Close(pipe[1])
	for _, mem := range []int{pipe[0], -1} {
		if err := c.sendRegion(7, mem, pipe[1]); err != nil {
			t.Fatal(err)
		}
		data, rights := make([]byte, 16), make([]byte, unix.CmsgSpace(16))
		n, oobn, _, _, err := unix.Recvmsg(int(child.Fd()), data, rights, unix.MSG_CMSG_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		messages, err := unix.ParseSocketControlMessage(rights[:oobn])
		if err != nil || len(messages) != 1 {
			t.Fatalf("%d control messages, %v", len(messages), err)
		}
		fds, err := unix.ParseUnixRights(&messages[0])
		if err != nil {
			t.Fatal(err)
		}
		for _, fd := range fds {
			unix.Close(fd)
		}
		want := 2
		if mem < 0 {
			want = 1
		}
		if n != 8 || binary.LittleEndian.Uint64(data) != 7 || len(fds) != want {
			t.Errorf("memory %d: %d bytes, region %d, %d descriptors; want 8, 7, %d", mem, n, binary.LittleEndian.Uint64(data), len(fds), want)
		}
	}
}
