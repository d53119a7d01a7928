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

const spans = "testdata/spans"

// TestSpans runs the golden files of groups whose ranks sit on several engines. The first command, span, says
// which engine hosts which ranks.
func TestSpans(t *testing.T) {
	datadriven.Walk(t, spans, func(t *testing.T, path string) {
		var s spanScript
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			s.out.Reset()
			if err := s.run(d.Cmd, d.CmdArgs); err != nil {
				t.Fatalf("%s: %v\n%s", d.Pos, err, &s.out)
			}
			return cmp.Or(s.out.String(), "ok\n")
		})
	})
}

type spanScript struct {
	*coretest.Span
	out  strings.Builder
	args []datadriven.CmdArg
}

func (s *spanScript) arg(key string) string {
	for _, a := range s.args {
		if a.Key == key {
			return cmp.Or(strings.Join(a.Vals, ","), "yes")
		}
	}
	return ""
}

func (s *spanScript) num(key string, def int) int {
	if v := s.arg(key); v != "" {
		fmt.Sscan(v, &def)
	}
	return def
}

// engines are those that a command names first.
func (s *spanScript) engines() (out []*coretest.Member) {
	for _, a := range s.args {
		if g := s.Engine(a.Key); g != nil && len(a.Vals) == 0 {
			out = append(out, g)
		}
	}
	return out
}

func (s *spanScript) run(cmd string, args []datadriven.CmdArg) error {
	s.args = args
	if cmd == "span" {
		return s.span()
	}
	g := s.engines()
	need := map[string]int{"settle": 0, "wait": 0, "deliver": 2, "disconnect": 2, "connect": 2, "lose": 2}
	n, ok := need[cmd]
	if !ok {
		n = 1
	}
	if len(g) < n {
		return fmt.Errorf("%s needs %d engines", cmd, n)
	}
	switch cmd {
	case "open":
		for _, e := range g {
			s.Open(e, uint64(s.num("att", 1)))
		}
	case "register":
		for _, r := range g[0].Ranks {
			s.Request(g[0], r, core.Event{Kind: core.Register, Parts: coretest.Pages(int32(s.num("from", 0)), int32(s.num("pages", 0)))})
		}
	case "send":
		for _, r := range g[0].Ranks {
			e := core.Event{Kind: core.Send, Parts: coretest.Pages(int32(s.num("from", 0)), int32(s.num("pages", 0))), Last: s.arg("last") != ""}
			if r == 0 && s.arg("aux") != "" {
				e.Aux = []byte("aux")
			}
			s.Request(g[0], r, e)
		}
	case "abort", "release":
		kind := core.Abort
		if cmd == "release" {
			kind = core.Release
		}
		for _, r := range g[0].Ranks {
			s.Request(g[0], r, core.Event{Kind: kind})
		}
	case "worker-dies":
		s.Step(g[0], core.Event{Kind: core.SessionDown, Session: core.SessionID(g[0].Ranks[0]) + 1})
	case "deliver":
		for range s.num("n", 1) {
			if !s.Deliver(g[0], g[1], frameKind(s.arg("kind"))) {
				fmt.Fprintln(&s.out, "nothing to deliver")
			}
		}
	case "settle":
		s.Settle()
	case "disconnect":
		s.Disconnect(g[0], g[1])
	case "connect":
		s.Connect(g[0], g[1])
	case "op-end":
		how := map[string]core.EndKind{"": core.EndDone, "skipped": core.EndSkipped, "aborted": core.EndAborted, "failed": core.EndFailed}
		if !s.EndOp(g[0], s.num("op", 1), how[s.arg("end")], s.arg("unquiet") == "") {
			fmt.Fprintln(&s.out, "no such op")
		}
	case "op-quiesced":
		s.Quiesce(g[0], s.num("op", 1))
	case "plugin-dies":
		s.KillPlugin(g[0])
	case "plugin-fenced":
		s.FencePlugin(g[0])
	case "fenced":
		if !s.AnswerFence(g[0], s.arg("unknown") == "") {
			fmt.Fprintln(&s.out, "no fence was asked")
		}
	case "restart":
		if err := s.Restart(g[0]); err != nil {
			return err
		}
	case "group-gone": // the first engine hears that the second hosts nothing any more
		s.Step(g[0], s.Gone(g[0], g[1]))
	case "wait":
		d, err := time.ParseDuration(args[0].Key)
		if err != nil {
			return err
		}
		s.Now += d
		for _, e := range s.Engines {
			in := []core.Event{{Kind: core.Tick}}
			for i, o := range s.Engines {
				if s.arg("silent") == "" && s.Linked(e, o) {
					in = append(in, core.Event{Kind: core.PeerHeard, Peer: core.PeerID(i)})
				}
			}
			s.Step(e, in...)
		}
	case "why":
		for _, v := range g[0].M.Room(1) {
			fmt.Fprintln(&s.out, v.Why())
		}
	case "counts":
		fmt.Fprintln(&s.out, g[0].Held())
	default:
		return fmt.Errorf("unknown command %q", cmd)
	}
	return s.Check()
}

func frameKind(name string) core.FrameKind {
	for k := core.FrameQueued; k <= core.FrameGroupAbort; k++ {
		if k.String() == name {
			return k
		}
	}
	return 0
}

// span makes the engines: P1=0 D1=0 D2=1, and heads=N for a map of unequal ranks.
func (s *spanScript) span() (err error) {
	var ranks [2][][]int32
	for i, letter := range []string{"P", "D"} {
		for n := 1; s.arg(fmt.Sprint(letter, n)) != ""; n++ {
			var list []int32
			for _, f := range strings.Split(s.arg(fmt.Sprint(letter, n)), ",") {
				var r int32
				if _, err := fmt.Sscan(strings.Trim(f, "()"), &r); err != nil {
					return err
				}
				list = append(list, r)
			}
			ranks[i] = append(ranks[i], list)
		}
	}
	var lm layout.Map
	if heads := s.num("heads", 0); heads > 0 {
		side := func(hosted [][]int32) layout.Side {
			n := 0
			for _, h := range hosted {
				n += len(h)
			}
			return layout.Side{Ranks: int32(n), Cache: layout.Cache{Kind: "mha", DType: "bf16", Layers: 2, KVHeads: int32(heads), HeadDim: 4, PageTokens: 16, Order: layout.HND}}
		}
		if lm, err = layout.New(side(ranks[0]), side(ranks[1])); err != nil {
			return err
		}
	}
	cfg := core.Config{Clocks: core.DefaultClocks(), Limits: core.DefaultLimits()}
	s.Span, err = coretest.NewSpan(cfg, lm, ranks[0], ranks[1], &s.out)
	s.out.Reset()
	return err
}

var _ = statemachine.Source
