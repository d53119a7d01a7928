package wasmhost

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
	"github.com/terminus-kv/terminus/plugins/sdk/sdktest"
)

func fill(b []byte) {
	for i := range b {
		b[i] = byte(rand.Uint32())
	}
}

func TestCopy(t *testing.T) {
	a, b, peer := pair(t, repage)
	src, dst := a.AddRegion(64*4096), b.AddRegion(64*4096)
	fill(src.Bytes)
	plan := peer.IdentityPlan(a.AddPool(64, src.Tensor(0, 4096)), b.AddPool(64, dst.Tensor(0, 4096)))
	end := peer.Submit(sdktest.Op{Plan: plan, Src: sdktest.Pages(8, 16), Dst: sdktest.Pages(40, 16)}).End()
	if end.Kind != "done" || !end.Quiet || end.Bytes != 16*4096 || end.Lane != contract.Lane_LANE_SHM {
		t.Fatalf("end: %+v", end)
	}
	if !bytes.Equal(dst.Bytes[40*4096:56*4096], src.Bytes[8*4096:24*4096]) {
		t.Error("the bytes differ")
	}
	if !bytes.Equal(dst.Bytes[:40*4096], make([]byte, 40*4096)) || !bytes.Equal(dst.Bytes[56*4096:], make([]byte, 8*4096)) {
		t.Error("bytes outside the pages were written")
	}
	a.CheckOrder()
}

// TestRepage: pages of 4 tokens become pages of 16, and back, scattered at both sides.
func TestRepage(t *testing.T) {
	const token, small, large = 64, 4, 16
	a, b, peer := pair(t, repage)
	src, dst := a.AddRegion(64*small*token), b.AddRegion(16*large*token)
	fill(src.Bytes)
	srcPool, dstPool := a.AddPool(64, src.Tensor(0, small*token)), b.AddPool(16, dst.Tensor(0, large*token))
	var slices []*contract.Slice
	for i := range uint32(large / small) {
		slices = append(slices, &contract.Slice{Len: small * token, Count: 1, SrcPage: i, DstOff: uint64(i) * small * token})
	}
	plan := peer.Repage(srcPool, dstPool, large/small, 1, slices...)
	from := []sdk.Run{{Start: 60, Count: 2, Stride: 1}, {Start: 1, Count: 6, Stride: 3}}
	to := []sdk.Run{{Start: 9, Count: 1, Stride: 1}, {Start: 3, Count: 1, Stride: 1}}
	end := peer.Submit(sdktest.Op{Plan: plan, Src: from, Dst: to}).End()
	if end.Kind != "done" || end.Bytes != 2*large*token {
		t.Fatalf("end: %+v", end)
	}
	want := make([]byte, len(dst.Bytes))
	pages := []int{60, 61, 1, 4, 7, 10, 13, 16}
	for i, p := range pages {
		at := []int{9, 3}[i/4]*large*token + i%4*small*token
		copy(want[at:], src.Bytes[p*small*token:(p+1)*small*token])
	}
	if !bytes.Equal(dst.Bytes, want) {
		t.Error("the bytes differ")
	}
}

// TestAbort: an abort reaches the guest while it copies, and the op is quiet when it ends.
func TestAbort(t *testing.T) {
	a, b, peer := pair(t, repage)
	const size = 32 << 20
	src, dst := a.AddRegion(size), b.AddRegion(size)
	plan := peer.IdentityPlan(a.AddPool(size>>12, src.Tensor(0, 4096)), b.AddPool(size>>12, dst.Tensor(0, 4096)))
	ended := map[string]int{}
	for range 20 {
		// 8192 copies of one page each
		p := peer.Submit(sdktest.Op{Plan: plan, Src: sdktest.Pages(0, size>>12), Dst: []sdk.Run{{Start: size>>12/2 + 1, Count: size>>12/2 - 1, Stride: 1}, {Start: 0, Count: size>>12/2 + 1, Stride: 1}}})
		p.Abort()
		end := p.Quiet()
		ended[end.Kind]++
	}
	if ended["aborted"]+ended["done"] != 20 || ended["aborted"] == 0 {
		t.Errorf("ends: %v", ended)
	}
	a.CheckOrder()
	if s := a.Stats(); len(s.OpenOps) != 0 {
		t.Errorf("open ops: %v", s.OpenOps)
	}
}

// TestRemoval: regions, pools, plans and peers go in order, and the guest says so.
func TestRemoval(t *testing.T) {
	a, b, peer := pair(t, repage)
	src, dst := a.AddRegion(1<<16), b.AddRegion(1<<16)
	plan := peer.IdentityPlan(a.AddPool(16, src.Tensor(0, 4096)), b.AddPool(16, dst.Tensor(0, 4096)))
	if end := peer.Submit(sdktest.Op{Plan: plan, Src: sdktest.Pages(0, 4), Dst: sdktest.Pages(0, 4)}).End(); end.Kind != "done" {
		t.Fatalf("end: %+v", end)
	}
	b.RemoveRegion(dst)
	if !dst.LeaseEnded() {
		t.Error("somebody still holds the lease of the removed region")
	}
	if end := peer.Submit(sdktest.Op{Plan: plan, Src: sdktest.Pages(0, 4), Dst: sdktest.Pages(0, 4)}).End(); end.Kind != "failed" {
		t.Errorf("an op into a region that is gone: %+v", end)
	}
	peer.Remove()
	a.RemoveRegion(src)
	if a.Drain(sdktest.Wait) != 0 {
		t.Error("ops are left")
	}
}

// TestManyOps: thousands of small ops, all at once.
func TestManyOps(t *testing.T) {
	a, b, peer := pair(t, repage)
	src, dst := a.AddRegion(256*4096), b.AddRegion(256*4096)
	fill(src.Bytes)
	plan := peer.IdentityPlan(a.AddPool(256, src.Tensor(0, 4096)), b.AddPool(256, dst.Tensor(0, 4096)))
	var pending []*sdktest.Pending
	for i := range uint32(2000) {
		pending = append(pending, peer.Submit(sdktest.Op{Plan: plan, Src: sdktest.Pages(i%256, 1), Dst: sdktest.Pages(i%256, 1)}))
	}
	for _, p := range pending {
		if end := p.End(); end.Kind != "done" {
			t.Fatalf("op %d: %+v", p.ID, end)
		}
	}
	a.CheckOrder()
	if !bytes.Equal(src.Bytes, dst.Bytes) {
		t.Error("the bytes differ")
	}
}
