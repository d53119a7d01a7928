package sim

import "time"

// dice is a small generator (splitmix64). Each thing that draws has its own, seeded by what it is, so that
// leaving out one fault or one room changes little of the rest of a schedule.
type dice uint64

func roll(parts ...uint64) dice {
	h := uint64(0x9E3779B97F4A7C15)
	for _, p := range parts {
		h = mix(h ^ mix(p+0x9E3779B97F4A7C15))
	}
	return dice(h)
}

func mix(z uint64) uint64 {
	z = (z ^ z>>30) * 0xBF58476D1CE4E5B9
	z = (z ^ z>>27) * 0x94D049BB133111EB
	return z ^ z>>31
}

func (d *dice) next() uint64 {
	*d += 0x9E3779B97F4A7C15
	return mix(uint64(*d))
}

// n is uniform in [0, n); n must be positive.
func (d *dice) n(n int) int { return int(d.next() >> 33 % uint64(n)) }

// in is uniform in [a, b).
func (d *dice) in(a, b time.Duration) int64 {
	return int64(a) + int64(d.next()>>1%uint64(b-a))
}

// one tells true once in n times.
func (d *dice) one(n int) bool { return d.next()>>33%uint64(n) == 0 }

// spread is a duration whose order of magnitude is uniform: most are short, a few are very long.
func (d *dice) spread(a, b time.Duration) int64 {
	lo, hi := int64(a), int64(b)
	for hi > 2*lo && d.next()&1 == 0 {
		lo *= 2
	}
	return lo + int64(d.next()>>1%uint64(max(min(lo, hi-lo), 1)))
}
