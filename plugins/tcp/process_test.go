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

// TestKilledReceiver kills the receiving process under an op: the op fails as not quiet, and is quiet as
// soon as the lock proves that the process is gone.
func TestKilledReceiver(t *testing.T) {
	for _, l := range lanes {
		t.Run(l.name, func(t *testing.T) {
			dir, err := os.MkdirTemp("", "t")
			if err != nil {
				t.Fatal(err)
			}
			defer os.RemoveAll(dir)
			cmd := exec.Command(os.Args[0], "-test.run", "^TestChild$", "-test.v")
			cmd.Env = append(os.Environ(), childEnv+"=1", "TMPDIR="+dir)
			stdin, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			defer stdin.Close()
			stdout, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			defer func() {
				cmd.Process.Kill()
				cmd.Wait()
			}()
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
			a := sdktest.New(t, ab, sdktest.WithConfig(l.opts), sdktest.WithNode(childNode, 3, 4))
			src := a.AddRegion(childPages*childPage + 64)
			pool := a.AddPool(childPages, src.Tensor(0, childPage))
			peer := addRemote(t, a, &contract.PeerAdd{
				Peer: 1000, Node: "child", Incarnation: 1, Epoch: 1, Endpoint: ep, SameHost: true,
				RequireLane: contract.Lane_LANE_ANY, Token: childToken(),
			}, pool, &contract.PoolAdd{
				Pool: c.Pool, Pages: childPages, Tensors: []*contract.Tensor{{Region: c.Region, PageStride: childPage, PageBytes: childPage}},
			})
			end := peer.submit(sdktest.Pages(0, childPages)).End()
			wantDone(t, end, l.lane)

			var ops []*sdktest.Pending
			at := ab.count.bytesOut.Load()
			for range 24 {
				ops = append(ops, peer.submit(sdktest.Pages(0, childPages)))
			}
			eventually(t, "first bytes", func() bool { return ab.count.bytesOut.Load() > at })
			cmd.Process.Kill()
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
			a.CheckOrder()
		})
	}
}
