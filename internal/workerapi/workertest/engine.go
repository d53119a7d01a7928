// Package workertest is an engine for tests of worker clients: a real workerapi.Server whose node and
// core are a small loop. A room goes the shortest way: open, register or send, and with the last chunk
// Success; anything else a test writes itself.
package workertest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/layout"
	sm "github.com/terminus-kv/terminus/core/statemachine"
	"github.com/terminus-kv/terminus/internal/workerapi"
	"golang.org/x/sys/unix"
)

// Engine is the fake. Its exported fields are set before Start.
type Engine struct {
	Config  workerapi.Config // Node and Post are the fake's own
	Refuse  error            // Hello's answer
	Silent  bool             // regions' canaries are not answered
	Unready error            // AddRegion's and AddPool's answer
	Late    chan struct{}    // when set, AddRegion answers after it is closed
	Before  func(core.Event) // when set, called by the server's goroutine before an event is queued

	Server  *workerapi.Server
	events  chan core.Event
	calls   chan func(*core.Effects)
	applied chan struct{}
	stop    chan struct{}
	done    chan struct{}

	mu       sync.Mutex
	log      []core.Event
	sessions []workerapi.Session
	closed   []core.SessionID
	regions  []workerapi.Region
	pools    []workerapi.Pool
	seq      uint64
	rooms    map[key]*room
}

type key struct {
	session core.SessionID
	slot    int32
}

type room struct {
	id        int64
	role      sm.Role
	own       sm.Opener
	status    sm.KVPoll
	residency sm.Residency
	reason    sm.Reason
}

// Start serves e on a socket in a directory of its own and ends it with the test.
func Start(t testing.TB, e *Engine) *Engine {
	t.Helper()
	if e.Config.Socket == "" {
		dir, err := os.MkdirTemp("", "t") // short: unix paths have 107 bytes
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.RemoveAll(dir) })
		e.Config.Socket = filepath.Join(dir, "s")
	}
	if err := e.Run(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Stop)
	return e
}

// Run serves without a test. Config.Socket must be set.
func (e *Engine) Run() error {
	e.Config.Node, e.Config.Post = e, e.post
	if e.Config.Log == nil {
		e.Config.Log = slog.New(slog.NewTextHandler(io.Discard, nil))
	}
	e.events, e.calls = make(chan core.Event, 4096), make(chan func(*core.Effects))
	e.applied = make(chan struct{})
	e.stop, e.done = make(chan struct{}), make(chan struct{})
	e.rooms = make(map[key]*room)
	srv, err := workerapi.Listen(e.Config)
	if err != nil {
		return err
	}
	e.Server = srv
	go e.loop()
	return nil
}

// Stop closes the server and the loop, then the memory, as the end of a process would. Idempotent.
func (e *Engine) Stop() {
	select {
	case <-e.done:
		return
	default:
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := e.Server.Close(ctx); err != nil {
		panic(err)
	}
	close(e.stop)
	<-e.done
	e.CloseMemory()
}

// CloseMemory gives all regions back.
func (e *Engine) CloseMemory() {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, r := range e.regions {
		unix.Close(r.MemFD)
		unix.Close(r.LeaseFD)
	}
	e.regions = nil
}

// Do runs fn on the owner goroutine and returns when its effects are applied.
func (e *Engine) Do(fn func(*core.Effects)) {
	select {
	case e.calls <- fn:
		<-e.applied
	case <-e.done:
	}
}

// Set gives a slot a word.
func (e *Engine) Set(s core.SessionID, slot int32, st sm.KVPoll, res sm.Residency, why sm.Reason) {
	e.Do(func(x *core.Effects) { e.set(x, key{s, slot}, st, res, why) })
}

// Succeed hands aux to a slot and ends it well.
func (e *Engine) Succeed(s core.SessionID, slot int32, aux []byte) {
	e.Do(func(x *core.Effects) {
		e.mu.Lock()
		r := e.rooms[key{s, slot}]
		e.mu.Unlock()
		if r == nil {
			return
		}
		x.Auxes = append(x.Auxes, core.AuxEffect{Session: s, Slot: slot, Room: r.id, Aux: aux})
		e.set(x, key{s, slot}, sm.Succeeded, sm.Quiet, sm.Success)
	})
}

// Events returns the events of a kind that arrived so far.
func (e *Engine) Events(kind core.EventKind) []core.Event {
	e.mu.Lock()
	defer e.mu.Unlock()
	var out []core.Event
	for _, ev := range e.log {
		if ev.Kind == kind {
			out = append(out, ev)
		}
	}
	return out
}

// Sessions returns the sessions that were admitted, and the ids of those that were closed.
func (e *Engine) Sessions() ([]workerapi.Session, []core.SessionID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return append([]workerapi.Session(nil), e.sessions...), append([]core.SessionID(nil), e.closed...)
}

// Hello admits.
func (e *Engine) Hello(s workerapi.Session) (workerapi.HelloReply, error) {
	if e.Refuse != nil {
		return workerapi.HelloReply{}, e.Refuse
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.sessions = append(e.sessions, s)
	return workerapi.HelloReply{Node: "node-a", Incarnation: 7}, nil
}

// AddRegion maps the memory for a moment and answers its canary.
func (e *Engine) AddRegion(_ core.SessionID, r workerapi.Region, done func(error)) {
	e.mu.Lock()
	e.regions = append(e.regions, r)
	e.mu.Unlock()
	go func() {
		if e.Late != nil {
			<-e.Late
		}
		err := e.Unready
		if err == nil && !e.Silent {
			err = answerCanary(r)
		}
		done(err)
	}()
}

func answerCanary(r workerapi.Region) error {
	m, err := unix.Mmap(r.MemFD, 0, int(r.Size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	defer unix.Munmap(m)
	at := m[r.CanaryOffset:]
	if v := binary.LittleEndian.Uint64(at); v != r.Canary {
		return fmt.Errorf("canary is %#x, want %#x", v, r.Canary)
	}
	binary.LittleEndian.PutUint64(at, ^r.Canary)
	return nil
}

// AddPool posts PoolUp.
func (e *Engine) AddPool(s core.SessionID, p workerapi.Pool, done func(error)) {
	if e.Unready != nil {
		done(e.Unready)
		return
	}
	e.mu.Lock()
	e.pools = append(e.pools, p)
	e.mu.Unlock()
	e.post(core.Event{Kind: core.PoolUp, Session: s, Ordinal: p.Ordinal, Pages: p.Pages})
	done(nil)
}

// SessionClosed is recorded.
func (e *Engine) SessionClosed(s core.SessionID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.closed = append(e.closed, s)
}

func (e *Engine) post(ev core.Event) {
	if e.Before != nil {
		e.Before(ev)
	}
	select {
	case e.events <- ev:
	case <-e.done:
	}
}

// loop is the owner goroutine: batches of events in, effects out into a reused buffer.
func (e *Engine) loop() {
	defer close(e.done)
	var x core.Effects
	for {
		x.Auxes, x.Words, x.Replies = x.Auxes[:0], x.Words[:0], x.Replies[:0]
		select {
		case <-e.stop:
			return
		case fn := <-e.calls:
			fn(&x)
			e.Server.Apply(&x)
			e.applied <- struct{}{}
		case ev := <-e.events:
			e.step(&x, ev)
			for n := len(e.events); n > 0; n-- {
				e.step(&x, <-e.events)
			}
			e.Server.Apply(&x)
		}
	}
}

func (e *Engine) set(x *core.Effects, k key, st sm.KVPoll, res sm.Residency, why sm.Reason) {
	e.mu.Lock()
	defer e.mu.Unlock()
	r := e.rooms[k]
	if r == nil {
		return
	}
	r.status, r.residency, r.reason = st, res, why
	x.Words = append(x.Words, core.WordEffect{Session: k.session, Slot: k.slot, Status: st, Residency: res, Opener: r.own, Reason: why})
}

func (e *Engine) step(x *core.Effects, ev core.Event) {
	e.mu.Lock()
	if len(e.log) < 1<<16 {
		e.log = append(e.log, ev)
	}
	k := key{ev.Session, ev.Slot}
	r := e.rooms[k]
	e.mu.Unlock()
	rep := core.Reply{Session: ev.Session, Seq: ev.Seq, Slot: ev.Slot, Code: core.OK}
	if r != nil && r.status.Terminal() && (ev.Kind == core.Send || ev.Kind == core.Register || ev.Kind == core.Abort) {
		rep.Code, rep.Reason = core.Ended, r.reason
		x.Replies = append(x.Replies, rep)
		return
	}
	switch ev.Kind {
	case core.Open:
		if ev.Room == EndedRoom {
			rep.Code, rep.Reason = core.Ended, sm.PeerAborted
			break
		}
		e.mu.Lock()
		e.seq++
		rep.Opener = sm.Opener{Inc: 7, Seq: e.seq}
		e.rooms[k] = &room{id: ev.Room, role: ev.Role, own: rep.Opener}
		e.mu.Unlock()
		e.set(x, k, sm.Bootstrapping, sm.NoPages, sm.None)
	case core.Register:
		e.set(x, k, sm.WaitingForInput, sm.Armed, sm.None)
	case core.Send:
		if layout.Pages(runsOf(ev)) > 0 {
			e.set(x, k, sm.Transferring, sm.Armed, sm.None)
		}
		if ev.Last {
			e.set(x, k, sm.Succeeded, sm.Quiet, sm.Success)
		}
	case core.Abort:
		e.set(x, k, sm.Failed, sm.Quiet, sm.Aborted)
	case core.Release:
		if !r.residency.Reusable() {
			rep.Code, rep.Detail = core.Refused, "pages are "+r.residency.String()
			break
		}
		e.set(x, k, r.status, sm.Released, r.reason)
		e.mu.Lock()
		delete(e.rooms, k)
		e.mu.Unlock()
		rep.Code = core.Freed
	default:
		return
	}
	x.Replies = append(x.Replies, rep)
}

// EndedRoom is a room that has always ended before it is opened.
const EndedRoom = 1 << 40

func runsOf(ev core.Event) []layout.Run {
	var out []layout.Run
	for _, p := range ev.Parts {
		out = append(out, p.Runs...)
	}
	return out
}

// WaitFor polls until ok, for ten seconds at most.
func WaitFor(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(2 * time.Millisecond) {
		if ok() {
			return
		}
		if time.Now().After(end) {
			t.Fatal(errors.New("timed out waiting for " + what))
		}
	}
}
