package admin_test

import (
	"net"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/internal/admin"
	"github.com/terminus-kv/terminus/internal/admin/admintest"
)

// TestForeignUser: another user who gets as far as connecting, because somebody opened the folder and the socket,
// is asked nothing and told nothing.
func TestForeignUser(t *testing.T) {
	if os.Getuid() != 0 {
		if os.Getenv("CI") != "" {
			t.Fatal("only root can become somebody else, and CI tests everything")
		}
		t.Skip("only root can become somebody else")
	}
	e := admintest.Sample()
	_, socket := start(t, admin.Options{Engine: e, Mutations: true})
	for path, mode := range map[string]os.FileMode{socket: 0o666, filepath.Dir(socket): 0o755, filepath.Dir(filepath.Dir(socket)): 0o755} {
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
	}
	type result struct {
		n   int
		err error
	}
	got := make(chan result)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), 65534, ^uintptr(0))
		c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
		if err != nil {
			got <- result{0, err}
			return
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(10 * time.Second))
		c.Write([]byte("POST /v1/rooms/8131776411/abort HTTP/1.1\r\nHost: engine\r\n\r\n")) // may be closed already
		n, err := c.Read(make([]byte, 100))
		got <- result{n, err}
	}()
	if r := <-got; r.n != 0 || r.err == nil || os.IsTimeout(r.err) || os.IsPermission(r.err) {
		t.Errorf("user 65534 reads %d bytes, %v; want a closed connection", r.n, r.err)
	}
	if calls := e.Calls(); len(calls) != 0 {
		t.Errorf("user 65534 made the engine %q", calls)
	}
}
