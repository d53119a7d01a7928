package tcp

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
	"github.com/terminus-kv/terminus/plugins/sdk/sdktest"
)

const childEnv = "TERMINUS_TCP_TEST_CHILD"

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

func childToken() []byte { return bytes.Repeat([]byte{5}, tokenLen) }

// TestChild is the receiver of TestKilledReceiver; on its own it does nothing.
func TestChild(t *testing.T) {
	if os.Getenv(childEnv) == "" {
		return
	}
	b := New()
	h := sdktest.New(t, b)
	r := h.AddRegion(childPages*childPage + 64)
	pool := h.AddPool(childPages, r.Tensor(0, childPage))
	h.Grant(sdktest.Destination, pool, sdktest.Pages(0, childPages)...)
	if err := b.Accept(&sdk.Peer{Node: childNode, Incarnation: 3, Epoch: 4, Token: childToken()}); err != nil {
		t.Fatal(err)
	}
	out, err := json.Marshal(child{hex.EncodeToString(h.Response.Endpoint), r.ID, pool})
	if err != nil {
		t.Fatal(err)
	}
	fmt.Printf("child %s\n", out)
	os.Stdin.Read(make([]byte, 1)) // until the parent goes
}

// startReceiver runs a receiver in a process of its own and makes it a peer of a new writer.
func startReceiver(t *testing.T, opts options) (*os.Process, *Backend, *fakePeer) {
	t.Helper()
	dir, err := os.MkdirTemp("", "t")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	cmd := exec.Command(os.Args[0], "-test.run", "^TestChild$", "-test.v")
	cmd.Env = append(os.Environ(), childEnv+"=1", "TMPDIR="+dir)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stdin.Close()
		cmd.Process.Kill()
		cmd.Wait()
	})
	var c child
	for lines := bufio.NewScanner(stdout); lines.Scan(); {
		if text, ok := strings.CutPrefix(lines.Text(), "child "); ok {
			if err := json.Unmarshal([]byte(text), &c); err != nil {
				t.Fatal(err)
			}
			break
		}
	}
	ep, err := hex.DecodeString(c.Endpoint)
	if err != nil || len(ep) == 0 {
		t.Fatalf("no endpoint from the child: %v", err)
	}
	ab := New()
	a := sdktest.New(t, ab, sdktest.WithConfig(opts), sdktest.WithNode(childNode, 3, 4))
	src := a.AddRegion(childPages*childPage + 64)
	pool := a.AddPool(childPages, src.Tensor(0, childPage))
	peer := addRemote(t, a, &contract.PeerAdd{
		Peer: 1000, Node: "child", Incarnation: 1, Epoch: 1, Endpoint: ep, SameHost: true,
		RequireLane: contract.Lane_LANE_ANY, Token: childToken(),
	}, pool, &contract.PoolAdd{
		Pool: c.Pool, Pages: childPages, Tensors: []*contract.Tensor{{Region: c.Region, PageStride: childPage, PageBytes: childPage}},
	})
	return cmd.Process, ab, peer
}

// TestKilledReceiver kills the receiving process under an op: the op fails as not quiet, and is quiet as
// soon as the lock proves that the process is gone.
func TestKilledReceiver(t *testing.T) {
	for _, l := range lanes {
		t.Run(l.name, func(t *testing.T) {
			process, ab, peer := startReceiver(t, l.opts)
			wantDone(t, peer.submit(sdktest.Pages(0, childPages)).End(), l.lane)
			var ops []*sdktest.Pending
			at := ab.count.bytesOut.Load()
			for range 24 {
				ops = append(ops, peer.submit(sdktest.Pages(0, childPages)))
			}
			eventually(t, "first bytes", func() bool { return ab.count.bytesOut.Load() > at })
			process.Kill()
			failed := 0
			for _, op := range ops {
				if end := op.Quiet(); end.Kind != "done" {
					failed++
				}
			}
			if failed == 0 {
				t.Error("the process was killed too late")
			}
			wantFailed(t, peer.submit(sdktest.Pages(0, 1)).End(), contract.Cause_CAUSE_PEER_UNREACHABLE)
			peer.a.CheckOrder()
		})
	}
}

// TestStoppedReceiver stops the receiving process for a while: its ops neither end nor progress, so that
// the host can judge, and are done when it goes on. Aborts end in bounded time, not quiet if bytes may be
// under way; they become quiet when the process goes on.
func TestStoppedReceiver(t *testing.T) {
	for _, l := range lanes {
		t.Run(l.name, func(t *testing.T) {
			opts := options{"abort_timeout_ms": 50, "connections": 1}
			for k, v := range l.opts {
				opts[k] = v
			}
			process, _, peer := startReceiver(t, opts)
			wantDone(t, peer.submit(sdktest.Pages(0, childPages)).End(), l.lane)
			stopped := func() (ops []*sdktest.Pending) {
				process.Signal(unix.SIGSTOP)
				eventually(t, "the process stops", func() bool { return processState(t, process.Pid) == 'T' })
				for range 4 {
					ops = append(ops, peer.submit(sdktest.Pages(0, childPages)))
				}
				time.Sleep(300 * time.Millisecond)
				peer.a.Stats() // whatever has happened is told
				for i, op := range ops {
					if n := op.Progress(); n != 0 {
						t.Errorf("op %d: progress %d of a stopped receiver", i, n)
					}
					for _, e := range peer.a.Events() {
						if end, ok := sdktest.EndOf(e, op.ID); ok {
							t.Fatalf("op %d ended under a stopped receiver: %+v", i, end)
						}
					}
				}
				return ops
			}
			ops := stopped()
			process.Signal(unix.SIGCONT)
			for _, op := range ops {
				wantDone(t, op.End(), l.lane)
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
				t.Error("every op was called quiet although the receiver may have frames of one")
			}
			process.Signal(unix.SIGCONT)
			for _, op := range ops {
				op.Quiet()
			}
			wantDone(t, peer.submit(sdktest.Pages(0, childPages)).End(), l.lane)
			peer.a.CheckOrder()
		})
	}
}

// processState returns the letter that the kernel shows for a process.
func processState(t *testing.T, pid int) byte {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	return b[bytes.LastIndexByte(b, ')')+2]
}
