package peer

import (
	"math"
	"testing"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	"github.com/terminus-kv/terminus/core/statemachine"
	"github.com/terminus-kv/terminus/internal/peer/wire"
)

// batches are batches whose frames go the short way, the long way, and both.
func batches(t testing.TB) map[string]*wire.Batch {
	out := map[string]*wire.Batch{
		"none": {}, "beat": {Frames: []*wire.Frame{beatFrame}}, "nothing in it": {Frames: []*wire.Frame{{}}},
		"no kind":       {Frames: []*wire.Frame{{Frame: &wire.Frame_Room{Room: &wire.Room{Room: 7}}}}},
		"empty opener":  {Frames: []*wire.Frame{{Frame: &wire.Frame_Room{Room: &wire.Room{Source: &wire.Opener{}, Kind: &wire.Room_Drained{Drained: &wire.Drained{}}}}}}},
		"negative enum": {Frames: []*wire.Frame{{Frame: &wire.Frame_Room{Room: &wire.Room{Kind: &wire.Room_Verdict{Verdict: &wire.Verdict{Outcome: -1, Reason: math.MaxUint32}}}}}}},
	}
	all := &wire.Batch{}
	for name, f := range roomFrames() {
		small, err := encodeRoom(f)
		if err != nil {
			t.Fatal(err)
		}
		f.Room, f.Att, f.Bytes = math.MaxInt64, math.MaxUint64, math.MaxInt64
		if !f.S.IsZero() {
			f.S = statemachine.Opener{Inc: math.MaxUint64, Seq: math.MaxUint64}
		}
		if !f.D.IsZero() {
			f.D = f.S
		}
		all.Frames = append(all.Frames, small)
		out[name] = &wire.Batch{Frames: []*wire.Frame{small, beatFrame, small}}
		if large, err := encodeRoom(f); err == nil {
			all.Frames = append(all.Frames, large)
			out[name+" of large numbers"] = &wire.Batch{Frames: []*wire.Frame{large}}
		}
	}
	out["all"] = all
	return out
}

// The short way writes what protobuf writes, and reads what protobuf reads.
func TestBatchCodecIsProtobuf(t *testing.T) {
	c := newBatchCodec()
	for name, want := range batches(t) {
		bytes, err := c.Marshal(want)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		b := bytes.Materialize()
		if long, err := proto.Marshal(want); err != nil || string(long) != string(b) {
			t.Errorf("%s: %x, protobuf writes %x, %v", name, b, long, err)
		}
		var got wire.Batch
		if err := c.Unmarshal(bytes, &got); err != nil || !proto.Equal(&got, want) {
			t.Errorf("%s: read %v, %v", name, &got, err)
		}
	}
}

// The frames for which the short way is made do take it.
func TestBatchCodecIsShort(t *testing.T) {
	for name, f := range roomFrames() {
		w, err := encodeRoom(f)
		if err != nil {
			t.Fatal(err)
		}
		_, wrote := appendRoom(nil, w.GetRoom())
		b, err := proto.Marshal(w)
		if err != nil {
			t.Fatal(err)
		}
		read := readRoom(b) != nil
		small := false
		switch w.GetRoom().GetKind().(type) {
		case *wire.Room_Bound, *wire.Room_Progress, *wire.Room_Verdict, *wire.Room_Abort, *wire.Room_Drained:
			small = true
		}
		if wrote != small || read != small {
			t.Errorf("%s: written so %t, read so %t, want %t", name, wrote, read, small)
		}
	}
}

// FuzzBatch: whatever comes, the codec says what protobuf says.
func FuzzBatch(f *testing.F) {
	for _, m := range batches(f) {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	for _, b := range []string{
		"\x0a\x04\x5a\x02\x6a\x00", "\x0a\x05\x5a\x03\x6a\x01\x00", "\x0a\x06\x5a\x04\x6a\x00\x6a\x00", "\x0a\x06\x5a\x04\x3a\x02\x08\x00", "\x0a\x06\x5a\x04\x3a\x02\x10\x01",
		"\x0a\x08\x5a\x06\x6a\x00\x12\x02\x08\x01", "\x0a\x04\x5a\x02\x12\x7f", "\x0a\x7f", "\x0a\x03\x5a\x01\x08", "\x0a\x06\x5a\x04\x08\x07\x08\x08",
	} {
		f.Add([]byte(b))
	}
	c := newBatchCodec()
	f.Fuzz(func(t *testing.T, b []byte) {
		var got, want wire.Batch
		err := c.Unmarshal(mem.BufferSlice{mem.SliceBuffer(b)}, &got)
		if wantErr := proto.Unmarshal(b, &want); (err != nil) != (wantErr != nil) {
			t.Fatalf("%x: %v, protobuf says %v", b, err, wantErr)
		} else if err == nil && !proto.Equal(&got, &want) {
			t.Fatalf("%x: %v, protobuf reads %v", b, &got, &want)
		}
	})
}
