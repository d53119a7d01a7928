package cuda

import (
	"bytes"
	"errors"
	"os"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/plugins/sdk/conformance/internal/cuda/cudatest"
)

// TestMemory: what one side writes the other reads, by the driver here and by what is handed out there, and all
// of it is given back. Several threads do so at once: the driver keeps its context by thread.
func TestMemory(t *testing.T) {
	library := cudatest.Library(t)
	d, err := Open(library)
	if err != nil {
		t.Fatal(err)
	}
	if n, err := d.Devices(); n != 1 || err != nil {
		t.Fatalf("%d devices, %v", n, err)
	}
	dev, err := d.Device(0)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		make func(uint64) (*Memory, error)
	}{{"VMM", dev.NewVMM}, {"IPC", dev.NewIPC}} {
		t.Run(c.name, func(t *testing.T) {
			var work sync.WaitGroup
			for range 8 {
				work.Go(func() {
					if err := exchange(c.make); err != nil {
						t.Error(err)
					}
				})
			}
			work.Wait()
			if n := cudatest.Live(t, library); n != 1 {
				t.Errorf("%d objects of the driver are left, want 1, the context", n)
			}
		})
	}
	if err := dev.Close(); err != nil {
		t.Error(err)
	}
	if n := cudatest.Live(t, library); n != 0 {
		t.Errorf("%d objects of the driver are left", n)
	}
}

func exchange(make func(uint64) (*Memory, error)) error {
	m, err := make(3<<20 + 1)
	if err != nil {
		return err
	}
	if m.Size != 4<<20 {
		return errors.New("the size was not rounded up to the granularity")
	}
	fd := m.FD
	if m.Handle != nil {
		f, err := os.OpenFile(unix.ByteSliceToString(m.Handle), os.O_RDWR, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		fd = int(f.Fd())
	} else if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
		return errors.New("a process that is started would inherit the memory")
	}
	there, err := unix.Mmap(fd, 0, int(m.Size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	defer unix.Munmap(there)
	if err := m.Write([]byte("from here"), m.Size-9); err != nil {
		return err
	}
	if !bytes.Equal(there[m.Size-9:], []byte("from here")) {
		return errors.New("what was written is not there when Write returns")
	}
	copy(there[100:], "from there")
	got := [10]byte{}
	if err := m.Read(got[:], 100); err != nil {
		return err
	}
	if string(got[:]) != "from there" {
		return errors.New("Read does not see what the other side wrote")
	}
	for _, off := range []uint64{m.Size - 9, m.Size + 1, 1<<64 - 1} {
		if m.Read(got[:], off) == nil || m.Write(got[:], off) == nil {
			return errors.New("a copy left the memory")
		}
	}
	if err := m.Read(nil, m.Size); err != nil {
		return err
	}
	if err := m.Free(); err != nil {
		return err
	}
	if m.Read(got[:], 0) == nil {
		return errors.New("memory was read after Free")
	}
	return m.Free() // again: nothing
}

// TestErrors: one line that names what was missing, or the call and its result.
func TestErrors(t *testing.T) {
	library := cudatest.Library(t)
	if _, err := Open(library + ".none"); err == nil || !strings.Contains(err.Error(), library+".none") {
		t.Errorf("no library: %v", err)
	}
	if _, err := Open("libc.so.6"); err == nil || !strings.Contains(err.Error(), "cuGetErrorName") {
		t.Errorf("another library: %v", err)
	}
	d, err := Open(library)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.Device(1); err == nil || err.Error() != "cuDeviceGet: CUDA_ERROR_INVALID_DEVICE (101)" {
		t.Errorf("a device that is not there: %v", err)
	}
	if err := d.check("cuCall", 999); err == nil || err.Error() != "cuCall: CUresult 999" {
		t.Errorf("a result without a name: %v", err)
	}
	dev, err := d.Device(0)
	if err != nil {
		t.Fatal(err)
	}
	m, err := dev.NewIPC(1)
	if err != nil {
		t.Fatal(err)
	}
	if err := dev.Close(); err != nil {
		t.Fatal(err)
	}
	if err := m.Write([]byte{1}, 0); err == nil || err.Error() != "cuCtxSetCurrent: CUDA_ERROR_INVALID_CONTEXT (201)" {
		t.Errorf("a context that is gone: %v", err)
	}
}
