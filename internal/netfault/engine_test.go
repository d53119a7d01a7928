package netfault

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/internal/admin"
	"github.com/terminus-kv/terminus/internal/config"
)

// clocks are those of both engines and of their plugins.
type clocks struct {
	suspect, dead, stall, verdict, wait, transfer, drain time.Duration
	handshake, connect, abort, silence                   time.Duration // of the plugin
}

// theClocks: short ones keep the proportions of the default ones. What cannot be set keeps its length: engines beat
// every 500 ms and give up a stream after 5 s of silence.
func theClocks() clocks {
	if *long {
		k := config.Default().Clocks
		return clocks{
			suspect: k.PeerSuspect.Std(), dead: k.PeerDead.Std(), stall: k.Stall.Std(), verdict: k.Verdict.Std(), wait: 20 * time.Second,
			transfer: k.TransferMin.Std(), drain: k.Drain.Std(),
			handshake: 5 * time.Second, connect: 10 * time.Second, abort: 2 * time.Second, silence: 30 * time.Second,
		}
	}
	return clocks{
		suspect: 1500 * time.Millisecond, dead: 4 * time.Second, stall: 5 * time.Second, verdict: 6 * time.Second, wait: 8 * time.Second,
		transfer: 30 * time.Second, drain: time.Second,
		handshake: time.Second, connect: 3 * time.Second, abort: 500 * time.Millisecond, silence: 10 * time.Second,
	}
}

// terminal bounds the time from a fault, or from its open if that is later, until a room is terminal on both sides.
// Without a word of the peer a source past its RankEnd waits longest: for the judge, on a stream that both ends
// must first give up.
func (k clocks) terminal() time.Duration {
	return max(k.wait, k.verdict, k.stall) + k.dead + 2*time.Second
}

// engine is one `engine run`.
type engine struct {
	*host
	worker string
	admin  *admin.Client
	cmd    *exec.Cmd
	ended  <-chan error
	said   *words
}

// words keeps what a process says.
type words struct {
	mu   sync.Mutex
	text []byte
}

func (w *words) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.text = append(w.text, b...); len(w.text) > 1<<20 {
		w.text = w.text[len(w.text)-1<<19:]
	}
	return len(b), nil
}

func (w *words) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return string(w.text)
}

const configuration = `node: %[1]s
runtime_dir: %[2]s/r
state_dir: %[2]s/s
peers:
  driver: static
  listen: %[3]s:7000
  insecure_listen: %[6]q
  static: [{node: %[4]s, address: "%[5]s:7000"}]
drain: {budget: 1s}
`

// starting: programs built for the race detector take a second of processor time each to come up.
var starting sync.Mutex

// startEngines starts an engine on each host and waits until they know each other.
func startEngines(t *testing.T, hosts [2]*host, k clocks) (engines [2]*engine) {
	t.Helper()
	starting.Lock()
	defer starting.Unlock()
	self, err := os.Executable()
	must(t, err)
	for i, h := range hosts {
		other := hosts[1-i]
		text := fmt.Sprintf(configuration, h.name, h.dir, h.ip, other.name, other.ip, config.InsecureWords) +
			fmt.Sprintf("clocks: {queue: %[1]s, bootstrap: %[1]s, peer_queued: %[1]s, register: %[1]s, input: %[1]s, stall: %s, transfer_min: %s, verdict: %s, drain: %s, peer_suspect: %s, peer_dead: %s}\n",
				k.wait, k.stall, k.transfer, k.verdict, k.drain, k.suspect, k.dead) +
			fmt.Sprintf("plugins: {tcp: {options: {listen: \"%s:%d\", handshake_timeout_ms: %d, connect_timeout_ms: %d, abort_timeout_ms: %d, silence_timeout_ms: %d}}}\n",
				h.ip, dataPort, k.handshake.Milliseconds(), k.connect.Milliseconds(), k.abort.Milliseconds(), k.silence.Milliseconds())
		file := filepath.Join(h.dir, "engine.yaml")
		must(t, os.WriteFile(file, []byte(text), 0o600))
		e := &engine{host: h, worker: filepath.Join(h.dir, "r", h.name, "worker.sock"), admin: admin.NewClient(filepath.Join(h.dir, "r", h.name, "admin.sock")), said: &words{}}
		e.cmd = exec.Command(self, "engine", file)
		e.cmd.Stderr = e.said
		e.cmd.WaitDelay = 3 * time.Second
		e.ended, err = h.start(e.cmd)
		if err != nil {
			cannot(t, fmt.Errorf("start an engine on a host of its own: %w", err))
		}
		t.Cleanup(func() {
			_ = e.cmd.Process.Kill() // if it is still there
			e.admin.Close()
		})
		engines[i] = e
	}
	for _, e := range engines {
		if err := within(time.Minute, e.ready); err != nil {
			t.Fatalf("engine %s: %v; it said:\n%s", e.name, err, e.said)
		}
	}
	return engines
}

// ready reports why the engine, or its way to the other one, is not.
func (e *engine) ready() error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	r, err := e.admin.Ready(ctx)
	if err != nil {
		return err
	}
	if !r.Ready {
		return errors.New(strings.Join(r.Reasons, "; "))
	}
	peers, err := e.admin.Peers(ctx)
	if err != nil {
		return err
	}
	for _, p := range peers {
		if p.SameHost != e.shared {
			return fmt.Errorf("peer %s: same_host is %t", p.Node, p.SameHost)
		}
		if p.State == "ready" {
			return nil
		}
		err = fmt.Errorf("peer %s is %s: %s", p.Node, p.State, p.Detail)
	}
	return errors.Join(errors.New("no peer"), err)
}

// idle reports what the engine still has.
func (e *engine) idle() error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	s, err := e.admin.Status(ctx)
	if err != nil {
		return err
	}
	if s.Rooms != 0 || s.Held != 0 {
		return fmt.Errorf("%d rooms, %d ended ones whose pages are in use", s.Rooms, s.Held)
	}
	return nil
}

// stop ends the engine as an operator does, and reports what it should not have done or said.
func (e *engine) stop() error {
	_ = e.cmd.Process.Signal(unix.SIGTERM)
	select {
	case err := <-e.ended:
		if err != nil {
			return fmt.Errorf("engine %s ended: %w", e.name, err)
		}
	case <-time.After(15 * time.Second):
		_ = e.cmd.Process.Kill()
		return fmt.Errorf("engine %s does not stop", e.name)
	}
	for _, wrong := range []string{"DATA RACE", "panic", "level=ERROR"} {
		if strings.Contains(e.said.String(), wrong) {
			return fmt.Errorf("engine %s said %q", e.name, wrong)
		}
	}
	return nil
}

// connections counts the TCP connections of the host that stand, by the port that they are to.
func (e *engine) connections() (of [lanes]int, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/tcp", e.cmd.Process.Pid))
	for _, line := range strings.Split(string(text), "\n") {
		f := strings.Fields(line)
		if len(f) < 4 || f[3] != "01" {
			continue
		}
		switch {
		case strings.HasSuffix(f[1], fmt.Sprintf(":%04X", controlPort)), strings.HasSuffix(f[2], fmt.Sprintf(":%04X", controlPort)):
			of[control]++
		case strings.HasSuffix(f[1], fmt.Sprintf(":%04X", dataPort)), strings.HasSuffix(f[2], fmt.Sprintf(":%04X", dataPort)):
			of[data]++
		}
	}
	return of, err
}

// within calls f until it returns nil, or for d; then it returns what f said last.
func within(d time.Duration, f func() error) error {
	for until := time.Now().Add(d); ; time.Sleep(20 * time.Millisecond) {
		err := f()
		if err == nil || time.Now().After(until) {
			return err
		}
	}
}
