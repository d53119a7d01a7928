package conformance

import (
	"fmt"
	"strings"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

func init() {
	register(
		Case{
			ID: "lease/host-gone-idle", Rule: "R6", Profile: Process, Needs: []string{NeedProcess}, Fresh: true, Timeout: procTimeout,
			Title: "a plugin whose host dies exits at once, with nothing to do",
			Script: `
> regions, pools, peer, plan
> EOF on the control socketpair of the writer, and nothing else
= it exits by itself, and its children with it; nobody maps the memory or holds its lease`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 8, PageBytes: 4096})
				p.Submit(Submit{Src: Pages(0, 8), Dst: Pages(0, 8)}).Done()
				leaseHangUp(t, t.A())
				procLetGo(t, p, nil)
			},
		},
		Case{
			ID: "lease/host-gone-busy", Rule: "R6", Profile: Process, Needs: []string{NeedProcess}, Fresh: true, Timeout: procTimeout,
			Title: "a writer whose host dies exits at once, in the middle of its ops",
			Script: `
> eight ops of 4 MiB
> EOF on the control socketpair of the writer
= it exits by itself
> Revoke, PeerRemove at the receiver
= a canary over the pages stays`,
			Run: func(t *T) {
				p := procPath(t)
				ops := p.submitAll()
				ops[0].Moving()
				leaseHangUp(t, t.A())
				procLetGo(t, p.Path, ops)
				procWorks(t, t.Launch(t.A().ID.Node, t.A().ID.Incarnation, t.A().ID.Epoch+1), t.B())
			},
		},
		Case{
			ID: "lease/host-gone-receiver", Rule: "R6", Profile: Process, Needs: []string{NeedProcess}, Fresh: true, Timeout: procTimeout,
			Title: "a receiver whose host dies exits at once, while others write to it",
			Script: `
> eight ops of 4 MiB
> EOF on the control socketpair of the receiver
= it exits by itself
> PeerRemove at the writer
< the ends that were missing, PeerRemoved`,
			Run: func(t *T) {
				p := procPath(t)
				ops := p.submitAll()
				ops[0].Moving()
				leaseHangUp(t, t.B())
				p.From.removePeer(p.Handle)
				p.closed = true
				for _, o := range ops {
					procEnded(t, o, "done", "failed")
				}
			},
		},
		Case{
			ID: "lease/host-gone-registering", Rule: "R6", Profile: Process, Needs: []string{NeedProcess}, Fresh: true, Timeout: procTimeout,
			Title: "a plugin whose host dies exits at once, while it registers memory",
			Script: `
> RegionAdd of 64 MiB
> EOF on the control socketpair, without waiting for the answer
= it exits by itself; nobody maps the memory or holds its lease`,
			Run: func(t *T) {
				r := t.A().NewMemory(64 << 20)
				t.A().MayDie()
				t.A().sendRegion(r, nil)
				defer copy(r.Bytes[r.Size-8:], r.shadow[r.Size-8:]) // answered or not
				leaseHangUp(t, t.A())
			},
		},
		Case{
			ID: "beat/every-second", Rule: "R12", Profile: Process, Timeout: procTimeout,
			Title: "beats come on Control, with nothing to do and under load",
			Script: `
< two beats within 10 s each
> ops all the time
< one more; seq has grown`,
			Run: beatEverySecond,
		},
		Case{
			ID: "beat/goes-with-dispatch", Rule: "R12", Profile: Process,
			Title:    "a plugin that beats also answers: its beats come from the thread that dispatches",
			Incident: "lightllm#1474: the status thread died, the process lived, and nothing noticed",
			Script: `
> twenty times: ops, a Submit that must be refused, an abort of nothing, Stats
< each time the Stats
= silence while beats go on, and nothing is declared busy, is a beat that proves nothing`,
			Run: beatGoesWithDispatch,
		},
		Case{
			ID: "beat/during-big-registration", Rule: "R12", Profile: Process, Timeout: procTimeout,
			Title: "registering much memory is declared busy, or does not hold up the beats",
			Script: `
> RegionAdd of 128 MiB
= until the answer no 10 s pass without a beat, unless the last one said busy
< RegionReady`,
			Run: beatBigRegistration,
		},
		Case{
			ID: "stdio/stdout-is-the-handshakes", Rule: "R12", Profile: Process, Needs: []string{NeedProcess}, Fresh: true, Timeout: procTimeout,
			Title: "standard output carries the handshake's line and nothing else",
			Script: `
> ops, good and bad; the end
= one line on standard output`,
			Run: func(t *T) {
				stdioLoad(t)
				procClose(t, t.A())
				out := strings.TrimRight(t.A().Process().Stdout(), "\n")
				t.Check(!strings.Contains(out, "\n") && !strings.HasPrefix(out, "…"), "R12", "one line on standard output, go-plugin's", "%d bytes, which end with %q",
					len(out), out[max(0, len(out)-200):])
			},
		},
		Case{
			ID: "stdio/no-flood", Rule: "R12", Profile: Process, Needs: []string{NeedProcess}, Fresh: true, Timeout: procTimeout,
			Title: "what a plugin says on standard error is bounded, whatever its ops do",
			Script: `
> ops, good and bad; the end
= at most 64 KiB on standard error`,
			Run: func(t *T) {
				stdioLoad(t)
				procClose(t, t.A())
				n := t.A().Process().Written()
				t.Check(n <= stdioMost, "R12", fmt.Sprintf("at most %d bytes on standard error in a run of 100 ops", stdioMost), "%d", n)
			},
		},
	)
}

// leaseHangUp is the death of the node's host, for the plugin, which must exit.
func leaseHangUp(t *T, n *Node) {
	n.MayDie()
	procDo(t, "hang up the control socket", n.Process().HangUp())
	procExits(t, n, "its host dies")
	t.Check(!n.Process().Orphans(), "R6", "the plugin to take its children along when its host dies", "processes that it started lived on")
}

// procClose ends the node's plugin in good order.
func procClose(t *T, n *Node) {
	n.MayDie()
	err := n.close(t.scaled(15 * time.Second))
	t.Check(err == nil, "R6", "the plugin to end", "%v", err)
}

func beatEverySecond(t *T) {
	n := t.A()
	procBeats(n, 1)
	_, before := n.Beats()
	procBeats(n, 1)
	p := t.Path(Shape{Pages: 8, PageBytes: 4096})
	from, _ := n.Beats()
	// Under load the ops are what passes the time.
	for deadline := time.Now().Add(t.scaled(beatLimit)); ; {
		p.Submit(Submit{Src: Pages(0, 8), Dst: Pages(0, 8)}).Done()
		now, last := n.Beats()
		if now > from {
			t.Check(last.Seq > before.Seq, "R12", "Beat.seq to grow", "%d after %d", last.Seq, before.Seq)
			return
		}
		t.Check(time.Now().Before(deadline), "R12", fmt.Sprintf("a beat within %v under load", t.scaled(beatLimit)), "none")
	}
}

// beatLimit is how long a host waits for a beat (docs/contract.md, "Liveness and accounting").
const beatLimit = 10 * time.Second

func beatGoesWithDispatch(t *T) {
	n := t.A()
	p := t.Path(Shape{Pages: 16, PageBytes: 64 << 10})
	for i := range uint32(20) {
		var load []Submit
		for j := range uint32(16) {
			load = append(load, Submit{Src: Pages(j, 1), Dst: Pages((i+j)%16, 1), Loose: true})
		}
		p.SubmitAll(load)
		n.SubmitRaw(&contract.Submit{
			Generation: p.Generation, Direction: contract.Direction_DIRECTION_WRITE, Peer: p.Handle, Plan: 1 << 50,
			Source: Runs(Pages(0, 1)...), Destination: Runs(Pages(0, 1)...), LayerTo: 1, Bytes: 1,
		})
		n.SendControl(&contract.HostEvent{Event: &contract.HostEvent_Abort{Abort: &contract.AbortOp{Op: 1<<40 + uint64(i)}}})
		beatProves(t, n)
	}
}

// beatProves asks for Stats and looks at the beats while they do not come.
func beatProves(t *T, n *Node) {
	id := n.NewID()
	from, _ := n.Beats()
	n.Send(&contract.HostEvent{Event: &contract.HostEvent_Stats{Stats: &contract.StatsRequest{Id: id}}})
	got := n.waitFor(t.Bound(), func() bool {
		for _, e := range n.events {
			if s := e.GetStats(); s != nil && s.Id == id {
				return true
			}
		}
		return false
	})
	if got == "" {
		return
	}
	now, last := n.Beats()
	switch {
	case now > from+1 && len(last.GetBusy()) == 0:
		t.Fail("R12", "no beats from a plugin whose dispatcher stands still", "%d beats, not busy, while Stats %d waited: %s", now-from, id, got)
	default:
		t.Fail("R12", fmt.Sprintf("Stats %d", id), "%s (and %d beats, busy %v)", got, now-from, last.GetBusy())
	}
}

func beatBigRegistration(t *T) {
	n := t.A()
	r := n.NewMemory(128 << 20)
	n.sendRegion(r, nil)
	began := time.Now()
	answered := func() bool {
		for _, e := range n.events {
			if e.GetRegionReady().GetRegion() == r.ID || e.GetRegionFailed().GetRegion() == r.ID {
				return true
			}
		}
		return false
	}
	for n.waitFor(250*time.Millisecond, answered) != "" {
		n.mu.Lock()
		last, busy := n.beatAt, len(n.beat.GetBusy()) > 0
		n.mu.Unlock()
		if last.Before(began) {
			last = began
		}
		silent, bound := time.Since(last), t.scaled(beatLimit)
		t.Check(silent < bound || busy, "R12", fmt.Sprintf("a beat every second, or one that said busy, while region %d is registered", r.ID), "neither for %v", silent.Round(time.Millisecond))
	}
	n.registered(r)
}

// stdioMost is generous: a plugin that writes a line for each op of the load stays below it.
const stdioMost = 64 << 10

// stdioLoad is what makes plugins talk: ops, refusals, aborts, a peer that goes with ops open.
func stdioLoad(t *T) {
	p := t.Path(Shape{Pages: 32, PageBytes: 64 << 10})
	for i := range uint32(50) {
		p.Submit(Submit{Src: Pages(i%32, 1), Dst: Pages(i%32, 1), Loose: true})
		o := p.Submit(Submit{Src: []sdk.Run{{Start: i % 32, Count: 1, Stride: 1}}, Dst: Pages(i%32, 1), Change: func(m *contract.Submit) { m.Bytes++ }})
		o.Abort()
	}
	for _, o := range t.A().openOps() {
		o.Quiet()
	}
	p.Submit(Submit{Src: Pages(0, 32), Dst: Pages(0, 32), Loose: true})
	p.Remove()
	t.A().Stats()
}
