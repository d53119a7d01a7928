package guest

import (
	"bytes"
	"errors"
	"math"
	"reflect"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

func marshal(t testing.TB, m proto.Message) []byte {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestEvents: what the codec writes is what the generated code writes.
func TestEvents(t *testing.T) {
	long := strings.Repeat("ä", 200)
	var e encoder
	e.regionReady(1)
	e.regionRemoved(1 << 40)
	e.peerReady(3)
	e.peerFailed(3, CauseRefused, "no \xff")
	e.peerRemoved(math.MaxUint32)
	e.accepted(math.MaxUint64)
	e.progress(5, 6)
	e.done(5, 0)
	e.failed(5, CauseTransport, long)
	e.skipped(5, CauseEmpty, "")
	e.aborted(5)
	want := &contract.PluginFrame{Events: []*contract.PluginEvent{
		{Event: &contract.PluginEvent_RegionReady{RegionReady: &contract.RegionReady{Region: 1}}},
		{Event: &contract.PluginEvent_RegionRemoved{RegionRemoved: &contract.RegionRemoved{Region: 1 << 40}}},
		{Event: &contract.PluginEvent_PeerReady{PeerReady: &contract.PeerReady{Peer: 3, Lane: contract.Lane_LANE_SHM}}},
		{Event: &contract.PluginEvent_PeerFailed{PeerFailed: &contract.PeerFailed{Peer: 3, Cause: contract.Cause_CAUSE_REFUSED, Detail: "no \uFFFD"}}},
		{Event: &contract.PluginEvent_PeerRemoved{PeerRemoved: &contract.PeerRemoved{Peer: math.MaxUint32}}},
		{Event: &contract.PluginEvent_Accepted{Accepted: &contract.Accepted{Op: math.MaxUint64}}},
		{Event: &contract.PluginEvent_Progress{Progress: &contract.Progress{Op: 5, Bytes: 6}}},
		{Event: &contract.PluginEvent_Done{Done: &contract.Done{Op: 5, Quiet: true, Lane: contract.Lane_LANE_SHM}}},
		{Event: &contract.PluginEvent_Failed{Failed: &contract.Failed{Op: 5, Cause: contract.Cause_CAUSE_TRANSPORT, Detail: long[:256], Quiet: true}}},
		{Event: &contract.PluginEvent_Skipped{Skipped: &contract.Skipped{Op: 5, Cause: contract.Cause_CAUSE_EMPTY, Quiet: true}}},
		{Event: &contract.PluginEvent_Aborted{Aborted: &contract.Aborted{Op: 5, Quiet: true}}},
	}}
	var got contract.PluginFrame
	if err := proto.Unmarshal(e.b, &got); err != nil {
		t.Fatal(err)
	}
	if !proto.Equal(&got, want) {
		t.Errorf("got  %v\nwant %v", &got, want)
	}
}

// TestCauses: the constants are those of the contract.
func TestCauses(t *testing.T) {
	for c, name := range map[Cause]string{
		CauseTransport: "TRANSPORT", CausePeerUnreachable: "PEER_UNREACHABLE", CauseRefused: "REFUSED", CauseBounds: "BOUNDS",
		CauseUnsupported: "UNSUPPORTED", CauseNoTerminal: "NO_TERMINAL", CauseProtocol: "PROTOCOL", CauseLimit: "LIMIT", CauseLane: "LANE",
		CauseInternal: "INTERNAL", CauseShutdown: "SHUTDOWN", CauseEmpty: "EMPTY",
	} {
		if got := contract.Cause(c).String(); got != "CAUSE_"+name {
			t.Errorf("%d is %s, want %s", c, got, name)
		}
	}
	if laneShm != contract.Lane_LANE_SHM || maxDetail != 256 {
		t.Error("lane or detail")
	}
}

func TestResults(t *testing.T) {
	s := newSession(&fakeBackend{}, &fakeHost{})
	var r contract.CallResult
	var d contract.HandshakeResponse
	if err := errors.Join(proto.Unmarshal(s.call(methodDescribe, nil), &r), proto.Unmarshal(r.Payload, &d)); err != nil {
		t.Fatal(err)
	}
	want := &contract.HandshakeResponse{Name: "fake", PluginVersion: "7", Features: []string{"repage", "strided"}, ConfigSchema: "{}",
		Limits: &contract.Limits{MaxOps: 9, MaxOpBytes: 1 << 40}}
	if r.Code != contract.CallResult_CODE_OK || !proto.Equal(&d, want) {
		t.Errorf("%v: %v, want %v", r.Code, &d, want)
	}
	if err := proto.Unmarshal(s.call(99, nil), &r); err != nil || r.Code != contract.CallResult_CODE_ERROR || r.Message != "engine_v1_call: method 99 is unknown" {
		t.Errorf("unknown method: %v %v", &r, err)
	}
	req := marshal(t, &contract.HandshakeRequest{Node: "n", Incarnation: 1 << 50, Epoch: 4, ConfigJson: []byte(`{"a":1}`), Versions: []uint32{1, 2}})
	if err := proto.Unmarshal(s.call(methodStart, req), &r); err != nil || r.Code != contract.CallResult_CODE_OK {
		t.Fatalf("start: %v %v", &r, err)
	}
	if got := s.backend.(*fakeBackend).start; !reflect.DeepEqual(got, Start{Node: "n", Incarnation: 1 << 50, Epoch: 4, Config: []byte(`{"a":1}`)}) {
		t.Errorf("start: %+v", got)
	}
	for _, bad := range [][]byte{{0xFF}, {0x0A, 5, 1}, {0x0A, 2, 0x0A, 9}, {0x0B}, {0x02, 0}} {
		if err := proto.Unmarshal(s.call(methodFrame, bad), &r); err != nil || r.Code != contract.CallResult_CODE_ERROR {
			t.Errorf("frame %x: %v %v", bad, &r, err)
		}
	}
}

// TestFrames: what the generated code writes is read.
func TestFrames(t *testing.T) {
	b := &fakeBackend{}
	s := newSession(b, &fakeHost{})
	pool := &contract.PoolAdd{Pool: 1 << 33, Pages: 8, Tensors: []*contract.Tensor{
		{Region: 1 << 40, Offset: 64, PageStride: 4096, PageBytes: 4000, Layer: 2}, {Region: 5, PageStride: 1, PageBytes: 1}}}
	slice := &contract.Slice{SrcTensor: 1, DstTensor: 0, SrcOff: 3, DstOff: 4, Len: 5, SrcStride: 6, DstStride: 7, Count: 8, SrcPage: 1, DstPage: 2}
	submit := &contract.Submit{Op: 77, Seq: 1, Peer: 4, Plan: 9, Priority: -3, LayerFrom: 1, LayerTo: 3, Bytes: 1 << 35, DeadlineNs: 5, Trace: "x",
		Generation:  &contract.Generation{Source: &contract.Opener{Incarnation: 1, Sequence: 2}, Destination: &contract.Opener{Incarnation: 3, Sequence: 4}},
		Direction:   contract.Direction_DIRECTION_WRITE,
		Source:      &contract.Runs{Start: []uint32{0, 4}, Count: []uint32{2, 1}, Stride: []uint32{2, 1}},
		Destination: &contract.Runs{Start: []uint32{1}, Count: []uint32{3}}}
	frame := marshal(t, &contract.HostFrame{Events: []*contract.HostEvent{
		{Event: &contract.HostEvent_PeerAdd{PeerAdd: &contract.PeerAdd{Peer: 4, Node: "other", Incarnation: 6, Epoch: 2}}},
		{Event: &contract.HostEvent_PoolAdd{PoolAdd: pool}},
		{Event: &contract.HostEvent_RemotePoolAdd{RemotePoolAdd: &contract.RemotePoolAdd{Peer: 4, Pool: pool}}},
		{Event: &contract.HostEvent_PlanAdd{PlanAdd: &contract.PlanAdd{Plan: 9, SrcPool: 1 << 33, Peer: 4, DstPool: 1 << 33, SrcPages: 2, DstPages: 3, Slices: []*contract.Slice{slice}}}},
		{Event: &contract.HostEvent_Submit{Submit: submit}},
		{Event: &contract.HostEvent_Beat{Beat: &contract.Beat{Seq: 1}}},
	}})
	// What a newer engine adds is passed over, whatever its wire type.
	frame = protowire.AppendFixed64(protowire.AppendTag(frame, 99, protowire.Fixed64Type), 1)
	frame = protowire.AppendFixed32(protowire.AppendTag(frame, 98, protowire.Fixed32Type), 1)
	frame = protowire.AppendBytes(protowire.AppendTag(frame, 97, protowire.BytesType), []byte("x"))
	frame = protowire.AppendVarint(protowire.AppendTag(frame, 96, protowire.VarintType), 1)
	var r contract.CallResult
	if err := proto.Unmarshal(s.call(methodFrame, frame), &r); err != nil || r.Code != contract.CallResult_CODE_OK {
		t.Fatalf("%v %v", &r, err)
	}
	o := s.ops[77]
	if o == nil {
		t.Fatal("no op")
	}
	wantPool := &Pool{ID: 1 << 33, Pages: 8, Tensors: []Tensor{{1 << 40, 64, 4096, 4000, 2}, {5, 0, 1, 1, 0}}}
	wantPlan := &Plan{ID: 9, Peer: 4, Src: wantPool, Dst: wantPool, SrcPages: 2, DstPages: 3, Slices: []Slice{{1, 0, 3, 4, 5, 6, 7, 8, 1, 2}}}
	if !reflect.DeepEqual(o.Plan, wantPlan) {
		t.Errorf("plan %+v", o.Plan)
	}
	if o.Priority != -3 || o.LayerFrom != 1 || o.LayerTo != 3 || o.Bytes != 1<<35 ||
		!reflect.DeepEqual(o.Source, []Run{{0, 2, 2}, {4, 1, 1}}) || !reflect.DeepEqual(o.Destination, []Run{{1, 3, 1}}) {
		t.Errorf("op %+v", o)
	}
	if !reflect.DeepEqual(b.peers, []Peer{{4, "other", 6, 2}}) {
		t.Errorf("peers %+v", b.peers)
	}
}

// FuzzFrame: no frame makes the decoder panic, and what it takes leaves tables that ops can use.
func FuzzFrame(f *testing.F) {
	f.Add([]byte{})
	f.Add(bytes.Repeat([]byte{0x0A, 2, 0x5A, 0}, 3))
	f.Fuzz(func(t *testing.T, frame []byte) {
		s := newSession(&fakeBackend{}, &fakeHost{})
		s.call(methodFrame, frame)
	})
}
