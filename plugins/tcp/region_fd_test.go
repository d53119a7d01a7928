package tcp

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// What SECURITY.md says of the descriptor of a region that goes to the receiving plugin: as it came it writes
// nothing, which is against mistakes; opened again by /proc it does, so that a process of the engines' user is trusted.
func TestRegionDescriptor(t *testing.T) {
	region, err := unix.MemfdCreate("region", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(region)
	const size = 4096
	if err := unix.Ftruncate(region, size); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.FcntlInt(uintptr(region), unix.F_ADD_SEALS, unix.F_SEAL_GROW|unix.F_SEAL_SHRINK); err != nil {
		t.Fatal(err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "s")})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	from, err := net.DialUnix("unix", nil, l.Addr().(*net.UnixAddr))
	if err != nil {
		t.Fatal(err)
	}
	defer from.Close()
	to, err := l.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	defer to.Close()
	if err := sendRegion(from, []byte("region"), region); err != nil {
		t.Fatal(err)
	}
	r := &fdReader{c: to}
	if _, err := r.Read(make([]byte, 16)); err != nil || len(r.fds) != 1 {
		t.Fatalf("descriptors %v, %v", r.fds, err)
	}
	came := r.fds[0]
	defer unix.Close(came)

	if _, err := unix.Pwrite(came, []byte("x"), 0); err == nil {
		t.Error("as it came it can be written")
	}
	if b, err := unix.Mmap(came, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err == nil {
		unix.Munmap(b)
		t.Error("as it came it can be mapped for writing")
	}
	b, err := unix.Mmap(came, 0, size, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(b)
	if unix.Mprotect(b, unix.PROT_READ|unix.PROT_WRITE) == nil {
		t.Error("its mapping can be made writable")
	}

	again, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", came), os.O_RDWR, 0)
	if err != nil {
		t.Fatalf("opened again for writing: %v; then SECURITY.md says too little", err)
	}
	defer again.Close()
	if _, err := again.WriteAt([]byte("changed"), 0); err != nil || string(b[:7]) != "changed" {
		t.Errorf("opened again it writes nothing (%q, %v): then SECURITY.md says too little", b[:7], err)
	}
}
