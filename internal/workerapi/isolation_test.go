package workerapi_test

import (
	"encoding/binary"
	"fmt"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/internal/workerapi"
	"github.com/terminus-kv/terminus/internal/workerapi/workertest"
)

// TestRoomOfAnotherSession: a worker that knows room, slot and region numbers of another touches none of them.
func TestRoomOfAnotherSession(t *testing.T) {
	e := workertest.Start(t, &workertest.Engine{})
	owner, thief := dial(t, e, "destination", 4), dial(t, e, "destination", 4)
	owner.withPool()
	a := owner.ask(`{"t":"open","room":7,"peer_group":"g"}`, nil)
	if a.T != "ok" {
		t.Fatalf("open: %+v", a)
	}
	of := func(rest string) string { return fmt.Sprintf(`{"t":%s,"slot":%d,"room":7}`, rest, a.Slot) }
	if a := thief.ask(`{"t":"pool_add","pool":0,"pages":8,"tensors":[{"region":1,"offset":0,"page_stride":4096,"page_bytes":4096,"layer":0}]}`, nil); a.Code != "bad_field" {
		t.Errorf("a pool in another worker's region: %+v", a)
	}
	if a := thief.ask(of(`"register","parts":[{"pool":0,"pages":1}]`), idsOf(0)); a.T != "error" {
		t.Errorf("pages of another worker's pool: %+v", a)
	}
	thief.withPool() // with a pool of its own under the same numbers
	before := len(e.Events(core.Register)) + len(e.Events(core.Abort)) + len(e.Events(core.Release))
	for rest, ids := range map[string][]byte{
		`"register","parts":[{"pool":0,"pages":1}]`: idsOf(0), `"abort"`: nil, `"release"`: nil, `"failure"`: nil, `"aux"`: nil,
	} {
		if a := thief.ask(of(rest), ids); a.T != "error" || a.Rule != workerapi.RuleSlot {
			t.Errorf("%s on another worker's room: %+v", rest, a)
		}
	}
	if n := len(e.Events(core.Register)) + len(e.Events(core.Abort)) + len(e.Events(core.Release)); n != before {
		t.Errorf("%d requests for another worker's room reached the core", n-before)
	}
	if a := owner.ask(of(`"register","parts":[{"pool":0,"pages":1}]`), idsOf(0)); a.T != "ok" {
		t.Errorf("its owner: %+v", a)
	}
}

// TestStatusPageIsReadOnly: a worker can neither write to its status page nor change its size, by no descriptor
// that it can get of it, so what it reads there is what the engine wrote.
func TestStatusPageIsReadOnly(t *testing.T) {
	e := workertest.Start(t, &workertest.Engine{})
	w := connect(t, e)
	w.tell(`{"t":"hello","v":1,"group":"g","role":"source","rank":0,"size":1,"slots":4,`+layoutJSON+`}`, nil)
	buf, oob := make([]byte, 4096), make([]byte, unix.CmsgSpace(4*4))
	_, n, _, _, err := w.conn.ReadMsgUnix(buf, oob)
	if err != nil {
		t.Fatal(err)
	}
	ms, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil || len(ms) != 1 {
		t.Fatalf("%d control messages, %v", len(ms), err)
	}
	fds, err := unix.ParseUnixRights(&ms[0])
	if err != nil || len(fds) != 1 {
		t.Fatalf("descriptors %v, %v", fds, err)
	}
	defer unix.Close(fds[0])
	for name, fd := range map[string]int{"as it came": fds[0], "opened again": reopen(t, fds[0], unix.O_RDWR)} {
		if b, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err == nil {
			unix.Munmap(b)
			t.Errorf("%s: the page can be mapped for writing", name)
		}
		if b, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ, unix.MAP_SHARED); err != nil {
			t.Errorf("%s: %v", name, err)
		} else {
			if unix.Mprotect(b, unix.PROT_READ|unix.PROT_WRITE) == nil {
				t.Errorf("%s: the mapping can be made writable", name)
			}
			if binary.LittleEndian.Uint32(b) != 0x31505354 {
				t.Errorf("%s: this is not the status page", name)
			}
			unix.Munmap(b)
		}
		if _, err := unix.Pwrite(fd, []byte{1}, 64); err == nil {
			t.Errorf("%s: the page can be written", name)
		}
		if unix.Ftruncate(fd, 0) == nil || unix.Ftruncate(fd, 1<<20) == nil {
			t.Errorf("%s: the size can be changed", name)
		}
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_WRITE); err == nil {
			t.Errorf("%s: a seal can be added", name)
		}
	}
}
