package shm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/plugins/sdk"
)

// Sizes and words of the wire protocol; the package comment has the tables.
const (
	magic        = "TSHM1\x00\x00\x00"
	scheme       = "shm1:"
	helloSize    = 56
	recordSize   = 24
	tokenSize    = 32
	maxPath      = 107 // of a unix socket
	maxSize      = 1 << 46
	kindWelcome  = 1
	kindMap      = 2
	kindMapped   = 3
	kindWithdraw = 4
	kindUnmapped = 5
	codeOK       = 0
	codeUnknown  = 1
	codeRefused  = 2
	codeCrowded  = 3
)

type record struct {
	kind, code   uint32
	region, size uint64
}

func (r record) encode() []byte {
	b := make([]byte, recordSize)
	binary.LittleEndian.PutUint32(b, r.kind)
	binary.LittleEndian.PutUint32(b[4:], r.code)
	binary.LittleEndian.PutUint64(b[8:], r.region)
	binary.LittleEndian.PutUint64(b[16:], r.size)
	return b
}

func decodeRecord(b []byte) (record, error) {
	if len(b) != recordSize {
		return record{}, fmt.Errorf("a record of %d bytes, not %d", len(b), recordSize)
	}
	return record{
		kind: binary.LittleEndian.Uint32(b), code: binary.LittleEndian.Uint32(b[4:]),
		region: binary.LittleEndian.Uint64(b[8:]), size: binary.LittleEndian.Uint64(b[16:]),
	}, nil
}

// hello names the writer.
type hello struct {
	incarnation uint64
	epoch       uint32
	token       [tokenSize]byte
}

func (h hello) encode() []byte {
	b := make([]byte, helloSize)
	copy(b, magic)
	binary.LittleEndian.PutUint64(b[8:], h.incarnation)
	binary.LittleEndian.PutUint32(b[16:], h.epoch)
	copy(b[24:], h.token[:])
	return b
}

func decodeHello(b []byte) (h hello, err error) {
	if len(b) != helloSize || string(b[:8]) != magic || binary.LittleEndian.Uint32(b[20:]) != 0 {
		return h, fmt.Errorf("a first record of %d bytes that is no hello", len(b))
	}
	h.incarnation, h.epoch = binary.LittleEndian.Uint64(b[8:]), binary.LittleEndian.Uint32(b[16:])
	copy(h.token[:], b[24:])
	return h, nil
}

// sendBound is how long a record may wait for room in the socket of a peer that does not read.
const sendBound = time.Second

// send writes one record. Calls for one connection must not overlap.
func send(c *net.UnixConn, b []byte, fds ...int) error {
	var rights []byte
	if len(fds) != 0 {
		rights = unix.UnixRights(fds...)
	}
	if err := c.SetWriteDeadline(time.Now().Add(sendBound)); err != nil {
		return err
	}
	_, _, err := c.WriteMsgUnix(b, rights, nil)
	return err
}

// receive reads one record and owns its descriptors. io.EOF is the end of the stream.
func receive(c *net.UnixConn, b []byte) (n int, fds []int, err error) {
	control := make([]byte, unix.CmsgSpace(8*4))
	n, cn, flags, _, err := c.ReadMsgUnix(b, control) // close-on-exec: the net package asks for it
	if errors.Is(err, unix.ECONNRESET) {              // the end, with a record that the other had not read
		return 0, nil, io.EOF
	}
	if err != nil {
		return 0, nil, err
	}
	if n == 0 {
		return 0, nil, io.EOF
	}
	messages, err := unix.ParseSocketControlMessage(control[:cn])
	if err == nil {
		for i := range messages {
			if got, err := unix.ParseUnixRights(&messages[i]); err == nil {
				fds = append(fds, got...)
			}
		}
	}
	if err == nil && flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		err = errors.New("a record that is too long, or has too many descriptors")
	}
	if err != nil {
		closeAll(fds)
		return 0, nil, err
	}
	return n, fds, nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

// ofThisUser makes sure that the process at the other end has our user id, and returns its process id.
func ofThisUser(c *net.UnixConn) (pid int32, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	if cerr := raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); cerr != nil {
		return 0, cerr
	}
	if err != nil {
		return 0, fmt.Errorf("credentials of the peer: %w", err)
	}
	if int(cred.Uid) != os.Geteuid() {
		return 0, fmt.Errorf("process %d belongs to user %d, this one to user %d; run both engines as one user, or choose another backend for the pair",
			cred.Pid, cred.Uid, os.Geteuid())
	}
	return cred.Pid, nil
}

// importMemory maps what came with MAPPED and owns the descriptors from here on, also after an error.
func importMemory(size uint64, fds []int) (w memory, err error) {
	if len(fds) != 2 {
		closeAll(fds)
		return memory{}, fmt.Errorf("%d descriptors, not 2", len(fds))
	}
	w = memory{fd: fds[0], lease: fds[1]}
	defer func() {
		if err != nil {
			w.close()
		}
	}()
	if size == 0 || size > maxSize {
		return w, fmt.Errorf("a region of %d bytes", size)
	}
	if err := sdk.CheckMemory(w.fd, size); err != nil {
		return w, err
	}
	if w.bytes, err = unix.Mmap(w.fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return w, fmt.Errorf("map %d bytes: %w", size, err)
	}
	if err := unix.Madvise(w.bytes, unix.MADV_DONTFORK); err != nil {
		return w, fmt.Errorf("madvise DONTFORK: %w", err)
	}
	return w, nil
}

// memory is a mapping of a peer's region with what proves it.
type memory struct {
	bytes     []byte
	fd, lease int
}

func (m *memory) close() {
	if m.bytes != nil {
		_ = unix.Munmap(m.bytes)
		m.bytes = nil
	}
	unix.Close(m.fd)
	unix.Close(m.lease) // last: it says that the mapping is gone
}
