package workerapi_test

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/terminus-kv/terminus/internal/workerapi/workertest"
	"golang.org/x/sys/unix"
)

// worker is a client that sends whatever a test wants.
type worker struct {
	t    testing.TB
	conn *net.UnixConn
	seq  int
}

type answer struct {
	T       string `json:"t"`
	Seq     uint64 `json:"seq"`
	Code    string `json:"code"`
	Field   string `json:"field"`
	Rule    string `json:"rule"`
	Message string `json:"message"`
	Slot    int32  `json:"slot"`
	Ended   bool   `json:"ended"`
	Reason  string `json:"reason"`
	Status  int    `json:"status"`
	Aux     int    `json:"aux"`
	payload []byte
}

const layoutJSON = `"layout":{"dtype":"bf16","layers":4,"kv_heads":8,"head_dim":128,"page_tokens":16,"kind":"mha"}`

func connect(t testing.TB, e *workertest.Engine) *worker {
	t.Helper()
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: e.Config.Socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(20 * time.Second))
	return &worker{t: t, conn: c}
}

// dial connects and says hello.
func dial(t testing.TB, e *workertest.Engine, role string, slots int) *worker {
	t.Helper()
	w := connect(t, e)
	a := w.ask(`{"t":"hello","v":1,"group":"g","role":"`+role+`","rank":0,"size":1,"slots":`+strconv.Itoa(slots)+`,`+layoutJSON+`}`, nil)
	if a.T != "ok" {
		t.Fatalf("hello: %+v", a)
	}
	return w
}

func (w *worker) raw(b []byte, fds ...int) {
	w.t.Helper()
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	if _, _, err := w.conn.WriteMsgUnix(b, oob, nil); err != nil {
		w.t.Fatal(err)
	}
}

func frame(h string, p []byte) []byte {
	m := binary.LittleEndian.AppendUint32(nil, uint32(len(h)))
	m = binary.LittleEndian.AppendUint32(m, uint32(len(p)))
	return append(append(m, h...), p...)
}

// tell sends a request; {"…"} gets its seq.
func (w *worker) tell(h string, p []byte, fds ...int) {
	w.t.Helper()
	w.seq++
	w.raw(frame(fmt.Sprintf(`{"seq":%d,%s`, w.seq, h[1:]), p), fds...)
}

func (w *worker) read() (answer, error) {
	var l [8]byte
	var a answer
	if _, err := io.ReadFull(w.conn, l[:]); err != nil {
		return a, err
	}
	h := binary.LittleEndian.Uint32(l[:])
	b := make([]byte, h+binary.LittleEndian.Uint32(l[4:]))
	if _, err := io.ReadFull(w.conn, b); err != nil {
		return a, err
	}
	a.payload = b[h:]
	return a, json.Unmarshal(b[:h], &a)
}

func (w *worker) ask(h string, p []byte, fds ...int) answer {
	w.t.Helper()
	w.tell(h, p, fds...)
	a, err := w.read()
	if err != nil {
		w.t.Fatalf("%s: %v", h, err)
	}
	if a.Seq != 0 && int(a.Seq) != w.seq {
		w.t.Fatalf("%s: answer %+v", h, a)
	}
	return a
}

// closed reports whether the engine closes the connection.
func (w *worker) closed() bool {
	_, err := w.read()
	return errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET)
}

func memory(t testing.TB, size int64, flags, seals int) int {
	t.Helper()
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|flags)
	if err != nil {
		t.Skipf("this machine cannot make that memory: %v", err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Ftruncate(fd, size); err != nil {
		t.Fatal(err)
	}
	if seals != 0 {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
			t.Fatal(err)
		}
	}
	return fd
}

func reopen(t testing.TB, fd, flags int) int {
	t.Helper()
	n, err := unix.Open("/proc/self/fd/"+strconv.Itoa(fd), flags|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(n) })
	return n
}

func lease(t testing.TB) int {
	t.Helper()
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(p[0]); unix.Close(p[1]) })
	return p[0]
}

const goodSeals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

func openFDs(t testing.TB) int {
	t.Helper()
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(d)
}

func idsOf(v ...int32) []byte {
	var b []byte
	for _, i := range v {
		b = binary.LittleEndian.AppendUint32(b, uint32(i))
	}
	return b
}

// withPool adds region 1 of 64 KiB and pool 0 of 8 pages.
func (w *worker) withPool() {
	w.t.Helper()
	fd := reopen(w.t, memory(w.t, 65536, unix.MFD_ALLOW_SEALING, goodSeals), unix.O_RDWR)
	if a := w.ask(`{"t":"region_add","region":1,"size":65536,"canary_offset":65528,"canary":0}`, nil, fd, lease(w.t)); a.T != "ok" {
		w.t.Fatalf("region_add: %+v", a)
	}
	if a := w.ask(`{"t":"pool_add","pool":0,"pages":8,"tensors":[{"region":1,"offset":0,"page_stride":4096,"page_bytes":4096,"layer":0}]}`, nil); a.T != "ok" {
		w.t.Fatalf("pool_add: %+v", a)
	}
}
