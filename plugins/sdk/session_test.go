package sdk_test

import (
	"context"
	"encoding/binary"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
	"github.com/terminus-kv/terminus/plugins/sdk/sdktest"
)

func abort(op uint64) *contract.HostEvent {
	return &contract.HostEvent{Event: &contract.HostEvent_Abort{Abort: &contract.AbortOp{Op: op}}}
}

func regionRemove(id uint64) *contract.HostEvent {
	return &contract.HostEvent{Event: &contract.HostEvent_RegionRemove{RegionRemove: &contract.RegionRemove{Region: id}}}
}

// submitOf is a good Submit of one page.
func submitOf(r *rig) *contract.Submit {
	return &contract.Submit{
		Generation: &contract.Generation{Source: &contract.Opener{Incarnation: 1, Sequence: 1}, Destination: &contract.Opener{Incarnation: 2, Sequence: 2}},
		Direction:  contract.Direction_DIRECTION_WRITE, Peer: r.peer.Handle, Plan: r.plan,
		Source: sdktest.Runs(sdktest.Pages(0, 1)), Destination: sdktest.Runs(sdktest.Pages(1, 1)),
		LayerFrom: 0, LayerTo: 2, Bytes: 2 * pageSize,
	}
}

// fault reads through a mapping that has been taken away.
func fault(*sdk.Region) {
	mem, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		panic(err)
	}
	if err := unix.Mprotect(mem, unix.PROT_NONE); err != nil {
		panic(err)
	}
	defer unix.Munmap(mem)
	_ = string(mem[:1])
}

// TestBadSubmit: what the host gets wrong ends its op with the field's name, and nothing else.
func TestBadSubmit(t *testing.T) {
	r := newRig(t, &script{transfer: copyAll, info: sdk.Info{
		Features: []string{sdk.FeatureByteProgress},
		Limits:   &contract.Limits{MaxOpBytes: 8 * pageSize, MaxRuns: 3},
	}})
	other := sdktest.Connect(r.Host, r.Host)
	badPlan := r.peer.Plan(r.srcPool, r.dstPool, &contract.Slice{Len: 2 * pageSize, Count: 1})
	runs := func(start, count, stride []uint32) *contract.Runs {
		return &contract.Runs{Start: start, Count: count, Stride: stride}
	}
	one := []uint32{1}
	for _, tc := range []struct {
		name   string
		change func(*contract.Submit)
		cause  contract.Cause
		detail string
	}{
		{"no direction", func(m *contract.Submit) { m.Direction = 0 }, contract.Cause_CAUSE_PROTOCOL, "Submit.direction"},
		{"direction of a newer contract", func(m *contract.Submit) { m.Direction = 9 }, contract.Cause_CAUSE_PROTOCOL, "Submit.direction"},
		{"read", func(m *contract.Submit) { m.Direction = contract.Direction_DIRECTION_READ }, contract.Cause_CAUSE_UNSUPPORTED, "READ"},
		{"no generation", func(m *contract.Submit) { m.Generation = nil }, contract.Cause_CAUSE_PROTOCOL, "Submit.generation.source"},
		{"half an opener", func(m *contract.Submit) { m.Generation.Destination.Sequence = 0 }, contract.Cause_CAUSE_PROTOCOL, "Submit.generation.destination"},
		{"unknown peer", func(m *contract.Submit) { m.Peer = 99 }, contract.Cause_CAUSE_PROTOCOL, "Submit.peer"},
		{"a writer as peer", func(m *contract.Submit) { m.Peer = r.peer.Writer }, contract.Cause_CAUSE_PROTOCOL, "Submit.peer"},
		{"unknown plan", func(m *contract.Submit) { m.Plan = 1 << 50 }, contract.Cause_CAUSE_PROTOCOL, "Submit.plan"},
		{"bad plan", func(m *contract.Submit) { m.Plan = badPlan }, contract.Cause_CAUSE_PROTOCOL, "PlanAdd.slices[0]"},
		{"plan of another peer", func(m *contract.Submit) { m.Peer = other.Handle }, contract.Cause_CAUSE_PROTOCOL, "belongs to peer"},
		{"page beyond the pool", func(m *contract.Submit) { m.Source = runs([]uint32{16}, one, nil) }, contract.Cause_CAUSE_PROTOCOL, "Submit.source"},
		{"run over the end", func(m *contract.Submit) { m.Destination = runs([]uint32{15}, []uint32{2}, nil) }, contract.Cause_CAUSE_PROTOCOL, "Submit.destination"},
		{"run that wraps", func(m *contract.Submit) { m.Source = runs([]uint32{1}, []uint32{1<<32 - 1}, []uint32{1<<32 - 1}) }, contract.Cause_CAUSE_PROTOCOL, "Submit.source"},
		{"empty run", func(m *contract.Submit) { m.Source = runs(one, []uint32{0}, nil) }, contract.Cause_CAUSE_PROTOCOL, "count[0]"},
		{"stride 0", func(m *contract.Submit) { m.Source = runs(one, one, []uint32{0}) }, contract.Cause_CAUSE_PROTOCOL, "stride[0]"},
		{"ragged runs", func(m *contract.Submit) { m.Source = runs([]uint32{1, 2}, one, nil) }, contract.Cause_CAUSE_PROTOCOL, "Submit.source"},
		{"ragged strides", func(m *contract.Submit) { m.Source = runs(one, one, []uint32{1, 1}) }, contract.Cause_CAUSE_PROTOCOL, "Submit.source"},
		{"no runs", func(m *contract.Submit) { m.Source = nil }, contract.Cause_CAUSE_PROTOCOL, "names 0 pages"},
		{"unequal pages", func(m *contract.Submit) { m.Destination = runs(one, []uint32{2}, nil) }, contract.Cause_CAUSE_PROTOCOL, "pages"},
		{"no layers", func(m *contract.Submit) { m.LayerTo = m.LayerFrom }, contract.Cause_CAUSE_PROTOCOL, "Submit.layer_to"},
		{"wrong size", func(m *contract.Submit) { m.Bytes++ }, contract.Cause_CAUSE_PROTOCOL, "Submit.bytes"},
		{"layer range", func(m *contract.Submit) { m.LayerTo, m.Bytes = 1, pageSize }, contract.Cause_CAUSE_UNSUPPORTED, "layer_range"},
		{"stride", func(m *contract.Submit) {
			m.Source, m.Destination, m.Bytes = runs(one, []uint32{2}, []uint32{2}), runs(one, []uint32{2}, nil), 4*pageSize
		}, contract.Cause_CAUSE_UNSUPPORTED, "strided"},
		{"too large", func(m *contract.Submit) {
			m.Source, m.Destination, m.Bytes = runs(one, []uint32{5}, nil), runs(one, []uint32{5}, nil), 10*pageSize
		}, contract.Cause_CAUSE_LIMIT, "max_op_bytes"},
		{"too many runs", func(m *contract.Submit) {
			m.Source, m.Destination, m.Bytes = runs([]uint32{1, 3, 5, 7}, []uint32{1, 1, 1, 1}, nil), runs(one, []uint32{4}, nil), 8*pageSize
		}, contract.Cause_CAUSE_LIMIT, "max_runs"},
	} {
		m := submitOf(r)
		tc.change(m)
		end := r.SubmitRaw(m).End()
		if end.Kind != "failed" || end.Cause != tc.cause || !end.Quiet || !strings.Contains(end.Detail, tc.detail) {
			t.Errorf("%s: %+v", tc.name, end)
		}
	}
	if end := r.SubmitRaw(submitOf(r)).End(); end.Kind != "done" {
		t.Errorf("a good op afterwards: %+v", end)
	}
	r.CheckOrder()
}

func TestSequenceAndReuse(t *testing.T) {
	r := newRig(t, &script{transfer: copyAll})
	p := r.SubmitRaw(submitOf(r))
	p.End()
	again := submitOf(r)
	again.Op = p.ID
	r.SubmitRaw(again) // ignored: the op has its end
	gap := submitOf(r)
	gap.Op, gap.Seq = 1<<41, 77
	r.Send(&contract.HostEvent{Event: &contract.HostEvent_Submit{Submit: gap}})
	r.Until("the end of the gap", func(e *contract.PluginEvent) bool {
		return e.GetFailed().GetOp() == gap.Op && strings.Contains(e.GetFailed().GetDetail(), "Submit.seq is 77 after 2")
	})
	s := r.Stats()
	if s.LastSeq != 77 || s.Counters["sdk.host_breaches"] != 1 {
		t.Errorf("stats %v", s)
	}
	r.CheckOrder()
}

func TestTooManyOps(t *testing.T) {
	r := newRig(t, &script{transfer: untilAborted, info: sdk.Info{Limits: &contract.Limits{MaxOps: 2}, OpConcurrency: 1}})
	if n := r.Response.Limits.MaxOps; n != 2 {
		t.Errorf("max_ops %d", n)
	}
	a, b := r.peer.Submit(r.op(1)), r.peer.Submit(r.op(1))
	if end := r.peer.Submit(r.op(1)).End(); end.Cause != contract.Cause_CAUSE_LIMIT {
		t.Errorf("a third op: %+v", end)
	}
	b.Abort()
	b.End()
	a.Abort()
	a.End()
}

func TestHandshake(t *testing.T) {
	version := func(v ...uint32) sdktest.Option { return func(r *contract.HandshakeRequest) { r.Versions = v } }
	for _, tc := range []struct {
		name    string
		b       *script
		options []sdktest.Option
		want    string // of the error; "" for none
	}{
		{"good", &script{}, nil, ""},
		{"newer engine", &script{}, []sdktest.Option{version(2, 1)}, ""},
		{"no common version", &script{}, []sdktest.Option{version(3, 2)}, "speaks contract version 1, the engine [3 2]"},
		{"unknown option", &script{}, []sdktest.Option{sdktest.WithConfig(map[string]any{"lane": 3})}, `unknown option "lane": did you mean "lanes"?`},
		{"wrong type", &script{}, []sdktest.Option{sdktest.WithConfig(map[string]any{"lanes": "3"})}, `option "lanes" must be of type int`},
		{"start fails", &script{start: func(sdk.Start) error { return errTest }}, nil, "start backend script: the test says no"},
		{"start panics", &script{start: func(sdk.Start) error { panic("oh") }}, nil, "Start panicked: oh"},
		{"bad name", &script{info: sdk.Info{Name: "No", Version: "1"}}, nil, "Info.Name"},
		{"no version", &script{info: sdk.Info{Name: "no"}}, nil, "Info.Version"},
	} {
		h := sdktest.Start(t, tc.b, tc.options...)
		if (tc.want == "") != (h.Response.Error == "") || !strings.Contains(h.Response.Error, tc.want) {
			t.Errorf("%s: error %q", tc.name, h.Response.Error)
		}
		if _, err := h.Session.Handshake(context.Background(), &contract.HandshakeRequest{}); err == nil {
			t.Errorf("%s: a second handshake", tc.name)
		}
	}
	b := &script{}
	h := sdktest.New(t, b, sdktest.WithConfig(map[string]any{"lanes": 7}), sdktest.WithNode("a", 3, 4))
	r := h.Response
	if b.config.Lanes != 7 || b.s.Node != "a" || b.s.Incarnation != 3 || b.s.Epoch != 4 || string(b.s.Config) != `{"lanes":7}` {
		t.Errorf("start %+v, config %+v", b.s, b.config)
	}
	if r.Version != 1 || r.Name != "script" || r.PluginVersion != "1.2.3" || len(r.Kinds) != 1 || len(r.MemoryKinds) != 1 ||
		string(r.Endpoint) != "endpoint of a" || r.Sdk.Language != "go" || !strings.Contains(r.ConfigSchema, `"lanes"`) {
		t.Errorf("response %v", r)
	}
}

func TestFeatureNeedsMethods(t *testing.T) {
	b := struct{ sdk.Backend }{&script{}}
	if h := sdktest.Start(t, b); !strings.Contains(h.Response.Error, "receiver_checked needs the methods of sdk.Granter") {
		t.Errorf("error %q", h.Response.Error)
	}
}

func TestRegionsRefused(t *testing.T) {
	h := sdktest.New(t, &script{addRegion: func(r *sdk.Region) error {
		switch r.Size {
		case 8 * pageSize:
			return errTest
		case 9 * pageSize:
			return &sdk.Error{Cause: contract.Cause_CAUSE_LIMIT, Err: errTest}
		case 10 * pageSize:
			panic("oh")
		case 11 * pageSize:
			r.Export = make([]byte, 1<<17)
		}
		return nil
	}})
	good := &contract.RegionAdd{Kind: contract.MemoryKind_MEMORY_KIND_HOST_SHM, Size: 2 * pageSize, CanaryOffset: 16, Canary: 5}
	next := uint64(1000)
	for _, tc := range []struct {
		name   string
		change func(*contract.RegionAdd)
		memory func(size int) int // nil: good memory with the canary
		cause  contract.Cause
		detail string
	}{
		{"no kind", func(m *contract.RegionAdd) { m.Kind = 0 }, nil, contract.Cause_CAUSE_PROTOCOL, "RegionAdd.kind"},
		{"cuda ipc", func(m *contract.RegionAdd) { m.Kind = contract.MemoryKind_MEMORY_KIND_CUDA_IPC }, nil, contract.Cause_CAUSE_UNSUPPORTED, "CUDA_IPC"},
		{"cuda vmm", func(m *contract.RegionAdd) { m.Kind = contract.MemoryKind_MEMORY_KIND_CUDA_VMM }, nil, contract.Cause_CAUSE_UNSUPPORTED, "CUDA_VMM"},
		{"no size", func(m *contract.RegionAdd) { m.Size = 0 }, nil, contract.Cause_CAUSE_PROTOCOL, "RegionAdd.size"},
		{"huge", func(m *contract.RegionAdd) { m.Size = 1 << 63 }, nil, contract.Cause_CAUSE_PROTOCOL, "RegionAdd.size"},
		{"larger than the memory", func(m *contract.RegionAdd) { m.Size = 1 << 30 }, nil, contract.Cause_CAUSE_PROTOCOL, "the memfd has"},
		{"canary outside", func(m *contract.RegionAdd) { m.CanaryOffset = m.Size - 7 }, nil, contract.Cause_CAUSE_PROTOCOL, "RegionAdd.canary_offset"},
		{"canary wraps", func(m *contract.RegionAdd) { m.CanaryOffset = 1<<64 - 4 }, nil, contract.Cause_CAUSE_PROTOCOL, "RegionAdd.canary_offset"},
		{"wrong canary", func(m *contract.RegionAdd) { m.Canary++ }, nil, contract.Cause_CAUSE_PROTOCOL, "private mapping"},
		{"unsealed", nil, func(size int) int {
			fd, _ := unix.MemfdCreate("t", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
			_ = unix.Ftruncate(fd, int64(size))
			return fd
		}, contract.Cause_CAUSE_PROTOCOL, "seals"},
		{"no memfd", nil, func(int) int { fd, _ := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0); return fd }, contract.Cause_CAUSE_PROTOCOL, "no memfd"},
		{"backend fails", func(m *contract.RegionAdd) { m.Size = 8 * pageSize }, nil, contract.Cause_CAUSE_INTERNAL, "the test says no"},
		{"backend fails with a cause", func(m *contract.RegionAdd) { m.Size = 9 * pageSize }, nil, contract.Cause_CAUSE_LIMIT, "the test says no"},
		{"backend panics", func(m *contract.RegionAdd) { m.Size = 10 * pageSize }, nil, contract.Cause_CAUSE_INTERNAL, "AddRegion panicked: oh"},
		{"export too large", func(m *contract.RegionAdd) { m.Size = 11 * pageSize }, nil, contract.Cause_CAUSE_INTERNAL, "exports 131072 bytes"},
	} {
		m := &contract.RegionAdd{Region: next, Kind: good.Kind, Size: good.Size, CanaryOffset: good.CanaryOffset, Canary: good.Canary}
		next++
		if tc.change != nil {
			tc.change(m)
		}
		size := 2 * pageSize
		if m.Size < 1<<20 {
			size = max(size, int(m.Size))
		}
		region, memory, lease, err := sdktest.NewMemory(size)
		if err != nil {
			t.Fatal(err)
		}
		binary.LittleEndian.PutUint64(region.Bytes[16:], good.Canary)
		if tc.memory != nil {
			unix.Close(memory)
			memory = tc.memory(size)
		}
		h.Session.Descriptors(m.Region, memory, lease)
		h.Send(&contract.HostEvent{Event: &contract.HostEvent_RegionAdd{RegionAdd: m}})
		e := h.Until("RegionFailed", func(e *contract.PluginEvent) bool {
			return e.GetRegionFailed().GetRegion() == m.Region || e.GetRegionReady().GetRegion() == m.Region
		})
		if f := e.GetRegionFailed(); f == nil || f.Cause != tc.cause || !strings.Contains(f.Detail, tc.detail) {
			t.Errorf("%s: %v", tc.name, e)
		}
		if !region.LeaseEnded() {
			t.Errorf("%s: the lease is still held", tc.name)
		}
		region.Free()
	}
}

// TestDescriptorOrder: descriptors and RegionAdd in either order; strays are closed.
func TestDescriptorOrder(t *testing.T) {
	h := sdktest.New(t, &script{})
	region, memory, lease, err := sdktest.NewMemory(pageSize)
	if err != nil {
		t.Fatal(err)
	}
	defer region.Free()
	add := &contract.RegionAdd{Region: 900, Kind: contract.MemoryKind_MEMORY_KIND_HOST_SHM, Size: pageSize}
	h.Send(&contract.HostEvent{Event: &contract.HostEvent_RegionAdd{RegionAdd: add}})
	h.Stats()
	h.Session.Descriptors(900, memory, lease)
	h.Until("RegionReady", func(e *contract.PluginEvent) bool { return e.GetRegionReady().GetRegion() == 900 })
	if got := binary.LittleEndian.Uint64(region.Bytes); got != ^uint64(0) {
		t.Errorf("canary %#x", got)
	}

	stray, memory, lease, err := sdktest.NewMemory(pageSize)
	if err != nil {
		t.Fatal(err)
	}
	defer stray.Free()
	h.Session.Descriptors(900, memory, lease) // twice
	eventually(t, "the stray is closed", stray.LeaseEnded)

	waiting, memory, lease, err := sdktest.NewMemory(pageSize)
	if err != nil {
		t.Fatal(err)
	}
	defer waiting.Free()
	h.Session.Descriptors(901, memory, lease) // its RegionAdd never comes
	h.Close()
	if !waiting.LeaseEnded() || !region.LeaseEnded() {
		t.Error("leases are held after Close")
	}
}

func TestBusyBeats(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	h := sdktest.New(t, &script{addPeer: func(*sdk.Peer) (contract.Lane, error) { <-release; return contract.Lane_LANE_TCP, nil }})
	var connected sync.WaitGroup
	connected.Go(func() { sdktest.Connect(h, h) })
	eventually(t, "a busy beat", func() bool {
		b := h.LastBeat().GetBusy()
		return len(b) == 1 && b[0].Kind == contract.BusyKind_BUSY_KIND_CONNECT && b[0].SinceNs > 0
	})
	close(release)
	connected.Wait()
	eventually(t, "an idle beat", func() bool { return len(h.LastBeat().GetBusy()) == 0 })
}

// TestBusyIsToldAtOnce: the host hears of a long call when it begins, not at the next regular beat: the
// call may stop the whole process.
func TestBusyIsToldAtOnce(t *testing.T) {
	t.Parallel()
	b := &script{}
	h := sdktest.New(t, b)
	const calls = 8
	quick := 0
	for subject := uint64(1); subject <= calls; subject++ {
		done := b.s.Busy(contract.BusyKind_BUSY_KIND_FIRST_POST, subject)
		var since uint64
		eventually(t, "a beat with the call", func() bool {
			for _, busy := range h.LastBeat().GetBusy() {
				if busy.Subject == subject {
					since = busy.SinceNs
					return true
				}
			}
			return false
		})
		if done(); since < uint64(300*time.Millisecond) {
			quick++
		}
	}
	if quick < calls-2 { // beats that come every second hit that by chance once in a hundred tries
		t.Errorf("only %d of %d calls were told at once", quick, calls)
	}
}

// TestWedgedLoopStopsBeats: beats prove that ops are dispatched, so a dispatcher that hangs is silent.
func TestWedgedLoopStopsBeats(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	b := &script{accept: func(*sdk.Peer) error { <-release; return nil }}
	h := sdktest.New(t, b)
	eventually(t, "a beat", func() bool { return h.Beats() > 0 })
	h.Send(&contract.HostEvent{Event: &contract.HostEvent_PeerAccept{PeerAccept: &contract.PeerAccept{Peer: 1, Token: make([]byte, 32)}}})
	time.Sleep(300 * time.Millisecond)
	before := h.Beats()
	time.Sleep(1500 * time.Millisecond)
	if n := h.Beats(); n > before {
		t.Errorf("%d beats while the loop was stuck", n-before)
	}
	close(release)
	eventually(t, "beats again", func() bool { return h.Beats() > before })
}

func TestDrain(t *testing.T) {
	r := newRig(t, &script{transfer: untilAborted})
	p := r.peer.Submit(r.op(1))
	r.Stats()
	if left := r.Drain(50 * time.Millisecond); left != 1 {
		t.Errorf("drained at the deadline with %d left", left)
	}
	if end := r.peer.Submit(r.op(1)).End(); end.Kind != "skipped" || end.Cause != contract.Cause_CAUSE_SHUTDOWN || !end.Quiet {
		t.Errorf("a new op: %+v", end)
	}
	r.Send(&contract.HostEvent{Event: &contract.HostEvent_Drain{Drain: &contract.Drain{DeadlineNs: 1 << 63}}})
	p.Abort()
	p.End()
	r.Until("Drained", func(e *contract.PluginEvent) bool { return e.GetDrained() != nil && e.GetDrained().OpenOps == 0 })
	r.CheckOrder()
}

func TestStats(t *testing.T) {
	r := newRig(t, &script{transfer: copyAll})
	r.peer.Submit(r.op(4)).End()
	s := r.Stats()
	if s.BytesDone != 8*pageSize || s.LateRefused != 7 || s.Counters["other"] != 1 || s.LastSeq != 1 {
		t.Errorf("stats %v", s)
	}
}

func TestGrants(t *testing.T) {
	var got sdk.Grant
	revoked := make(chan sdk.Opener, 4)
	b := &script{
		grant: func(g *sdk.Grant) error {
			got = *g
			if g.Destination.Sequence == 13 {
				return errTest
			}
			return nil
		},
		revoke: func(g *sdk.Grant) bool { revoked <- g.Destination; return g.Destination.Sequence != 5 },
	}
	r := newRig(t, b)
	o := sdk.Opener{Incarnation: 3, Sequence: 4}
	id := r.Grant(o, r.dstPool, sdk.Run{Start: 2, Count: 3, Stride: 2})
	if got.Destination != o || !got.Covers(r.dst.ID, 4*pageSize, pageSize) || got.Covers(r.dst.ID, 4*pageSize, pageSize+1) || got.Covers(r.src.ID, 4*pageSize, 1) {
		t.Errorf("grant %+v", got)
	}
	if !r.Revoke(id, o) || <-revoked != o {
		t.Error("revoke")
	}
	if r.Revoke(id+1000, sdk.Opener{Incarnation: 3, Sequence: 5}) || (<-revoked).Sequence != 5 {
		t.Error("an unknown grant must still be refused for good")
	}
	if !got.Admits("anybody") {
		t.Error("a grant that names no writers refuses one")
	}
	r.GrantTo([]string{"a", "b"}, o, r.dstPool, sdk.Run{Start: 2, Count: 1, Stride: 1})
	if !got.Admits("b") || got.Admits("c") || got.Admits("") {
		t.Errorf("grant for a and b: %+v", got)
	}
	for name, m := range map[string]*contract.Grant{
		"a writer without a name": {Destination: &contract.Opener{Incarnation: 1, Sequence: 1}, Writers: []string{"a", ""}},
		"no opener":               {Parts: []*contract.GrantPart{{Pool: r.dstPool}}},
		"pool":                    {Destination: &contract.Opener{Incarnation: 1, Sequence: 1}, Parts: []*contract.GrantPart{{Pool: 1 << 50}}},
		"page":                    {Destination: &contract.Opener{Incarnation: 1, Sequence: 1}, Parts: []*contract.GrantPart{{Pool: r.dstPool, Pages: &contract.Runs{Start: []uint32{16}, Count: []uint32{1}}}}},
		"nothing":                 {Destination: &contract.Opener{Incarnation: 1, Sequence: 1}, Parts: []*contract.GrantPart{nil}},
		"the backend":             {Destination: &contract.Opener{Incarnation: 1, Sequence: 13}},
	} {
		m.Grant = uint64(5000 + len(name))
		r.Send(&contract.HostEvent{Event: &contract.HostEvent_Grant{Grant: m}})
		r.Until(name, func(e *contract.PluginEvent) bool { return e.GetGrantFailed().GetGrant() == m.Grant })
	}
}

func TestFence(t *testing.T) {
	b := &script{}
	h := sdktest.New(t, b)
	if got := h.Fence("a", 1, 0); got != contract.FenceResult_FENCE_RESULT_QUIET {
		t.Errorf("%v", got)
	}
	b.fence = func(context.Context) contract.FenceResult { panic("oh") }
	if got := h.Fence("a", 1, 0); got != contract.FenceResult_FENCE_RESULT_UNKNOWN {
		t.Errorf("after a panic: %v", got)
	}
	plain := sdktest.New(t, &script{info: sdk.Info{Features: []string{}}})
	if got := plain.Fence("a", 1, 0); got != contract.FenceResult_FENCE_RESULT_UNKNOWN {
		t.Errorf("without the feature: %v", got)
	}
}

// plainBackend has none of the optional interfaces.
type plainBackend struct{ sdk.Backend }

func TestRefusedByName(t *testing.T) {
	h := sdktest.New(t, plainBackend{&script{info: sdk.Info{Features: []string{}}, transfer: copyAll}})
	comm := func(e *contract.PluginEvent) bool { return e.GetCommFailed() != nil }
	h.Send(
		&contract.HostEvent{Event: &contract.HostEvent_CommCreate{CommCreate: &contract.CommCreate{Comm: 4, Round: 1}}},
		&contract.HostEvent{Event: &contract.HostEvent_CommRun{CommRun: &contract.CommRun{Op: 70, Seq: 1}}},
		&contract.HostEvent{Event: &contract.HostEvent_Rebuild{Rebuild: &contract.Rebuild{Comm: 4, Round: 2}}},
		&contract.HostEvent{Event: &contract.HostEvent_Poison{Poison: &contract.Poison{Comm: 4, Round: 1}}},
		&contract.HostEvent{Event: &contract.HostEvent_CommClose{CommClose: &contract.CommClose{Comm: 4}}},
		&contract.HostEvent{Event: &contract.HostEvent_Grant{Grant: &contract.Grant{Grant: 5}}},
		&contract.HostEvent{Event: &contract.HostEvent_Revoke{Revoke: &contract.Revoke{Grant: 5}}},
		&contract.HostEvent{},
	)
	if f := h.Until("CommFailed", comm).GetCommFailed(); f.Cause != contract.Cause_CAUSE_UNSUPPORTED || f.Comm != 4 {
		t.Errorf("%v", f)
	}
	f := h.Until("Failed", func(e *contract.PluginEvent) bool { return e.GetFailed() != nil }).GetFailed()
	if f.Op != 70 || f.Cause != contract.Cause_CAUSE_UNSUPPORTED || !f.Quiet {
		t.Errorf("%v", f)
	}
	h.Until("CommClosed", func(e *contract.PluginEvent) bool { return e.GetCommClosed() != nil })
	h.Until("GrantFailed", func(e *contract.PluginEvent) bool {
		return e.GetGrantFailed().GetCause() == contract.Cause_CAUSE_UNSUPPORTED
	})
	h.Until("Revoked", func(e *contract.PluginEvent) bool { return e.GetRevoked() != nil && !e.GetRevoked().Quiet })
	if n := h.Stats().Counters["sdk.events_ignored"]; n != 2 {
		t.Errorf("%d events ignored", n)
	}
	sdktest.Connect(h, h).Remove() // an accept without sdk.Accepter is fine
	h.CheckOrder()
}

func TestRemoteRegions(t *testing.T) {
	a := &script{transfer: func(b *script, op *sdk.Op) {
		for c := range op.Copies() {
			if c.Dst == nil || string(c.Dst.Export) != "key" || c.Dst.Peer != op.Peer() {
				op.Fail(contract.Cause_CAUSE_INTERNAL, true, "%+v", c.Dst)
				return
			}
		}
		copyAll(b, op)
	}, addRegion: func(r *sdk.Region) error { r.Export = []byte("key"); return nil }}
	r := newRig(t, a)
	if end := r.peer.Submit(r.op(1)).End(); end.Kind != "done" {
		t.Errorf("%+v", end)
	}
	remove := &contract.RemoteRegionRemove{Peer: r.peer.Handle, Region: r.dst.ID}
	r.Send(&contract.HostEvent{Event: &contract.HostEvent_RemoteRegionRemove{RemoteRegionRemove: remove}})
	r.Until("RemoteRegionRemoved", func(e *contract.PluginEvent) bool { return e.GetRemoteRegionRemoved().GetRegion() == r.dst.ID })
	if n := a.remoteOpen.Load(); n != 0 {
		t.Errorf("%d remote regions are left", n)
	}
	a.addRemote = func(*sdk.RemoteRegion) error { return errTest }
	r.Send(&contract.HostEvent{Event: &contract.HostEvent_RemoteRegionAdd{RemoteRegionAdd: &contract.RemoteRegionAdd{Peer: r.peer.Handle, Region: 5}}})
	r.Until("RemoteRegionFailed", func(e *contract.PluginEvent) bool { return e.GetRemoteRegionFailed().GetRegion() == 5 })
}

func TestFatal(t *testing.T) {
	b := &script{}
	h := sdktest.New(t, b)
	b.s.Fatal(errTest)
	h.Until("Fault", func(e *contract.PluginEvent) bool { return e.GetFault().GetDetail() == errTest.Error() })
	<-h.Session.Over()
}

func TestHostFault(t *testing.T) {
	h := sdktest.New(t, &script{})
	h.Send(&contract.HostEvent{Event: &contract.HostEvent_Fault{Fault: &contract.Fault{Rule: "R8", Field: "Progress"}}})
	select {
	case <-h.Session.Over():
	case <-time.After(sdktest.Wait):
		t.Error("the session goes on")
	}
}

// TestCloseReportsStuckCalls: a Transfer that ignores its context is named, its memory stays mapped.
func TestCloseReportsStuckCalls(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	stuck := make(chan struct{})
	b := &script{addPeer: func(*sdk.Peer) (contract.Lane, error) { close(stuck); <-release; return contract.Lane_LANE_TCP, nil }}
	s := sdk.NewSession(b)
	if _, err := s.Handshake(context.Background(), &contract.HandshakeRequest{Versions: []uint32{1}}); err != nil {
		t.Fatal(err)
	}
	pipe := sdk.NewPipe()
	var served sync.WaitGroup
	served.Go(func() { _ = s.ServeSession(pipe) })
	_ = pipe.HostSend(&contract.HostFrame{Events: []*contract.HostEvent{{Event: &contract.HostEvent_PeerAdd{PeerAdd: &contract.PeerAdd{
		Peer: 1, Token: make([]byte, 32), RequireLane: contract.Lane_LANE_ANY,
	}}}}})
	<-stuck
	if err := s.Close(); err == nil || !strings.Contains(err.Error(), "did not return") {
		t.Errorf("%v", err)
	}
	close(release)
	pipe.Close()
	served.Wait()
	if !b.closed.Load() {
		t.Error("the backend was not closed")
	}
}

// TestSlowHost: towards a host that does not read the backlog is bounded, aborts still arrive, and when it
// reads again no end is missing.
func TestSlowHost(t *testing.T) {
	s := sdk.NewSession(&script{})
	if _, err := s.Handshake(context.Background(), &contract.HandshakeRequest{Versions: []uint32{1}}); err != nil {
		t.Fatal(err)
	}
	session, control := sdk.NewPipe(), sdk.NewPipe()
	var served sync.WaitGroup
	served.Go(func() { _ = s.ServeSession(session) })
	served.Go(func() { _ = s.ServeControl(control) })
	const frames, perFrame = 120, 500
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		for f := range frames {
			frame := &contract.HostFrame{}
			for i := range perFrame {
				id := uint64(f*perFrame + i + 1)
				frame.Events = append(frame.Events, &contract.HostEvent{Event: &contract.HostEvent_CommRun{CommRun: &contract.CommRun{Op: id, Seq: id}}})
			}
			_ = session.HostSend(frame)
		}
	}()
	select {
	case <-sent:
		t.Error("everything was read although nothing was taken")
	case <-time.After(200 * time.Millisecond):
	}
	for range 100 { // more than the pipe holds: the loop takes them
		if err := control.HostSend(&contract.HostFrame{Events: []*contract.HostEvent{abort(1 << 50)}}); err != nil {
			t.Fatal(err)
		}
	}
	var events []*contract.PluginEvent
	for len(events) < 2*frames*perFrame {
		frame, err := session.HostRecv()
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range frame.Events {
			if e.GetLog() == nil {
				events = append(events, e)
			}
		}
	}
	<-sent
	if err := sdktest.CheckOrder(events); err != nil {
		t.Error(err)
	}
	session.Close()
	control.Close()
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	served.Wait()
}

// TestRemovalsThatLast: a region that somebody still maps is not said to be removed, and holds up no other.
func TestRemovalsThatLast(t *testing.T) {
	const stuck = 20
	b := &script{}
	b.removeRegion = func(r *sdk.Region) {
		if r.ID <= stuck {
			<-b.s.Over
		}
	}
	h := sdktest.New(t, b)
	for range stuck {
		h.Send(regionRemove(h.AddRegion(pageSize).ID))
	}
	h.RemoveRegion(h.AddRegion(pageSize))
	for _, e := range h.Events() {
		if id := e.GetRegionRemoved().GetRegion(); id != 0 && id <= stuck {
			t.Errorf("region %d is said to be removed", id)
		}
	}
}
