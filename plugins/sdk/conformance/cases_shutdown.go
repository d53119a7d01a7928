package conformance

import (
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

func init() {
	register(
		Case{
			ID: "shutdown/clean", Rule: "R6", Profile: Process, Needs: []string{NeedProcess}, Fresh: true, Timeout: procTimeout,
			Title: "a plugin that is shut down exits with status 0 and leaves no socket",
			Script: `
> ops
< Done
> Drain
< Drained
> Shutdown
= exit status 0 within the grace of 2 s; no socket in its runtime directory`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 8, PageBytes: 4096})
				p.Submit(Submit{Src: Pages(0, 8), Dst: Pages(0, 8)}).Done()
				p.Remove()
				for _, n := range []*Node{t.A(), t.B()} {
					shutdownClean(t, n)
					left := n.Process().Leftovers()
					t.Check(len(left) == 0, "R12", "no socket in the runtime directory, nothing in $TMPDIR and /dev/shm once the plugin has exited", "%v", left)
				}
			},
		},
		Case{
			ID: "shutdown/with-open-ops", Rule: "R6", Profile: Process, Needs: []string{NeedProcess}, Fresh: true, Timeout: procTimeout,
			Title: "a drain ends what is open, or says how much is left, and the plugin exits in good order",
			Script: `
> eight ops of 4 MiB
> Drain with a deadline of 1 s
< Drained(open_ops), which counts every op that is not over by then
> Submit
< Accepted, Skipped(CAUSE_SHUTDOWN)
> Shutdown
= exit status 0`,
			Run: func(t *T) {
				p := procPath(t)
				ops := p.submitAll()
				left := t.A().Drain(time.Second)
				shutdownAccount(t, left)
				end := p.Submit(Submit{Src: Pages(0, 1), Dst: Pages(0, 1), Loose: true}).Quiet()
				t.Check(end.Kind == "skipped" && end.Cause == contract.Cause_CAUSE_SHUTDOWN, "R1", "Skipped(CAUSE_SHUTDOWN) of a Submit after Drain", "%s", end)
				shutdownClean(t, t.A())
				procLetGo(t, p.Path, ops)
			},
		},
		Case{
			ID: "shutdown/slow-drain", Rule: "R5", Profile: Process, Needs: []string{NeedProcess}, Fresh: true, Timeout: procTimeout,
			Title: "a drain that cannot finish is answered at its deadline, with what is left",
			Script: `
> SIGSTOP to the receiver
> eight ops of 4 MiB
> Drain with a deadline of 300 ms
< Drained(open_ops), which counts every op that is not over by then
> SIGCONT
< an end of every op, quiet
> Shutdown
= exit status 0`,
			Run: func(t *T) {
				p := procPath(t)
				p.Submit(Submit{Src: Pages(0, 1), Dst: Pages(0, 1)}).Done() // connected
				procDo(t, "stop the receiver", t.B().Process().Stop())
				defer func() { _ = t.B().Process().Continue() }()
				ops := p.submitAll()
				shutdownAccount(t, t.A().Drain(300*time.Millisecond))
				procDo(t, "continue the receiver", t.B().Process().Continue())
				for _, o := range ops {
					o.Quiet()
				}
				shutdownClean(t, t.A())
				procLetGo(t, p.Path, nil)
			},
		},
		Case{
			ID: "shutdown/sigterm", Rule: "R6", Profile: Process, Needs: []string{NeedProcess}, Fresh: true, Timeout: procTimeout,
			Title: "SIGTERM means the same as the end of the Session",
			Script: `
> eight ops of 4 MiB
> SIGTERM
= the writer exits by itself, with status 0
= after PeerRemoved at the receiver no byte of it lands`,
			Run: func(t *T) {
				p := procPath(t)
				ops := p.submitAll()
				ops[0].Moving()
				t.A().MayDie()
				procDo(t, "SIGTERM", t.A().Process().Signal(unix.SIGTERM))
				exit := procExits(t, t.A(), "it gets SIGTERM")
				t.Check(exit == "exit status 0", "R6", "an exit in good order, with status 0", "%s", exit)
				procLetGo(t, p.Path, ops)
			},
		},
		Case{
			ID: "shutdown/sigint-ignored", Rule: "R12", Profile: Process, Needs: []string{NeedProcess}, Fresh: true, Timeout: procTimeout,
			Title: "SIGINT is ignored: a ^C at the engine's terminal reaches the whole process group",
			Script: `
> eight ops of 4 MiB
> SIGINT to both plugins
< Done of all ops
< Stats`,
			Run: func(t *T) {
				p := procPath(t)
				ops := p.submitAll()
				for _, n := range []*Node{t.A(), t.B()} {
					procDo(t, "SIGINT", n.Process().Signal(unix.SIGINT))
				}
				for _, o := range ops {
					o.Done()
				}
				for _, n := range []*Node{t.A(), t.B()} {
					n.Stats()
				}
				p.Submit(Submit{Src: Pages(0, 4), Dst: Pages(4, 4)}).Done()
			},
		},
		Case{
			ID: "leftover/nothing-after-close", Rule: "R12", Profile: Process, Needs: []string{NeedProcess}, Fresh: true, Timeout: procTimeout,
			Title: "nothing is left of two plugins that were shut down after work",
			Script: `
> ops, good and bad, aborts
> Drain, Shutdown of both
= no process of their groups, no socket, no mapping, no lease`,
			Run: func(t *T) {
				stdioLoad(t)
				for _, n := range []*Node{t.A(), t.B()} {
					procClose(t, n)
					t.Check(!n.Process().Orphans(), "R12", "a plugin that is shut down to take its children along", "processes that it started lived on")
				}
				leftoverNone(t)
			},
		},
		Case{
			ID: "leftover/nothing-after-kill", Rule: "R6", Profile: Process, Needs: []string{NeedProcess}, Fresh: true, Timeout: procTimeout,
			Title: "nothing is left of two plugins that were killed at work",
			Script: `
> eight ops of 4 MiB
> SIGKILL to both
= no process of their groups, no socket, no mapping, no lease; a canary over the pages stays`,
			Run: func(t *T) {
				p := procPath(t)
				ops := p.submitAll()
				ops[0].Moving()
				for _, n := range []*Node{t.A(), t.B()} {
					n.MayDie()
					procDo(t, "kill", n.Process().Kill())
				}
				for _, n := range []*Node{t.A(), t.B()} {
					n.UntilReaped(procGone)
				}
				procOver(p.Path, ops)
				leftoverNone(t)
			},
		},
	)
}

// shutdownClean ends the node's plugin as a host does; it must exit by itself with status 0.
func shutdownClean(t *T, n *Node) {
	procClose(t, n)
	exit := n.Process().Exit()
	if exit == "" {
		exit = "it was still there after the grace and had to be killed"
	}
	t.Check(exit == "exit status 0", "R6", "an exit with status 0 after Shutdown, within the grace of 2 s", "%s", exit)
}

// shutdownAccount compares what Drained says with what the suite knows: events come in order, so an op whose end
// or Quiesced is still missing was open when Drained was sent.
func shutdownAccount(t *T, left uint32) {
	open := t.A().openOps()
	t.Check(uint32(len(open)) <= left, "R5", "Drained.open_ops to count every op that is not over", "%d, and %d ops are not over", left, len(open))
}

// leftoverNone looks for processes and sockets of the pair; mappings and leases are looked for after every case.
func leftoverNone(t *T) {
	for _, n := range []*Node{t.A(), t.B()} {
		pid, dir := n.Process().PID(), n.Process().RuntimeDir()
		t.eventually("R12", "no process of the plugin's group once it is gone", func() string {
			if pids := group(pid); len(pids) > 0 {
				return "processes of " + n.Name + " live on: " + procNames(pids)
			}
			return ""
		})
		t.eventually("R12", "no listening socket of the plugin once it is gone", func() string {
			sockets, err := os.ReadFile("/proc/net/unix")
			if err == nil && strings.Contains(string(sockets), dir+"/") {
				return "a socket under " + dir
			}
			return ""
		})
	}
}
