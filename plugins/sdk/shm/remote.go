package shm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

const (
	// dialBound bounds connecting to a peer's socket.
	dialBound = 5 * time.Second
	// answerBound bounds the wait for WELCOME (longer than admitBound) and for MAPPED.
	answerBound = 10 * time.Second
)

// Remote is the memory of one peer. It connects anew when the connection was lost. All methods may be
// called from any goroutine.
type Remote struct {
	share *Share
	node  string
	path  string
	hello hello

	mu     sync.Mutex
	link   *outbound // the live or the last connection
	closed bool
}

// outbound is a connection to the owner of regions, seen by the writer.
type outbound struct {
	node string
	conn *net.UnixConn

	welcome chan struct{} // closed by WELCOME, or by the end of the stream

	mu      sync.Mutex         // also keeps records from overlapping
	windows map[uint64]*Window // asked for, or mapped
	asked   []*Window          // MAPPED answers in this order
	why     error              // nothing new, for this reason; the socket is closed when nothing is mapped
}

// Window is a mapped region of a peer, until Release.
type Window struct {
	// Bytes is the region. The worker at the other side, and other writers, may use it at the same time.
	Bytes []byte

	link   *outbound
	region uint64
	ready  chan struct{} // closed when Bytes or err is set
	err    error
	memory memory
	refs   int  // guarded by link.mu, as going
	going  bool // unmap it at the last Release
}

// errEnded is the end of a connection.
var errEnded = errors.New("the plugin there has ended, or dismissed this one")

// Acquire maps a region of the peer, if it is not mapped yet, and keeps it mapped until Release. The
// error is ctx's cause, or carries the cause to report (sdk.Error).
func (r *Remote) Acquire(ctx context.Context, region uint64) (*Window, error) {
	o, err := r.connected(ctx)
	if err != nil {
		return nil, err
	}
	if err := r.await(ctx, o.welcome, "no welcome"); err != nil {
		return nil, err
	}
	w, err := o.ask(region)
	if err != nil {
		return nil, err
	}
	if err = r.await(ctx, w.ready, "no answer to MAP"); err == nil {
		err = w.err
	}
	if err != nil {
		w.Release()
		return nil, err
	}
	return w, nil
}

// await waits for the owner's answer, at most answerBound.
func (r *Remote) await(ctx context.Context, answered <-chan struct{}, missing string) error {
	select {
	case <-answered:
		return nil
	default:
	}
	timeout := time.NewTimer(answerBound)
	defer timeout.Stop()
	select {
	case <-answered:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-timeout.C:
		return failure(contract.Cause_CAUSE_PEER_UNREACHABLE, "engine %s: %s within %v", r.node, missing, answerBound)
	}
}

// Write copies src to offset off of a region of the peer. When it returns, nothing of it can land any
// more, and after a nil error every byte is visible to the worker there.
func (r *Remote) Write(ctx context.Context, region, off uint64, src []byte) error {
	w, err := r.Acquire(ctx, region)
	if err != nil {
		return err
	}
	defer w.Release()
	if size := uint64(len(w.Bytes)); off > size || uint64(len(src)) > size-off {
		return failure(contract.Cause_CAUSE_BOUNDS, "[%d,+%d) leaves region %d of engine %s, which has %d bytes", off, len(src), region, r.node, size)
	}
	copy(w.Bytes[off:], src)
	return nil
}

// Close lets go of the peer's memory. What is acquired stays mapped until its Release.
func (r *Remote) Close() {
	r.share.mu.Lock()
	delete(r.share.remotes, r)
	r.share.mu.Unlock()
	r.mu.Lock()
	r.closed = true
	link := r.link
	r.mu.Unlock()
	if link != nil {
		link.end(&sdk.Error{Cause: contract.Cause_CAUSE_SHUTDOWN, Err: errors.New("the peer was removed")})
	}
}

// connected returns the live connection, making one if there is none.
func (r *Remote) connected(ctx context.Context) (*outbound, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, errClosed
	}
	if r.link != nil && r.link.live() {
		return r.link, nil
	}
	ctx, cancel := context.WithTimeout(ctx, dialBound)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "unixpacket", r.path)
	if err != nil {
		return nil, failure(contract.Cause_CAUSE_PEER_UNREACHABLE, "engine %s: %w; its plugin has ended, or the two engines do not see the same files", r.node, err)
	}
	c := conn.(*net.UnixConn)
	_, err = ofThisUser(c)
	if err == nil {
		err = send(c, r.hello.encode())
	}
	if err != nil {
		c.Close()
		return nil, failure(contract.Cause_CAUSE_PEER_UNREACHABLE, "engine %s: %w", r.node, err)
	}
	o := &outbound{node: r.node, conn: c, welcome: make(chan struct{}), windows: map[uint64]*Window{}}
	if !r.share.spawn(o.read) {
		c.Close()
		return nil, errClosed
	}
	r.link = o
	return o, nil
}

func (o *outbound) live() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.why == nil
}

// ask returns the window of a region with a reference taken; it may not be ready yet.
func (o *outbound) ask(region uint64) (*Window, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.why != nil {
		return nil, o.why
	}
	if w := o.windows[region]; w != nil {
		if w.going {
			return nil, failure(contract.Cause_CAUSE_REFUSED, "region %d of engine %s is being withdrawn", region, o.node)
		}
		w.refs++
		return w, nil
	}
	if err := send(o.conn, record{kind: kindMap, region: region}.encode()); err != nil {
		if errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) {
			err = errEnded
		}
		o.endLocked(err)
		return nil, o.why
	}
	w := &Window{link: o, region: region, ready: make(chan struct{}), refs: 1, memory: memory{fd: -1, lease: -1}}
	o.windows[region] = w
	o.asked = append(o.asked, w)
	return w, nil
}

// Release ends the use of Bytes. Once for each Acquire.
func (w *Window) Release() {
	w.link.mu.Lock()
	defer w.link.mu.Unlock()
	w.refs--
	w.link.drop(w)
}

// drop unmaps a window that is going and that nobody uses, and says so. o.mu is held.
func (o *outbound) drop(w *Window) {
	if !w.going || w.refs != 0 || o.windows[w.region] != w {
		return
	}
	delete(o.windows, w.region)
	w.Bytes = nil
	w.memory.close()
	if o.why == nil {
		o.sayUnmapped(w.region)
	} else if len(o.windows) == 0 {
		o.conn.Close()
	}
}

func (o *outbound) sayUnmapped(region uint64) {
	if err := send(o.conn, record{kind: kindUnmapped, region: region}.encode()); err != nil {
		o.endLocked(fmt.Errorf("UNMAPPED: %w", err))
	}
}

// read runs until the end of the stream.
func (o *outbound) read() {
	b := make([]byte, recordSize+1)
	for {
		n, fds, err := receive(o.conn, b)
		o.mu.Lock()
		if err == nil {
			err = o.take(b[:n], fds)
		} else if errors.Is(err, io.EOF) {
			err = errEnded
		}
		if err != nil {
			o.endLocked(err)
			o.mu.Unlock()
			return
		}
		o.mu.Unlock()
	}
}

// take handles one record and owns its descriptors. o.mu is held.
func (o *outbound) take(b []byte, fds []int) error {
	r, err := decodeRecord(b)
	if err == nil && r.kind == kindMapped && o.why == nil {
		return o.answered(r, fds)
	}
	closeAll(fds)
	switch {
	case err != nil:
		return err
	case o.why != nil: // it crossed the end
	case r.kind == kindWelcome:
		return o.welcomed(r.code)
	case r.kind == kindWithdraw:
		if w := o.windows[r.region]; w != nil && w.Bytes != nil {
			w.going = true
			o.drop(w)
		}
	default:
		return fmt.Errorf("a record of unknown kind %d", r.kind)
	}
	return nil
}

func (o *outbound) welcomed(code uint32) error {
	select {
	case <-o.welcome:
		return errors.New("a second WELCOME")
	default:
	}
	switch code {
	case codeOK:
		close(o.welcome)
		return nil
	case codeCrowded:
		return &sdk.Error{Cause: contract.Cause_CAUSE_LIMIT, Err: errors.New("too many connections there")}
	default:
		return &sdk.Error{Cause: contract.Cause_CAUSE_REFUSED, Err: fmt.Errorf("this engine is not admitted there as a writer (code %d)", code)}
	}
}

// answered takes a MAPPED. o.mu is held.
func (o *outbound) answered(r record, fds []int) error {
	if len(o.asked) == 0 || o.asked[0].region != r.region {
		closeAll(fds)
		return fmt.Errorf("MAPPED of region %d, which was not asked for", r.region)
	}
	w := o.asked[0]
	o.asked = o.asked[1:]
	delete(o.windows, w.region)
	if r.code != codeOK {
		closeAll(fds)
		w.err = failure(contract.Cause_CAUSE_REFUSED, "engine %s does not share region %d (code %d)", o.node, r.region, r.code)
	} else if m, err := importMemory(r.size, fds); err != nil {
		w.err = failure(contract.Cause_CAUSE_TRANSPORT, "region %d of engine %s: %w", r.region, o.node, err)
		o.sayUnmapped(r.region)
	} else {
		w.memory, w.Bytes = m, m.bytes
		o.windows[w.region] = w
	}
	close(w.ready)
	return nil
}

// end is the end of the connection: nothing new, and what is mapped goes.
func (o *outbound) end(why error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.endLocked(why)
}

func (o *outbound) endLocked(why error) {
	if o.why != nil {
		return
	}
	cause := contract.Cause_CAUSE_TRANSPORT
	if e := (*sdk.Error)(nil); errors.As(why, &e) {
		cause = e.Cause
	}
	o.why = failure(cause, "engine %s: %w", o.node, why)
	select {
	case <-o.welcome:
	default:
		close(o.welcome) // who waits for it finds why
	}
	for _, w := range o.asked {
		w.err = o.why
		delete(o.windows, w.region)
		close(w.ready)
	}
	o.asked = nil
	for _, w := range o.windows {
		w.going = true
		o.drop(w)
	}
	if len(o.windows) == 0 {
		o.conn.Close()
	}
}
