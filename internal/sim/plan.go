package sim

import (
	"fmt"
	"strings"
	"time"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// faultKind is something that goes wrong.
type faultKind uint8

const (
	killEngine faultKind = iota // kill -9; a new incarnation starts later
	stopEngine                  // SIGSTOP, SIGCONT
	pauseClock                  // the machine sleeps: as stopEngine, and the engine's clock stands still
	killPlugin
	stopPlugin
	upgradePlugin // an operator starts a new epoch beside the one that serves
	killWorker
	cutLink     // the stream is reset
	blockOneWay // nothing arrives in one direction
	blockBoth   // nothing arrives in both
	splitOneWay // nothing arrives from some engines at all the others
	splitBoth   // nor the other way
	slowLink    // frames take hundreds of milliseconds
	overtakes   // all that may overtake does, and what it may overtake takes hundreds of milliseconds
	duplicates  // frames arrive twice
	slowOps     // transfers are a hundred times slower
	lateWrites  // ops end before their last bytes have landed, and land them much later
	failOps     // ops fail, are skipped, or are done without being quiet
	drainEngine // an operator drains and replaces an engine
	adminAborts // an operator aborts rooms
	storeOutage // the coordination store is down: nobody finds a new incarnation
	noFault     // left out
	numFaults   // not a fault
)

var faultNames = [numFaults]string{
	"kill-engine", "stop-engine", "pause-clock", "kill-plugin", "stop-plugin", "upgrade-plugin", "kill-worker", "cut-link", "block-one-way", "block-both",
	"split-one-way", "split-both", "slow-link", "reorder", "duplicate", "slow-ops", "late-writes", "fail-ops", "drain-engine", "admin-aborts", "store-outage", "left out",
}

func (k faultKind) String() string { return faultNames[k] }

// plannedFault strikes its target at a time. Instant ones have no duration; kills last until the restart.
type plannedFault struct {
	kind faultKind
	at   int64
	last int64 // ns
	a, b int32 // engines, or the worker; of one-way faults from a to b
	set  uint8 // of splits: the engines of one part, a bit each
}

func (f *plannedFault) String() string {
	at := time.Duration(f.at).Round(time.Millisecond)
	last := time.Duration(f.last).Round(time.Millisecond)
	switch f.kind {
	case cutLink, blockOneWay, blockBoth, slowLink, overtakes, duplicates:
		return fmt.Sprintf("%v at %v between %s and %s for %v", f.kind, at, engineName(f.a), engineName(f.b), last)
	case splitOneWay, splitBoth:
		var part strings.Builder
		for e := range int32(maxEngines) {
			if f.set>>e&1 != 0 {
				part.WriteString(engineName(e))
			}
		}
		return fmt.Sprintf("%v at %v between %s and the others for %v", f.kind, at, &part, last)
	case storeOutage:
		return fmt.Sprintf("%v at %v for %v", f.kind, at, last)
	}
	return fmt.Sprintf("%v at %v of %s for %v", f.kind, at, engineName(f.a), last)
}

func engineName(i int32) string { return string(rune('A' + i)) }

// groupSpec is the workers of one model instance with one role, and the engine of each rank.
type groupSpec struct {
	role statemachine.Role
	name string
	at   [maxRanks]int32
}

// request is one request of the router: a room between two groups.
type request struct {
	room     int64
	src, dst int32 // groups
	at       int64
	delay    [3]int64 // of the open, by role; negative: that side never opens
	pages    int32    // of each rank of the destination
	prefix   int32    // that it holds already
	sent     int32    // of each rank of the source
	tokens   int32    // of the sequence
	chunks   int32
	early    bool              // the source sends before it is bound
	named    bool              // the source says for which group the room is
	layered  bool              // the source sends one layer of its pages after the other
	abort    statemachine.Role // who aborts; 0: nobody
	abortIn  int64             // after at
	deadline int64
	tries    int
	out      bool // left out
}

// Plan is everything of a schedule that is decided before it runs.
type plan struct {
	seed     uint64
	engines  int32
	shape    [3]shape   // of groups, by role
	mapped   layout.Map // of source's pages to destination's
	checked  bool       // the plugins check the receiver
	pages    int32
	tight    bool            // the engines' limits are small
	budget   core.Quarantine // zero: an operator kills what pages rest with
	retire   time.Duration   // Clocks.Retire, 0: its default
	window   time.Duration   // over which requests and faults are spread
	spans    bool            // ranks of a group sit on several engines
	groups   []groupSpec
	requests []request
	faults   []plannedFault
}

const (
	maxEngines = 8
	maxRanks   = 4
)

// longest is the longest time over which the requests and faults of a schedule are spread.
const longest = 4 * time.Second

// groupNames are the names of groups by engine and role.
var groupNames = func() (names [maxEngines][statemachine.Destination + 1]string) {
	for e := range names {
		for role := statemachine.Source; role <= statemachine.Destination; role++ {
			names[e][role] = fmt.Sprintf("%s-%s", engineName(int32(e)), role)
		}
	}
	return names
}()

// draw makes the plan of a seed.
func draw(seed uint64) *plan {
	p := new(plan)
	p.draw(seed)
	return p
}

// draw makes p the plan of a seed, in the memory of what it was.
func (p *plan) draw(seed uint64) {
	d := roll(seed, 1)
	*p = plan{
		seed: seed, engines: 2, checked: !d.one(3), pages: int32(8 + d.n(40)), window: time.Duration(d.spread(20*time.Millisecond, longest)),
		groups: p.groups[:0], requests: p.requests[:0], faults: p.faults[:0],
	}
	switch {
	case d.one(16):
		p.engines = int32(4 + d.n(5))
	case d.one(4):
		p.engines = 3
	}
	ranks := int32(1)
	if d.one(6) {
		ranks = 2
	}
	if p.shape[statemachine.Source], p.shape[statemachine.Destination] = plain(ranks), plain(ranks); ranks > 1 && !d.one(4) {
		p.unequal(roll(seed, 14), [3]int32{})
	}
	p.tight = d.one(8)
	if !d.one(4) { // that it has an age makes every page come back
		p.budget = core.Quarantine{Share: int32(d.n(3) * 1000), Age: time.Duration(d.in(time.Second, 30*time.Second))}
	}
	if d.one(4) {
		p.retire = time.Duration(d.spread(time.Millisecond, 10*time.Second))
	}
	both := d.one(8)
	for e := range p.engines {
		role := statemachine.Source
		if e == 1 || e > 1 && d.one(2) {
			role = statemachine.Destination
		}
		p.groups = append(p.groups, atOne(e, role))
		if both {
			p.groups = append(p.groups, atOne(e, statemachine.Source+statemachine.Destination-role))
		}
	}
	requests := 8 + d.n(9)
	if s := roll(seed, 15); s.one(6) {
		p.span(s)
		requests /= 2 // each is the work of several engines
	}
	for i := range requests {
		p.requests = append(p.requests, p.request(roll(seed, 2, uint64(i)), int64(i)))
	}
	p.swarm(roll(seed, 3))
}

func (p *plan) request(d dice, room int64) request {
	r := request{room: room, at: d.in(0, p.window), pages: int32(1 + d.n(4)), chunks: int32(1 + d.n(3)), early: d.one(4), tries: 1 + d.n(2)}
	r.src, r.dst = p.pick(&d, statemachine.Source), p.pick(&d, statemachine.Destination)
	for role := statemachine.Source; role <= statemachine.Destination; role++ {
		if r.delay[role] = d.spread(time.Microsecond, 100*time.Millisecond); d.one(16) {
			r.delay[role] = d.spread(time.Millisecond, 8*time.Second)
		}
	}
	if d.one(80) {
		r.delay[1+d.n(2)] = -1
	}
	if d.one(6) {
		r.prefix = int32(d.n(int(r.pages) + 1))
	}
	r.lengths(p, &d)
	if d.one(6) {
		r.abort, r.abortIn = statemachine.Role(1+d.n(2)), d.spread(time.Microsecond, 2*time.Second)
	}
	if d.one(24) {
		r.deadline = d.in(time.Second, 8*time.Second)
	}
	r.named = p.spans && d.one(2)
	r.layered = p.shape[statemachine.Source].layers > 1 && d.one(3)
	return r
}

// pick draws a group of a role.
func (p *plan) pick(d *dice, role statemachine.Role) int32 {
	for {
		if i := d.n(len(p.groups)); p.groups[i].role == role {
			return int32(i)
		}
	}
}

// swarm draws which kinds of faults this schedule knows at all, then the faults. That some schedules know
// only a few finds more than all of everything everywhere (Groce et al., Swarm Testing, ISSTA 2012).
func (p *plan) swarm(d dice) {
	if d.one(32) {
		return // calm
	}
	var all [numFaults]faultKind
	kinds := all[:0]
	for k := range noFault {
		if d.one(3) {
			kinds = append(kinds, k)
		}
	}
	if len(kinds) == 0 {
		kinds = append(kinds, faultKind(d.n(int(noFault))))
	}
	for range 1 + d.n(6) {
		f := plannedFault{kind: kinds[d.n(len(kinds))], at: d.in(0, p.window+p.window/4), last: d.spread(time.Millisecond, 20*time.Second), a: int32(d.n(int(p.engines)))}
		switch f.kind {
		case splitOneWay, splitBoth: // neither none nor all
			f.set = uint8(1 + d.n(1<<p.engines-2))
		case cutLink, blockOneWay, blockBoth, slowLink, overtakes, duplicates:
			if f.b = int32(d.n(int(p.engines) - 1)); f.b >= f.a {
				f.b++
			}
		case killWorker:
			f.b = int32(d.next() >> 40)
		}
		p.faults = append(p.faults, f)
	}
}

// calm tells whether nothing that may fail a room is planned.
func (p *plan) calm() bool {
	// Where limits are small a room may wait for long behind one that waits; so it may where two ranks give
	// their pages to rooms in different orders.
	if p.tight || max(p.shape[statemachine.Source].Ranks, p.shape[statemachine.Destination].Ranks) > 1 {
		return false
	}
	for i := range p.requests { // or for the pages of one that waits for its other side
		if r := &p.requests[i]; !r.out && (r.delay[1] < 0 || r.delay[2] < 0) {
			return false
		}
	}
	for i := range p.faults {
		if k := p.faults[i].kind; k != storeOutage && k != upgradePlugin && k != noFault {
			return false
		}
	}
	return true
}

// String is the plan in lines: what there is, the faults and the requests by their numbers.
func (p *plan) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "seed %d: %d engines, pools of %d pages, receivers checked: %v\n", p.seed, p.engines, p.pages, p.checked)
	for role := statemachine.Source; role <= statemachine.Destination; role++ {
		s := &p.shape[role]
		fmt.Fprintf(&b, "%s groups: %d ranks", role, s.Ranks)
		if !p.mapped.IsZero() {
			fmt.Fprintf(&b, ", %s of %d heads, pages of %d tokens, %s", s.Kind, s.KVHeads, s.PageTokens, s.Order)
		}
		b.WriteByte('\n')
	}
	for i := range p.groups {
		if g := &p.groups[i]; p.spans {
			fmt.Fprintf(&b, "%s:", g.name)
			for rank := range p.shape[g.role].Ranks {
				fmt.Fprintf(&b, " rank %d at %s", rank, engineName(g.at[rank]))
			}
			b.WriteByte('\n')
		}
	}
	if p.budget.Age > 0 {
		fmt.Fprintf(&b, "a plugin is replaced when pages rest with it for %v, or %d %% of a pool's\n", p.budget.Age.Round(time.Millisecond), p.budget.Share/100)
	}
	if p.retire > 0 {
		fmt.Fprintf(&b, "what a retiring plugin has gets at least %v\n", p.retire.Round(time.Millisecond))
	}
	for i := range p.faults {
		if f := &p.faults[i]; f.kind != noFault {
			fmt.Fprintf(&b, "fault %d: %s\n", i, f)
		}
	}
	for i := range p.requests {
		r := &p.requests[i]
		if r.out {
			continue
		}
		fmt.Fprintf(&b, "request %d: at %v from %s to %s, %d pages, %d there already, %d sent in %d chunks", i, time.Duration(r.at).Round(time.Millisecond),
			p.groups[r.src].name, p.groups[r.dst].name, r.pages, r.prefix, r.sent, r.chunks)
		if r.abort != 0 {
			fmt.Fprintf(&b, ", aborted by the %s after %v", r.abort, time.Duration(r.abortIn).Round(time.Microsecond))
		}
		b.WriteByte('\n')
	}
	return b.String()
}
