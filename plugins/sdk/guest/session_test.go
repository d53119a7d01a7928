package guest

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// fakeHost has memory of its own: region 1 is local, region 2 the peer's.
type fakeHost struct {
	src, dst []byte
	clock    int64
	step     int64 // that the clock goes on with every look
	events   []string
	copies   int
}

func (h *fakeHost) log(Level, string) {}
func (h *fakeHost) now() int64        { h.clock += h.step; return h.clock }

func (h *fakeHost) emit(b []byte) int32 {
	var frame contract.PluginFrame
	if err := proto.Unmarshal(b, &frame); err != nil {
		return -8
	}
	for _, e := range frame.Events {
		switch e := e.GetEvent().(type) {
		case *contract.PluginEvent_Accepted:
			h.events = append(h.events, fmt.Sprint("accepted ", e.Accepted.Op))
		case *contract.PluginEvent_Progress:
			h.events = append(h.events, fmt.Sprint("progress ", e.Progress.Op, " ", e.Progress.Bytes))
		case *contract.PluginEvent_Done:
			h.events = append(h.events, fmt.Sprint("done ", e.Done.Op))
		case *contract.PluginEvent_Failed:
			h.events = append(h.events, fmt.Sprint("failed ", e.Failed.Op, " ", e.Failed.Cause, " ", e.Failed.Detail))
		case *contract.PluginEvent_Aborted:
			h.events = append(h.events, fmt.Sprint("aborted ", e.Aborted.Op))
		default:
			h.events = append(h.events, strings.ToLower(strings.TrimPrefix(fmt.Sprintf("%T", e), "*contract.PluginEvent_")))
		}
	}
	return 0
}

func (h *fakeHost) copy(_ uint32, _, dstOff, _, srcOff, n uint64) int32 {
	if srcOff+n > uint64(len(h.src)) || dstOff+n > uint64(len(h.dst)) {
		return -2
	}
	h.copies++
	copy(h.dst[dstOff:dstOff+n], h.src[srcOff:])
	return 0
}

type fakeBackend struct {
	start    Start
	peers    []Peer
	transfer func(*Op)
}

func (b *fakeBackend) Info() Info {
	return Info{Name: "fake", Version: "7", Features: []string{FeatureRepage, FeatureStrided}, ConfigSchema: "{}", MaxOps: 9, MaxOpBytes: 1 << 40}
}
func (b *fakeBackend) Start(s Start) error { b.start = s; return nil }
func (b *fakeBackend) AddPeer(p Peer) error {
	b.peers = append(b.peers, p)
	if p.Node == "stranger" {
		return errors.New("unknown")
	}
	return nil
}
func (b *fakeBackend) RemovePeer(uint32) {}
func (b *fakeBackend) Transfer(op *Op) {
	if b.transfer != nil {
		b.transfer(op)
		return
	}
	for c := range op.Copies() {
		switch err := op.Copy(c); {
		case errors.Is(err, ErrAborted):
			op.Aborted()
			return
		case err != nil:
			op.Fail(CauseTransport, err.Error())
			return
		}
	}
	op.Done()
}

// rig is a session with a pool of n pages of one MiB at either side, and an identity plan.
func rig(t *testing.T, pages int, b *fakeBackend) (*session, *fakeHost) {
	h := &fakeHost{src: make([]byte, pages<<20), dst: make([]byte, pages<<20)}
	for i := range h.src {
		h.src[i] = byte(i>>8 + i>>20 + 1)
	}
	s := newSession(b, h)
	pool := func(region uint64) *contract.PoolAdd {
		return &contract.PoolAdd{Pool: region, Pages: uint32(pages), Tensors: []*contract.Tensor{{Region: region, PageStride: 1 << 20, PageBytes: 1 << 20}}}
	}
	send(t, s,
		&contract.HostEvent{Event: &contract.HostEvent_RegionAdd{RegionAdd: &contract.RegionAdd{Region: 1}}},
		&contract.HostEvent{Event: &contract.HostEvent_PeerAdd{PeerAdd: &contract.PeerAdd{Peer: 4}}},
		&contract.HostEvent{Event: &contract.HostEvent_PoolAdd{PoolAdd: pool(1)}},
		&contract.HostEvent{Event: &contract.HostEvent_RemotePoolAdd{RemotePoolAdd: &contract.RemotePoolAdd{Peer: 4, Pool: pool(2)}}},
		&contract.HostEvent{Event: &contract.HostEvent_PlanAdd{PlanAdd: &contract.PlanAdd{Plan: 3, Peer: 4, SrcPool: 1, DstPool: 2, SrcPages: 1, DstPages: 1,
			Slices: []*contract.Slice{{Len: 1 << 20, Count: 1}}}}})
	h.events = nil
	return s, h
}

func send(t *testing.T, s *session, events ...*contract.HostEvent) {
	t.Helper()
	var r contract.CallResult
	if err := proto.Unmarshal(s.call(methodFrame, marshal(t, &contract.HostFrame{Events: events})), &r); err != nil || r.Code != contract.CallResult_CODE_OK {
		t.Fatalf("%v %v", &r, err)
	}
}

func submitEvent(op uint64, first, pages uint32) *contract.HostEvent {
	runs := &contract.Runs{Start: []uint32{first}, Count: []uint32{pages}}
	return &contract.HostEvent{Event: &contract.HostEvent_Submit{Submit: &contract.Submit{Op: op, Peer: 4, Plan: 3, Source: runs, Destination: runs, LayerTo: 1, Bytes: uint64(pages) << 20}}}
}

func abortEvent(op uint64) *contract.HostEvent {
	return &contract.HostEvent{Event: &contract.HostEvent_Abort{Abort: &contract.AbortOp{Op: op}}}
}

// TestTurns: ops take turns, and say how far they are when theirs is over.
func TestTurns(t *testing.T) {
	s, h := rig(t, 12, &fakeBackend{})
	send(t, s, submitEvent(10, 0, 8), submitEvent(11, 8, 4))
	if s.pump(1000) {
		t.Error("work is left, and the clock stands")
	}
	want := "accepted 10|accepted 11|progress 10 4194304|done 11|done 10"
	if got := strings.Join(h.events, "|"); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if !bytes.Equal(h.src, h.dst) {
		t.Error("the bytes differ")
	}
	if len(s.ops)+len(s.active)+len(s.queue) != 0 {
		t.Error("something is left")
	}
}

// TestBudget: a pump whose time is up returns, and the next goes on.
func TestBudget(t *testing.T) {
	s, h := rig(t, 8, &fakeBackend{})
	h.step = 100
	send(t, s, submitEvent(10, 0, 8))
	pumps := 1
	for s.pump(250) {
		pumps++
	}
	if pumps < 3 || pumps > 9 || h.events[len(h.events)-1] != "done 10" {
		t.Errorf("%d pumps, %v", pumps, h.events)
	}
}

// TestAborts: one that waits, one that runs, one that is over, one that never was.
func TestAborts(t *testing.T) {
	s, h := rig(t, 8, &fakeBackend{})
	send(t, s, submitEvent(10, 0, 8), submitEvent(11, 0, 1), abortEvent(11), abortEvent(99))
	h.step = 100
	s.pump(50)
	send(t, s, abortEvent(10), abortEvent(10))
	for s.pump(50) {
	}
	send(t, s, abortEvent(10))
	if got := strings.Join(h.events, "|"); !strings.HasPrefix(got, "accepted 10|accepted 11|aborted 11|") || strings.Count(got, "aborted 10") != 1 || strings.Contains(got, "done") {
		t.Errorf("got %s", got)
	}
	if h.copies > 3 {
		t.Errorf("%d copies", h.copies)
	}
}

// TestManyOpsHaveFewStacks: no more than maxActive have begun at once.
func TestManyOpsHaveFewStacks(t *testing.T) {
	running, most := 0, 0
	s, h := rig(t, 1, &fakeBackend{transfer: func(op *Op) {
		running++
		most = max(most, running)
		_ = op.Yield()
		running--
		op.Done()
	}})
	for op := range uint64(500) {
		send(t, s, submitEvent(op+1, 0, 1))
	}
	for s.pump(1000) {
	}
	if most != maxActive || strings.Count(strings.Join(h.events, " "), "done") != 500 {
		t.Errorf("%d at once, %d events", most, len(h.events))
	}
}

func TestEndsThatAreMissing(t *testing.T) {
	s, h := rig(t, 1, &fakeBackend{transfer: func(*Op) {}})
	send(t, s, submitEvent(10, 0, 1))
	s.pump(1000)
	unknown := submitEvent(11, 0, 1)
	unknown.GetSubmit().Plan = 8
	send(t, s, unknown)
	want := "accepted 10|failed 10 CAUSE_NO_TERMINAL Transfer returned without an end|accepted 11|failed 11 CAUSE_PROTOCOL plan 8 is unknown"
	if got := strings.Join(h.events, "|"); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestPeers(t *testing.T) {
	s, h := rig(t, 1, &fakeBackend{})
	send(t, s, &contract.HostEvent{Event: &contract.HostEvent_PeerAdd{PeerAdd: &contract.PeerAdd{Peer: 5, Node: "stranger"}}},
		&contract.HostEvent{Event: &contract.HostEvent_PeerRemove{PeerRemove: &contract.PeerRemove{Peer: 4}}})
	if got := strings.Join(h.events, "|"); got != "peerfailed|peerremoved" {
		t.Errorf("got %s", got)
	}
	if len(s.plans)+len(s.remote) != 0 || len(s.pools) != 1 {
		t.Error("what belongs to the peer is still there")
	}
}

// TestCopiesJoinAcrossGroups: pages of different sizes that lie side by side at both ends are one copy.
func TestCopiesJoinAcrossGroups(t *testing.T) {
	pool := func(region, page uint64, layers uint32) *Pool {
		p := &Pool{Pages: 16}
		for l := range layers {
			p.Tensors = append(p.Tensors, Tensor{Region: region, Offset: uint64(l) << 20, PageStride: page, PageBytes: page, Layer: l})
		}
		return p
	}
	plan := &Plan{Src: pool(1, 64, 2), Dst: pool(2, 256, 2), SrcPages: 4, DstPages: 1}
	for l := range uint32(2) {
		for i := range uint32(4) {
			plan.Slices = append(plan.Slices, Slice{SrcTensor: l, DstTensor: l, Len: 64, Count: 1, SrcPage: i, DstOff: uint64(i) * 64})
		}
	}
	op := &Op{Plan: plan, Source: []Run{{0, 8, 1}}, Destination: []Run{{2, 2, 1}}, LayerTo: 2}
	var got []Copy
	for c := range op.Copies() {
		got = append(got, c)
	}
	want := []Copy{{1, 0, 2, 512, 512}, {1, 1 << 20, 2, 1<<20 + 512, 512}}
	if len(got) != 2 || got[0] != want[0] || got[1] != want[1] {
		t.Errorf("got %v, want %v", got, want)
	}
	for range op.Copies() {
		break
	}
}
