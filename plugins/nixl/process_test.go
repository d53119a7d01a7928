package nixl

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ebitengine/purego"
	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
	"github.com/terminus-kv/terminus/plugins/sdk/sdktest"
)

const childEnv = "TERMINUS_NIXL_TEST_CHILD" // the path of the library

// child is what the receiving process says about itself.
type child struct {
	Endpoint string
	Region   uint64
	Pool     uint64
}

const (
	childPages = 512
	childPage  = 128 << 10
	childNode  = "parent"
)

func childToken() []byte { return bytes.Repeat([]byte{5}, 32) }

// TestChild is the receiving process of the tests below; on its own it does nothing.
func TestChild(t *testing.T) {
	library := os.Getenv(childEnv)
	if library == "" {
		return
	}
	b := New()
	h := sdktest.New(t, b, sdktest.WithConfig(options{"library": library}), sdktest.WithNode("child", 1, 1))
	r := h.AddRegion(childPages*childPage + 64)
	pool := h.AddPool(childPages, r.Tensor(0, childPage))
	if err := b.Accept(&sdk.Peer{Handle: 1, Node: childNode, Incarnation: 3, Epoch: 4, Token: childToken()}); err != nil {
		t.Fatal(err)
	}
	out, err := json.Marshal(child{hex.EncodeToString(h.Response.Endpoint), r.ID, pool})
	if err != nil {
		t.Fatal(err)
	}
	fmt.Printf("child %s\n", out)
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); { // until the parent goes
		switch lines.Text() {
		case "crash": // what a bug in the library does
			handle, err := purego.Dlopen(library, purego.RTLD_NOW)
			if err != nil {
				t.Fatal(err)
			}
			abort, err := purego.Dlsym(handle, "abort")
			if err != nil {
				t.Fatal(err)
			}
			purego.SyscallN(abort)
		case "count": // pages by their first byte
			count := map[byte]int{}
			for i := range childPages {
				count[r.Bytes[i*childPage]]++
			}
			out, _ := json.Marshal(count)
			fmt.Printf("child %s\n", out)
		}
	}
}

// remoteChild is a receiving process, seen by the test.
type remoteChild struct {
	t     testing.TB
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines *bufio.Scanner
	child
}

func startChild(t testing.TB, library string) *remoteChild {
	t.Helper()
	dir, err := os.MkdirTemp("", "t")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	c := &remoteChild{t: t, cmd: exec.Command(os.Args[0], "-test.run", "^TestChild$", "-test.v")}
	c.cmd.Env = append(os.Environ(), childEnv+"="+library, "TMPDIR="+dir)
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	stdout, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.end)
	c.lines = bufio.NewScanner(stdout)
	c.answer(&c.child)
	return c
}

func (c *remoteChild) end() {
	c.in.Close()
	_ = c.cmd.Process.Kill()
	_ = c.cmd.Wait()
}

func (c *remoteChild) answer(v any) {
	c.t.Helper()
	for c.lines.Scan() {
		if text, ok := strings.CutPrefix(c.lines.Text(), "child "); ok {
			if err := json.Unmarshal([]byte(text), v); err != nil {
				c.t.Fatal(err)
			}
			return
		}
	}
	c.t.Fatal("the child said nothing")
}

// count returns how many pages of the child begin with each byte.
func (c *remoteChild) count() map[byte]int {
	c.t.Helper()
	fmt.Fprintln(c.in, "count")
	count := map[byte]int{}
	c.answer(&count)
	return count
}

// stop stops the process and waits until it stands still.
func (c *remoteChild) stop() {
	c.t.Helper()
	_ = c.cmd.Process.Signal(unix.SIGSTOP)
	eventually(c.t, "the process stops", func() bool {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", c.cmd.Process.Pid))
		return err == nil && b[bytes.LastIndexByte(b, ')')+2] == 'T'
	})
}

func (c *remoteChild) goOn() { _ = c.cmd.Process.Signal(unix.SIGCONT) }

// sender is a writer in the test's process.
type sender struct {
	t     testing.TB
	b     *Backend
	h     *sdktest.Host
	src   *sdktest.Region
	peers uint32
}

func newSender(t testing.TB, library string) *sender {
	t.Helper()
	s := &sender{t: t, b: New()}
	s.h = sdktest.New(t, s.b, sdktest.WithConfig(options{"library": library}), sdktest.WithNode(childNode, 3, 4))
	s.src = s.h.AddRegion(childPages*childPage + 64)
	return s
}

// target is a child as a peer of a sender.
type target struct {
	s         *sender
	handle    uint32
	plan      uint64
	pageBytes uint64
}

func (s *sender) connect(c *remoteChild) *target { return s.connectPages(c, childPage) }

// connectPages is connect with pages of another size in the same memory.
func (s *sender) connectPages(c *remoteChild, pageBytes uint64) *target {
	s.t.Helper()
	pages := uint32(childPages * childPage / pageBytes)
	srcPool := s.h.AddPool(pages, s.src.Tensor(0, pageBytes))
	ep, err := hex.DecodeString(c.Endpoint)
	if err != nil {
		s.t.Fatal(err)
	}
	s.peers++
	p := &target{s: s, handle: 1000 + s.peers, plan: 7000 + uint64(s.peers), pageBytes: pageBytes}
	s.h.Send(&contract.HostEvent{Event: &contract.HostEvent_PeerAdd{PeerAdd: &contract.PeerAdd{
		Peer: p.handle, Node: "child", Incarnation: 1, Epoch: 1, Endpoint: ep, SameHost: true,
		RequireLane: contract.Lane_LANE_ANY, Token: childToken(),
	}}})
	s.h.Until("PeerReady", func(e *contract.PluginEvent) bool { return e.GetPeerReady().GetPeer() == p.handle })
	s.h.Send(
		&contract.HostEvent{Event: &contract.HostEvent_RemotePoolAdd{RemotePoolAdd: &contract.RemotePoolAdd{Peer: p.handle, Pool: &contract.PoolAdd{
			Pool: c.Pool, Pages: pages, Tensors: []*contract.Tensor{{Region: c.Region, PageStride: pageBytes, PageBytes: pageBytes}},
		}}}},
		&contract.HostEvent{Event: &contract.HostEvent_PlanAdd{PlanAdd: &contract.PlanAdd{
			Plan: p.plan, SrcPool: srcPool, Peer: p.handle, DstPool: c.Pool, SrcPages: 1, DstPages: 1,
			Slices: []*contract.Slice{{Len: pageBytes, Count: 1}},
		}}},
	)
	return p
}

func (p *target) submit(pages uint32) *sdktest.Pending {
	return p.submitRuns(sdktest.Pages(0, pages), sdktest.Pages(0, pages))
}

func (p *target) submitRuns(src, dst []sdk.Run) *sdktest.Pending {
	var pages uint64
	for _, r := range src {
		pages += uint64(r.Count)
	}
	return p.s.h.SubmitRaw(&contract.Submit{
		Generation: &contract.Generation{Source: &contract.Opener{Incarnation: 1, Sequence: 1}, Destination: &contract.Opener{Incarnation: 2, Sequence: 2}},
		Direction:  contract.Direction_DIRECTION_WRITE, Peer: p.handle, Plan: p.plan,
		Source: sdktest.Runs(src), Destination: sdktest.Runs(dst), LayerTo: 1 << 31, Bytes: pages * p.pageBytes,
	})
}

func (p *target) quietEnds(ops []*sdktest.Pending) (failed int) {
	p.s.t.Helper()
	for _, op := range ops {
		if end := op.Quiet(); end.Kind != "done" {
			failed++
		}
	}
	return failed
}

// TestLostReceiver: the receiving process is killed, or ended by its library, under ops: they fail, and are quiet as
// soon as its lock proves that it is gone. It comes back under the same name and is another peer: in NIXL 1.5 the dead
// one still counts as known, and its name could not be loaded again.
func TestLostReceiver(t *testing.T) {
	for _, how := range []string{"kill", "crash"} {
		t.Run(how, func(t *testing.T) {
			library := wheel(t, venvName)
			c, s := startChild(t, library), newSender(t, library)
			p := s.connect(c)
			wantDone(t, p.submit(childPages).End())
			at := s.b.count.bytesOut.Load()
			var ops []*sdktest.Pending
			for range 24 {
				ops = append(ops, p.submit(childPages))
			}
			eventually(t, "first bytes", func() bool { return s.b.count.bytesOut.Load() > at })
			if how == "kill" {
				_ = c.cmd.Process.Kill()
			} else {
				fmt.Fprintln(c.in, "crash")
			}
			if p.quietEnds(ops) == 0 {
				t.Error("the process ended too late")
			}
			wantFailed(t, p.submit(1).End(), contract.Cause_CAUSE_PEER_UNREACHABLE)
			c.end()

			again := startChild(t, library)
			q := s.connect(again)
			fill(s.src.Bytes, 2)
			wantDone(t, q.submit(childPages).End())
			s.h.CheckOrder()
		})
	}
}

// TestStoppedReceiver: ops to a process that stands still neither end nor progress, so that the host can judge.
// Aborted, they end in bounded time as not quiet, and are quiet when it goes on.
func TestStoppedReceiver(t *testing.T) {
	library := wheel(t, venvName)
	c, s := startChild(t, library), newSender(t, library)
	p := s.connect(c)
	wantDone(t, p.submit(childPages).End())
	stopped := func() (ops []*sdktest.Pending) {
		c.stop()
		for range 4 {
			ops = append(ops, p.submit(childPages))
		}
		time.Sleep(300 * time.Millisecond)
		s.h.Stats()
		for _, op := range ops {
			if op.Progress() == childPages*childPage {
				t.Error("all bytes of an op progressed under a stopped receiver")
			}
			for _, e := range s.h.Events() {
				if end, ok := sdktest.EndOf(e, op.ID); ok {
					t.Fatalf("an op ended under a stopped receiver: %+v", end)
				}
			}
		}
		return ops
	}
	ops := stopped()
	c.goOn()
	for _, op := range ops {
		wantDone(t, op.End())
	}

	ops = stopped()
	unquiet := 0
	for _, op := range ops {
		op.Abort()
	}
	for _, op := range ops {
		end := op.End()
		if end.Kind != "aborted" {
			t.Fatalf("end %+v, want aborted", end)
		}
		if !end.Quiet {
			unquiet++
		}
	}
	if unquiet == 0 {
		t.Error("every op was called quiet although bytes of one are on their way")
	}
	// The memory that they are read from stays registered and mapped until then, whoever wants it back.
	removed := func(e *contract.PluginEvent) bool { return e.GetRegionRemoved().GetRegion() == s.src.ID }
	s.h.Send(&contract.HostEvent{Event: &contract.HostEvent_RegionRemove{RegionRemove: &contract.RegionRemove{Region: s.src.ID}}})
	time.Sleep(200 * time.Millisecond)
	s.h.Stats()
	if slices.ContainsFunc(s.h.Events(), removed) {
		t.Error("the source was removed under ops that are not quiet")
	}
	c.goOn()
	for _, op := range ops {
		op.Quiet()
	}
	s.h.Until("RegionRemoved", removed)
	s.h.CheckOrder()
}

// TestPeerAddedAgain: a peer is removed with ops that are not quiet, and added again by the same token. The old one
// still asks for the proof that they are quiet, which ended the link of the new one.
func TestPeerAddedAgain(t *testing.T) {
	library := wheel(t, venvName)
	c, s := startChild(t, library), newSender(t, library)
	p := s.connect(c)
	wantDone(t, p.submit(childPages).End())
	c.stop()
	ops := []*sdktest.Pending{p.submit(childPages), p.submit(childPages)}
	time.Sleep(50 * time.Millisecond)
	s.h.Send(&contract.HostEvent{Event: &contract.HostEvent_PeerRemove{PeerRemove: &contract.PeerRemove{Peer: p.handle}}})
	unquiet := 0
	for _, op := range ops {
		if end := op.End(); !end.Quiet {
			unquiet++
		}
	}
	if unquiet == 0 {
		t.Fatal("every op was quiet under a stopped receiver")
	}
	c.goOn()
	q := s.connect(c)
	for range 50 {
		wantDone(t, q.submit(8).End())
	}
	for _, op := range ops {
		op.Quiet()
	}
	for range 50 {
		wantDone(t, q.submit(8).End())
	}
	s.h.CheckOrder()
}

// raw stops the child with an op on its way, and returns what it takes to drive the library past the driver: the name
// of the child's agent and the address of its region.
func (p *target) raw(c *remoteChild) (agent string, base uintptr, op *sdktest.Pending) {
	t := p.s.t
	t.Helper()
	c.stop()
	op = p.submit(1) // keeps the link in sight
	eventually(t, "the op is on its way", func() bool {
		done := make(chan struct{})
		p.s.b.driver.do(func() {
			for l := range p.s.b.driver.links {
				if r := l.regions[c.Region]; r != nil {
					agent, base = l.remote, r.base
				}
			}
			close(done)
		})
		<-done
		return base != 0
	})
	return agent, base, op
}

// TestLibraryReleaseIsNoFence is why an op is never called quiet because its request was released: the library says
// success, and bytes that the source got afterwards land. When this fails the library has learned to cancel.
func TestLibraryReleaseIsNoFence(t *testing.T) {
	library := wheel(t, venvName)
	c, s := startChild(t, library), newSender(t, library)
	p := s.connect(c)
	for i := range s.src.Bytes {
		s.src.Bytes[i] = 0x11
	}
	wantDone(t, p.submit(childPages).End())
	if n := c.count(); n[0x11] != childPages {
		t.Fatalf("pages by first byte: %v", n)
	}
	name, base, op := p.raw(c)
	region := s.b.region(s.src.ID)
	var pieces []piece
	for i := range 64 {
		const n = childPages * childPage / 64
		pieces = append(pieces, piece{address(region.bytes) + uintptr(i*n), base + uintptr(i*n), n})
	}
	req, err := s.b.driver.agent.write(name, pieces)
	if err != nil {
		t.Fatal(err)
	}
	if st := s.b.driver.agent.post(req); st != statusInProgress {
		t.Fatalf("post to a stopped process: %d", st)
	}
	s.b.driver.agent.release(req)
	for i := range s.src.Bytes {
		s.src.Bytes[i] = 0x77
	}
	c.goOn()
	wantDone(t, op.End())
	eventually(t, "bytes land after the release", func() bool { return c.count()[0x77] > 0 })
}

// TestLibraryCompletionIsTheTargets is why the end of a request is Done, with nothing more asked of the receiver: not
// even the smallest write ends before the process that it goes to has taken it out of its socket.
func TestLibraryCompletionIsTheTargets(t *testing.T) {
	library := wheel(t, venvName)
	c, s := startChild(t, library), newSender(t, library)
	p := s.connect(c)
	wantDone(t, p.submit(childPages).End())
	name, base, op := p.raw(c)
	region := s.b.region(s.src.ID)
	for i, n := range []uint64{1, 8, 4096, 64 << 10} {
		mark := byte(0x51 + i)
		for i := range s.src.Bytes[:n] {
			s.src.Bytes[i] = mark
		}
		req, err := s.b.driver.agent.write(name, []piece{{address(region.bytes), base + 3*childPage, n}})
		if err != nil {
			t.Fatal(err)
		}
		st := s.b.driver.agent.post(req)
		for range 200 {
			if st != statusInProgress {
				t.Fatalf("%d bytes to a process that stands still: status %d", n, st)
			}
			time.Sleep(time.Millisecond)
			st = s.b.driver.agent.status(req)
		}
		c.goOn()
		eventually(t, "the write ends", func() bool { return s.b.driver.agent.status(req) == statusDone })
		if got := c.count(); got[mark] == 0 {
			t.Errorf("%d bytes have ended and are not there: %v", n, got)
		}
		s.b.driver.agent.release(req)
		c.stop()
	}
	c.goOn()
	op.Quiet()
}

// TestMixedVersions: writer and receiver drive different releases of the library, either way round.
func TestMixedVersions(t *testing.T) {
	newest, oldest := wheel(t, venvName), wheel(t, "nixl-1.4.1")
	if os.Getenv(mixedEnv) != "" { // the process can load one release only
		mixed(t, oldest, newest)
		return
	}
	mixed(t, newest, oldest)
	cmd := exec.Command(os.Args[0], "-test.run", "^TestMixedVersions$")
	cmd.Env = append(os.Environ(), mixedEnv+"=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("1.4.1 as the writer: %v\n%s", err, out)
	}
}

const mixedEnv = "TERMINUS_NIXL_TEST_MIXED"

func mixed(t *testing.T, from, to string) {
	t.Helper()
	c, s := startChild(t, to), newSender(t, from)
	p := s.connect(c)
	for i := range s.src.Bytes {
		s.src.Bytes[i] = 0x42
	}
	wantDone(t, p.submit(childPages).End())
	if n := c.count(); n[0x42] != childPages {
		t.Fatalf("pages by first byte: %v", n)
	}
	at := s.b.count.bytesOut.Load()
	ops := []*sdktest.Pending{p.submit(childPages), p.submit(childPages), p.submit(childPages)}
	eventually(t, "first bytes", func() bool { return s.b.count.bytesOut.Load() > at })
	_ = c.cmd.Process.Kill()
	if p.quietEnds(ops) == 0 {
		t.Error("the process ended too late")
	}
	wantFailed(t, p.submit(1).End(), contract.Cause_CAUSE_PEER_UNREACHABLE)
	c.end()
	again := startChild(t, to)
	wantDone(t, s.connect(again).submit(childPages).End())
	s.h.CheckOrder()
}
