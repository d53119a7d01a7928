package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// Region is memory that this process shares with the engine's backends: a sealed memfd.
type Region struct {
	mem   []byte
	memfd int // never handed out; what is handed out is re-opened, so that writers can be counted

	mu     sync.Mutex
	id     int64
	owner  *Client // the session that it was handed to
	lease  int     // our end of the lease, -1 before it was handed out
	writer bool    // somebody else may hold it writable
	closed bool

	canary canary
}

// NewRegion makes memory of size bytes that no engine knows yet. It is zero and untouched.
func NewRegion(size int64) (*Region, error) {
	if size < 8 {
		return nil, fmt.Errorf("region of %d bytes: at least 8 are needed", size)
	}
	fd, err := unix.MemfdCreate("terminus-region", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("region: memfd: %w", err)
	}
	r := &Region{memfd: fd, lease: -1}
	if err := unix.Ftruncate(fd, size); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("region of %d bytes: %w", size, err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("region: seals: %w", err)
	}
	r.mem, err = unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("region of %d bytes: map: %w", size, err)
	}
	r.canary.offset = int(size-8) &^ 7
	r.canary.at = r.mem[r.canary.offset:][:8]
	// A child must not keep the pages writable behind our back.
	if err := unix.Madvise(r.mem, unix.MADV_DONTFORK); err != nil {
		r.Close()
		return nil, fmt.Errorf("region: keep it from children: %w", err)
	}
	return r, nil
}

// CreateRegion is NewRegion and AddRegion.
func (c *Client) CreateRegion(ctx context.Context, size int64) (*Region, error) {
	r, err := NewRegion(size)
	if err != nil {
		return nil, err
	}
	if err := c.AddRegion(ctx, r); err != nil {
		r.Close()
		return nil, err
	}
	return r, nil
}

// AddRegion hands a region to the engine and returns when every backend is ready with it. The last
// aligned eight bytes are used for a moment to prove that both sides see the same memory, then put
// back: with the answer, also one that comes after ctx has ended. After an error they are undefined
// until then, or until the session is over and Reusable says true: do not use them before. A region
// whose answer is late stays with the session, which has it once the answer is there. A region that was
// with an engine that is gone is accepted again once it is Reusable.
func (c *Client) AddRegion(ctx context.Context, r *Region) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return errors.New("region: closed")
	}
	if r.owner != nil && (r.owner.Err() == nil || !r.freeLocked()) {
		return fmt.Errorf("region: it is still with an engine: %w", ErrNotReusable)
	}
	out, err := unix.Open("/proc/self/fd/"+strconv.Itoa(r.memfd), unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("region: re-open: %w", err)
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		unix.Close(out)
		return fmt.Errorf("region: lease: %w", err)
	}
	c.mu.Lock()
	c.lastReg++
	id := c.lastReg
	c.regions[id] = r
	c.mu.Unlock()
	if r.lease >= 0 {
		unix.Close(r.lease)
	}
	r.id, r.owner, r.lease, r.writer = id, c, pair[0], true

	want := r.canary.paint()
	p, err := c.start(ctx, map[string]any{
		"t": "region_add", "region": id, "size": len(r.mem), "canary_offset": r.canary.offset, "canary": want,
	}, nil, []int{out, pair[1]}, func(a *answer) error {
		refused := a.err() != nil
		if seen := r.canary.answered(want, !refused); refused {
			return nil // finish says so
		} else if !seen {
			return errors.New("the engine's backends do not see this memory: their mapping is private")
		}
		c.mu.Lock()
		c.ready = append(c.ready, r)
		c.mu.Unlock()
		return nil
	})
	if err != nil {
		r.canary.uncover() // nothing was sent
	} else if err = p.Wait(ctx); err != nil {
		r.freeLocked() // where the proof is there already, the memory is as it was
	}
	if err != nil {
		return fmt.Errorf("region %d: %w", id, err)
	}
	return nil
}

// Bytes returns the memory, valid until Close.
func (r *Region) Bytes() []byte { return r.mem }

func (r *Region) client() *Client {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.owner
}

// Reusable reports, after the engine is gone, that no process but this one can write to the region any
// more: a read lease on the handed-out file is granted only when no writable descriptor or mapping of
// it is left. With that proof the eight bytes that an unanswered AddRegion used are what they were.
// While the session lives it is false; rooms know then.
func (r *Region) Reusable() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return !r.closed && (r.owner == nil || r.owner.Err() != nil && r.freeLocked())
}

func (r *Region) freeLocked() bool {
	if r.writer && !r.closed && leaseProof() == nil && noWriter(r.memfd) {
		r.writer = false
		r.canary.uncover()
	}
	return !r.writer
}

// Close unmaps the memory. Others that map it keep it; nothing in this process can be overwritten
// afterwards. Slices from Bytes must not be used any more.
func (r *Region) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil
	}
	r.closed = true
	r.canary.close()
	if c := r.owner; c != nil {
		c.mu.Lock()
		delete(c.regions, r.id)
		c.ready = slices.DeleteFunc(c.ready, func(x *Region) bool { return x == r })
		c.mu.Unlock()
	}
	if r.lease >= 0 {
		unix.Close(r.lease)
	}
	err := unix.Munmap(r.mem)
	r.mem = nil
	return errors.Join(err, unix.Close(r.memfd))
}

// fenced reports that no region of the session can be written by anybody else, once the engine is gone.
func (c *Client) fenced() bool {
	if c.free.Load() {
		return true
	}
	c.mu.Lock()
	regions := make([]*Region, 0, len(c.regions))
	for _, r := range c.regions {
		regions = append(regions, r)
	}
	c.mu.Unlock()
	for _, r := range regions {
		r.mu.Lock()
		// A region that went to a newer session was free before, as AddRegion asked.
		ok := r.closed || r.owner != c || r.freeLocked()
		r.mu.Unlock()
		if !ok {
			return false
		}
	}
	c.free.Store(true)
	return true
}

// noWriter reports that no writable open file description of the memfd's inode, other than the memfd
// itself, is left in any process, nor a mapping of one.
func noWriter(memfd int) bool {
	fd, err := unix.Open("/proc/self/fd/"+strconv.Itoa(memfd), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_RDLCK); err != nil {
		return false
	}
	unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_UNLCK)
	return true
}

// leaseProof tries the proof on memory of our own, once: it must say no while a re-opened descriptor
// lives, and yes afterwards. Where it does not, pages are never reusable after an engine was lost.
var leaseProof = sync.OnceValue(func() error {
	fd, err := unix.MemfdCreate("terminus-lease-test", unix.MFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("lease self-test: memfd: %w", err)
	}
	defer unix.Close(fd)
	w, err := unix.Open("/proc/self/fd/"+strconv.Itoa(fd), unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("lease self-test: re-open: %w", err)
	}
	busy := !noWriter(fd)
	unix.Close(w)
	if free := noWriter(fd); !busy || !free {
		return fmt.Errorf("lease self-test: with a writer free=%t, without free=%t: this kernel gives no proof, so pages stay unusable after an engine was lost", !busy, free)
	}
	return nil
})

// LeaseProof reports whether pages can become reusable after the engine was lost: nil, or why not.
func LeaseProof() error { return leaseProof() }
