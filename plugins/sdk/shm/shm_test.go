package shm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
	"github.com/terminus-kv/terminus/plugins/sdk/sdktest"
)

func TestCopy(t *testing.T) {
	p := newPair(t)
	if err := ended(p.write(15).End(), "done", 0); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(p.dst.Bytes[:15*page], p.src.Bytes[:15*page]) {
		t.Error("the pages differ")
	}
	if rest := p.dst.Bytes[15*page:]; !bytes.Equal(rest, bytes.Repeat([]byte{0xEE}, len(rest))) {
		t.Error("bytes behind the op were written")
	}
	if p.peer.Lane != contract.Lane_LANE_SHM {
		t.Errorf("lane %v", p.peer.Lane)
	}
}

// An engine is its own peer, too.
func TestCopyToItself(t *testing.T) {
	h := sdktest.New(t, &backend{})
	src, dst := h.AddRegion(4*page), h.AddRegion(4*page)
	copy(src.Bytes, "to itself")
	peer := sdktest.Connect(h, h)
	plan := peer.IdentityPlan(h.AddPool(4, src.Tensor(0, page)), h.AddPool(4, dst.Tensor(0, page)))
	if err := ended(peer.Submit(sdktest.Op{Plan: plan, Src: sdktest.Pages(0, 4), Dst: sdktest.Pages(0, 4)}).End(), "done", 0); err != nil {
		t.Fatal(err)
	}
	if string(dst.Bytes[:9]) != "to itself" {
		t.Errorf("got %q", dst.Bytes[:9])
	}
	h.RemoveRegion(dst)
	peer.Remove()
}

// Nobody maps a region, or holds its lease, when its removal is answered.
func TestRemoveRegionUnmapsEverywhere(t *testing.T) {
	p := newPair(t)
	p.write(1).End()
	if n := mappings(t); n != 5 { // 2 of the test, 2 of the owning sessions, 1 of the writer
		t.Fatalf("%d mappings before", n)
	}
	p.owner.RemoveRegion(p.dst)
	if n := mappings(t); n != 3 {
		t.Errorf("%d mappings after", n)
	}
	if !p.dst.LeaseEnded() {
		t.Error("the lease is still held")
	}
	if err := ended(p.write(1).End(), "failed", contract.Cause_CAUSE_REFUSED); err != nil {
		t.Error(err)
	}
}

// A copy that runs holds the removal up.
func TestRemoveRegionWaitsForCopies(t *testing.T) {
	p := newPair(t)
	p.writerB.entered, p.writerB.release = make(chan struct{}), make(chan struct{})
	op := p.write(1)
	<-p.writerB.entered
	removed := make(chan struct{})
	go func() {
		defer close(removed)
		p.owner.RemoveRegion(p.dst)
	}()
	select {
	case <-removed:
		t.Error("the region was removed while a window of it was held")
	case <-time.After(50 * time.Millisecond):
	}
	close(p.writerB.release)
	<-removed
	op.End()
	if !p.dst.LeaseEnded() {
		t.Error("the lease is still held")
	}
}

// A dismissed writer lets go of everything.
func TestUnacceptUnmaps(t *testing.T) {
	p := newPair(t)
	p.write(1).End()
	p.peer.To.Send(&contract.HostEvent{Event: &contract.HostEvent_PeerRemove{PeerRemove: &contract.PeerRemove{Peer: p.peer.Writer}}})
	p.owner.Until("PeerRemoved", func(e *contract.PluginEvent) bool { return e.GetPeerRemoved().GetPeer() == p.peer.Writer })
	if n := mappings(t); n != 4 {
		t.Errorf("%d mappings", n)
	}
}

// The death of the owner ends what the writer maps of it, and its ops.
func TestOwnerGone(t *testing.T) {
	p := newPair(t)
	p.write(1).End()
	p.ownerB.Close()
	eventually(t, "the writer unmaps", func() bool { return mappings(t) == 4 })
	end := p.write(1).End()
	if err := errors.Join(ended(end, "failed", contract.Cause_CAUSE_PEER_UNREACHABLE), nil); err != nil {
		t.Error(err)
	}
}

// A connection that is lost while both live is made anew.
func TestReconnect(t *testing.T) {
	p := newPair(t)
	p.write(1).End()
	p.ownerB.mu.Lock()
	for c := range p.ownerB.inbound {
		c.conn.Close()
	}
	p.ownerB.mu.Unlock()
	eventually(t, "a copy succeeds", func() bool { return p.write(1).End().Kind == "done" })
}

func TestNothingLeaks(t *testing.T) {
	before := descriptors(t)
	for range 3 {
		s, w := share(t, 2), share(t, 1)
		if err := s.Accept(writerPeer(7)); err != nil {
			t.Fatal(err)
		}
		mem, memory, lease, err := sdktest.NewMemory(page)
		if err != nil {
			t.Fatal(err)
		}
		reg := &sdk.Region{ID: 1, Size: page, FD: memory, Lease: lease}
		_ = s.AddRegion(reg)
		r, err := w.Dial(target(s))
		if err != nil {
			t.Fatal(err)
		}
		if err := r.Write(context.Background(), 1, 0, []byte("x")); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(w.Close(), s.Close()); err != nil {
			t.Fatal(err)
		}
		closeAll([]int{memory, lease})
		mem.Free()
	}
	eventually(t, "all descriptors are closed", func() bool { return descriptors(t) <= before+1 })
	if n := mappings(t); n != 0 {
		t.Errorf("%d mappings are left", n)
	}
}

func TestDialRefuses(t *testing.T) {
	s, w := share(t, 2), share(t, 1)
	for name, c := range map[string]struct {
		change func(*sdk.Peer)
		says   string
	}{
		"another machine": {func(p *sdk.Peer) { p.SameHost = false }, "another machine"},
		"endpoint":        {func(p *sdk.Peer) { p.Endpoint = []byte("10.0.0.1:80") }, "not one of this backend"},
		"relative path":   {func(p *sdk.Peer) { p.Endpoint = []byte("shm1:x") }, "not one of this backend"},
		"long path":       {func(p *sdk.Peer) { p.Endpoint = []byte("shm1:/" + strings.Repeat("x", 107)) }, "not one of this backend"},
		"token":           {func(p *sdk.Peer) { p.Token = p.Token[1:] }, "31 bytes"},
		"nobody there":    {func(p *sdk.Peer) { p.Endpoint = []byte("shm1:/nowhere/shm") }, "do not see the same files"},
	} {
		p := target(s)
		c.change(p)
		if _, err := w.Dial(p); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", name, err)
		}
	}
	_ = w.Close()
	if _, err := w.Dial(target(s)); !errors.Is(err, errClosed) {
		t.Errorf("after Close: %v", err)
	}
}

func TestWriterNotAdmitted(t *testing.T) {
	s, w := share(t, 2), share(t, 1)
	s.admit = 50 * time.Millisecond
	other := writerPeer(7)
	other.Epoch = 2
	_ = s.Accept(other)
	r, err := w.Dial(target(s))
	if err != nil {
		t.Fatal(err)
	}
	err = r.Write(context.Background(), 1, 0, []byte("x"))
	var e *sdk.Error
	if !errors.As(err, &e) || e.Cause != contract.Cause_CAUSE_REFUSED {
		t.Errorf("got %v", err)
	}
	if s.Counters()["shm.refused"] != 1 {
		t.Errorf("counters %v", s.Counters())
	}
	// Admitted meanwhile: the next op finds it.
	region(t, s, 1, page)
	_ = s.Accept(writerPeer(8))
	if err := r.Write(context.Background(), 1, 0, []byte("x")); err != nil {
		t.Error(err)
	}
}

// The writer may connect before its PeerAccept has come.
func TestAcceptAfterConnect(t *testing.T) {
	s, w := share(t, 2), share(t, 1)
	region(t, s, 1, page)
	r, err := w.Dial(target(s))
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		time.Sleep(20 * time.Millisecond)
		_ = s.Accept(writerPeer(7))
	}()
	if err := r.Write(context.Background(), 1, 0, []byte("x")); err != nil {
		t.Error(err)
	}
}

func TestWriteBounds(t *testing.T) {
	s, w := share(t, 2), share(t, 1)
	mem, _ := region(t, s, 1, page)
	_ = s.Accept(writerPeer(7))
	r, err := w.Dial(target(s))
	if err != nil {
		t.Fatal(err)
	}
	for _, off := range []uint64{page, page - 1, 1 << 40, 1<<64 - 1} {
		var e *sdk.Error
		if err := r.Write(context.Background(), 1, off, []byte("xy")); !errors.As(err, &e) || e.Cause != contract.Cause_CAUSE_BOUNDS {
			t.Errorf("offset %d: %v", off, err)
		}
	}
	if err := r.Write(context.Background(), 1, page-2, []byte("xy")); err != nil || string(mem.Bytes[page-2:]) != "xy" {
		t.Errorf("the last bytes: %v", err)
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(sdk.ErrAborted)
	if err := r.Write(ctx, 2, 0, []byte("x")); err != nil && !errors.Is(err, sdk.ErrAborted) && !strings.Contains(err.Error(), "not share region 2") {
		t.Errorf("aborted: %v", err)
	}
}

// Copies, removals and dismissals at once. The race detector and the checks of leaks are the test.
func TestStorm(t *testing.T) {
	s, w := share(t, 2), share(t, 1)
	s.admit = time.Millisecond
	_ = s.Accept(writerPeer(7))
	var r *Remote
	eventually(t, "a Hello within a millisecond", func() (ok bool) {
		var err error
		r, err = w.Dial(target(s))
		return err == nil
	})
	const regions = 40
	var all sync.WaitGroup
	regs := make([]*sdk.Region, regions)
	for i := range regs {
		_, regs[i] = region(t, s, uint64(i), page)
	}
	for g := range 4 {
		all.Go(func() {
			for i := range 400 {
				err := r.Write(context.Background(), uint64((i+g)%regions), 0, []byte("storm"))
				var e *sdk.Error
				if err != nil && (!errors.As(err, &e) || e.Cause == contract.Cause_CAUSE_INTERNAL) {
					t.Error(err)
				}
			}
		})
	}
	all.Go(func() {
		for _, reg := range regs[:regions/2] {
			if err := s.Withdraw(reg); err != nil {
				t.Error(err)
			}
		}
		s.Unaccept(writerPeer(7))
	})
	all.Wait()
	eventually(t, "the writer maps nothing", func() bool { return mappings(t) == regions })
}

// writer is the other process: it maps region 1 and says so, then copies its stdin there, for ever.
func writer(endpoint string) int {
	s, err := Listen(sdk.Start{Incarnation: 1, Epoch: 1, RuntimeDir: os.Getenv("SHM_TEST_WRITER")})
	if err != nil {
		fmt.Println(err)
		return 1
	}
	r, err := s.Dial(&sdk.Peer{Endpoint: []byte(endpoint), SameHost: true, Token: token})
	if err == nil {
		err = r.Write(context.Background(), 1, 0, []byte("written by another process"))
	}
	fmt.Println(err)
	_, _ = io.Copy(io.Discard, os.Stdin)
	return 0
}

func writerProcess(t *testing.T, s *Share) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(os.Args[0], string(s.Endpoint()))
	cmd.Env = append(os.Environ(), "SHM_TEST_WRITER="+t.TempDir())
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stdin.Close()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	b := make([]byte, 200)
	n, err := out.Read(b)
	if got := strings.TrimSpace(string(b[:n])); err != nil || got != "<nil>" {
		t.Fatalf("the writer says %q, %v", got, err)
	}
	return cmd
}

// stop returns when every thread of the process is stopped.
func stop(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	if err := cmd.Process.Signal(unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	var status unix.WaitStatus
	if _, err := unix.Wait4(cmd.Process.Pid, &status, unix.WUNTRACED, nil); err != nil || !status.Stopped() {
		t.Fatalf("status %#x, %v", status, err)
	}
}

// A writer that is stopped delays a removal until it runs again or is dead: no time is a proof that it lets go.
func TestStoppedWriter(t *testing.T) {
	for name, signal := range map[string]unix.Signal{"goes on": unix.SIGCONT, "dies": unix.SIGKILL} {
		t.Run(name, func(t *testing.T) { testStoppedWriter(t, signal) })
	}
}

func testStoppedWriter(t *testing.T, signal unix.Signal) {
	s := share(t, 2)
	mem, reg := region(t, s, 1, page)
	_ = s.Accept(writerPeer(7))
	cmd := writerProcess(t, s)
	if !strings.HasPrefix(string(mem.Bytes), "written by another process") {
		t.Fatal("the bytes are not there")
	}
	stop(t, cmd)
	s.late = 50 * time.Millisecond
	withdrawn := make(chan error, 1)
	go func() { withdrawn <- s.Withdraw(reg) }()
	eventually(t, "the writer is late", func() bool { return s.Counters()["shm.withdraw_late"] == 1 })
	select {
	case err := <-withdrawn:
		t.Fatalf("Withdraw with a stopped writer: %v", err)
	case <-time.After(4 * s.late):
	}
	_ = cmd.Process.Signal(signal)
	select {
	case err := <-withdrawn:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(sdktest.Wait):
		t.Error("Withdraw does not return")
	}
}

// The end of the session ends the wait for a stopped writer.
func TestStoppedWriterAtTheEnd(t *testing.T) {
	s := share(t, 2)
	over := make(chan struct{})
	s.start.Over = over
	_, reg := region(t, s, 1, page)
	_ = s.Accept(writerPeer(7))
	stop(t, writerProcess(t, s))
	withdrawn := make(chan error, 1)
	go func() { withdrawn <- s.Withdraw(reg) }()
	close(over)
	select {
	case err := <-withdrawn:
		if err == nil {
			t.Error("Withdraw says that nobody maps the region")
		}
	case <-time.After(sdktest.Wait):
		t.Error("Withdraw does not return")
	}
}

// A stopped writer keeps the lease: the engine is not told that nobody can write.
func TestStoppedWriterKeepsTheLease(t *testing.T) {
	s := share(t, 2)
	mem, memory, lease, err := sdktest.NewMemory(page)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(mem.Free)
	_ = s.AddRegion(&sdk.Region{ID: 1, Size: page, FD: memory, Lease: lease})
	_ = s.Accept(writerPeer(7))
	cmd := writerProcess(t, s)
	stop(t, cmd)
	_ = s.Close()
	closeAll([]int{memory, lease})
	if mem.LeaseEnded() {
		t.Fatal("the lease ended while a writer maps the region")
	}
	_ = cmd.Process.Signal(unix.SIGCONT)
	eventually(t, "the writer lets go when it runs again", mem.LeaseEnded)
}
