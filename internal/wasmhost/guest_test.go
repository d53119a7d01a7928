package wasmhost

import (
	"bytes"
	"context"
	"testing"
)

// Opcodes of these tests only.
const (
	opI32Load8U = 0x2D
	opI32Shl    = 0x74
)

// TestCancelAfterTheReturn: a watcher of a call's context that looked after the return closed a module that was
// fine, and the next call failed (wazero#1156).
func TestCancelAfterTheReturn(t *testing.T) {
	b := load(t, polite(nil).write(t), Limits{})
	defer b.Close()
	for i := range 10_000 {
		ctx, cancel := context.WithCancel(context.Background())
		err := b.g.invoke(ctx, b.g.pump, exportPump, nil, 0)
		cancel()
		if err != nil {
			t.Fatalf("call %d: %v", i, err)
		}
	}
}

// TestMemoryThatGrows: a view of the guest's memory that was taken before the guest grew it is not its memory any
// more, and what is written there is lost (wazero#2215). Here each buffer lies in pages that did not exist before
// the call that allocated it, and the guest reads what was put there.
func TestMemoryThatGrows(t *testing.T) {
	m := polite(func(_ *module, f map[string]*fn) {
		f[exportAlloc].body = join(i32Const(8), []byte{opMemoryGrow, 0}, i32Const(16), []byte{opI32Shl}) // the first new page
		f[exportPump].body = join(getLocal(0), []byte{opI32Load8U, 0, 0})
	})
	b := load(t, m.write(t), Limits{})
	defer b.Close()
	ctx := context.Background()
	for n := 4 << 10; n <= 128<<10; n *= 2 {
		before := b.g.module.Memory().Size()
		payload := bytes.Repeat([]byte{byte(n >> 10), 7}, n)
		if err := b.g.put(ctx, payload); err != nil {
			t.Fatal(err)
		}
		if b.g.module.Memory().Size() <= before {
			t.Fatalf("%d bytes: the memory did not grow", n)
		}
		for _, i := range []int{0, 1, len(payload) - 2, len(payload) - 1} {
			if err := b.g.invoke(ctx, b.g.pump, exportPump, nil, uint64(b.g.buffer)+uint64(i)); err != nil {
				t.Fatal(err)
			}
			if got := byte(b.g.stack[0]); got != payload[i] {
				t.Errorf("%d bytes: the guest reads %d at %d, want %d", n, got, i, payload[i])
			}
		}
	}
}

// TestNoFiles: a guest with a mount could make a link that leads out of it, and follow it (wazero#2321). Here a
// guest has no mount: there is no directory that it could name, whatever the path.
func TestNoFiles(t *testing.T) {
	const at = badAt + 64 // of the path
	call := func(args ...[]byte) []byte { return append(join(args...), opCall, 0) }
	for path, f := range map[string]struct {
		name   string
		params []byte
		body   func(n int32) []byte // n bytes of path lie at at; the descriptor is the pump's parameter
	}{
		"new": {"path_open", []byte{i32, i32, i32, i32, i32, i64, i64, i32, i32}, func(n int32) []byte {
			return call(getLocal(0), i32Const(1), i32Const(at), i32Const(n), i32Const(1), i64Const(2), i64Const(2), i32Const(0), i32Const(bufferAt))
		}},
		"/etc/passwd": {"path_open", []byte{i32, i32, i32, i32, i32, i64, i64, i32, i32}, func(n int32) []byte {
			return call(getLocal(0), i32Const(0), i32Const(at), i32Const(n), i32Const(0), i64Const(2), i64Const(2), i32Const(0), i32Const(bufferAt))
		}},
		"x/../../etc": {"path_symlink", []byte{i32, i32, i32, i32, i32}, func(n int32) []byte {
			return call(i32Const(at), i32Const(n), getLocal(0), i32Const(at), i32Const(1))
		}},
		"a": {"path_rename", []byte{i32, i32, i32, i32, i32, i32}, func(n int32) []byte {
			return call(getLocal(0), i32Const(at), i32Const(n), getLocal(0), i32Const(at), i32Const(n))
		}},
		"": {"fd_prestat_get", []byte{i32, i32}, func(int32) []byte { return call(getLocal(0), i32Const(bufferAt)) }},
	} {
		m := polite(func(m *module, funcs map[string]*fn) {
			m.imports = []fn{{name: "wasi_snapshot_preview1." + f.name, params: f.params, results: []byte{i32}}}
			copy(m.data[at-dataAt:], path)
			funcs[exportPump].body = f.body(int32(len(path)))
		})
		b := load(t, m.write(t), Limits{})
		for fd := uint64(3); fd < 20; fd++ { // the first that a mount would have
			if err := b.g.invoke(context.Background(), b.g.pump, exportPump, nil, fd); err != nil {
				t.Fatal(err)
			}
			if errno := b.g.stack[0]; errno == 0 {
				t.Errorf("%s(%d, %q) succeeded", f.name, fd, path)
			}
		}
		b.Close()
	}
}
