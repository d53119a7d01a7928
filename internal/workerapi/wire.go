package workerapi

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"math"
	"net"
	"unicode/utf8"
	"unsafe"

	"github.com/terminus-kv/terminus/core/statemachine"
	"golang.org/x/sys/unix"
)

// Bounds of a message in either direction.
const (
	maxHeader  = 64 << 10
	maxPayload = 8 << 20
	maxAux     = 1 << 20
	maxFDs     = 8 // room for descriptors of one read; the kernel drops what exceeds it
)

// Limits are told to the worker in the answer to hello.
type Limits struct {
	HeaderBytes  int   `json:"header_bytes"`
	PayloadBytes int   `json:"payload_bytes"`
	AuxBytes     int   `json:"aux_bytes"`
	Inflight     int   `json:"inflight"`
	Regions      int   `json:"regions"`
	Pools        int   `json:"pools"`
	RegionBytes  int64 `json:"region_bytes"`
}

// missing marks a number that the header does not have; no field may legally be that.
const missing = math.MinInt64

// header is every request's header. Numbers that must be present start as missing.
type header struct {
	T   string `json:"t"`
	Seq uint64 `json:"seq"`

	V      int64   `json:"v"`
	Group  string  `json:"group"`
	Role   string  `json:"role"`
	Rank   int64   `json:"rank"`
	Size   int64   `json:"size"`
	Slots  int64   `json:"slots"`
	Notify bool    `json:"notify"`
	Layout *Layout `json:"layout"`

	Region       int64   `json:"region"`
	CanaryOffset int64   `json:"canary_offset"`
	Canary       *uint64 `json:"canary"`

	Pool    int64          `json:"pool"`
	Pages   int64          `json:"pages"`
	Tensors []tensorHeader `json:"tensors"`

	Slot      int64        `json:"slot"`
	Room      int64        `json:"room"`
	Attempt   int64        `json:"attempt"`
	PeerGroup string       `json:"peer_group"`
	Priority  int64        `json:"priority"`
	Deadline  int64        `json:"deadline_ms"`
	Parts     []partHeader `json:"parts"`
	Chunk     int64        `json:"chunk"`
	Layers    []int64      `json:"layers"`
	Last      bool         `json:"last"`
	Aux       int64        `json:"aux"`
}

type tensorHeader struct {
	Region     int64 `json:"region"`
	Offset     int64 `json:"offset"`
	PageStride int64 `json:"page_stride"`
	PageBytes  int64 `json:"page_bytes"`
	Layer      int64 `json:"layer"`
}

type partHeader struct {
	Pool   int64 `json:"pool"`
	Pages  int64 `json:"pages"`
	Prefix int64 `json:"prefix"`
}

// parseHeader decodes a request's header. fatal says that the message has no usable number, so that it
// can only be answered with seq 0.
func parseHeader(b []byte) (h header, fatal bool, err *Error) {
	h = header{
		V: missing, Rank: missing, Size: missing, Slots: missing, Region: missing, CanaryOffset: missing,
		Pool: missing, Pages: missing, Slot: missing, Room: missing, Chunk: missing,
	}
	if !utf8.Valid(b) {
		return h, true, bad(BadFrame, "header", RuleFrame, "the header is not UTF-8")
	}
	jerr := json.Unmarshal(b, &h)
	var wrong *json.UnmarshalTypeError
	switch {
	case jerr == nil:
	case errors.As(jerr, &wrong) && wrong.Field != "" && h.Seq != 0:
		return h, false, bad(BadField, wrong.Field, RuleFields, "%s has a JSON %s where %s is wanted", wrong.Field, wrong.Value, wrong.Type)
	default:
		return h, true, bad(BadFrame, "header", RuleFrame, "the header is not a JSON object with a number seq: %v", jerr)
	}
	if h.Seq == 0 || h.Seq > math.MaxInt64 {
		return h, true, bad(BadFrame, "seq", RuleOrder, "seq is missing or not in 1 … 2^63-1")
	}
	return h, false, nil
}

// message is one frame. payload is valid until the next frame is read and is aligned for int32.
type message struct {
	header  []byte
	payload []byte
	fds     []int
	fdErr   *Error // descriptors that came too many or in the wrong place; they are closed
}

// source is where frames come from: a unix socket, or bytes in a fuzzer.
type source interface {
	// read reads at most len(p) bytes and the descriptors that came with them. It returns io.EOF at
	// the end and whether the kernel dropped descriptors.
	read(p []byte) (n int, fds []int, dropped bool, err error)
}

// frames reads messages.
type frames struct {
	src source
	buf []byte
}

// next reads one message. An *Error means that the bytes are no message and the connection is of no
// more use; io.EOF stands at a frame boundary only.
func (f *frames) next() (m message, err error) {
	defer func() {
		if err != nil {
			closeAll(m.fds)
			m.fds = nil
		}
	}()
	var l [8]byte
	if err := f.full(l[:], true, &m); err != nil {
		return m, err
	}
	h, p := binary.LittleEndian.Uint32(l[:]), binary.LittleEndian.Uint32(l[4:])
	switch {
	case h < 2 || h > maxHeader:
		return m, bad(BadFrame, "header", RuleFrame, "a header of %d bytes; 2 to %d are allowed", h, maxHeader)
	case p > maxPayload:
		return m, bad(BadFrame, "payload", RuleFrame, "a payload of %d bytes; at most %d are allowed", p, maxPayload)
	}
	pad := int(-h & 7) // so that the payload is aligned
	need := pad + int(h) + int(p)
	if cap(f.buf) < need || cap(f.buf) > 1<<20 && need < 1<<20 {
		f.buf = make([]byte, max(need, 16<<10))
	}
	b := f.buf[:need]
	if err := f.full(b[pad:], false, &m); err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return m, err
	}
	m.header, m.payload = b[pad:pad+int(h)], b[pad+int(h):]
	return m, nil
}

// full fills p. Descriptors belong to the first byte of a message.
func (f *frames) full(p []byte, first bool, m *message) error {
	for done := 0; done < len(p); {
		n, fds, dropped, err := f.src.read(p[done:])
		if len(fds) > 0 || dropped {
			switch {
			case dropped:
				m.fdErr = bad(BadFD, "descriptors", RuleFDs, "more than %d descriptors came with one message", maxFDs)
			case !first || done > 0:
				m.fdErr = bad(BadFD, "descriptors", RuleFDs, "descriptors came in the middle of a message; they ride on its first byte")
			}
			if m.fdErr != nil {
				closeAll(fds)
				closeAll(m.fds)
				m.fds = nil
			} else {
				m.fds = fds
			}
		}
		done += n
		if err == nil && n == 0 {
			err = io.EOF
		}
		if err != nil && done < len(p) {
			if err == io.EOF && done > 0 {
				err = io.ErrUnexpectedEOF
			}
			return err
		}
	}
	return nil
}

// socket is a source.
type socket struct {
	conn *net.UnixConn
	oob  []byte
}

func newSocket(conn *net.UnixConn) *socket {
	return &socket{conn, make([]byte, unix.CmsgSpace(4*maxFDs))}
}

func (s *socket) read(p []byte) (int, []int, bool, error) {
	n, on, flags, _, err := s.conn.ReadMsgUnix(p, s.oob)
	if on == 0 {
		return n, nil, flags&unix.MSG_CTRUNC != 0, err
	}
	cms, perr := unix.ParseSocketControlMessage(s.oob[:on])
	if perr != nil {
		return n, nil, true, err
	}
	var fds []int
	for i := range cms {
		if got, err := unix.ParseUnixRights(&cms[i]); err == nil {
			fds = append(fds, got...)
		}
	}
	return n, fds, flags&unix.MSG_CTRUNC != 0, err
}

// ids views payload bytes as page ids. The machines that the engine supports are little-endian.
func ids(b []byte) []int32 {
	if len(b) < 4 {
		return nil
	}
	return unsafe.Slice((*int32)(unsafe.Pointer(&b[0])), len(b)/4)
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

func parseRole(s string) (statemachine.Role, bool) {
	switch s {
	case "source":
		return statemachine.Source, true
	case "destination":
		return statemachine.Destination, true
	}
	return 0, false
}

// The headers of answers.
type (
	okHeader struct {
		T   string `json:"t"`
		Seq uint64 `json:"seq"`
	}
	helloHeader struct {
		okHeader
		Node        string `json:"node"`
		Incarnation uint64 `json:"incarnation"`
		Slots       int32  `json:"slots"`
		PageBytes   int    `json:"page_bytes"`
		Limits      Limits `json:"limits"`
	}
	openHeader struct {
		okHeader
		Slot   int32  `json:"slot"`
		Opener uint64 `json:"opener"`
	}
	endedHeader struct {
		okHeader
		Ended  bool   `json:"ended"`
		Reason string `json:"reason"`
	}
	failureHeader struct {
		okHeader
		Status    uint8  `json:"status"`
		Residency uint8  `json:"residency"`
		Reason    string `json:"reason"`
		Doc       string `json:"doc"`
		Detail    string `json:"detail"`
	}
	auxHeader struct {
		okHeader
		Aux int `json:"aux"`
	}
	errorHeader struct {
		T       string `json:"t"`
		Seq     uint64 `json:"seq"`
		Code    Code   `json:"code"`
		Field   string `json:"field"`
		Rule    string `json:"rule"`
		Message string `json:"message"`
	}
)

func ok(seq uint64) okHeader { return okHeader{"ok", seq} }

func errorAnswer(seq uint64, e *Error) errorHeader {
	return errorHeader{"error", seq, e.Code, e.Field, e.Rule, e.Message}
}

// encode builds a message. Headers of answers always marshal.
func encode(h any, payload []byte) []byte {
	return appendMessage(nil, h, payload)
}

func appendMessage(dst []byte, h any, payload []byte) []byte {
	j, err := json.Marshal(h)
	if err != nil || len(j) > maxHeader {
		j = []byte(`{"t":"error","seq":0,"code":"refused","message":"the answer could not be encoded"}`)
		payload = nil
	}
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(j)))
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(payload)))
	dst = append(dst, j...)
	return append(dst, payload...)
}
