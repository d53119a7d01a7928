package core

import (
	"math/rand/v2"
	"testing"

	"github.com/terminus-kv/terminus/core/statemachine"
)

// TestIndex: the index agrees with a map whatever comes and goes, also when all keys collide.
func TestIndex(t *testing.T) {
	for _, seed := range []uint64{1, 0} {
		m, err := New(Config{Incarnation: 1, Clocks: DefaultClocks(), Limits: DefaultLimits()})
		if err != nil {
			t.Fatal(err)
		}
		spread := int64(1)
		if m.heads.seed = seed; seed == 0 {
			spread = 1 << 40 // with no seed the low bits of the hash, which say where a probe begins, are few
		}
		rng := rand.New(rand.NewPCG(seed, 1))
		want := map[roomKey]int32{}
		for range 20_000 {
			id, role := spread*int64(rng.IntN(200)), statemachine.Role(1+rng.IntN(2))
			k := keyOf(id, role)
			idx, there := want[k]
			if !there {
				idx = nil32
			}
			if got := m.head(k); got != idx {
				t.Fatalf("seed %d: head %d, want %d", seed, got, idx)
			}
			if there {
				m.dropHead(k)
				m.rooms.del(idx)
				delete(want, k)
				continue
			}
			idx = m.rooms.alloc()
			r := m.rooms.at(idx)
			r.id, r.sm.Role = id, role
			m.setHead(k, idx)
			want[k] = idx
		}
		if m.heads.used != len(want) {
			t.Fatalf("seed %d: %d in use, want %d", seed, m.heads.used, len(want))
		}
		for k := range want {
			m.dropHead(k)
		}
		for _, s := range m.heads.slots {
			if s.at != 0 {
				t.Fatal("a slot is left")
			}
		}
	}
}
