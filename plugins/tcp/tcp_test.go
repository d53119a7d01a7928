package tcp

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
	"github.com/terminus-kv/terminus/plugins/sdk/sdktest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type options map[string]any

// lanes are the two ways that bytes go, as options of both backends.
var lanes = []struct {
	name string
	opts options
	lane contract.Lane
}{
	{"shm", options{}, contract.Lane_LANE_SHM},
	{"tcp", options{"shm": false}, contract.Lane_LANE_TCP},
}

// pair is a writer and a receiver with one pool each.
type pair struct {
	t        testing.TB
	a, b     *sdktest.Host
	ab, bb   *Backend
	src, dst *sdktest.Region
	srcPool  uint64
	dstPool  uint64
	peer     *sdktest.Peer
	plan     uint64
}

func newPair(t testing.TB, opts options, pages uint32, pageBytes uint64) *pair {
	t.Helper()
	p := &pair{t: t, ab: New(), bb: New()}
	p.a = sdktest.New(t, p.ab, sdktest.WithConfig(opts))
	p.b = sdktest.New(t, p.bb, sdktest.WithConfig(opts))
	size := int(uint64(pages)*pageBytes) + 64
	p.src, p.dst = p.a.AddRegion(size), p.b.AddRegion(size)
	p.srcPool = p.a.AddPool(pages, p.src.Tensor(0, pageBytes))
	p.dstPool = p.b.AddPool(pages, p.dst.Tensor(0, pageBytes))
	p.peer = sdktest.Connect(p.a, p.b)
	p.plan = p.peer.IdentityPlan(p.srcPool, p.dstPool)
	fill(p.src.Bytes, 1)
	return p
}

// fill writes content that differs everywhere.
func fill(b []byte, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 7))
	for len(b) >= 8 {
		binary.LittleEndian.PutUint64(b, r.Uint64())
		b = b[8:]
	}
}

func (p *pair) submit(src, dst []sdk.Run) *sdktest.Pending {
	return p.peer.Submit(sdktest.Op{Plan: p.plan, Src: src, Dst: dst})
}

func (p *pair) grantAll(pages uint32) uint64 {
	return p.b.Grant(sdktest.Destination, p.dstPool, sdktest.Pages(0, pages)...)
}

// idle fails the test when the writer still counts something.
func (p *pair) idle() {
	p.t.Helper()
	p.ab.mu.Lock()
	defer p.ab.mu.Unlock()
	for q := range p.ab.peers {
		q.mu.Lock()
		if q.ops != 0 || len(q.pending) != 0 || len(q.lost) != 0 {
			p.t.Errorf("ops %d, pending %d, lost %d at idle", q.ops, len(q.pending), len(q.lost))
		}
		for _, c := range q.slots {
			if c != nil && (c.load != 0 || c.inflight != 0 || len(c.ops) != 0 || len(c.ready) != 0 || len(c.cancels) != 0) {
				p.t.Errorf("a connection has %d ops and %d bytes in flight at idle", c.load, c.inflight)
			}
		}
		q.mu.Unlock()
	}
}

func wantDone(t testing.TB, end sdktest.End, lane contract.Lane) {
	t.Helper()
	if end.Kind != "done" || !end.Quiet || end.Lane != lane {
		t.Fatalf("end %+v, want done on %v", end, lane)
	}
}

func wantFailed(t testing.TB, end sdktest.End, cause contract.Cause) {
	t.Helper()
	if end.Kind != "failed" || end.Cause != cause {
		t.Fatalf("end %+v, want failed with %v", end, cause)
	}
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(sdktest.Wait); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", sdktest.Wait, what)
		}
	}
}

func TestSizes(t *testing.T) {
	for _, l := range lanes {
		for _, size := range []uint64{1, 7, 4096, 65535, 65536, 65537, 1 << 20, 8<<20 + 3} {
			t.Run(fmt.Sprintf("%s/%d", l.name, size), func(t *testing.T) {
				p := newPair(t, l.opts, 3, size)
				p.grantAll(3)
				end := p.submit(sdktest.Pages(0, 2), sdktest.Pages(1, 2)).End()
				wantDone(t, end, l.lane)
				if end.Bytes != 2*size || !bytes.Equal(p.dst.Bytes[size:3*size], p.src.Bytes[:2*size]) {
					t.Fatal("the bytes differ")
				}
				if !bytes.Equal(p.dst.Bytes[:size], make([]byte, size)) {
					t.Fatal("page 0 was written")
				}
				p.a.CheckOrder()
			})
		}
	}
}

// TestTinyRuns moves thousands of single pages in random order, several ops at once.
func TestTinyRuns(t *testing.T) {
	const pages, size = 8192, 96
	for _, l := range lanes {
		t.Run(l.name, func(t *testing.T) {
			p := newPair(t, l.opts, pages, size)
			p.grantAll(pages)
			from, to := rand.Perm(pages), rand.Perm(pages)
			var ops []*sdktest.Pending
			for lo := 0; lo < pages; lo += pages / 4 {
				var src, dst []sdk.Run
				for i := lo; i < lo+pages/4; i++ {
					src = append(src, sdktest.Pages(uint32(from[i]), 1)...)
					dst = append(dst, sdktest.Pages(uint32(to[i]), 1)...)
				}
				ops = append(ops, p.submit(src, dst))
			}
			for _, op := range ops {
				wantDone(t, op.End(), l.lane)
			}
			for i := range pages {
				s, d := p.src.Bytes[from[i]*size:][:size], p.dst.Bytes[to[i]*size:][:size]
				if !bytes.Equal(s, d) {
					t.Fatalf("page %d differs", i)
				}
			}
			p.a.CheckOrder()
		})
	}
}

// TestStridedLayers moves half of each page of one layer out of two, between pools of different shape.
func TestStridedLayers(t *testing.T) {
	const pages = 16
	for _, l := range lanes {
		t.Run(l.name, func(t *testing.T) {
			a, b := sdktest.New(t, New(), sdktest.WithConfig(l.opts)), sdktest.New(t, New(), sdktest.WithConfig(l.opts))
			src, dst := a.AddRegion(1<<20), b.AddRegion(1<<20)
			fill(src.Bytes, 3)
			layer := func(r *sdktest.Region, off, stride, size uint64, n uint32) sdk.Tensor {
				return sdk.Tensor{RegionID: r.ID, Offset: off, PageStride: stride, PageBytes: size, Layer: n}
			}
			// Source pages of 1024 bytes, the layers interleaved; destination pages of 512 bytes.
			srcPool := a.AddPool(pages, layer(src, 0, 2048, 1024, 0), layer(src, 1024, 2048, 1024, 1))
			dstPool := b.AddPool(pages, layer(dst, 64, 512, 512, 0), layer(dst, 64+512*pages, 512, 512, 1))
			peer := sdktest.Connect(a, b)
			plan := peer.Plan(srcPool, dstPool,
				&contract.Slice{SrcTensor: 0, DstTensor: 0, SrcOff: 32, Len: 32, SrcStride: 64, DstStride: 32, Count: 15},
				&contract.Slice{SrcTensor: 1, DstTensor: 1, SrcOff: 32, Len: 32, SrcStride: 64, DstStride: 32, Count: 15})
			b.Grant(sdktest.Destination, dstPool, sdktest.Pages(0, pages)...)
			runs := []sdk.Run{{Start: 1, Count: 5, Stride: 3}}
			end := peer.Submit(sdktest.Op{Plan: plan, Src: runs, Dst: sdktest.Pages(4, 5), LayerFrom: 1, LayerTo: 2}).End()
			wantDone(t, end, l.lane)
			want := make([]byte, len(dst.Bytes))
			for k := range 5 {
				for i := range 15 {
					s := src.Bytes[1024+(1+3*k)*2048+32+64*i:][:32]
					copy(want[64+512*pages+(4+k)*512+32*i:], s)
				}
			}
			if !bytes.Equal(want, dst.Bytes) {
				t.Fatal("the bytes differ")
			}
		})
	}
}

func TestRefusals(t *testing.T) {
	const pages, size = 8, 4096
	for _, l := range lanes {
		t.Run(l.name, func(t *testing.T) {
			p := newPair(t, l.opts, pages, size)
			fresh := func() { clear(p.dst.Bytes) }
			untouched := func(what string, from, to int) {
				t.Helper()
				if !bytes.Equal(p.dst.Bytes[from*size:to*size], make([]byte, (to-from)*size)) {
					t.Fatalf("%s: pages [%d, %d) were written", what, from, to)
				}
			}
			// No grant at all.
			end := p.submit(sdktest.Pages(0, 1), sdktest.Pages(0, 1)).End()
			wantFailed(t, end, contract.Cause_CAUSE_REFUSED)
			if !end.Quiet {
				t.Fatal("a refused op is quiet")
			}
			untouched("no grant", 0, pages)

			// Pages that are not granted, alone and behind granted ones.
			g := p.b.Grant(sdktest.Destination, p.dstPool, sdktest.Pages(0, 2)...)
			wantFailed(t, p.submit(sdktest.Pages(0, 1), sdktest.Pages(2, 1)).End(), contract.Cause_CAUSE_BOUNDS)
			wantFailed(t, p.submit(sdktest.Pages(0, 4), sdktest.Pages(0, 4)).End(), contract.Cause_CAUSE_BOUNDS)
			untouched("outside the grant", 2, pages)
			wantDone(t, p.submit(sdktest.Pages(0, 2), sdktest.Pages(0, 2)).End(), l.lane)

			// Another opener has no part in the grant.
			fresh()
			other := sdktest.Op{Plan: p.plan, Src: sdktest.Pages(0, 1), Dst: sdktest.Pages(0, 1), Destination: sdk.Opener{Incarnation: 2, Sequence: 3}}
			wantFailed(t, p.peer.Submit(other).End(), contract.Cause_CAUSE_REFUSED)
			untouched("other opener", 0, pages)

			// Revoked: for good, also against a new grant.
			if !p.b.Revoke(g, sdktest.Destination) {
				t.Fatal("Revoke is not quiet")
			}
			wantFailed(t, p.submit(sdktest.Pages(0, 1), sdktest.Pages(0, 1)).End(), contract.Cause_CAUSE_REFUSED)
			if err := p.bb.Grant(&sdk.Grant{ID: 99, Destination: sdktest.Destination}); err == nil {
				t.Fatal("a revoked opener was granted again")
			}
			untouched("revoked", 0, pages)
			if n := p.b.Stats().LateRefused; n != 3 {
				t.Fatalf("late_refused %d, want 3", n)
			}
			p.a.CheckOrder()
		})
	}
}

// TestRevokeMidTransfer revokes while ops run and checks that the pages never change afterwards.
func TestRevokeMidTransfer(t *testing.T) {
	const pages, size = 256, 64 << 10
	for _, l := range lanes {
		t.Run(l.name, func(t *testing.T) {
			p := newPair(t, l.opts, pages, size)
			canary := bytes.Repeat([]byte{0xA5}, len(p.dst.Bytes))
			for round := range 6 {
				d := sdk.Opener{Incarnation: 2, Sequence: uint64(100 + round)}
				g := p.b.Grant(d, p.dstPool, sdktest.Pages(0, pages)...)
				clear(p.dst.Bytes)
				var ops []*sdktest.Pending
				for range 4 {
					ops = append(ops, p.peer.Submit(sdktest.Op{Plan: p.plan, Src: sdktest.Pages(0, pages), Dst: sdktest.Pages(0, pages), Destination: d}))
				}
				eventually(t, "first bytes", func() bool {
					return p.bb.count.bytesIn.Load() > uint64(round)<<20 && p.dst.Bytes[0]|p.dst.Bytes[1] != 0
				})
				if !p.b.Revoke(g, d) {
					t.Fatal("Revoke is not quiet")
				}
				copy(p.dst.Bytes, canary)
				for _, op := range ops {
					if end := op.End(); end.Kind != "done" {
						wantFailed(t, end, contract.Cause_CAUSE_REFUSED)
					}
				}
				if !bytes.Equal(p.dst.Bytes, canary) {
					t.Fatalf("round %d: a page was written after Revoke", round)
				}
			}
			p.a.CheckOrder()
		})
	}
}

// TestAbortMidTransfer aborts big ops; afterwards no page of them changes.
func TestAbortMidTransfer(t *testing.T) {
	const pages, size = 256, 64 << 10
	for _, l := range lanes {
		t.Run(l.name, func(t *testing.T) {
			p := newPair(t, l.opts, pages, size)
			p.grantAll(pages)
			aborted := 0
			for range 8 {
				op := p.submit(sdktest.Pages(0, pages), sdktest.Pages(0, pages))
				op.Abort()
				end := op.End()
				if !end.Quiet {
					t.Fatalf("end %+v is not quiet", end)
				}
				if end.Kind == "aborted" {
					aborted++
				}
				clear(p.dst.Bytes[:size*pages])
				wantDone(t, p.submit(sdktest.Pages(0, 1), sdktest.Pages(0, 1)).End(), l.lane)
				if !bytes.Equal(p.dst.Bytes[size:pages*size], make([]byte, (pages-1)*size)) {
					t.Fatal("a page changed after the abort")
				}
			}
			if aborted == 0 {
				t.Error("no abort came in time to be one")
			}
			p.a.CheckOrder()
		})
	}
}

// TestManyOps runs many ops of mixed size at once: all end as done and nothing is left.
func TestManyOps(t *testing.T) {
	const pages, size = 2048, 8 << 10
	for _, l := range lanes {
		t.Run(l.name, func(t *testing.T) {
			p := newPair(t, l.opts, pages, size)
			p.grantAll(pages)
			var ops []*sdktest.Pending
			for i := range 256 {
				n := uint32(1)
				if i%32 == 0 {
					n = 256
				}
				at := uint32(i) % (pages - n + 1)
				ops = append(ops, p.submit(sdktest.Pages(at, n), sdktest.Pages(at, n)))
			}
			for _, op := range ops {
				wantDone(t, op.End(), l.lane)
			}
			if !bytes.Equal(p.dst.Bytes[:size], p.src.Bytes[:size]) {
				t.Fatal("the bytes differ")
			}
			if n := p.a.Drain(5 * time.Second); n != 0 {
				t.Fatalf("%d ops left at drain", n)
			}
			p.idle()
			p.a.CheckOrder()
		})
	}
}

// TestSmallestWindow: whatever part of an op is left unacknowledged, the writer never waits for it in vain.
func TestSmallestWindow(t *testing.T) {
	const pages, size = 400, 3000
	for _, l := range lanes {
		for _, window := range []int{64 << 10, 96 << 10, 128 << 10} {
			t.Run(fmt.Sprintf("%s/%d", l.name, window), func(t *testing.T) {
				opts := options{"connections": 1, "window": window}
				for k, v := range l.opts {
					opts[k] = v
				}
				p := newPair(t, opts, pages, size)
				p.grantAll(pages)
				var ops []*sdktest.Pending
				for i := range 48 {
					n := uint32(1 + i*37%pages)
					ops = append(ops, p.submit(sdktest.Pages(0, n), sdktest.Pages(0, n)))
				}
				for _, op := range ops {
					wantDone(t, op.End(), l.lane)
				}
				p.idle()
			})
		}
	}
}

// TestCopyPage holds the copy against copy() for every alignment and around every size that it treats
// differently; not a byte beside the target changes.
func TestCopyPage(t *testing.T) {
	const room = 80
	src := make([]byte, 70000+2*room)
	fill(src, 9)
	for _, size := range []int{1, 63, streamFrom - 1, streamFrom, streamFrom + 1, streamFrom + 63, streamFrom + 64, sliceBytes, sliceBytes + 1} {
		for off := range room {
			dst := make([]byte, size+2*room)
			want := make([]byte, len(dst))
			copy(want[off:off+size], src[room-off:])
			copyPage(dst[off:off+size], src[room-off:][:size])
			if !bytes.Equal(dst, want) {
				t.Fatalf("size %d at offset %d differs", size, off)
			}
		}
	}
}

// TestSmallOverLarge: a small op does not wait for a big one that came before.
func TestSmallOverLarge(t *testing.T) {
	const pages, size = 512, 128 << 10
	for _, l := range lanes {
		t.Run(l.name, func(t *testing.T) {
			opts := options{"connections": 1, "window": 1 << 20}
			for k, v := range l.opts {
				opts[k] = v
			}
			p := newPair(t, opts, pages, size)
			p.grantAll(pages)
			big := p.submit(sdktest.Pages(0, pages), sdktest.Pages(0, pages))
			small := p.submit(sdktest.Pages(3, 1), sdktest.Pages(3, 1))
			wantDone(t, big.End(), l.lane)
			wantDone(t, small.End(), l.lane)
			for _, e := range p.a.Events() {
				if _, ok := sdktest.EndOf(e, big.ID); ok {
					t.Fatal("the small op ended after the big one")
				}
				if _, ok := sdktest.EndOf(e, small.ID); ok {
					break
				}
			}
		})
	}
}

func TestLaneDemands(t *testing.T) {
	start := func(opts options, machine string) *sdktest.Host {
		return sdktest.New(t, New(), sdktest.WithConfig(opts), sdktest.WithHostID(machine))
	}
	near, far, plain := start(options{}, "m1"), start(options{}, "m2"), start(options{"shm": false}, "m1")
	for _, c := range []struct {
		name   string
		to     *sdktest.Host
		demand contract.Lane
		want   contract.Lane // 0: refused
	}{
		{"rdma", near, contract.Lane_LANE_RDMA, 0},
		{"same host", start(options{}, "m1"), contract.Lane_LANE_SHM, contract.Lane_LANE_SHM},
		{"other host", far, contract.Lane_LANE_SHM, 0},
		{"shm off there", plain, contract.Lane_LANE_CMA, 0},
		{"other host, tcp", start(options{}, "m2"), contract.Lane_LANE_TCP, contract.Lane_LANE_TCP},
		{"any", start(options{}, "m1"), contract.Lane_LANE_ANY, contract.Lane_LANE_ANY},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, err := sdktest.Dial(near, c.to, c.demand)
			switch {
			case c.want == 0 && err == nil:
				t.Fatalf("lane %v was promised", p.Lane)
			case c.want == 0:
				t.Log(err)
			case err != nil:
				t.Fatal(err)
			case p.Lane != c.want:
				t.Fatalf("lane %v, want %v", p.Lane, c.want)
			}
		})
	}
}

// TestRegionComesAndGoes: removal takes the region back from the receiver, and its pages are refused.
func TestRegionComesAndGoes(t *testing.T) {
	p := newPair(t, options{}, 4, 4096)
	p.grantAll(4)
	wantDone(t, p.submit(sdktest.Pages(0, 4), sdktest.Pages(0, 4)).End(), contract.Lane_LANE_SHM)
	sources := func() int {
		r := p.bb.recv
		r.mu.Lock()
		defer r.mu.Unlock()
		n := 0
		for _, w := range r.writers {
			n += len(w.sources)
		}
		return n
	}
	if n := sources(); n != 1 {
		t.Fatalf("%d source regions are mapped, want 1", n)
	}
	p.a.RemoveRegion(p.src)
	eventually(t, "the receiver unmaps the source", func() bool { return sources() == 0 })
	p.b.RemoveRegion(p.dst)
	if p.bb.region(p.dst.ID) != nil {
		t.Fatal("the region is still there")
	}
}
