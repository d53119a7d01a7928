package core_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/coretest"
)

// TestInteraction runs the golden files of testdata: a cluster of two cores driven one command at a
// time. A file can be read without Go; -rewrite renews the output after a change that you understand.
func TestInteraction(t *testing.T) {
	datadriven.Walk(t, "testdata", func(t *testing.T, path string) {
		if !strings.HasSuffix(path, ".txt") {
			t.Skip("not an interaction file")
		}
		var out strings.Builder
		var env *coretest.Env
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			out.Reset()
			if env == nil {
				var err error
				env, err = coretest.New(core.Config{Clocks: core.DefaultClocks(), Limits: core.DefaultLimits()}, &out)
				if err != nil {
					t.Fatal(err)
				}
				env.Auto = true
				out.Reset()
			}
			handle(t, env, d, &out)
			if out.Len() == 0 {
				return "ok\n"
			}
			return out.String()
		})
	})
}

func handle(t *testing.T, env *coretest.Env, d *datadriven.TestData, out *strings.Builder) {
	side := func() *coretest.Engine {
		if len(d.CmdArgs) > 0 && d.CmdArgs[0].Key == "P" {
			return env.P
		}
		return env.D
	}
	num := func(key string, def int64) int64 {
		v := def
		d.MaybeScanArgs(t, key, &v)
		return v
	}
	room := num("room", 1)
	switch d.Cmd {
	case "open":
		env.Open(side(), room, uint64(num("att", 0)), time.Duration(num("deadline-ms", 0))*time.Millisecond)
	case "register":
		env.Request(env.D, core.Register, room, func(e *core.Event) { e.Parts = coretest.Pages(int32(num("from", 0)), int32(num("pages", 0))) })
	case "send":
		env.Request(env.P, core.Send, room, func(e *core.Event) {
			e.Parts, e.Last = coretest.Pages(int32(num("from", 0)), int32(num("pages", 0))), d.HasArg("last")
			if d.HasArg("aux") {
				e.Aux = []byte("aux")
			}
		})
	case "abort":
		env.Request(side(), core.Abort, room, nil)
	case "release":
		env.Request(side(), core.Release, room, nil)
	case "worker-dies":
		env.Step(side(), core.Event{Kind: core.SessionDown, Session: side().Session})
	case "deliver":
		n := int(num("n", 1))
		for range n {
			if !env.Deliver(side()) {
				fmt.Fprintf(out, "nothing to deliver\n")
			}
		}
	case "settle":
		env.Settle()
	case "op-progress":
		op := side().Ops[num("op", 1)-1]
		env.Step(side(), core.Event{Kind: core.OpProgress, Op: op.Op, Bytes: num("bytes", 0)})
	case "op-end":
		end := map[string]core.EndKind{"done": core.EndDone, "failed": core.EndFailed, "skipped": core.EndSkipped, "aborted": core.EndAborted}
		var how string
		d.ScanArgs(t, "end", &how)
		env.EndOp(side(), int(num("op", 1)), end[how], !d.HasArg("unquiet"))
	case "op-quiesced":
		env.Step(side(), core.Event{Kind: core.OpQuiesced, Op: side().Ops[num("op", 1)-1].Op})
	case "plugin-dies":
		env.Step(side(), core.Event{Kind: core.PluginLost, Backend: "tcp", Epoch: side().Epoch, Detail: "exit status 137"})
	case "plugin-fenced":
		env.Step(side(), core.Event{Kind: core.PluginFenced, Backend: "tcp", Epoch: side().Epoch})
	case "plugin-starts":
		side().Epoch++
		env.Step(side(), core.Event{Kind: core.PluginUp, Backend: "tcp", Epoch: side().Epoch, ReceiverChecked: true})
	case "disconnect":
		env.Disconnect()
	case "connect":
		env.Connect()
	case "restart":
		if err := env.Restart(side()); err != nil {
			t.Fatal(err)
		}
	case "drain":
		env.Step(side(), core.Event{Kind: core.DrainBegin})
	case "wait":
		var dur time.Duration
		s := d.CmdArgs[0].Key
		dur, err := time.ParseDuration(s)
		if err != nil {
			t.Fatal(err)
		}
		env.Now += dur
		beats := !d.HasArg("silent")
		for _, g := range []*coretest.Engine{env.P, env.D} {
			if beats {
				env.Step(g, core.Event{Kind: core.PeerHeard, Peer: 0})
			} else {
				env.Step(g, core.Event{Kind: core.Tick})
			}
		}
	case "why":
		for _, v := range side().M.Room(room) {
			fmt.Fprintln(out, v.Why())
		}
	case "counts":
		fmt.Fprintf(out, "P %+v\nD %+v\n", env.P.M.Counts(), env.D.M.Counts())
	case "plugins-wait":
		env.Auto = false
	default:
		t.Fatalf("%s: unknown command %q", d.Pos, d.Cmd)
	}
}
