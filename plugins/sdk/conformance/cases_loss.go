package conformance

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

func init() {
	register(
		Case{
			ID: "loss/sigkill-writer", Rule: "R6", Profile: Process, Needs: []string{NeedProcess}, Fresh: true, Timeout: procTimeout,
			Title: "no byte lands once a killed writer is gone and the receiver has let go of it",
			Script: `
> eight ops of 4 MiB
> SIGKILL to the writer in the middle
= its processes are gone, nobody maps the memory
> Revoke, PeerRemove at the receiver
< Revoked, PeerRemoved
= a canary over the pages stays while another writer goes on`,
			Run: lossSigkillWriter,
		},
		Case{
			ID: "loss/sigkill-receiver", Rule: "R6", Profile: Process, Needs: []string{NeedProcess}, Fresh: true, Timeout: procTimeout,
			Title: "ops towards a receiver that was killed end, and become quiet",
			Script: `
> eight ops of 4 MiB
> SIGKILL to the receiver in the middle
> PeerRemove
< the ends that were missing: Done or Failed; then PeerRemoved
< Quiesced of those that said quiet=false
> an op to another receiver
< Done`,
			Run: lossSigkillReceiver,
		},
		Case{
			ID: "loss/stream-eof", Rule: "R6", Profile: Process, Needs: []string{NeedProcess}, Fresh: true, Timeout: procTimeout,
			Title: "a plugin whose host ends the Session exits by itself, in good order",
			Script: `
> eight ops of 4 MiB
> end of the Session stream
= the writer exits by itself, with status 0
= after PeerRemoved at the receiver no byte of it lands`,
			Run: lossStreamEOF,
		},
		Case{
			ID: "loss/frozen-receiver", Rule: "R9", Profile: Process, Needs: []string{NeedProcess}, Fresh: true, Timeout: procTimeout,
			Title: "a receiver that stands still holds up its own ops and nothing else",
			Script: `
> SIGSTOP to the receiver
> eight ops towards it, AbortOp of one
< beats of the writer go on, Stats are answered, the aborted op ends
> SIGCONT
< an end of every op, quiet
> an op by a new peer handle
< Done`,
			Run: lossFrozenReceiver,
		},
		Case{
			ID: "loss/frozen-writer", Rule: "R12", Profile: Process, Needs: []string{NeedProcess}, Fresh: true, Timeout: procTimeout,
			Title: "a writer that stands still for a while loses nothing",
			Script: `
> eight ops of 4 MiB
> SIGSTOP to the writer in the middle
< beats of the receiver go on, Stats are answered
> SIGCONT
< an end of every op, quiet
> an op by a new peer handle
< Done`,
			Run: lossFrozenWriter,
		},
		Case{
			ID: "loss/new-epoch-beside", Rule: "R3", Profile: Process, Needs: []string{NeedProcess}, Fresh: true, Timeout: procTimeout,
			Title: "two epochs of one engine are two writers: what ends one does not touch the other",
			Script: `
> a second writer with the node and incarnation of the first, and the next epoch
> ops of both
< Done, Done
> FencePeer of the first (if fence_peer)
< Fenced(QUIET or UNKNOWN); after QUIET no op of it is Done, and no byte of one lands
> SIGKILL to the first
> an op of the second
< Done`,
			Run: lossNewEpochBeside,
		},
		Case{
			ID: "loss/peer-reborn", Rule: "R3", Profile: Process, Needs: []string{NeedProcess}, Fresh: true, Timeout: procTimeout,
			Title: "a receiver that comes back as another incarnation is another peer",
			Script: `
> SIGKILL to the receiver; a new one with the same node and the next incarnation
> an op to the new one
< Done
> an op by the old handle, then PeerRemove of it
< Accepted, an end, PeerRemoved
> an op to the new one
< Done`,
			Run: lossPeerReborn,
		},
	)
}

// procTimeout is for cases that start, freeze or end processes.
const procTimeout = time.Minute

// procGone is how long processes may take to be gone after what ends them.
const procGone = lingerBound + 10*time.Second

// procPath has room for eight ops of 4 MiB, or what the plugin's limits leave of them.
func procPath(t *T) *load { return newLoad(t, t.A(), t.B(), 8, 4<<20) }

// procDo takes the error of something that the suite does to a process.
func procDo(t *T, what string, err error) {
	if err != nil {
		t.broke("%s: %v", what, err)
	}
}

// procKill kills the plugin and waits until every process of it is gone.
func procKill(t *T, n *Node) {
	n.MayDie()
	procDo(t, "kill the plugin of "+n.Name, n.Process().Kill())
	n.UntilReaped(procGone)
}

// procExits waits for the plugin's end and returns how it exited, by itself.
func procExits(t *T, n *Node, when string) string {
	n.UntilLost(procGone, "R6", "the plugin to exit when "+when+",")
	n.UntilReaped(procGone)
	exit := n.Process().Exit()
	t.Check(exit != "", "R6", "the plugin to exit by itself when "+when, "it was still there after %v and had to be killed", lingerBound)
	return exit
}

// procBeats waits for a number of further beats.
func procBeats(n *Node, more int) {
	from, _ := n.Beats()
	n.wait(10*time.Second, "R12", "further beats of "+n.Name, func() bool { return n.beats >= from+more })
}

// procLetGo makes the receiver let go of a writer whose processes are gone: after it no byte of the writer's
// ops can land, so a canary is put over their pages, which the checks of every case look at. A receiver that
// cannot know (Revoked says quiet=false) is taken at its word, and the pages are left alone.
func procLetGo(t *T, p *Path, ops []*Op) {
	quiet := true
	for _, g := range p.Grants() {
		quiet = p.Revoke(g) && quiet
	}
	p.To.removePeer(p.Writer)
	p.closed = true
	if !quiet {
		t.Notef("the receiver cannot tell when a dead writer's bytes have landed (Revoked(quiet=false))")
		return
	}
	procOver(p, ops)
}

// procOver puts a canary over the pages of ops that nobody is left to carry on with.
func procOver(p *Path, ops []*Op) {
	p.From.mu.Lock()
	defer p.From.mu.Unlock()
	for _, o := range ops {
		if !o.state.quiet {
			p.quiet(o)
		}
	}
}

// procNames names processes for people.
func procNames(pids []int) string {
	var names []string
	for _, pid := range pids {
		comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
		names = append(names, fmt.Sprintf("%d (%s)", pid, strings.TrimSpace(string(comm))))
	}
	return list(names)
}

// procWorks moves a few pages on a path of its own.
func procWorks(t *T, from, to *Node) {
	p := t.PathBetween(from, to, Shape{Pages: 8, PageBytes: 64 << 10})
	for i := range uint32(8) {
		p.Submit(Submit{Src: Pages(i, 1), Dst: Pages(7-i, 1)}).Done()
	}
}

// procEnded fails the case unless the op ends in one of the ways, and is quiet.
func procEnded(t *T, o *Op, kinds ...string) {
	end := o.Quiet()
	t.Check(slices.Contains(kinds, end.Kind), "R1", "an end that something caused: "+list(kinds), "op %d: %s", o.ID, end)
}

func lossSigkillWriter(t *T) {
	p := procPath(t)
	ops := p.submitAll()
	ops[0].Moving()
	procKill(t, t.A())
	procLetGo(t, p.Path, ops)
	next := t.Launch(t.A().ID.Node, t.A().ID.Incarnation, t.A().ID.Epoch+1)
	procWorks(t, next, t.B())
}

func lossSigkillReceiver(t *T) {
	p := procPath(t)
	ops := p.submitAll()
	ops[0].Moving()
	procKill(t, t.B())
	p.From.removePeer(p.Handle)
	p.closed = true
	for _, o := range ops {
		t.Check(o.Ended(), "R6", "PeerRemoved after the ends of all ops towards the peer", "op %d has none", o.ID)
	}
	for _, o := range ops {
		procEnded(t, o, "done", "failed")
	}
	procWorks(t, t.A(), t.Launch(t.run.newNode(), t.B().ID.Incarnation+100, 1))
}

func lossStreamEOF(t *T) {
	p := procPath(t)
	ops := p.submitAll()
	ops[0].Moving()
	t.A().MayDie()
	procDo(t, "end the Session", t.A().Process().EndSession())
	exit := procExits(t, t.A(), "its host ends the Session")
	t.Check(exit == "exit status 0", "R6", "an exit in good order, with status 0", "%s", exit)
	procLetGo(t, p.Path, ops)
	procWorks(t, t.Launch(t.A().ID.Node, t.A().ID.Incarnation, t.A().ID.Epoch+1), t.B())
}

func lossFrozenReceiver(t *T) {
	p := procPath(t)
	p.Submit(Submit{Src: Pages(0, 1), Dst: Pages(0, 1)}).Done() // connected
	procDo(t, "stop the receiver", t.B().Process().Stop())
	defer func() { _ = t.B().Process().Continue() }()
	ops := p.submitAll()
	aborted := ops[len(ops)/2]
	aborted.Abort()
	procBeats(t.A(), 1)
	t.A().Stats()
	aborted.End()
	t.A().Stats()
	procDo(t, "continue the receiver", t.B().Process().Continue())
	for _, o := range ops {
		if o == aborted {
			procEnded(t, o, "done", "failed", "aborted")
		} else {
			procEnded(t, o, "done", "failed")
		}
	}
	p.Remove()
	procWorks(t, t.A(), t.B())
}

func lossFrozenWriter(t *T) {
	p := procPath(t)
	ops := p.submitAll()
	ops[0].Moving()
	procDo(t, "stop the writer", t.A().Process().Stop())
	defer func() { _ = t.A().Process().Continue() }()
	procBeats(t.B(), 1)
	t.B().Stats()
	procDo(t, "continue the writer", t.A().Process().Continue())
	for _, o := range ops {
		procEnded(t, o, "done", "failed")
	}
	p.Remove()
	procWorks(t, t.A(), t.B())
}

func lossNewEpochBeside(t *T) {
	first := t.A()
	second := t.Launch(first.ID.Node, first.ID.Incarnation, first.ID.Epoch+1)
	shape := Shape{Pages: 8, PageBytes: 64 << 10}
	old, next := t.PathBetween(first, t.B(), shape), t.PathBetween(second, t.B(), shape)
	a, b := old.Submit(Submit{Src: Pages(0, 4), Dst: Pages(0, 4)}), next.Submit(Submit{Src: Pages(0, 4), Dst: Pages(4, 4)})
	a.Done()
	b.Done()
	fence := func() contract.FenceResult { return t.B().Fence(first.ID.Node, first.ID.Incarnation, first.ID.Epoch) }
	if t.Has(sdk.FeatureFencePeer) && fence() == contract.FenceResult_FENCE_RESULT_QUIET {
		before := bytes.Clone(old.DstMem.Bytes)
		o := old.Submit(Submit{Src: Pages(0, 4), Dst: Pages(4, 4), Keep: true}).Accepted()
		old.Remove() // it may try for long, and learn at the receiver alone that nothing has landed
		end := o.Quiet()
		t.Check(end.Kind != "done", "R4", "no op of a writer to be done after Fenced(QUIET) of it", "%s", end)
		t.Check(bytes.Equal(before, old.DstMem.Bytes), "R4", "no byte of a writer to land after Fenced(QUIET) of it", "other bytes in its pages")
	}
	next.Submit(Submit{Src: Pages(2, 4), Dst: Pages(0, 4)}).Done()
	procKill(t, first)
	procLetGo(t, old, nil)
	if t.Has(sdk.FeatureFencePeer) {
		fence()
	}
	next.Submit(Submit{Src: Pages(4, 4), Dst: Pages(4, 4)}).Done()
}

func lossPeerReborn(t *T) {
	old := t.Path(Shape{Pages: 8, PageBytes: 64 << 10})
	old.Submit(Submit{Src: Pages(0, 4), Dst: Pages(0, 4)}).Done()
	procKill(t, t.B())
	reborn := t.Launch(t.B().ID.Node, t.B().ID.Incarnation+1, 1)
	p := t.PathBetween(t.A(), reborn, Shape{Pages: 8, PageBytes: 64 << 10})
	p.Submit(Submit{Src: Pages(0, 4), Dst: Pages(4, 4)}).Done()
	o := old.Submit(Submit{Src: Pages(4, 4), Dst: Pages(4, 4)})
	t.A().removePeer(old.Handle)
	old.closed = true
	t.Check(o.Ended(), "R6", "PeerRemoved after the ends of all ops towards the peer", "op %d has none", o.ID)
	procEnded(t, o, "done", "failed")
	p.Submit(Submit{Src: Pages(4, 4), Dst: Pages(0, 4)}).Done()
}
