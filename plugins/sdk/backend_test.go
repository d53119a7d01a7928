package sdk_test

import (
	"context"
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
	"github.com/terminus-kv/terminus/plugins/sdk/sdktest"
)

// TestMain runs a backend instead of the tests when the process tests start this binary as a plugin.
func TestMain(m *testing.M) {
	if os.Getenv("SDK_TEST_PLUGIN") != "" {
		pause, _ := time.ParseDuration(os.Getenv("SDK_TEST_CLOSE"))
		sdk.Main(&script{transfer: copyAll, closing: pause})
	}
	goleak.VerifyTestMain(m)
}

type options struct {
	Lanes   int    `json:"lanes" jsonschema:"minimum=1"`
	Network string `json:"network,omitempty"`
}

// script is a backend whose calls a test fills in; nil ones succeed.
type script struct {
	info         sdk.Info
	config       options
	start        func(sdk.Start) error
	addRegion    func(*sdk.Region) error
	removeRegion func(*sdk.Region)
	addPeer      func(*sdk.Peer) (contract.Lane, error)
	transfer     func(*script, *sdk.Op)
	accept       func(*sdk.Peer) error
	revoke       func(*sdk.Grant) bool
	grant        func(*sdk.Grant) error
	fence        func(context.Context) contract.FenceResult
	addRemote    func(*sdk.RemoteRegion) error
	s            sdk.Start
	regions      sync.Map
	peersOpen    atomic.Int32
	remoteOpen   atomic.Int32
	closing      time.Duration // what Close takes
	closed       atomic.Bool
}

var allFeatures = []string{sdk.FeatureReceiverChecked, sdk.FeatureByteProgress, sdk.FeatureFencePeer, sdk.FeatureStrided, sdk.FeatureLayerRange}

func (b *script) Info() sdk.Info {
	i := b.info
	if i.Name == "" {
		i.Name, i.Version = "script", "1.2.3"
	}
	if i.Features == nil {
		i.Features = allFeatures
	}
	i.Config = &b.config
	return i
}

func (b *script) Start(_ context.Context, s sdk.Start) ([]byte, error) {
	b.s = s
	if b.start != nil {
		return nil, b.start(s)
	}
	return []byte("endpoint of " + s.Node), nil
}

func (b *script) AddRegion(r *sdk.Region) error {
	if b.addRegion != nil {
		if err := b.addRegion(r); err != nil {
			return err
		}
	}
	b.regions.Store(r.ID, r)
	return nil
}

func (b *script) RemoveRegion(r *sdk.Region) {
	if b.removeRegion != nil {
		b.removeRegion(r)
	}
	b.regions.Delete(r.ID)
}

func (b *script) AddPeer(p *sdk.Peer) (contract.Lane, error) {
	b.peersOpen.Add(1)
	if b.addPeer != nil {
		return b.addPeer(p)
	}
	return contract.Lane_LANE_SHM, nil
}

func (b *script) RemovePeer(*sdk.Peer) { b.peersOpen.Add(-1) }
func (b *script) Transfer(op *sdk.Op)  { b.transfer(b, op) }
func (b *script) Close() error {
	time.Sleep(b.closing)
	b.closed.Store(true)
	return nil
}
func (b *script) Unaccept(*sdk.Peer) {}
func (b *script) Counters() map[string]uint64 {
	return map[string]uint64{sdk.CounterLateRefused: 7, "other": 1}
}

func (b *script) Accept(p *sdk.Peer) error {
	if b.accept != nil {
		return b.accept(p)
	}
	return nil
}

func (b *script) Grant(g *sdk.Grant) error {
	if b.grant != nil {
		return b.grant(g)
	}
	return nil
}

func (b *script) Revoke(g *sdk.Grant) bool { return b.revoke == nil || b.revoke(g) }

func (b *script) FencePeer(ctx context.Context, _ string, _ uint64, _ uint32) contract.FenceResult {
	if b.fence != nil {
		return b.fence(ctx)
	}
	return contract.FenceResult_FENCE_RESULT_QUIET
}

func (b *script) AddRemoteRegion(r *sdk.RemoteRegion) error {
	b.remoteOpen.Add(1)
	if b.addRemote != nil {
		return b.addRemote(r)
	}
	return nil
}

func (b *script) RemoveRemoteRegion(*sdk.RemoteRegion) { b.remoteOpen.Add(-1) }

// copyAll copies between regions of the same backend.
func copyAll(b *script, op *sdk.Op) {
	var n uint64
	for c := range op.Copies() {
		if op.Context().Err() != nil {
			op.Aborted(true)
			return
		}
		dst, ok := b.regions.Load(c.DstRegion)
		if !ok {
			op.Fail(contract.Cause_CAUSE_BOUNDS, true, "no region %d", c.DstRegion)
			return
		}
		copy(dst.(*sdk.Region).Bytes[c.DstOff:][:c.Len], c.Src.Bytes[c.SrcOff:])
		n += c.Len
		op.Progress(n)
	}
	op.Done(contract.Lane_LANE_SHM)
}

// untilAborted ends as the context says.
func untilAborted(_ *script, op *sdk.Op) {
	<-op.Context().Done()
	op.Aborted(true)
}

// rig is one host with a peer (itself), two pools of 16 pages and a plan.
type rig struct {
	*sdktest.Host
	b                *script
	peer             *sdktest.Peer
	src, dst         *sdktest.Region
	srcPool, dstPool uint64
	plan             uint64
}

const pageSize = 4096

func newRig(t testing.TB, b *script) *rig {
	t.Helper()
	r := &rig{Host: sdktest.New(t, b, sdktest.WithConfig(map[string]any{"lanes": 2})), b: b}
	r.src, r.dst = r.AddRegion(2*16*pageSize), r.AddRegion(2*16*pageSize)
	r.peer = sdktest.Connect(r.Host, r.Host)
	tensors := func(region *sdktest.Region) []sdk.Tensor {
		a, b := region.Tensor(0, pageSize), region.Tensor(16*pageSize, pageSize)
		b.Layer = 1
		return []sdk.Tensor{a, b}
	}
	r.srcPool, r.dstPool = r.AddPool(16, tensors(r.src)...), r.AddPool(16, tensors(r.dst)...)
	r.plan = r.peer.IdentityPlan(r.srcPool, r.dstPool)
	return r
}

// op is one of n pages with all layers.
func (r *rig) op(n uint32) sdktest.Op {
	return sdktest.Op{Plan: r.plan, Src: sdktest.Pages(0, n), Dst: sdktest.Pages(16-n, n)}
}

// eventually polls for what has no event.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(sdktest.Wait); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within %v", what, sdktest.Wait)
		}
	}
}

var errTest = errors.New("the test says no")
