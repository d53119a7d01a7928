package workerapi

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"math"
	"net"
	"strconv"
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
	Kind    string         `json:"kind"`
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
	h = noHeader
	if !h.quick(b) {
		h = noHeader
		if fatal, err := h.parse(b); err != nil {
			return h, fatal, err
		}
	}
	if h.Seq == 0 || h.Seq > math.MaxInt64 {
		return h, true, bad(BadFrame, "seq", RuleOrder, "seq is missing or not in 1 … 2^63-1")
	}
	return h, false, nil
}

var noHeader = header{
	V: missing, Rank: missing, Size: missing, Slots: missing, Region: missing, CanaryOffset: missing,
	Pool: missing, Pages: missing, Slot: missing, Room: missing, Chunk: missing,
}

// parse reads any header.
func (h *header) parse(b []byte) (fatal bool, err *Error) {
	if !utf8.Valid(b) {
		return true, bad(BadFrame, "header", RuleFrame, "the header is not UTF-8")
	}
	jerr := json.Unmarshal(b, h)
	var wrong *json.UnmarshalTypeError
	switch {
	case jerr == nil:
		return false, nil
	case errors.As(jerr, &wrong) && wrong.Field != "" && h.Seq != 0:
		return false, bad(BadField, wrong.Field, RuleFields, "%s has a JSON %s where %s is wanted", wrong.Field, wrong.Value, wrong.Type)
	}
	return true, bad(BadFrame, "header", RuleFrame, "the header is not a JSON object with a number seq: %v", jerr)
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

// frames reads messages. With the rest of one it takes what has come of the next one's lengths, so that a
// message that has come whole costs one read.
type frames struct {
	src    source
	buf    []byte
	ahead  []byte  // of the next message, in buf; at most its lengths
	coming message // its descriptors
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
	var l [lengths]byte
	began := copy(l[:], f.ahead)
	m.fds, m.fdErr = f.coming.fds, f.coming.fdErr
	f.ahead, f.coming = nil, message{}
	if _, err := f.full(l[began:], lengths-began, began == 0, &m); err != nil {
		if err == io.EOF && began > 0 {
			err = io.ErrUnexpectedEOF
		}
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
	if room := need + lengths; cap(f.buf) < room || cap(f.buf) > 1<<20 && room < 1<<20 {
		f.buf = make([]byte, max(room, 16<<10))
	}
	b := f.buf[:need+lengths]
	n, err := f.full(b[pad:], need-pad, false, &m)
	if err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return m, err
	}
	f.ahead = b[need : pad+n]
	m.header, m.payload = b[pad:pad+int(h)], b[pad+int(h):need:need]
	return m, nil
}

// lengths is the size of the two lengths before a message.
const lengths = 8

// drop closes the descriptors of a message that was begun and will not be read.
func (f *frames) drop() {
	closeAll(f.coming.fds)
	f.coming.fds = nil
}

// full reads at least need bytes into p, and returns how many it did. Descriptors belong to the first byte
// of a message. The kernel ends a read behind bytes that carry some: where it went beyond need, they are the
// next message's.
func (f *frames) full(p []byte, need int, first bool, m *message) (done int, err error) {
	for done < need {
		n, fds, dropped, err := f.src.read(p[done:])
		if len(fds) > 0 || dropped {
			to, start := m, first && done == 0
			if done+n > need {
				to, start = &f.coming, true
			}
			to.take(fds, dropped, start)
		}
		done += n
		if err == nil && n == 0 {
			err = io.EOF
		}
		if err != nil && done < need {
			if err == io.EOF && done > 0 {
				err = io.ErrUnexpectedEOF
			}
			return done, err
		}
	}
	return done, nil
}

// take notes descriptors that came; start: with the message's first byte.
func (m *message) take(fds []int, dropped, start bool) {
	switch {
	case dropped && len(fds) < maxFDs: // the kernel could not install them all
		m.fdErr = bad(Limit, "descriptors", RuleLimits, "the engine has too many files open to take the descriptors of this message; raise its limit (ulimit -n)")
	case dropped:
		m.fdErr = bad(BadFD, "descriptors", RuleFDs, "more than %d descriptors came with one message", maxFDs)
	case !start:
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
	at := len(dst)
	dst = append(dst, 0, 0, 0, 0, 0, 0, 0, 0)
	dst, plain := appendPlain(dst, h)
	if !plain {
		j, err := json.Marshal(h)
		if err != nil || len(j) > maxHeader {
			j = []byte(`{"t":"error","seq":0,"code":"refused","message":"the answer could not be encoded"}`)
			payload = nil
		}
		dst = append(dst, j...)
	}
	binary.LittleEndian.PutUint32(dst[at:], uint32(len(dst)-at-8))
	binary.LittleEndian.PutUint32(dst[at+4:], uint32(len(payload)))
	return append(dst, payload...)
}

// appendPlain writes the headers of everyday answers, as json would; false: h is another.
func appendPlain(dst []byte, h any) ([]byte, bool) {
	switch h := h.(type) {
	case okHeader:
		dst = appendOK(dst, h)
	case openHeader:
		dst = append(appendOK(dst, h.okHeader), `,"slot":`...)
		dst = append(strconv.AppendInt(dst, int64(h.Slot), 10), `,"opener":`...)
		dst = strconv.AppendUint(dst, h.Opener, 10)
	case auxHeader:
		dst = append(appendOK(dst, h.okHeader), `,"aux":`...)
		dst = strconv.AppendInt(dst, int64(h.Aux), 10)
	default:
		return dst, false
	}
	return append(dst, '}'), true
}

func appendOK(dst []byte, h okHeader) []byte {
	return strconv.AppendUint(append(dst, `{"t":"ok","seq":`...), h.Seq, 10)
}
