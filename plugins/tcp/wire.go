package tcp

import (
	"encoding/binary"
	"fmt"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// wireVersion is part of the first bytes of a connection. Both ends must agree.
const wireVersion = 2

// frameKind tells what a frame is. Frames follow the handshake; all numbers are little-endian.
//
//	header: u32 payload bytes, u8 kind, u8 zero, u16 count, u64 id
//
// id is the connection's own number of an op, counted from 1 in the order of frameBegin, or a region id.
type frameKind uint8

// Frames of the writer.
const (
	// frameBegin opens op id: source opener, destination opener, bytes, and the most bytes that the writer
	// sends on this connection without an acknowledgement.
	frameBegin frameKind = iota + 1
	// frameData carries count pieces of op id: their places, then their bytes.
	frameData
	// frameDesc names count copies of op id that the receiver does itself (lane shm).
	frameDesc
	// frameCancel asks to forget op id. Answered by the end of the op, whichever it is.
	frameCancel
	// frameRegion hands over source region id; its descriptor comes by SCM_RIGHTS with the header.
	frameRegion
	// frameForget: source region id is not used any more.
	frameForget
)

// Frames of the receiver. Done, failed and cancelled are the op's end: nothing of it lands afterwards.
const (
	frameAck       frameKind = iota + 64 // bytes of op id landed so far
	frameDone                            // all of them
	frameFailed                          // count is the contract.Cause; text
	frameCancelled                       // as asked
	frameNoSource                        // the region of op id cannot be mapped here: use another lane
)

const (
	headerLen = 16
	beginLen  = 48
	pieceLen  = 24 // u64 region, u64 offset, u64 bytes
	descLen   = 40 // u64 source region, u64 offset, u64 region, u64 offset, u64 bytes
	maxDetail = 256
)

type header struct {
	kind  frameKind
	size  int // of the payload
	count int
	id    uint64
}

func putHeader(b []byte, h header) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(h.size))
	b = append(b, byte(h.kind), 0)
	b = binary.LittleEndian.AppendUint16(b, uint16(h.count))
	return binary.LittleEndian.AppendUint64(b, h.id)
}

// readHeader decodes headerLen bytes and checks what can be checked without the payload. fromWriter
// tells the direction.
func readHeader(b []byte, fromWriter bool) (header, error) {
	h := header{
		size:  int(binary.LittleEndian.Uint32(b)),
		kind:  frameKind(b[4]),
		count: int(binary.LittleEndian.Uint16(b[6:])),
		id:    binary.LittleEndian.Uint64(b[8:]),
	}
	if b[5] != 0 || (h.kind < frameAck) != fromWriter {
		return h, fmt.Errorf("frame kind %d is unknown in this direction", h.kind)
	}
	ok := false
	switch h.kind {
	case frameBegin:
		ok = h.size == beginLen && h.count == 0
	case frameData:
		n := h.count * pieceLen
		ok = h.count >= 1 && h.count <= maxDesc && h.size > n && h.size <= n+sliceBytes
	case frameDesc:
		ok = h.count >= 1 && h.count <= maxDesc && h.size == h.count*descLen
	case frameCancel, frameForget, frameCancelled, frameNoSource:
		ok = h.size == 0 && h.count == 0
	case frameRegion, frameAck, frameDone:
		ok = h.size == 8 && h.count == 0
	case frameFailed:
		ok = h.size <= maxDetail
	default:
		return h, fmt.Errorf("frame kind %d is unknown", h.kind)
	}
	if !ok {
		return h, fmt.Errorf("frame kind %d with %d bytes and count %d is malformed", h.kind, h.size, h.count)
	}
	return h, nil
}

// putNumber appends a frame whose payload is one number.
func putNumber(b []byte, kind frameKind, id, n uint64) []byte {
	b = putHeader(b, header{kind: kind, size: 8, id: id})
	return binary.LittleEndian.AppendUint64(b, n)
}

// begin is the payload of a frameBegin.
type begin struct {
	sdk.Generation
	bytes, window uint64
}

func putBegin(b []byte, id uint64, g sdk.Generation, bytes, window uint64) []byte {
	b = putHeader(b, header{kind: frameBegin, size: beginLen, id: id})
	for _, v := range [...]uint64{g.Source.Incarnation, g.Source.Sequence, g.Destination.Incarnation, g.Destination.Sequence, bytes, window} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	return b
}

func readBegin(b []byte) begin {
	u := func(i int) uint64 { return binary.LittleEndian.Uint64(b[8*i:]) }
	return begin{
		Generation: sdk.Generation{
			Source:      sdk.Opener{Incarnation: u(0), Sequence: u(1)},
			Destination: sdk.Opener{Incarnation: u(2), Sequence: u(3)},
		},
		bytes: u(4), window: u(5),
	}
}

func putFailed(b []byte, id uint64, cause contract.Cause, detail string) []byte {
	if len(detail) > maxDetail {
		detail = detail[:maxDetail]
	}
	b = putHeader(b, header{kind: frameFailed, size: len(detail), count: int(cause), id: id})
	return append(b, detail...)
}

// piece is the destination of some bytes of a frameData.
type piece struct {
	region, off, n uint64
}

func putPiece(b []byte, p piece) []byte {
	b = binary.LittleEndian.AppendUint64(b, p.region)
	b = binary.LittleEndian.AppendUint64(b, p.off)
	return binary.LittleEndian.AppendUint64(b, p.n)
}

func readPiece(b []byte) piece {
	return piece{
		region: binary.LittleEndian.Uint64(b),
		off:    binary.LittleEndian.Uint64(b[8:]),
		n:      binary.LittleEndian.Uint64(b[16:]),
	}
}

// checkPieces tells whether the pieces of a frameData account for its bytes exactly, each at least one.
func checkPieces(pieces []byte, data int) bool {
	left := uint64(data)
	for ; len(pieces) >= pieceLen; pieces = pieces[pieceLen:] {
		n := binary.LittleEndian.Uint64(pieces[16:])
		if n == 0 || n > left {
			return false
		}
		left -= n
	}
	return left == 0
}

// desc is one copy of a frameDesc.
type desc struct {
	src, srcOff, dst, dstOff, n uint64
}

func putDesc(b []byte, d desc) []byte {
	for _, v := range [...]uint64{d.src, d.srcOff, d.dst, d.dstOff, d.n} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	return b
}

func readDesc(b []byte) desc {
	return desc{
		src:    binary.LittleEndian.Uint64(b),
		srcOff: binary.LittleEndian.Uint64(b[8:]),
		dst:    binary.LittleEndian.Uint64(b[16:]),
		dstOff: binary.LittleEndian.Uint64(b[24:]),
		n:      binary.LittleEndian.Uint64(b[32:]),
	}
}

// within tells whether [off, off+n) lies in [0, size), without overflow.
func within(off, n uint64, size int) bool {
	return n <= uint64(size) && off <= uint64(size)-n
}
