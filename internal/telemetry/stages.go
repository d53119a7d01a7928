package telemetry

import (
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/terminus-kv/terminus/core"
)

// RoomStage is a role and a stage of rooms: core.Stage.
type RoomStage struct{ Role, Stage string }

// stageBounds are the upper bounds of a Histogram's buckets; above the last is one more. The shortest are of
// rooms that wait for nobody, the longest of clocks.
var stageBounds = []time.Duration{
	time.Millisecond, 5 * time.Millisecond, 25 * time.Millisecond, 100 * time.Millisecond, 500 * time.Millisecond,
	time.Second, 2500 * time.Millisecond, 5 * time.Second, 15 * time.Second, time.Minute, 5 * time.Minute,
}

// Histogram counts durations. It is not for several goroutines.
type Histogram struct {
	Count   uint64
	Sum     time.Duration
	buckets []uint64 // that end at the bound of the same number, and not at an earlier one
}

// Observe counts a duration.
func (h *Histogram) Observe(d time.Duration) {
	h.Count++
	h.Sum += d
	if h.buckets == nil {
		h.buckets = make([]uint64, len(stageBounds))
	}
	if i, _ := slices.BinarySearch(stageBounds, d); i < len(h.buckets) {
		h.buckets[i]++
	}
}

// Clone returns a copy that later observations do not change.
func (h *Histogram) Clone() Histogram {
	return Histogram{h.Count, h.Sum, slices.Clone(h.buckets)}
}

// stagesDesc is the one family of histograms.
var stagesDesc = prometheus.NewDesc(Prefix+"room_stage_seconds", "Time that rooms were in a stage which they have left; a stage that a room passes at once is not counted.",
	[]string{"role", "stage"}, nil)

// collectStages reports every stage of both roles, so that an alert never meets a missing series.
func collectStages(s *Snapshot, ch chan<- prometheus.Metric) {
	for _, role := range []string{"source", "destination"} {
		for stage := core.StageQueued; stage < core.NumStages; stage++ {
			h := s.Stages[RoomStage{role, stage.String()}]
			var n uint64
			upTo := map[float64]uint64{}
			for i, bound := range stageBounds {
				if i < len(h.buckets) {
					n += h.buckets[i]
				}
				upTo[bound.Seconds()] = n
			}
			ch <- prometheus.MustNewConstHistogram(stagesDesc, h.Count, h.Sum.Seconds(), upTo, role, stage.String())
		}
	}
}
