package bench

import (
	"testing"
	"time"
)

func TestFaults(t *testing.T) {
	report := measure(t, faults, "abort_p99", "plugin_killed_p99", "engine_killed_max", "engine_restarted_max",
		"abort_p50", "abort_max", "plugin_killed_p50", "plugin_killed_max", "engine_killed_p50", "engine_killed_p99", "engine_restarted_p50")
	for _, r := range report.Results {
		if r.Value <= 0 || r.Samples == 0 {
			t.Errorf("%s is %v of %d samples", r.Name, r.Value, r.Samples)
		}
	}
}

// BenchmarkPluginDeath is the plugin's death of the benchmark faults with both engines in this process, for
// the profiler: an op is a death with 10,000 rooms bound. The engine gives a plugin up that dies more often
// than its restart budget allows: -benchtime=4x.
func BenchmarkPluginDeath(b *testing.B) {
	c := clusterHere(b)
	var all latencies
	for round := range b.N {
		l, err := measurePluginDeath(b.Context(), c, pluginField, round)
		if err != nil {
			b.Fatal(err)
		}
		all = append(all, l...)
	}
	b.ReportMetric(float64(time.Duration(all.quantile(0.5)*1000).Microseconds())/1000, "p50-ms")
	b.ReportMetric(float64(time.Duration(all.quantile(0.99)*1000).Microseconds())/1000, "p99-ms")
}
