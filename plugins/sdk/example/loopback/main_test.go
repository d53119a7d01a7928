package main

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"go.uber.org/goleak"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
	"github.com/terminus-kv/terminus/plugins/sdk/sdktest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestCopy(t *testing.T) {
	h := sdktest.New(t, &loopback{})
	src, dst := h.AddRegion(64*4096), h.AddRegion(64*4096)
	for i := range src.Bytes {
		src.Bytes[i] = byte(rand.Uint32())
	}
	peer := sdktest.Connect(h, h)
	plan := peer.IdentityPlan(h.AddPool(64, src.Tensor(0, 4096)), h.AddPool(64, dst.Tensor(0, 4096)))

	end := peer.Submit(sdktest.Op{Plan: plan, Src: sdktest.Pages(8, 16), Dst: sdktest.Pages(40, 16)}).End()
	if end.Kind != "done" || !end.Quiet || end.Bytes != 16*4096 || end.Lane != contract.Lane_LANE_SHM {
		t.Fatalf("end: %+v", end)
	}
	if !bytes.Equal(dst.Bytes[40*4096:56*4096], src.Bytes[8*4096:24*4096]) {
		t.Error("the bytes differ")
	}
	if !bytes.Equal(dst.Bytes[:40*4096], make([]byte, 40*4096)) {
		t.Error("bytes outside the pages were written")
	}
	h.CheckOrder()
}

func TestRefusesOthers(t *testing.T) {
	a, b := sdktest.New(t, &loopback{}), sdktest.New(t, &loopback{})
	if _, err := sdktest.Dial(a, b, contract.Lane_LANE_ANY); err == nil {
		t.Error("another engine was taken for a peer")
	}
}
