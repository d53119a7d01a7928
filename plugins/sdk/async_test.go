package sdk_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
	"github.com/terminus-kv/terminus/plugins/sdk/sdktest"
)

// background is a backend of which the library works on its own and calls back, as that of docs/authoring.md.
type background struct{ library library }

func (b *background) Transfer(op *sdk.Op) {
	op.Async() // the handle is kept; the op ends from elsewhere
	post := b.library.post(op, func(err error, mayStillLand bool) {
		switch {
		case err == nil:
			op.Done(contract.Lane_LANE_RDMA)
		case errors.Is(err, errCancelled):
			op.Aborted(!mayStillLand)
		default:
			op.Fail(contract.Cause_CAUSE_TRANSPORT, !mayStillLand, "library: %v", err)
		}
	}, op.Quiesced) // called later, and only when mayStillLand was true
	context.AfterFunc(op.Context(), post.cancel)
}

// TestEndFromElsewhere: an op that its library ends, one that it loses, one that the host aborts.
func TestEndFromElsewhere(t *testing.T) {
	b := &background{}
	h := sdktest.New(t, b)
	r := h.AddRegion(4 * pageSize)
	peer := sdktest.Connect(h, h)
	pool := h.AddPool(4, r.Tensor(0, pageSize))
	submit := func() *sdktest.Pending {
		return peer.Submit(sdktest.Op{Plan: peer.IdentityPlan(pool, pool), Src: sdktest.Pages(0, 1), Dst: sdktest.Pages(1, 1)})
	}
	op := submit()
	b.library.next(t).completed(nil, false)
	if end := op.End(); end.Kind != "done" || !end.Quiet {
		t.Errorf("%+v", end)
	}
	op = submit()
	w := b.library.next(t)
	w.completed(errors.New("link down"), true)
	if end := op.End(); end.Kind != "failed" || end.Quiet {
		t.Errorf("%+v", end)
	}
	w.landed()
	op.Quiet()
	op = submit()
	b.library.next(t)
	op.Abort()
	if end := op.Quiet(); end.Kind != "aborted" {
		t.Errorf("%+v", end)
	}
}

var errCancelled = errors.New("cancelled")

// library stands for one that posts work and calls back.
type library struct {
	mu    sync.Mutex
	posts []*post
}

type post struct {
	once      sync.Once
	completed func(err error, mayStillLand bool)
	landed    func()
}

func (p *post) cancel() { p.once.Do(func() { p.completed(errCancelled, false) }) }

func (l *library) post(_ *sdk.Op, completed func(error, bool), landed func()) *post {
	p := &post{landed: landed}
	p.completed = completed
	l.mu.Lock()
	defer l.mu.Unlock()
	l.posts = append(l.posts, p)
	return p
}

// next waits for the op that was posted last. It does not cancel any more.
func (l *library) next(t *testing.T) *post {
	t.Helper()
	for deadline := time.Now().Add(sdktest.Wait); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		l.mu.Lock()
		if n := len(l.posts); n > 0 {
			p := l.posts[n-1]
			l.posts = nil
			l.mu.Unlock()
			return p
		}
		l.mu.Unlock()
	}
	t.Fatal("the library got nothing")
	return nil
}

func (*background) Info() sdk.Info { return sdk.Info{Name: "background", Version: "1"} }
func (*background) Start(context.Context, sdk.Start) ([]byte, error) {
	return nil, nil
}
func (*background) AddRegion(*sdk.Region) error { return nil }
func (*background) RemoveRegion(*sdk.Region)    {}
func (*background) AddPeer(*sdk.Peer) (contract.Lane, error) {
	return contract.Lane_LANE_RDMA, nil
}
func (*background) RemovePeer(*sdk.Peer) {}
func (*background) Close() error         { return nil }
