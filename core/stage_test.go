package core_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/coretest"
)

// TestStages: a record tells of each stage that it leaves, and how long it was in it.
func TestStages(t *testing.T) {
	for _, c := range []struct {
		name, config string
		lines        []string
		want         []string
	}{
		{
			"success", configs[0],
			[]string{
				"open P room=1", "wait 1s", "open D room=1", "wait 2s", "register D room=1 from=10 pages=1", "settle", "wait 3s",
				"send P room=1 from=0 pages=1 last", "settle", "wait 4s", "op-end P op=1 end=done", "wait 5s", "settle", "wait 601s",
			},
			[]string{
				"D bootstrap 2s", "D input 3s", "D transfer 9s",
				"P bootstrap 3s", "P input 3s", "P transfer 4s", "P verdict 5s",
			},
		},
		{
			"aborted while an op runs", configs[0],
			[]string{
				"open P room=1", "open D room=1", "register D room=1 from=10 pages=1", "settle", "send P room=1 from=0 pages=1 last", "settle",
				"wait 1s", "abort P room=1", "settle", "wait 3s", "op-end P op=1 end=aborted", "settle",
			},
			[]string{"D drain 3s", "D transfer 1s", "P drain 3s", "P transfer 1s"},
		},
		{
			"waits for admission", "config rooms=1",
			[]string{"open P room=1", "open P room=2", "wait 7s", "abort P room=1", "wait 2s", "abort P room=2"},
			[]string{"P bootstrap 2s", "P bootstrap 7s", "P queued 7s"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := &walk{}
			w.do("%s", c.config)
			if w.err != nil {
				t.Fatal(w.err)
			}
			var got []string
			w.env.OnEffects = func(g *coretest.Engine, out *core.Effects) {
				for _, s := range out.Stages {
					if s.Role != g.Role {
						t.Errorf("%s tells of a %s", g.Name, s.Role)
					}
					if s.Took > 0 {
						got = append(got, fmt.Sprintf("%s %s %s", g.Name, s.Stage, s.Took))
					}
				}
			}
			for _, line := range c.lines {
				w.do("%s", line)
			}
			slices.Sort(got)
			if w.err != nil || !slices.Equal(got, c.want) {
				t.Errorf("%v, got\n%s", w.err, strings.Join(got, "\n"))
			}
		})
	}
}
