package explore

import (
	"bytes"
	"encoding/binary"
	"hash/maphash"
)

// store keeps every state that was met, packed: a search of an hour meets a hundred million.
type store struct {
	stride int
	blocks [][]byte // of blockStates states each
	from   [][]parent
	n      int
	table  []uint32 // open addressing: number of a state, from 1
	seed   maphash.Seed
}

const blockStates = 1 << 14

type parent struct {
	state   uint32
	ordinal uint8 // of the successor
}

// newStore keeps states that are packed into stride bytes each.
func newStore(stride int) *store {
	return &store{stride: stride, table: make([]uint32, 1<<12), seed: maphash.MakeSeed()}
}

func (s *store) packed(id uint32) []byte {
	at := int(id%blockStates) * s.stride
	return s.blocks[id/blockStates][at : at+s.stride]
}

func (s *store) parent(id uint32) parent { return s.from[id/blockStates][id%blockStates] }

// add returns the number of a state, a new one if it was not met yet.
func (s *store) add(b []byte, from parent) uint32 {
	if 4*s.n >= 3*len(s.table) {
		s.table = make([]uint32, 2*len(s.table))
		for id := range uint32(s.n) {
			s.table[s.find(s.packed(id))] = id + 1
		}
	}
	at := s.find(b)
	if s.table[at] == 0 {
		if s.n%blockStates == 0 {
			s.blocks = append(s.blocks, make([]byte, 0, blockStates*s.stride))
			s.from = append(s.from, make([]parent, 0, blockStates))
		}
		last := len(s.blocks) - 1
		s.blocks[last] = append(s.blocks[last], b...)
		s.from[last] = append(s.from[last], from)
		s.n++
		s.table[at] = uint32(s.n)
	}
	return s.table[at] - 1
}

// find is the place of a state in the table.
func (s *store) find(b []byte) uint64 {
	mask := uint64(len(s.table) - 1)
	at := maphash.Bytes(s.seed, b) & mask
	for s.table[at] != 0 && !bytes.Equal(s.packed(s.table[at]-1), b) {
		at = (at + 1) & mask
	}
	return at
}

// pack appends what a state of this configuration holds, the same number of bytes for each.
func (x *explorer) pack(b []byte, st *state) []byte {
	u32 := func(v uint32) { b = binary.LittleEndian.AppendUint32(b, v) }
	for e := range x.Sources + 1 {
		u32(st.engine[e])
		p := &st.plugin[e]
		b = append(b, p.inc, p.epoch, bit(p.down), p.gone, p.orphans)
	}
	for e := range x.Sources {
		u32(st.toD[e])
		u32(st.toP[e])
		b = append(b, byte(st.link[e]))
		b = packSide(b, st.s[e][:x.Openers])
		for k := range x.Openers {
			for c := range x.Chunks {
				w := &st.ops[e][k][c]
				b = append(b, byte(w.state)|w.d<<4|bit(w.done)<<6|bit(w.cut)<<7, w.epoch)
			}
		}
	}
	return append(packSide(b, st.d[:x.Openers]), st.faults)
}

func packSide(b []byte, side []opener) []byte {
	for i := range side {
		o := &side[i]
		b = append(b, o.seq|o.inc<<4, o.attempt|o.sent<<4, o.epoch|byte(o.end)<<4, o.pair|o.at<<4, byte(o.asked)|byte(o.flags)<<4)
	}
	return b
}

func (x *explorer) unpack(b []byte, st *state) {
	u32 := func() uint32 {
		v := binary.LittleEndian.Uint32(b)
		b = b[4:]
		return v
	}
	for e := range x.Sources + 1 {
		st.engine[e] = u32()
		st.plugin[e] = plugin{inc: b[0], epoch: b[1], down: b[2] != 0, gone: b[3], orphans: b[4]}
		b = b[5:]
	}
	for e := range x.Sources {
		st.toD[e] = u32()
		st.toP[e] = u32()
		st.link[e] = linkState(b[0])
		b = unpackSide(b[1:], st.s[e][:x.Openers])
		for k := range x.Openers {
			for c := range x.Chunks {
				st.ops[e][k][c] = op{state: opState(b[0] & 15), d: b[0] >> 4 & 3, done: b[0]&64 != 0, cut: b[0]&128 != 0, epoch: b[1]}
				b = b[2:]
			}
		}
	}
	b = unpackSide(b, st.d[:x.Openers])
	st.faults = b[0]
}

func unpackSide(b []byte, side []opener) []byte {
	for i := range side {
		side[i] = opener{
			seq: b[0] & 15, inc: b[0] >> 4, attempt: b[1] & 15, sent: b[1] >> 4, epoch: b[2] & 15, end: end(b[2] >> 4),
			pair: b[3] & 15, at: b[3] >> 4, asked: asked(b[4] & 15), flags: openerFlags(b[4] >> 4),
		}
		b = b[5:]
	}
	return b
}

func bit(b bool) byte {
	if b {
		return 1
	}
	return 0
}
