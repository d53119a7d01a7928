package conformance

import (
	"fmt"
	"slices"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

func init() {
	register(
		Case{
			ID: "window/full", Rule: "R1", Profile: Robustness, Timeout: 60 * time.Second,
			Title: "as many ops at once as the plugin declares are all done",
			Script: `
> min(max_ops, max_ops_per_peer, 8192) Submits in a row
< Accepted, Done, of each`,
			Run: func(t *T) {
				p, list := windowOf(t, 0)
				for part := range slices.Chunk(list, 256) {
					windowAccepted(p.SubmitAll(part))
				}
				for _, o := range p.From.openOps() {
					o.Done()
				}
			},
		},
		Case{
			ID: "window/beyond", Rule: "R12", Profile: Robustness, Timeout: 60 * time.Second,
			Title: "ops beyond the declared window are done, or refused at once; none is lost",
			Script: `
> an eighth more Submits than max_ops, or max_ops_per_peer, in a row
< Accepted, then Done or Failed(CAUSE_LIMIT, quiet=true), of each
> one Submit more
< Done`,
			Run: func(t *T) {
				p, list := windowOf(t, 8)
				var ops []*Op
				for part := range slices.Chunk(list[1:], 256) {
					ops = append(ops, p.SubmitAll(part)...)
				}
				for _, o := range ops {
					end := o.Quiet()
					t.Check(end.Kind == "done" || end.Kind == "failed" && end.Cause == contract.Cause_CAUSE_LIMIT && end.Quiet, "R12",
						fmt.Sprintf("op %d to end Done, or Failed(CAUSE_LIMIT, quiet=true)", o.ID), "%s", end)
				}
				p.Submit(list[0]).Done()
			},
		},
	)
}

// windowOf makes a path and the Submits that fill the plugin's window, and one more of every `more`, if any.
func windowOf(t *T, more int) (*Path, []Submit) {
	const bytes, most = 64, 8192
	n := stormWindow(t, most, bytes)
	if more != 0 {
		n += n/more + 1
	}
	p := t.Path(Shape{Pages: uint32(n), PageBytes: bytes})
	var list []Submit
	for i := range uint32(n) {
		list = append(list, Submit{Src: Pages(uint32(n)-1-i, 1), Dst: Pages(i, 1)})
	}
	return p, list
}

func windowAccepted(ops []*Op) {
	for _, o := range ops {
		o.Accepted()
	}
}
