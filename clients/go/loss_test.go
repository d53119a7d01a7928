package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"testing"
	"time"

	client "github.com/terminus-kv/terminus/clients/go"
	"github.com/terminus-kv/terminus/internal/workerapi"
	"github.com/terminus-kv/terminus/internal/workerapi/workertest"
	"golang.org/x/sys/unix"
)

// engineProcess is a workertest.Engine in a process of its own.
type engineProcess struct {
	*exec.Cmd
	sock string
}

func socketPath(t *testing.T) string {
	dir, err := os.MkdirTemp("", "t")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir + "/s"
}

// spawn starts an engine and waits until it listens.
func spawn(t *testing.T, sock string) *engineProcess {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^TestHelperEngine$")
	cmd.Env = append(os.Environ(), "ENGINE_SOCKET="+sock)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	e := &engineProcess{cmd, sock}
	t.Cleanup(e.kill)
	workertest.WaitFor(t, "the engine's socket", func() bool {
		c, err := net.Dial("unix", sock)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
	return e
}

func (e *engineProcess) kill() {
	e.Process.Kill()
	e.Wait()
}

func (e *engineProcess) client(t *testing.T, o client.Options) *client.Client {
	return dial(t, &workertest.Engine{Config: workerapi.Config{Socket: e.sock}}, o)
}

// TestHelperEngine is the process of the tests below, not a test.
func TestHelperEngine(t *testing.T) {
	sock := os.Getenv("ENGINE_SOCKET")
	if sock == "" {
		return
	}
	e := &workertest.Engine{Config: workerapi.Config{Socket: sock}}
	if err := e.Run(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(time.Minute)
	e.Stop()
}

// A real engine process is killed: rooms latch, and their pages become reusable by proof.
func TestKilledEngine(t *testing.T) {
	e := spawn(t, socketPath(t))
	c := e.client(t, client.Options{Slots: 4, Notify: true})
	_, p := pool(t, c)
	r := open(t, c, 1)
	ctx := within(t)
	if err := r.Send(ctx, client.Chunk{Parts: []client.Part{{Pool: p, Pages: []int32{0}}}}); err != nil {
		t.Fatal(err)
	}
	if r.Reusable() {
		t.Error("reusable while armed")
	}
	e.kill()
	if st, err := r.WaitTerminal(ctx); st != client.Failed || err != nil {
		t.Fatalf("%v %v", st, err)
	}
	if err := client.LeaseProof(); err != nil {
		t.Skip(err)
	}
	if err := r.WaitReusable(ctx); err != nil {
		t.Error(err)
	}
}

// Redial goes on with the next engine: the same memory, the same pool numbers, the old rooms as they were.
func TestRedial(t *testing.T) {
	if err := client.LeaseProof(); err != nil {
		t.Skip(err)
	}
	e := spawn(t, socketPath(t))
	c := e.client(t, client.Options{Slots: 4, Notify: true})
	ctx := within(t)
	region, p := pool(t, c)
	s, err := c.NewStaging(ctx, 2, []client.StagedTensor{{Mem: bytes.Repeat([]byte("k"), 100), PageBytes: 100}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Region().Close()
	extra, err := c.CreateRegion(ctx, 4096) // in no pool, and closed before the loss
	if err != nil {
		t.Fatal(err)
	}
	extra.Close()
	armed, done := open(t, c, 1), open(t, c, 2)
	for _, r := range []*client.Room{armed, done} {
		if err := r.Send(ctx, client.Chunk{Parts: []client.Part{{Pool: p, Pages: []int32{1}}}, Last: r == done}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.Redial(ctx); !errors.Is(err, client.ErrAlive) {
		t.Errorf("redial of a session that lives: %v", err)
	}
	copy(region.Bytes(), "keep")
	e.kill()
	<-c.Done()

	short, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
	defer cancel()
	if _, err := c.Redial(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("redial without an engine: %v", err)
	}
	time.AfterFunc(50*time.Millisecond, func() { spawn(t, e.sock) })
	n, err := c.Redial(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	for _, r := range []*client.Room{armed, done} {
		if !r.Reusable() {
			t.Errorf("room %d: pages are %v after redial", r.ID(), r.Residency())
		}
	}
	if armed.Poll() != client.Failed || done.Poll() != client.Success {
		t.Errorf("old rooms: %v %v", armed.Poll(), done.Poll())
	}
	if f, err := armed.Failure(ctx); err != nil || f.Reason != client.ReasonEngineLost {
		t.Errorf("failure: %+v %v", f, err)
	}
	if err := armed.Release(ctx); err != nil {
		t.Error(err)
	}
	if n.Slots() != 4 || string(region.Bytes()[:4]) != "keep" {
		t.Errorf("%d slots, memory %q", n.Slots(), region.Bytes()[:4])
	}
	again := open(t, n, 1)
	if err := again.Send(ctx, client.Chunk{Parts: []client.Part{{Pool: p, Pages: []int32{7}}, {Pool: s.Pool(), Pages: []int32{1}}}, Last: true}); err != nil {
		t.Errorf("send with the old pool numbers: %v", err)
	}
	if st, err := again.WaitTerminal(ctx); st != client.Success {
		t.Errorf("%v %v", st, err)
	}
	n.Close()
	if _, err := n.Redial(ctx); !errors.Is(err, client.ErrClosed) {
		t.Errorf("redial after Close: %v", err)
	}
}

// Redial does not hand memory to the next engine while somebody of the last one can write to it, and
// may be called again.
func TestRedialWaitsForTheProof(t *testing.T) {
	if err := client.LeaseProof(); err != nil {
		t.Skip(err)
	}
	e := workertest.Start(t, &workertest.Engine{})
	c := dial(t, e, client.Options{Slots: 4})
	_, p := pool(t, c)
	ctx := within(t)
	closing, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if err := e.Server.Close(closing); err != nil { // the fake still holds the memory
		t.Fatal(err)
	}
	<-c.Done()
	workertest.Start(t, &workertest.Engine{Config: workerapi.Config{Socket: e.Config.Socket}})
	for patience := 100 * time.Millisecond; ; patience *= 2 {
		short, cancel := context.WithTimeout(ctx, patience)
		_, err := c.Redial(short)
		cancel()
		if errors.Is(err, client.ErrNotReusable) {
			break // while a writer is left
		}
		if !errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil { // else the hello took so long
			t.Fatalf("redial while a writer is left: %v", err)
		}
	}
	restore := client.SetLeaseProof(errors.New("no leases here"))
	if _, err := c.Redial(ctx); !errors.Is(err, client.ErrNotReusable) {
		t.Errorf("redial where there is no proof: %v", err)
	}
	restore()
	e.CloseMemory()
	n, err := c.Redial(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	r := open(t, n, 1)
	if err := r.Send(ctx, client.Chunk{Parts: []client.Part{{Pool: p, Pages: []int32{1}}}, Last: true}); err != nil {
		t.Error(err)
	}
}

// The engine that Redial found dies while it takes the memory: Redial goes on to the one after it.
func TestRedialOutlivesTheNextEngine(t *testing.T) {
	if err := client.LeaseProof(); err != nil {
		t.Skip(err)
	}
	e := workertest.Start(t, &workertest.Engine{})
	c := dial(t, e, client.Options{Slots: 4})
	_, p := pool(t, c)
	e.Stop()
	<-c.Done()
	second := workertest.Start(t, &workertest.Engine{Config: workerapi.Config{Socket: e.Config.Socket}, Late: make(chan struct{})})
	redialled := make(chan *client.Client, 1)
	go func() {
		n, err := c.Redial(within(t))
		if err != nil {
			t.Error(err)
		}
		redialled <- n
	}()
	workertest.WaitFor(t, "its session", func() bool { s, _ := second.Sessions(); return len(s) == 1 })
	second.Stop()
	close(second.Late)
	workertest.Start(t, &workertest.Engine{Config: workerapi.Config{Socket: e.Config.Socket}})
	n := <-redialled
	if n == nil {
		return
	}
	defer n.Close()
	r := open(t, n, 1)
	if err := r.Send(within(t), client.Chunk{Parts: []client.Part{{Pool: p, Pages: []int32{1}}}, Last: true}); err != nil {
		t.Error(err)
	}
}

// A Redial that times out while an engine takes the memory leaves its canary there. The next one must put
// back what the worker had, not the canary; and what the worker wrote since is the worker's.
func TestRedialThatTimedOutKeepsTheBytesUnderTheCanary(t *testing.T) {
	if err := client.LeaseProof(); err != nil {
		t.Skip(err)
	}
	for _, test := range []struct {
		name           string
		answers, write bool   // the engine answers the canary late; the worker writes after the failure
		proof          bool   // the worker looks at the proof before it redials
		want           string // under the canary, in the end
	}{
		{name: "canary not answered", want: "KVCACHE!"},
		{name: "canary answered late", answers: true, want: "KVCACHE!"},
		{name: "proof before the next redial", answers: true, proof: true, want: "KVCACHE!"},
		{name: "written since", write: true, want: "newbytes"},
	} {
		t.Run(test.name, func(t *testing.T) {
			e := workertest.Start(t, &workertest.Engine{})
			c := dial(t, e, client.Options{Slots: 4})
			region, p := pool(t, c)
			at := region.Bytes()[len(region.Bytes())-8:]
			copy(at, "KVCACHE!")
			e.Stop()
			<-c.Done()
			second := &workertest.Engine{Config: workerapi.Config{Socket: e.Config.Socket}, Late: make(chan struct{}), Silent: !test.answers}
			workertest.Start(t, second)
			ctx := within(t)
			for patience := 100 * time.Millisecond; string(at) == "KVCACHE!"; patience *= 2 { // the hello may take as long
				short, cancel := context.WithTimeout(ctx, patience)
				_, err := c.Redial(short)
				cancel()
				if !errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil {
					t.Fatalf("redial to an engine that does not answer: %v", err)
				}
			}
			if region.Reusable() {
				t.Error("reusable while the engine has the memory")
			}
			canary := string(at)
			close(second.Late)
			if test.answers {
				workertest.WaitFor(t, "the late answer", func() bool { return string(at) != canary })
			}
			if test.write {
				copy(at, "newbytes")
			}
			second.CloseMemory()
			if test.proof {
				workertest.WaitFor(t, "the proof", region.Reusable)
				if string(at) != test.want {
					t.Errorf("with the proof: %q, want %q", at, test.want)
				}
			}
			second.Stop()
			workertest.Start(t, &workertest.Engine{Config: workerapi.Config{Socket: e.Config.Socket}})
			n, err := c.Redial(ctx)
			if err != nil {
				t.Fatalf("the next redial: %v", err)
			}
			defer n.Close()
			if string(at) != test.want {
				t.Errorf("the worker's bytes are %q, want %q", at, test.want)
			}
			r := open(t, n, 1)
			if err := r.Send(ctx, client.Chunk{Parts: []client.Part{{Pool: p, Pages: []int32{1}}}, Last: true}); err != nil {
				t.Error(err)
			}
		})
	}
}

// An answer that comes after AddRegion gave up puts the worker's bytes back, and the session has the region.
func TestAddRegionThatTimedOutPutsTheBytesBack(t *testing.T) {
	for _, refusal := range []error{nil, errors.New("no room")} {
		t.Run(fmt.Sprint("refusal=", refusal), func(t *testing.T) {
			e := workertest.Start(t, &workertest.Engine{Late: make(chan struct{}), Unready: refusal})
			c := dial(t, e, client.Options{Slots: 4})
			region, err := client.NewRegion(4096)
			if err != nil {
				t.Fatal(err)
			}
			defer region.Close()
			at := region.Bytes()[4096-8:]
			copy(at, "KVCACHE!")
			short, cancel := context.WithTimeout(within(t), 50*time.Millisecond)
			defer cancel()
			if err := c.AddRegion(short, region); !errors.Is(err, context.DeadlineExceeded) {
				t.Fatal(err)
			}
			if string(at) == "KVCACHE!" {
				t.Error("the canary is gone before its answer")
			}
			close(e.Late)
			workertest.WaitFor(t, "the worker's bytes", func() bool { return string(at) == "KVCACHE!" })
			_, err = c.AddPool(within(t), client.Pool{Pages: 1, Tensors: []client.Tensor{{Region: region, PageBytes: 4096}}})
			if (err == nil) != (refusal == nil) {
				t.Errorf("a pool in it: %v", err)
			}
			if refusal != nil || client.LeaseProof() != nil {
				return
			}
			e.Stop()
			<-c.Done()
			workertest.Start(t, &workertest.Engine{Config: workerapi.Config{Socket: e.Config.Socket}})
			n, err := c.Redial(within(t))
			if err != nil {
				t.Fatalf("redial with a region that was ready late: %v", err)
			}
			defer n.Close()
			if string(at) != "KVCACHE!" {
				t.Errorf("after redial: %q", at)
			}
		})
	}
}

// Where the kernel gives no proof, pages of a lost engine stay quarantined although nobody is left.
func TestWithoutProofPagesStayQuarantined(t *testing.T) {
	e := workertest.Start(t, &workertest.Engine{})
	c := dial(t, e, client.Options{Slots: 4})
	region, p := pool(t, c)
	r := open(t, c, 1)
	if err := r.Send(within(t), client.Chunk{Parts: []client.Part{{Pool: p, Pages: []int32{1}}}}); err != nil {
		t.Fatal(err)
	}
	defer client.SetLeaseProof(errors.New("no leases here"))()
	e.Stop()
	<-c.Done()
	short, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if err := r.WaitReusable(short); !errors.Is(err, client.ErrNotReusable) || r.Residency() != client.Quarantined || region.Reusable() {
		t.Errorf("%v, %v, region reusable: %v", err, r.Residency(), region.Reusable())
	}
}

// A stopped engine is unresponsive, not lost: one that goes on in time has lost nothing. After the
// bound the session is over, whatever the engine does when it wakes up.
func TestStoppedEngine(t *testing.T) {
	e := spawn(t, socketPath(t))
	o := client.Options{Slots: 4, Notify: true, SuspectAfter: 300 * time.Millisecond, LostAfter: 3 * time.Second}
	c := e.client(t, o)
	_, p := pool(t, c)
	r := open(t, c, 1)
	ctx := within(t)
	e.Process.Signal(unix.SIGSTOP)
	workertest.WaitFor(t, "unresponsive", c.Unresponsive)
	if st := r.Poll(); st != client.Bootstrapping || c.Err() != nil {
		t.Errorf("unresponsive: %v, %v", st, c.Err())
	}
	e.Process.Signal(unix.SIGCONT)
	workertest.WaitFor(t, "responsive", func() bool { return !c.Unresponsive() })
	if err := r.Send(ctx, client.Chunk{Parts: []client.Part{{Pool: p, Pages: []int32{1}}}}); err != nil {
		t.Fatal(err)
	}
	e.Process.Signal(unix.SIGSTOP)
	workertest.WaitFor(t, "unresponsive again", c.Unresponsive)
	last, err := r.StartSend(ctx, client.Chunk{Last: true}) // the engine takes it when it wakes up
	if err != nil {
		t.Fatal(err)
	}
	if st, err := r.WaitTerminal(ctx); st != client.Failed || err != nil {
		t.Fatalf("%v %v", st, err)
	}
	if !errors.Is(c.Err(), client.ErrEngineLost) {
		t.Error(c.Err())
	}
	e.Process.Signal(unix.SIGCONT)
	if err := last.Wait(ctx); !errors.Is(err, client.ErrEngineLost) {
		t.Errorf("a request that was under way: %v", err)
	}
	time.Sleep(50 * time.Millisecond) // the engine says Success to a page that nobody reads
	if st, res := r.State(); st != client.Failed || res != client.Quarantined {
		t.Errorf("after it woke up: %v %v", st, res)
	}
}
