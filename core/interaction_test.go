package core_test

import (
	"cmp"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/coretest"
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
)

// TestInteraction runs the golden files of testdata: two cores with a link, plugins and workers, driven
// one command at a time. A file can be read without Go; -rewrite renews the output after a change that
// you understand. The commands are those of the map handlers.
func TestInteraction(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		if !strings.HasSuffix(path, ".txt") || path == scenarioIndex || strings.HasPrefix(path, spans+"/") {
			return // fuzz corpora and failures of the random tests
		}
		var s script
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			out, err := s.run(d.Cmd, d.CmdArgs)
			if err != nil {
				t.Fatalf("%s: %v", d.Pos, err)
			}
			if out == "" {
				return "ok\n"
			}
			return out
		})
	})
}

// script runs commands against two engines, which it makes at the first command.
type script struct {
	env *coretest.Env
	out strings.Builder
}

// run carries out one command and returns what happened, in words.
func (s *script) run(cmd string, args []datadriven.CmdArg) (string, error) {
	c := &call{args: args}
	s.out.Reset()
	if s.env == nil {
		cfg := coretest.Config{Core: core.Config{Clocks: core.DefaultClocks(), Limits: core.DefaultLimits()}}
		first := cmd == "config"
		if first {
			configure(c, &cfg)
		}
		var err error
		if s.env, err = coretest.New(cfg, &s.out); err != nil {
			return "", err
		}
		s.out.Reset()
		if first {
			return "", c.err
		}
	}
	h, ok := handlers[cmd]
	if !ok {
		return "", fmt.Errorf("unknown command %q", cmd)
	}
	c.env, c.out = s.env, &s.out
	c.side = s.env.D
	if len(args) > 0 && args[0].Key == "P" {
		c.side = s.env.P
	}
	c.env.Now += c.duration("after") // with the command, in one batch
	h(c)
	if c.err == nil {
		c.err = s.env.Check()
	}
	return s.out.String(), c.err
}

// call is one command.
type call struct {
	env  *coretest.Env
	side *coretest.Engine
	args []datadriven.CmdArg
	out  *strings.Builder
	err  error
}

func (c *call) arg(key string) (string, bool) {
	for _, a := range c.args {
		if a.Key == key {
			return strings.Join(a.Vals, ","), true
		}
	}
	return "", false
}

func (c *call) has(key string) bool { _, ok := c.arg(key); return ok }

func (c *call) num(key string, def int64) int64 {
	v, ok := c.arg(key)
	if !ok {
		return def
	}
	if _, err := fmt.Sscan(v, &def); err != nil {
		c.err = fmt.Errorf("%s=%s: %w", key, v, err)
	}
	return def
}

func (c *call) duration(key string) time.Duration {
	v, ok := c.arg(key)
	if !ok {
		return 0
	}
	d, err := time.ParseDuration(v)
	if err != nil {
		c.err = err
	}
	return d
}

func (c *call) reason(key string) statemachine.Reason {
	v, ok := c.arg(key)
	if !ok {
		return statemachine.None
	}
	r, ok := statemachine.ParseReason(v)
	if !ok {
		c.err = fmt.Errorf("%s=%s is no reason", key, v)
	}
	return r
}

func (c *call) room() int64 { return c.num("room", 1) }
func (c *call) rank() int32 { return int32(c.num("rank", 0)) }

// parts are from=A pages=N, or ids=(a,b,c).
func (c *call) parts() []core.Part {
	if v, ok := c.arg("ids"); ok {
		var ids []int32
		for _, f := range strings.Split(v, ",") {
			var id int32
			if _, err := fmt.Sscan(f, &id); err != nil {
				c.err = fmt.Errorf("ids: %w", err)
			}
			ids = append(ids, id)
		}
		return coretest.Parts(ids)
	}
	parts := coretest.Pages(int32(c.num("from", 0)), int32(c.num("pages", 0)))
	if n := int32(c.num("state", 0)); n > 0 { // pages of the pool of state, from page 0 on
		p := coretest.Pages(int32(c.num("state-from", 0)), n)
		p[0].Ordinal = 1
		parts = append(parts, p...)
	}
	return parts
}

func (c *call) tick(silent bool) {
	for _, g := range c.env.Engines() {
		e := core.Event{Kind: core.PeerHeard, Peer: 0}
		if silent {
			e = core.Event{Kind: core.Tick}
		}
		c.env.Step(g, e)
	}
}

func (c *call) expect(ok bool, format string, args ...any) {
	if !ok {
		fmt.Fprintf(c.out, format+"\n", args...)
	}
}

// configure is the command config, which only the first line of a file may be.
func configure(c *call, cfg *coretest.Config) {
	l, k := &cfg.Core.Limits, &cfg.Core.Clocks
	l.Rooms = int32(c.num("rooms", int64(l.Rooms)))
	l.RoomBytes = c.num("room-bytes", l.RoomBytes)
	l.RoomPages = c.num("room-pages", l.RoomPages)
	l.SessionBytes = c.num("worker-bytes", l.SessionBytes)
	l.SessionPages = c.num("worker-pages", l.SessionPages)
	l.OpBytes = c.num("op-bytes", l.OpBytes)
	l.OpRuns = int32(c.num("op-runs", int64(l.OpRuns)))
	l.PeerOps = int32(c.num("peer-ops", int64(l.PeerOps)))
	l.PeerBytes = c.num("peer-bytes", l.PeerBytes)
	l.Tombstones = int32(c.num("tombstones", int64(l.Tombstones)))
	l.PeerMarks = int32(c.num("marks", int64(l.PeerMarks)))
	l.AdmitQueue = int32(c.num("admit-queue", int64(l.AdmitQueue)))
	l.RoomsPerSession = int32(c.num("rooms-per-worker", int64(l.RoomsPerSession)))
	if c.has("verdict") {
		k.Verdict = c.duration("verdict")
	}
	if c.has("retire") {
		k.Retire = c.duration("retire")
	}
	q := &cfg.Core.Quarantine
	q.Share, q.Age = int32(100*c.num("quarantine", 0)), c.duration("quarantine-age")
	cfg.Ranks = int32(c.num("ranks", 1))
	cfg.DRanks, cfg.State = int32(c.num("d-ranks", 0)), c.has("state")
	cfg.Pages = int32(c.num("pages", 64))
	cfg.PageBytes = c.num("page-bytes", 1024)
	cfg.Layers = int32(c.num("layers", 2))
	if c.has("heads") {
		cfg.Map, c.err = mapOf(c, cfg)
	}
	cfg.Plain, cfg.Manual, cfg.NoGroups = c.has("plain"), c.has("manual"), c.has("no-groups")
}

// mapOf is the map of groups of ranks and d-ranks: heads=N, tokens=A:B (default 16:16), mla.
func mapOf(c *call, cfg *coretest.Config) (layout.Map, error) {
	side := func(ranks int32) layout.Side {
		cache := layout.Cache{DType: "bf16", Layers: cfg.Layers, KVHeads: int32(c.num("heads", 1)), HeadDim: 8, PageTokens: 16, Kind: layout.MHA, Order: layout.NHD}
		if c.has("mla") {
			cache.Kind = layout.MLA
		}
		return layout.Side{Cache: cache, Ranks: ranks}
	}
	src, dst := side(cfg.Ranks), side(cmp.Or(cfg.DRanks, cfg.Ranks))
	if v, ok := c.arg("tokens"); ok {
		if _, err := fmt.Sscanf(v, "%d:%d", &src.PageTokens, &dst.PageTokens); err != nil {
			return layout.Map{}, fmt.Errorf("tokens=%s: %w", v, err)
		}
	}
	return layout.New(src, dst)
}

var ends = map[string]core.EndKind{"done": core.EndDone, "failed": core.EndFailed, "skipped": core.EndSkipped, "aborted": core.EndAborted}

// handlers are the commands. The first argument of most is the side, P or D; room=1, rank=0, op=1
// unless said; after=DUR lets time pass in the same batch.
var handlers = map[string]func(*call){
	// Workers.
	"open": func(c *call) {
		c.env.Open(c.side, c.rank(), core.Event{Room: c.room(), Att: uint64(c.num("att", 0)), Deadline: int64(c.duration("deadline")), PeerGroup: peerGroup(c)})
	},
	"register": func(c *call) {
		c.env.Request(c.side, c.rank(), core.Register, c.room(), func(e *core.Event) {
			e.Parts = c.parts()
			for i := range e.Parts {
				e.Parts[i].Prefix = int32(c.num("prefix", 0))
			}
		})
	},
	"send": func(c *call) {
		c.env.Request(c.env.P, c.rank(), core.Send, c.room(), func(e *core.Event) {
			e.Parts, e.Last = c.parts(), c.has("last")
			e.LayerFrom, e.LayerTo = int32(c.num("layer-from", 0)), int32(c.num("layer-to", 0))
			if aux, ok := c.arg("aux"); ok {
				e.Aux = []byte(cmp.Or(aux, "aux"))
			}
		})
	},
	"abort":       func(c *call) { c.request(core.Abort) },
	"release":     func(c *call) { c.request(core.Release) },
	"admin-abort": func(c *call) { c.env.Step(c.side, core.Event{Kind: core.AdminAbort, Room: c.room()}) },
	"worker-dies": func(c *call) { c.env.KillWorker(c.side, c.rank()) },
	"worker-starts": func(c *call) {
		if !c.side.Alive(c.rank()) {
			c.env.StartWorker(c.side, c.rank())
		}
	},

	// The link. deliver hands over the frames that the side sent; kind=K lets the first of that kind
	// overtake; lose drops them.
	"deliver": func(c *call) {
		for range c.num("n", 1) {
			c.expect(c.env.Deliver(c.side, c.kind()), "nothing to deliver")
		}
	},
	"lose": func(c *call) {
		c.expect(len(c.side.Out) > 0, "nothing to lose")
		c.side.Out = c.side.Out[min(1, len(c.side.Out)):]
	},
	"settle":     func(c *call) { c.env.Settle() },
	"disconnect": func(c *call) { c.env.Disconnect() },
	"connect":    func(c *call) { c.env.Connect() },
	"tamper":     tamper,
	"forge":      forge,
	"group": func(c *call) {
		c.env.Announce(c.side, c.reason("refused"), "layout.dtype: source has bf16, destination has fp8")
	},
	"peer-gone": func(c *call) {
		c.env.Step(c.side, core.Event{Kind: core.PeerGone, Peer: 0, Inc: c.env.Other(c.side).Inc})
	},
	"peer-draining": func(c *call) { c.env.Step(c.side, core.Event{Kind: core.PeerDraining, Peer: 0}) },

	// Plugins.
	"op-progress": func(c *call) {
		c.env.Step(c.side, core.Event{Kind: core.OpProgress, Op: c.op().Op, Bytes: c.num("bytes", 0)})
	},
	"op-end": func(c *call) {
		how, _ := c.arg("end")
		end, ok := ends[how]
		if !ok {
			c.err = fmt.Errorf("end=%s is no end of an op", how)
			return
		}
		c.expect(c.env.EndOp(c.side, int(c.num("op", 1)), end, !c.has("unquiet"), c.reason("cause")), "the op has ended")
	},
	"op-again": func(c *call) {
		c.env.Step(c.side, core.Event{Kind: core.OpEnd, Op: c.op().Op, End: core.EndDone, Quiet: true})
	},
	"op-quiesced": func(c *call) { c.expect(c.env.Quiesce(c.side, int(c.num("op", 1))), "the op does not linger") },
	"plugin-dies": func(c *call) {
		c.expect(c.env.KillEpoch(c.side, uint32(c.num("epoch", int64(c.side.Epoch)))), "that epoch is not up")
	},
	// The host ends the epoch that the core wants ended.
	"plugin-ends": func(c *call) {
		if len(c.side.Ending) == 0 {
			c.expect(false, "no epoch is to be ended")
			return
		}
		c.env.KillEpoch(c.side, c.side.Ending[0])
	},
	"plugin-kept": func(c *call) { c.expect(c.env.KeepPlugin(c.side), "no epoch is to be replaced") },
	"epochs": func(c *call) {
		names := []string{"", "serves", "retires", "ends", "lost"}
		for _, v := range c.side.M.Epochs() {
			fmt.Fprintf(c.out, "epoch %d %s, %d rooms, %d ops\n", v.Epoch, names[v.State], v.Rooms, v.Ops)
		}
	},
	"rungs": func(c *call) {
		st := c.side.M.Stats()
		for i, r := range st.Rungs {
			if r != (core.RungStats{}) {
				fmt.Fprintf(c.out, "rung %d: entered %d, left %d, %s\n", i, r.Entered, r.Left, r.Time)
			}
		}
		fmt.Fprintf(c.out, "replaces %d, retires %d, cut %d\n", st.Replaces, st.Retires, st.RetiresCut)
	},
	"plugin-fenced": func(c *call) {
		c.expect(c.env.FencePlugin(c.side), "no epoch has ended")
	},
	"plugin-starts": func(c *call) { c.env.StartPlugin(c.side) },
	"plugin-down":   func(c *call) { c.env.Step(c.side, core.Event{Kind: core.PluginDown, Backend: coretest.Backend}) },
	"granted":       func(c *call) { c.expect(c.env.AnswerGrant(c.side, !c.has("failed")), "no grant was asked") },
	"revoked":       func(c *call) { c.expect(c.env.AnswerRevoke(c.side, !c.has("unknown")), "no revoke was asked") },
	"fenced":        func(c *call) { c.expect(c.env.AnswerFence(c.side, !c.has("unknown")), "no fence was asked") },

	// Engines and time.
	"restart":   func(c *call) { c.err = c.env.Restart(c.side) },
	"drain":     func(c *call) { c.env.Step(c.side, core.Event{Kind: core.DrainBegin}) },
	"drain-end": func(c *call) { c.env.Step(c.side, core.Event{Kind: core.DrainEnd}) },
	"wait": func(c *call) {
		d, err := time.ParseDuration(c.args[0].Key)
		if err != nil {
			c.err = err
			return
		}
		c.env.Now += d
		c.tick(c.has("silent"))
	},

	// Questions.
	"why": func(c *call) {
		for _, v := range c.side.M.Room(c.room()) {
			fmt.Fprintln(c.out, v.Why())
		}
	},
	"counts": func(c *call) { fmt.Fprintf(c.out, "%s\n%s\n", c.env.P.Held(), c.env.D.Held()) },
	"stats": func(c *call) {
		st, refused := c.side.M.Stats(), uint64(0)
		for _, n := range st.Refused {
			refused += n
		}
		fmt.Fprintf(c.out, "dropped %d, refused %d, ops %d, bytes %d\n", st.Dropped, refused, st.Ops, st.Bytes)
	},
}

func peerGroup(c *call) string {
	v, _ := c.arg("peer-group")
	return v
}

func (c *call) request(kind core.EventKind) {
	c.env.Request(c.side, c.rank(), kind, c.room(), func(e *core.Event) {
		if n := c.num("slot", -1); n >= 0 { // an older open of the room
			e.Slot = int32(n)
		}
	})
}

func (c *call) op() *coretest.Op {
	n := int(c.num("op", 1))
	if n < 1 || n > len(c.side.Ops) {
		c.err = fmt.Errorf("op %d: the plugin was given %d", n, len(c.side.Ops))
		return &coretest.Op{}
	}
	return c.side.Ops[n-1]
}

func (c *call) kind() core.FrameKind {
	v, ok := c.arg("kind")
	if !ok {
		return 0
	}
	for k := core.FrameQueued; k <= core.FrameDrained; k++ {
		if k.String() == v {
			return k
		}
	}
	c.err = fmt.Errorf("kind=%s is no frame", v)
	return 0
}

// tamper changes the first waiting RankEnd of a side: pages=N, or crc.
func tamper(c *call) {
	for i := range c.side.Out {
		f := &c.side.Out[i]
		if f.Kind != core.FrameRankEnd {
			continue
		}
		if c.has("crc") {
			f.CRC++
		}
		if c.has("pages") {
			f.Sent[0].Parts = []core.PartSent{{Pages: c.num("pages", 0)}}
		}
		return
	}
	c.err = fmt.Errorf("no RankEnd waits")
}

// forge gives a side a frame that its peer never sent: kind=K s=INC.SEQ d=INC.SEQ.
func forge(c *call) {
	opener := func(key string) (o statemachine.Opener) {
		if v, ok := c.arg(key); ok {
			if _, err := fmt.Sscanf(v, "%d.%d", &o.Inc, &o.Seq); err != nil {
				c.err = fmt.Errorf("%s=%s: %w", key, v, err)
			}
		}
		return o
	}
	f := core.Frame{Kind: c.kind(), Room: c.room(), S: opener("s"), D: opener("d"), Att: uint64(c.num("att", 0)), Outcome: core.Outcome(c.num("outcome", 0)), Reason: c.reason("reason")}
	c.env.Step(c.side, core.Event{Kind: core.PeerFrame, Peer: 0, Frame: f})
}
