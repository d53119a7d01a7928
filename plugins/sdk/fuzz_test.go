package sdk_test

import (
	"bytes"
	"encoding/json"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
	"github.com/terminus-kv/terminus/plugins/sdk/sdktest"
)

// FuzzHostFrame feeds arbitrary frames to a session that has regions, pools, a peer and a plan. It must
// neither panic nor end an op twice, must give every accepted op its end, and must still serve.
func FuzzHostFrame(f *testing.F) {
	seed := func(control bool, events ...*contract.HostEvent) {
		b, err := proto.Marshal(&contract.HostFrame{Events: events})
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b, control)
	}
	// Ids are those that newRig hands out: regions 1 and 2, peer 2, pools 4 and 5, plan 6.
	submit := func(op, seq uint64) *contract.HostEvent {
		return &contract.HostEvent{Event: &contract.HostEvent_Submit{Submit: &contract.Submit{
			Op: op, Seq: seq, Direction: contract.Direction_DIRECTION_WRITE, Peer: 2, Plan: 6, LayerTo: 2, Bytes: 2 * pageSize,
			Generation: &contract.Generation{Source: &contract.Opener{Incarnation: 1, Sequence: 1}, Destination: &contract.Opener{Incarnation: 1, Sequence: 2}},
			Source:     sdktest.Runs(sdktest.Pages(0, 1)), Destination: sdktest.Runs(sdktest.Pages(1, 1)),
		}}}
	}
	seed(false, submit(100, 1), abort(100), submit(101, 2), submit(100, 3))
	seed(true, abort(100), &contract.HostEvent{Event: &contract.HostEvent_Beat{Beat: &contract.Beat{}}})
	seed(false, abort(7), submit(7, 1), submit(0, 2), submit(1<<63, 9))
	seed(false, submit(1, 1), &contract.HostEvent{Event: &contract.HostEvent_PeerRemove{PeerRemove: &contract.PeerRemove{Peer: 2}}}, submit(2, 2))
	seed(false, submit(1, 1), regionRemove(1), regionRemove(2), regionRemove(1), submit(2, 2))
	seed(false, &contract.HostEvent{Event: &contract.HostEvent_Grant{Grant: &contract.Grant{Grant: 1, Destination: &contract.Opener{Incarnation: 1, Sequence: 1},
		Parts: []*contract.GrantPart{{Pool: 5, Pages: sdktest.Runs(sdktest.Pages(0, 16))}}}}},
		&contract.HostEvent{Event: &contract.HostEvent_Revoke{Revoke: &contract.Revoke{Grant: 1}}})
	seed(false, &contract.HostEvent{Event: &contract.HostEvent_Drain{Drain: &contract.Drain{}}}, submit(1, 1),
		&contract.HostEvent{Event: &contract.HostEvent_CommRun{CommRun: &contract.CommRun{Op: 1, Seq: 2}}},
		&contract.HostEvent{Event: &contract.HostEvent_Fault{Fault: &contract.Fault{}}})
	seed(false, &contract.HostEvent{Event: &contract.HostEvent_RemotePoolAdd{RemotePoolAdd: &contract.RemotePoolAdd{Peer: 2}}},
		&contract.HostEvent{Event: &contract.HostEvent_PlanAdd{PlanAdd: &contract.PlanAdd{Plan: 9, Peer: 2, SrcPool: 4, DstPool: 5, SrcPages: 1, DstPages: 1, Slices: []*contract.Slice{nil, {Count: 1 << 31, SrcStride: 1 << 63}}}}},
		&contract.HostEvent{Event: &contract.HostEvent_RemoteRegionAdd{RemoteRegionAdd: &contract.RemoteRegionAdd{Peer: 2, Region: 3}}},
		&contract.HostEvent{Event: &contract.HostEvent_RemoteRegionRemove{RemoteRegionRemove: &contract.RemoteRegionRemove{Peer: 2, Region: 3}}})
	f.Add([]byte{0x0a, 0x02, 0x5a, 0x00}, false)

	f.Fuzz(func(t *testing.T, data []byte, control bool) {
		frame := &contract.HostFrame{}
		if proto.Unmarshal(data, frame) != nil {
			return
		}
		r := newRig(t, &script{transfer: func(b *script, op *sdk.Op) {
			if op.ID()%2 == 1 {
				untilAborted(b, op)
				return
			}
			copyAll(b, op)
		}})
		if control {
			r.SendControl(frame.Events...)
		} else {
			r.Send(frame.Events...)
		}
		for _, e := range frame.Events { // a second time: reuse of every id
			if e.GetFault() != nil {
				return
			}
		}
		r.Send(frame.Events...)
		s := r.Stats()
		for end := time.Now().Add(sdktest.Wait); len(s.OpenOps) > 0; s = r.Stats() {
			if time.Now().After(end) {
				t.Fatalf("ops %v never ended", s.OpenOps)
			}
			for _, op := range s.OpenOps {
				r.SendControl(abort(op))
			}
		}
		r.CheckOrder()
	})
}

// FuzzOptions: the options of the YAML are outside bytes as well.
func FuzzOptions(f *testing.F) {
	for _, s := range []string{``, `{}`, `{"lanes":3}`, `{"lane":3}`, `[]`, `{"lanes":{}}`, `{"network":"a","lanes":1e400}`, `{}{}`, `null`, `{"lanes":null}`, ` `} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		b := &script{}
		h := sdktest.Start(t, b, func(r *contract.HandshakeRequest) { r.ConfigJson = raw })
		if h.Response.Error == "" && len(bytes.TrimSpace(raw)) > 0 && !json.Valid(raw) {
			t.Errorf("%q was taken", raw)
		}
	})
}
