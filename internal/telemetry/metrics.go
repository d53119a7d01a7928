package telemetry

import (
	"context"
	"net/http"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/terminus-kv/terminus/core/statemachine"
)

// Prefix starts the name of every metric of ours.
const Prefix = "terminus_"

// snapshotTimeout bounds a scrape's wait for the owner loop.
const snapshotTimeout = 3 * time.Second

// Build is constant for a process.
type Build struct {
	Version, Node string
}

// NewRegistry returns a registry with the metrics of src, of this build, of the Go runtime and of the
// process. log may be nil.
func NewRegistry(src Source, b Build, log *Limiter) *prometheus.Registry {
	reg := prometheus.NewRegistry()
	reg.MustRegister(
		newCollector(src, b, log),
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	return reg
}

// Handler serves a registry at /metrics.
func Handler(reg *prometheus.Registry) http.Handler {
	return promhttp.HandlerFor(reg, promhttp.HandlerOpts{
		ErrorHandling:       promhttp.ContinueOnError,
		MaxRequestsInFlight: 4,
		Timeout:             2 * snapshotTimeout,
	})
}

// metric is one family and how to read it from a snapshot.
type metric struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	read func(s *Snapshot, emit func(value float64, labels ...string))
}

func family(kind prometheus.ValueType, name, help string, labels []string, read func(*Snapshot, func(float64, ...string))) metric {
	return metric{prometheus.NewDesc(name, help, labels, nil), kind, read}
}

func gauge(name, help string, read func(*Snapshot) float64) metric {
	return family(prometheus.GaugeValue, Prefix+name, help, nil, func(s *Snapshot, emit func(float64, ...string)) { emit(read(s)) })
}

func counter(name, help string, read func(*Snapshot) float64) metric {
	return family(prometheus.CounterValue, Prefix+name, help, nil, func(s *Snapshot, emit func(float64, ...string)) { emit(read(s)) })
}

// vec is a family whose series are the entries of a map.
func vec[K comparable, V int | int64 | uint64](kind prometheus.ValueType, name, help string, labels []string, m func(*Snapshot) map[K]V, key func(K) []string) metric {
	return family(kind, Prefix+name, help, labels, func(s *Snapshot, emit func(float64, ...string)) {
		for k, v := range m(s) {
			emit(float64(v), key(k)...)
		}
	})
}

func one(s string) []string { return []string{s} }

const (
	asGauge   = prometheus.GaugeValue
	asCounter = prometheus.CounterValue
)

// states are the states of the protocol by role: one without rooms is reported as 0, so that an alert never
// meets a missing series.
var states = map[string][]statemachine.State{
	"source":      {statemachine.Unbound, statemachine.Offered, statemachine.Confirmed, statemachine.Committed, statemachine.Ended},
	"destination": {statemachine.Opened, statemachine.Registered, statemachine.Bound, statemachine.Ended},
}

// families are all metrics that a snapshot gives.
func families() []metric {
	ms := []metric{
		family(asGauge, Prefix+"rooms", "Records of rooms by role and protocol state; ended ones are remembered for the tombstone clock.", []string{"role", "state"},
			func(s *Snapshot, emit func(float64, ...string)) {
				eachState(s, func(role string, state statemachine.State, r RoomsBy) { emit(float64(r.Count), role, state.String()) })
			}),
		family(asGauge, Prefix+"rooms_oldest_nonterminal_age_seconds", "Age in its state of the oldest room that has not ended; 0 when there is none.", []string{"role", "state"},
			func(s *Snapshot, emit func(float64, ...string)) {
				eachState(s, func(role string, state statemachine.State, r RoomsBy) {
					if state.Live() {
						emit(r.Oldest.Seconds(), role, state.String())
					}
				})
			}),
		gauge("rooms_overdue", "Rooms that have not ended although their clock is over. Must be 0.", func(s *Snapshot) float64 { return float64(s.Overdue) }),
		gauge("rooms_unreleased", "Ended rooms whose pages the worker has not taken back.", func(s *Snapshot) float64 { return float64(s.Unreleased) }),
		gauge("rooms_oldest_unreleased_age_seconds", "Time since the oldest of them ended.", func(s *Snapshot) float64 { return s.OldestUnreleased.Seconds() }),
		vec(asCounter, "rooms_opened_total", "Accepted opens.", []string{"role", "backend"}, func(s *Snapshot) map[RoleBackend]uint64 { return s.Opened },
			func(k RoleBackend) []string { return []string{k.Role, k.Backend} }),
		family(asCounter, Prefix+"rooms_ended_total", "Verdicts by reason.", []string{"role", "reason"}, func(s *Snapshot, emit func(float64, ...string)) {
			for _, role := range []string{"source", "destination"} {
				for r := statemachine.Success; r < statemachine.NumReasons; r++ {
					emit(float64(s.Verdicts[Verdict{role, r.String()}]), role, r.String())
				}
			}
		}),
		counter("rooms_disagreed_total", "Rooms that ended outcome_unknown here and Success at the judge, as far as this engine learned.", func(s *Snapshot) float64 { return float64(s.Disagreed) }),
		vec(asCounter, "late_events_total", "Messages that came too late and changed nothing.", []string{"kind"}, func(s *Snapshot) map[string]uint64 { return s.Late }, one),

		gauge("registered_bytes", "Memory that workers registered.", func(s *Snapshot) float64 { return float64(s.RegisteredBytes) }),
		gauge("pinned_bytes", "Pages that a backend may still read or write.", func(s *Snapshot) float64 { return float64(s.PinnedBytes) }),
		gauge("pinned_oldest_age_seconds", "Time since the oldest ended room with pinned pages ended.", func(s *Snapshot) float64 { return s.OldestPinned.Seconds() }),
		gauge("quarantined_bytes", "Pages of ended rooms without a proof that nothing can write to them.", func(s *Snapshot) float64 { return float64(s.QuarantinedBytes) }),
		gauge("quarantined_oldest_age_seconds", "Time since the oldest of them went into quarantine.", func(s *Snapshot) float64 { return s.OldestQuarantine.Seconds() }),

		perRung("rung_entered_total", "Rooms whose pages came to a rung of the fencing ladder: 1 drained, 2 receiver check, 3 fence, 4 quarantine, 5 end of the plugin.", func(r Rung) float64 { return float64(r.Entered) }),
		perRung("rung_left_total", "Of those, the ones that left it: to the next, or with a proof.", func(r Rung) float64 { return float64(r.Left) }),
		perRung("rung_seconds_total", "Time that those stood on it.", func(r Rung) float64 { return r.Time.Seconds() }),
		counter("plugin_replacements_total", "Plugin processes that were to be replaced because of pages in quarantine.", func(s *Snapshot) float64 { return float64(s.Replaced) }),
		counter("plugin_retired_total", "Plugin processes that a newer one took over from.", func(s *Snapshot) float64 { return float64(s.Retired) }),
		counter("plugin_retired_cut_total", "Rooms and operations that these still had when their time was over.", func(s *Snapshot) float64 { return float64(s.RetireCut) }),

		vec(asGauge, "ops_outstanding", "Operations given to a backend and not ended.", []string{"backend"}, func(s *Snapshot) map[string]int { return s.OpsOut }, one),
		family(asGauge, Prefix+"ops_oldest_outstanding_age_seconds", "Age of the oldest of them.", []string{"backend"}, func(s *Snapshot, emit func(float64, ...string)) {
			for b, age := range s.OldestOp {
				emit(age.Seconds(), b)
			}
		}),
		gauge("ops_held", "Operations that wait for a window.", func(s *Snapshot) float64 { return float64(s.OpsHeld) }),
		vec(asCounter, "ops_ended_total", "Ended operations by how they ended.", []string{"backend", "end"}, func(s *Snapshot) map[OpEnd]uint64 { return s.OpsTotal },
			func(k OpEnd) []string { return []string{k.Backend, k.End} }),
		vec(asCounter, "moved_bytes_total", "Bytes of ended operations.", []string{"direction", "backend", "lane"}, func(s *Snapshot) map[Moved]uint64 { return s.MovedBytes },
			func(k Moved) []string { return []string{k.Direction, k.Backend, k.Lane} }),
		gauge("admission_queue", "Rooms that are accepted and not admitted.", func(s *Snapshot) float64 { return float64(s.QueueDepth) }),
		vec(asCounter, "requests_refused_total", "Refused requests of workers by cause.", []string{"cause"}, func(s *Snapshot) map[string]uint64 { return s.Refused }, one),

		family(asGauge, Prefix+"plugin_up", "1 when the plugin's newest epoch is ready.", []string{"plugin", "version"}, func(s *Snapshot, emit func(float64, ...string)) {
			for _, p := range s.Plugins {
				emit(bit(p.Up), p.Name, p.Version)
			}
		}),
		perPlugin(asGauge, "plugin_epoch", "Epoch of the plugin.", func(p Plugin) float64 { return float64(p.Epoch) }),
		perPlugin(asGauge, "plugin_beat_age_seconds", "Time since the plugin's last beat.", func(p Plugin) float64 { return p.BeatAge.Seconds() }),
		perPlugin(asGauge, "plugin_processes", "Processes of the plugin: more than one while it is upgraded or replaced.", func(p Plugin) float64 { return float64(p.Epochs) }),
		perPlugin(asCounter, "plugin_restarts_total", "Restarts of the plugin.", func(p Plugin) float64 { return float64(p.Restarts) }),

		vec(asGauge, "peers", "Other engines by state.", []string{"state"}, func(s *Snapshot) map[string]int { return s.Peers }, one),
		gauge("membership_frozen", "1 while membership cannot be read: the known peers stay, rooms go on.", func(s *Snapshot) float64 { return bit(s.Frozen) }),
		vec(asGauge, "sessions", "Connected workers by role.", []string{"role"}, func(s *Snapshot) map[string]int { return s.Sessions }, one),
		vec(asCounter, "bad_frames_total", "Messages that broke a protocol, by who sent them.", []string{"source", "code"}, func(s *Snapshot) map[BadFrame]uint64 { return s.BadFrames },
			func(k BadFrame) []string { return []string{k.Source, k.Code} }),

		gauge("draining", "1 while the engine drains.", func(s *Snapshot) float64 { return bit(s.Draining) }),
		counter("pause_seconds_total", "Pauses of the engine itself that its clocks left out.", func(s *Snapshot) float64 { return s.Lag.Seconds() }),
		counter("pauses_total", "Number of these pauses.", func(s *Snapshot) float64 { return float64(s.LagTotal) }),
		counter("core_steps_total", "Steps of the core.", func(s *Snapshot) float64 { return float64(s.Steps) }),
	}
	return append(ms, aliases()...)
}

// aliases are SGLang's names, for its dashboards. The queue that a room would be in there follows from its
// state here.
func aliases() []metric {
	queue := func(name, help, role string, in ...statemachine.State) metric {
		return family(asGauge, "sglang:"+name, help, nil, func(s *Snapshot, emit func(float64, ...string)) {
			n := 0
			eachState(s, func(r string, state statemachine.State, by RoomsBy) {
				if r == role && slices.Contains(in, state) {
					n += by.Count
				}
			})
			emit(float64(n))
		})
	}
	failed := func(name, help string, of func(statemachine.Reason) bool) metric {
		return family(asCounter, "sglang:"+name, help, nil, func(s *Snapshot, emit func(float64, ...string)) {
			var n uint64
			for v, count := range s.Verdicts {
				if r, ok := statemachine.ParseReason(v.Reason); ok && of(r) {
					n += count
				}
			}
			emit(float64(n))
		})
	}
	beforeBind := func(r statemachine.Reason) bool {
		switch r {
		case statemachine.QueueTimeout, statemachine.BootstrapTimeout, statemachine.PeerQueueTimeout, statemachine.RegisterTimeout,
			statemachine.LayoutMismatch, statemachine.BackendDown:
			return true
		}
		return false
	}
	aborted := func(r statemachine.Reason) bool {
		return r == statemachine.Aborted || r == statemachine.PeerAborted
	}
	return []metric{
		queue("num_prefill_bootstrap_queue_reqs", "Source rooms that are not bound (alias).", "source", statemachine.Unbound, statemachine.Offered),
		queue("num_prefill_inflight_queue_reqs", "Source rooms that are bound and have not ended (alias).", "source", statemachine.Confirmed, statemachine.Committed),
		queue("num_decode_prealloc_queue_reqs", "Destination rooms without pages (alias).", "destination", statemachine.Opened),
		queue("num_decode_transfer_queue_reqs", "Destination rooms with pages that have not ended (alias).", "destination", statemachine.Registered, statemachine.Bound),
		failed("num_bootstrap_failed_reqs_total", "Rooms that failed before they were bound (alias).", beforeBind),
		failed("num_transfer_failed_reqs_total", "Rooms that failed afterwards (alias).", func(r statemachine.Reason) bool {
			return r != statemachine.Success && !beforeBind(r) && !aborted(r)
		}),
		failed("num_aborted_requests_total", "Rooms that were aborted (alias).", aborted),
	}
}

// rungs of the fencing ladder: one that nothing came to is reported as 0.
var rungs = []string{"1", "2", "3", "4", "5"}

func perRung(name, help string, read func(Rung) float64) metric {
	return family(asCounter, Prefix+name, help, []string{"rung"}, func(s *Snapshot, emit func(float64, ...string)) {
		for _, r := range rungs {
			emit(read(s.Rungs[r]), r)
		}
	})
}

func perPlugin(kind prometheus.ValueType, name, help string, read func(Plugin) float64) metric {
	return family(kind, Prefix+name, help, []string{"plugin"}, func(s *Snapshot, emit func(float64, ...string)) {
		for _, p := range s.Plugins {
			emit(read(p), p.Name)
		}
	})
}

// eachState visits every state of both roles, with what the snapshot has of it.
func eachState(s *Snapshot, visit func(role string, state statemachine.State, r RoomsBy)) {
	for _, role := range []string{"source", "destination"} {
		for _, state := range states[role] {
			var sum RoomsBy
			for _, r := range s.Rooms {
				if r.Role == role && r.State == state.String() {
					sum.Count += r.Count
					sum.Oldest = max(sum.Oldest, r.Oldest)
				}
			}
			visit(role, state, sum)
		}
	}
}

func bit(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// collector takes one snapshot a scrape.
type collector struct {
	src        Source
	log        *Limiter
	families   []metric
	up, info   *prometheus.Desc
	suppressed *prometheus.Desc
	build      Build
}

func newCollector(src Source, b Build, log *Limiter) *collector {
	return &collector{
		src: src, log: log, families: families(), build: b,
		up:         prometheus.NewDesc(Prefix+"up", "1 when the engine's owner loop answered this scrape.", nil, nil),
		info:       prometheus.NewDesc(Prefix+"build_info", "Constant 1.", []string{"version", "node"}, nil),
		suppressed: prometheus.NewDesc(Prefix+"log_suppressed_total", "Log records that the rate limit left out.", nil, nil),
	}
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.up, c.info, c.suppressed, stagesDesc} {
		ch <- d
	}
	for _, m := range c.families {
		ch <- m.desc
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), snapshotTimeout)
	defer cancel()
	s, err := c.src.Snapshot(ctx)
	ch <- prometheus.MustNewConstMetric(c.up, asGauge, bit(err == nil))
	ch <- prometheus.MustNewConstMetric(c.info, asGauge, 1, c.build.Version, c.build.Node)
	if c.log != nil {
		ch <- prometheus.MustNewConstMetric(c.suppressed, asCounter, float64(c.log.Suppressed()))
	}
	if err != nil {
		return
	}
	collectStages(&s, ch)
	for _, m := range c.families {
		m.read(&s, func(value float64, labels ...string) {
			ch <- prometheus.MustNewConstMetric(m.desc, m.kind, value, labels...)
		})
	}
}
