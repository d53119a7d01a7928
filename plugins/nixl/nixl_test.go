package nixl

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
	"github.com/terminus-kv/terminus/plugins/sdk/sdktest"
)

type options map[string]any

// skipped counts the tests that this run left out, so that a machine without the library says how much it did not test.
var skipped int

func TestMain(m *testing.M) {
	code := m.Run()
	if skipped > 0 {
		fmt.Printf("plugins/nixl: %d tests were skipped: NIXL is not there; `make nixl` installs it\n", skipped)
	}
	os.Exit(code)
}

// wheel is a library that `make nixl` installed.
func wheel(t testing.TB, dir string) string {
	t.Helper()
	abs, err := filepath.Abs(filepath.Join("..", "..", "bin", dir))
	if err != nil {
		t.Fatal(err)
	}
	path, err := locate(&Config{Python: abs})
	if err == nil {
		return path
	}
	skipped++
	t.Skipf("%v; run `make nixl` first", err)
	return ""
}

// opts are the options of a backend that drives the library of `make nixl`.
func opts(t testing.TB) options { return options{"library": wheel(t, venvName)} }

// pair is a writer and a receiver of one process with one pool each.
type pair struct {
	t        testing.TB
	a, b     *sdktest.Host
	ab, bb   *Backend
	src, dst *sdktest.Region
	peer     *sdktest.Peer
	plan     uint64
}

func newPair(t testing.TB, pages uint32, pageBytes uint64) *pair {
	t.Helper()
	o := opts(t)
	p := &pair{t: t, ab: New(), bb: New()}
	p.a = sdktest.New(t, p.ab, sdktest.WithConfig(o))
	p.b = sdktest.New(t, p.bb, sdktest.WithConfig(o))
	size := int(uint64(pages)*pageBytes) + 64
	p.src, p.dst = p.a.AddRegion(size), p.b.AddRegion(size)
	srcPool := p.a.AddPool(pages, p.src.Tensor(0, pageBytes))
	dstPool := p.b.AddPool(pages, p.dst.Tensor(0, pageBytes))
	p.peer = sdktest.Connect(p.a, p.b)
	p.plan = p.peer.IdentityPlan(srcPool, dstPool)
	fill(p.src.Bytes, 1)
	return p
}

func (p *pair) submit(pages uint32) *sdktest.Pending {
	return p.peer.Submit(sdktest.Op{Plan: p.plan, Src: sdktest.Pages(0, pages), Dst: sdktest.Pages(0, pages)})
}

// fill writes content that differs everywhere.
func fill(b []byte, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 7))
	for len(b) >= 8 {
		binary.LittleEndian.PutUint64(b, r.Uint64())
		b = b[8:]
	}
}

func wantDone(t testing.TB, end sdktest.End) {
	t.Helper()
	if end.Kind != "done" || !end.Quiet || end.Lane != contract.Lane_LANE_TCP {
		t.Fatalf("end %+v, want done on tcp", end)
	}
}

func wantFailed(t testing.TB, end sdktest.End, cause contract.Cause) {
	t.Helper()
	if end.Kind != "failed" || end.Cause != cause {
		t.Fatalf("end %+v, want failed %v", end, cause)
	}
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(sdktest.Wait); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not in %v: %s", sdktest.Wait, what)
		}
	}
}

// TestUnacceptMidTransfer: the receiver drops the writer in the middle of its ops. The agent that they write to is
// destroyed, which is the only fence that the library has: nothing lands afterwards, and the writer learns that its ops
// are quiet although it cannot connect again.
func TestUnacceptMidTransfer(t *testing.T) {
	const pages, size = 512, 128 << 10
	cut := 0
	for range 5 {
		p := newPair(t, pages, size)
		wantDone(t, p.submit(1).End())
		at := p.ab.count.bytesOut.Load()
		ops := []*sdktest.Pending{p.submit(pages), p.submit(pages), p.submit(pages)}
		eventually(t, "first bytes", func() bool { return p.ab.count.bytesOut.Load() > at })
		p.b.Send(&contract.HostEvent{Event: &contract.HostEvent_PeerRemove{PeerRemove: &contract.PeerRemove{Peer: p.peer.Writer}}})
		p.b.Until("PeerRemoved", func(e *contract.PluginEvent) bool { return e.GetPeerRemoved().GetPeer() == p.peer.Writer })
		clear(p.dst.Bytes)
		for _, op := range ops {
			if end := op.Quiet(); end.Kind != "done" {
				cut++
			}
		}
		time.Sleep(100 * time.Millisecond) // gives a late write the time to be seen; nothing waits for it
		for i, c := range p.dst.Bytes {
			if c != 0 {
				t.Fatalf("byte %d landed after PeerRemoved", i)
			}
		}
		end := p.submit(1).End()
		wantFailed(t, end, contract.Cause_CAUSE_PEER_UNREACHABLE)
		if !strings.Contains(end.Detail, errFarewell.Error()) {
			t.Errorf("the writer reads %q", end.Detail)
		}
		p.a.CheckOrder()
		p.a.Close()
		p.b.Close()
	}
	if cut == 0 {
		t.Error("every op was done before the receiver dropped the writer")
	}
}

// TestLinkLost: the control connection breaks under ops. They fail as not quiet, and the next link, which the receiver
// welcomes when the agent of the one before is destroyed, makes them quiet and takes the next op.
func TestLinkLost(t *testing.T) {
	const pages, size = 512, 128 << 10
	p := newPair(t, pages, size)
	wantDone(t, p.submit(1).End())
	unquiet := 0
	for range 5 {
		at := p.ab.count.bytesOut.Load()
		ops := []*sdktest.Pending{p.submit(pages), p.submit(pages)}
		eventually(t, "first bytes", func() bool { return p.ab.count.bytesOut.Load() > at })
		p.bb.recv.mu.Lock()
		for conn := range p.bb.recv.conns {
			conn.Close()
		}
		p.bb.recv.mu.Unlock()
		for _, op := range ops {
			end := op.End()
			if !end.Quiet {
				unquiet++
			}
			op.Quiet()
		}
		wantDone(t, p.submit(pages).End())
		if string(p.src.Bytes[:pages*size]) != string(p.dst.Bytes[:pages*size]) {
			t.Fatal("the bytes differ")
		}
	}
	if unquiet == 0 {
		t.Error("no op was cut in the middle")
	}
	p.a.CheckOrder()
}

// TestRegionRemovedByReceiver: memory is taken back while a writer holds it and writes to it: nothing lands after
// RegionRemoved, and later ops to it are refused.
func TestRegionRemovedByReceiver(t *testing.T) {
	const pages, size = 512, 128 << 10
	p := newPair(t, pages, size)
	wantDone(t, p.submit(1).End())
	at := p.ab.count.bytesOut.Load()
	op := p.submit(pages)
	eventually(t, "first bytes", func() bool { return p.ab.count.bytesOut.Load() > at })
	p.b.RemoveRegion(p.dst)
	clear(p.dst.Bytes)
	op.Quiet()
	time.Sleep(100 * time.Millisecond)
	for i, c := range p.dst.Bytes {
		if c != 0 {
			t.Fatalf("byte %d landed after RegionRemoved", i)
		}
	}
	wantFailed(t, p.submit(1).End(), contract.Cause_CAUSE_BOUNDS)
	p.a.CheckOrder()
}

// TestAgentNameIsAString: the library reads a name up to its first zero.
func TestAgentNameIsAString(t *testing.T) {
	got := agentName(sdk.Start{Node: "a\x00b \xffc" + strings.Repeat("é", 200), Incarnation: 1<<64 - 1, Epoch: 1<<32 - 1}, strings.Repeat("f", 32))
	if strings.ContainsRune(got, 0) || len(got) > maxName-32 || !strings.HasPrefix(got, "a_b_") || !strings.HasSuffix(got, "ff") {
		t.Errorf("name %q", got)
	}
}

// TestTwoAgentNames: no two agents have a name in common, or a peer would take one for the other.
func TestTwoAgentNames(t *testing.T) {
	o := opts(t)
	seen := map[string]bool{}
	for range 2 {
		b := New()
		h := sdktest.New(t, b, sdktest.WithConfig(o), sdktest.WithNode("same", 3, 4))
		if seen[b.agentName] {
			t.Errorf("agent %s a second time", b.agentName)
		}
		seen[b.agentName] = true
		h.Close()
	}
}

// TestFencedWriter: an epoch that was fenced is dropped and never admitted again.
func TestFencedWriter(t *testing.T) {
	p := newPair(t, 8, 4096)
	wantDone(t, p.submit(8).End())
	node, incarnation, epoch := p.a.Node()
	if r := p.b.Fence(node, incarnation, epoch); r != contract.FenceResult_FENCE_RESULT_QUIET {
		t.Fatalf("fence: %v", r)
	}
	wantFailed(t, p.submit(8).End(), contract.Cause_CAUSE_PEER_UNREACHABLE)
	if err := p.bb.Accept(&sdk.Peer{Handle: 99, Node: node, Incarnation: incarnation, Epoch: epoch}); err == nil {
		t.Error("a fenced writer was admitted")
	}
	if err := p.bb.Accept(&sdk.Peer{Handle: 98, Node: node, Incarnation: incarnation, Epoch: epoch + 1}); err != nil {
		t.Errorf("the epoch after the fenced one: %v", err)
	}
}
