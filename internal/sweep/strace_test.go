package sweep

import (
	"os/exec"
	"strings"
	"testing"
	"time"
)

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func emptyTracer() *tracer {
	return &tracer{said: make(chan string, 64), calls: map[string]int{}, last: map[string]call{}, most: map[string]int{}, stopped: make(chan struct{}), killed: make(chan struct{})}
}

// TestTraceIsRead: calls are counted for each thread when they begin, and the pair is the one at which a thread stands.
func TestTraceIsRead(t *testing.T) {
	tr := emptyTracer()
	tr.read(strings.NewReader(`/usr/bin/strace: Process 7 attached with 2 threads
[pid     7] 1796040010.000001 write(0x5, 0xc0, 0x8) = 0x8
[pid     8] 1796040010.000002 write(0x5, 0xc0, 0x8 <unfinished ...>
[pid     7] 1796040010.000003 read(0x4, 0xc0, 0x8) = 0x1
[pid     8] 1796040010.000004 <... write resumed>) = 0x8
[pid     8] 1796040010.000005 write(0x5, 0xc0, 0x8) = ?
[pid     8] 1796040010.000006 +++ killed by SIGKILL +++
1796040010.000007 +++ killed by SIGKILL +++
`))
	if n := tr.syscalls(); n["write"] != 2 || n["read"] != 1 || len(n) != 2 {
		t.Errorf("%v", n)
	}
	if at, ok := tr.struck("write", 2); !ok || at != 1796040010000005000 {
		t.Errorf("%d %v", at, ok)
	}
	for _, wrong := range []call{{name: "write", nth: 1}, {name: "read", nth: 2}} { // write 1 was the last of no thread
		if _, ok := tr.struck(wrong.name, wrong.nth); ok {
			t.Errorf("%v was not the last call of a thread", wrong)
		}
	}
	if !isClosed(tr.killed) || isClosed(tr.stopped) {
		t.Error("killed, and not stopped")
	}
	tr = emptyTracer()
	tr.read(strings.NewReader("[pid 7] 1796040010.000001 read(0x5) = 0x8\n[pid 7] 1796040010.000002 --- stopped by SIGSTOP ---\n[pid 8] 1796040010.000002 --- stopped by SIGSTOP ---\n"))
	if isClosed(tr.killed) || !isClosed(tr.stopped) {
		t.Error("stopped, and not killed")
	}
}

// TestStrikes: the tracer kills, or stops, at the call that it was told, and a process from which it goes lives on.
func TestStrikes(t *testing.T) {
	available(t)
	for _, signal := range []string{"SIGKILL", "SIGSTOP", ""} {
		cmd := exec.Command("sh", "-c", "while :; do cd /; sleep 0.01; done")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		expressions := []string{"trace=chdir"}
		if signal != "" {
			expressions = append(expressions, "inject=chdir:signal="+signal+":when=3")
		}
		tr, err := attach(tracerProgram, cmd.Process.Pid, expressions...)
		if err != nil {
			t.Fatal(err)
		}
		struck := false
		for end := time.Now().Add(20 * time.Second); !struck && time.Now().Before(end); time.Sleep(time.Millisecond) {
			_, struck = tr.struck("chdir", 3)
			struck = struck && (signal == "" || isClosed(tr.killed) || isClosed(tr.stopped))
		}
		if signal == "SIGSTOP" {
			tr.leaveStopped(cmd.Process.Pid)
		} else {
			tr.detach()
		}
		state := stateOf(cmd.Process.Pid)
		for end := time.Now().Add(20 * time.Second); state == "R" && signal == "SIGSTOP" && time.Now().Before(end); time.Sleep(time.Millisecond) {
			state = stateOf(cmd.Process.Pid) // it is about to stop
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if !struck || isClosed(tr.killed) != (signal == "SIGKILL") || isClosed(tr.stopped) != (signal == "SIGSTOP") {
			t.Errorf("%q: struck %v, killed %v, stopped %v", signal, struck, isClosed(tr.killed), isClosed(tr.stopped))
		}
		if want := map[string]string{"SIGKILL": "Z", "SIGSTOP": "T", "": "SRD"}[signal]; !strings.Contains(want, state) {
			t.Errorf("%q: the process is %q, want one of %q", signal, state, want)
		}
	}
}
