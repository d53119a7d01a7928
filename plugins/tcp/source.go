package tcp

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// populateStep is how much of a source is touched ahead in one go.
const populateStep = 16 << 20

// source is a region of a writer, mapped here read-only. All connections of the writer share it.
type source struct {
	bytes []byte
	refs  int // guarded by receiver.mu
	stop  atomic.Bool
	warm  sync.WaitGroup
}

// openSource returns the mapping of the writer's region id, made from fd unless there is one. fd is
// closed.
func (r *receiver) openSource(w *writer, id, size uint64, fd int) (*source, error) {
	defer unix.Close(fd)
	r.mu.Lock()
	defer r.mu.Unlock()
	if s := w.sources[id]; s != nil {
		if uint64(len(s.bytes)) != size {
			return nil, fmt.Errorf("region %d has %d bytes, not %d", id, len(s.bytes), size)
		}
		s.refs++
		return s, nil
	}
	if len(w.sources) >= maxSources {
		return nil, fmt.Errorf("more than %d regions of one writer", maxSources)
	}
	s, err := mapSource(fd, size)
	if err != nil {
		return nil, fmt.Errorf("region %d: %w", id, err)
	}
	s.refs = 1
	w.sources[id] = s
	return s, nil
}

// closeSource gives back one reference.
func (r *receiver) closeSource(w *writer, id uint64, s *source) {
	r.mu.Lock()
	s.refs--
	last := s.refs == 0
	if last {
		delete(w.sources, id)
	}
	r.mu.Unlock()
	if last {
		s.stop.Store(true)
		s.warm.Wait()
		unix.Munmap(s.bytes)
	}
}

// mapSource maps a sealed memory descriptor read-only and touches it ahead in the background: a first
// touch during a copy costs more than the copy.
func mapSource(fd int, size uint64) (*source, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	const need = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
	switch {
	case err != nil:
		return nil, fmt.Errorf("not a memory descriptor: %w", err)
	case seals&need != need:
		return nil, errors.New("the memory is not sealed against shrinking and growing")
	case size == 0 || st.Size < 0 || size > uint64(st.Size):
		return nil, fmt.Errorf("%d bytes of a file of %d", size, st.Size)
	}
	b, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("mmap: %w", err)
	}
	if err := unix.Madvise(b, unix.MADV_DONTFORK); err != nil {
		unix.Munmap(b)
		return nil, fmt.Errorf("madvise: %w", err)
	}
	s := &source{bytes: b}
	s.warm.Go(func() {
		for len(b) > 0 && !s.stop.Load() {
			n := min(len(b), populateStep)
			if unix.Madvise(b[:n], unix.MADV_POPULATE_READ) != nil {
				return // an old kernel, or no memory: the copies will touch it
			}
			b = b[n:]
		}
	})
	return s, nil
}

// sendRegion writes b on c together with a read-only descriptor of the memory fd.
func sendRegion(c *net.UnixConn, b []byte, fd int) error {
	f, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", fd), os.O_RDONLY, 0)
	if err != nil {
		return fmt.Errorf("reopen region read-only: %w", err)
	}
	defer f.Close()
	n, _, err := c.WriteMsgUnix(b, syscall.UnixRights(int(f.Fd())), nil)
	if err == nil && n < len(b) {
		_, err = c.Write(b[n:])
	}
	return err
}

// fdReader reads a unix socket and keeps the descriptors that come along, a few at most.
type fdReader struct {
	c   *net.UnixConn
	oob [128]byte
	fds []int
}

const maxHeldFDs = 16

func (r *fdReader) Read(p []byte) (int, error) {
	n, oobn, _, _, err := r.c.ReadMsgUnix(p, r.oob[:])
	if oobn > 0 {
		if kerr := r.keep(r.oob[:oobn]); err == nil {
			err = kerr
		}
	}
	return max(n, 0), err // -1 with an error
}

func (r *fdReader) keep(oob []byte) error {
	msgs, err := syscall.ParseSocketControlMessage(oob)
	if err != nil {
		return fmt.Errorf("control message: %w", err)
	}
	for i := range msgs {
		fds, err := syscall.ParseUnixRights(&msgs[i])
		if err != nil {
			continue
		}
		r.fds = append(r.fds, fds...)
	}
	if len(r.fds) > maxHeldFDs {
		return fmt.Errorf("more than %d descriptors without their frames", maxHeldFDs)
	}
	return nil
}

// take returns the oldest descriptor.
func (r *fdReader) take() (int, bool) {
	if len(r.fds) == 0 {
		return -1, false
	}
	fd := r.fds[0]
	r.fds = r.fds[1:]
	return fd, true
}

func (r *fdReader) close() {
	for _, fd := range r.fds {
		unix.Close(fd)
	}
	r.fds = nil
}
