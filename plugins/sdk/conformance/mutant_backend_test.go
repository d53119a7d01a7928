package conformance

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// pieceBytes is how much the reference backend hands over in one step: between two it looks at the op's
// context, and the receiver checks each.
const pieceBytes = 64 << 10

// reference is a sound transfer backend inside one process: the writer hands pieces to the receiver's
// backend, which it finds by the endpoint, and the receiver checks and copies them. It has every feature
// of the contract. A mutant is a reference with one of the hooks set.
type reference struct {
	hooks

	self     sdk.Start
	endpoint string

	// mu is held for reading while a piece is checked and copied; so whoever has held it for writing knows
	// that no copy of before still runs.
	mu      sync.RWMutex
	closed  bool
	regions map[uint64]*sdk.Region
	writers map[writer][]byte // admitted, with their tokens
	fences  map[string][]fence
	grants  map[sdk.Opener][]*sdk.Grant
	revoked map[sdk.Opener]bool
	late    atomic.Uint64

	lingered atomic.Int32
}

// writer is a plugin epoch that may connect.
type writer struct {
	node        string
	incarnation uint64
	epoch       uint32
}

// fence refuses all epochs of a node up to this one.
type fence struct {
	incarnation uint64
	epoch       uint32
}

func (f fence) covers(w writer) bool {
	return w.incarnation < f.incarnation || w.incarnation == f.incarnation && (f.epoch == 0 || w.epoch <= f.epoch)
}

// hooks are the places where a mutant differs. A nil hook is the sound behaviour.
type hooks struct {
	// info changes what the backend says of itself.
	info func(*sdk.Info)
	// transfer replaces move.
	transfer func(b *reference, op *sdk.Op)
	// piece is called with each piece before it is handed over, in order from 0; it may change it, and
	// says whether it is handed over at all.
	piece func(b *reference, op *sdk.Op, i int, c *sdk.Copy) bool
	// pages puts the pieces in place of op.Pieces.
	pieces func(op *sdk.Op) []sdk.Copy
	// cancelled ends an op whose context is done; left are the pieces not handed over.
	cancelled func(b *reference, op *sdk.Op, left []sdk.Copy)
	// moved ends an op whose last piece was handed over; last is that piece.
	moved func(b *reference, op *sdk.Op, last sdk.Copy)
	// admits replaces the check of a writer and its token, covers that of a grant. Both are called with the
	// receiver's lock held.
	admits func(b *reference, w writer, token []byte) bool
	// anyWriter leaves the writers that a grant names unread.
	anyWriter bool
	covers    func(b *reference, o sdk.Opener, region, off, n uint64) error
	// revoke, fence, addRegion run in place of the sound method.
	revoke    func(b *reference, g *sdk.Grant) bool
	fence     func(b *reference, node string, f fence) contract.FenceResult
	addRegion func(b *reference, r *sdk.Region) error
	unaccept  func(b *reference, p *sdk.Peer)
	closing   func(b *reference)
}

// endpoints are the reference backends that run, by endpoint.
var endpoints struct {
	sync.RWMutex
	next int
	all  map[string]*reference
}

var (
	_ sdk.Granter       = (*reference)(nil)
	_ sdk.Fencer        = (*reference)(nil)
	_ sdk.StatsReporter = (*reference)(nil)
)

func newReference(h hooks) *reference {
	return &reference{
		hooks: h, regions: map[uint64]*sdk.Region{}, writers: map[writer][]byte{}, fences: map[string][]fence{},
		grants: map[sdk.Opener][]*sdk.Grant{}, revoked: map[sdk.Opener]bool{},
	}
}

func (b *reference) Info() sdk.Info {
	info := sdk.Info{
		Name: "reference", Version: "1",
		Features: []string{
			sdk.FeatureReceiverChecked, sdk.FeatureByteProgress, sdk.FeatureFencePeer,
			sdk.FeatureStrided, sdk.FeatureLayerRange, sdk.FeatureRepage,
		},
		OpConcurrency: 16,
	}
	if b.info != nil {
		b.info(&info)
	}
	return info
}

func (b *reference) Start(_ context.Context, s sdk.Start) ([]byte, error) {
	b.self = s
	endpoints.Lock()
	defer endpoints.Unlock()
	if endpoints.all == nil {
		endpoints.all = map[string]*reference{}
	}
	endpoints.next++
	b.endpoint = fmt.Sprint("reference-", endpoints.next)
	endpoints.all[b.endpoint] = b
	return []byte(b.endpoint), nil
}

func (b *reference) Close() error {
	endpoints.Lock()
	delete(endpoints.all, b.endpoint)
	endpoints.Unlock()
	b.mu.Lock()
	b.closed = true
	b.mu.Unlock()
	if b.closing != nil {
		b.closing(b)
	}
	return nil
}

func (b *reference) AddRegion(r *sdk.Region) error {
	if b.addRegion != nil {
		if err := b.addRegion(b, r); err != nil {
			return err
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.regions[r.ID] = r
	return nil
}

func (b *reference) RemoveRegion(r *sdk.Region) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.regions, r.ID)
}

func (b *reference) AddPeer(p *sdk.Peer) (contract.Lane, error) {
	to, err := b.dial(p)
	if err != nil {
		return 0, err
	}
	to.mu.RLock()
	defer to.mu.RUnlock()
	return contract.Lane_LANE_SHM, to.admit(b.writer(), p.Token)
}

func (b *reference) RemovePeer(*sdk.Peer) {}

func (b *reference) writer() writer { return writer{b.self.Node, b.self.Incarnation, b.self.Epoch} }

func (b *reference) dial(p *sdk.Peer) (*reference, error) {
	endpoints.RLock()
	defer endpoints.RUnlock()
	to := endpoints.all[string(p.Endpoint)]
	if to == nil {
		return nil, &sdk.Error{Cause: contract.Cause_CAUSE_PEER_UNREACHABLE, Err: fmt.Errorf("nobody is at %q", p.Endpoint)}
	}
	return to, nil
}

func (b *reference) Accept(p *sdk.Peer) error {
	w := writer{p.Node, p.Incarnation, p.Epoch}
	b.mu.Lock()
	defer b.mu.Unlock()
	if slices.ContainsFunc(b.fences[p.Node], func(f fence) bool { return f.covers(w) }) {
		return &sdk.Error{Cause: contract.Cause_CAUSE_REFUSED, Err: fmt.Errorf("%v is fenced", w)}
	}
	b.writers[w] = p.Token
	return nil
}

func (b *reference) Unaccept(p *sdk.Peer) {
	if b.unaccept != nil {
		b.unaccept(b, p)
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	w := writer{p.Node, p.Incarnation, p.Epoch}
	if string(b.writers[w]) == string(p.Token) { // it may have been admitted anew, under another handle
		delete(b.writers, w)
	}
}

func (b *reference) Grant(g *sdk.Grant) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.grants[g.Destination] = append(b.grants[g.Destination], g)
	return nil
}

func (b *reference) Revoke(g *sdk.Grant) bool {
	if b.revoke != nil {
		return b.revoke(b, g)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.grants, g.Destination)
	b.revoked[g.Destination] = true
	return true
}

func (b *reference) FencePeer(_ context.Context, node string, incarnation uint64, epoch uint32) contract.FenceResult {
	f := fence{incarnation, epoch}
	if b.fence != nil {
		return b.hooks.fence(b, node, f)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.fences[node] = append(b.fences[node], f)
	for w := range b.writers {
		if w.node == node && f.covers(w) {
			delete(b.writers, w)
		}
	}
	return contract.FenceResult_FENCE_RESULT_QUIET
}

func (b *reference) Counters() map[string]uint64 {
	return map[string]uint64{sdk.CounterLateRefused: b.late.Load()}
}

// admit is called with b.mu held.
func (b *reference) admit(w writer, token []byte) error {
	if b.admits != nil && b.admits(b, w, token) {
		return nil
	}
	if want, ok := b.writers[w]; b.closed || !ok || string(want) != string(token) {
		return &sdk.Error{Cause: contract.Cause_CAUSE_PEER_UNREACHABLE, Err: fmt.Errorf("writer %v is not admitted, or has another token", w)}
	}
	return nil
}

// granted is called with b.mu held.
func (b *reference) granted(w writer, o sdk.Opener, region, off, n uint64) error {
	named := func(g *sdk.Grant) bool { return b.anyWriter || g.Admits(w.node) }
	if known := len(b.grants[o]) > 0; b.covers != nil && (!known || slices.ContainsFunc(b.grants[o], named)) {
		return b.covers(b, o, region, off, n)
	}
	var grants []*sdk.Grant
	for _, g := range b.grants[o] {
		if named(g) {
			grants = append(grants, g)
		}
	}
	if len(grants) == 0 {
		b.late.Add(1)
		return &sdk.Error{Cause: contract.Cause_CAUSE_REFUSED, Err: fmt.Errorf("opener %v has no grant for %v (revoked: %v)", o, w, b.revoked[o])}
	}
	var all sdk.Grant // two grants of one opener add up
	for _, g := range grants {
		all.Parts = append(all.Parts, g.Parts...)
	}
	if !all.Covers(region, off, n) {
		return &sdk.Error{Cause: contract.Cause_CAUSE_BOUNDS, Err: fmt.Errorf("bytes %d to %d of region %d are not granted", off, off+n, region)}
	}
	return nil
}

// put is what the receiver does with one piece: check, then copy.
func (b *reference) put(w writer, token []byte, o sdk.Opener, region, off uint64, data []byte) error {
	b.mu.RLock()
	defer b.mu.RUnlock()
	if err := b.admit(w, token); err != nil {
		return err
	}
	if err := b.granted(w, o, region, off, uint64(len(data))); err != nil {
		return err
	}
	r := b.regions[region]
	if r == nil || off > r.Size || uint64(len(data)) > r.Size-off {
		return &sdk.Error{Cause: contract.Cause_CAUSE_BOUNDS, Err: fmt.Errorf("bytes %d to %d of region %d are not there", off, off+uint64(len(data)), region)}
	}
	copy(r.Bytes[off:], data)
	return nil
}

func (b *reference) Transfer(op *sdk.Op) {
	if b.transfer != nil {
		b.transfer(b, op)
		return
	}
	b.move(op)
}

// move does an op piece by piece.
func (b *reference) move(op *sdk.Op) {
	pieces := slices.Collect(op.Pieces(pieceBytes))
	if b.pieces != nil {
		pieces = b.pieces(op)
	}
	to, err := b.dial(op.Peer())
	if err != nil {
		op.FailErr(true, err)
		return
	}
	var moved uint64
	for i, c := range pieces {
		if op.Context().Err() != nil {
			if b.cancelled != nil {
				b.cancelled(b, op, pieces[i:])
				return
			}
			op.FailErr(true, context.Cause(op.Context()))
			return
		}
		if b.piece == nil || b.piece(b, op, i, &c) {
			if err := b.hand(to, op, c); err != nil {
				op.FailErr(true, err)
				return
			}
		}
		if moved += c.Len; i < len(pieces)-1 {
			op.Progress(moved)
		}
	}
	if b.moved != nil && len(pieces) > 0 {
		b.moved(b, op, pieces[len(pieces)-1])
		return
	}
	op.Done(contract.Lane_LANE_SHM)
}

// hand gives one piece to the receiver.
func (b *reference) hand(to *reference, op *sdk.Op, c sdk.Copy) error {
	return to.put(b.writer(), op.Peer().Token, op.Generation().Destination, c.DstRegion, c.DstOff, c.Src.Bytes[c.SrcOff:][:c.Len])
}

// finish hands over what is left of an op that was cancelled, and ends it as done.
func (b *reference) finish(op *sdk.Op, left []sdk.Copy) {
	to, err := b.dial(op.Peer())
	for _, c := range left {
		if err == nil {
			err = b.hand(to, op, c)
		}
	}
	if err != nil {
		op.FailErr(true, err)
		return
	}
	op.Done(contract.Lane_LANE_SHM)
}

// poke is a write that no check sees, as of a network card that was told an address long ago. It goes
// through a mapping of its own, so that it can come when the region is gone. The caller calls it once.
func (b *reference) poke(p *sdk.Peer, c sdk.Copy) (write func()) {
	to, err := b.dial(p)
	if err != nil {
		return func() {}
	}
	to.mu.RLock()
	defer to.mu.RUnlock()
	r := to.regions[c.DstRegion]
	if r == nil || c.DstOff > r.Size || c.Len > r.Size-c.DstOff {
		return func() {}
	}
	mem, err := unix.Mmap(r.FD, 0, int(r.Size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return func() {}
	}
	data := slices.Clone(c.Src.Bytes[c.SrcOff:][:c.Len])
	return func() {
		copy(mem[c.DstOff:], data)
		_ = unix.Munmap(mem)
	}
}

// holds tells whether a destination word of the op has the value, in aligned words of 4 bytes.
func (b *reference) holds(op *sdk.Op, value uint32) bool {
	to, err := b.dial(op.Peer())
	if err != nil {
		return false
	}
	to.mu.RLock()
	defer to.mu.RUnlock()
	for c := range op.Copies() {
		r := to.regions[c.DstRegion]
		if r == nil {
			continue
		}
		for off := (c.DstOff + 3) &^ 3; off+4 <= c.DstOff+c.Len; off += 4 {
			if binary.LittleEndian.Uint32(r.Bytes[off:]) == value {
				return true
			}
		}
	}
	return false
}

var errNotGranted = errors.New("not granted")

func isCanary(word []byte) bool { return binary.LittleEndian.Uint64(word) == ^uint64(canary) }

func putCanary(word []byte) { binary.LittleEndian.PutUint64(word, ^uint64(canary)) }

// acceptMemory turns RegionFailed of the cause into RegionReady.
func acceptMemory(m *mangler, cause contract.Cause) {
	m.out = func(_ bool, e *contract.PluginEvent) []*contract.PluginEvent {
		if f := e.GetRegionFailed(); f != nil && f.Cause == cause {
			return one(regionReady(f.Region))
		}
		return one(e)
	}
}
