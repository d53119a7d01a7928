// Package guest is what the author of a WASM guest imports: a transfer backend that decides, while the engine's
// host moves the bytes (docs/wasm-abi.md). It needs nothing but the standard library, so that guests stay small.
//
// A guest is a main package whose init function serves the backend:
//
//	func init() { guest.Serve(&backend{}) }
//	func main() {}
//
// built with
//
//	GOOS=wasip1 GOARCH=wasm go build -buildmode=c-shared -o mine.wasm .
//
// plugins/sdk/example/repage is a whole one. Everything of a guest runs on one thread: Transfer of several ops
// take turns, and change hands only inside Op.Copy and Op.Yield. A panic ends the process of the guest; the
// operator reads its text.
package guest

import (
	"errors"
	"strconv"
)

// Info describes a backend.
type Info struct {
	Name     string // [a-z][a-z0-9-]*, at most 32 bytes
	Version  string
	Features []string // see the Feature constants
	// ConfigSchema is the JSON Schema of the options, which the host checks them against. Empty: no options.
	ConfigSchema string
	MaxOps       uint32 // ops outstanding; 0: 8192
	MaxOpBytes   uint64 // 0: the engine's own limit
}

// Features that a guest may declare. docs/contract.md says what each promises.
const (
	FeatureByteProgress = "byte_progress"
	FeatureStrided      = "strided"
	FeatureLayerRange   = "layer_range"
	FeatureRepage       = "repage"
)

// Start is what Backend.Start gets.
type Start struct {
	Node        string
	Incarnation uint64
	Epoch       uint32
	Config      []byte // the options, a JSON object
}

// Backend decides. Serve calls Info and then Start once; an error of Start refuses the configuration, and the
// operator reads it.
type Backend interface {
	Info() Info
	Start(s Start) error
	// Transfer does one op and ends it, by exactly one of Done, Fail, Skip and Aborted. One that returns
	// without an end is ended as Failed(CauseNoTerminal).
	Transfer(op *Op)
}

// Peerer is a Backend that wants to know its peers, or to refuse some.
type Peerer interface {
	AddPeer(p Peer) error
	RemovePeer(handle uint32)
}

// Peer is a plugin epoch of another engine of this machine.
type Peer struct {
	Handle      uint32
	Node        string
	Incarnation uint64
	Epoch       uint32
}

// Pool is tensors that share page ids.
type Pool struct {
	ID      uint64
	Pages   uint32
	Tensors []Tensor
}

// Tensor is one layer's K or V: page i occupies [Offset + i*PageStride, +PageBytes) of the region.
type Tensor struct {
	Region     uint64
	Offset     uint64
	PageStride uint64
	PageBytes  uint64
	Layer      uint32
}

// Plan says how groups of SrcPages pages of a pool of this engine become groups of DstPages pages of a pool of the
// peer's.
type Plan struct {
	ID       uint64
	Peer     uint32
	Src, Dst *Pool
	SrcPages uint32
	DstPages uint32
	Slices   []Slice
}

// Slice is Count pieces of Len bytes at constant strides, between a page of either group; offsets are from the
// start of the page.
type Slice struct {
	SrcTensor, DstTensor uint32
	SrcOff, DstOff       uint64
	Len                  uint64
	SrcStride, DstStride uint64
	Count                uint32
	SrcPage, DstPage     uint32
}

// Run is Count pages: Start, Start+Stride, …
type Run struct{ Start, Count, Stride uint32 }

// Cause says why an op did not end as Done. docs/contract.md says when to use which.
type Cause uint32

// Causes.
const (
	CauseTransport       Cause = 1
	CausePeerUnreachable Cause = 2
	CauseRefused         Cause = 3
	CauseBounds          Cause = 4
	CauseUnsupported     Cause = 5
	CauseNoTerminal      Cause = 6
	CauseProtocol        Cause = 7
	CauseLimit           Cause = 8
	CauseLane            Cause = 9
	CauseInternal        Cause = 10
	CauseShutdown        Cause = 11
	CauseEmpty           Cause = 12
)

// Errors of Op.Copy, Op.Yield, Read and Write.
var (
	// ErrAborted: the engine aborted the op, or drops its peer. End it with Aborted.
	ErrAborted = errors.New("op aborted by the host")
	// ErrHandle: no such region or peer.
	ErrHandle = errors.New("no such region or peer")
	// ErrBounds: the range leaves the region.
	ErrBounds = errors.New("the range leaves the region")
	// ErrRevoked: the region or the peer is being removed.
	ErrRevoked = errors.New("the region or the peer is being removed")
	// ErrSize: more than one call may move.
	ErrSize = errors.New("more than one call may move")
	// ErrClosed: the range is not within the destination pages of one open op.
	ErrClosed = errors.New("the range is not within the destination pages of one open op")
	// ErrStopped: the call's budget is used up, or the process ends.
	ErrStopped = errors.New("the call is being ended")
	// ErrFault: the memory could not be touched.
	ErrFault = errors.New("the memory could not be touched")
)

// failure turns a code of a host function into an error.
func failure(code int32) error {
	switch code {
	case 0:
		return nil
	case -1:
		return ErrHandle
	case -2:
		return ErrBounds
	case -3:
		return ErrRevoked
	case -5:
		return ErrSize
	case -6:
		return ErrClosed
	case -7:
		return ErrStopped
	case -9:
		return ErrFault
	}
	panic("host function: code " + strconv.Itoa(int(code)) + ", which a guest of this SDK never causes")
}

// Level of a log line.
type Level uint32

// Levels.
const (
	LevelDebug Level = 1
	LevelInfo  Level = 2
	LevelWarn  Level = 3
	LevelError Level = 4
)
