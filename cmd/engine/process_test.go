package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	client "github.com/terminus-kv/terminus/clients/go"
	"github.com/terminus-kv/terminus/internal/admin"
	"github.com/terminus-kv/terminus/plugins/sdk"
)

// asEngine makes this test binary behave as the engine in a child process. The plugin host executes
// it again as `plugin tcp` with an environment of its own, hence the second way.
const asEngine = "ENGINE_TEST_MAIN"

func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "plugin" && os.Args[2] == "liar" {
		sdk.Main(&liar{})
	}
	if os.Getenv(asEngine) != "" || (len(os.Args) > 1 && os.Args[1] == "plugin") {
		main()
	}
	// Under the race detector a process sleeps a second before it exits; plugins inherit this.
	os.Setenv("GORACE", "atexit_sleep_ms=0 "+os.Getenv("GORACE"))
	goleak.VerifyTestMain(m)
}

// process is an engine in a child process.
type process struct {
	cmd    *exec.Cmd
	stderr bytes.Buffer
	stdout bytes.Buffer
}

func spawn(t *testing.T, dir string, args ...string) *process {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := &process{cmd: exec.Command(exe, args...)}
	p.cmd.Env = []string{asEngine + "=1", "XDG_RUNTIME_DIR=" + dir, "TERMINUS_STATE_DIR=" + dir + "/state", "HOME=" + dir, "GORACE=" + os.Getenv("GORACE")}
	p.cmd.Stdout, p.cmd.Stderr = &p.stdout, &p.stderr
	p.cmd.WaitDelay = 10 * time.Second
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if p.cmd.ProcessState == nil {
			p.cmd.Process.Kill()
			p.cmd.Wait()
		}
	})
	return p
}

// wait returns the exit code, or fails the test when the process does not end.
func (p *process) wait(t *testing.T) int {
	t.Helper()
	kill := time.AfterFunc(60*time.Second, func() { p.cmd.Process.Kill() })
	err := p.cmd.Wait()
	if !kill.Stop() {
		t.Fatalf("the process did not end\n%s", &p.stderr)
	}
	if p.cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return p.cmd.ProcessState.ExitCode()
}

// eventually polls until ok returns nil.
func eventually(t *testing.T, what string, ok func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	for {
		err := ok(ctx)
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			t.Fatalf("%s: %v", what, err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func ready(c *admin.Client) func(context.Context) error {
	return func(ctx context.Context) error {
		r, err := c.Ready(ctx)
		if err == nil && !r.Ready {
			err = fmt.Errorf("not ready: %v", r.Reasons)
		}
		return err
	}
}

// TestRunPair starts the two example engines as two terminals would: they become ready, see each other, and stop
// with code 0, one by SIGTERM and one by `engine drain`.
func TestRunPair(t *testing.T) {
	dir := runtimeDir(t)
	nodes := []string{"prefill-0", "decode-0"}
	procs := make([]*process, 2)
	clients := make([]*admin.Client, 2)
	for i, file := range []string{"prefill.yaml", "decode.yaml"} {
		procs[i] = spawn(t, dir, "run", "-c", "../../configs/"+file)
		clients[i] = admin.NewClient(filepath.Join(dir, "terminus", nodes[i], "admin.sock"))
		defer clients[i].Close()
	}
	for i, c := range clients {
		eventually(t, nodes[i]+" ready", ready(c))
		eventually(t, nodes[i]+" sees the other", func(ctx context.Context) error {
			ps, err := c.Peers(ctx)
			if err == nil && (len(ps) != 1 || ps[0].Node != nodes[1-i] || ps[0].State != "ready") {
				err = fmt.Errorf("peers %+v", ps)
			}
			return err
		})
	}
	code, out, errOut := command(t, []string{"XDG_RUNTIME_DIR=" + dir}, "plugins", "list", "--node", "prefill-0")
	if code != exitOK || !strings.Contains(out, "tcp") {
		t.Errorf("plugins: exit %d\n%s%s", code, out, errOut)
	}

	// A second engine of the same node is refused and does not disturb the first.
	if code := spawn(t, dir, "run", "-c", "../../configs/prefill.yaml").wait(t); code != exitFailed {
		t.Errorf("a second prefill-0 exited with %d", code)
	}
	eventually(t, "prefill-0 still ready", ready(clients[0]))

	if err := procs[0].cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if code := procs[0].wait(t); code != exitOK {
		t.Errorf("after SIGTERM: exit %d\n%s", code, &procs[0].stderr)
	}
	if code, out, errOut := command(t, []string{"XDG_RUNTIME_DIR=" + dir}, "drain"); code != exitOK {
		t.Errorf("drain: exit %d\n%s%s", code, out, errOut)
	}
	if code := procs[1].wait(t); code != exitOK {
		t.Errorf("after drain: exit %d\n%s", code, &procs[1].stderr)
	}
	for i, p := range procs {
		if p.stdout.Len() > 0 {
			t.Errorf("%s wrote to stdout: %s", nodes[i], &p.stdout)
		}
	}
}

// A second SIGTERM during a drain ended the engine without a word.
func TestSecondSignalIsLogged(t *testing.T) {
	dir := runtimeDir(t)
	node := filepath.Join(dir, "terminus", "n1")
	p := spawn(t, dir, "run", "--set", "node=n1")
	c := admin.NewClient(filepath.Join(node, "admin.sock"))
	defer c.Close()
	eventually(t, "ready", ready(c))
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	w, err := client.Dial(ctx, client.Options{
		Socket: filepath.Join(node, "worker.sock"), Group: "g", Role: client.Source, Size: 1,
		Layout: client.Layout{DType: "bf16", Layers: 1, KVHeads: 1, HeadDim: 64, PageTokens: 16, Kind: "mha"},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if _, err := w.Open(ctx, client.OpenOptions{Room: 7}); err != nil { // the drain waits for it
		t.Fatal(err)
	}
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	eventually(t, "draining", func(ctx context.Context) error {
		st, err := c.Status(ctx)
		if err == nil && !st.Draining {
			err = errors.New("not yet")
		}
		return err
	})
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	p.wait(t)
	if s := p.cmd.ProcessState.Sys().(syscall.WaitStatus); !s.Signaled() || s.Signal() != syscall.SIGTERM {
		t.Errorf("it ended with %v", p.cmd.ProcessState)
	}
	if !strings.Contains(p.stderr.String(), "a second signal ends the engine at once") {
		t.Errorf("it said\n%s", &p.stderr)
	}
}

// TestRunBadConfig: every problem is on stderr, the exit code is 2, nothing was started.
func TestRunBadConfig(t *testing.T) {
	dir := runtimeDir(t)
	file := filepath.Join(dir, "bad.yaml")
	if err := os.WriteFile(file, []byte("nod: n\nclocks: {stall: 5}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p := spawn(t, dir, "run", "-c", file, "--set", "limits.peer_ops=none")
	if code := p.wait(t); code != exitUsage {
		t.Errorf("exit %d", code)
	}
	for _, want := range []string{file + ":1:1: nod: ", file + ":2:17: clocks.stall: ", "--set limits.peer_ops: "} {
		if !strings.Contains(p.stderr.String(), want) {
			t.Errorf("no %q in\n%s", want, &p.stderr)
		}
	}
	if p.stdout.Len() > 0 {
		t.Errorf("stdout: %s", &p.stdout)
	}
}

// TestPluginByHand: the hidden command says what it is when nobody's host started it.
func TestPluginByHand(t *testing.T) {
	p := spawn(t, runtimeDir(t), "plugin", "tcp", "info")
	if code := p.wait(t); code != exitOK || !strings.Contains(p.stdout.String(), `"name": "tcp"`) {
		t.Errorf("exit %d\n%s%s", code, &p.stdout, &p.stderr)
	}
}
