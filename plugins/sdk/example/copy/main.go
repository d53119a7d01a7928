// Command copy is a whole backend for engines of one machine: it maps the memory of its peers and copies
// into it. shm.Share has the regions, the peers and their connections; what is left is here.
package main

import (
	"context"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
	"github.com/terminus-kv/terminus/plugins/sdk/shm"
)

func main() { sdk.Main(&backend{options: options{PieceBytes: 1 << 20}}) }

type options struct {
	PieceBytes uint64 `json:"piece_bytes" jsonschema_description:"Bytes that are copied between two looks at an abort."`
}

type backend struct {
	*shm.Share // AddRegion, RemoveRegion, AddPeer, RemovePeer, Accept, Unaccept, Counters, Close
	options    options
}

func (b *backend) Info() sdk.Info {
	return sdk.Info{
		Name: "copy", Version: "1.0.0", Config: &b.options,
		Features: []string{sdk.FeatureByteProgress, sdk.FeatureStrided, sdk.FeatureLayerRange},
	}
}

// Start returns the endpoint, which the engine carries to the plugins of its peers.
func (b *backend) Start(_ context.Context, s sdk.Start) (endpoint []byte, err error) {
	b.Share, err = shm.Listen(s)
	return b.Share.Endpoint(), err
}

// Transfer ends the op exactly once. quiet is true throughout: Write has returned, so that nothing of the
// op can land any more.
func (b *backend) Transfer(op *sdk.Op) {
	peer, moved := op.Peer().Data.(*shm.Remote), uint64(0)
	for c := range op.Pieces(b.options.PieceBytes) {
		if op.Context().Err() != nil {
			op.Aborted(true)
			return
		}
		if err := peer.Write(op.Context(), c.DstRegion, c.DstOff, c.Src.Bytes[c.SrcOff:][:c.Len]); err != nil {
			op.FailErr(true, err)
			return
		}
		moved += c.Len
		op.Progress(moved)
	}
	op.Done(contract.Lane_LANE_SHM)
}
