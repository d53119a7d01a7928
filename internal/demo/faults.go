package demo

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// The faults, by the names that --faults takes.
const (
	faultPlugin = "plugin" // SIGKILL to the transfer plugin of one side
	faultEngine = "engine" // SIGKILL to the decode engine, which is started again
	faultWorker = "worker" // SIGKILL to one worker, in whose place a new one is started
	faultPause  = "pause"  // SIGSTOP to one engine, SIGCONT after pauseTime
	faultLink   = "link"   // the connection between the engines is cut for cutTime
	faultStore  = "store"  // SIGKILL to the membership's store, which is started again after storeTime

	faultUpgrade = "upgrade" // a new process of the transfer plugin of one side; no fault, and by --upgrade alone

	faultsAll  = "all"
	faultsNone = "none"
)

// FaultNames lists what --faults takes, beside all and none: the last, the store, where there is one.
func FaultNames() []string {
	return []string{faultPlugin, faultEngine, faultWorker, faultPause, faultLink, faultStore}
}

// allFaults are those that --faults all stands for.
func allFaults(peers string) []string {
	names := FaultNames()
	if peers != PeersEtcd {
		names = names[:len(names)-1]
	}
	return names
}

// How long the faults last that end by themselves.
const (
	pauseTime = 3 * time.Second // longer than clocks.peer_suspect, shorter than peer_dead
	cutTime   = time.Second
)

// Bounds of a fault.
const (
	burstMost   = 64                    // rooms that arrive at once before a fault strikes
	calm        = 4                     // rooms that may be under way when a burst comes
	calmWait    = 5 * time.Second       // until there are so few
	burstWait   = 3 * time.Second       // until nearly all of the burst are open at the decode worker, and then some at the other
	strikeMost  = 20 * time.Millisecond // from then until the strike
	repairTime  = 45 * time.Second      // from the strike until what it broke is there again
	recoverTime = 30 * time.Second      // from then until a room that was opened since succeeds
)

// faultKinds reads --faults.
func faultKinds(text, peers string) ([]string, error) {
	switch text {
	case faultsAll:
		return allFaults(peers), nil
	case faultsNone, "":
		return nil, nil
	}
	var kinds []string
	for _, k := range strings.Split(text, ",") {
		switch {
		case !slices.Contains(FaultNames(), k):
			return nil, fmt.Errorf("--faults: no fault is called %q; there are all, none, %s", k, strings.Join(FaultNames(), ", "))
		case !slices.Contains(allFaults(peers), k):
			return nil, fmt.Errorf("--faults: without --peers etcd there is no %s", k)
		case slices.Contains(kinds, k):
			return nil, fmt.Errorf("--faults: %s stands there twice", k)
		}
		kinds = append(kinds, k)
	}
	return kinds, nil
}

// strikes are what is done to the engines: the faults, and the upgrade.
func (o Options) strikes() ([]string, error) {
	kinds, err := faultKinds(o.Faults, o.Peers)
	if err == nil && o.Upgrade {
		kinds = append(kinds, faultUpgrade)
	}
	return kinds, err
}

// leastRooms is how many rooms a run with so many faults needs.
func leastRooms(faults int) int {
	if faults == 0 {
		return 1
	}
	return 10 * (faults + 1)
}

// fault is one that is to strike.
type fault struct {
	kind   string
	target int           // index of the role that it strikes
	at     int           // rooms of the plan that have come by then
	burst  int           // so many more come at once
	delay  time.Duration // from then until the strike

	what     string  // for people, known once it has struck
	second   float64 // of the run
	struck   int64   // monotonic
	repaired int64   // monotonic; 0: not yet
	over     int64   // monotonic: a room opened after the repair (of the store: after the strike) has succeeded; 0: not yet
}

// planFaults draws the moments: the faults strike in an order of the seed's, each somewhere in the middle
// half of its share of the rooms.
func planFaults(kinds []string, rooms int, seed uint64) []*fault {
	rng := rand.New(rand.NewPCG(seed, 0x6661_756c))
	share := rooms / (len(kinds) + 1)
	var faults []*fault
	for i, k := range rng.Perm(len(kinds)) {
		f := &fault{
			kind: kinds[k], target: rng.IntN(2), burst: min(burstMost, share/2),
			at: i*share + share/4 + rng.IntN(share/2), delay: time.Duration(rng.Int64N(int64(strikeMost))),
		}
		if f.kind == faultEngine {
			f.target = 1 // decode: the judge
		}
		faults = append(faults, f)
	}
	return faults
}

// fate is what became of the attempts that were live when a fault struck.
type fate struct {
	times   []time.Duration          // from the strike to the terminal status, sorted
	reasons map[string]int           // of the decode side
	longest map[string]time.Duration // by these
}

// fateOf looks the attempts up that were open on a side, and not terminal there, when f struck. Of both
// sides the later one counts; a worker that died sees nothing.
func fateOf(f *fault, sides [2]*side) fate {
	out := fate{reasons: map[string]int{}, longest: map[string]time.Duration{}}
	last := map[attemptID]int64{}
	for _, s := range sides {
		for id, line := range s.rooms {
			if !s.died[id] && line.live(f.struck) {
				last[id] = max(last[id], line.Ended)
			}
		}
	}
	for id, ended := range last {
		took, reason := time.Duration(ended-f.struck), sides[1].rooms[id].Reason
		out.times = append(out.times, took)
		out.reasons[reason]++
		out.longest[reason] = max(out.longest[reason], took)
	}
	slices.Sort(out.times)
	return out
}

// live says that the room was open and not terminal at a moment.
func (r report) live(at int64) bool { return r.Opened > 0 && r.Opened <= at && r.Ended > at }

func (t fate) at(percent int) time.Duration {
	if len(t.times) == 0 {
		return 0
	}
	return t.times[min(len(t.times)*percent/100, len(t.times)-1)]
}

// result is the public form.
func (t fate) result(kind string) Fault {
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
	return Fault{What: kind, Rooms: len(t.times), P50: ms(t.at(50)), P99: ms(t.at(99)), Max: ms(t.at(100))}
}

// explains reports whether f may end a room so.
func (f *fault) explains(reason string) bool {
	switch f.kind {
	case faultPlugin:
		// The other side's plugin may see the broken connection first.
		return reason == reasonPluginLost || reason == reasonTransferFailed
	case faultEngine:
		return reason == reasonEngineLost || reason == reasonPeerLost || reason == reasonStaleRoom || reason == reasonOutcomeUnknown || reason == reasonSuperseded
	case faultWorker:
		return reason == reasonWorkerLost
	}
	return false // the others end nothing, nor does an upgrade
}

// readLate is how long after a strike a worker may note an answer that was given before it.
const readLate = int64(100 * time.Millisecond)

// unexplained lists the attempts that failed, not by an abort of a worker or the router, for a reason that no
// fault which struck while they were open explains.
func unexplained(p *Plan, sides [2]*side, router *router, faults []*fault) []string {
	var out []string
	for i := range p.Rooms {
		for id := (attemptID{room: p.Rooms[i].ID}); sides[0].has(id) || sides[1].has(id); id.attempt++ {
			a := router.attempts[id]
			dst := sides[1].rooms[id]
			if dst.Status != statusFailed || a == nil || (a.asked || a.aborted) && dst.aborted() {
				continue
			}
			ok := false
			for _, f := range faults {
				for k, s := range sides {
					line := s.rooms[id]
					open := line.Opened > 0 && line.Opened <= f.over+readLate && line.Ended >= f.struck
					open = open || s.died[id] && f.kind == faultWorker && f.target == k
					ok = ok || f.struck > 0 && open && (f.explains(dst.Reason) || sides[0].died[id] && dst.aborted())
				}
			}
			if !ok {
				src := sides[0].rooms[id]
				out = append(out, fmt.Sprintf("room %d, attempt %d, failed and no fault explains it: %s at the destination (%s), %s at the source (%s)",
					id.room, id.attempt, dst.Reason, dst.Detail, src.Reason, src.Detail))
			}
		}
	}
	return out
}
