package workerapi_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/terminus-kv/terminus/core"
	sm "github.com/terminus-kv/terminus/core/statemachine"
	"github.com/terminus-kv/terminus/internal/workerapi"
	"github.com/terminus-kv/terminus/internal/workerapi/workertest"
	"golang.org/x/sys/unix"
)

func TestDisconnectInMidFrame(t *testing.T) {
	e := workertest.Start(t, &workertest.Engine{})
	other := dial(t, e, "source", 4)
	for cut := 1; cut < 40; cut += 7 {
		w := dial(t, e, "source", 4)
		w.ask(`{"t":"open","room":5}`, nil)
		w.raw(frame(`{"t":"open","seq":3,"room":6,"priority":12345678}`, nil)[:cut])
		w.conn.Close()
	}
	workertest.WaitFor(t, "the sessions' end", func() bool { _, closed := e.Sessions(); return len(closed) == 6 })
	if n := len(e.Events(core.SessionDown)); n != 6 {
		t.Errorf("%d SessionDown events, want 6", n)
	}
	if a := other.ask(`{"t":"open","room":1}`, nil); a.T != "ok" {
		t.Errorf("another session was harmed: %+v", a)
	}
	if c := e.Server.Counters(); c.Sessions != 1 {
		t.Errorf("%d sessions are counted", c.Sessions)
	}
}

func TestAdmission(t *testing.T) {
	e := workertest.Start(t, &workertest.Engine{Config: workerapi.Config{MaxSessions: 2, HelloTimeout: 300 * time.Millisecond}})
	st, err := os.Stat(e.Config.Socket)
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("the socket's mode is %v %v", st.Mode(), err)
	}
	silent := connect(t, e)
	dial(t, e, "source", 4)
	third := connect(t, e)
	if a, err := third.read(); err != nil || a.Code != "limit" || !third.closed() {
		t.Errorf("a third worker: %+v %v", a, err)
	}
	if a, err := silent.read(); err != nil || a.Rule != workerapi.RuleOrder || !silent.closed() {
		t.Errorf("a worker without hello: %+v %v", a, err)
	}
	workertest.WaitFor(t, "the counter", func() bool { return e.Server.Counters().HelloTimeout == 1 })

	w := connect(t, workertest.Start(t, &workertest.Engine{}))
	for name, c := range map[string]struct{ h, field string }{
		"request first": {`{"t":"open","room":1}`, "t"},
		"version":       {`{"t":"hello","v":2,"group":"g","role":"source","rank":0,"size":1,` + layoutJSON + `}`, "v"},
		"group":         {`{"t":"hello","v":1,"group":"g\n","role":"source","rank":0,"size":1,` + layoutJSON + `}`, "group"},
		"role":          {`{"t":"hello","v":1,"group":"g","role":"both","rank":0,"size":1,` + layoutJSON + `}`, "role"},
		"rank":          {`{"t":"hello","v":1,"group":"g","role":"source","rank":1,"size":1,` + layoutJSON + `}`, "rank"},
		"slots":         {`{"t":"hello","v":1,"group":"g","role":"source","rank":0,"size":1,"slots":65537,` + layoutJSON + `}`, "slots"},
		"layout":        {`{"t":"hello","v":1,"group":"g","role":"source","rank":0,"size":1}`, "layout"},
		"order":         {`{"t":"hello","v":1,"group":"g","role":"source","rank":0,"size":1,` + strings.Replace(layoutJSON, `"kind"`, `"order":"ndh","kind"`, 1) + `}`, "layout.order"},
	} {
		if a := w.ask(c.h, nil); a.T != "error" || a.Field != c.field {
			t.Errorf("%s: %+v", name, a)
		}
	}
}

func TestRefusedByTheNode(t *testing.T) {
	e := workertest.Start(t, &workertest.Engine{Refuse: &workerapi.Error{Code: workerapi.Draining, Message: "the engine drains"}})
	w := connect(t, e)
	a := w.ask(`{"t":"hello","v":1,"group":"g","role":"source","rank":0,"size":1,`+layoutJSON+`}`, nil)
	if a.Code != "draining" || a.Message != "the engine drains" {
		t.Errorf("%+v", a)
	}
}

func TestSocketOwnership(t *testing.T) {
	e := workertest.Start(t, &workertest.Engine{})
	second := &workertest.Engine{Config: workerapi.Config{Socket: e.Config.Socket}}
	if err := second.Run(); err == nil || !strings.Contains(err.Error(), "another engine serves it") {
		t.Fatalf("a second engine on the socket of a live one: %v", err)
	}
	dial(t, e, "source", 1) // it is still the first one's

	// A socket that a dead engine left is replaced; another kind of file is not.
	dir := filepath.Dir(e.Config.Socket)
	stale := filepath.Join(dir, "stale")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: stale, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
	dial(t, workertest.Start(t, &workertest.Engine{Config: workerapi.Config{Socket: stale}}), "source", 1)
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := (&workertest.Engine{Config: workerapi.Config{Socket: file}}).Run(); err == nil {
		t.Error("a file was replaced by a socket")
	}
	if err := (&workertest.Engine{Config: workerapi.Config{Socket: strings.Repeat("x", 108)}}).Run(); err == nil {
		t.Error("a path of 108 bytes was accepted")
	}
	gid := os.Getgid()
	g := workertest.Start(t, &workertest.Engine{Config: workerapi.Config{Group: &gid}})
	if st, err := os.Stat(g.Config.Socket); err != nil || st.Mode().Perm() != 0o660 {
		t.Errorf("with a group: %v %v", st.Mode(), err)
	}
}

// Backends answer when the worker is gone: the memory is the node's, nothing else happens.
func TestLateRegion(t *testing.T) {
	e := workertest.Start(t, &workertest.Engine{Late: make(chan struct{})})
	w := dial(t, e, "source", 4)
	fd := reopen(t, memory(t, 8192, unix.MFD_ALLOW_SEALING, goodSeals), unix.O_RDWR)
	w.tell(`{"t":"region_add","region":1,"size":8192,"canary_offset":0,"canary":0}`, nil, fd, lease(t))
	if a := w.ask(`{"t":"pool_add","pool":0,"pages":1,"tensors":[{"region":1,"offset":0,"page_stride":4096,"page_bytes":4096,"layer":0}]}`, nil); a.Rule != workerapi.RulePools {
		t.Errorf("a pool in a region that is not ready: %+v", a)
	}
	w.conn.Close()
	workertest.WaitFor(t, "the session's end", func() bool { _, closed := e.Sessions(); return len(closed) == 1 })
	close(e.Late)
	if a := dial(t, e, "source", 4).ask(`{"t":"open","room":1}`, nil); a.T != "ok" {
		t.Errorf("the next worker: %+v", a)
	}
}

// The end of a session is known before its reader comes to it: here it waits for an answer that does
// not come.
func TestHungUp(t *testing.T) {
	e := workertest.Start(t, &workertest.Engine{Late: make(chan struct{}), Config: workerapi.Config{MaxInflight: 1}})
	defer close(e.Late)
	stays, leaves := dial(t, e, "source", 4), dial(t, e, "destination", 4)
	fd := reopen(t, memory(t, 8192, unix.MFD_ALLOW_SEALING, goodSeals), unix.O_RDWR)
	leaves.tell(`{"t":"region_add","region":1,"size":8192,"canary_offset":0,"canary":0}`, nil, fd, lease(t))
	leaves.tell(`{"t":"open","room":1,"peer_group":"g"}`, nil)
	if gone := e.Server.HungUp(); len(gone) != 0 {
		t.Errorf("%v while both are there", gone)
	}
	leaves.conn.Close()
	workertest.WaitFor(t, "the hang-up", func() bool { return len(e.Server.HungUp()) == 1 })
	sessions, closed := e.Sessions()
	if gone := e.Server.HungUp(); len(closed) != 0 || len(gone) != 1 || gone[0] != sessions[1].ID {
		t.Errorf("gone %v, closed %v, sessions %v", gone, closed, sessions)
	}
	if a := stays.ask(`{"t":"open","room":2}`, nil); a.T != "ok" {
		t.Errorf("the other worker: %+v", a)
	}
}

// A session whose goroutine has seen the end is named until its SessionDown is posted: the owner may ask in between, and
// would take a peer's word for a room that its worker has given up.
func TestHungUpWhileSessionDownIsUnderWay(t *testing.T) {
	under, on := make(chan struct{}), make(chan struct{})
	e := workertest.Start(t, &workertest.Engine{Before: func(ev core.Event) {
		if ev.Kind == core.SessionDown {
			close(under)
			<-on
		}
	}})
	w := dial(t, e, "source", 1)
	w.conn.Close()
	<-under
	sessions, _ := e.Sessions()
	if gone := e.Server.HungUp(); len(gone) != 1 || gone[0] != sessions[0].ID {
		t.Errorf("gone %v, want %v", gone, sessions[0].ID)
	}
	close(on)
	workertest.WaitFor(t, "SessionDown", func() bool { return len(e.Events(core.SessionDown)) == 1 })
	workertest.WaitFor(t, "nobody to be on its way", func() bool { return len(e.Server.HungUp()) == 0 })
}

// Another user who gets as far as connecting is refused by its credentials.
func TestForeignUser(t *testing.T) {
	if os.Getuid() != 0 {
		if os.Getenv("CI") != "" {
			t.Fatal("only root can become somebody else, and CI tests everything")
		}
		t.Skip("only root can become somebody else")
	}
	e := workertest.Start(t, &workertest.Engine{})
	os.Chmod(filepath.Dir(e.Config.Socket), 0o755)
	os.Chmod(e.Config.Socket, 0o666)
	got := make(chan answer)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), 65534, ^uintptr(0))
		var a answer
		if c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: e.Config.Socket, Net: "unix"}); err == nil {
			defer c.Close()
			c.SetDeadline(time.Now().Add(10 * time.Second))
			a, _ = (&worker{conn: c}).read()
		}
		got <- a
	}()
	if a := <-got; a.Code != "refused" || a.Field != "uid" || a.Rule != workerapi.RuleAccess {
		t.Errorf("user 65534: %+v", a)
	}
	if n := e.Server.Counters().Refused; n != 1 {
		t.Errorf("%d refusals are counted", n)
	}
}

// A worker that does not read its answers is disconnected and nobody waits for it.
func TestSlowWorker(t *testing.T) {
	e := workertest.Start(t, &workertest.Engine{Config: workerapi.Config{MaxInflight: 1 << 14, WriteTimeout: 300 * time.Millisecond}})
	w := dial(t, e, "source", 1)
	h := []byte{}
	for i := range 1 << 13 {
		h = append(h, frame(fmt.Sprintf(`{"t":"nonsense %020d","seq":%d}`, i, i+100), nil)...)
	}
	w.conn.SetWriteDeadline(time.Now().Add(10 * time.Second))
	w.conn.Write(h) // may end with an error: the engine closes in the middle
	workertest.WaitFor(t, "the disconnect", func() bool { return e.Server.Counters().SlowWorkers == 1 })
	workertest.WaitFor(t, "the session's end", func() bool { return len(e.Events(core.SessionDown)) == 1 })
}

// The engine is stopped while workers are connected, some before hello.
func TestClose(t *testing.T) {
	e := workertest.Start(t, &workertest.Engine{})
	w := dial(t, e, "source", 4)
	w.ask(`{"t":"open","room":5}`, nil)
	early := connect(t, e)
	workertest.WaitFor(t, "both connections", func() bool { return e.Server.Counters().Connections == 2 })
	start := time.Now()
	e.Stop()
	if !w.closed() || !early.closed() {
		t.Error("a connection is open after the engine's end")
	}
	if d := time.Since(start); d > 4*time.Second {
		t.Errorf("closing took %v", d)
	}
	if _, err := os.Stat(e.Config.Socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket file: %v", err)
	}
	if _, err := os.Stat(e.Config.Socket + ".lock"); err != nil {
		t.Errorf("the lock file must stay: %v", err)
	}
	e.Server.Apply(&core.Effects{Words: []core.WordEffect{{Session: 1}}}) // late effects are dropped
}

// The worker exits while a child of it keeps its socket: only the pidfd tells.
func TestWorkerExitSeenByPidfd(t *testing.T) {
	e := workertest.Start(t, &workertest.Engine{})
	cmd := exec.Command(os.Args[0], "-test.run=^TestHelperForkingWorker$")
	cmd.Env = append(os.Environ(), "WORKER_SOCKET="+e.Config.Socket)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	text, _ := io.ReadAll(io.LimitReader(out, 64)) // the child closes it at once
	cmd.Wait()
	pid, err := strconv.Atoi(strings.TrimSpace(strings.SplitN(string(text), "\n", 2)[0]))
	if err != nil {
		t.Fatalf("the worker printed %q", text)
	}
	defer unix.Kill(pid, unix.SIGKILL)
	workertest.WaitFor(t, "SessionDown", func() bool { return len(e.Events(core.SessionDown)) == 1 })
	if err := unix.Kill(pid, 0); err != nil {
		t.Errorf("the child that holds the socket was to live on: %v", err)
	}
}

// TestHelperForkingWorker is the worker of the test above, not a test.
func TestHelperForkingWorker(t *testing.T) {
	path := os.Getenv("WORKER_SOCKET")
	if path == "" {
		return
	}
	w := dial(t, &workertest.Engine{Config: workerapi.Config{Socket: path}}, "source", 1)
	f, err := w.conn.File()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command("/bin/sleep", "60")
	c.ExtraFiles = []*os.File{f}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	fmt.Println(c.Process.Pid)
	os.Exit(0)
}

// Words cost nothing that the collector would have to clean up, and one wake an Apply.
func TestWordsDoNotAllocate(t *testing.T) {
	e := workertest.Start(t, &workertest.Engine{})
	w := connect(t, e)
	a := w.ask(`{"t":"hello","v":1,"group":"g","role":"source","rank":0,"size":1,"slots":4,"notify":true,`+layoutJSON+`}`, nil)
	a = w.ask(`{"t":"open","room":5}`, nil)
	x := core.Effects{}
	for i := range 100 {
		x.Words = append(x.Words, core.WordEffect{Session: 1, Slot: a.Slot, Status: sm.KVPoll(i % 4), Opener: sm.Opener{Inc: 7, Seq: 1}})
	}
	before := e.Server.Counters().Wakeups
	var n float64
	e.Do(func(*core.Effects) { n = testing.AllocsPerRun(100, func() { e.Server.Apply(&x) }) })
	if n != 0 {
		t.Errorf("%v allocations for 100 words", n)
	}
	if got := e.Server.Counters().Wakeups - before; got != 101 {
		t.Errorf("%d wakes for 101 Applies", got)
	}
}

func BenchmarkApplyWords(b *testing.B) {
	e := workertest.Start(b, &workertest.Engine{})
	w := dial(b, e, "source", 1024)
	a := w.ask(`{"t":"open","room":5}`, nil)
	x := core.Effects{Words: make([]core.WordEffect, 100)}
	for i := range x.Words {
		x.Words[i] = core.WordEffect{Session: 1, Slot: a.Slot, Opener: sm.Opener{Seq: 1}}
	}
	e.Do(func(*core.Effects) {
		for b.Loop() {
			e.Server.Apply(&x)
		}
	})
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/100, "ns/word")
}
