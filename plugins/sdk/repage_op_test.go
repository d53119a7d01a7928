package sdk_test

import (
	"strings"
	"testing"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
	"github.com/terminus-kv/terminus/plugins/sdk/sdktest"
)

// TestRepageOps: the page lists of an op are whole groups, as many on either side, and its size is
// theirs.
func TestRepageOps(t *testing.T) {
	r := newRig(t, &script{transfer: func(_ *script, op *sdk.Op) { op.Done(contract.Lane_LANE_SHM) },
		info: sdk.Info{Features: []string{sdk.FeatureLayerRange, sdk.FeatureRepage}}})
	plan := r.peer.Repage(r.srcPool, r.dstPool, 2, 1,
		&contract.Slice{Len: pageSize / 2, Count: 1}, &contract.Slice{Len: pageSize / 2, Count: 1, SrcPage: 1, DstOff: pageSize / 2})
	submit := func(src, dst uint32, bytes uint64) sdktest.End {
		return r.SubmitRaw(&contract.Submit{
			Generation: &contract.Generation{Source: &contract.Opener{Incarnation: 1, Sequence: 1}, Destination: &contract.Opener{Incarnation: 2, Sequence: 2}},
			Direction:  contract.Direction_DIRECTION_WRITE, Peer: r.peer.Handle, Plan: plan, LayerTo: 1, Bytes: bytes,
			Source: sdktest.Runs(sdktest.Pages(0, src)), Destination: sdktest.Runs(sdktest.Pages(0, dst)),
		}).End()
	}
	if end := submit(4, 2, 2*pageSize); end.Kind != "done" || end.Bytes != 2*pageSize {
		t.Errorf("two groups: %+v", end)
	}
	for _, tc := range []struct {
		name     string
		src, dst uint32
		bytes    uint64
		want     string
	}{
		{"no multiple", 3, 1, pageSize, "pairs groups of 2 and 1"},
		{"another number of groups", 4, 1, 2 * pageSize, "pairs groups of 2 and 1"},
		{"a wrong size", 4, 2, 4 * pageSize, "2 groups of 4096 bytes"},
	} {
		if end := submit(tc.src, tc.dst, tc.bytes); end.Cause != contract.Cause_CAUSE_PROTOCOL || !strings.Contains(end.Detail, tc.want) {
			t.Errorf("%s: %+v", tc.name, end)
		}
	}
}
