package python

import (
	"context"
	"encoding/binary"
	"io"
	"log/slog"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/internal/pluginhost"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
	"github.com/terminus-kv/terminus/plugins/sdk/sdktest"
)

// engine is a plugin process with its host, played by the test.
type engine struct {
	t        *testing.T
	plugin   *pluginhost.Plugin
	endpoint []byte
	memory   *sdktest.Region

	mu     sync.Mutex
	events []*contract.PluginEvent
	grew   chan struct{}
}

// openEngine starts a plugin and does not wait for it.
func openEngine(t *testing.T, node string, incarnation uint64, spec pluginhost.Spec) *engine {
	t.Helper()
	dir, err := os.MkdirTemp("", "py") // short: the path of a unix socket ends at 108 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	e := &engine{t: t, grew: make(chan struct{})}
	host, err := pluginhost.New(pluginhost.Config{
		Node: node, Incarnation: incarnation, HostID: "boot", EngineVersion: "test", RuntimeDir: dir,
		HandshakeTimeout: patience, Log: slog.New(slog.NewTextHandler(io.Discard, nil)), Sink: e.sink,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := host.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	if e.plugin, err = host.Start(spec); err != nil {
		t.Fatal(err)
	}
	return e
}

// newEngine starts a plugin and waits until it is up.
func newEngine(t *testing.T, node string, incarnation uint64, spec pluginhost.Spec) *engine {
	t.Helper()
	e := openEngine(t, node, incarnation, spec)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := e.plugin.Ready(ctx); err != nil {
		t.Fatal(err)
	}
	e.endpoint = e.plugin.Status().Handshake.Endpoint
	return e
}

func (e *engine) sink(ev pluginhost.Event) {
	if ev.Kind != pluginhost.Frame {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.events = append(e.events, ev.Frame.Events...)
	close(e.grew)
	e.grew = make(chan struct{})
}

func (e *engine) send(events ...*contract.HostEvent) {
	e.t.Helper()
	if err := e.plugin.Send(1, events...); err != nil {
		e.t.Fatal(err)
	}
}

// until returns the first event that fits.
func (e *engine) until(what string, fits func(*contract.PluginEvent) bool) *contract.PluginEvent {
	e.t.Helper()
	timeout := time.After(patience)
	for {
		e.mu.Lock()
		i := slices.IndexFunc(e.events, fits)
		events, grew := e.events, e.grew
		e.mu.Unlock()
		if i >= 0 {
			return events[i]
		}
		select {
		case <-grew:
		case <-timeout:
			e.t.Fatalf("no %s; seen: %v; %v", what, events, e.plugin.Status().LastError)
		}
	}
}

// region makes memory known as region 1 and returns the worker's mapping of it.
func (e *engine) region(size int) []byte {
	e.t.Helper()
	const canary = 0x1122334455667788
	r, memory, lease, err := sdktest.NewMemory(size)
	if err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(r.Free)
	binary.LittleEndian.PutUint64(r.Bytes, canary)
	err = e.plugin.SendRegion(1, 1, memory, lease)
	unix.Close(memory)
	unix.Close(lease)
	if err != nil {
		e.t.Fatal(err)
	}
	e.send(&contract.HostEvent{Event: &contract.HostEvent_RegionAdd{RegionAdd: &contract.RegionAdd{
		Region: 1, Kind: contract.MemoryKind_MEMORY_KIND_HOST_SHM, Size: uint64(size), Canary: canary,
	}}})
	e.until("RegionReady", func(ev *contract.PluginEvent) bool { return ev.GetRegionReady().GetRegion() == 1 })
	if got := binary.LittleEndian.Uint64(r.Bytes); got != ^uint64(canary) {
		e.t.Fatalf("the plugin left %#x for the canary", got)
	}
	binary.LittleEndian.PutUint64(r.Bytes, 0)
	e.memory = r
	return r.Bytes
}

// leaseEnded tells, soon, whether nobody holds the lease of the region any more.
func (e *engine) leaseEnded() bool {
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		if e.memory.LeaseEnded() {
			return true
		}
	}
	return false
}
