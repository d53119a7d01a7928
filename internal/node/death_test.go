package node_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	client "github.com/terminus-kv/terminus/clients/go"
)

// scribble writes a growing number into a page of the first tensor, as a late write of a peer's network
// card would.
func scribble(mem []byte, page int) {
	at := (*uint64)(unsafe.Pointer(&mem[page*pageBytes]))
	for n := uint64(1); ; n++ {
		atomic.StoreUint64(at, n)
		time.Sleep(time.Millisecond)
	}
}

func scribbled(mem []byte, page int) uint64 {
	return atomic.LoadUint64((*uint64)(unsafe.Pointer(&mem[page*pageBytes])))
}

// squat starts a grandchild of the engine that leaves the plugin's process group and maps its memory. In
// the two latter modes nothing in its environment tells that it belongs to the plugin; what does is the
// control socket, or the region's lease, as the contract asks.
func squat(mode string, region [2]int) {
	self, err := os.Executable()
	if err != nil {
		os.Exit(1)
	}
	cmd := exec.Command(self, "squatter")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	hold := region[0]
	switch mode {
	case "squatter-ctrl":
		hold = 3
	case "squatter-lease":
		hold = region[1]
	}
	if hold != region[0] {
		cmd.Env = []string{"NONE=1"}
	}
	for _, fd := range []int{region[0], hold} {
		own, err := unix.Dup(fd)
		if err != nil {
			os.Exit(1)
		}
		cmd.ExtraFiles = append(cmd.ExtraFiles, os.NewFile(uintptr(own), "held"))
	}
	if err := cmd.Start(); err != nil {
		os.Exit(1)
	}
	for _, f := range cmd.ExtraFiles {
		f.Close()
	}
}

// squatterPage holds the squatter's process id behind the number that it writes.
const squatterPage = 9

func squatterMain() {
	var st unix.Stat_t
	if unix.Fstat(3, &st) != nil {
		os.Exit(1)
	}
	mem, err := unix.Mmap(3, 0, int(st.Size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		os.Exit(1)
	}
	binary.LittleEndian.PutUint64(mem[squatterPage*pageBytes+8:], uint64(os.Getpid()))
	time.AfterFunc(time.Minute, func() { os.Exit(0) })
	scribble(mem, squatterPage)
}

// breach configures a breacher as the backend.
func breach(t *testing.T, mode ...string) []string {
	self, err := os.Executable()
	must(t, err)
	return []string{"plugins.tcp.exec=" + self, `plugins.tcp.args=["plugin","breach","` + strings.Join(mode, `","`) + `"]`}
}

// atPlugin waits until the op of a room is at the breacher that was given the file: one that still waits for its peer
// there is quiet as soon as it is withdrawn.
func atPlugin(t *testing.T, file string) {
	t.Helper()
	eventually(t, "the op is at the plugin", func() bool { _, err := os.Stat(file); return err == nil })
}

// The plugin is dead and its stream has ended, but a process that it started still maps the workers'
// memory: the pages are not fenced before that one is gone, too.
func TestGrandchildDelaysTheFence(t *testing.T) {
	for _, mode := range []string{"squatter", "squatter-ctrl", "squatter-lease"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			dir := tempDir(t)
			pe, de := start(t, dir, "p", breach(t, "stuck", filepath.Join(dir, "here"))...), start(t, dir, "d", breach(t, mode)...)
			p, d := dial(t, pe, client.Source, "prefill", 0, 1, 16), dial(t, de, client.Destination, "decode", 0, 1, 16)
			ctx := short(t)
			mem := d.region.Bytes()
			eventually(t, "the squatter writes", func() bool { return scribbled(mem, squatterPage) > 1 })
			squatter := int(binary.LittleEndian.Uint64(mem[squatterPage*pageBytes+8:]))
			defer unix.Kill(squatter, unix.SIGKILL)
			rs, rd := bind(t, p, d, 1, []int32{squatterPage})
			must(t, rs.Send(ctx, client.Chunk{Parts: []client.Part{{Pool: p.pool, Pages: []int32{1}}}, Last: true}))
			atPlugin(t, filepath.Join(dir, "here"))
			pid, _ := de.plugin(t)
			must(t, unix.Kill(pid, unix.SIGKILL))
			st, err := rd.WaitTerminal(ctx)
			must(t, err)
			if f, _ := rd.Failure(ctx); st != client.Failed || f.Reason != "plugin_lost" {
				t.Fatalf("%v: %+v", st, f)
			}
			if mode != "squatter" {
				time.Sleep(500 * time.Millisecond)
				if rd.Residency().Reusable() {
					t.Fatalf("pages are %v while process %d writes to them", rd.Residency(), squatter)
				}
				must(t, unix.Kill(squatter, unix.SIGKILL))
			} // else the engine finds it by its environment and kills it
			must(t, rd.WaitReusable(ctx))
			n := scribbled(mem, squatterPage)
			time.Sleep(20 * time.Millisecond)
			if late := scribbled(mem, squatterPage); late != n {
				t.Errorf("a write landed in pages that are %v", rd.Residency())
			}
			if rd.Residency() != client.Fenced {
				t.Errorf("pages are %v", rd.Residency())
			}
		})
	}
}

// A worker dies while its pages may still be written: what comes late lands in its old memory, which the
// engine keeps; the worker that takes its place has other memory, and the old one goes when it is fenced.
func TestLateWritesLandInOrphanMemory(t *testing.T) {
	dir := tempDir(t)
	pe, de := start(t, dir, "p", breach(t, "stuck", filepath.Join(dir, "here"))...), start(t, dir, "d", breach(t, "late")...)
	p := dial(t, pe, client.Source, "prefill", 0, 1, 16)
	w := spawnWorker(t, de)
	ctx := short(t)
	rs, err := p.Open(ctx, client.OpenOptions{Room: 1})
	must(t, err)
	must(t, rs.Send(ctx, client.Chunk{Parts: []client.Part{{Pool: p.pool, Pages: []int32{1, 2}}}, Last: true}))
	atPlugin(t, filepath.Join(dir, "here"))
	memory := w.memory(t)
	old, err := unix.Mmap(int(memory.Fd()), 0, 16*pageBytes*tensors, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	must(t, err)
	w.kill()
	st, err := rs.WaitTerminal(ctx)
	must(t, err)
	if f, _ := rs.Failure(ctx); st != client.Failed || f.Reason != "worker_lost" {
		t.Fatalf("source is %v: %+v\n%s", st, f, explain(1))
	}
	d := dial(t, de, client.Destination, "decode", 0, 1, 16) // the rank is free at once
	n := scribbled(old, 1)
	eventually(t, "a late write lands in the old memory", func() bool { return scribbled(old, 1) > n+10 })
	if !bytes.Equal(d.region.Bytes(), make([]byte, len(d.region.Bytes()))) {
		t.Error("the new worker's memory was written")
	}
	status, err := de.admin.Status(ctx)
	must(t, err)
	if status.Sessions != 2 || status.Held != 1 {
		t.Errorf("the dead worker's memory should be kept: %+v", status)
	}
	pid, _ := de.plugin(t)
	must(t, unix.Kill(pid, unix.SIGKILL)) // the one that writes
	eventually(t, "the orphan memory is given back", func() bool {
		s, err := de.admin.Status(ctx)
		return err == nil && s.Sessions == 1 && s.Held == 0
	})
	reader, err := os.Open("/proc/self/fd/" + strconv.Itoa(int(memory.Fd())))
	must(t, err)
	defer reader.Close()
	must(t, unix.Munmap(old))
	must(t, memory.Close())
	eventually(t, "nobody holds it any more", func() bool {
		_, err := unix.FcntlInt(reader.Fd(), unix.F_SETLEASE, unix.F_RDLCK)
		return err == nil
	})
}

// redial follows the loss of the worker's engine.
func (w *worker) redial(t *testing.T) {
	t.Helper()
	c, err := w.Redial(short(t))
	must(t, err)
	w.Client = c
	t.Cleanup(func() { c.Close() })
}

// An engine is killed: on one host its peer knows by proof, at once; its workers latch engine_lost, get
// their pages back by proof, and go on with the next incarnation and the same memory.
func TestEngineKilled(t *testing.T) {
	t.Parallel()
	dir := tempDir(t)
	pe, de := start(t, dir, "p"), spawn(t, dir, "d")
	p, d := dial(t, pe, client.Source, "prefill", 0, 1, 16), dial(t, de, client.Destination, "decode", 0, 1, 16)
	handOver(t, p, d, 1, []int32{1, 2}, []int32{3, 4})
	ctx := short(t)
	ps, pd := bind(t, p, d, 2, []int32{5, 6})
	must(t, ps.Send(ctx, client.Chunk{Parts: []client.Part{{Pool: p.pool, Pages: []int32{5}}}}))
	began := time.Now()
	de.kill()
	st, err := pd.WaitTerminal(ctx)
	must(t, err)
	if f, _ := pd.Failure(ctx); st != client.Failed || f.Reason != client.ReasonEngineLost {
		t.Errorf("destination is %v: %+v", st, f)
	}
	t.Logf("its worker knows after %v", time.Since(began))
	st, err = ps.WaitTerminal(ctx)
	must(t, err)
	if f, _ := ps.Failure(ctx); st != client.Failed || f.Reason != "peer_lost" {
		t.Errorf("source is %v: %+v", st, f)
	}
	took := time.Since(began)
	t.Logf("its peer knows after %v", took)
	if took > 5*time.Second { // a second where the machine is not busy
		t.Errorf("the peer took %v: that was the clock, not the proof", took)
	}
	must(t, pd.WaitReusable(ctx))
	must(t, ps.WaitReusable(ctx))
	must(t, ps.Release(ctx))

	spawn(t, dir, "d")
	d.redial(t)
	t.Logf("redialled after %v", time.Since(began))
	if pd.Poll() != client.Failed || pd.Residency() != client.Fenced {
		t.Errorf("the old room is %v, %v", pd.Poll(), pd.Residency())
	}
	handOver(t, p, d, 2, []int32{5, 6}, []int32{5, 6})
	t.Logf("first hand-over done after %v", time.Since(began))
}

// A stopped plugin does not keep the pages of an engine that died: the kernel wakes what is stopped in a
// process group that became an orphan, and the plugin finds its host gone.
func TestEngineKilledBesideAStoppedPlugin(t *testing.T) {
	t.Parallel()
	dir := tempDir(t)
	pe, de := start(t, dir, "p"), spawn(t, dir, "d")
	p, d := dial(t, pe, client.Source, "prefill", 0, 1, 16), dial(t, de, client.Destination, "decode", 0, 1, 16)
	_, rd := bind(t, p, d, 1, []int32{1})
	pid, _ := de.plugin(t)
	freeze(t, pid)
	de.kill()
	must(t, rd.WaitReusable(short(t)))
	if st, res := rd.State(); st != client.Failed || res != client.Fenced {
		t.Errorf("%v %v", st, res)
	}
}

// A worker gives a stopped engine up and goes back to it when it wakes up: the same incarnation, which
// has ended the old session and let go of its memory.
func TestWorkerReturnsToAWokenEngine(t *testing.T) {
	t.Parallel()
	dir := tempDir(t)
	pe, de := start(t, dir, "p"), spawn(t, dir, "d")
	p, d := dial(t, pe, client.Source, "prefill", 0, 1, 16), dial(t, de, client.Destination, "decode", 0, 1, 16)
	ctx := short(t)
	o := options(de.cfg.Worker.Socket, client.Destination, "impatient", 0, 1) // with bounds that the test can wait for
	o.SuspectAfter, o.LostAfter = 300*time.Millisecond, 2*time.Second
	c, err := client.Dial(ctx, o)
	must(t, err)
	defer c.Close()
	impatient := &worker{Client: c}
	must(t, impatient.add(ctx, 16))
	defer impatient.region.Close()
	before := c.Incarnation()
	rs, rd := bind(t, p, impatient, 1, []int32{1})
	de.signal(t, unix.SIGSTOP)
	st, err := rd.WaitTerminal(ctx)
	must(t, err)
	if f, _ := rd.Failure(ctx); st != client.Failed || f.Reason != client.ReasonEngineLost || d.Err() != nil {
		t.Errorf("%v: %+v; the patient worker: %v", st, f, d.Err())
	}
	time.AfterFunc(300*time.Millisecond, func() { de.signal(t, unix.SIGCONT) })
	impatient.redial(t)
	if impatient.Incarnation() != before {
		t.Errorf("incarnation %d, then %d", before, impatient.Incarnation())
	}
	if st, res := rd.State(); st != client.Failed || res != client.Fenced {
		t.Errorf("the old room is %v %v", st, res)
	}
	st, err = rs.WaitTerminal(ctx)
	must(t, err)
	if f, _ := rs.Failure(ctx); st != client.Failed || f.Reason != "worker_lost" {
		t.Errorf("the source is %v: %+v", st, f)
	}
	handOver(t, p, impatient, 2, []int32{1, 2}, []int32{3, 4})
	handOver(t, p, d, 3, []int32{1, 2}, []int32{3, 4})
}

// A process that the plugin started outlives the engine and still maps the memory: the pages stay
// quarantined until the next engine has swept it away, and the worker's redial waits for that.
func TestRedialWaitsForTheSweep(t *testing.T) {
	t.Parallel()
	dir := tempDir(t)
	pe, de := start(t, dir, "p"), spawn(t, dir, "d", breach(t, "squatter")...)
	p, d := dial(t, pe, client.Source, "prefill", 0, 1, 16), dial(t, de, client.Destination, "decode", 0, 1, 16)
	ctx := short(t)
	mem := d.region.Bytes()
	eventually(t, "the squatter writes", func() bool { return scribbled(mem, squatterPage) > 1 })
	squatter := int(binary.LittleEndian.Uint64(mem[squatterPage*pageBytes+8:]))
	defer unix.Kill(squatter, unix.SIGKILL)
	_, rd := bind(t, p, d, 1, []int32{squatterPage})
	de.kill()
	st, err := rd.WaitTerminal(ctx)
	must(t, err)
	if st != client.Failed {
		t.Fatalf("destination is %v", st)
	}
	soon, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
	defer cancel()
	if err := rd.WaitReusable(soon); !errors.Is(err, client.ErrNotReusable) || rd.Residency() != client.Quarantined {
		t.Fatalf("pages are %v while process %d writes to them: %v", rd.Residency(), squatter, err)
	}
	spawn(t, dir, "d")
	d.redial(t)
	if n := scribbled(mem, squatterPage); rd.Residency() != client.Fenced {
		t.Errorf("pages are %v", rd.Residency())
	} else if time.Sleep(20 * time.Millisecond); scribbled(mem, squatterPage) != n {
		t.Error("a write landed in fenced pages")
	}
	handOver(t, p, d, 1, []int32{1, 2}, []int32{3, 4})
}

// The source's engine is killed: the destination's room fails at once, its pages become quiet when the
// engine's plugin is gone, too.
func TestSourceEngineKilled(t *testing.T) {
	t.Parallel()
	dir := tempDir(t)
	pe, de := spawn(t, dir, "p"), start(t, dir, "d")
	p, d := dial(t, pe, client.Source, "prefill", 0, 1, 16), dial(t, de, client.Destination, "decode", 0, 1, 16)
	handOver(t, p, d, 1, []int32{1, 2}, []int32{3, 4})
	ctx := short(t)
	rs, rd := bind(t, p, d, 2, []int32{5, 6})
	must(t, rs.Send(ctx, client.Chunk{Parts: []client.Part{{Pool: p.pool, Pages: []int32{5}}}}))
	pe.kill()
	st, err := rd.WaitTerminal(ctx)
	must(t, err)
	if f, _ := rd.Failure(ctx); st != client.Failed || f.Reason != "peer_lost" {
		t.Errorf("destination is %v: %+v", st, f)
	}
	must(t, rd.WaitReusable(ctx))
	must(t, rd.Release(ctx))
	spawn(t, dir, "p")
	p.redial(t)
	must(t, rs.Release(ctx))
	handOver(t, p, d, 2, []int32{5, 6}, []int32{5, 6})
}

// An engine that was stopped hears its workers before its peers: a room whose worker gave the engine up
// meanwhile must not succeed on a commit that waited in the peer's socket.
func TestWakingEngineHearsWorkersFirst(t *testing.T) {
	t.Parallel()
	dir := tempDir(t)
	pe, de := start(t, dir, "p"), spawn(t, dir, "d")
	p := dial(t, pe, client.Source, "prefill", 0, 1, 64)
	ctx := short(t)
	for round := range int64(2) {
		var d *worker
		eventually(t, "a place for the rank", func() (ok bool) { // the session before may not have ended yet
			w, err := newWorker(ctx, de.cfg.Worker.Socket, client.Destination, "decode", 0, 1, 64)
			if err != nil && !strings.Contains(err.Error(), "connected already") {
				t.Fatal(err)
			}
			d = w
			return err == nil
		})
		t.Cleanup(func() {
			d.Close()
			d.region.Close()
		})
		var rooms []*client.Room
		var last *client.Room
		for i := range int64(16) {
			rs, rd := bind(t, p, d, round*16+i, []int32{int32(i)})
			rooms, last = append(rooms, rs), rd
		}
		de.signal(t, unix.SIGSTOP)
		for i, rs := range rooms {
			must(t, rs.Send(ctx, client.Chunk{Parts: []client.Part{{Pool: p.pool, Pages: []int32{int32(i)}}}, Last: true}))
		}
		for _, rs := range rooms { // the bytes are there, the commit waits in the socket
			eventually(t, "committed", func() bool {
				info, err := pe.admin.Room(ctx, rs.ID())
				return err == nil && len(info) > 0 && info[0].State == "committed"
			})
		}
		for range 200 { // the end of the socket stands behind what its worker said before
			_, err := last.StartRegister(ctx)
			must(t, err)
		}
		d.Close() // as the client does after 12 s, before it latches
		time.Sleep(700 * time.Millisecond)
		de.signal(t, unix.SIGCONT)
		for _, rs := range rooms {
			st, err := rs.WaitTerminal(ctx)
			must(t, err)
			if f, _ := rs.Failure(ctx); st != client.Failed || f.Reason != "worker_lost" {
				t.Fatalf("room %d is %v after its destination worker had left: %+v\n%s", rs.ID(), st, f, explain(rs.ID()))
			}
			must(t, rs.WaitReusable(ctx))
			must(t, rs.Release(ctx))
		}
	}
}

// descriptors counts what a process has open.
func descriptors(t *testing.T, pid int) int {
	t.Helper()
	fds, err := os.ReadDir("/proc/" + strconv.Itoa(pid) + "/fd")
	must(t, err)
	return len(fds)
}

// An engine that runs out of descriptors harms nobody whom it serves already, says what is wrong to who
// comes new, neither spins nor dies, and takes new workers when there are descriptors again.
func TestOutOfDescriptors(t *testing.T) {
	t.Parallel()
	dir := tempDir(t)
	pe, de := start(t, dir, "p"), spawn(t, dir, "d")
	p, d := dial(t, pe, client.Source, "prefill", 0, 1, 16), dial(t, de, client.Destination, "decode", 0, 1, 16)
	handOver(t, p, d, 1, []int32{1, 2}, []int32{3, 4})
	pid := de.cmd.Process.Pid
	var old unix.Rlimit
	must(t, unix.Prlimit(pid, unix.RLIMIT_NOFILE, nil, &old))
	base := descriptors(t, pid)
	limit := func(n uint64) {
		must(t, unix.Prlimit(pid, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: n, Max: old.Max}, nil))
	}

	for spare := range 6 { // each step of a dial meets the bound once
		limit(uint64(descriptors(t, pid) + spare))
		ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
		w, err := newWorker(ctx, de.cfg.Worker.Socket, client.Destination, "other", 0, 1, 16)
		cancel()
		if err == nil {
			w.Close()
			w.region.Close()
		} else if !errors.Is(err, context.DeadlineExceeded) && !strings.Contains(err.Error(), "too many") {
			t.Errorf("%d to spare: the worker is told %q", spare, err)
		}
		handOver(t, p, d, int64(2+spare), []int32{1, 2}, []int32{3, 4})
	}
	limit(uint64(descriptors(t, pid)))
	c, err := net.Dial("unix", de.cfg.Worker.Socket) // waits in the backlog
	must(t, err)
	defer c.Close()
	before := cpu(t, pid)
	time.Sleep(500 * time.Millisecond)
	if used := cpu(t, pid) - before; used > 250*time.Millisecond {
		t.Errorf("%v of processor time in half a second without descriptors", used)
	}
	limit(old.Cur)
	eventually(t, "a new worker is served", func() bool {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		w, err := newWorker(ctx, de.cfg.Worker.Socket, client.Destination, "other", 0, 1, 16)
		if err != nil {
			return false
		}
		w.Close()
		w.region.Close()
		return true
	})
	handOver(t, p, d, 100, []int32{1, 2}, []int32{3, 4})
	c.Close()
	eventually(t, "nothing is left open", func() bool { return descriptors(t, pid) <= base+1 }) // one of the admin API's
}

// cpu is the processor time that a process has used.
func cpu(t *testing.T, pid int) time.Duration {
	t.Helper()
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	must(t, err)
	fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	ticks := 0
	for _, f := range fields[11:13] {
		n, err := strconv.Atoi(f)
		must(t, err)
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}
