// Package python tests the Python SDK against the engine's own plugin host: plugins/sdk/python/tests has
// the tests in Python, which run from here, too.
package python

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/types/descriptorpb"

	"github.com/terminus-kv/terminus/internal/pluginhost"
	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
	"github.com/terminus-kv/terminus/plugins/sdk/shm"
)

// patience bounds every wait; nothing should come near it.
const patience = 60 * time.Second

// TestMain is also the plugin process of a backend in Go.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "plugin" {
		sdk.Main(&goCopy{})
	}
	goleak.VerifyTestMain(m)
}

// goCopy is a backend in Go that shares memory as the one in Python does.
type goCopy struct{ *shm.Share }

func (*goCopy) Info() sdk.Info { return sdk.Info{Name: "go-copy", Version: "1.0.0"} }

func (b *goCopy) Start(_ context.Context, s sdk.Start) (endpoint []byte, err error) {
	b.Share, err = shm.Listen(s)
	return b.Endpoint(), err
}

func (*goCopy) Transfer(op *sdk.Op) {
	for c := range op.Copies() {
		err := op.Peer().Data.(*shm.Remote).Write(op.Context(), c.DstRegion, c.DstOff, c.Src.Bytes[c.SrcOff:][:c.Len])
		if err != nil {
			op.FailErr(true, err)
			return
		}
	}
	op.Done(contract.Lane_LANE_SHM)
}

// interpreter is the Python of the tree's virtual environment.
func interpreter(t *testing.T) string {
	t.Helper()
	path, err := filepath.Abs("../../../bin/venv/bin/python")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("%v; make it with: make venv", err)
	}
	return path
}

func python(t *testing.T, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	out, err := exec.CommandContext(ctx, interpreter(t), append([]string{"-B"}, args...)...).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return string(out)
}

// TestUnits runs the tests that are written in Python.
func TestUnits(t *testing.T) {
	t.Parallel()
	t.Log(python(t, "-W", "error", "-m", "unittest", "discover", "-q", "-t", ".", "-s", "tests"))
}

// TestMessagesInStep compares the generated Python messages with those of this tree.
func TestMessagesInStep(t *testing.T) {
	t.Parallel()
	out := python(t, "-c", "from terminus_plugin.contract_pb2 import DESCRIPTOR as d; print(d.serialized_pb.hex())")
	var raw []byte
	if _, err := fmt.Sscanf(out, "%x", &raw); err != nil {
		t.Fatal(err)
	}
	got := &descriptorpb.FileDescriptorProto{}
	if err := proto.Unmarshal(raw, got); err != nil {
		t.Fatal(err)
	}
	want := protodesc.ToFileDescriptorProto(contract.File_plugins_sdk_contract_contract_proto)
	got.Name, want.Name = nil, nil
	for _, m := range want.MessageType { // Go's descriptor has names of JSON that protoc adds only on request
		clearJSON(m)
	}
	for _, m := range got.MessageType {
		clearJSON(m)
	}
	if !proto.Equal(got, want) {
		t.Errorf("terminus_plugin/contract_pb2.py is not made from contract.proto; run make generate\ngot  %s\nwant %s",
			prototext.Format(got), prototext.Format(want))
	}
}

func clearJSON(m *descriptorpb.DescriptorProto) {
	for _, f := range m.Field {
		f.JsonName = nil
	}
	for _, n := range m.NestedType {
		clearJSON(n)
	}
}

// example is the plugin program in Python.
func example(t *testing.T) pluginhost.Spec {
	return pluginhost.Spec{Name: "copy", Exec: interpreter(t), Script: "example/copy_backend.py"}
}

// golang is the plugin program in Go: this test binary.
func golang(*testing.T) pluginhost.Spec {
	return pluginhost.Spec{Name: "go-copy", Args: []string{"plugin"}}
}

// TestBytes moves bytes between two engines' plugins, each in a language of its own.
func TestBytes(t *testing.T) {
	for _, c := range []struct {
		name     string
		from, to func(*testing.T) pluginhost.Spec
	}{
		{"python to python", example, example},
		{"python to go", example, golang},
		{"go to python", golang, example},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			a, b := newEngine(t, "a", 3, c.from(t)), newEngine(t, "b", 4, c.to(t))
			const pages, page = 64, 64 << 10
			src, dst := a.region(pages*page), b.region(pages*page)
			for i := range src {
				src[i] = byte(i * 31 >> 8)
			}
			token := []byte(strings.Repeat("k", 32))
			b.send(&contract.HostEvent{Event: &contract.HostEvent_PeerAccept{PeerAccept: &contract.PeerAccept{
				Peer: 1, Node: "a", Incarnation: 3, Epoch: 1, SameHost: true, Token: token,
			}}})
			a.send(&contract.HostEvent{Event: &contract.HostEvent_PeerAdd{PeerAdd: &contract.PeerAdd{
				Peer: 1, Node: "b", Incarnation: 4, Epoch: 1, SameHost: true, Token: token,
				Endpoint: b.endpoint, RequireLane: contract.Lane_LANE_SHM,
			}}})
			a.until("PeerReady", func(e *contract.PluginEvent) bool { return e.GetPeerReady().GetPeer() == 1 })
			pool := &contract.PoolAdd{Pool: 1, Pages: pages, Tensors: []*contract.Tensor{{Region: 1, PageStride: page, PageBytes: page}}}
			a.send(
				&contract.HostEvent{Event: &contract.HostEvent_PoolAdd{PoolAdd: pool}},
				&contract.HostEvent{Event: &contract.HostEvent_RemotePoolAdd{RemotePoolAdd: &contract.RemotePoolAdd{Peer: 1, Pool: pool}}},
				&contract.HostEvent{Event: &contract.HostEvent_PlanAdd{PlanAdd: &contract.PlanAdd{
					Plan: 1, SrcPool: 1, Peer: 1, DstPool: 1, SrcPages: 1, DstPages: 1, Slices: []*contract.Slice{{Len: page, Count: 1}},
				}}},
				&contract.HostEvent{Event: &contract.HostEvent_Submit{Submit: &contract.Submit{
					Op: 1, Seq: 1, Direction: contract.Direction_DIRECTION_WRITE, Peer: 1, Plan: 1, LayerTo: 1, Bytes: pages / 2 * page,
					Generation: &contract.Generation{
						Source:      &contract.Opener{Incarnation: 3, Sequence: 1},
						Destination: &contract.Opener{Incarnation: 4, Sequence: 1},
					},
					Source:      &contract.Runs{Start: []uint32{0}, Count: []uint32{pages / 2}},
					Destination: &contract.Runs{Start: []uint32{pages / 2}, Count: []uint32{pages / 2}},
				}}})
			end := a.until("the end", func(e *contract.PluginEvent) bool {
				return e.GetDone().GetOp() == 1 || e.GetFailed().GetOp() == 1
			})
			if end.GetDone() == nil || !end.GetDone().Quiet {
				t.Fatalf("end %v", end)
			}
			if string(dst[pages/2*page:]) != string(src[:pages/2*page]) {
				t.Error("the bytes differ")
			}
			for _, x := range dst[:pages/2*page] {
				if x != 0 {
					t.Fatal("pages were written that no op names")
				}
			}
			b.send(&contract.HostEvent{Event: &contract.HostEvent_RegionRemove{RegionRemove: &contract.RegionRemove{Region: 1}}})
			b.until("RegionRemoved", func(e *contract.PluginEvent) bool { return e.GetRegionRemoved().GetRegion() == 1 })
			if !b.leaseEnded() {
				t.Error("somebody maps a region that was removed")
			}
		})
	}
}

// TestBadOption: what the operator can mend is told in one line, and not tried again.
func TestBadOption(t *testing.T) {
	t.Parallel()
	spec := example(t)
	spec.Options = []byte(`{"lanes":3}`)
	e := openEngine(t, "a", 3, spec)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	err := e.plugin.Ready(ctx)
	if err == nil || !strings.Contains(err.Error(), `plugins.copy.options: unknown option "lanes": this backend has no options`) {
		t.Errorf("got %v", err)
	}
}
