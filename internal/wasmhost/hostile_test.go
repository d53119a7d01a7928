package wasmhost

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
	"github.com/terminus-kv/terminus/plugins/sdk/sdktest"
	"github.com/terminus-kv/terminus/plugins/sdk/shm"
)

// quick are limits for guests that break them, which the expected cause names. All others have the usual ones,
// however slow the machine.
var quick = Limits{Call: 700 * time.Millisecond, Answer: 700 * time.Millisecond}

func limitsFor(want string) Limits {
	switch {
	case strings.Contains(want, "within 2s, the budget of one call"): // a guest that has to get that far
		return Limits{Call: 2 * time.Second}
	case strings.Contains(want, "the budget of one call"):
		return Limits{Call: quick.Call}
	case strings.Contains(want, "within 700ms"):
		return Limits{Answer: quick.Answer}
	}
	return Limits{Pages: 192} // a bomb is no better for being larger
}

// fate is the cause with which the session of a host ended.
func fate(t *testing.T, h *sdktest.Host) string {
	t.Helper()
	e := h.Until("Fault", func(e *contract.PluginEvent) bool { return e.GetFault() != nil })
	select {
	case <-h.Session.Over():
	case <-time.After(sdktest.Wait):
		t.Fatal("the session goes on")
	}
	return e.GetFault().GetDetail()
}

// TestRefusedModules: what is wrong with a module is said before anything is served.
func TestRefusedModules(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(m *module, f map[string]*fn)
		want   string
	}{
		{"no export", func(m *module, f map[string]*fn) { f[exportPump].name = "-" },
			"guest raw.wasm: the module does not export engine_v1_pump (i32) → (i32)"},
		{"no memory", func(m *module, _ map[string]*fn) { m.noMem, m.data = true, nil },
			`guest raw.wasm: the module does not export its memory as "memory"`},
		{"wrong signature", func(m *module, f map[string]*fn) {
			f[exportCall].results, f[exportCall].body = []byte{i32}, i32Const(0)
		},
			"guest raw.wasm: the module exports engine_v1_call as (i32, i32, i32) → (i32), it must be (i32, i32, i32) → (i64)"},
		{"unknown import", func(m *module, _ map[string]*fn) { m.imports = []fn{{name: "engine_v1.region_fill"}} },
			"guest raw.wasm: the module imports engine_v1.region_fill, which this version of the ABI does not have"},
		{"import of another type", func(m *module, _ map[string]*fn) { m.imports = []fn{{name: "engine_v1.now_ns", results: []byte{i32}}} },
			"guest raw.wasm: the module imports engine_v1.now_ns as () → (i32), it is () → (i64)"},
		{"foreign import", func(m *module, _ map[string]*fn) { m.imports = []fn{{name: "env.abort"}} },
			"guest raw.wasm: the module imports env.abort; a guest can import only engine_v1 and wasi_snapshot_preview1"},
		{"start traps", func(m *module, _ map[string]*fn) {
			m.funcs = append(m.funcs, fn{name: "-start", body: []byte{opUnreachable}})
			m.start = len(m.funcs)
		}, "guest raw.wasm: instantiate: trapped: unreachable"},
		{"start does not end", func(m *module, _ map[string]*fn) {
			m.funcs = append(m.funcs, fn{name: "-start", body: endless()})
			m.start = len(m.funcs)
		}, "guest raw.wasm: instantiate: did not return within 700ms, the budget of one call"},
		{"initialize does not end", func(m *module, _ map[string]*fn) {
			m.funcs = append(m.funcs, fn{name: exportInit, body: endless()})
		}, "guest raw.wasm: _initialize: did not return within 700ms, the budget of one call"},
		{"too much memory", func(m *module, _ map[string]*fn) { m.pages = 2000 }, "over limit"},
		{"alloc returns 0", func(_ *module, f map[string]*fn) { f[exportAlloc].body = i32Const(0) },
			"guest raw.wasm: engine_v1_alloc returned 0x0 for 4096 bytes, which is not in its memory of 65536 bytes"},
		{"alloc returns an address outside", func(_ *module, f map[string]*fn) { f[exportAlloc].body = i32Const(65000) },
			"guest raw.wasm: engine_v1_alloc returned 0xfde8 for 4096 bytes, which is not in its memory of 65536 bytes"},
		{"call returns 0", func(_ *module, f map[string]*fn) { f[exportCall].body = i64Const(0) },
			"guest raw.wasm: engine_v1_call(DESCRIBE): returned 0, which is no result"},
		{"result is empty", func(_ *module, f map[string]*fn) { f[exportCall].body = packed(okAt, 0) },
			"guest raw.wasm: engine_v1_call(DESCRIBE): returned a result of 0 bytes; it has 1 to 1048576"},
		{"result is outside", func(_ *module, f map[string]*fn) { f[exportCall].body = packed(65530, 100) },
			"guest raw.wasm: engine_v1_call(DESCRIBE): returned a result at [0xfffa,+100), outside its memory of 65536 bytes"},
		{"result is at the end of the address space", func(_ *module, f map[string]*fn) { f[exportCall].body = packed(1<<32-1, 1<<20) },
			"guest raw.wasm: engine_v1_call(DESCRIBE): returned a result at [0xffffffff,+1048576), outside its memory of 65536 bytes"},
		{"result is garbage", func(_ *module, f map[string]*fn) { f[exportCall].body = packed(badAt, 3) },
			"guest raw.wasm: engine_v1_call(DESCRIBE): returned what is no CallResult"},
		{"result without a code", func(m *module, f map[string]*fn) {
			m.data[okAt-dataAt+1] = 0
			f[exportCall].body = packed(okAt, 2)
		}, "guest raw.wasm: engine_v1_call(DESCRIBE): returned a CallResult with code 0"},
		{"a feature that is not a guest's", func(m *module, f map[string]*fn) {
			d := mustMarshal(&contract.CallResult{Code: contract.CallResult_CODE_OK, Payload: mustMarshal(&contract.HandshakeResponse{
				Name: "raw", PluginVersion: "1", Features: []string{sdk.FeatureReceiverChecked}})})
			copy(m.data, d)
			f[exportCall].body = packed(describeAt, len(d))
		}, `guest raw.wasm: it declares feature "receiver_checked"; a guest can have byte_progress, strided, layer_range, repage`},
		{"describe traps", func(_ *module, f map[string]*fn) { f[exportCall].body = []byte{opUnreachable} },
			"guest raw.wasm: engine_v1_call(DESCRIBE): trapped: unreachable"},
		{"describe recurses", func(_ *module, f map[string]*fn) {
			f[exportCall].body = join(getLocal(0), getLocal(1), getLocal(2), []byte{opCall, 2})
		}, "guest raw.wasm: engine_v1_call(DESCRIBE): trapped: stack overflow"},
		{"describe does not end", func(_ *module, f map[string]*fn) { f[exportCall].body = join(endless(), i64Const(0)) },
			"guest raw.wasm: engine_v1_call(DESCRIBE): did not return within 700ms, the budget of one call"},
		{"describe bombs", func(_ *module, f map[string]*fn) {
			f[exportCall].body = join([]byte{opLoop, voidBlock}, i32Const(1), []byte{opMemoryGrow, 0}, i32Const(-1), []byte{opI32Ne, opBrIf, 0, opEnd, opUnreachable})
		}, "guest raw.wasm: engine_v1_call(DESCRIBE): trapped: unreachable"},
		{"alloc does not end", func(_ *module, f map[string]*fn) { f[exportAlloc].body = join(endless(), i32Const(bufferAt)) },
			"guest raw.wasm: engine_v1_alloc: did not return within 700ms, the budget of one call"},
		{"alloc returns the last address", func(_ *module, f map[string]*fn) { f[exportAlloc].body = i32Const(-1) },
			"guest raw.wasm: engine_v1_alloc returned 0xffffffff for 4096 bytes, which is not in its memory of 65536 bytes"},
		{"result of 4 GiB", func(_ *module, f map[string]*fn) { f[exportCall].body = packed(okAt, 1<<32-1) },
			"guest raw.wasm: engine_v1_call(DESCRIBE): returned a result of 4294967295 bytes; it has 1 to 1048576"},
		{"emits before it got anything", func(m *module, f map[string]*fn) {
			m.emits(f[exportCall], errorAt+32, int32(copy(m.data[errorAt+32-dataAt:], mustMarshal(&contract.PluginFrame{Events: []*contract.PluginEvent{done(1, 1, contract.Lane_LANE_SHM)}}))))
		}, "guest raw.wasm: engine_v1_call(DESCRIBE): emitted an event before it got any"},
		{"emits 4 GiB", func(m *module, f map[string]*fn) { m.emits(f[exportCall], okAt, -1) },
			"guest raw.wasm: engine_v1_call(DESCRIBE): emit of a frame of 4294967295 bytes; 1048576 is the limit"},
		{"a table that grows", func(m *module, f map[string]*fn) { // by 4 GiB of the host's memory
			m.tables = [][]byte{{funcref, 0, 1}}
			f[exportCall].body = join([]byte{opRefNull, funcref}, i32Const(1<<29), []byte{opMisc, miscTableGrow, 0}, i32Const(-1),
				[]byte{opI32Ne, opIf, voidBlock, opUnreachable, opEnd}, i64Const(0))
		}, "guest raw.wasm: engine_v1_call(DESCRIBE): returned 0, which is no result"},
		{"a table that says how far it grows", func(m *module, f map[string]*fn) {
			m.tables = [][]byte{join([]byte{funcref, 1, 1}, uleb(1<<31))}
			f[exportCall].body = join([]byte{opRefNull, funcref}, i32Const(1), []byte{opMisc, miscTableGrow, 0}, i32Const(-1),
				[]byte{opI32Ne, opIf, voidBlock, opUnreachable, opEnd}, i64Const(0))
		}, "guest raw.wasm: engine_v1_call(DESCRIBE): returned 0, which is no result"},
		{"large tables", func(m *module, _ map[string]*fn) {
			m.tables = [][]byte{join([]byte{funcref, 0}, uleb(1<<19)), join([]byte{funcref, 0}, uleb(1<<19+1))}
		}, "guest raw.wasm: the module has tables of more than 1048576 elements, which is the limit"},
		{"a table of another kind", func(m *module, _ map[string]*fn) { m.tables = [][]byte{{funcref, 5, 1, 1}} },
			"guest raw.wasm: the module has a table that is not a plain one of funcref or externref"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			began := time.Now()
			b, err := New(context.Background(), Config{File: polite(tc.change).write(t), Limits: limitsFor(tc.want), cache: cache})
			if err == nil {
				b.Close()
				t.Fatal("taken")
			}
			if !strings.Contains(err.Error(), tc.want) {
				t.Errorf("cause: %v\nwant:  %s", err, tc.want)
			}
			if d := time.Since(began); d > 30*time.Second {
				t.Errorf("took %v", d)
			}
		})
	}
	t.Run("no module", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "text.wasm")
		if err := os.WriteFile(path, []byte("#!/bin/sh"), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := New(context.Background(), Config{File: path, CacheDir: cacheDir()}); err == nil || err.Error() != "guest text.wasm: this is not a WebAssembly module" {
			t.Errorf("cause: %v", err)
		}
	})
}

// TestMemoryIsBounded: a guest that grows gets no more than its pages.
func TestMemoryIsBounded(t *testing.T) {
	m := polite(func(_ *module, f map[string]*fn) {
		grow := join([]byte{opLoop, voidBlock}, i32Const(16), []byte{opMemoryGrow, 0}, i32Const(-1), []byte{opI32Ne, opBrIf, 0, opEnd})
		f[exportFree].body = grow
	})
	b := load(t, m.write(t), Limits{Pages: 100})
	defer b.Close()
	if err := b.g.invoke(context.Background(), b.g.free, exportFree, nil, 0, 0); err != nil {
		t.Fatal(err)
	}
	if size := b.g.module.Memory().Size(); size > 100<<16 || size < 90<<16 {
		t.Errorf("memory has %d bytes", size)
	}
}

// TestFramesThatKill: what a guest answers to its first event.
func TestFramesThatKill(t *testing.T) {
	for _, tc := range []struct {
		name        string
		frame, pump []byte
		want        string
	}{
		{"0", i64Const(0), nil, "guest raw.wasm: engine_v1_call(FRAME): returned 0, which is no result"},
		{"an error", packed(errorAt, 13), nil, "guest raw.wasm: engine_v1_call(FRAME): refused: not today"},
		{"nothing", packed(okAt, 2), nil, "guest raw.wasm: no answer to RegionAdd 1 within 700ms"},
		{"a trap", []byte{opUnreachable}, nil, "guest raw.wasm: engine_v1_call(FRAME) (RegionAdd): trapped: unreachable"},
		{"a loop", join(endless(), i64Const(0)), nil, "guest raw.wasm: engine_v1_call(FRAME) (RegionAdd): did not return within 700ms, the budget of one call"},
		{"a pump that returns 2", packed(okAt, 2), i32Const(2), "guest raw.wasm: engine_v1_pump returned 2; 0 and 1 are legal"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			m := polite(func(_ *module, f map[string]*fn) {
				f[exportCall].body = answers(tc.frame)
				if tc.pump != nil {
					f[exportPump].body = tc.pump
				}
			})
			h := sdktest.New(t, load(t, m.write(t), limitsFor(tc.want)))
			h.Send(&contract.HostEvent{Event: &contract.HostEvent_PeerRemove{PeerRemove: &contract.PeerRemove{Peer: 9}}}) // unknown: the SDK answers
			r, memory, lease, err := sdktest.NewMemory(1 << 16)
			if err != nil {
				t.Fatal(err)
			}
			defer r.Free()
			h.Session.Descriptors(1, memory, lease)
			h.Send(&contract.HostEvent{Event: &contract.HostEvent_RegionAdd{RegionAdd: &contract.RegionAdd{
				Region: 1, Kind: contract.MemoryKind_MEMORY_KIND_HOST_SHM, Size: 1 << 16, NoCanary: true}}})
			if got := fate(t, h); got != tc.want {
				t.Errorf("cause: %s\nwant:  %s", got, tc.want)
			}
		})
	}
}

// TestStartsThatKill: what a guest answers to its configuration, and in what is called around it.
func TestStartsThatKill(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(f map[string]*fn)
		want   string
	}{
		{"a trap", func(f map[string]*fn) { f[exportCall].body = onStart([]byte{opUnreachable}) }, "guest raw.wasm: engine_v1_call(START): trapped: unreachable"},
		{"a loop", func(f map[string]*fn) { f[exportCall].body = onStart(join(endless(), i64Const(0))) },
			"guest raw.wasm: engine_v1_call(START): did not return within 700ms, the budget of one call"},
		{"0", func(f map[string]*fn) { f[exportCall].body = onStart(i64Const(0)) }, "guest raw.wasm: engine_v1_call(START): returned 0, which is no result"},
		{"free does not end", func(f map[string]*fn) { f[exportFree].body = endless() },
			"guest raw.wasm: engine_v1_free: did not return within 700ms, the budget of one call"},
		{"free traps", func(f map[string]*fn) { f[exportFree].body = []byte{opUnreachable} }, "guest raw.wasm: engine_v1_free: trapped: unreachable"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			m := polite(func(_ *module, f map[string]*fn) { tc.change(f) })
			b := load(t, m.write(t), limitsFor(tc.want))
			defer b.Close()
			request := make([]byte, 5000) // more than the first buffer, which is freed
			if _, err := b.g.request(context.Background(), methodStart, exportCall+"(START)", nil, request); err == nil || err.Error() != tc.want {
				t.Errorf("cause: %v\nwant:  %s", err, tc.want)
			}
		})
	}
}

// TestRevokedRegion: from the moment at which a region is to be given back the guest cannot read it.
func TestRevokedRegion(t *testing.T) {
	const ready = errorAt + 32
	m := polite(func(m *module, f map[string]*fn) {
		m.imports = []fn{
			{name: "engine_v1.region_read", params: []byte{i64, i64, i32, i32}, results: []byte{i32}},
			{name: "engine_v1.emit", params: []byte{i32, i32}, results: []byte{i32}},
		}
		answer := mustMarshal(&contract.PluginFrame{Events: []*contract.PluginEvent{
			{Event: &contract.PluginEvent_RegionReady{RegionReady: &contract.RegionReady{Region: 1}}}}})
		n := copy(m.data[ready-dataAt:], answer)
		f[exportCall].body = answers(join( // an error for the code -3, else the answer
			i64Const(1), i64Const(0), i32Const(bufferAt), i32Const(8), []byte{opCall, 0}, i32Const(int32(codeRevoked)), []byte{opI32Eq, opIf, byte(i64)},
			packed(errorAt, 13), []byte{opElse}, i32Const(ready), i32Const(int32(n)), []byte{opCall, 1, opDrop}, packed(okAt, 2), []byte{opEnd}))
	})
	h := sdktest.New(t, load(t, m.write(t), Limits{}))
	r := h.AddRegion(1 << 16)
	h.Send(&contract.HostEvent{Event: &contract.HostEvent_RegionRemove{RegionRemove: &contract.RegionRemove{Region: r.ID}}})
	if got, want := fate(t, h), "guest raw.wasm: engine_v1_call(FRAME): refused: not today"; got != want {
		t.Errorf("cause: %s\nwant:  %s", got, want)
	}
}

// hostileOptions is what the hostile guest does.
type hostileOptions struct {
	Do     string `json:"do"`
	Frames string `json:"frames"`
	Calls  string `json:"calls"`
}

// owner is the peer of a hostile guest: it shares its memory and does nothing.
type owner struct{ *shm.Share }

func (o *owner) Info() sdk.Info { return sdk.Info{Name: "owner", Version: "1"} }
func (o *owner) Start(_ context.Context, s sdk.Start) (endpoint []byte, err error) {
	o.Share, err = shm.Listen(s)
	return o.Share.Endpoint(), err
}
func (o *owner) Transfer(op *sdk.Op) { op.Skip(contract.Cause_CAUSE_EMPTY, true, "not served") }

// scene is a hostile guest with a good peer.
type scene struct {
	a, b             *sdktest.Host
	peer             *sdktest.Peer
	src, dst         *sdktest.Region
	srcPool, dstPool uint64
	plan             uint64
}

const hostileOp = 777

func newScene(t *testing.T, o hostileOptions, limits Limits) *scene {
	t.Helper()
	s := &scene{a: sdktest.New(t, load(t, hostile, limits), sdktest.WithConfig(o)), b: sdktest.New(t, &owner{})}
	s.src, s.dst = s.a.AddRegion(1<<16), s.b.AddRegion(1<<16)
	s.peer = sdktest.Connect(s.a, s.b)
	s.srcPool, s.dstPool = s.a.AddPool(16, s.src.Tensor(0, 4096)), s.b.AddPool(16, s.dst.Tensor(0, 4096))
	s.plan = s.peer.IdentityPlan(s.srcPool, s.dstPool)
	return s
}

// submit is one op of four pages, from page 4 on, with the number hostileOp.
func (s *scene) submit() *sdktest.Pending { return s.submitTo(hostileOp, 4) }

func (s *scene) submitTo(op uint64, page uint32) *sdktest.Pending {
	return s.a.SubmitRaw(&contract.Submit{
		Op:         op,
		Generation: &contract.Generation{Source: &contract.Opener{Incarnation: 1, Sequence: 1}, Destination: &contract.Opener{Incarnation: 2, Sequence: 2}},
		Direction:  contract.Direction_DIRECTION_WRITE, Peer: s.peer.Handle, Plan: s.plan, LayerTo: 1, Bytes: 4 * 4096,
		Source: sdktest.Runs(sdktest.Pages(0, 4)), Destination: sdktest.Runs(sdktest.Pages(page, 4)),
	})
}

func frames(events ...*contract.PluginEvent) string {
	var all []string
	for _, e := range events {
		all = append(all, fmt.Sprintf("%x", mustMarshal(&contract.PluginFrame{Events: []*contract.PluginEvent{e}})))
	}
	return strings.Join(all, " ")
}

func done(op, bytes uint64, lane contract.Lane) *contract.PluginEvent {
	return &contract.PluginEvent{Event: &contract.PluginEvent_Done{Done: &contract.Done{Op: op, Bytes: bytes, Quiet: true, Lane: lane}}}
}

func progress(op, bytes uint64) *contract.PluginEvent {
	return &contract.PluginEvent{Event: &contract.PluginEvent_Progress{Progress: &contract.Progress{Op: op, Bytes: bytes}}}
}

// TestOpsThatKill: what a guest does when it is given an op.
func TestOpsThatKill(t *testing.T) {
	const size, lane = 4 * 4096, contract.Lane_LANE_SHM
	for _, tc := range []struct {
		name string
		do   hostileOptions
		want string
	}{
		{"endless loop", hostileOptions{Do: "loop"}, "guest hostile.wasm: engine_v1_pump: did not return within 2s, the budget of one call"},
		{"panic", hostileOptions{Do: "panic"}, "guest hostile.wasm: engine_v1_pump: trapped: unreachable: panic: boom"},
		{"exit", hostileOptions{Do: "exit"}, "guest hostile.wasm: engine_v1_pump: exited with code 3"},
		{"recursion", hostileOptions{Do: "recurse"}, "guest hostile.wasm: engine_v1_pump: "},
		{"memory bomb", hostileOptions{Do: "bomb"}, "guest hostile.wasm: engine_v1_pump: trapped: unreachable: fatal error: out of memory"},
		{"end twice, by the SDK", hostileOptions{Do: "end twice"}, "guest hostile.wasm: engine_v1_pump: trapped: unreachable: panic: op 777 is ended a second time"},
		{"end twice", hostileOptions{Do: "emit", Frames: frames(done(hostileOp, size, lane), done(hostileOp, size, lane))},
			"guest hostile.wasm: engine_v1_pump: Done of op 777, which is not open: it is over, or was never submitted (R1)"},
		{"an op that is not there", hostileOptions{Do: "emit", Frames: frames(done(12, size, lane))},
			"guest hostile.wasm: engine_v1_pump: Done of op 12, which is not open: it is over, or was never submitted (R1)"},
		{"accepted twice", hostileOptions{Do: "emit", Frames: frames(&contract.PluginEvent{Event: &contract.PluginEvent_Accepted{Accepted: &contract.Accepted{Op: hostileOp}}})},
			"guest hostile.wasm: engine_v1_pump: op 777 accepted twice (R8)"},
		{"progress that does not grow", hostileOptions{Do: "emit", Frames: frames(progress(hostileOp, 5), progress(hostileOp, 5))},
			"guest hostile.wasm: engine_v1_pump: Progress 5 of op 777 after 5: it has to grow (R8)"},
		{"progress beyond the size", hostileOptions{Do: "emit", Frames: frames(progress(hostileOp, size+1))},
			"guest hostile.wasm: engine_v1_pump: Progress 16385 of op 777, which has 16384 bytes (R9)"},
		{"done with fewer bytes", hostileOptions{Do: "emit", Frames: frames(done(hostileOp, 1, lane))},
			"guest hostile.wasm: engine_v1_pump: Done of op 777 with 1 bytes; it has 16384"},
		{"done by another lane", hostileOptions{Do: "emit", Frames: frames(done(hostileOp, size, contract.Lane_LANE_RDMA))},
			"guest hostile.wasm: engine_v1_pump: Done of op 777 with lane LANE_RDMA; the host's is LANE_SHM"},
		{"quiesced before the end", hostileOptions{Do: "emit", Frames: frames(&contract.PluginEvent{Event: &contract.PluginEvent_Quiesced{Quiesced: &contract.Quiesced{Op: hostileOp}}})},
			"guest hostile.wasm: engine_v1_pump: Quiesced of op 777 before its end (R4)"},
		{"aborted, and nobody asked", hostileOptions{Do: "emit", Frames: frames(&contract.PluginEvent{Event: &contract.PluginEvent_Aborted{Aborted: &contract.Aborted{Op: hostileOp, Quiet: true}}})},
			"guest hostile.wasm: engine_v1_pump: Aborted of op 777, which nobody aborted"},
		{"cause 0", hostileOptions{Do: "emit", Frames: frames(&contract.PluginEvent{Event: &contract.PluginEvent_Failed{Failed: &contract.Failed{Op: hostileOp, Quiet: true}}})},
			"guest hostile.wasm: engine_v1_pump: Failed of op 777 with cause 0; enum values start at 1 and end at 15"},
		{"an unknown cause", hostileOptions{Do: "emit", Frames: frames(&contract.PluginEvent{Event: &contract.PluginEvent_Skipped{Skipped: &contract.Skipped{Op: hostileOp, Quiet: true, Cause: 99}}})},
			"guest hostile.wasm: engine_v1_pump: Skipped of op 777 with cause 99; enum values start at 1 and end at 15"},
		{"an answer to nothing", hostileOptions{Do: "emit", Frames: frames(&contract.PluginEvent{Event: &contract.PluginEvent_RegionReady{RegionReady: &contract.RegionReady{Region: 5}}})},
			"guest hostile.wasm: engine_v1_pump: answered RegionAdd 5, which was not asked"},
		{"an event of the host", hostileOptions{Do: "emit", Frames: frames(&contract.PluginEvent{Event: &contract.PluginEvent_Granted{Granted: &contract.Granted{Grant: 5}}})},
			"guest hostile.wasm: engine_v1_pump: emitted *contract.PluginEvent_Granted, which is not an event of a guest"},
		{"an event without a kind", hostileOptions{Do: "emit", Frames: frames(&contract.PluginEvent{})},
			"guest hostile.wasm: engine_v1_pump: emitted an event of no known kind"},
		{"gives up", hostileOptions{Do: "emit", Frames: frames(&contract.PluginEvent{Event: &contract.PluginEvent_Fault{Fault: &contract.Fault{Detail: "no more"}}})},
			"guest hostile.wasm: engine_v1_pump: gave up: no more"},
		{"a malformed frame", hostileOptions{Do: "emit", Frames: "ffffff"},
			"guest hostile.wasm: engine_v1_pump: emit of 3 bytes that are no PluginFrame"},
		{"a frame that is too large", hostileOptions{Do: "emit large"},
			"guest hostile.wasm: engine_v1_pump: emit of a frame of 1048577 bytes; 1048576 is the limit"},
		{"a flood of frames", hostileOptions{Do: "flood"},
			"guest hostile.wasm: engine_v1_pump: emitted 4097 frames and 0 bytes in one call; 4096 and 16777216 are the limits"},
		{"a frame outside of memory", hostileOptions{Do: "emit outside"}, "guest hostile.wasm: engine_v1_pump: emit of [0xffffff00,+128), outside its memory of "},
		{"a line outside of memory", hostileOptions{Do: "log outside"}, "guest hostile.wasm: engine_v1_pump: log of [0xffffff00,+128), outside its memory of "},
		{"a line of no level", hostileOptions{Do: "log level"}, "guest hostile.wasm: engine_v1_pump: log with level 9; 1 to 4 are legal"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s := newScene(t, tc.do, limitsFor(tc.want))
			s.submit()
			got := fate(t, s.a)
			if exact := !strings.HasSuffix(tc.want, " "); exact && got != tc.want || !strings.HasPrefix(got, tc.want) {
				t.Errorf("cause: %s\nwant:  %s", got, tc.want)
			}
			if s.b.Stats() == nil {
				t.Error("the peer does not answer")
			}
		})
	}
}

// TestDeafGuest: a guest that ignores an abort does not live on.
func TestDeafGuest(t *testing.T) {
	s := newScene(t, hostileOptions{Do: "deaf"}, Limits{Answer: quick.Answer})
	p := s.submit()
	s.a.Until("Accepted", func(e *contract.PluginEvent) bool { return e.GetAccepted() != nil })
	time.Sleep(50 * time.Millisecond) // so that the guest has it
	p.Abort()
	if got, want := fate(t, s.a), "guest hostile.wasm: no end of op 777 within 700ms of its AbortOp (R7)"; got != want {
		t.Errorf("cause: %s\nwant:  %s", got, want)
	}
}

// TestSilentGuest: an op that its author forgot ends all the same.
func TestSilentGuest(t *testing.T) {
	s := newScene(t, hostileOptions{Do: "silent"}, Limits{})
	if end := s.submit().End(); end.Kind != "failed" || end.Cause != contract.Cause_CAUSE_NO_TERMINAL {
		t.Errorf("end: %+v", end)
	}
}

// TestOptions: the guest's own check and its schema refuse at the handshake.
func TestOptions(t *testing.T) {
	for _, tc := range []struct {
		name, file string
		options    any
		want       string
	}{
		{"by the guest", hostile, hostileOptions{Do: "refuse"}, `start backend hostile: option do: refuse is refused; write another`},
		{"by the schema", hostile, json.RawMessage(`[]`), "array"},
		{"none", repage, map[string]int{"pages": 1}, `unknown option "pages": this backend has no options`},
	} {
		h := sdktest.Start(t, load(t, tc.file, Limits{}), sdktest.WithConfig(tc.options))
		if !strings.Contains(h.Response.Error, tc.want) {
			t.Errorf("%s: %q", tc.name, h.Response.Error)
		}
	}
}

// TestCodes: what a guest may not touch is a code, whatever it passes, and nothing is touched.
func TestCodes(t *testing.T) {
	const big = 1 << 40
	const top = 1<<64 - 1
	const src, dst, peer = 1, 1, 1         // the first ids of either host
	const first, last = 4 * 4096, 8 * 4096 // of the op's pages
	during := []struct {
		name string
		args []uint64
		want int
	}{
		{"copy", []uint64{peer, dst, first, src, 0, 4096}, 0},
		{"copy", []uint64{peer, dst, first, src, 0, last - first}, 0},
		{"copy", []uint64{peer, dst, 0, src, 0, 0}, 0},
		{"copy", []uint64{peer, dst, 1 << 16, src, 1 << 16, 0}, 0},
		{"copy", []uint64{peer, dst, 0, src, 1<<16 + 1, 0}, -2},
		{"copy", []uint64{peer, dst, big, src, 0, 1}, -2},
		{"copy", []uint64{peer, dst, 0, src, big, 1}, -2},
		{"copy", []uint64{peer, dst, top, src, 0, 2}, -2},
		{"copy", []uint64{peer, dst, 0, src, top, 2}, -2},
		{"copy", []uint64{peer, dst, 1<<16 - 1, src, 0, 2}, -2},
		{"copy", []uint64{peer, dst, 0, src, 0, 1<<16 + 1}, -2},
		{"copy", []uint64{peer, dst, 0, src, 0, 8<<20 + 1}, -5},
		{"copy", []uint64{peer, dst, 0, src, 0, top}, -5},
		{"copy", []uint64{peer, dst, 0, 99, 0, 1}, -1},
		{"copy", []uint64{99, dst, 0, src, 0, 1}, -1},
		{"copy", []uint64{peer, 99, 0, src, 0, 1}, -6},
		{"read", []uint64{src, 0, 0x10000, 64}, 0},
		{"read", []uint64{src, top, 0x10000, 64}, -2},
		{"read", []uint64{src, 0, 0xFFFFFFF0, 64}, -4},
		{"read", []uint64{src, 0, 0x10000, 65537}, -5},
		{"read", []uint64{src, 0, 0x10000, 1<<32 - 1}, -5},
		{"read", []uint64{src, 1<<32 - 1, 1<<32 - 1, 1}, -2},
		{"copy", []uint64{peer, dst, first, src, 0, 1 << 32}, -5},
		{"copy", []uint64{peer, dst, first, src, 1<<32 - 1, 1}, -2},
		{"copy", []uint64{peer, dst, 1<<32 + first, src, 0, 1}, -2},
		{"copy", []uint64{peer, 1<<32 + dst, first, src, 0, 1}, -6},
		{"copy", []uint64{peer, dst, first, 1<<32 + src, 0, 1}, -1},
		{"write", []uint64{peer, dst, first, 0x10000, 1<<32 - 1}, -5},
		{"read", []uint64{99, 0, 0x10000, 64}, -1},
		{"write", []uint64{peer, dst, last - 64, 0x10000, 64}, 0},
		{"copy", []uint64{peer, dst, 0, src, 0, 4096}, -6}, // pages that are not the op's
		{"copy", []uint64{peer, dst, first - 1, src, 0, 2}, -6},
		{"copy", []uint64{peer, dst, last - 1, src, 0, 2}, -6},
		{"copy", []uint64{peer, dst, last, src, 0, 1}, -6},
		{"copy", []uint64{peer, dst, 0, src, 0, 1 << 16}, -6},
		{"write", []uint64{peer, dst, first - 1, 0x10000, 64}, -6},
		{"write", []uint64{peer, dst, last - 63, 0x10000, 64}, -6},
		{"write", []uint64{peer, dst, first, 0x10000, 0}, 0},
		{"write", []uint64{peer, dst, top, 0x10000, 1}, -2},
		{"write", []uint64{peer, dst, big, 0x10000, 64}, -2},
		{"write", []uint64{peer, dst, first, 0xFFFFFFF0, 64}, -4},
		{"write", []uint64{peer, dst, 0, 0x10000, 65537}, -5},
		{"write", []uint64{99, dst, 0, 0x10000, 64}, -1},
	}
	o := hostileOptions{Do: "calls"}
	want := "codes"
	for _, d := range during {
		o.Calls += d.name
		for _, n := range d.args {
			o.Calls += fmt.Sprintf(" %d", n)
		}
		o.Calls += ";"
		want += fmt.Sprintf(" %d", d.want)
	}
	s := newScene(t, o, Limits{})
	if s.src.ID != src || s.dst.ID != dst || s.peer.Handle != peer {
		t.Fatalf("ids %d, %d, %d", s.src.ID, s.dst.ID, s.peer.Handle)
	}
	fill(s.src.Bytes)
	if end := s.submit().End(); end.Kind != "done" {
		t.Fatalf("end: %+v", end)
	}
	if got := codes(s.a); got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
	if string(s.dst.Bytes[first:last-64]) != string(s.src.Bytes[:last-first-64]) ||
		strings.Trim(string(s.dst.Bytes[:first])+string(s.dst.Bytes[last:]), "\x00") != "" {
		t.Error("what was refused was copied, or what was not was not")
	}
}

// TestPagesOfAnEndedOp: once an op is quiet its pages may be another's, so the guest cannot write to them, though
// another op into the same region is open.
func TestPagesOfAnEndedOp(t *testing.T) {
	s := newScene(t, hostileOptions{Do: "calls", Calls: "copy 1 1 16384 1 0 4096; copy 1 1 32768 1 0 4096; write 1 1 20480 0x10000 64; write 1 1 36864 0x10000 64"}, Limits{})
	fill(s.src.Bytes)
	if end := s.submit().End(); end.Kind != "done" {
		t.Fatalf("end: %+v", end)
	}
	if got, want := codes(s.a), "codes 0 -6 0 -6"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	clear(s.dst.Bytes) // they are somebody else's now
	if end := s.submitTo(hostileOp+1, 8).End(); end.Kind != "done" {
		t.Fatalf("end: %+v", end)
	}
	s.a.Until("the codes of the second", func(e *contract.PluginEvent) bool { return e.GetLog().GetMessage() == "codes -6 0 -6 0" })
	if strings.Trim(string(s.dst.Bytes[:8*4096]), "\x00") != "" {
		t.Error("the guest wrote to the pages of an op that was over")
	}
}

func codes(h *sdktest.Host) string {
	e := h.Until("codes", func(e *contract.PluginEvent) bool { return strings.HasPrefix(e.GetLog().GetMessage(), "codes") })
	return e.GetLog().GetMessage()
}

// TestLateAccess: without an open op a guest cannot write to a peer, and the peer that goes is revoked.
func TestLateAccess(t *testing.T) {
	s := newScene(t, hostileOptions{Do: "calls late", Calls: "copy 1 1 0 1 0 4096; write 1 1 0 0x10000 64; read 1 0 0x10000 64"}, Limits{})
	fill(s.src.Bytes)
	if end := s.submit().End(); end.Kind != "done" {
		t.Fatalf("end: %+v", end)
	}
	s.peer.Remove()
	if got, want := codes(s.a), "codes -3 -3 0"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if strings.Trim(string(s.dst.Bytes), "\x00") != "" {
		t.Error("bytes landed after the end of the op")
	}
}
