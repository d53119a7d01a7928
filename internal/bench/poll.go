package bench

import (
	"bufio"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	python "github.com/terminus-kv/terminus/clients/python"
	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/statemachine"
	"github.com/terminus-kv/terminus/internal/workerapi"
)

// poll measures what a Python scheduler pays to know the status of its rooms.
var poll = Bench{
	Name:  "poll",
	Short: "what a scheduler pass over 1,024 rooms costs in Python",
	Long: "The Python client on a status page that the engine's worker server feeds: 1,024 open rooms, of which 10 change " +
		"before a pass, against a pure-Python loop that reads one dict entry a room, in the same Python process; " +
		"then the polls again where a system call kills",
	Run: runPoll,
}

const (
	pollRooms   = 1024
	pollChanged = 10 // at most 1 %
	// pollChurn is how many changes are polled under the filter that kills at a system call.
	pollChurn = 2000
)

//go:embed poll.py
var pollScript []byte

// pollReport is what poll.py prints; times in nanoseconds.
type pollReport struct {
	Pass      float64 `json:"pass"`
	PassP50   float64 `json:"pass_p50"`
	Passes    int     `json:"passes"`
	Poll      float64 `json:"poll"`
	Read      float64 `json:"read"`
	Dict      float64 `json:"dict"`
	DictP50   float64 `json:"dict_p50"`
	Idle      float64 `json:"idle"`
	Each      float64 `json:"each"`
	All       float64 `json:"all"`
	Checked   int     `json:"checked"`
	Made      bool    `json:"made"`
	Unchecked string  `json:"unchecked"`
	Python    string  `json:"python"`
}

func runPoll(ctx context.Context, o Options) ([]Result, error) {
	page, err := startPage(filepath.Join(o.Dir, "w"))
	if err != nil {
		return nil, err
	}
	defer page.stop()
	r, err := runPollScript(ctx, o, page)
	if err != nil {
		return nil, err
	}
	micro := func(ns float64) float64 { return ns / 1000 }
	const loopName = "one dict read a room"
	loop := &Reference{loopName, micro(r.Dict)}
	results := []Result{
		{Name: "pass_1024", Value: micro(r.Pass), Unit: "µs", Better: Lower, Reference: loop, Target: &Target{OfValue, 5}, Samples: r.Passes,
			Note: fmt.Sprintf("1st percentile; Client.changes and Room.poll of what changed, %d of %d; Python %s", pollChanged, pollRooms, r.Python)},
		{Name: "one_room", Value: micro(r.Poll), Unit: "µs", Better: Lower, Target: &Target{OfValue, 0.25},
			Reference: &Reference{"one dict read", micro(r.Read)}, Note: "1st percentile; Room.poll in a loop"},
		{Name: "pass_1024_p50", Value: micro(r.PassP50), Unit: "µs", Better: Lower, Reference: &Reference{loopName, micro(r.DictP50)}, Samples: r.Passes},
		{Name: "pass_1024_unchanged", Value: micro(r.Idle), Unit: "µs", Better: Lower, Reference: loop, Note: "Client.changes in a loop"},
		{Name: "pass_1024_all", Value: micro(r.All), Unit: "µs", Better: Lower, Reference: loop, Note: "Client.poll_all: the status of every room as a list"},
		{Name: "pass_1024_each", Value: micro(r.Each), Unit: "µs", Better: Lower, Reference: loop, Note: "Room.poll of every room"},
	}
	if r.Checked == 0 {
		results[0].Note += "; system calls: not checked (" + r.Unchecked + ")"
		return results, nil
	}
	calls := Result{Name: "system_calls", Unit: "calls", Better: Lower, Target: &Target{OfValue, 0}, Samples: r.Checked,
		Note: "polls of changes under a seccomp filter that kills at any system call; a control with one was killed"}
	if r.Made {
		calls.Value, calls.Note = 1, "at least: a process that only polled was killed at a system call"
	}
	return append(results, calls), nil
}

// runPollScript runs poll.py and does what it asks for.
func runPollScript(ctx context.Context, o Options, page *statusPage) (*pollReport, error) {
	interpreter, err := exec.LookPath("python3")
	if err != nil {
		return nil, errors.New("python3 was not found; install Python 3.9 or later")
	}
	script, err := unpackClient(o.Dir)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, 10*o.Duration+2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, interpreter, script, page.socket, strconv.Itoa(pollRooms), strconv.Itoa(pollChanged),
		fmt.Sprint(o.Duration.Seconds()), strconv.Itoa(pollChurn))
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) } // its copies, too
	cmd.WaitDelay = 3 * time.Second
	cmd.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1")
	cmd.Stderr = o.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	o.progress("polling %d rooms from Python", pollRooms)
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", interpreter, err)
	}
	r, err := page.serve(bufio.NewReader(out), in)
	in.Close()
	ended := cmd.Wait()
	if ctx.Err() != nil {
		return nil, fmt.Errorf("poll.py: %w", ctx.Err())
	}
	if err != nil || ended != nil {
		return nil, fmt.Errorf("poll.py: %w", errors.Join(ended, err))
	}
	return r, nil
}

// unpackClient writes the client and the script below dir and returns the script's path.
func unpackClient(dir string) (string, error) {
	dir = filepath.Join(dir, "py")
	err := os.CopyFS(dir, python.Files)
	if err != nil {
		return "", fmt.Errorf("unpack the Python client: %w", err)
	}
	script := filepath.Join(dir, "poll.py")
	if err := os.WriteFile(script, pollScript, 0o600); err != nil {
		return "", fmt.Errorf("unpack the benchmark: %w", err)
	}
	return script, nil
}

// statusPage is the engine's worker server with a core of its own, in which a room only changes when the
// benchmark says so. It admits one session.
type statusPage struct {
	socket string
	server *workerapi.Server
	calls  chan func(*core.Effects)
	stopc  chan struct{}
	done   chan struct{}

	// The owner goroutine's.
	session core.SessionID
	open    []statemachine.Opener // by slot; Seq 0: not open
	status  []statemachine.KVPoll
	next    int // slot that changes next
}

func startPage(socket string) (*statusPage, error) {
	p := &statusPage{
		socket: socket,
		calls:  make(chan func(*core.Effects)), stopc: make(chan struct{}), done: make(chan struct{}),
		open: make([]statemachine.Opener, pollRooms), status: make([]statemachine.KVPoll, pollRooms),
	}
	server, err := workerapi.Listen(workerapi.Config{Socket: socket, Node: p, Post: p.post, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		return nil, err
	}
	p.server = server
	go p.loop()
	return p, nil
}

func (p *statusPage) stop() {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_ = p.server.Close(ctx)
	close(p.stopc)
	<-p.done
}

// loop is the owner goroutine.
func (p *statusPage) loop() {
	defer close(p.done)
	var x core.Effects
	for {
		select {
		case f := <-p.calls:
			x.Reset()
			f(&x)
			p.server.Apply(&x)
		case <-p.stopc:
			return
		}
	}
}

// do runs f on the owner goroutine and returns when its effects are applied, or the server has stopped.
func (p *statusPage) do(f func(*core.Effects)) {
	for _, g := range []func(*core.Effects){f, func(*core.Effects) {}} {
		select {
		case p.calls <- g:
		case <-p.done:
			return
		}
	}
}

// post takes an event of the session: it only opens rooms.
func (p *statusPage) post(ev core.Event) {
	if ev.Kind != core.Open || int(ev.Slot) >= pollRooms {
		return
	}
	p.do(func(x *core.Effects) {
		p.session, p.open[ev.Slot] = ev.Session, statemachine.Opener{Inc: 1, Seq: ev.Seq}
		x.Replies = append(x.Replies, core.Reply{Session: ev.Session, Seq: ev.Seq, Slot: ev.Slot, Code: core.OK, Opener: p.open[ev.Slot]})
		p.set(x, int(ev.Slot), statemachine.Bootstrapping)
	})
}

func (p *statusPage) set(x *core.Effects, slot int, s statemachine.KVPoll) {
	p.status[slot] = s
	x.Words = append(x.Words, core.WordEffect{Session: p.session, Slot: int32(slot), Status: s, Residency: statemachine.Armed, Opener: p.open[slot]})
}

// change gives the next pollChanged rooms another status.
func (p *statusPage) change() {
	p.do(func(x *core.Effects) {
		for range pollChanged {
			s := statemachine.WaitingForInput
			if p.status[p.next] == s {
				s = statemachine.Transferring
			}
			p.set(x, p.next, s)
			p.next = (p.next + 101) % pollRooms // spread over the page; 101 and 1,024 have no common factor
		}
	})
}

// serve does what the script asks for until its report comes.
func (p *statusPage) serve(out *bufio.Reader, in io.Writer) (*pollReport, error) {
	quit, churned := make(chan struct{}), make(chan struct{})
	close(churned)
	end := func() {
		select {
		case <-quit:
		default:
			close(quit)
		}
		<-churned
	}
	defer end()
	for {
		b, err := out.ReadByte()
		if err != nil {
			return nil, fmt.Errorf("it ended without a report: %w", err)
		}
		switch b {
		case 'c':
			p.change()
		case 'b':
			quit, churned = make(chan struct{}), make(chan struct{})
			go p.churn(quit, churned)
		case 'e':
			end()
		case '{':
			if err := out.UnreadByte(); err != nil {
				return nil, err
			}
			var r pollReport
			if err := json.NewDecoder(io.LimitReader(out, 1<<16)).Decode(&r); err != nil {
				return nil, fmt.Errorf("its report: %w", err)
			}
			return &r, nil
		default:
			return nil, fmt.Errorf("it asks for %q", b)
		}
		if _, err := in.Write([]byte{'\n'}); err != nil {
			return nil, fmt.Errorf("it does not read: %w", err)
		}
	}
}

// churn changes rooms until quit.
func (p *statusPage) churn(quit, done chan struct{}) {
	defer close(done)
	ticker := time.NewTicker(500 * time.Microsecond)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			p.change()
		case <-quit:
			return
		}
	}
}

// Hello admits.
func (p *statusPage) Hello(workerapi.Session) (workerapi.HelloReply, error) {
	return workerapi.HelloReply{Node: "bench", Incarnation: 1}, nil
}

var errNoMemory = errors.New("the benchmark takes no memory")

// AddRegion refuses: polling needs none.
func (p *statusPage) AddRegion(_ core.SessionID, r workerapi.Region, done func(error)) {
	_ = syscall.Close(r.MemFD)
	_ = syscall.Close(r.LeaseFD)
	done(errNoMemory)
}

// AddPool refuses.
func (p *statusPage) AddPool(_ core.SessionID, _ workerapi.Pool, done func(error)) { done(errNoMemory) }

// SessionClosed has nothing to give back.
func (p *statusPage) SessionClosed(core.SessionID) {}

var _ workerapi.Node = (*statusPage)(nil)
