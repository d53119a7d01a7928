package workerapi_test

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/terminus-kv/terminus/core"
	sm "github.com/terminus-kv/terminus/core/statemachine"
	"github.com/terminus-kv/terminus/internal/workerapi"
	"github.com/terminus-kv/terminus/internal/workerapi/workertest"
	"golang.org/x/sys/unix"
)

func TestBadVectors(t *testing.T) {
	b, err := os.ReadFile("../../docs/worker-api-vectors.json")
	if err != nil {
		t.Fatal(err)
	}
	var v struct {
		Bad []struct {
			Name, Frame, Code, Field string
			Closes                   bool
		} `json:"bad_requests"`
		Source []struct {
			Request struct{ Frame string }
		} `json:"source_session"`
	}
	if err := json.Unmarshal(b, &v); err != nil {
		t.Fatal(err)
	}
	e := workertest.Start(t, &workertest.Engine{})
	other := dial(t, e, "source", 4)
	for _, c := range v.Bad {
		w := connect(t, e)
		hello, _ := hex.DecodeString(v.Source[0].Request.Frame)
		w.raw(hello)
		if a, err := w.read(); err != nil || a.T != "ok" {
			t.Fatalf("hello: %+v %v", a, err)
		}
		f, _ := hex.DecodeString(c.Frame)
		w.raw(f)
		a, err := w.read()
		if err != nil || a.T != "error" || a.Code != c.Code || a.Field != c.Field || (a.Seq == 0) != c.Closes || a.Rule == "" {
			t.Errorf("%s: answer %+v %v; want %s of %s", c.Name, a, err, c.Code, c.Field)
		}
		if c.Closes && !w.closed() {
			t.Errorf("%s: the connection stays open", c.Name)
		}
		if !c.Closes {
			w.raw(frame(`{"t":"open","seq":9,"room":1}`, nil))
			if a, err := w.read(); err != nil || a.T != "ok" {
				t.Errorf("%s: the session did not go on: %+v %v", c.Name, a, err)
			}
		}
		w.conn.Close()
	}
	if a := other.ask(`{"t":"open","room":1}`, nil); a.T != "ok" {
		t.Errorf("another session was harmed: %+v", a)
	}
	if n := e.Server.Counters().Errors["bad_frame"]; n < 5 {
		t.Errorf("%d bad frames were counted", n)
	}
}

func TestBadMemory(t *testing.T) {
	e := workertest.Start(t, &workertest.Engine{Config: workerapi.Config{MaxRegionBytes: 1 << 20}})
	w := dial(t, e, "source", 4)
	sealed := memory(t, 8192, unix.MFD_ALLOW_SEALING, goodSeals)
	good := reopen(t, sealed, unix.O_RDWR)
	shm, err := os.CreateTemp("/dev/shm", "t")
	if err != nil {
		t.Fatal(err)
	}
	defer os.Remove(shm.Name())
	defer shm.Close()
	disk, err := os.Create(filepath.Join(t.TempDir(), "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer disk.Close()
	shm.Truncate(8192)
	disk.Truncate(8192)
	l := lease(t)
	add := func(size, canary int64) string {
		return fmt.Sprintf(`{"t":"region_add","region":1,"size":%d,"canary_offset":%d,"canary":3}`, size, canary)
	}
	cases := []struct {
		name   string
		header string
		fds    []int
		code   string
		field  string
	}{
		{"no descriptor", add(8192, 0), nil, "bad_fd", "descriptors"},
		{"one descriptor", add(8192, 0), []int{good}, "bad_fd", "descriptors"},
		{"three descriptors", add(8192, 0), []int{good, l, l}, "bad_fd", "descriptors"},
		{"twenty descriptors", add(8192, 0), bytesToInts(bytes.Repeat([]byte{byte(good)}, 20)), "bad_fd", "descriptors"},
		{"the lease is a file", add(8192, 0), []int{good, good}, "bad_fd", "lease"},
		{"the memory is a socket", add(8192, 0), []int{l, l}, "bad_fd", "memory"},
		{"no seals", add(8192, 0), []int{memory(t, 8192, unix.MFD_ALLOW_SEALING, 0), l}, "bad_memory", "memory"},
		{"sealing not allowed", add(8192, 0), []int{memory(t, 8192, 0, 0), l}, "bad_memory", "memory"},
		{"not sealed for good", add(8192, 0), []int{memory(t, 8192, unix.MFD_ALLOW_SEALING, goodSeals&^unix.F_SEAL_SEAL), l}, "bad_memory", "memory"},
		{"future write", add(8192, 0), []int{memory(t, 8192, unix.MFD_ALLOW_SEALING, goodSeals|unix.F_SEAL_FUTURE_WRITE), l}, "bad_memory", "memory"},
		{"/dev/shm", add(8192, 0), []int{int(shm.Fd()), l}, "bad_memory", "memory"},
		{"disk", add(8192, 0), []int{int(disk.Fd()), l}, "bad_memory", "memory"},
		{"read only", add(8192, 0), []int{reopen(t, sealed, unix.O_RDONLY), l}, "bad_memory", "memory"},
		{"too small", add(16384, 0), []int{good, l}, "bad_memory", "size"},
		{"size 0", add(0, 0), []int{good, l}, "bad_field", "size"},
		{"beyond the limit", add(1<<21, 0), []int{good, l}, "limit", "size"},
		{"canary outside", add(8192, 8185), []int{good, l}, "bad_field", "canary_offset"},
		{"no canary", `{"t":"region_add","region":1,"size":8192,"canary_offset":0}`, []int{good, l}, "bad_field", "canary"},
	}
	before := openFDs(t)
	for _, c := range cases {
		a := w.ask(c.header, nil, c.fds...)
		if a.Code != c.code || a.Field != c.field || a.Message == "" {
			t.Errorf("%s: %+v; want %s of %s", c.name, a, c.code, c.field)
		}
	}
	if a := w.ask(`{"t":"abort","slot":0,"room":1}`, nil, good); a.Code != "bad_fd" {
		t.Errorf("descriptors on abort: %+v", a)
	}
	if n := openFDs(t); n != before {
		t.Errorf("%d descriptors are open, %d before: refused ones leak", n, before)
	}
	if _, err := unix.Pwrite(good, []byte{3}, 8184); err != nil {
		t.Fatal(err)
	}
	if a := w.ask(add(8192, 8184), nil, good, l); a.T != "ok" {
		t.Errorf("good memory: %+v", a)
	}
	if a := w.ask(add(8192, 8184), nil, good, l); a.Code != "bad_field" {
		t.Errorf("the same region number again: %+v", a)
	}
}

func bytesToInts(b []byte) []int {
	out := make([]int, len(b))
	for i, v := range b {
		out[i] = int(v)
	}
	return out
}

func TestHugePagesAreRefused(t *testing.T) {
	e := workertest.Start(t, &workertest.Engine{})
	w := dial(t, e, "source", 4)
	fd := reopen(t, memory(t, 2<<20, unix.MFD_ALLOW_SEALING|unix.MFD_HUGETLB, goodSeals), unix.O_RDWR)
	a := w.ask(`{"t":"region_add","region":1,"size":2097152,"canary_offset":0,"canary":3}`, nil, fd, lease(t))
	if a.Code != "bad_memory" || !strings.Contains(a.Message, "huge") {
		t.Errorf("%+v", a)
	}
}

// Descriptors that ride elsewhere than on the first byte are closed and refused.
func TestDescriptorsInTheMiddle(t *testing.T) {
	e := workertest.Start(t, &workertest.Engine{})
	w := dial(t, e, "source", 4)
	fd := reopen(t, memory(t, 8192, unix.MFD_ALLOW_SEALING, goodSeals), unix.O_RDWR)
	before := openFDs(t)
	f := frame(`{"t":"region_add","seq":5,"region":1,"size":8192,"canary_offset":0,"canary":3}`, nil)
	w.raw(f[:20])
	w.raw(f[20:], fd, lease(t))
	if a, err := w.read(); err != nil || a.Code != "bad_fd" || a.Seq != 5 {
		t.Errorf("%+v %v", a, err)
	}
	if n := openFDs(t); n > before+2 { // the lease pair is ours
		t.Errorf("%d descriptors are open, %d before", n, before)
	}
}

func TestBadPools(t *testing.T) {
	e := workertest.Start(t, &workertest.Engine{Config: workerapi.Config{MaxPools: 2}})
	w := dial(t, e, "source", 4)
	w.withPool()
	pool := func(n, pages int, tensors string) string {
		return fmt.Sprintf(`{"t":"pool_add","pool":%d,"pages":%d,"tensors":[%s]}`, n, pages, tensors)
	}
	ten := func(region, offset, stride, size, layer int64) string {
		return fmt.Sprintf(`{"region":%d,"offset":%d,"page_stride":%d,"page_bytes":%d,"layer":%d}`, region, offset, stride, size, layer)
	}
	const big = 9223372036854775807
	for name, h := range map[string]string{
		"number taken":       pool(0, 8, ten(1, 0, 4096, 4096, 0)),
		"number skipped":     pool(2, 8, ten(1, 0, 4096, 4096, 0)),
		"no pages":           pool(1, 0, ten(1, 0, 4096, 4096, 0)),
		"no tensors":         pool(1, 8, ""),
		"unknown kind":       strings.Replace(pool(1, 8, ten(1, 0, 4096, 4096, 0)), `"pages"`, `"kind":"swa","pages"`, 1),
		"unknown region":     pool(1, 8, ten(2, 0, 4096, 4096, 0)),
		"outside":            pool(1, 17, ten(1, 0, 4096, 4096, 0)),
		"outside by offset":  pool(1, 8, ten(1, 32769, 4096, 4096, 0)),
		"negative offset":    pool(1, 8, ten(1, -1, 4096, 4096, 0)),
		"overlapping pages":  pool(1, 8, ten(1, 0, 4095, 4096, 0)),
		"overflow of offset": pool(1, 8, ten(1, big, 4096, 4096, 0)),
		"overflow of stride": pool(1, 8, ten(1, 0, big, 4096, 0)),
		"overflow of bytes":  pool(1, 8, ten(1, 0, big, big, 0)),
		"page of nothing":    pool(1, 8, ten(1, 0, 4096, 0, 0)),
		"unknown layer":      pool(1, 8, ten(1, 0, 4096, 4096, 4)),
	} {
		if a := w.ask(h, nil); a.Code != "bad_field" || a.Rule != workerapi.RulePools {
			t.Errorf("%s: %+v", name, a)
		}
	}
	if a := w.ask(pool(1, 16, ten(1, 0, 4096, 4096, 3)), nil); a.T != "ok" {
		t.Errorf("the whole region: %+v", a)
	}
	if a := w.ask(pool(2, 8, ten(1, 0, 4096, 4096, 0)), nil); a.Code != "limit" {
		t.Errorf("one pool too many: %+v", a)
	}
}

// With worker.require_peer_group no source binds to whoever registers first.
func TestRequirePeerGroup(t *testing.T) {
	e := workertest.Start(t, &workertest.Engine{Config: workerapi.Config{RequirePeerGroup: true}})
	src := dial(t, e, "source", 2)
	if a := src.ask(`{"t":"open","room":1}`, nil); a.Field != "peer_group" || a.T == "ok" {
		t.Errorf("a source without a peer group: %+v", a)
	}
	if a := src.ask(`{"t":"open","room":1,"peer_group":"g"}`, nil); a.T != "ok" {
		t.Errorf("a source with one: %+v", a)
	}
}

func TestBadRooms(t *testing.T) {
	e := workertest.Start(t, &workertest.Engine{})
	src, dst := dial(t, e, "source", 2), dial(t, e, "destination", 2)
	src.withPool()
	dst.withPool()
	if a := dst.ask(`{"t":"open","room":1}`, nil); a.Field != "peer_group" {
		t.Errorf("a destination without a peer group: %+v", a)
	}
	if a := src.ask(`{"t":"open","room":-1}`, nil); a.Field != "room" {
		t.Errorf("negative room: %+v", a)
	}
	if a := src.ask(`{"t":"open","room":1099511627776}`, nil); !a.Ended || a.Reason != "peer_aborted" {
		t.Errorf("an ended attempt: %+v", a)
	}
	a := src.ask(`{"t":"open","room":7}`, nil)
	b := dst.ask(`{"t":"open","room":7,"peer_group":"g"}`, nil)
	if a.T != "ok" || b.T != "ok" {
		t.Fatalf("open: %+v %+v", a, b)
	}
	send := func(rest string) string {
		return fmt.Sprintf(`{"t":"send","slot":%d,"room":7,%s}`, a.Slot, rest)
	}
	reg := func(rest string) string {
		return fmt.Sprintf(`{"t":"register","slot":%d,"room":7,%s}`, b.Slot, rest)
	}
	for _, c := range []struct {
		name    string
		w       *worker
		header  string
		payload []byte
		field   string
	}{
		{"page outside", src, send(`"chunk":0,"parts":[{"pool":0,"pages":2}]`), idsOf(0, 8), "parts"},
		{"negative page", src, send(`"chunk":0,"parts":[{"pool":0,"pages":1}]`), idsOf(-1), "parts"},
		{"largest page", src, send(`"chunk":0,"parts":[{"pool":0,"pages":2}]`), idsOf(2147483646, 2147483647), "parts"},
		{"unknown pool", src, send(`"chunk":0,"parts":[{"pool":1,"pages":1}]`), idsOf(0), "pool"},
		{"too few ids", src, send(`"chunk":0,"parts":[{"pool":0,"pages":2}]`), idsOf(0), "payload"},
		{"too many ids", src, send(`"chunk":0,"parts":[{"pool":0,"pages":1}]`), idsOf(0, 1), "payload"},
		{"a count of 2^62", src, send(`"chunk":0,"parts":[{"pool":0,"pages":4611686018427387904}]`), idsOf(0), "payload"},
		{"negative count", src, send(`"chunk":0,"parts":[{"pool":0,"pages":-1}]`), idsOf(0), "payload"},
		{"aux too short", src, send(`"chunk":0,"parts":[],"last":true,"aux":5`), []byte{1}, "payload"},
		{"aux too long", src, send(`"chunk":0,"parts":[],"last":true,"aux":1048577`), nil, "aux"},
		{"aux before the last", src, send(`"chunk":0,"parts":[{"pool":0,"pages":1}],"aux":1`), append(idsOf(0), 1), "aux"},
		{"nothing at all", src, send(`"chunk":0,"parts":[]`), nil, "parts"},
		{"no chunk number", src, send(`"parts":[{"pool":0,"pages":1}]`), idsOf(0), "chunk"},
		{"layers turned", src, send(`"chunk":0,"parts":[{"pool":0,"pages":1}],"layers":[2,1]`), idsOf(0), "layers"},
		{"layers outside", src, send(`"chunk":0,"parts":[{"pool":0,"pages":1}],"layers":[0,5]`), idsOf(0), "layers"},
		{"prefix on send", src, send(`"chunk":0,"parts":[{"pool":0,"pages":1,"prefix":1}]`), idsOf(0), "prefix"},
		{"prefix beyond", dst, reg(`"parts":[{"pool":0,"pages":1,"prefix":2}]`), idsOf(0), "prefix"},
		{"bytes behind the ids", dst, reg(`"parts":[{"pool":0,"pages":1}]`), append(idsOf(0), 1), "payload"},
		{"send from a destination", dst, fmt.Sprintf(`{"t":"send","slot":%d,"room":7,"chunk":0,"parts":[]}`, b.Slot), nil, "t"},
		{"a free slot", src, `{"t":"abort","slot":1,"room":7}`, nil, "slot"},
		{"a slot that is none", src, `{"t":"abort","slot":2,"room":7}`, nil, "slot"},
		{"another room", src, fmt.Sprintf(`{"t":"abort","slot":%d,"room":8}`, a.Slot), nil, "room"},
		{"aux before success", dst, fmt.Sprintf(`{"t":"aux","slot":%d,"room":7}`, b.Slot), nil, "room"},
	} {
		if a := c.w.ask(c.header, c.payload); a.T != "error" || a.Field != c.field {
			t.Errorf("%s: %+v; want an error of %s", c.name, a, c.field)
		}
	}
	if n := len(e.Events(core.Send)) + len(e.Events(core.Register)); n != 0 {
		t.Fatalf("%d refused requests reached the core", n)
	}
	if a := src.ask(send(`"chunk":0,"parts":[{"pool":0,"pages":3}]`), idsOf(1, 2, 5)); a.T != "ok" {
		t.Fatalf("send: %+v", a)
	}
	if a := src.ask(send(`"chunk":0,"parts":[{"pool":0,"pages":1}]`), idsOf(0)); a.Field != "chunk" {
		t.Errorf("the same chunk again: %+v", a)
	}
	if a := src.ask(fmt.Sprintf(`{"t":"release","slot":%d,"room":7}`, a.Slot), nil); a.Code != "not_reusable" || a.Rule != "R4" {
		t.Errorf("release while armed: %+v", a)
	}
	if a := src.ask(send(`"chunk":1,"parts":[],"last":true,"aux":2`), []byte("ok")); a.T != "ok" {
		t.Fatalf("last: %+v", a)
	}
	ev := e.Events(core.Send)
	if got := fmt.Sprint(ev[0].Parts, string(ev[1].Aux), ev[1].Last); got != "[{0 0 [{1 2 1} {5 1 1}]}]oktrue" {
		t.Errorf("the core got %s", got)
	}
	if a := src.ask(send(`"chunk":2,"parts":[],"last":true`), nil); !a.Ended || a.Reason != "success" {
		t.Errorf("send on an ended room: %+v", a)
	}
	if a := src.ask(fmt.Sprintf(`{"t":"failure","slot":%d,"room":7}`, a.Slot), nil); a.Status != int(sm.Succeeded) || a.Reason != "success" {
		t.Errorf("failure: %+v", a)
	}
	e.Succeed(2, b.Slot, []byte("aux!"))
	if a := dst.ask(fmt.Sprintf(`{"t":"aux","slot":%d,"room":7}`, b.Slot), nil); string(a.payload) != "aux!" {
		t.Errorf("aux: %+v", a)
	}
	// Release twice in one breath: the second finds the slot being released, or free.
	rel := fmt.Sprintf(`{"t":"release","slot":%d,"room":7}`, a.Slot)
	src.tell(rel, nil)
	src.tell(rel, nil)
	okd := 0
	for range 2 {
		if a, err := src.read(); err != nil {
			t.Fatal(err)
		} else if a.T == "ok" {
			okd++
		}
	}
	if okd != 1 || len(e.Events(core.Release)) != 2 { // the refused one and the good one
		t.Errorf("%d releases were answered ok, %d reached the core", okd, len(e.Events(core.Release)))
	}
	for range 2 {
		if a := src.ask(`{"t":"open","room":9}`, nil); a.T != "ok" {
			t.Errorf("a released slot is not usable: %+v", a)
		}
	}
	if a := src.ask(`{"t":"open","room":9}`, nil); a.Code != "limit" {
		t.Errorf("a third room in two slots: %+v", a)
	}
}
