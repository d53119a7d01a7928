package core

import (
	"hash/maphash"
	"math/bits"
	"slices"
)

// index finds the newest record of a room and role: a hash table with linear probing. Of a key it keeps
// 32 bits of its hash, the rest is in the record. That is a third of what a map takes, and one cache line
// a lookup.
type index struct {
	slots []indexSlot // a power of two, at most three quarters in use
	used  int
	seed  uint64 // secret: nobody can choose room ids that collide
}

type indexSlot struct {
	hash uint32 // where a probe for the key begins, modulo the length
	at   int32  // the record plus one; 0: empty
}

func newIndex() index {
	return index{slots: make([]indexSlot, 8), seed: new(maphash.Hash).Sum64()}
}

// emptied is an index without records in the memory of this one, a new one if it has none.
func (x *index) emptied() index {
	if x.slots == nil {
		return newIndex()
	}
	clear(x.slots)
	return index{slots: x.slots, seed: x.seed}
}

func (x *index) clone() index {
	c := *x
	c.slots = slices.Clone(x.slots)
	return c
}

func (x *index) hash(k roomKey) uint32 {
	hi, lo := bits.Mul64(uint64(k)^x.seed, 0x9e3779b97f4a7c15)
	return uint32(hi ^ lo)
}

// slotOf is where the key is, or the empty slot where it would be, and the key's hash.
func (m *Machine) slotOf(k roomKey) (slot int, hash uint32) {
	x := &m.heads
	hash = x.hash(k)
	mask := len(x.slots) - 1
	for i := int(hash) & mask; ; i = (i + 1) & mask {
		s := &x.slots[i]
		if s.at == 0 {
			return i, hash
		}
		if s.hash == hash {
			if r := m.rooms.at(s.at - 1); keyOf(r.id, r.sm.Role) == k {
				return i, hash
			}
		}
	}
}

// head is the newest record of a key; nil32 when there is none.
func (m *Machine) head(k roomKey) int32 {
	i, _ := m.slotOf(k)
	return m.heads.slots[i].at - 1
}

// setHead makes a record the newest of its key.
func (m *Machine) setHead(k roomKey, idx int32) {
	x := &m.heads
	i, hash := m.slotOf(k)
	if x.slots[i].at == 0 {
		x.used++
	}
	x.slots[i] = indexSlot{hash, idx + 1}
	if x.used > len(x.slots)/4*3 {
		x.grow()
	}
}

func (x *index) grow() {
	old := x.slots
	x.slots = make([]indexSlot, 2*len(old))
	mask := len(x.slots) - 1
	for _, s := range old {
		if s.at == 0 {
			continue
		}
		i := int(s.hash) & mask
		for x.slots[i].at != 0 {
			i = (i + 1) & mask
		}
		x.slots[i] = s
	}
}

// dropHead forgets a key that has one record, which is still there. What lies behind moves up, so that no
// probe ends too early.
func (m *Machine) dropHead(k roomKey) {
	x := &m.heads
	mask := len(x.slots) - 1
	hole, _ := m.slotOf(k)
	for i := (hole + 1) & mask; x.slots[i].at != 0; i = (i + 1) & mask {
		if (i-int(x.slots[i].hash))&mask >= (i-hole)&mask { // its probe passes the hole
			x.slots[hole] = x.slots[i]
			hole = i
		}
	}
	x.slots[hole] = indexSlot{}
	x.used--
}
