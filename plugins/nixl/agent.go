package nixl

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// agent is one of the library's, with the UCX backend. One call runs at a time: the library would serialise them too.
//
// What the library is given the address of lies in mem, which is none of Go's.
type agent struct {
	lib  *library
	name string

	mu      sync.Mutex
	h       uintptr // 0 when it was destroyed
	mem     []byte
	args    uintptr // optional arguments of every request
	locals  uintptr // descriptor lists, filled anew for each request
	remotes uintptr
}

// Places in agent.mem.
const (
	memOut   = 0    // two words that the library writes
	memName  = 64   // a string
	memName2 = 1024 // another one
	memBlob  = 4096 // metadata
	memSize  = memBlob + maxMetadata

	maxName     = 512
	maxMetadata = 256 << 10
)

// piece is Len bytes from a local address to a remote one.
type piece struct {
	src, dst uintptr
	n        uint64
}

// registration is memory that an agent knows. The library finds it again by its descriptor list.
type registration struct{ list uintptr }

// request is a transfer that the library knows of. One goroutine owns it.
type request struct{ h uintptr }

func (r *request) released() bool { return r.h == 0 }

var errDestroyed = errors.New("nixl: the agent is destroyed")

// newAgent makes an agent under a name that no other agent of any process may ever have had: peers know it by that.
func (l *library) newAgent(name string, progressDelay uint64) (_ *agent, err error) {
	if name == "" || len(name) > maxName {
		return nil, fmt.Errorf("agent name of %d bytes", len(name))
	}
	a := &agent{lib: l, name: name}
	if a.mem, err = unix.Mmap(-1, 0, memSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON); err != nil {
		return nil, fmt.Errorf("agent memory: %w", err)
	}
	defer func() {
		if err != nil {
			a.destroyLocked()
		}
	}()
	// The configuration as libraries up to 1.5 take it: two bools, port, thread mode, workers, two delays in
	// microseconds, a bool.
	const strict = 1
	config := a.mem[memBlob:][:40]
	clear(config)
	config[0] = 1 // a progress thread: a receiver serves writes without being asked
	binary.LittleEndian.PutUint32(config[8:], strict)
	binary.LittleEndian.PutUint32(config[12:], 1)
	binary.LittleEndian.PutUint64(config[16:], progressDelay)
	binary.LittleEndian.PutUint64(config[24:], 100000)
	if a.h, err = a.make("create agent", symCreateAgent, a.str(memName, name), address(config)); err != nil {
		return nil, err
	}
	params, err := a.make("create parameters", symCreateParams)
	if err != nil {
		return nil, err
	}
	_, err = a.make("create backend UCX", symCreateBackend, a.h, a.str(memName, "UCX"), params)
	l.call(symDestroyParams, params)
	if err != nil {
		return nil, fmt.Errorf("%w; option log: info lets the library say why", err)
	}
	if a.args, err = a.make("create arguments", symCreateOptArgs); err != nil {
		return nil, err
	}
	// Neighbours are joined before they come here.
	if err := l.call(symSkipDescMerge, a.args, 1).err("set arguments"); err != nil {
		return nil, err
	}
	if a.locals, err = a.make("create descriptors", symCreateXferList, dram); err != nil {
		return nil, err
	}
	if a.remotes, err = a.make("create descriptors", symCreateXferList, dram); err != nil {
		return nil, err
	}
	return a, nil
}

const (
	dram    = 0 // memory type
	opWrite = 1
)

// make calls a function whose last argument is where it puts a handle.
func (a *agent) make(what string, s symbol, args ...uintptr) (uintptr, error) {
	out := a.word(0)
	*out = 0
	if err := a.lib.call(s, append(args, uintptr(unsafe.Pointer(out)))...).err(what); err != nil {
		return 0, err
	}
	return *out, nil
}

func (a *agent) word(i int) *uintptr { return (*uintptr)(unsafe.Pointer(&a.mem[memOut+8*i])) }

// str puts a string where the library can read it.
func (a *agent) str(at int, s string) uintptr {
	b := a.mem[at:][:len(s)+1]
	copy(b, s)
	b[len(s)] = 0
	return address(b)
}

// destroy ends everything of the agent: no request of it reads or writes memory afterwards, and nothing that a peer
// writes to it lands any more. Of all that the library offers this alone is a proof.
func (a *agent) destroy() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.destroyLocked()
}

func (a *agent) destroyLocked() {
	if a.h != 0 {
		a.lib.call(symDestroyAgent, a.h)
		a.h = 0
	}
	for _, list := range []*uintptr{&a.locals, &a.remotes} {
		if *list != 0 {
			a.lib.call(symDestroyXferList, *list)
			*list = 0
		}
	}
	if a.args != 0 {
		a.lib.call(symDestroyOptArgs, a.args)
		a.args = 0
	}
	if a.mem != nil {
		_ = unix.Munmap(a.mem)
		a.mem = nil
	}
}

// register makes memory known. It must stay mapped until deregister or destroy.
func (a *agent) register(b []byte) (registration, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.h == 0 {
		return registration{}, errDestroyed
	}
	list, err := a.make("create descriptors", symCreateRegList, dram)
	if err != nil {
		return registration{}, err
	}
	err = a.lib.call(symRegListAdd, list, address(b), uintptr(len(b)), 0, 0, 0).err("add descriptor")
	if err == nil {
		err = a.lib.call(symRegister, a.h, list, 0).err("register memory")
	}
	if err != nil {
		a.lib.call(symDestroyRegList, list)
		return registration{}, err
	}
	return registration{list}, nil
}

// deregister forgets memory. The library dereferences freed memory when a request still uses it, so none may; and it
// keeps no peer from writing.
func (a *agent) deregister(r registration) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	var err error
	if a.h != 0 {
		err = a.lib.call(symDeregister, a.h, r.list, 0).err("deregister memory")
	}
	a.lib.call(symDestroyRegList, r.list)
	return err
}

// metadata is what a peer needs to reach the agent: connections, and every registration so far.
func (a *agent) metadata() ([]byte, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.h == 0 {
		return nil, errDestroyed
	}
	return a.blob("get metadata", symLocalMetadata, a.h, uintptr(unsafe.Pointer(a.word(0))), uintptr(unsafe.Pointer(a.word(1))))
}

// metadataOf is what a peer that knows the agent needs to write to one registration.
func (a *agent) metadataOf(r registration) ([]byte, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.h == 0 {
		return nil, errDestroyed
	}
	return a.blob("get metadata of a region", symPartialMetadata, a.h, r.list, uintptr(unsafe.Pointer(a.word(0))), uintptr(unsafe.Pointer(a.word(1))), 0)
}

func (a *agent) blob(what string, s symbol, args ...uintptr) ([]byte, error) {
	*a.word(0), *a.word(1) = 0, 0
	if err := a.lib.call(s, args...).err(what); err != nil {
		return nil, err
	}
	b := a.lib.take(*a.word(0), int(*a.word(1)))
	if len(b) == 0 || len(b) > maxMetadata {
		return nil, fmt.Errorf("nixl %s: %d bytes", what, len(b))
	}
	return b, nil
}

// load makes a peer's agent known and returns its name. A damaged blob can crash the process or spoil the name for
// ever, so the caller has proved that it is as the peer made it.
func (a *agent) load(metadata []byte) (string, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.h == 0:
		return "", errDestroyed
	case len(metadata) == 0 || len(metadata) > maxMetadata:
		return "", fmt.Errorf("metadata of %d bytes", len(metadata))
	}
	copy(a.mem[memBlob:], metadata)
	name, err := a.make("load metadata", symLoadMetadata, a.h, address(a.mem[memBlob:]), uintptr(len(metadata)))
	if err != nil {
		return "", err
	}
	return a.lib.takeString(name), nil
}

// forget drops a peer's agent. Requests to it have ended: a status that the library gives after this says nothing
// about memory.
func (a *agent) forget(peer string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.h != 0 {
		a.lib.call(symInvalidate, a.h, a.str(memName, peer))
	}
}

// write makes a request; nothing moves before post.
func (a *agent) write(peer string, pieces []piece) (*request, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.h == 0 {
		return nil, errDestroyed
	}
	err := errors.Join(a.lib.call(symXferListClear, a.locals).err("clear descriptors"), a.lib.call(symXferListClear, a.remotes).err("clear descriptors"))
	if err != nil {
		return nil, err
	}
	for _, p := range pieces {
		s := a.lib.call(symXferListAdd, a.locals, p.src, uintptr(p.n), 0)
		if s == statusDone {
			s = a.lib.call(symXferListAdd, a.remotes, p.dst, uintptr(p.n), 0)
		}
		if err := s.err("add descriptor"); err != nil {
			return nil, err
		}
	}
	out := a.word(0)
	*out = 0
	s := a.lib.call(symCreateRequest, a.h, opWrite, a.locals, a.remotes, a.str(memName, peer), uintptr(unsafe.Pointer(out)), a.args)
	if err := s.err("create request"); err != nil {
		return nil, err
	}
	return &request{*out}, nil
}

func (a *agent) post(r *request) status   { return a.on(symPost, r, 0) }
func (a *agent) status(r *request) status { return a.on(symStatus, r) }

func (a *agent) on(s symbol, r *request, more ...uintptr) status {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.h == 0 || r.h == 0 {
		return -3 // asked for a request that is released, the library crashes
	}
	return a.lib.call(s, append([]uintptr{a.h, r.h}, more...)...)
}

// release gives a request back. It is no fence: of one that has not ended, bytes still land afterwards, so the caller
// has seen it end.
func (a *agent) release(r *request) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if r.h == 0 {
		return
	}
	if a.h != 0 {
		a.lib.call(symRelease, a.h, r.h)
	}
	a.lib.call(symDestroyRequest, r.h)
	r.h = 0
}
