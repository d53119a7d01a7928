package peer

import (
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // registers what batchCodec embeds
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/terminus-kv/terminus/internal/peer/wire"
)

// batchCodec is gRPC's protobuf codec with a short way for the small frames of rooms: Bound, Progress,
// Verdict, Abort, Drained. When a plugin dies they come by the ten thousand, and protobuf's own way takes
// some microseconds a frame on each side. The bytes are protobuf's, and whatever the short way does not
// expect goes protobuf's way: it is an optimisation only. A frame to be sent must not hold unknown fields;
// frames are made, not passed on.
type batchCodec struct{ encoding.CodecV2 }

func newBatchCodec() batchCodec { return batchCodec{encoding.GetCodecV2("proto")} }

// Marshal is called by gRPC for every message.
func (c batchCodec) Marshal(v any) (mem.BufferSlice, error) {
	m, ok := v.(*wire.Batch)
	if !ok {
		return c.CodecV2.Marshal(v)
	}
	b, err := appendBatch(make([]byte, 0, 64*len(m.GetFrames())), m)
	if err != nil {
		return nil, err
	}
	return mem.BufferSlice{mem.SliceBuffer(b)}, nil
}

// Unmarshal is called by gRPC for every message.
func (c batchCodec) Unmarshal(data mem.BufferSlice, v any) error {
	m, ok := v.(*wire.Batch)
	if !ok {
		return c.CodecV2.Unmarshal(data, v)
	}
	buf := data.MaterializeToBuffer(mem.DefaultBufferPool())
	defer buf.Free()
	b := buf.ReadOnlyData()
	if readBatch(b, m) {
		return nil
	}
	m.Reset()
	return proto.Unmarshal(b, m)
}

// Tags, all of fields that hold a message but where it says number.
const (
	tagFrame       = 1<<3 | byte(protowire.BytesType) // of Batch
	tagRoom        = 11<<3 | byte(protowire.BytesType)
	tagNumber      = 1<<3 | byte(protowire.VarintType) // of Room, a number
	tagSource      = 2<<3 | byte(protowire.BytesType)
	tagDestination = 3<<3 | byte(protowire.BytesType)
	tagAttempt     = 4<<3 | byte(protowire.VarintType) // a number
	tagBound       = 7<<3 | byte(protowire.BytesType)
	tagProgress    = 9<<3 | byte(protowire.BytesType)
	tagVerdict     = 11<<3 | byte(protowire.BytesType)
	tagAbort       = 12<<3 | byte(protowire.BytesType)
	tagDrained     = 13<<3 | byte(protowire.BytesType)
)

// maxSmall is the size of the largest frame of the short way, so that every length in it is one byte.
const maxSmall = 0x7f

func appendBatch(b []byte, m *wire.Batch) ([]byte, error) {
	for _, f := range m.GetFrames() {
		b = append(b, tagFrame, 0, tagRoom, 0)
		at := len(b)
		if small, ok := appendRoom(b, f.GetRoom()); ok {
			b = small
			b[at-1], b[at-3] = byte(len(b)-at), byte(len(b)-at+2)
			continue
		}
		b = protowire.AppendVarint(b[:at-3], uint64(proto.Size(f)))
		var err error
		if b, err = (proto.MarshalOptions{UseCachedSize: true}).MarshalAppend(b, f); err != nil {
			return nil, err
		}
	}
	return b, nil
}

// appendRoom writes a room of the short way; false for another.
func appendRoom(b []byte, r *wire.Room) (_ []byte, ok bool) {
	at := len(b)
	b = appendNumber(b, tagNumber, r.GetRoom())
	b = appendOpener(b, tagSource, r.GetSource())
	b = appendOpener(b, tagDestination, r.GetDestination())
	b = appendNumber(b, tagAttempt, r.GetAttempt())
	switch k := r.GetKind().(type) {
	case *wire.Room_Bound:
		b = appendTwo(b, tagBound, one(k.Bound.GetNeedPages()), 0)
	case *wire.Room_Progress:
		b = appendTwo(b, tagProgress, k.Progress.GetBytes(), one(k.Progress.GetOutstanding()))
	case *wire.Room_Verdict:
		b = appendTwo(b, tagVerdict, uint64(k.Verdict.GetOutcome()), uint64(k.Verdict.GetReason()))
	case *wire.Room_Abort:
		b = appendTwo(b, tagAbort, uint64(k.Abort.GetReason()), 0)
	case *wire.Room_Drained:
		b = append(b, tagDrained, 0)
	default:
		return b, false
	}
	return b, len(b)-at <= maxSmall-2
}

func one(set bool) uint64 {
	if set {
		return 1
	}
	return 0
}

// appendNumber writes a varint field, which proto3 leaves out when it is 0.
func appendNumber(b []byte, tag byte, v uint64) []byte {
	if v == 0 {
		return b
	}
	return protowire.AppendVarint(append(b, tag), v)
}

// appendTwo writes a message whose only fields are the numbers 1 and 2.
func appendTwo(b []byte, tag byte, first, second uint64) []byte {
	b = append(b, tag, 0)
	at := len(b)
	b = appendNumber(b, tagNumber, first)
	b = appendNumber(b, 2<<3|byte(protowire.VarintType), second)
	b[at-1] = byte(len(b) - at)
	return b
}

func appendOpener(b []byte, tag byte, o *wire.Opener) []byte {
	if o == nil {
		return b
	}
	return appendTwo(b, tag, o.Incarnation, o.Sequence)
}

// readBatch reads a batch; false: it is not for us, and m may hold a part of it.
func readBatch(b []byte, m *wire.Batch) bool {
	for len(b) > 0 {
		if b[0] != tagFrame {
			return false
		}
		frame, n := protowire.ConsumeBytes(b[1:])
		if n < 0 {
			return false
		}
		b = b[1+n:]
		f := readRoom(frame)
		if f == nil {
			f = &wire.Frame{}
			if proto.Unmarshal(frame, f) != nil {
				return false // protobuf's own way says what is wrong
			}
		}
		m.Frames = append(m.Frames, f)
	}
	return true
}

// readRoom reads a frame of the short way: one room, its fields in order and none twice. nil for another.
func readRoom(b []byte) *wire.Frame {
	if len(b) < 2 || len(b) > maxSmall || b[0] != tagRoom || int(b[1]) != len(b)-2 {
		return nil
	}
	r := reader{b: b[2:]}
	x := &struct {
		frame               wire.Frame
		body                wire.Frame_Room
		room                wire.Room
		source, destination wire.Opener
	}{}
	x.frame.Frame, x.body.Room = &x.body, &x.room
	x.room.Room = r.number(tagNumber)
	if r.message(tagSource) {
		x.source.Incarnation, x.source.Sequence = r.two()
		x.room.Source = &x.source
	}
	if r.message(tagDestination) {
		x.destination.Incarnation, x.destination.Sequence = r.two()
		x.room.Destination = &x.destination
	}
	x.room.Attempt = r.number(tagAttempt)
	switch {
	case r.message(tagBound):
		need, none := r.two()
		r.refuse(none != 0)
		x.room.Kind = &wire.Room_Bound{Bound: &wire.Bound{NeedPages: need != 0}}
	case r.message(tagProgress):
		bytes, outstanding := r.two()
		x.room.Kind = &wire.Room_Progress{Progress: &wire.Progress{Bytes: bytes, Outstanding: outstanding != 0}}
	case r.message(tagVerdict):
		outcome, reason := r.two()
		x.room.Kind = &wire.Room_Verdict{Verdict: &wire.Verdict{Outcome: wire.Outcome(outcome), Reason: uint32(reason)}}
	case r.message(tagAbort):
		reason, none := r.two()
		r.refuse(none != 0)
		x.room.Kind = &wire.Room_Abort{Abort: &wire.Abort{Reason: uint32(reason)}}
	case r.message(tagDrained):
		r.refuse(r.left > 0)
		x.room.Kind = &wire.Room_Drained{Drained: &wire.Drained{}}
	}
	if x.room.Kind == nil || r.bad || len(r.b) > 0 {
		return nil
	}
	return &x.frame
}

// reader reads the fields of a room. Once something is not as expected it stays bad.
type reader struct {
	b    []byte
	left int // bytes of the message that was begun
	bad  bool
}

func (r *reader) refuse(when bool) { r.bad = r.bad || when }

// number reads a number if it comes next, else 0.
func (r *reader) number(tag byte) uint64 {
	if r.bad || len(r.b) == 0 || r.b[0] != tag {
		return 0
	}
	v, n := protowire.ConsumeVarint(r.b[1:])
	if n < 0 || v == 0 { // a 0 that was written is not what we write
		r.bad = true
		return 0
	}
	r.b = r.b[1+n:]
	return v
}

// message begins a message if it comes next.
func (r *reader) message(tag byte) bool {
	if r.bad || len(r.b) < 2 || r.b[0] != tag {
		return false
	}
	r.left = int(r.b[1])
	r.b = r.b[2:]
	r.refuse(r.left > len(r.b))
	return !r.bad
}

// two reads the message that was begun: the numbers 1 and 2, and nothing else.
func (r *reader) two() (first, second uint64) {
	in := reader{b: r.b[:r.left]}
	first, second = in.number(tagNumber), in.number(2<<3|byte(protowire.VarintType))
	r.refuse(in.bad || len(in.b) > 0)
	r.b = r.b[r.left:]
	return first, second
}
