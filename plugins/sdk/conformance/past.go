package conformance

import (
	"fmt"
	"time"
)

// past is memory of cases that are over. It stays until the end of the run, and is looked at once more then: who writes
// to memory that was given back, or keeps it, does so in a moment that no check of the case itself can wait for.
type past struct {
	regions []*pastRegion
	bytes   uint64
}

type pastRegion struct {
	*Region
	result *Result   // of its case
	back   time.Time // when it was given back
	intact time.Time // when it was last seen to be as the ops left it
}

// What is kept: small regions, the oldest, as these have the most time to be written.
const (
	pastRegionBytes = 4 << 20
	pastBytes       = 64 << 20
)

// keep takes over a region of a case that is done with it.
func (p *past) keep(r *Region, result *Result) {
	if r.gpu != nil || r.shadow == nil || r.Size > pastRegionBytes || p.bytes+r.Size > pastBytes {
		r.free()
		return
	}
	r.closeAll() // the mapping keeps the memory
	now := time.Now()
	back := r.removed
	if back.IsZero() { // it never was the plugin's, or the plugin is gone
		back = now
	}
	p.bytes += r.Size
	p.regions = append(p.regions, &pastRegion{Region: r, result: result, back: back, intact: r.checked})
}

// look fails the cases whose memory was written since, or is still held by a process. others tells whether plugins are
// other processes than this one. It returns the results that it has changed.
func (p *past) look(others bool) (changed []*Result) {
	const expected = "nobody to keep memory that was given back, or to write to it"
	fail := func(r *pastRegion, got string) {
		if r.result.Outcome < Failed {
			changed = append(changed, r.result)
		}
		r.result.Outcome, r.result.Reason = r.result.Outcome.Raise(Failed), ""
		if len(r.result.Failures) < maxFailures {
			r.result.Failures = append(r.result.Failures, Failure{"R4", expected, got})
		}
	}
	now := time.Now()
	var regions []*Region
	for _, r := range p.regions {
		regions = append(regions, r.Region)
		if bad := r.check(); bad != "" {
			fail(r, fmt.Sprintf("%s: it was written %s to %s after RegionRemoved", bad, round(r.intact.Sub(r.back)), round(now.Sub(r.back))))
		}
	}
	if !others {
		return changed
	}
	var held map[*Region]string
	for deadline := now.Add(pastBound); ; time.Sleep(pastBound / 10) {
		// A process that this one is just starting holds all that this one does, for a moment.
		if held = holders(processes(), regions); len(held) == 0 || time.Now().After(deadline) {
			break
		}
	}
	for _, r := range p.regions {
		if held[r.Region] != "" {
			fail(r, fmt.Sprintf("%s, %s after RegionRemoved", held[r.Region], round(now.Sub(r.back))))
		}
	}
	return changed
}

// pastBound is how long memory may be held when it is looked at.
const pastBound = 500 * time.Millisecond

func round(d time.Duration) time.Duration { return d.Round(time.Millisecond) }

// free gives the memory back.
func (p *past) free() {
	for _, r := range p.regions {
		r.Region.free()
	}
	p.regions = nil
}
