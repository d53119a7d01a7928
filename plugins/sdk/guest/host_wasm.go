package guest

import "unsafe"

// The host functions.

//go:wasmimport engine_v1 log
func hostLog(level uint32, ptr unsafe.Pointer, n uint32)

//go:wasmimport engine_v1 emit
func hostEmit(ptr unsafe.Pointer, n uint32) int32

//go:wasmimport engine_v1 now_ns
func hostNow() int64

//go:wasmimport engine_v1 region_copy
func hostCopy(peer uint32, dst, dstOff, src, srcOff, n uint64) int32

//go:wasmimport engine_v1 region_read
func hostRead(src, off uint64, ptr unsafe.Pointer, n uint32) int32

//go:wasmimport engine_v1 region_write
func hostWrite(peer uint32, dst, off uint64, ptr unsafe.Pointer, n uint32) int32

// engine is the host as the session sees it.
type engine struct{}

func (engine) log(level Level, text string) {
	hostLog(uint32(level), unsafe.Pointer(unsafe.StringData(text)), uint32(len(text)))
}

func (engine) emit(frame []byte) int32 {
	return hostEmit(unsafe.Pointer(unsafe.SliceData(frame)), uint32(len(frame)))
}
func (engine) now() int64 { return hostNow() }
func (engine) copy(peer uint32, dst, dstOff, src, srcOff, n uint64) int32 {
	return hostCopy(peer, dst, dstOff, src, srcOff, n)
}

func (engine) read(src, off uint64, to []byte) int32 {
	return hostRead(src, off, unsafe.Pointer(unsafe.SliceData(to)), uint32(len(to)))
}

func (engine) write(peer uint32, dst, off uint64, from []byte) int32 {
	return hostWrite(peer, dst, off, unsafe.Pointer(unsafe.SliceData(from)), uint32(len(from)))
}

// held keeps what the host was given the address of; the collector must not take it.
var held = map[uint32][]byte{}

var reply []byte

//go:wasmexport engine_v1_alloc
func exportAlloc(n uint32) uint32 {
	b := make([]byte, max(n, 1))
	ptr := uint32(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
	held[ptr] = b
	return ptr
}

//go:wasmexport engine_v1_free
func exportFree(ptr, _ uint32) { delete(held, ptr) }

//go:wasmexport engine_v1_call
func exportCall(method, ptr, n uint32) uint64 {
	buffer := held[ptr]
	if uint64(n) > uint64(len(buffer)) {
		panic("engine_v1_call: the host passed memory that it did not allocate")
	}
	reply = served().call(method, buffer[:n])
	return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(reply))))<<32 | uint64(len(reply))
}

//go:wasmexport engine_v1_pump
func exportPump(budget uint32) uint32 {
	if served().pump(int64(budget) * 1000) {
		return 1
	}
	return 0
}

var current *session

func served() *session {
	if current == nil {
		panic("no backend: call guest.Serve from an init function of the main package")
	}
	return current
}

// Serve makes b the backend of this module. Call it from an init function.
func Serve(b Backend) { current = newSession(b, engine{}) }

// Log writes a line to the engine's log.
func Log(level Level, text string) { engine{}.log(level, text) }

// Read copies bytes of a region of this engine's workers, at most 64 KiB.
func Read(region, off uint64, to []byte) error { return failure(engine{}.read(region, off, to)) }

// Write copies bytes to a region of a peer's, at most 64 KiB, while an op is open that leads there.
func Write(peer uint32, region, off uint64, from []byte) error {
	return failure(engine{}.write(peer, region, off, from))
}
