package sdk

import (
	"math"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

const lengthType = byte(protowire.BytesType)

// Tags of the events that have a short way: field numbers in the oneof of HostEvent and PluginEvent.
const (
	tagSubmit   = 11<<3 | lengthType
	tagAccepted = 7<<3 | lengthType
	tagProgress = 8<<3 | lengthType
	tagDone     = 9<<3 | lengthType
	tagQuiesced = 13<<3 | lengthType
)

// countEvents returns how many events a frame holds; false when it holds anything else.
func countEvents(b []byte) (n int, ok bool) {
	for len(b) > 0 {
		if b[0] != eventTag {
			return 0, false
		}
		_, size := protowire.ConsumeBytes(b[1:])
		if size < 0 {
			return 0, false
		}
		b = b[1+size:]
		n++
	}
	return n, true
}

// eachEvent calls f with the bytes of every event of a frame that countEvents has seen.
func eachEvent(b []byte, f func(body []byte) error) error {
	for len(b) > 0 {
		body, size := protowire.ConsumeBytes(b[1:])
		if err := f(body); err != nil {
			return err
		}
		b = b[1+size:]
	}
	return nil
}

func unmarshalHostFrame(b []byte, f *contract.HostFrame) error {
	n, ok := countEvents(b)
	if !ok {
		return proto.Unmarshal(b, f)
	}
	f.Reset()
	f.Events = make([]*contract.HostEvent, 0, n)
	return eachEvent(b, func(body []byte) error {
		e := decodeSubmit(body)
		if e == nil {
			e = &contract.HostEvent{}
			if err := proto.Unmarshal(body, e); err != nil {
				return err
			}
		}
		f.Events = append(f.Events, e)
		return nil
	})
}

func unmarshalPluginFrame(b []byte, f *contract.PluginFrame) error {
	n, ok := countEvents(b)
	if !ok {
		return proto.Unmarshal(b, f)
	}
	f.Reset()
	f.Events = make([]*contract.PluginEvent, 0, n)
	return eachEvent(b, func(body []byte) error {
		e := decodePluginEvent(body)
		if e == nil {
			e = &contract.PluginEvent{}
			if err := proto.Unmarshal(body, e); err != nil {
				return err
			}
		}
		f.Events = append(f.Events, e)
		return nil
	})
}

// fields walks the fields of a message that has only field numbers below 16.
type fields struct {
	b   []byte
	bad bool // not what the short way expects
}

// next returns the next tag, 0 at the end.
func (f *fields) next() byte {
	if len(f.b) == 0 || f.bad {
		return 0
	}
	tag := f.b[0]
	f.b = f.b[1:]
	if tag < 1<<3 || tag >= 0x80 {
		f.bad = true
		return 0
	}
	return tag
}

func (f *fields) uint() uint64 {
	if len(f.b) > 0 && f.b[0] < 0x80 {
		v := uint64(f.b[0])
		f.b = f.b[1:]
		return v
	}
	v, n := protowire.ConsumeVarint(f.b)
	if n < 0 {
		f.bad = true
		return 0
	}
	f.b = f.b[n:]
	return v
}

func (f *fields) bytes() []byte {
	v, n := protowire.ConsumeBytes(f.b)
	if n < 0 {
		f.bad = true
		return nil
	}
	f.b = f.b[n:]
	return v
}

// The objects of an event lie in one piece of memory.
type (
	submitMemory struct {
		event       contract.HostEvent
		oneof       contract.HostEvent_Submit
		submit      contract.Submit
		generation  contract.Generation
		from, to    contract.Opener
		source      contract.Runs
		destination contract.Runs
		pages       [8]uint32 // of short lists of runs
		used        int
	}
	acceptedMemory struct {
		event    contract.PluginEvent
		oneof    contract.PluginEvent_Accepted
		accepted contract.Accepted
	}
	progressMemory struct {
		event    contract.PluginEvent
		oneof    contract.PluginEvent_Progress
		progress contract.Progress
	}
	doneMemory struct {
		event contract.PluginEvent
		oneof contract.PluginEvent_Done
		done  contract.Done
	}
	quiescedMemory struct {
		event    contract.PluginEvent
		oneof    contract.PluginEvent_Quiesced
		quiesced contract.Quiesced
	}
)

// link makes one event of the pieces.

func (m *submitMemory) link() *contract.HostEvent {
	m.event.Event, m.oneof.Submit = &m.oneof, &m.submit
	return &m.event
}

func (m *acceptedMemory) link() *contract.PluginEvent {
	m.event.Event, m.oneof.Accepted = &m.oneof, &m.accepted
	return &m.event
}

func (m *progressMemory) link() *contract.PluginEvent {
	m.event.Event, m.oneof.Progress = &m.oneof, &m.progress
	return &m.event
}

func (m *doneMemory) link() *contract.PluginEvent {
	m.event.Event, m.oneof.Done = &m.oneof, &m.done
	return &m.event
}

func (m *quiescedMemory) link() *contract.PluginEvent {
	m.event.Event, m.oneof.Quiesced = &m.oneof, &m.quiesced
	return &m.event
}

// decodePluginEvent returns nil for what has to be decoded by protobuf.
func decodePluginEvent(body []byte) *contract.PluginEvent {
	f := fields{b: body}
	tag := f.next()
	if tag&7 != lengthType {
		return nil
	}
	in := fields{b: f.bytes()}
	if f.bad || len(f.b) > 0 {
		return nil
	}
	var e *contract.PluginEvent
	var op, count *uint64
	var done *contract.Done
	switch tag {
	case tagAccepted:
		m := &acceptedMemory{}
		e, op = m.link(), &m.accepted.Op
	case tagProgress:
		m := &progressMemory{}
		e, op, count = m.link(), &m.progress.Op, &m.progress.Bytes
	case tagDone:
		m := &doneMemory{}
		e, op, count, done = m.link(), &m.done.Op, &m.done.Bytes, &m.done
	case tagQuiesced:
		m := &quiescedMemory{}
		e, op = m.link(), &m.quiesced.Op
	default:
		return nil
	}
	for tag := in.next(); tag != 0; tag = in.next() {
		switch {
		case tag == 1<<3:
			*op = in.uint()
		case tag == 2<<3 && count != nil:
			*count = in.uint()
		case tag == 3<<3 && done != nil:
			done.Quiet = in.uint() != 0
		case tag == 4<<3 && done != nil:
			done.Lane = contract.Lane(in.uint())
		default:
			return nil
		}
	}
	if in.bad {
		return nil
	}
	return e
}

// decodeSubmit returns nil for what has to be decoded by protobuf: other events, unknown fields, a message
// in two parts, anything that is no protobuf.
func decodeSubmit(body []byte) *contract.HostEvent {
	f := fields{b: body}
	if f.next() != tagSubmit {
		return nil
	}
	in := fields{b: f.bytes()}
	if f.bad || len(f.b) > 0 {
		return nil
	}
	m := &submitMemory{}
	s := &m.submit
	for tag := in.next(); tag != 0; tag = in.next() {
		ok := true
		switch tag {
		case 1 << 3:
			s.Op = in.uint()
		case 2 << 3:
			s.Seq = in.uint()
		case 3<<3 | lengthType:
			ok = s.Generation == nil && m.decodeGeneration(in.bytes())
			s.Generation = &m.generation
		case 4 << 3:
			s.Direction = contract.Direction(in.uint())
		case 5 << 3:
			s.Peer = uint32(in.uint())
		case 6 << 3:
			s.Plan = in.uint()
		case 7<<3 | lengthType:
			ok = s.Source == nil && m.decodeRuns(&m.source, in.bytes())
			s.Source = &m.source
		case 8<<3 | lengthType:
			ok = s.Destination == nil && m.decodeRuns(&m.destination, in.bytes())
			s.Destination = &m.destination
		case 9 << 3:
			s.LayerFrom = uint32(in.uint())
		case 10 << 3:
			s.LayerTo = uint32(in.uint())
		case 11 << 3:
			s.Priority = int32(protowire.DecodeZigZag(in.uint() & math.MaxUint32))
		case 12 << 3:
			s.DeadlineNs = in.uint()
		case 13 << 3:
			s.Bytes = in.uint()
		case 14<<3 | lengthType:
			trace := in.bytes()
			ok = utf8.Valid(trace)
			s.Trace = string(trace)
		default:
			ok = false
		}
		if !ok {
			return nil
		}
	}
	if in.bad {
		return nil
	}
	return m.link()
}

func (m *submitMemory) decodeGeneration(b []byte) bool {
	in := fields{b: b}
	for tag := in.next(); tag != 0; tag = in.next() {
		ok := false
		switch tag {
		case 1<<3 | lengthType:
			ok = m.generation.Source == nil && decodeOpener(&m.from, in.bytes())
			m.generation.Source = &m.from
		case 2<<3 | lengthType:
			ok = m.generation.Destination == nil && decodeOpener(&m.to, in.bytes())
			m.generation.Destination = &m.to
		}
		if !ok {
			return false
		}
	}
	return !in.bad
}

func decodeOpener(o *contract.Opener, b []byte) bool {
	in := fields{b: b}
	for tag := in.next(); tag != 0; tag = in.next() {
		switch tag {
		case 1 << 3:
			o.Incarnation = in.uint()
		case 2 << 3:
			o.Sequence = in.uint()
		default:
			return false
		}
	}
	return !in.bad
}

func (m *submitMemory) decodeRuns(r *contract.Runs, b []byte) bool {
	in := fields{b: b}
	for tag := in.next(); tag != 0; tag = in.next() {
		var list *[]uint32
		switch tag {
		case 1<<3 | lengthType:
			list = &r.Start
		case 2<<3 | lengthType:
			list = &r.Count
		case 3<<3 | lengthType:
			list = &r.Stride
		default:
			return false
		}
		if *list != nil || !m.decodeList(list, in.bytes()) {
			return false
		}
	}
	return !in.bad
}

// decodeList decodes packed numbers, into the event's own memory while that has room.
func (m *submitMemory) decodeList(list *[]uint32, b []byte) bool {
	n := 0
	for _, c := range b { // every number ends with a byte below 0x80
		if c < 0x80 {
			n++
		}
	}
	if n <= len(m.pages)-m.used {
		*list = m.pages[m.used : m.used : m.used+n]
		m.used += n
	} else {
		*list = make([]uint32, 0, n)
	}
	in := fields{b: b}
	for len(in.b) > 0 {
		v := in.uint()
		if in.bad {
			return false
		}
		*list = append(*list, uint32(v))
	}
	return true
}
