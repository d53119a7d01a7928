package guest

import (
	"encoding/binary"
	"errors"
	"strings"
	"unicode/utf8"
)

// The few messages of contract.proto that a guest needs, by hand: protobuf-go would make a guest four times as
// large and as slow to compile. codec_test.go compares them with the generated code.

var errWire = errors.New("the message is malformed")

// decoder reads the fields of one message.
type decoder struct{ b []byte }

// field returns the next field: a number for varints, the bytes for what has a length. Others are passed over
// with kind -1. ok is false at the end.
func (d *decoder) field() (num, kind int, v uint64, bytes []byte, ok bool, err error) {
	if len(d.b) == 0 {
		return 0, 0, 0, nil, false, nil
	}
	tag, err := d.varint()
	if err != nil {
		return 0, 0, 0, nil, false, err
	}
	num, kind = int(tag>>3), int(tag&7)
	switch kind {
	case 0:
		v, err = d.varint()
	case 1:
		err, kind = d.skip(8), -1
	case 2:
		bytes, err = d.bytes()
	case 5:
		err, kind = d.skip(4), -1
	default:
		err = errWire
	}
	if err != nil || num == 0 {
		return 0, 0, 0, nil, false, errWire
	}
	return num, kind, v, bytes, true, nil
}

func (d *decoder) varint() (uint64, error) {
	v, n := binary.Uvarint(d.b)
	if n <= 0 {
		return 0, errWire
	}
	d.b = d.b[n:]
	return v, nil
}

func (d *decoder) bytes() ([]byte, error) {
	n, err := d.varint()
	if err != nil || n > uint64(len(d.b)) {
		return nil, errWire
	}
	b := d.b[:n]
	d.b = d.b[n:]
	return b, nil
}

func (d *decoder) skip(n int) error {
	if n > len(d.b) {
		return errWire
	}
	d.b = d.b[n:]
	return nil
}

// each calls f for every field of a message.
func each(b []byte, f func(num int, v uint64, bytes []byte) error) error {
	d := decoder{b}
	for {
		num, kind, v, bytes, ok, err := d.field()
		if err != nil || !ok {
			return err
		}
		if kind < 0 {
			continue
		}
		if err := f(num, v, bytes); err != nil {
			return err
		}
	}
}

// numbers appends a repeated uint32, packed or not.
func numbers(list []uint32, v uint64, bytes []byte) ([]uint32, error) {
	if bytes == nil {
		return append(list, uint32(v)), nil
	}
	for d := (decoder{bytes}); len(d.b) > 0; {
		v, err := d.varint()
		if err != nil {
			return nil, err
		}
		list = append(list, uint32(v))
	}
	return list, nil
}

func decodeStart(b []byte) (s Start, err error) {
	err = each(b, func(num int, v uint64, bytes []byte) error {
		switch num {
		case 3:
			s.Node = string(bytes)
		case 4:
			s.Incarnation = v
		case 5:
			s.Epoch = uint32(v)
		case 6:
			s.Config = append([]byte(nil), bytes...)
		}
		return nil
	})
	return s, err
}

// decodeFrame hands the events of a HostFrame to the session.
func decodeFrame(b []byte, s *session) error {
	return each(b, func(num int, _ uint64, event []byte) error {
		if num != 1 {
			return nil
		}
		return each(event, func(num int, _ uint64, m []byte) error { return decodeEvent(num, m, s) })
	})
}

func decodeEvent(num int, m []byte, s *session) error {
	switch num {
	case 1, 2: // RegionAdd, RegionRemove
		var id uint64
		if err := each(m, func(num int, v uint64, _ []byte) error { set(num == 1, &id, v); return nil }); err != nil {
			return err
		}
		if num == 1 {
			s.regionAdd(id)
		} else {
			s.regionRemove(id)
		}
	case 3: // PoolAdd
		p, err := decodePool(m)
		if err != nil {
			return err
		}
		s.pools[p.ID] = p
	case 4: // PoolRemove
		var id uint64
		if err := each(m, func(num int, v uint64, _ []byte) error { set(num == 1, &id, v); return nil }); err != nil {
			return err
		}
		delete(s.pools, id)
	case 5: // PeerAdd
		var p Peer
		err := each(m, func(num int, v uint64, bytes []byte) error {
			switch num {
			case 1:
				p.Handle = uint32(v)
			case 2:
				p.Node = string(bytes)
			case 3:
				p.Incarnation = v
			case 4:
				p.Epoch = uint32(v)
			}
			return nil
		})
		if err != nil {
			return err
		}
		s.peerAdd(p)
	case 7: // PeerRemove
		var id uint64
		if err := each(m, func(num int, v uint64, _ []byte) error { set(num == 1, &id, v); return nil }); err != nil {
			return err
		}
		s.peerRemove(uint32(id))
	case 8, 20: // RemotePoolAdd, RemotePoolRemove
		var peer, id uint64
		var pool *Pool
		err := each(m, func(field int, v uint64, bytes []byte) (err error) {
			switch {
			case field == 1:
				peer = v
			case field == 2 && num == 8:
				pool, err = decodePool(bytes)
			case field == 2:
				id = v
			}
			return err
		})
		if err != nil {
			return err
		}
		if pool != nil {
			s.remote[remoteKey{uint32(peer), pool.ID}] = pool
		} else {
			delete(s.remote, remoteKey{uint32(peer), id})
		}
	case 9: // PlanAdd
		return decodePlan(m, s)
	case 10: // PlanRemove
		var id uint64
		if err := each(m, func(num int, v uint64, _ []byte) error { set(num == 1, &id, v); return nil }); err != nil {
			return err
		}
		delete(s.plans, id)
	case 11: // Submit
		return decodeSubmit(m, s)
	case 12: // AbortOp
		var id uint64
		if err := each(m, func(num int, v uint64, _ []byte) error { set(num == 1, &id, v); return nil }); err != nil {
			return err
		}
		s.abort(id)
	}
	return nil // what a newer engine says is ignored
}

func set(is bool, to *uint64, v uint64) {
	if is {
		*to = v
	}
}

func decodePool(b []byte) (*Pool, error) {
	p := &Pool{}
	err := each(b, func(num int, v uint64, bytes []byte) error {
		switch num {
		case 1:
			p.ID = v
		case 2:
			p.Pages = uint32(v)
		case 3:
			var t Tensor
			err := each(bytes, func(num int, v uint64, _ []byte) error {
				switch num {
				case 1:
					t.Region = v
				case 2:
					t.Offset = v
				case 3:
					t.PageStride = v
				case 4:
					t.PageBytes = v
				case 5:
					t.Layer = uint32(v)
				}
				return nil
			})
			p.Tensors = append(p.Tensors, t)
			return err
		}
		return nil
	})
	return p, err
}

func decodePlan(b []byte, s *session) error {
	p := &Plan{}
	var src, dst uint64
	err := each(b, func(num int, v uint64, bytes []byte) error {
		switch num {
		case 1:
			p.ID = v
		case 2:
			src = v
		case 3:
			p.Peer = uint32(v)
		case 4:
			dst = v
		case 5:
			p.SrcPages = uint32(v)
		case 6:
			p.DstPages = uint32(v)
		case 7:
			slice, err := decodeSlice(bytes)
			p.Slices = append(p.Slices, slice)
			return err
		}
		return nil
	})
	if err == nil {
		s.planAdd(p, src, dst)
	}
	return err
}

func decodeSlice(b []byte) (s Slice, err error) {
	err = each(b, func(num int, v uint64, _ []byte) error {
		switch num {
		case 1:
			s.SrcTensor = uint32(v)
		case 2:
			s.DstTensor = uint32(v)
		case 3:
			s.SrcOff = v
		case 4:
			s.DstOff = v
		case 5:
			s.Len = v
		case 6:
			s.SrcStride = v
		case 7:
			s.DstStride = v
		case 8:
			s.Count = uint32(v)
		case 9:
			s.SrcPage = uint32(v)
		case 10:
			s.DstPage = uint32(v)
		}
		return nil
	})
	return s, err
}

func decodeSubmit(b []byte, s *session) error {
	o := &Op{}
	var plan uint64
	err := each(b, func(num int, v uint64, bytes []byte) (err error) {
		switch num {
		case 1:
			o.ID = v
		case 6:
			plan = v
		case 7:
			o.Source, err = decodeRuns(bytes)
		case 8:
			o.Destination, err = decodeRuns(bytes)
		case 9:
			o.LayerFrom = uint32(v)
		case 10:
			o.LayerTo = uint32(v)
		case 11:
			o.Priority = int32(uint32(v)>>1) ^ -int32(v&1)
		case 13:
			o.Bytes = v
		}
		return err
	})
	if err == nil {
		s.submit(o, plan)
	}
	return err
}

func decodeRuns(b []byte) ([]Run, error) {
	var start, count, stride []uint32
	err := each(b, func(num int, v uint64, bytes []byte) (err error) {
		switch num {
		case 1:
			start, err = numbers(start, v, bytes)
		case 2:
			count, err = numbers(count, v, bytes)
		case 3:
			stride, err = numbers(stride, v, bytes)
		}
		return err
	})
	if err != nil || len(count) != len(start) || len(stride) != 0 && len(stride) != len(start) {
		return nil, errWire
	}
	runs := make([]Run, len(start))
	for i := range runs {
		runs[i] = Run{start[i], count[i], 1}
		if len(stride) != 0 {
			runs[i].Stride = stride[i]
		}
	}
	return runs, nil
}

// encoder makes a PluginFrame, event by event.
type encoder struct {
	b []byte
	m []byte // of the event
}

func (e *encoder) num(field int, v uint64) {
	if v != 0 {
		e.m = binary.AppendUvarint(e.m, uint64(field)<<3)
		e.m = binary.AppendUvarint(e.m, v)
	}
}

func (e *encoder) flag(field int, v bool) {
	if v {
		e.num(field, 1)
	}
}

func (e *encoder) text(field int, v string) {
	if v == "" {
		return
	}
	e.raw(field, []byte(strings.ToValidUTF8(v, "\uFFFD")))
}

func (e *encoder) raw(field int, v []byte) {
	if len(v) == 0 {
		return
	}
	e.m = binary.AppendUvarint(e.m, uint64(field)<<3|2)
	e.m = binary.AppendUvarint(e.m, uint64(len(v)))
	e.m = append(e.m, v...)
}

// event ends the message and puts it into the frame as PluginEvent with that field.
func (e *encoder) event(field int) {
	var head [20]byte
	inner := binary.AppendUvarint(head[:0], uint64(field)<<3|2)
	inner = binary.AppendUvarint(inner, uint64(len(e.m)))
	e.b = append(e.b, 1<<3|2)
	e.b = binary.AppendUvarint(e.b, uint64(len(inner)+len(e.m)))
	e.b = append(e.b, inner...)
	e.b = append(e.b, e.m...)
	e.m = e.m[:0]
}

// laneShm is LANE_SHM: the host moves the bytes.
const laneShm = 3

// maxDetail is the longest detail of an event.
const maxDetail = 256

func cut(s string) string {
	if len(s) <= maxDetail {
		return s
	}
	n := maxDetail
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

func (e *encoder) regionReady(id uint64)   { e.num(1, id); e.event(1) }
func (e *encoder) regionRemoved(id uint64) { e.num(1, id); e.event(3) }
func (e *encoder) peerReady(h uint32)      { e.num(1, uint64(h)); e.num(2, laneShm); e.event(4) }
func (e *encoder) peerRemoved(h uint32)    { e.num(1, uint64(h)); e.event(6) }
func (e *encoder) accepted(op uint64)      { e.num(1, op); e.event(7) }
func (e *encoder) aborted(op uint64)       { e.num(1, op); e.flag(2, true); e.event(12) }

func (e *encoder) peerFailed(h uint32, cause Cause, detail string) {
	e.num(1, uint64(h))
	e.num(2, uint64(cause))
	e.text(3, cut(detail))
	e.event(5)
}

func (e *encoder) progress(op, bytes uint64) {
	e.num(1, op)
	e.num(2, bytes)
	e.event(8)
}

func (e *encoder) done(op, bytes uint64) {
	e.num(1, op)
	e.num(2, bytes)
	e.flag(3, true)
	e.num(4, laneShm)
	e.event(9)
}

func (e *encoder) failed(op uint64, cause Cause, detail string) {
	e.num(1, op)
	e.num(2, uint64(cause))
	e.text(3, cut(detail))
	e.flag(4, true)
	e.event(10)
}

func (e *encoder) skipped(op uint64, cause Cause, detail string) {
	e.num(1, op)
	e.num(2, uint64(cause))
	e.text(3, cut(detail))
	e.flag(4, true)
	e.event(11)
}

// describe makes the HandshakeResponse of DESCRIBE.
func describe(i Info) []byte {
	limits := encoder{}
	limits.num(1, uint64(i.MaxOps))
	limits.num(3, i.MaxOpBytes)
	e := encoder{}
	e.text(2, i.Name)
	e.text(3, i.Version)
	for _, f := range i.Features {
		e.text(6, f)
	}
	e.raw(8, limits.m)
	e.text(9, i.ConfigSchema)
	return e.m
}

// callResult makes the CallResult of engine_v1_call.
func callResult(payload []byte, err error) []byte {
	e := encoder{}
	if err != nil {
		e.num(1, 2)
		e.text(2, err.Error())
		return e.m
	}
	e.num(1, 1)
	e.raw(3, payload)
	return e.m
}
