// Package cuda makes device memory that a plugin can open: the few calls of the CUDA driver that a worker
// needs to hand its KV cache over. The driver's library is opened when a run needs it and never linked, so
// that everything builds and runs on a machine that has none.
package cuda

import (
	"errors"
	"fmt"
	"runtime"

	"github.com/ebitengine/purego"
	"golang.org/x/sys/unix"
)

// Library is the name by which the loader finds the driver.
const Library = "libcuda.so.1"

// Driver is an open library of the driver. Names, types and constants are those of cuda.h; CUresult,
// CUdevice and enums are int32, CUcontext is a uintptr, CUdeviceptr, size_t and allocation handles are uint64.
type Driver struct {
	getErrorName       func(result int32, name **byte) int32
	init               func(flags uint32) int32
	deviceGetCount     func(count *int32) int32
	deviceGet          func(device *int32, ordinal int32) int32
	deviceGetAttribute func(value *int32, attribute, device int32) int32
	primaryCtxRetain   func(ctx *uintptr, device int32) int32
	primaryCtxRelease  func(device int32) int32
	ctxSetCurrent      func(ctx uintptr) int32
	ctxSynchronize     func() int32
	memGetGranularity  func(size *uint64, prop *allocationProp, option int32) int32
	memCreate          func(handle *uint64, size uint64, prop *allocationProp, flags uint64) int32
	memRelease         func(handle uint64) int32
	memExport          func(fd *int32, handle uint64, handleType int32, flags uint64) int32
	memAddressReserve  func(ptr *uint64, size, alignment, addr, flags uint64) int32
	memAddressFree     func(ptr, size uint64) int32
	memMap             func(ptr, size, offset, handle, flags uint64) int32
	memUnmap           func(ptr, size uint64) int32
	memSetAccess       func(ptr, size uint64, desc *accessDesc, count uint64) int32
	memAlloc           func(ptr *uint64, size uint64) int32
	memFree            func(ptr uint64) int32
	ipcGetMemHandle    func(handle *[ipcHandleSize]byte, ptr uint64) int32
	memcpyHtoD         func(dst uint64, src *byte, n uint64) int32
	memcpyDtoH         func(dst *byte, src, n uint64) int32
}

// Open opens the driver and initialises it. It is never closed: libcuda keeps threads of its own.
func Open(library string) (*Driver, error) {
	// dlopen leaves its reason with the thread, and a goroutine that moved to another one finds none.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	lib, err := purego.Dlopen(library, purego.RTLD_NOW|purego.RTLD_LOCAL)
	if err != nil {
		return nil, fmt.Errorf("open the CUDA driver: %w", err)
	}
	d := &Driver{}
	for _, f := range []struct {
		name string
		call any
	}{
		{"cuGetErrorName", &d.getErrorName},
		{"cuInit", &d.init},
		{"cuDeviceGetCount", &d.deviceGetCount},
		{"cuDeviceGet", &d.deviceGet},
		{"cuDeviceGetAttribute", &d.deviceGetAttribute},
		{"cuDevicePrimaryCtxRetain", &d.primaryCtxRetain},
		{"cuDevicePrimaryCtxRelease_v2", &d.primaryCtxRelease},
		{"cuCtxSetCurrent", &d.ctxSetCurrent},
		{"cuCtxSynchronize", &d.ctxSynchronize},
		{"cuMemGetAllocationGranularity", &d.memGetGranularity},
		{"cuMemCreate", &d.memCreate},
		{"cuMemRelease", &d.memRelease},
		{"cuMemExportToShareableHandle", &d.memExport},
		{"cuMemAddressReserve", &d.memAddressReserve},
		{"cuMemAddressFree", &d.memAddressFree},
		{"cuMemMap", &d.memMap},
		{"cuMemUnmap", &d.memUnmap},
		{"cuMemSetAccess", &d.memSetAccess},
		{"cuMemAlloc_v2", &d.memAlloc},
		{"cuMemFree_v2", &d.memFree},
		{"cuIpcGetMemHandle", &d.ipcGetMemHandle},
		{"cuMemcpyHtoD_v2", &d.memcpyHtoD},
		{"cuMemcpyDtoH_v2", &d.memcpyDtoH},
	} {
		symbol, err := purego.Dlsym(lib, f.name)
		if err != nil {
			return nil, fmt.Errorf("the CUDA driver is too old or is none: %w", err)
		}
		purego.RegisterFunc(f.call, symbol)
	}
	if err := d.check("cuInit", d.init(0)); err != nil {
		return nil, err
	}
	return d, nil
}

// check turns a CUresult into an error that names the call and the result.
func (d *Driver) check(call string, result int32) error {
	if result == 0 { // CUDA_SUCCESS
		return nil
	}
	var name *byte
	if d.getErrorName(result, &name) != 0 || name == nil {
		return fmt.Errorf("%s: CUresult %d", call, result)
	}
	return fmt.Errorf("%s: %s (%d)", call, unix.BytePtrToString(name), result)
}

// Devices is the number of GPUs that this process may use, at least 1.
func (d *Driver) Devices() (int, error) {
	var n int32
	if err := d.check("cuDeviceGetCount", d.deviceGetCount(&n)); err != nil {
		return 0, err
	}
	if n == 0 {
		return 0, errors.New("the CUDA driver lists no device")
	}
	return int(n), nil
}
