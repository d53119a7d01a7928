package shm

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
	"github.com/terminus-kv/terminus/plugins/sdk/sdktest"
)

// TestMain is also the program of a writer process, see writerProcess.
func TestMain(m *testing.M) {
	if os.Getenv("SHM_TEST_WRITER") != "" {
		os.Exit(writer(os.Args[1]))
	}
	if path := os.Getenv("SHM_TEST_STRANGER"); path != "" {
		os.Exit(stranger(path))
	}
	goleak.VerifyTestMain(m)
}

// backend is a whole one: what an author writes, in short.
type backend struct {
	*Share
	entered chan struct{} // if not nil, Transfer says here that it holds the region
	release chan struct{} // and waits here
}

func (b *backend) Info() sdk.Info {
	return sdk.Info{Name: "test", Version: "1", Features: []string{sdk.FeatureByteProgress, sdk.FeatureStrided, sdk.FeatureLayerRange}}
}

func (b *backend) Start(_ context.Context, s sdk.Start) (endpoint []byte, err error) {
	b.Share, err = Listen(s)
	return b.Endpoint(), err
}

func (b *backend) Transfer(op *sdk.Op) {
	peer, moved := op.Peer().Data.(*Remote), uint64(0)
	for c := range op.Pieces(4096) {
		if b.entered != nil {
			w, err := peer.Acquire(op.Context(), c.DstRegion)
			if err != nil {
				op.FailErr(true, err)
				return
			}
			b.entered <- struct{}{}
			<-b.release
			w.Release()
		}
		if op.Context().Err() != nil {
			op.Aborted(true)
			return
		}
		if err := peer.Write(op.Context(), c.DstRegion, c.DstOff, c.Src.Bytes[c.SrcOff:][:c.Len]); err != nil {
			op.FailErr(true, err)
			return
		}
		moved += c.Len
		op.Progress(moved)
	}
	op.Done(contract.Lane_LANE_SHM)
}

// pair is a writer with 16 source pages and an owner with 16 destination pages.
type pair struct {
	writer, owner   *sdktest.Host
	writerB, ownerB *backend
	src, dst        *sdktest.Region
	peer            *sdktest.Peer
	plan            uint64
}

const page = 4096

func newPair(t *testing.T) *pair {
	p := &pair{writerB: &backend{}, ownerB: &backend{}}
	p.writer, p.owner = sdktest.New(t, p.writerB), sdktest.New(t, p.ownerB)
	p.src, p.dst = p.writer.AddRegion(17*page), p.owner.AddRegion(17*page)
	for i := range p.src.Bytes {
		p.src.Bytes[i], p.dst.Bytes[i] = byte(i*7+i/page), 0xEE
	}
	p.peer = sdktest.Connect(p.writer, p.owner)
	p.plan = p.peer.IdentityPlan(p.writer.AddPool(16, p.src.Tensor(0, page)), p.owner.AddPool(16, p.dst.Tensor(0, page)))
	return p
}

// write submits pages 0 to n-1.
func (p *pair) write(n uint32) *sdktest.Pending {
	return p.peer.Submit(sdktest.Op{Plan: p.plan, Src: sdktest.Pages(0, n), Dst: sdktest.Pages(0, n)})
}

// share listens in a directory of its own, as engine `incarnation`.
func share(t *testing.T, incarnation uint64) *Share {
	t.Helper()
	dir, err := os.MkdirTemp("", "t")
	if err != nil {
		t.Fatal(err)
	}
	s, err := Listen(sdk.Start{Incarnation: incarnation, Epoch: 1, RuntimeDir: dir, Logf: func(_ contract.Log_Level, format string, args ...any) {
		t.Logf(format, args...)
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		os.RemoveAll(dir)
	})
	return s
}

var token = []byte("0123456789abcdef0123456789abcdef")

// target is s as a peer of the writer that t admits as incarnation 1.
func target(s *Share) *sdk.Peer {
	return &sdk.Peer{Handle: 1, Node: "owner", Endpoint: s.Endpoint(), SameHost: true, Token: token}
}

// writerPeer is incarnation 1 as an admitted writer.
func writerPeer(handle uint32) *sdk.Peer {
	return &sdk.Peer{Handle: handle, Node: "writer", Incarnation: 1, Epoch: 1, SameHost: true, Token: token}
}

// region is memory of size bytes, offered by s.
func region(t *testing.T, s *Share, id uint64, size int) (*sdktest.Region, *sdk.Region) {
	t.Helper()
	r, memory, lease, err := sdktest.NewMemory(size)
	if err != nil {
		t.Fatal(err)
	}
	f, l := os.NewFile(uintptr(memory), "memory"), os.NewFile(uintptr(lease), "lease")
	t.Cleanup(func() { f.Close(); l.Close(); r.Free() })
	reg := &sdk.Region{ID: id, Size: uint64(size), FD: memory, Lease: lease, Bytes: r.Bytes}
	if err := s.AddRegion(reg); err != nil {
		t.Fatal(err)
	}
	return r, reg
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(sdktest.Wait); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", sdktest.Wait, what)
		}
	}
}

func descriptors(t *testing.T) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// mappings counts the mappings of the memfds of this file's tests.
func mappings(t *testing.T) int {
	t.Helper()
	b, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for line := range strings.Lines(string(b)) {
		if strings.Contains(line, "/memfd:terminus-test") {
			n++
		}
	}
	return n
}

func ended(got sdktest.End, kind string, cause contract.Cause) error {
	if got.Kind != kind || got.Cause != cause || !got.Quiet {
		return fmt.Errorf("the op is %+v; want %s, %v, quiet", got, kind, cause)
	}
	return nil
}
