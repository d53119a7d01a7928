package cuda

import (
	"fmt"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// Constants and structures of cuda.h.
const (
	attributeRDMAWithVMM = 110 // CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED

	allocationTypePinned        = 1 // CU_MEM_ALLOCATION_TYPE_PINNED
	handleTypePOSIX             = 1 // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
	locationTypeDevice          = 1 // CU_MEM_LOCATION_TYPE_DEVICE
	accessReadWrite             = 3 // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
	granularityMinimum          = 0 // CU_MEM_ALLOC_GRANULARITY_MINIMUM
	ipcHandleSize               = 64
	ipcGranularity       uint64 = 2 << 20
)

// location is CUmemLocation.
type location struct {
	kind, id int32
}

// allocationProp is CUmemAllocationProp.
type allocationProp struct {
	kind                 int32
	requestedHandleTypes int32
	location             location
	_                    uintptr // win32HandleMetaData
	_                    uint8   // compressionType
	gpuDirectRDMACapable uint8
	_                    [6]uint8 // usage, reserved
}

// accessDesc is CUmemAccessDesc.
type accessDesc struct {
	location location
	flags    int32
}

// Device is a GPU with its primary context, which all users in a process share.
type Device struct {
	driver *Driver
	device int32
	ctx    uintptr
	prop   allocationProp
	grain  uint64
}

// Device opens a GPU. Close it.
func (d *Driver) Device(ordinal int) (*Device, error) {
	dev := &Device{driver: d}
	if err := d.check("cuDeviceGet", d.deviceGet(&dev.device, int32(ordinal))); err != nil {
		return nil, err
	}
	dev.prop = allocationProp{
		kind: allocationTypePinned, requestedHandleTypes: handleTypePOSIX, location: location{locationTypeDevice, dev.device},
	}
	var rdma int32
	if err := d.check("cuDeviceGetAttribute", d.deviceGetAttribute(&rdma, attributeRDMAWithVMM, dev.device)); err != nil {
		return nil, err
	}
	if rdma != 0 { // else a network card could not reach the memory, and a plugin may want it to
		dev.prop.gpuDirectRDMACapable = 1
	}
	if err := d.check("cuMemGetAllocationGranularity", d.memGetGranularity(&dev.grain, &dev.prop, granularityMinimum)); err != nil {
		return nil, err
	}
	if err := d.check("cuDevicePrimaryCtxRetain", d.primaryCtxRetain(&dev.ctx, dev.device)); err != nil {
		return nil, err
	}
	return dev, nil
}

// Close lets go of the context, all memory of the device being freed.
func (d *Device) Close() error {
	return d.driver.check("cuDevicePrimaryCtxRelease", d.driver.primaryCtxRelease(d.device))
}

// on runs f with the device's context current. The driver keeps that by thread.
func (d *Device) on(f func(*Driver) error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := d.driver.check("cuCtxSetCurrent", d.driver.ctxSetCurrent(d.ctx)); err != nil {
		return err
	}
	return f(d.driver)
}

// Memory is memory of a device, mapped here, that other processes can open.
type Memory struct {
	Size   uint64
	FD     int    // the exported descriptor, -1 if Handle is how it is opened
	Handle []byte // cudaIpcMemHandle_t, nil if FD is how it is opened

	device *Device
	ptr    uint64 // what cuMemAlloc or cuMemAddressReserve gave, 0 for none
	mapped bool   // something is mapped at what was reserved
}

// NewVMM makes memory of at least size bytes, a multiple of the device's granularity, that is opened by a
// POSIX descriptor.
func (d *Device) NewVMM(size uint64) (*Memory, error) {
	m := &Memory{Size: roundUp(size, d.grain), FD: -1, device: d}
	err := d.on(func(c *Driver) error {
		if err := c.check("cuMemAddressReserve", c.memAddressReserve(&m.ptr, m.Size, 0, 0, 0)); err != nil {
			return err
		}
		var handle uint64
		if err := c.check("cuMemCreate", c.memCreate(&handle, m.Size, &d.prop, 0)); err != nil {
			return err
		}
		defer c.memRelease(handle) // the mapping and the descriptor keep the memory
		if err := c.check("cuMemMap", c.memMap(m.ptr, m.Size, 0, handle, 0)); err != nil {
			return err
		}
		m.mapped = true
		access := accessDesc{d.prop.location, accessReadWrite}
		if err := c.check("cuMemSetAccess", c.memSetAccess(m.ptr, m.Size, &access, 1)); err != nil {
			return err
		}
		// The descriptor comes without close-on-exec: no process may be started before it has it.
		syscall.ForkLock.RLock()
		defer syscall.ForkLock.RUnlock()
		var fd int32
		if err := c.check("cuMemExportToShareableHandle", c.memExport(&fd, handle, handleTypePOSIX, 0)); err != nil {
			return err
		}
		m.FD = int(fd)
		unix.CloseOnExec(m.FD)
		return nil
	})
	if err != nil {
		_ = m.Free()
		return nil, err
	}
	return m, nil
}

// NewIPC makes memory of at least size bytes that is opened by a cudaIpcMemHandle_t. Its size is a multiple of
// 2 MiB, for the driver cuts smaller pieces from a common block, and a handle opens the whole block.
func (d *Device) NewIPC(size uint64) (*Memory, error) {
	m := &Memory{Size: roundUp(size, ipcGranularity), FD: -1, device: d}
	err := d.on(func(c *Driver) error {
		if err := c.check("cuMemAlloc", c.memAlloc(&m.ptr, m.Size)); err != nil {
			return err
		}
		var handle [ipcHandleSize]byte
		m.Handle = handle[:]
		return c.check("cuIpcGetMemHandle", c.ipcGetMemHandle(&handle, m.ptr))
	})
	if err != nil {
		_ = m.Free()
		return nil, err
	}
	return m, nil
}

func roundUp(n, grain uint64) uint64 { return (n + grain - 1) / grain * grain }

// Free gives the memory back. It stays as long as another process has it open.
func (m *Memory) Free() error {
	if m.FD >= 0 {
		unix.Close(m.FD)
		m.FD = -1
	}
	ptr, mapped := m.ptr, m.mapped
	m.ptr, m.mapped = 0, false
	if ptr == 0 {
		return nil
	}
	return m.device.on(func(c *Driver) error {
		if m.Handle != nil {
			return c.check("cuMemFree", c.memFree(ptr))
		}
		if mapped {
			if err := c.check("cuMemUnmap", c.memUnmap(ptr, m.Size)); err != nil {
				return err
			}
		}
		return c.check("cuMemAddressFree", c.memAddressFree(ptr, m.Size))
	})
}

// Read copies from the memory, from off on.
func (m *Memory) Read(b []byte, off uint64) error {
	if err := m.bounds(b, off); err != nil || len(b) == 0 {
		return err
	}
	return m.device.on(func(c *Driver) error {
		return c.check("cuMemcpyDtoH", c.memcpyDtoH(&b[0], m.ptr+off, uint64(len(b))))
	})
}

// Write copies into the memory, from off on, and returns when every byte is there: the driver's call may return
// when the bytes are in a buffer of its own.
func (m *Memory) Write(b []byte, off uint64) error {
	if err := m.bounds(b, off); err != nil || len(b) == 0 {
		return err
	}
	return m.device.on(func(c *Driver) error {
		if err := c.check("cuMemcpyHtoD", c.memcpyHtoD(m.ptr+off, &b[0], uint64(len(b)))); err != nil {
			return err
		}
		return c.check("cuCtxSynchronize", c.ctxSynchronize())
	})
}

func (m *Memory) bounds(b []byte, off uint64) error {
	if m.ptr == 0 || off > m.Size || uint64(len(b)) > m.Size-off {
		return fmt.Errorf("%d bytes at %d of device memory of %d bytes", len(b), off, m.Size)
	}
	return nil
}
