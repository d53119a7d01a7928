package conformance

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// mistake is one of the host in a Submit.
type mistake struct {
	id, title string
	field     string // that the detail must name
	causes    []contract.Cause
	// changes make a good Submit of page 1 wrong, each in another way.
	changes []func(p *Path, m *contract.Submit)
}

func init() {
	const (
		protocol    = contract.Cause_CAUSE_PROTOCOL
		unsupported = contract.Cause_CAUSE_UNSUPPORTED
		huge        = math.MaxUint32
	)
	type change = func(p *Path, m *contract.Submit)
	for _, m := range []mistake{
		{"unknown-direction", "a direction that this version does not know is refused", "direction", []contract.Cause{protocol}, []change{
			func(_ *Path, m *contract.Submit) { m.Direction = 99 },
		}},
		{"zero-direction", "direction 0 is refused: nothing may mean something by default", "direction", []contract.Cause{protocol}, []change{
			func(_ *Path, m *contract.Submit) { m.Direction = 0 },
		}},
		{"read-refused", "READ is refused by name in this version", "", []contract.Cause{unsupported}, []change{
			func(_ *Path, m *contract.Submit) { m.Direction = contract.Direction_DIRECTION_READ },
		}},
		{"unknown-peer", "an op to a peer that was never added, or is only a writer here, is refused", "peer", []contract.Cause{protocol}, []change{
			func(_ *Path, m *contract.Submit) { m.Peer = 1 << 30 },
			func(p *Path, m *contract.Submit) {
				back := p.From.case_().Accept(p.To, p.From) // its handle at From is a writer's
				m.Peer = back.Writer
			},
		}},
		{"unknown-plan", "an op that names a plan which was never added is refused", "plan", []contract.Cause{protocol}, []change{
			func(_ *Path, m *contract.Submit) { m.Plan = 1 << 60 },
			func(_ *Path, m *contract.Submit) { m.Plan = 0 },
		}},
		{"page-out-of-range", "an op that names a page beyond its pool is refused, also where the sum wraps", "source|destination", []contract.Cause{protocol}, []change{
			func(_ *Path, m *contract.Submit) { m.Source.Start[0] = 8 },
			func(_ *Path, m *contract.Submit) { m.Destination.Start[0] = 8 },
			func(_ *Path, m *contract.Submit) {
				m.Source, m.Destination, m.Bytes = protoRuns(7, 2, 1), protoRuns(0, 2, 1), 2*4096
			},
			func(_ *Path, m *contract.Submit) {
				m.Source, m.Destination, m.Bytes = protoRuns(0, 2, 1), protoRuns(huge, 2, 1), 2*4096
			},
			func(_ *Path, m *contract.Submit) {
				m.Source, m.Destination, m.Bytes = protoRuns(0, 2, 1), protoRuns(1, 2, huge), 2*4096
			},
			func(_ *Path, m *contract.Submit) { m.Source, m.Bytes = protoRuns(0, huge, huge), 4096 },
		}},
		{"runs-of-different-length", "runs whose columns differ in length are refused", "source|destination", []contract.Cause{protocol}, []change{
			func(_ *Path, m *contract.Submit) { m.Source.Start = []uint32{1, 2} },
			func(_ *Path, m *contract.Submit) { m.Destination.Count = nil },
			func(_ *Path, m *contract.Submit) { m.Source.Stride = []uint32{1, 1} },
		}},
		{"zero-count", "a run of 0 pages is refused", "source|destination", []contract.Cause{protocol}, []change{
			func(_ *Path, m *contract.Submit) { m.Source.Count[0] = 0 },
			func(_ *Path, m *contract.Submit) { m.Destination.Count[0] = 0 },
		}},
		{"unequal-pages", "an op whose page lists differ in length is refused", "source|destination", []contract.Cause{protocol}, []change{
			func(_ *Path, m *contract.Submit) { m.Source = protoRuns(1, 2, 1) },
			func(_ *Path, m *contract.Submit) { m.Destination = protoRuns(1, 3, 1) },
			func(_ *Path, m *contract.Submit) { m.Source = nil },
		}},
		{"wrong-bytes", "an op whose size is not that of its pages is refused", "bytes", []contract.Cause{protocol}, []change{
			func(_ *Path, m *contract.Submit) { m.Bytes-- },
			func(_ *Path, m *contract.Submit) { m.Bytes++ },
			func(_ *Path, m *contract.Submit) { m.Bytes = 0 },
		}},
		{"zero-opener", "an op without a whole generation is refused", "generation", []contract.Cause{protocol}, []change{
			func(_ *Path, m *contract.Submit) { m.Generation = nil },
			func(_ *Path, m *contract.Submit) { m.Generation = clone(m.Generation); m.Generation.Destination = nil },
			func(_ *Path, m *contract.Submit) {
				m.Generation = clone(m.Generation)
				m.Generation.Source.Sequence = 0
			},
			func(_ *Path, m *contract.Submit) {
				m.Generation = clone(m.Generation)
				m.Generation.Destination.Incarnation = 0
			},
		}},
		{"empty-layers", "an op whose layer range is empty or turned around is refused", "layer", []contract.Cause{protocol}, []change{
			func(_ *Path, m *contract.Submit) { m.LayerFrom, m.LayerTo = 0, 0 },
			func(_ *Path, m *contract.Submit) { m.LayerFrom, m.LayerTo = 3, 1 },
		}},
	} {
		register(Case{
			ID: "proto/" + m.id, Rule: "R12", Profile: TransferCore, Title: m.title, Run: protoMistaken(m),
			Script: fmt.Sprintf(`
> one frame: a good Submit; %d Submits with the mistake; a good Submit
< for each mistake: Accepted, then Failed(%v, quiet=true), with the field in the detail
< for the good ones: Accepted, Done
= no byte of a mistake lands; the next op is done, too`, len(m.changes), m.causes[0]),
		})
	}
	register(
		Case{
			ID: "proto/bad-pool", Rule: "R12", Profile: TransferCore,
			Title: "a pool that leaves its region is not answered, and every op that names it is refused",
			Script: `
> PoolAdds: one byte beyond the region, sums that overflow, an unknown region, pages that overlap, no page, no tensor
> PlanAdd and Submit for each
< for each: Accepted, then Failed(CAUSE_PROTOCOL, quiet=true)
= ops of the good pool are done before and after`,
			Run: protoBadPool,
		},
		Case{
			ID: "proto/bad-plan", Rule: "R12", Profile: TransferCore,
			Title: "a plan that leaves the pages of its pools is not answered, and every op that names it is refused",
			Script: `
> PlanAdds: bytes beyond the page at either end, tensors that are not there, sums and products that overflow, unknown pools
> a Submit for each
< for each: Accepted, then Failed(CAUSE_PROTOCOL, quiet=true)
= ops of the good plan are done before and after; no byte of a bad one lands`,
			Run: protoBadPlan,
		},
		Case{
			ID: "proto/remote-pool-wraps", Rule: "R12", Profile: TransferCore,
			Title: "a pool of a peer whose addresses wrap around is refused",
			Script: `
> RemotePoolAdds whose offset, or offset and stride, exceed 2^64; PlanAdd and Submit for each
< for each: Accepted, then Failed(CAUSE_PROTOCOL, quiet=true)
= no byte lands`,
			Run: func(t *T) {
				protoRemotePools(t, []contract.Cause{contract.Cause_CAUSE_PROTOCOL}, func(p *Path, m *contract.PoolAdd) []*contract.PoolAdd {
					wrap, product := clone(m), clone(m)
					wrap.Tensors[0].Offset = math.MaxUint64 - 4095
					product.Tensors[0].PageStride = math.MaxUint64 / 4
					return []*contract.PoolAdd{wrap, product}
				})
			},
		},
		Case{
			ID: "proto/remote-pool-too-long", Rule: "R12", Profile: TransferCore,
			Title: "a pool of a peer that leaves the peer's region cannot be written",
			Script: `
> RemotePoolAdd of a pool that ends one page behind its region, or lies in a region which is not there; PlanAdd and Submit of that page
< Accepted, then Failed
= no byte lands, neither behind the region nor in it`,
			Run: func(t *T) {
				protoRemotePools(t, nil, func(p *Path, m *contract.PoolAdd) []*contract.PoolAdd {
					behind, nowhere := clone(m), clone(m)
					behind.Tensors[0].Offset = p.DstMem.Size - 3*4096 // page 3 begins where the region ends
					nowhere.Tensors[0].Region = 1 << 60
					return []*contract.PoolAdd{behind, nowhere}
				})
			},
		},
		Case{
			ID: "proto/unknown-event", Rule: "R12", Profile: TransferCore,
			Title:    "an event of a newer engine is ignored",
			Incident: "sglang#30352: an unknown message tripped an assertion in the control loop",
			Script: `
> frames with events that this version does not know, at both ends, on Session and on Control
> Submit
< Accepted, Done
= the plugin lives and says nothing of them`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 8, PageBytes: 4096})
				for _, n := range []*Node{t.A(), t.B()} {
					n.Send(protoUnknown(3000), orderStats(n.NewID()), protoUnknown(3001))
					n.SendControl(protoUnknown(3002))
					n.Send(&contract.HostEvent{})
				}
				p.Submit(Submit{Src: Pages(0, 1), Dst: Pages(1, 1)}).Done()
			},
		},
		Case{
			ID: "proto/unknown-field", Rule: "R12", Profile: TransferCore,
			Title: "a field of a newer engine is ignored",
			Script: `
> Submit with fields that this version does not know
< Accepted, Done
= the page is there`,
			Run: func(t *T) {
				p := t.Path(Shape{Pages: 8, PageBytes: 4096})
				op, m := p.prepare(Submit{Src: Pages(0, 1), Dst: Pages(1, 1)})
				m.ProtoReflect().SetUnknown(protoExtra(900))
				m.Generation = clone(m.Generation)
				m.Generation.ProtoReflect().SetUnknown(protoExtra(901))
				p.From.submit(op, m).Done()
			},
		},
		Case{
			ID: "proto/near-limit-frame", Rule: "R12", Profile: TransferCore,
			Title: "a Submit that fills a frame of nearly 1 MiB is served",
			Script: `
> one Submit with so many runs of one page, in no order, that its frame has about 900 KiB
< Accepted, Progress…, Done
= every page is where it belongs`,
			Run: protoLargeFrame,
		},
		Case{
			ID: "proto/collective-refused", Rule: "R12", Profile: TransferCore,
			Title: "a transfer plugin refuses collectives by name",
			Script: `
> CommCreate, Rebuild
< CommFailed(CAUSE_UNSUPPORTED) for each
> Submit
< Accepted, Done`,
			Run: func(t *T) {
				if slices.Contains(t.A().Hello().Kinds, contract.Kind_KIND_COLLECTIVE) {
					t.Unsupported("the plugin serves collectives")
				}
				p := t.Path(Shape{Pages: 8, PageBytes: 4096})
				n, comm := t.A(), t.A().NewID()
				n.Send(&contract.HostEvent{Event: &contract.HostEvent_CommCreate{CommCreate: &contract.CommCreate{
					Comm: comm, Round: 1, World: 2, LocalRanks: []uint32{0, 1}, MaxBytes: 4096, Dtype: contract.DType_DTYPE_BF16, Hidden: 64,
					Kind: contract.MemoryKind_MEMORY_KIND_HOST_SHM,
				}}}, &contract.HostEvent{Event: &contract.HostEvent_Rebuild{Rebuild: &contract.Rebuild{Comm: comm, Round: 2}}})
				for round := range uint32(2) {
					f := n.Until("R12", fmt.Sprintf("CommFailed of round %d", round+1), func(e *contract.PluginEvent) bool {
						return e.GetCommFailed() != nil && e.GetCommFailed().Comm == comm && e.GetCommFailed().Round == round+1
					}).GetCommFailed()
					t.Check(f.Cause == contract.Cause_CAUSE_UNSUPPORTED, "R12", "CommFailed(CAUSE_UNSUPPORTED)", "%v", f.Cause)
				}
				p.Submit(Submit{Src: Pages(0, 1), Dst: Pages(1, 1)}).Done()
			},
		},
	)
}

func protoRuns(start, count, stride uint32) *contract.Runs {
	return &contract.Runs{Start: []uint32{start}, Count: []uint32{count}, Stride: []uint32{stride}}
}

// protoMistaken sends good and bad ops in one frame.
func protoMistaken(m mistake) func(*T) {
	return func(t *T) {
		p := t.Path(Shape{Pages: 8, PageBytes: 4096})
		list := []Submit{{Src: Pages(0, 1), Dst: Pages(0, 1)}}
		sent := make([]*contract.Submit, len(m.changes))
		for i, change := range m.changes {
			list = append(list, Submit{Src: Pages(1, 1), Dst: Pages(1, 1), Change: func(s *contract.Submit) {
				change(p, s)
				sent[i] = s
			}})
		}
		list = append(list, Submit{Src: Pages(2, 1), Dst: Pages(2, 1)})
		ops := p.SubmitAll(list)
		bad := ops[1 : len(ops)-1]
		for i, op := range bad {
			if protoUnserved(t, sent[i]) && endedAs(op.Quiet(), "failed CAUSE_UNSUPPORTED") {
				continue // what it is asked for is not served, mistake or not
			}
			protoRefused(t, op, m.field, m.causes...)
		}
		ops[0].Done()
		ops[len(ops)-1].Done()
		p.Submit(Submit{Src: Pages(3, 1), Dst: Pages(3, 1)}).Done()
	}
}

// protoUnserved tells whether a Submit asks for a feature that the plugin does not declare.
func protoUnserved(t *T, m *contract.Submit) bool {
	strided := slices.ContainsFunc(slices.Concat(m.Source.GetStride(), m.Destination.GetStride()), func(s uint32) bool { return s > 1 })
	return strided && !t.Has(sdk.FeatureStrided) || m.LayerTo <= m.LayerFrom && !t.Has(sdk.FeatureLayerRange)
}

// protoRefused fails the case unless the op ended as a mistake of the host does. field lists what the detail
// may name, one of a|b; "" for anything.
func protoRefused(t *T, op *Op, field string, causes ...contract.Cause) {
	end := op.Quiet()
	t.Check(end.Kind == "failed" && slices.Contains(causes, end.Cause) && end.Quiet, "R12",
		fmt.Sprintf("op %d to be Failed(%v, quiet=true)", op.ID, causes[0]), "%s", end)
	named := slices.ContainsFunc(strings.Split(field, "|"), func(f string) bool { return strings.Contains(strings.ToLower(end.Detail), f) })
	t.Check(named, "R12", fmt.Sprintf("a detail that names the field (%s)", field), "%s", end)
}

func protoExtra(field protowire.Number) []byte {
	return protowire.AppendString(protowire.AppendTag(nil, field, protowire.BytesType), "from the future")
}

func protoUnknown(field protowire.Number) *contract.HostEvent {
	e := &contract.HostEvent{}
	e.ProtoReflect().SetUnknown(protoExtra(field))
	return e
}

// rawPool sends a PoolAdd as it is, with an id of its own.
func (n *Node) rawPool(m *contract.PoolAdd) uint64 {
	m.Pool = n.NewID()
	n.mu.Lock()
	n.pools = append(n.pools, m.Pool)
	n.mu.Unlock()
	n.Send(&contract.HostEvent{Event: &contract.HostEvent_PoolAdd{PoolAdd: m}})
	return m.Pool
}

// rawPlan sends a PlanAdd as it is, with an id of its own.
func (p *Path) rawPlan(m *contract.PlanAdd) uint64 {
	m.Plan, m.Peer = p.From.NewID(), p.Handle
	p.plans[m.Plan] = true
	p.From.Send(&contract.HostEvent{Event: &contract.HostEvent_PlanAdd{PlanAdd: m}})
	return m.Plan
}

// protoUse submits pages of a plan that is no good.
func protoUse(p *Path, plan uint64, page uint32) *Op {
	return p.Submit(Submit{Src: Pages(page, 1), Dst: Pages(page, 1), Change: func(m *contract.Submit) { m.Plan = plan }})
}

func protoBadPool(t *T) {
	p := t.Path(Shape{Pages: 4, PageBytes: 4096})
	p.Submit(Submit{Src: Pages(0, 1), Dst: Pages(0, 1)}).Done()
	good := p.Src.message()
	change := func(f func(m *contract.PoolAdd, t *contract.Tensor)) *contract.PoolAdd {
		m := clone(good)
		f(m, m.Tensors[0])
		return m
	}
	var ops []*Op
	for _, m := range []*contract.PoolAdd{
		change(func(_ *contract.PoolAdd, w *contract.Tensor) { w.Offset = p.SrcMem.Size - 4*4096 + 1 }),
		change(func(_ *contract.PoolAdd, w *contract.Tensor) { w.Offset = math.MaxUint64 - 4095 }),
		change(func(_ *contract.PoolAdd, w *contract.Tensor) { w.PageStride = math.MaxUint64 / 2 }),
		change(func(m *contract.PoolAdd, w *contract.Tensor) { m.Pages, w.PageStride = 1<<31, 1<<33 }),
		change(func(_ *contract.PoolAdd, w *contract.Tensor) { w.Region = 1 << 60 }),
		change(func(_ *contract.PoolAdd, w *contract.Tensor) { w.PageStride = 4095 }),
		change(func(m *contract.PoolAdd, _ *contract.Tensor) { m.Pages = 0 }),
		change(func(m *contract.PoolAdd, _ *contract.Tensor) { m.Tensors = nil }),
	} {
		pool := p.From.rawPool(m)
		ops = append(ops, protoUse(p, p.rawPlan(&contract.PlanAdd{
			SrcPool: pool, DstPool: p.Dst.ID, SrcPages: 1, DstPages: 1, Slices: []*contract.Slice{{Len: 4096, Count: 1}},
		}), 0))
	}
	for _, op := range ops {
		protoRefused(t, op, "pool|plan", contract.Cause_CAUSE_PROTOCOL)
	}
	p.Submit(Submit{Src: Pages(1, 1), Dst: Pages(1, 1)}).Done()
}

func protoBadPlan(t *T) {
	p := t.Path(Shape{Pages: 4, PageBytes: 4096})
	p.Submit(Submit{Src: Pages(0, 1), Dst: Pages(0, 1)}).Done()
	plan := func(f func(m *contract.PlanAdd, s *contract.Slice)) *contract.PlanAdd {
		m := &contract.PlanAdd{SrcPool: p.Src.ID, DstPool: p.Dst.ID, SrcPages: 1, DstPages: 1, Slices: []*contract.Slice{{Len: 4096, Count: 1}}}
		f(m, m.Slices[0])
		return m
	}
	var ops []*Op
	for _, m := range []*contract.PlanAdd{
		plan(func(_ *contract.PlanAdd, s *contract.Slice) { s.SrcOff = 1 }),
		plan(func(_ *contract.PlanAdd, s *contract.Slice) { s.DstOff = 1 }),
		plan(func(_ *contract.PlanAdd, s *contract.Slice) { s.Len = 4097 }),
		plan(func(_ *contract.PlanAdd, s *contract.Slice) { s.SrcTensor = 1 }),
		plan(func(_ *contract.PlanAdd, s *contract.Slice) { s.DstTensor = math.MaxUint32 }),
		plan(func(_ *contract.PlanAdd, s *contract.Slice) { s.SrcOff, s.Len = math.MaxUint64-2047, 4096 }),
		plan(func(_ *contract.PlanAdd, s *contract.Slice) { s.DstOff, s.Len = math.MaxUint64-2047, 4096 }),
		plan(func(_ *contract.PlanAdd, s *contract.Slice) {
			s.Len, s.Count, s.SrcStride, s.DstStride = 1024, 3, 1024, math.MaxUint64/2+1
		}),
		plan(func(_ *contract.PlanAdd, s *contract.Slice) {
			s.Len, s.Count, s.SrcStride, s.DstStride = 1024, 5, 1024, 1024
		}),
		plan(func(m *contract.PlanAdd, _ *contract.Slice) { m.SrcPool = 1 << 60 }),
		plan(func(m *contract.PlanAdd, _ *contract.Slice) { m.DstPool = 1 << 60 }),
	} {
		ops = append(ops, protoUse(p, p.rawPlan(m), 0))
	}
	for _, op := range ops {
		protoRefused(t, op, "plan", contract.Cause_CAUSE_PROTOCOL)
	}
	p.Submit(Submit{Src: Pages(1, 1), Dst: Pages(1, 1)}).Done()
}

// protoRemotePools tells the writer of pools that the peer does not have, and writes to their last page. No
// causes means that any will do.
func protoRemotePools(t *T, causes []contract.Cause, bad func(p *Path, m *contract.PoolAdd) []*contract.PoolAdd) {
	p := t.Path(Shape{Pages: 4, PageBytes: 4096})
	p.Submit(Submit{Src: Pages(0, 1), Dst: Pages(0, 1)}).Done()
	var ops []*Op
	for _, m := range bad(p, p.Dst.message()) {
		m.Pool = p.To.NewID()
		m.Pages = 8
		p.remotePools[m.Pool] = true
		p.From.Send(&contract.HostEvent{Event: &contract.HostEvent_RemotePoolAdd{RemotePoolAdd: &contract.RemotePoolAdd{Peer: p.Handle, Pool: m}}})
		ops = append(ops, protoUse(p, p.rawPlan(&contract.PlanAdd{
			SrcPool: p.Src.ID, DstPool: m.Pool, SrcPages: 1, DstPages: 1, Slices: []*contract.Slice{{Len: 4096, Count: 1}},
		}), 3))
	}
	for _, op := range ops {
		if causes != nil {
			protoRefused(t, op, "pool|plan", causes...)
			continue
		}
		end := op.Quiet()
		t.Check(end.Kind == "failed", "R12", fmt.Sprintf("op %d to be Failed: its destination is not the peer's memory", op.ID), "%s", end)
	}
	p.Submit(Submit{Src: Pages(1, 1), Dst: Pages(1, 1)}).Done()
}

func protoLargeFrame(t *T) {
	const pages = 4 << 20 // page numbers of 4 bytes on the wire
	runs := 72_000
	if n := t.A().Hello().GetLimits().GetMaxRuns(); n != 0 {
		runs = min(runs, int(n))
	}
	p := t.Path(Shape{Pages: pages, PageBytes: 1})
	shuffled := func() (list []sdk.Run) {
		for _, i := range t.Rand().Perm(runs) {
			list = append(list, sdk.Run{Start: pages - 1 - uint32(i)*(pages/72_000), Count: 1, Stride: 1})
		}
		return list
	}
	op, m := p.prepare(Submit{Src: shuffled(), Dst: shuffled()})
	for _, r := range []*contract.Runs{m.Source, m.Destination} {
		r.Stride = slices.Repeat([]uint32{1}, runs) // said, not left out
	}
	if n := proto.Size(&contract.HostFrame{Events: []*contract.HostEvent{{Event: &contract.HostEvent_Submit{Submit: m}}}}); n > 1<<20 {
		t.broke("a frame of %d bytes", n)
	}
	p.From.submit(op, m).Done()
}
