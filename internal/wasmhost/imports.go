package wasmhost

import (
	"context"
	"fmt"
	"runtime/debug"
	"strings"
	"time"

	"github.com/tetratelabs/wazero/api"
	"google.golang.org/protobuf/proto"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// importModule is the module of the host functions.
const importModule = "engine_v1"

const (
	// maxCopy is the most that one region_copy moves, so that an abort or the end of the session waits for
	// no more than that.
	maxCopy = 8 << 20
	// maxWindow is the most that region_read and region_write move: headers, not bulk.
	maxWindow = 64 << 10
	// copyChunk is what is copied between two looks at the call's budget.
	copyChunk = 1 << 20
)

// code is what a host function returns; docs/wasm-abi.md has the list.
type code int32

const (
	codeOK      code = 0
	codeHandle  code = -1
	codeBounds  code = -2
	codeRevoked code = -3
	codeMemory  code = -4
	codeSize    code = -5
	codeClosed  code = -6
	codeStopped code = -7
	codeFrame   code = -8
	codeFault   code = -9
)

// imports are the host functions. Arguments come in stack, as the result goes; none of them calls the guest
// or panics.
var imports = []struct {
	name            string
	params, results []api.ValueType
	run             func(g *guest, mem api.Memory, stack []uint64)
}{
	{"log", []api.ValueType{i32, i32, i32}, nil, func(g *guest, mem api.Memory, a []uint64) {
		g.log(mem, int32(a[0]), uint32(a[1]), uint32(a[2]))
	}},
	{"emit", []api.ValueType{i32, i32}, []api.ValueType{i32}, func(g *guest, mem api.Memory, a []uint64) {
		a[0] = g.emit(mem, uint32(a[0]), uint32(a[1])).wire()
	}},
	{"now_ns", nil, []api.ValueType{i64}, func(g *guest, _ api.Memory, a []uint64) {
		a[0] = uint64(time.Since(g.began))
	}},
	{"region_copy", []api.ValueType{i32, i64, i64, i64, i64, i64}, []api.ValueType{i32}, func(g *guest, _ api.Memory, a []uint64) {
		a[0] = g.regionCopy(uint32(a[0]), a[1], a[2], a[3], a[4], a[5]).wire()
	}},
	{"region_read", []api.ValueType{i64, i64, i32, i32}, []api.ValueType{i32}, func(g *guest, mem api.Memory, a []uint64) {
		a[0] = g.regionRead(mem, a[0], a[1], uint32(a[2]), uint32(a[3])).wire()
	}},
	{"region_write", []api.ValueType{i32, i64, i64, i32, i32}, []api.ValueType{i32}, func(g *guest, mem api.Memory, a []uint64) {
		a[0] = g.regionWrite(mem, uint32(a[0]), a[1], a[2], uint32(a[3]), uint32(a[4])).wire()
	}},
}

func (c code) wire() uint64 { return uint64(uint32(c)) }

// provide makes the host functions known to the runtime.
func (g *guest) provide(ctx context.Context) error {
	builder := g.runtime.NewHostModuleBuilder(importModule)
	for _, f := range imports {
		builder.NewFunctionBuilder().WithGoModuleFunction(api.GoModuleFunc(func(_ context.Context, m api.Module, stack []uint64) {
			f.run(g, m.Memory(), stack)
		}), f.params, f.results).Export(f.name)
	}
	if _, err := builder.Instantiate(ctx); err != nil {
		return fmt.Errorf("host functions: %w", err)
	}
	return nil
}

// stopped tells whether the running call should end.
func (g *guest) stopped() bool { return g.ctx.Err() != nil }

// violate notes what the guest did wrong, the first of it, and cuts its call short.
func (g *guest) violate(err error) {
	if g.violation == nil {
		g.violation = err
	}
	g.cancel()
}

func (g *guest) log(mem api.Memory, level int32, ptr, n uint32) {
	view, ok := mem.Read(ptr, min(n, maxLine))
	if !ok {
		g.violate(fmt.Errorf("log of [%#x,+%d), outside its memory of %d bytes", ptr, n, mem.Size()))
		return
	}
	l := contract.Log_Level(level)
	if l < contract.Log_LEVEL_DEBUG || l > contract.Log_LEVEL_ERROR {
		g.violate(fmt.Errorf("log with level %d; 1 to 4 are legal", level))
		return
	}
	g.sink.logf(l, "%s", strings.ToValidUTF8(string(view), "\uFFFD"))
}

// emit takes a frame, event by event.
func (g *guest) emit(mem api.Memory, ptr, n uint32) code {
	if g.violation != nil {
		return codeFrame
	}
	if n > sdk.MaxFrame {
		g.violate(fmt.Errorf("emit of a frame of %d bytes; %d is the limit", n, sdk.MaxFrame))
		return codeFrame
	}
	g.frames, g.bytes = g.frames+1, g.bytes+int(n)
	if g.frames > g.limits.Frames || g.bytes > g.limits.FrameBytes {
		g.violate(fmt.Errorf("emitted %d frames and %d bytes in one call; %d and %d are the limits", g.frames, g.bytes, g.limits.Frames, g.limits.FrameBytes))
		return codeFrame
	}
	view, ok := mem.Read(ptr, n)
	if !ok {
		g.violate(fmt.Errorf("emit of [%#x,+%d), outside its memory of %d bytes", ptr, n, mem.Size()))
		return codeMemory
	}
	var frame contract.PluginFrame
	if err := proto.Unmarshal(view, &frame); err != nil { // copies what it keeps
		g.violate(fmt.Errorf("emit of %d bytes that are no PluginFrame", n))
		return codeFrame
	}
	for _, e := range frame.Events {
		if err := g.sink.take(e); err != nil {
			g.violate(err)
			return codeFrame
		}
	}
	return codeOK
}

// within tells whether [off, off+n) lies in size bytes; it cannot overflow.
func within(off, n, size uint64) bool { return n <= size && off <= size-n }

func (g *guest) regionCopy(peer uint32, dst, dstOff, src, srcOff, n uint64) code {
	if n > maxCopy {
		return codeSize
	}
	from, c := g.sink.own(src)
	if c != codeOK {
		return c
	}
	if !within(srcOff, n, uint64(len(from))) {
		return codeBounds
	}
	to, c := g.sink.peer(peer, dst, dstOff, n)
	if c != codeOK {
		return c
	}
	for from = from[srcOff : srcOff+n]; len(from) > 0; {
		if g.stopped() {
			return codeStopped
		}
		k := min(len(from), copyChunk)
		if c := g.move(to[:k], from[:k]); c != codeOK {
			return c
		}
		from, to = from[k:], to[k:]
	}
	return codeOK
}

func (g *guest) regionRead(mem api.Memory, src, off uint64, ptr, n uint32) code {
	if n > maxWindow {
		return codeSize
	}
	from, c := g.sink.own(src)
	if c != codeOK {
		return c
	}
	if !within(off, uint64(n), uint64(len(from))) {
		return codeBounds
	}
	to, ok := mem.Read(ptr, n) // a view: to is written through
	if !ok {
		return codeMemory
	}
	return g.move(to, from[off:off+uint64(n)])
}

func (g *guest) regionWrite(mem api.Memory, peer uint32, dst, off uint64, ptr, n uint32) code {
	if n > maxWindow {
		return codeSize
	}
	to, c := g.sink.peer(peer, dst, off, uint64(n))
	if c != codeOK {
		return c
	}
	from, ok := mem.Read(ptr, n)
	if !ok {
		return codeMemory
	}
	return g.move(to, from)
}

// move copies; a fault in mapped memory is a code.
func (g *guest) move(to, from []byte) (c code) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if recover() != nil {
			c = codeFault
		}
	}()
	g.copied.Add(uint64(copy(to, from)))
	return codeOK
}
