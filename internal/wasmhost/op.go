package wasmhost

import (
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// openOp is an op of the SDK that the guest has, or is to get. But for what is said otherwise its fields
// belong to the loop.
type openOp struct {
	op      *sdk.Op
	targets map[uint64]*target // by region of the peer; their windows are held until the op is quiet
	unwatch func() bool        // stops the watch for an abort; set before the op is queued

	given    bool // the guest has its Submit
	over     bool // aborted before that
	accepted bool
	ended    bool
	progress uint64
	abortBy  time.Time // the guest has its AbortOp and must end it by then
}

// open maps the regions that the op's plan leads to.
func (b *Backend) open(op *sdk.Op) (*openOp, error) {
	o := &openOp{op: op, targets: map[uint64]*target{}}
	b.mu.Lock()
	p := b.peers[op.Peer().Handle]
	b.mu.Unlock()
	if p == nil { // the SDK runs no op on such a peer
		return nil, sdk.ErrPeerRemoved
	}
	slices := op.Plan().Slices
	for i := range slices {
		id := slices[i].Dst.RegionID
		if o.targets[id] != nil {
			continue
		}
		w, err := p.remote.Acquire(op.Context(), id)
		if err != nil {
			o.release()
			return nil, err
		}
		o.targets[id] = &target{window: w}
	}
	o.aim()
	return o, nil
}

// submit is the op as the guest gets it; seq is set when it goes.
func (o *openOp) submit() *contract.HostEvent {
	op := o.op
	gen := op.Generation()
	from, to := op.Layers()
	m := &contract.Submit{
		Op: op.ID(), Direction: contract.Direction_DIRECTION_WRITE, Peer: op.Peer().Handle, Plan: op.Plan().ID,
		Generation: &contract.Generation{
			Source:      &contract.Opener{Incarnation: gen.Source.Incarnation, Sequence: gen.Source.Sequence},
			Destination: &contract.Opener{Incarnation: gen.Destination.Incarnation, Sequence: gen.Destination.Sequence},
		},
		Source: wireRuns(op.Source()), Destination: wireRuns(op.Destination()),
		LayerFrom: from, LayerTo: to, Priority: op.Priority(), Bytes: op.Bytes(), Trace: op.Trace(),
	}
	if d := op.Deadline(); !d.IsZero() {
		m.DeadlineNs = uint64(max(time.Until(d), 1))
	}
	return &contract.HostEvent{Event: &contract.HostEvent_Submit{Submit: m}}
}

func wireRuns(runs []sdk.Run) *contract.Runs {
	m := &contract.Runs{Start: make([]uint32, len(runs)), Count: make([]uint32, len(runs))}
	for i, r := range runs {
		m.Start[i], m.Count[i] = r.Start, r.Count
		if r.Stride != 1 && m.Stride == nil {
			m.Stride = make([]uint32, len(runs))
			for j := range i {
				m.Stride[j] = 1
			}
		}
		if m.Stride != nil {
			m.Stride[i] = r.Stride
		}
	}
	return m
}

func (o *openOp) release() {
	for _, t := range o.targets {
		t.window.Release()
	}
	o.targets = nil
}
