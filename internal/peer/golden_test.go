package peer

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/terminus-kv/terminus/internal/peer/wire"
)

const goldenDir = "wire/testdata/v1"

// goldenFrames is one frame of every kind of version 1, as this release builds it.
func goldenFrames(t *testing.T) map[string]*wire.Frame {
	t.Helper()
	out := map[string]*wire.Frame{
		"hello": {Frame: &wire.Frame_Hello{Hello: &wire.Hello{
			Versions: []uint32{1}, Node: "prefill-0", Incarnation: 1764453600001, HostId: "7d1b", Attempt: 4, To: "decode-0",
			Backends: []*wire.Backend{{Name: "tcp", Epoch: 1}, {Name: "nixl"}}, Features: []string{"receiver_checked"},
		}}},
		"refused":    encodeRefused(Refusal{Code: RefusedVersion, Field: "hello.versions", Detail: "upgrade"}),
		"pair":       encodeRefused(Refusal{Code: RefusedFingerprint, Field: "dtype", Group: "decode", PeerGroup: "prefill", Detail: "bf16 is not fp8"}),
		"beat":       beatFrame,
		"group_gone": {Frame: &wire.Frame_GroupGone{GroupGone: &wire.GroupGone{Name: "decode", Role: wire.Role_ROLE_DESTINATION}}},
		"pool_gone":  {Frame: &wire.Frame_PoolGone{PoolGone: &wire.PoolGone{Pool: 5}}},
		"endpoint":   encodeEndpoint(testEndpoint(), 77, "b", 9),
		"lost":       encodeLost("tcp", 3),
		"draining":   drainingFrame,
		"announced":  announcedFrame,
	}
	var err error
	if out["group"], err = encodeGroup(testGroup()); err != nil {
		t.Fatal(err)
	}
	if out["pool"], err = encodePool(testPool()); err != nil {
		t.Fatal(err)
	}
	ordered, state := testGroup(), testPool()
	ordered.Layout.Order, state.State = "hnd", true
	if out["group_order"], err = encodeGroup(ordered); err != nil {
		t.Fatal(err)
	}
	if out["pool_state"], err = encodePool(state); err != nil {
		t.Fatal(err)
	}
	for name, f := range roomFrames() {
		if out["room_"+name], err = encodeRoom(f); err != nil {
			t.Fatal(err)
		}
	}
	return out
}

// TestGoldenV1 holds the bytes of version 1 as they were recorded: this release must read them as what
// they meant and write the same. RECORD=1 records a frame that has no file yet; it never changes one.
func TestGoldenV1(t *testing.T) {
	frames := goldenFrames(t)
	for name, want := range frames {
		file := filepath.Join(goldenDir, name+".bin")
		written, err := proto.MarshalOptions{Deterministic: true}.Marshal(&wire.Batch{Frames: []*wire.Frame{want}})
		if err != nil {
			t.Fatal(err)
		}
		recorded, err := os.ReadFile(file)
		if os.IsNotExist(err) && os.Getenv("RECORD") != "" {
			recorded, err = written, os.WriteFile(file, written, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
		var got wire.Batch
		if err := proto.Unmarshal(recorded, &got); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if len(got.Frames) != 1 || !proto.Equal(got.Frames[0], want) || len(got.Frames[0].ProtoReflect().GetUnknown()) != 0 {
			t.Errorf("%s reads as %v, meant %v", name, &got, want)
		}
		if !bytes.Equal(written, recorded) {
			t.Errorf("%s is written as %x, recorded %x", name, written, recorded)
		}
	}
	files, err := filepath.Glob(goldenDir + "/*.bin")
	if err != nil || len(files) != len(frames) {
		t.Errorf("%d recorded frames, %d known (%v)", len(files), len(frames), err)
	}
}
