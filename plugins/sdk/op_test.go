package sdk_test

import (
	"bytes"
	"context"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
	"github.com/terminus-kv/terminus/plugins/sdk/sdktest"
)

func TestDone(t *testing.T) {
	r := newRig(t, &script{transfer: copyAll})
	for i := range r.src.Bytes {
		r.src.Bytes[i] = byte(rand.Uint32())
	}
	end := r.peer.Submit(r.op(4)).End()
	if end != (sdktest.End{Kind: "done", Quiet: true, Bytes: 8 * pageSize, Lane: contract.Lane_LANE_SHM}) {
		t.Errorf("end: %+v", end)
	}
	for layer := range 2 {
		at := layer * 16 * pageSize
		if !bytes.Equal(r.dst.Bytes[at+12*pageSize:at+16*pageSize], r.src.Bytes[at:at+4*pageSize]) {
			t.Errorf("layer %d differs", layer)
		}
	}
	one := r.op(2)
	one.LayerFrom, one.LayerTo = 1, 2
	if end := r.peer.Submit(one).End(); end.Kind != "done" || end.Bytes != 2*pageSize {
		t.Errorf("one layer: %+v", end)
	}
	if end := r.peer.Submit(sdktest.Op{Plan: r.plan}).End(); end.Kind != "done" || end.Bytes != 0 {
		t.Errorf("no pages: %+v", end)
	}
	r.CheckOrder()
}

func TestOpShowsTheSubmit(t *testing.T) {
	seen := make(chan *sdk.Op, 1)
	r := newRig(t, &script{transfer: func(_ *script, op *sdk.Op) { seen <- op; op.Done(contract.Lane_LANE_SHM) }})
	sub := r.op(3)
	sub.Source, sub.Destination = sdk.Opener{Incarnation: 5, Sequence: 6}, sdk.Opener{Incarnation: 7, Sequence: 8}
	sub.Priority, sub.Deadline, sub.LayerFrom, sub.LayerTo = 9, time.Hour, 0, 1
	p := r.peer.Submit(sub)
	op := <-seen
	from, to := op.Layers()
	if op.ID() != p.ID || op.Generation() != (sdk.Generation{Source: sub.Source, Destination: sub.Destination}) ||
		op.Peer().Handle != r.peer.Handle || op.Plan().ID != r.plan || op.SrcPool().ID != r.srcPool || op.DstPool().ID != r.dstPool ||
		op.Bytes() != 3*pageSize || op.Priority() != 9 || time.Until(op.Deadline()) < 30*time.Minute || from != 0 || to != 1 {
		t.Errorf("op %+v of %+v", op, sub)
	}
	for a, b := range op.Runs() {
		if a != (sdk.Run{Start: 0, Count: 3, Stride: 1}) || b != (sdk.Run{Start: 13, Count: 3, Stride: 1}) {
			t.Errorf("runs %v %v", a, b)
		}
	}
}

// TestEnds: every way to end, and every way to forget it, is exactly one end (R1).
func TestEnds(t *testing.T) {
	for _, tc := range []struct {
		name     string
		transfer func(*script, *sdk.Op)
		want     sdktest.End
		later    bool // Quiesced follows
	}{
		{"fail quiet", func(_ *script, op *sdk.Op) { op.Fail(contract.Cause_CAUSE_TRANSPORT, true, "reset by %s", "peer") },
			sdktest.End{Kind: "failed", Cause: contract.Cause_CAUSE_TRANSPORT, Detail: "reset by peer", Quiet: true}, false},
		{"fail, then quiesced", func(_ *script, op *sdk.Op) { op.Fail(contract.Cause_CAUSE_TRANSPORT, false, ""); op.Quiesced() },
			sdktest.End{Kind: "failed", Cause: contract.Cause_CAUSE_TRANSPORT}, true},
		{"skip", func(_ *script, op *sdk.Op) { op.Skip(contract.Cause_CAUSE_EMPTY, true, "nothing here") },
			sdktest.End{Kind: "skipped", Cause: contract.Cause_CAUSE_EMPTY, Detail: "nothing here", Quiet: true}, false},
		{"abort unasked", func(_ *script, op *sdk.Op) { op.Aborted(true) }, sdktest.End{Kind: "aborted", Quiet: true}, false},
		{"done, later quiet", func(_ *script, op *sdk.Op) { op.DoneUnquiet(contract.Lane_LANE_RDMA); op.Quiesced() },
			sdktest.End{Kind: "done", Bytes: 2 * pageSize, Lane: contract.Lane_LANE_RDMA}, true},
		{"the first end stands", func(_ *script, op *sdk.Op) {
			op.Skip(contract.Cause_CAUSE_EMPTY, true, "")
			op.Done(contract.Lane_LANE_SHM)
			op.Fail(contract.Cause_CAUSE_INTERNAL, false, "")
			op.Progress(1)
			op.Quiesced()
		}, sdktest.End{Kind: "skipped", Cause: contract.Cause_CAUSE_EMPTY, Quiet: true}, false},
		{"quiesced before the end", func(_ *script, op *sdk.Op) { op.Quiesced(); op.Done(contract.Lane_LANE_SHM) },
			sdktest.End{Kind: "done", Bytes: 2 * pageSize, Lane: contract.Lane_LANE_SHM, Quiet: true}, false},
		{"return without an end", func(*script, *sdk.Op) {},
			sdktest.End{Kind: "failed", Cause: contract.Cause_CAUSE_NO_TERMINAL, Detail: "Transfer returned without an end"}, false},
		{"panic", func(*script, *sdk.Op) { panic("oh") },
			sdktest.End{Kind: "failed", Cause: contract.Cause_CAUSE_NO_TERMINAL, Detail: "Transfer panicked: oh"}, false},
		{"the goroutine ends", func(*script, *sdk.Op) { runtime.Goexit() },
			sdktest.End{Kind: "failed", Cause: contract.Cause_CAUSE_NO_TERMINAL, Detail: "Transfer returned without an end"}, false},
		{"panic after the end", func(_ *script, op *sdk.Op) { op.Done(contract.Lane_LANE_SHM); panic("oh") },
			sdktest.End{Kind: "done", Bytes: 2 * pageSize, Lane: contract.Lane_LANE_SHM, Quiet: true}, false},
		{"async", func(_ *script, op *sdk.Op) {
			op.Async()
			go func() { time.Sleep(5 * time.Millisecond); op.Done(contract.Lane_LANE_SHM) }()
		}, sdktest.End{Kind: "done", Bytes: 2 * pageSize, Lane: contract.Lane_LANE_SHM, Quiet: true}, false},
		{"no lane", func(_ *script, op *sdk.Op) { op.Done(contract.Lane_LANE_ANY) },
			sdktest.End{Kind: "failed", Cause: contract.Cause_CAUSE_INTERNAL, Detail: "the backend reported lane LANE_ANY for a finished op", Quiet: true}, false},
		{"no cause", func(_ *script, op *sdk.Op) { op.Fail(0, true, "why") },
			sdktest.End{Kind: "failed", Cause: contract.Cause_CAUSE_INTERNAL, Detail: "the backend gave cause 0; why", Quiet: true}, false},
		{"long detail", func(_ *script, op *sdk.Op) {
			op.Fail(contract.Cause_CAUSE_LIMIT, true, "%s", strings.Repeat("é", 400))
		},
			sdktest.End{Kind: "failed", Cause: contract.Cause_CAUSE_LIMIT, Detail: strings.Repeat("é", 128), Quiet: true}, false},
		{"not UTF-8", func(_ *script, op *sdk.Op) { op.Fail(contract.Cause_CAUSE_LIMIT, true, "\xff\xfe") },
			sdktest.End{Kind: "failed", Cause: contract.Cause_CAUSE_LIMIT, Detail: "\uFFFD", Quiet: true}, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newRig(t, &script{transfer: tc.transfer})
			p := r.peer.Submit(r.op(1))
			if end := p.End(); end != tc.want {
				t.Errorf("end %+v, want %+v", end, tc.want)
			}
			if tc.later {
				p.Quiet()
			}
			open := r.Stats().OpenOps
			if quiet := tc.want.Quiet || tc.later; (len(open) == 0) != quiet {
				t.Errorf("open ops %v, quiet %v", open, quiet)
			}
			r.CheckOrder()
		})
	}
}

// TestDroppedHandle: an asynchronous op whose handle is lost still ends.
func TestDroppedHandle(t *testing.T) {
	r := newRig(t, &script{transfer: func(_ *script, op *sdk.Op) { op.Async() }})
	p := r.peer.Submit(r.op(1))
	stop := make(chan struct{})
	var collecting sync.WaitGroup
	collecting.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(2 * time.Millisecond):
				runtime.GC()
			}
		}
	})
	end := p.End()
	close(stop)
	collecting.Wait()
	if end.Cause != contract.Cause_CAUSE_NO_TERMINAL || end.Quiet {
		t.Errorf("end %+v", end)
	}
	r.CheckOrder()
}

// TestFaultInMemory: touching bytes that are gone harms one op, not the process.
func TestFaultInMemory(t *testing.T) {
	r := newRig(t, &script{transfer: func(_ *script, op *sdk.Op) {
		for c := range op.Copies() {
			fault(c.Src)
		}
	}})
	if end := r.peer.Submit(r.op(1)).End(); end.Cause != contract.Cause_CAUSE_NO_TERMINAL || !strings.Contains(end.Detail, "memory") {
		t.Errorf("end %+v", end)
	}
}

func TestProgress(t *testing.T) {
	r := newRig(t, &script{transfer: func(_ *script, op *sdk.Op) {
		for i := range uint64(20000) {
			op.Progress(i / 4)
		}
		op.Progress(100)              // backwards
		op.Progress(op.Bytes() + 100) // beyond the size
		time.Sleep(2 * time.Millisecond)
		op.Progress(op.Bytes())
		op.Done(contract.Lane_LANE_SHM)
	}})
	start := time.Now()
	p := r.peer.Submit(r.op(1))
	p.End()
	n := 0
	for _, e := range r.Events() {
		if e.GetProgress() != nil {
			n++
		}
	}
	if most := int(time.Since(start)/time.Millisecond) + 2; n == 0 || n > most || p.Progress() != 2*pageSize {
		t.Errorf("%d events, at most %d; progress %d", n, most, p.Progress())
	}
	c := r.Stats().Counters
	if c["sdk.progress_backwards"] == 0 || c["sdk.progress_beyond_size"] == 0 {
		t.Errorf("counters %v", c)
	}
	r.CheckOrder()
}

// TestHeldProgressIsFlushed: what the rate limit held back goes out with the next beat (R9).
func TestHeldProgressIsFlushed(t *testing.T) {
	r := newRig(t, &script{transfer: func(_ *script, op *sdk.Op) {
		op.Progress(1)
		op.Progress(2)
		untilAborted(nil, op)
	}})
	p := r.peer.Submit(r.op(1))
	eventually(t, "progress 2", func() bool { return p.Progress() == 2 })
	p.Abort()
	p.End()
	r.CheckOrder()
}

func TestAbort(t *testing.T) {
	var release atomic.Bool
	b := &script{info: sdk.Info{OpConcurrency: 1}, transfer: func(_ *script, op *sdk.Op) {
		<-op.Context().Done()
		for !release.Load() {
			time.Sleep(time.Millisecond)
		}
		if context.Cause(op.Context()) != sdk.ErrAborted {
			op.Fail(contract.Cause_CAUSE_INTERNAL, true, "%v", context.Cause(op.Context()))
			return
		}
		op.Aborted(true)
	}}
	r := newRig(t, b)
	running, queued := r.peer.Submit(r.op(1)), r.peer.Submit(r.op(1))
	r.Stats()
	queued.Abort()
	if end := queued.End(); end.Kind != "aborted" || !end.Quiet {
		t.Errorf("queued: %+v", end)
	}
	running.Abort()
	running.Abort()
	release.Store(true)
	if end := running.End(); end.Kind != "aborted" {
		t.Errorf("running: %+v", end)
	}
	running.Abort() // ended: nothing changes

	// An abort that overtakes its Submit. What is illegal on Control shows that the frame was taken.
	ill := &contract.HostEvent{Event: &contract.HostEvent_Drain{Drain: &contract.Drain{}}}
	r.SendControl(abort(1<<40), ill)
	eventually(t, "the abort", func() bool { return r.Stats().Counters["sdk.host_breaches"] == 1 })
	m := submitOf(r)
	m.Op = 1 << 40
	if end := r.SubmitRaw(m).End(); end.Kind != "aborted" || !end.Quiet {
		t.Errorf("overtaken: %+v", end)
	}
	r.CheckOrder()
}

func TestPeerRemove(t *testing.T) {
	b := &script{transfer: untilAborted}
	r := newRig(t, b)
	ops := []*sdktest.Pending{r.peer.Submit(r.op(1)), r.peer.Submit(r.op(2))}
	r.Stats()
	r.peer.Remove()
	for _, p := range ops {
		if end := p.End(); end.Kind != "failed" || end.Cause != contract.Cause_CAUSE_PEER_UNREACHABLE || !end.Quiet {
			t.Errorf("end %+v", end)
		}
	}
	ended := false
	for _, e := range r.Events() {
		if e.GetFailed() != nil {
			ended = true
		}
		if e.GetPeerRemoved() != nil && !ended {
			t.Error("PeerRemoved before the ends")
		}
	}
	if n := b.peersOpen.Load(); n != 0 {
		t.Errorf("%d peers are left", n)
	}
	if end := r.peer.Submit(r.op(1)).End(); end.Cause != contract.Cause_CAUSE_PROTOCOL || !strings.Contains(end.Detail, "Submit.peer") {
		t.Errorf("after the removal: %+v", end)
	}
	r.peer.Remove() // unknown now; answered
	r.CheckOrder()
}

func TestRegionRemoveWaitsForQuiet(t *testing.T) {
	quiet := make(chan struct{})
	r := newRig(t, &script{transfer: func(_ *script, op *sdk.Op) {
		op.Fail(contract.Cause_CAUSE_TRANSPORT, false, "")
		<-quiet
		op.Quiesced()
	}})
	p := r.peer.Submit(r.op(1))
	p.End()
	r.Send(regionRemove(r.src.ID))
	r.Stats()
	for _, e := range r.Events() {
		if e.GetRegionRemoved() != nil {
			t.Fatal("removed while an op is not quiet")
		}
	}
	if r.src.LeaseEnded() {
		t.Error("the lease ended before the region was removed")
	}
	if end := r.peer.Submit(r.op(1)).End(); !strings.Contains(end.Detail, "is gone") {
		t.Errorf("an op on a region that is being removed: %+v", end)
	}
	close(quiet)
	p.Quiet()
	r.Until("RegionRemoved", func(e *contract.PluginEvent) bool { return e.GetRegionRemoved().GetRegion() == r.src.ID })
	if !r.src.LeaseEnded() {
		t.Error("the lease is still held")
	}
	r.CheckOrder()
}

func TestLanes(t *testing.T) {
	b := &script{transfer: func(_ *script, op *sdk.Op) { op.Done(contract.Lane_LANE_TCP) },
		addPeer: func(*sdk.Peer) (contract.Lane, error) { return contract.Lane_LANE_TCP, nil }}
	h := sdktest.New(t, b)
	if _, err := sdktest.Dial(h, h, contract.Lane_LANE_SHM); err == nil || !strings.Contains(err.Error(), "CAUSE_LANE") {
		t.Errorf("a slower peer was taken: %v", err)
	}
	if n := b.peersOpen.Load(); n != 0 {
		t.Errorf("%d peers are left", n)
	}
	b.addPeer = func(*sdk.Peer) (contract.Lane, error) { return contract.Lane_LANE_ANY, nil }
	p, err := sdktest.Dial(h, h, contract.Lane_LANE_SHM)
	if err != nil {
		t.Fatal(err)
	}
	src, dst := h.AddRegion(pageSize), h.AddRegion(pageSize)
	plan := p.IdentityPlan(h.AddPool(1, src.Tensor(0, pageSize)), h.AddPool(1, dst.Tensor(0, pageSize)))
	end := p.Submit(sdktest.Op{Plan: plan, Src: sdktest.Pages(0, 1), Dst: sdktest.Pages(0, 1)}).End()
	if end.Kind != "failed" || end.Cause != contract.Cause_CAUSE_LANE {
		t.Errorf("bytes on a slower lane: %+v", end)
	}
	for _, bad := range []func(*sdk.Peer) (contract.Lane, error){
		func(*sdk.Peer) (contract.Lane, error) { return 0, nil },
		func(*sdk.Peer) (contract.Lane, error) { return 0, errTest },
		func(*sdk.Peer) (contract.Lane, error) { panic("oh") },
	} {
		b.addPeer = bad
		if _, err := sdktest.Dial(h, h, contract.Lane_LANE_ANY); err == nil {
			t.Error("a bad peer was taken")
		}
	}
}

// TestStorm: many ops with random ends, late quiesces and aborts at random moments. Every op ends once,
// in order; nothing is left.
func TestStorm(t *testing.T) {
	b := &script{info: sdk.Info{OpConcurrency: 8}, transfer: func(b *script, op *sdk.Op) {
		switch rand.IntN(7) {
		case 0:
			copyAll(b, op)
		case 1:
			op.Fail(contract.Cause_CAUSE_TRANSPORT, false, "")
			op.Quiesced()
		case 2:
			op.Skip(contract.Cause_CAUSE_EMPTY, true, "")
		case 3:
			untilAborted(b, op)
		case 4:
			op.Async()
			go func() {
				op.Progress(1)
				<-op.Context().Done()
				op.Aborted(false)
				op.Quiesced()
			}()
		case 5:
			op.Progress(op.Bytes())
			op.Done(contract.Lane_LANE_SHM)
			op.Aborted(true)
		case 6:
			select {
			case <-op.Context().Done():
				op.Aborted(true)
			case <-time.After(time.Duration(rand.IntN(1000)) * time.Microsecond):
				op.Done(contract.Lane_LANE_SHM)
			}
		}
	}}
	r := newRig(t, b)
	var ops []*sdktest.Pending
	var aborters sync.WaitGroup
	for range 1000 {
		p := r.peer.Submit(r.op(uint32(rand.IntN(16) + 1)))
		ops = append(ops, p)
		if rand.IntN(2) == 0 {
			aborters.Go(func() { p.Abort() })
		}
	}
	aborters.Wait()
	for _, p := range ops {
		p.Abort()
	}
	for _, p := range ops {
		p.Quiet()
	}
	if s := r.Stats(); len(s.OpenOps) != 0 || s.LastSeq != 1000 {
		t.Errorf("left: %v, last seq %d", s.OpenOps, s.LastSeq)
	}
	if left := r.Drain(time.Minute); left != 0 {
		t.Errorf("drained with %d left", left)
	}
	r.RemoveRegion(r.src)
	r.RemoveRegion(r.dst)
	r.peer.Remove()
	r.CheckOrder()
}

// TestLostWorkers: a backend that ends the goroutines that it is called on does not run out of them.
func TestLostWorkers(t *testing.T) {
	r := newRig(t, &script{info: sdk.Info{OpConcurrency: 2}, transfer: func(_ *script, op *sdk.Op) {
		op.Done(contract.Lane_LANE_SHM)
		runtime.Goexit()
	}})
	var ops []*sdktest.Pending
	for range 20 {
		ops = append(ops, r.peer.Submit(r.op(1)))
	}
	for _, p := range ops {
		p.End()
	}
}

// TestEveryOpGetsItsWorker: as many ops run at once as the backend allows, however slow they are, and those
// that wait are taken as soon as one ends.
func TestEveryOpGetsItsWorker(t *testing.T) {
	const most = 8
	running, release := make(chan uint64, 2*most), make(chan struct{})
	r := newRig(t, &script{info: sdk.Info{OpConcurrency: most}, transfer: func(_ *script, op *sdk.Op) {
		running <- op.ID()
		<-release
		op.Done(contract.Lane_LANE_SHM)
	}})
	var ops []*sdktest.Pending
	for range most + 3 {
		ops = append(ops, r.peer.Submit(r.op(1)))
	}
	next := func() {
		select {
		case <-running:
		case <-time.After(sdktest.Wait):
			t.Fatal("an op got no worker")
		}
	}
	for range most {
		next()
	}
	select {
	case id := <-running:
		t.Errorf("op %d runs beyond the concurrency", id)
	case <-time.After(20 * time.Millisecond):
	}
	for range 3 {
		release <- struct{}{}
		next()
	}
	close(release)
	for _, op := range ops {
		if end := op.End(); end.Kind != "done" {
			t.Errorf("%+v", end)
		}
	}
}
