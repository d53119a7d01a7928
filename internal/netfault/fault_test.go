package netfault

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/terminus-kv/terminus/internal/reliability"
)

// field is two hosts, the wire between them, and what runs on them.
type field struct {
	*wire
	t       *testing.T
	between *os.File // the network namespace of the wire
	engines [2]*engine
	traffic *traffic
	k       clocks
	rng     *rand.Rand
}

// sleep waits for about d, a tenth less or more, and returns for how long.
func (f *field) sleep(d time.Duration) time.Duration {
	d = time.Duration(float64(d) * (0.9 + 0.2*f.rng.Float64()))
	time.Sleep(d)
	return d
}

// treated is a fault that treats packets for a while.
func treated(tr treatment, ends []int, of []lane, d func(k clocks) time.Duration) func(*field) time.Duration {
	return func(f *field) time.Duration {
		f.set(tr, ends, of...)
		defer f.heal()
		return f.sleep(d(f.k))
	}
}

// fault is one that a network makes.
type fault struct {
	name string
	does string
	// make makes the fault and mends it, and returns how long that was to take.
	make func(f *field) time.Duration
	// reasons that rooms may have on either side, besides success. None: no room may fail.
	reasons []string
}

var (
	bothEnds  = []int{endA, endB}
	bothLanes = []lane{control, data}
)

// dropped is a fault that loses what comes from some ends, of some lanes, for a while.
func dropped(ends []int, of []lane, d func(k clocks) time.Duration) func(*field) time.Duration {
	return treated(treatment{drop: true}, ends, of, d)
}

func beyondDead(k clocks) time.Duration  { return k.dead + 2500*time.Millisecond }
func belowDead(k clocks) time.Duration   { return k.dead * 4 / 10 }
func beyondStall(k clocks) time.Duration { return k.stall + 3*time.Second }
func aWhile(k clocks) time.Duration      { return k.dead * 3 / 4 }

// Reasons by what the network takes from an engine.
var (
	// Silence of the peer: it is dead by the clock, also for a source that waits for its judge. What was not bound yet
	// has nobody to lose and ends by its own clock, or is told once the peer is back.
	ofSilence = []string{"peer_lost", "outcome_unknown", "bootstrap_timeout", "peer_aborted", "stale_room"}
	// No way for bytes: the plugin cannot connect, or nothing moves.
	ofNoBytes = []string{"transfer_failed", "stalled", "peer_aborted"}
	// Clocks that a machine without time for its engines lets run out.
	ofTime = []string{"queue_timeout", "register_timeout", "input_timeout", "transfer_timeout", "peer_queue_timeout"}
	// A connection is over with ops on it.
	ofReset = []string{"transfer_failed", "peer_aborted"}
)

var faults = []fault{
	{"drop-a-to-b", "what the prefill host sends is lost, longer than peer_dead", dropped([]int{endA}, bothLanes, beyondDead), slices.Concat(ofSilence, ofNoBytes)},
	{"drop-b-to-a", "what the decode host sends is lost, longer than peer_dead", dropped([]int{endB}, bothLanes, beyondDead), slices.Concat(ofSilence, ofNoBytes)},
	{"black-hole", "everything is lost, longer than peer_dead", dropped(bothEnds, bothLanes, beyondDead), slices.Concat(ofSilence, ofNoBytes)},
	{"black-hole-short", "everything is lost, for less than half of peer_dead", dropped(bothEnds, bothLanes, belowDead), nil},
	{"flap", "the cable is pulled and put back, six times", func(f *field) (took time.Duration) {
		for i := range 6 {
			h := f.hosts[i%2]
			f.cable(h, "down")
			took += f.sleep(300 * time.Millisecond)
			f.cable(h, "up")
			took += f.sleep(500 * time.Millisecond)
		}
		return took
	}, nil},
	{"reset-control", "connections between the engines are reset, five times", resets(treatment{reset: true}, control), nil},
	{"reset-data", "connections between the plugins are reset, five times", resets(treatment{reset: true}, data), ofReset},
	{"reset-all", "all connections are reset, five times", resets(treatment{reset: true}, control, data), ofReset},
	{"reset-one-end", "connections are reset at one end, five times: the other holds them to be open", resets(treatment{resetSender: true}, control, data), ofReset},
	{"mute", "connections come up and stand, and nothing that is said on them arrives", treated(treatment{mute: true}, bothEnds, bothLanes, beyondDead), slices.Concat(ofSilence, ofNoBytes)},
	{"small-packets-only", "packets of more than 1500 bytes are lost, as by a wrong MTU on the way", treated(treatment{most: 1500}, bothEnds, bothLanes, beyondStall), slices.Concat(ofSilence, ofNoBytes)},
	{"slow", "4 Mbit/s each way, for all connections together", treated(treatment{rate: 500e3}, bothEnds, bothLanes, aWhile), nil},
	{"reorder", "each packet is delayed by 0 to 40 ms, so packets overtake each other", treated(treatment{spread: 40 * time.Millisecond}, bothEnds, bothLanes, aWhile), nil},
	{"late-control", "control is delayed by 150 to 250 ms, data is not: bytes land long before the words about them", treated(late, bothEnds, []lane{control}, aWhile), nil},
	{"late-data", "data is delayed by 150 to 250 ms, control is not: words come long before the bytes", treated(late, bothEnds, []lane{data}, aWhile), nil},
	{"lossy", "one packet in 50 is lost and one in 50 comes twice", treated(treatment{loss: 0.02, double: 0.02, spread: 2 * time.Millisecond}, bothEnds, bothLanes, aWhile), nil},
	{"control-only-lost", "control is lost longer than peer_dead, data is not", dropped(bothEnds, []lane{control}, beyondDead), ofSilence},
	{"data-only-lost", "data is lost longer than the stall clock, control is not", dropped(bothEnds, []lane{data}, beyondStall), ofNoBytes},
	{"acks-lost", "what the decode host says about data is lost, longer than the stall clock: bytes land and nobody knows", dropped([]int{endB}, []lane{data}, beyondStall), ofNoBytes},
}

var late = treatment{delay: 150 * time.Millisecond, spread: 100 * time.Millisecond}

func resets(tr treatment, of ...lane) func(*field) time.Duration {
	return func(f *field) (took time.Duration) {
		for i := range 5 {
			ends := bothEnds
			if tr.resetSender {
				ends = []int{i % 2}
			}
			f.set(tr, ends, of...)
			took += f.sleep(60 * time.Millisecond)
			f.heal()
			took += f.sleep(800 * time.Millisecond)
		}
		return took
	}
}

// cable pulls a host's cable, or puts it back.
func (f *field) cable(h *host, state string) {
	if err := inNetns(f.between, func() error { return ip("link set dev " + h.name + " " + state) }); err != nil {
		panic(err)
	}
}

// recovery bounds the time from the end of a fault until a new room succeeds: a redial of the engines after at most
// 1.5 s, one handshake of theirs that was under way and came to nothing (3 s), and the same of the plugins.
const recovery = 10 * time.Second

// TestFaults makes every fault under traffic. Whatever the network does: every room ends in bounded time for a reason
// that fits, no page is corrupted or written after its release, both sides agree, and afterwards all is as before.
func TestFaults(t *testing.T) {
	t.Parallel()
	began := time.Now()
	rows := make([]reliability.NetFault, len(faults))
	t.Run("all", func(t *testing.T) {
		for n := range *pairs {
			t.Run(strconv.Itoa(n), func(t *testing.T) {
				t.Parallel()
				f := newField(t, theClocks(), *seed+uint64(n)<<32)
				for i := n; i < len(faults); i += *pairs {
					if strings.Contains(faults[i].name, *only) {
						t.Run(faults[i].name, func(t *testing.T) { rows[i] = f.play(t, faults[i]) })
					}
				}
				f.end(t)
			})
		}
	})
	if *out != "" && !t.Failed() {
		write(t, *out, reliability.NetFaults{
			Version: *version, Command: *again, Began: began.UTC().Truncate(time.Second), Took: time.Since(began), Seed: *seed, Default: *long, Faults: rows,
		})
	}
}

// newField starts everything.
func newField(t *testing.T, k clocks, seed uint64) *field {
	t.Helper()
	hosts, between := newHosts(t)
	return newFieldOn(t, hosts, between, k, seed)
}

func newFieldOn(t *testing.T, hosts [2]*host, between *os.File, k clocks, seed uint64) *field {
	t.Helper()
	f := &field{between: between, wire: newWire(hosts, seed), k: k, rng: rand.New(rand.NewPCG(seed, 2))}
	t.Cleanup(f.close)
	f.engines = startEngines(t, hosts, k)
	f.traffic = newTraffic(t, f.engines)
	f.traffic.terminal = 2 * k.terminal() // a busy machine
	f.traffic.reusable = 3*k.dead + k.terminal() + 2*k.silence
	return f
}

// end stops everything. All bytes went over the wire: there was no shared memory.
func (f *field) end(t *testing.T) {
	if got := f.passed[data].Load(); got < f.traffic.bytes {
		t.Errorf("%d bytes arrived and only %d were on the wire", f.traffic.bytes, got)
	}
	for _, w := range f.traffic.workers {
		w.Close()
		w.region.Close()
	}
	for _, e := range f.engines {
		if err := e.stop(); err != nil {
			t.Error(err)
		}
	}
	if t.Failed() {
		for _, e := range f.engines {
			text := e.said.String()
			t.Logf("engine %s said:\n%s", e.name, text[max(0, len(text)-8000):])
		}
	}
}

// play makes a fault as often as it is to be.
func (f *field) play(t *testing.T, ft fault) reliability.NetFault {
	f.t = t
	r := reliability.NetFault{Name: ft.name, Does: ft.does, Verdicts: map[string]int{}}
	var times []float64
	for n := 0; r.Runs < *runs && n < tries(*runs) && !t.Failed(); n++ {
		times = append(times, f.round(ft, &r)...)
	}
	if len(times) > 0 {
		slices.Sort(times)
		r.P99, r.Max = times[(len(times)-1)*99/100], times[len(times)-1]
	}
	text, _ := json.Marshal(r)
	t.Logf("%s", text)
	return r
}

// tries is how often a fault may be made for so many runs that count: a result needs them all, a test only what
// must always hold.
func tries(runs int) int {
	if *out != "" {
		return 10 * runs
	}
	return runs
}

// watchLag measures how late this process runs; the function that it returns says how late it was at worst.
func watchLag() func() time.Duration {
	const every = 20 * time.Millisecond
	quit, worst := make(chan struct{}), make(chan time.Duration)
	go func() {
		var most time.Duration
		for {
			began := time.Now()
			select {
			case <-time.After(every):
				most = max(most, time.Since(began)-every)
			case <-quit:
				worst <- most
				return
			}
		}
	}()
	return func() time.Duration { close(quit); return <-worst }
}

// round is traffic, the fault under it, and traffic until all is well again. It returns how long touched rooms took to
// their verdict, in milliseconds.
func (f *field) round(ft fault, r *reliability.NetFault) (times []float64) {
	t, tr, k := f.t, f.traffic, f.k
	f.hit.Store(0)
	bytes := tr.bytes
	lag := watchLag()
	tr.start(f.rng.Uint64())
	if err := within(20*time.Second, func() error {
		if _, ok := tr.succeeded(time.Time{}); !ok {
			return errors.New("no room succeeds before the fault")
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
	time.Sleep(500 * time.Millisecond)
	streams := f.streams()
	began := time.Now()
	asked := ft.make(f)
	mended := time.Now()
	if f.hit.Load() == 0 && ft.name != "flap" {
		t.Error("the fault met no packet")
	}
	var well time.Time // the first room that succeeded was opened then
	err := within(4*recovery, func() error {
		if at, ok := tr.succeeded(mended); ok {
			well = at
			return nil
		}
		return fmt.Errorf("no new room has succeeded %v after the fault was over", 4*recovery)
	})
	if err != nil {
		t.Error(err)
		well = time.Now()
	}
	time.Sleep(600 * time.Millisecond)
	list := tr.finish()
	// What a busy machine does to engines is no fault of a network. Then only what must always hold is judged.
	allowed := ft.reasons
	late := max(lag(), mended.Sub(began)-asked)
	starved := late > k.dead/10
	if starved {
		t.Logf("the machine stood still for %v meanwhile: the times of this run are not judged", late)
		allowed = slices.Concat(ofSilence, ofNoBytes, ofTime)
	} else {
		r.Runs++
		r.Recover = max(r.Recover, ms(well.Sub(mended)))
		if d := well.Sub(mended); d > recovery {
			t.Errorf("no room that was opened within %v after the fault has succeeded", d)
		}
		if n := f.streams() - streams; n > 0 && ft.name == "flap" { // what TCP repairs is no silence
			t.Errorf("the stream between the engines came up anew, %d times on both sides together", n)
		}
	}

	for _, o := range list {
		r.Rooms++
		if o.withdrawn {
			r.Refused++
			continue
		}
		touched := o.verdict().After(began) && o.opened.Before(well)
		if touched {
			r.Touched++
			from := began
			if o.opened.After(from) {
				from = o.opened
			}
			d := o.verdict().Sub(from)
			if !starved {
				times = append(times, ms(d))
			}
			if *verbose {
				t.Logf("room %d, opened %.0f ms after the fault began: %s", o.room, ms(o.opened.Sub(began)), o.story(began))
			}
			if d > k.terminal() && !starved {
				t.Errorf("room %d was not terminal for %v: %s", o.room, d, o)
			}
		}
		for side, e := range o.ends {
			if e.reason != "success" && (!touched || !slices.Contains(allowed, e.reason)) {
				t.Errorf("room %d ended as %s at the %s: opened %v, ended %v after the fault began, which was over after %v: %s", o.room, e.reason, group(side),
					o.opened.Sub(began).Round(time.Millisecond), e.at.Sub(began).Round(time.Millisecond), mended.Sub(began).Round(time.Millisecond), e.detail)
			}
		}
		s, d := o.ends[source].reason, o.ends[destination].reason
		r.Verdicts[d]++
		switch {
		case s == "success" && d != "success":
			t.Errorf("room %d: success at the source, %s at the destination", o.room, d)
		case d == "success" && s == "outcome_unknown", d == "success" && s == "peer_lost":
			r.Unknown++
		case d == "success" && s != "success":
			t.Errorf("room %d: success at the destination, %s at the source", o.room, s)
		}
	}
	var wrong []string
	for _, w := range tr.workers {
		wrong = append(wrong, w.audit()...)
	}
	wrong = append(wrong, tr.wrong...)
	r.Wrong += len(wrong)
	for _, text := range wrong[:min(len(wrong), 10)] {
		t.Error(text)
	}
	for _, e := range f.engines {
		if err := within(20*time.Second, func() error { return errors.Join(e.ready(), e.idle(), f.connected(e)) }); err != nil {
			t.Errorf("engine %s after the fault: %v", e.name, err)
		}
	}
	tr.wrong = nil
	r.Bytes += tr.bytes - bytes
	return times
}

// streams counts those that came up between the engines, once at either side.
func (f *field) streams() (n int) {
	for _, e := range f.engines {
		n += strings.Count(e.said.String(), "peer is up")
	}
	return n
}

// connected reports connections that a fault has left behind.
func (f *field) connected(e *engine) error {
	n, err := e.connections()
	if err == nil && (n[control] != 1 || n[data] > 2) {
		err = fmt.Errorf("%d connections between the engines and %d between the plugins, want 1 and at most 2", n[control], n[data])
	}
	return err
}

func (o *outcome) String() string {
	return fmt.Sprintf("%s at the source, %s at the destination", o.ends[source].reason, o.ends[destination].reason)
}

// story tells how a room ended on either side, in milliseconds from the fault.
func (o *outcome) story(began time.Time) string {
	var b strings.Builder
	for side, e := range o.ends {
		fmt.Fprintf(&b, "%s at the %s after %.0f ms; ", e.reason, group(side), ms(e.at.Sub(began)))
	}
	return b.String() + o.refused
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func write(t *testing.T, file string, r reliability.NetFaults) {
	text, err := json.MarshalIndent(r, "", "  ")
	must(t, err)
	must(t, os.WriteFile(file, append(text, '\n'), 0o644))
}
