package wasmhost

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/terminus-kv/terminus/internal/pluginhost"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// newHost is an engine's plugin host; events come on the channel.
func newHost(t *testing.T) (*pluginhost.Host, chan pluginhost.Event) {
	t.Helper()
	dir, err := os.MkdirTemp("", "w")
	if err != nil {
		t.Fatal(err)
	}
	events := make(chan pluginhost.Event, 1024)
	h, err := pluginhost.New(pluginhost.Config{
		Node: "n", Incarnation: 1, HostID: "h", EngineVersion: "test", RuntimeDir: dir, HandshakeTimeout: time.Minute,
		Log: slog.New(slog.DiscardHandler), Sink: func(e pluginhost.Event) {
			if e.Kind != pluginhost.Frame {
				events <- e
			}
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := h.Close(ctx); err != nil {
			t.Error(err)
		}
		os.RemoveAll(dir)
	})
	return h, events
}

func await(t *testing.T, events chan pluginhost.Event, plugin string, kind pluginhost.Kind) pluginhost.Event {
	t.Helper()
	timeout := time.After(time.Minute)
	for {
		select {
		case e := <-events:
			if e.Plugin == plugin && e.Kind == kind {
				return e
			}
		case <-timeout:
			t.Fatalf("%s is not %v", plugin, kind)
		}
	}
}

// TestDeathOfAGuest: what a guest does wrong ends its process, with its cause; the guest beside it lives, and the
// dead one is started anew.
func TestDeathOfAGuest(t *testing.T) {
	h, events := newHost(t)
	good, err := h.Start(pluginhost.Spec{Name: "good", Wasm: repage, WasmCache: cacheDir()})
	if err != nil {
		t.Fatal(err)
	}
	await(t, events, "good", pluginhost.Up)
	bad, err := h.Start(pluginhost.Spec{Name: "bad", Wasm: hostile, WasmCache: cacheDir(), Options: []byte(`{"do":"panic in AddPeer"}`)})
	if err != nil {
		t.Fatal(err)
	}
	up := await(t, events, "bad", pluginhost.Up)
	token := make([]byte, 32)
	if err := bad.Send(up.Epoch,
		&contract.HostEvent{Event: &contract.HostEvent_PeerAccept{PeerAccept: &contract.PeerAccept{Peer: 2, Node: "n", Incarnation: 1, Epoch: up.Epoch, SameHost: true, Token: token}}},
		&contract.HostEvent{Event: &contract.HostEvent_PeerAdd{PeerAdd: &contract.PeerAdd{Peer: 1, Node: "n", Incarnation: 1, Epoch: up.Epoch, SameHost: true,
			Endpoint: up.Handshake.Endpoint, RequireLane: contract.Lane_LANE_ANY, Token: token}}}); err != nil {
		t.Fatal(err)
	}
	lost := await(t, events, "bad", pluginhost.Lost)
	const want = "guest hostile.wasm: engine_v1_call(FRAME) (PeerAdd): trapped: unreachable: panic: no peers, please"
	if lost.Err == nil || !strings.Contains(lost.Err.Error(), want) {
		t.Errorf("cause: %v\nwant:  %s", lost.Err, want)
	}
	await(t, events, "bad", pluginhost.Reaped)
	await(t, events, "bad", pluginhost.Up)
	if s := good.Status(); s.Epoch != 1 {
		t.Errorf("the other guest is in epoch %d", s.Epoch)
	}
}

// TestPin: the bytes that were hashed are those that are compiled; another file is refused, and not tried again.
func TestPin(t *testing.T) {
	code, err := os.ReadFile(repage)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(code)
	if b, err := New(context.Background(), Config{File: repage, SHA256: strings.ToUpper(hex.EncodeToString(sum[:])), cache: cache}); err != nil {
		t.Error(err)
	} else if err := b.Close(); err != nil {
		t.Error(err)
	}
	_, err = New(context.Background(), Config{File: repage, SHA256: strings.Repeat("0", 64), cache: cache})
	if err == nil || !strings.Contains(err.Error(), "the configuration pins 0000") {
		t.Errorf("got %v", err)
	}
}

// TestBadModuleIsRefused: the operator reads what is wrong with the module, and nothing is restarted.
func TestBadModuleIsRefused(t *testing.T) {
	h, events := newHost(t)
	file := filepath.Join(t.TempDir(), "text.wasm")
	if err := os.WriteFile(file, []byte("hello"), 0o600); err != nil {
		t.Fatal(err)
	}
	p, err := h.Start(pluginhost.Spec{Name: "bad", Wasm: file, WasmCache: cacheDir()})
	if err != nil {
		t.Fatal(err)
	}
	down := await(t, events, "bad", pluginhost.Down)
	if down.Err == nil || down.Err.Error() != "the module cannot be loaded: guest text.wasm: this is not a WebAssembly module" {
		t.Errorf("cause: %v", down.Err)
	}
	if d := p.Status().Handshake; d.GetName() != "" || d.GetPluginVersion() != "" || d.GetSdk() != nil {
		t.Errorf("what hosts the module describes itself in its place: %v", d)
	}
}

// TestCacheIsPrivate: machine code that others could have written is not used.
func TestCacheIsPrivate(t *testing.T) {
	dir := t.TempDir()
	open, link, file := filepath.Join(dir, "open"), filepath.Join(dir, "link"), filepath.Join(dir, "file")
	for _, err := range []error{os.Mkdir(open, 0o700), os.Chmod(open, 0o770), os.Symlink(dir, link), os.WriteFile(file, nil, 0o600)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for path, want := range map[string]string{open: "is open to others (mode 0770)", link: "is not a directory", file: "is not a directory"} {
		if _, err := openCache(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", path, err)
		}
		b, err := New(context.Background(), Config{File: polite(nil).write(t), CacheDir: path})
		if err != nil {
			t.Fatalf("%s: a module without a cache: %v", path, err)
		}
		if b.noCache == nil {
			t.Errorf("%s: nothing is said", path)
		}
		b.Close()
	}
	c, err := openCache(filepath.Join(dir, "a", "b"))
	if err != nil {
		t.Fatal(err)
	}
	c.Close(context.Background())
	if info, err := os.Stat(filepath.Join(dir, "a", "b")); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("%v %v", info, err)
	}
}
