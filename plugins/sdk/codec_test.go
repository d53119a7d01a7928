package sdk

import (
	"math"
	"strings"
	"testing"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

func submitEvent(change func(*contract.Submit)) *contract.HostEvent {
	s := &contract.Submit{
		Op: 7, Seq: 300, Direction: contract.Direction_DIRECTION_WRITE, Peer: 3, Plan: 1 << 40,
		Generation: &contract.Generation{
			Source:      &contract.Opener{Incarnation: 1, Sequence: math.MaxUint64},
			Destination: &contract.Opener{Incarnation: 2, Sequence: 5}},
		Source:      &contract.Runs{Start: []uint32{1, 9}, Count: []uint32{2, 2}, Stride: []uint32{1, 3}},
		Destination: &contract.Runs{Start: []uint32{100}, Count: []uint32{4}},
		LayerFrom:   1, LayerTo: 80, Priority: -2, DeadlineNs: 1e9, Bytes: 4 << 20, Trace: "00-ab-cd-01",
	}
	if change != nil {
		change(s)
	}
	return &contract.HostEvent{Event: &contract.HostEvent_Submit{Submit: s}}
}

// hostFrames are frames that go the short way, the long way, and both.
func hostFrames() []*contract.HostFrame {
	long := make([]uint32, 5000)
	for i := range long {
		long[i] = uint32(i * i)
	}
	return []*contract.HostFrame{
		{},
		{Events: []*contract.HostEvent{{}}},
		{Events: []*contract.HostEvent{submitEvent(nil), submitEvent(nil)}},
		{Events: []*contract.HostEvent{{Event: &contract.HostEvent_Submit{Submit: &contract.Submit{}}}}},
		{Events: []*contract.HostEvent{submitEvent(func(s *contract.Submit) { s.Generation, s.Source = &contract.Generation{}, &contract.Runs{} })}},
		{Events: []*contract.HostEvent{submitEvent(func(s *contract.Submit) { s.Source = &contract.Runs{Start: long, Count: long} }), submitEvent(nil)}},
		{Events: []*contract.HostEvent{submitEvent(func(s *contract.Submit) {
			s.Priority = math.MinInt32
			s.Direction = -1
			s.Trace = strings.Repeat("é", 200)
		})}},
		{Events: []*contract.HostEvent{
			{Event: &contract.HostEvent_Abort{Abort: &contract.AbortOp{Op: 4}}}, submitEvent(nil),
			{Event: &contract.HostEvent_Drain{Drain: &contract.Drain{DeadlineNs: 9}}}}},
	}
}

func pluginFrames() []*contract.PluginFrame {
	event := func(op uint64) []*contract.PluginEvent {
		return []*contract.PluginEvent{
			{Event: &contract.PluginEvent_Accepted{Accepted: &contract.Accepted{Op: op}}},
			{Event: &contract.PluginEvent_Progress{Progress: &contract.Progress{Op: op, Bytes: op << 3}}},
			{Event: &contract.PluginEvent_Done{Done: &contract.Done{Op: op, Bytes: op * 7, Quiet: op%2 == 0, Lane: contract.Lane(op % 7)}}},
			{Event: &contract.PluginEvent_Quiesced{Quiesced: &contract.Quiesced{Op: op}}},
			{Event: &contract.PluginEvent_Failed{Failed: &contract.Failed{Op: op, Detail: strings.Repeat("x", int(op%300))}}},
			{Event: &contract.PluginEvent_Done{Done: &contract.Done{Op: op, Lane: -3}}},
		}
	}
	many := &contract.PluginFrame{}
	for op := range uint64(500) {
		many.Events = append(many.Events, event(op*op*op)...)
	}
	return []*contract.PluginFrame{{}, {Events: []*contract.PluginEvent{{}}}, {Events: event(1)}, {Events: event(math.MaxUint64)}, many}
}

// TestCodecBytes: what the codec writes, protobuf reads; what protobuf writes, the codec reads.
func TestCodecBytes(t *testing.T) {
	c := newFrameCodec()
	check := func(m, byProto, byCodec proto.Message) {
		t.Helper()
		data, err := c.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		if err := proto.Unmarshal(data.Materialize(), byProto); err != nil || !proto.Equal(byProto, m) {
			t.Errorf("protobuf reads %v, %v\nwritten %v", byProto, err, m)
		}
		b, err := proto.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		half := len(b) / 2 // a message comes in pieces
		in := mem.BufferSlice{mem.SliceBuffer(b[:half]), mem.SliceBuffer(b[half:])}
		if err := c.Unmarshal(in, byCodec); err != nil || !proto.Equal(byCodec, m) {
			t.Errorf("the codec reads %v, %v\nwritten %v", byCodec, err, m)
		}
	}
	for _, f := range hostFrames() {
		check(f, &contract.HostFrame{}, &contract.HostFrame{Events: []*contract.HostEvent{{}}}) // what was there goes
	}
	for _, f := range pluginFrames() {
		check(f, &contract.PluginFrame{}, &contract.PluginFrame{})
	}
	check(&contract.HandshakeRequest{Node: "n"}, &contract.HandshakeRequest{}, &contract.HandshakeRequest{})
	if _, err := c.Marshal(&contract.HostFrame{Events: []*contract.HostEvent{submitEvent(func(s *contract.Submit) { s.Trace = "\xff" })}}); err == nil {
		t.Error("a trace that is no UTF-8 is sent")
	}
}

// TestCodecShortWay: the events of an op do go the short way, in one piece of memory.
func TestCodecShortWay(t *testing.T) {
	host, err := proto.Marshal(submitEvent(func(s *contract.Submit) { s.Trace = "" }))
	if err != nil {
		t.Fatal(err)
	}
	if n := testing.AllocsPerRun(100, func() { decodeSubmit(host) }); n != 1 {
		t.Errorf("Submit: %v allocations", n)
	}
	for _, e := range pluginFrames()[2].Events[:4] {
		b, err := proto.Marshal(e)
		if err != nil {
			t.Fatal(err)
		}
		if n := testing.AllocsPerRun(100, func() { decodePluginEvent(b) }); n != 1 {
			t.Errorf("%v: %v allocations", e, n)
		}
	}
}

// FuzzCodec: for any bytes the codec says what protobuf says.
func FuzzCodec(f *testing.F) {
	for _, m := range hostFrames() {
		b, _ := proto.Marshal(m)
		f.Add(b[:min(len(b), 400)])
	}
	for _, m := range pluginFrames() {
		b, _ := proto.Marshal(m)
		f.Add(b[:min(len(b), 400)])
	}
	f.Add([]byte{0x0a, 0x06, 0x5a, 0x04, 0x3a, 0x02, 0x0a, 0x00})                                        // an empty list
	f.Add([]byte{0x0a, 0x08, 0x5a, 0x06, 0x1a, 0x00, 0x1a, 0x02, 0x0a, 0x00})                            // a message in two parts
	f.Add([]byte{0x0a, 0x06, 0x5a, 0x04, 0x3a, 0x02, 0x08, 0x05})                                        // a list that is not packed
	f.Add([]byte{0x0a, 0x08, 0x3a, 0x02, 0x08, 0x01, 0x4a, 0x02, 0x08, 0x01})                            // two events in one
	f.Add([]byte{0x0a, 0x05, 0x5a, 0x03, 0x88, 0x00, 0x01})                                              // a tag that is too long
	f.Add([]byte{0x0a, 0x0f, 0x3a, 0x0d, 0x08, 255, 255, 255, 255, 255, 255, 255, 255, 255, 1, 0x10, 1}) // an unknown field
	f.Fuzz(func(t *testing.T, b []byte) {
		same := func(want, got proto.Message, err error) {
			t.Helper()
			wantErr := proto.Unmarshal(b, want)
			if (wantErr == nil) != (err == nil) {
				t.Fatalf("%x: %v, protobuf says %v", b, err, wantErr)
			}
			if err == nil && !proto.Equal(want, got) {
				t.Fatalf("%x: %v, protobuf says %v", b, got, want)
			}
		}
		host, plugin := &contract.HostFrame{}, &contract.PluginFrame{}
		same(&contract.HostFrame{}, host, unmarshalHostFrame(b, host))
		same(&contract.PluginFrame{}, plugin, unmarshalPluginFrame(b, plugin))
	})
}
