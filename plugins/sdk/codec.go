package sdk

import (
	"unicode/utf8"

	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // registers what frameCodec embeds
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// frameCodec is gRPC's protobuf codec with a short way for the events of which an op consists: Submit,
// Accepted, Progress, Done, Quiesced. Protobuf's own way takes some 2 µs an op on each side, most of it
// for a dozen small objects. The bytes are protobuf's, so the other side may be of any language, and
// whatever the short way does not expect goes protobuf's way: it is an optimisation only. A frame to be
// sent must not hold unknown fields in such an event; frames are made, not passed on.
type frameCodec struct{ encoding.CodecV2 }

func newFrameCodec() frameCodec { return frameCodec{encoding.GetCodecV2("proto")} }

// Marshal is called by gRPC for every message.
func (c frameCodec) Marshal(v any) (mem.BufferSlice, error) {
	switch f := v.(type) {
	case *contract.HostFrame:
		return marshalEvents(f.GetEvents(), submitSize, appendHostEvent)
	case *contract.PluginFrame:
		return marshalEvents(f.GetEvents(), pluginSize, appendPluginEvent)
	}
	return c.CodecV2.Marshal(v)
}

// Unmarshal is called by gRPC for every message.
func (c frameCodec) Unmarshal(data mem.BufferSlice, v any) error {
	switch f := v.(type) {
	case *contract.HostFrame:
		buf := data.MaterializeToBuffer(mem.DefaultBufferPool())
		defer buf.Free()
		return unmarshalHostFrame(buf.ReadOnlyData(), f)
	case *contract.PluginFrame:
		buf := data.MaterializeToBuffer(mem.DefaultBufferPool())
		defer buf.Free()
		return unmarshalPluginFrame(buf.ReadOnlyData(), f)
	}
	return c.CodecV2.Unmarshal(data, v)
}

// What one event usually takes at most: a good guess saves a second buffer.
const (
	submitSize = 128
	pluginSize = 24
)

// eventTag is the tag of the field `events` of both frames.
const eventTag = 1<<3 | byte(protowire.BytesType)

func marshalEvents[E any](events []E, guess int, appendEvent func([]byte, E) ([]byte, error)) (mem.BufferSlice, error) {
	guess *= len(events)
	var b []byte
	var pooled *[]byte
	pool := mem.DefaultBufferPool()
	if mem.IsBelowBufferPoolingThreshold(guess) {
		b = make([]byte, 0, guess)
	} else {
		pooled = pool.Get(guess)
		b = (*pooled)[:0]
	}
	for _, e := range events {
		var err error
		b = append(b, eventTag, 0)
		at := len(b)
		if b, err = appendEvent(b, e); err != nil {
			if pooled != nil {
				pool.Put(pooled)
			}
			return nil, err
		}
		b = setLength(b, at)
	}
	switch {
	case pooled == nil:
	case cap(b) == cap(*pooled): // not outgrown
		*pooled = b
		return mem.BufferSlice{mem.NewBuffer(pooled, pool)}, nil
	default:
		pool.Put(pooled)
	}
	return mem.BufferSlice{mem.SliceBuffer(b)}, nil
}

// setLength writes the length of b[at:] into the byte before it, and moves it when one byte is too short.
func setLength(b []byte, at int) []byte {
	n := len(b) - at
	if n < 0x80 {
		b[at-1] = byte(n)
		return b
	}
	more := protowire.SizeVarint(uint64(n)) - 1
	for range more {
		b = append(b, 0)
	}
	copy(b[at+more:], b[at:at+n])
	protowire.AppendVarint(b[:at-1], uint64(n))
	return b
}

func appendHostEvent(b []byte, e *contract.HostEvent) ([]byte, error) {
	if s, ok := e.GetEvent().(*contract.HostEvent_Submit); ok && s.Submit != nil && utf8.ValidString(s.Submit.Trace) {
		b = append(b, tagSubmit, 0)
		at := len(b)
		return setLength(appendSubmit(b, s.Submit), at), nil
	}
	return proto.MarshalOptions{}.MarshalAppend(b, e)
}

func appendPluginEvent(b []byte, e *contract.PluginEvent) ([]byte, error) {
	var tag byte
	at := len(b) + 2
	switch e := e.GetEvent().(type) {
	case *contract.PluginEvent_Accepted:
		tag = tagAccepted
		b = appendUint(append(b, tag, 0), 1, e.Accepted.GetOp())
	case *contract.PluginEvent_Progress:
		tag = tagProgress
		b = appendUint(append(b, tag, 0), 1, e.Progress.GetOp())
		b = appendUint(b, 2, e.Progress.GetBytes())
	case *contract.PluginEvent_Done:
		tag = tagDone
		b = appendUint(append(b, tag, 0), 1, e.Done.GetOp())
		b = appendUint(b, 2, e.Done.GetBytes())
		if e.Done.GetQuiet() {
			b = append(b, 3<<3, 1)
		}
		b = appendUint(b, 4, uint64(e.Done.GetLane()))
	case *contract.PluginEvent_Quiesced:
		tag = tagQuiesced
		b = appendUint(append(b, tag, 0), 1, e.Quiesced.GetOp())
	}
	if tag == 0 {
		return proto.MarshalOptions{}.MarshalAppend(b, &contract.PluginEvent{Event: e.GetEvent()})
	}
	return setLength(b, at), nil
}

// appendUint appends a varint field with a number below 16, which proto3 leaves out when it is 0.
func appendUint(b []byte, field byte, v uint64) []byte {
	if v == 0 {
		return b
	}
	return protowire.AppendVarint(append(b, field<<3), v)
}

func appendSubmit(b []byte, m *contract.Submit) []byte {
	b = appendUint(b, 1, m.Op)
	b = appendUint(b, 2, m.Seq)
	if g := m.Generation; g != nil {
		b = append(b, 3<<3|lengthType, 0)
		at := len(b)
		b = appendOpener(b, 1, g.Source)
		b = appendOpener(b, 2, g.Destination)
		b = setLength(b, at)
	}
	b = appendUint(b, 4, uint64(m.Direction))
	b = appendUint(b, 5, uint64(m.Peer))
	b = appendUint(b, 6, m.Plan)
	b = appendRuns(b, 7, m.Source)
	b = appendRuns(b, 8, m.Destination)
	b = appendUint(b, 9, uint64(m.LayerFrom))
	b = appendUint(b, 10, uint64(m.LayerTo))
	b = appendUint(b, 11, protowire.EncodeZigZag(int64(m.Priority)))
	b = appendUint(b, 12, m.DeadlineNs)
	b = appendUint(b, 13, m.Bytes)
	if m.Trace != "" {
		b = protowire.AppendString(append(b, 14<<3|lengthType), m.Trace)
	}
	return b
}

func appendOpener(b []byte, field byte, o *contract.Opener) []byte {
	if o == nil {
		return b
	}
	b = append(b, field<<3|lengthType, 0)
	at := len(b)
	b = appendUint(b, 1, o.Incarnation)
	b = appendUint(b, 2, o.Sequence)
	return setLength(b, at)
}

func appendRuns(b []byte, field byte, r *contract.Runs) []byte {
	if r == nil {
		return b
	}
	b = append(b, field<<3|lengthType, 0)
	at := len(b)
	for i, list := range [...][]uint32{r.Start, r.Count, r.Stride} {
		if len(list) == 0 {
			continue
		}
		b = append(b, byte(i+1)<<3|lengthType, 0)
		values := len(b)
		for _, v := range list {
			b = protowire.AppendVarint(b, uint64(v))
		}
		b = setLength(b, values)
	}
	return setLength(b, at)
}
