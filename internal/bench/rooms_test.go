package bench

import (
	"context"
	"log/slog"
	"os"
	"testing"
	"time"

	"github.com/terminus-kv/terminus/internal/config"
	"github.com/terminus-kv/terminus/internal/node"
)

func TestRooms(t *testing.T) {
	report := measure(t, rooms, "rooms", "rooms_of_two_cores", "engine_cpu", "plugin_cpu", "worker_cpu", "verdict_p50", "verdict_p99",
		"paced_rooms", "paced_verdict_p50", "paced_verdict_p99", "paced_engine_cpu")
	for _, r := range report.Results {
		if r.Value <= 0 {
			t.Errorf("%s is %v", r.Name, r.Value)
		}
	}
}

// BenchmarkRooms is the benchmark rooms with both engines in this process, for the profiler: an op is a room.
func BenchmarkRooms(b *testing.B) {
	c := clusterHere(b)
	t, err := startTraffic(b.Context(), c, roomsWindow)
	if err != nil {
		b.Fatal(err)
	}
	defer func() {
		if err := t.stop(); err != nil {
			b.Error(err)
		}
	}()
	if _, err := t.measure(b.Context(), 500*time.Millisecond, 0); err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	b.ResetTimer()
	done := 0
	var cpu float64
	for done < b.N {
		m, err := t.measure(b.Context(), time.Second, 0)
		if err != nil {
			b.Fatal(err)
		}
		done += len(m.latencies)
		cpu = m.workers // this process: all but the plugins
	}
	b.ReportMetric(cpu, "cpu-µs/room")
	b.ReportMetric(float64(done)/b.Elapsed().Seconds(), "rooms/s")
}

// clusterHere is a cluster whose engines run in this process.
func clusterHere(b *testing.B) *cluster {
	b.Helper()
	executable, err := os.Executable()
	if err != nil {
		b.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "b")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { os.RemoveAll(dir) })
	ctx, cancel := context.WithCancel(context.Background())
	c := &cluster{}
	b.Cleanup(func() {
		cancel()
		for _, e := range c.engines {
			if e != nil {
				<-e.done
			}
		}
	})
	for i, name := range nodeNames {
		e, err := newEngine(Options{Engine: executable, Dir: dir}, name)
		if err != nil {
			b.Fatal(err)
		}
		cfg, err := config.Load(config.LoadOptions{Files: []string{e.config}})
		if err != nil {
			b.Fatal(err)
		}
		e.pid = os.Getpid()
		c.engines[i] = e
		go func() {
			defer close(e.done)
			if err := node.Run(ctx, cfg, node.Options{Log: slog.New(slog.DiscardHandler)}); err != nil {
				b.Error(err)
			}
		}()
	}
	if err := c.waitReady(ctx); err != nil {
		b.Fatal(err)
	}
	return c
}
