package client

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Bounds of a message in either direction.
const (
	maxHeader  = 64 << 10
	maxPayload = 8 << 20
)

// request is the header of a request on a slot.
type request struct {
	T      string       `json:"t"`
	Slot   int32        `json:"slot"`
	Room   int64        `json:"room"`
	Chunk  *int32       `json:"chunk,omitempty"`
	Parts  []partHeader `json:"parts,omitempty"`
	Layers []int        `json:"layers,omitempty"`
	Last   bool         `json:"last,omitempty"`
	Aux    int          `json:"aux,omitempty"`
}

type partHeader struct {
	Pool   int `json:"pool"`
	Pages  int `json:"pages"`
	Prefix int `json:"prefix,omitempty"`
}

// answer is any answer's header.
type answer struct {
	T   string `json:"t"`
	Seq uint64 `json:"seq"`

	Code    string `json:"code"`
	Field   string `json:"field"`
	Rule    string `json:"rule"`
	Message string `json:"message"`

	Ended  bool   `json:"ended"`
	Reason Reason `json:"reason"`

	Node        string  `json:"node"`
	Incarnation uint64  `json:"incarnation"`
	Limits      *Limits `json:"limits"`

	Slot   int32  `json:"slot"`
	Opener uint64 `json:"opener"`

	Status    uint8  `json:"status"`
	Residency uint8  `json:"residency"`
	Doc       string `json:"doc"`
	Detail    string `json:"detail"`

	payload []byte
	fds     []int
}

// err turns an error answer or a verdict into an error.
func (a *answer) err() error {
	switch {
	case a.T == "error":
		return &Error{Code: a.Code, Field: a.Field, Rule: a.Rule, Message: a.Message}
	case a.Ended:
		return &EndedError{Reason: a.Reason}
	}
	return nil
}

func (a *answer) limits() Limits {
	if a.Limits == nil {
		return Limits{HeaderBytes: maxHeader, PayloadBytes: maxPayload}
	}
	return *a.Limits
}

// Is makes errors.Is(err, ErrNotReusable) true for the engine's answer of that code.
func (e *Error) Is(target error) bool { return target == ErrNotReusable && e.Code == "not_reusable" }

// encode builds a message of a header that carries its own seq.
func encode(header any, payload ...[]byte) ([]byte, error) {
	h, err := json.Marshal(header)
	if err != nil {
		return nil, err
	}
	return build(h, payload)
}

// frame builds a message of a marshalled header without seq.
func frame(header []byte, seq uint64, payload [][]byte) ([]byte, error) {
	h := make([]byte, 0, len(header)+32)
	h = append(h, header[:len(header)-1]...)
	h = append(h, `,"seq":`...)
	h = strconv.AppendUint(h, seq, 10)
	return build(append(h, '}'), payload)
}

func build(h []byte, payload [][]byte) ([]byte, error) {
	n := 0
	for _, p := range payload {
		n += len(p)
	}
	if len(h) > maxHeader || n > maxPayload {
		return nil, fmt.Errorf("message has a header of %d and a payload of %d bytes; at most %d and %d fit: send fewer pages a chunk", len(h), n, maxHeader, maxPayload)
	}
	m := make([]byte, 8, 8+len(h)+n)
	binary.LittleEndian.PutUint32(m, uint32(len(h)))
	binary.LittleEndian.PutUint32(m[4:], uint32(n))
	m = append(m, h...)
	for _, p := range payload {
		m = append(m, p...)
	}
	return m, nil
}

// idBytes views page ids as the little-endian bytes that go on the wire (see page.go on byte order).
func idBytes(ids []int32) []byte {
	if len(ids) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(&ids[0])), 4*len(ids))
}

// outgoing is a message to write; fds ride on its first byte and are closed afterwards.
type outgoing struct {
	bytes []byte
	fds   []int
}

// writeBatch writes messages in order, those without descriptors by one system call.
func writeBatch(conn *net.UnixConn, batch []outgoing) error {
	var plain net.Buffers
	for i, o := range batch {
		if len(o.fds) == 0 {
			plain = append(plain, o.bytes)
			continue
		}
		_, err := plain.WriteTo(conn)
		plain = nil
		if err == nil {
			// The eight length bytes carry the descriptors: so short a write is never partial.
			_, _, err = conn.WriteMsgUnix(o.bytes[:8], unix.UnixRights(o.fds...), nil)
			closeAll(o.fds)
			plain = append(plain, o.bytes[8:])
		}
		if err != nil {
			for _, o := range batch[i:] {
				closeAll(o.fds)
			}
			return err
		}
	}
	_, err := plain.WriteTo(conn)
	return err
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

// reader reads answers. Descriptors are taken only with the first, which answers hello; the kernel
// drops what comes with later ones.
type reader struct {
	conn *net.UnixConn
	buf  *bufio.Reader
	fds  []int
}

func newReader(conn *net.UnixConn) (*reader, error) {
	return &reader{conn: conn}, nil
}

func (r *reader) next() (answer, error) {
	var a answer
	var l [8]byte
	if r.buf == nil {
		n, err := r.first(l[:])
		if err != nil {
			return a, err
		}
		r.buf = bufio.NewReaderSize(r.conn, 64<<10)
		if _, err := io.ReadFull(r.buf, l[n:]); err != nil {
			return a, err
		}
	} else if _, err := io.ReadFull(r.buf, l[:]); err != nil {
		return a, err
	}
	a, err := readAnswer(r.buf, l)
	a.fds, r.fds = r.fds, nil
	return a, err
}

// first reads the start of the first message and its descriptors.
func (r *reader) first(l []byte) (int, error) {
	oob := make([]byte, unix.CmsgSpace(4*4))
	n, on, _, _, err := r.conn.ReadMsgUnix(l, oob)
	if err != nil {
		return 0, err
	}
	cms, err := unix.ParseSocketControlMessage(oob[:on])
	if err != nil {
		return n, fmt.Errorf("descriptors of the answer: %w", err)
	}
	for i := range cms {
		if fds, err := unix.ParseUnixRights(&cms[i]); err == nil {
			r.fds = append(r.fds, fds...)
		}
	}
	if n == 0 {
		return 0, io.EOF
	}
	return n, nil
}

// readAnswer reads what follows the two lengths.
func readAnswer(r io.Reader, l [8]byte) (answer, error) {
	var a answer
	h, p := binary.LittleEndian.Uint32(l[:]), binary.LittleEndian.Uint32(l[4:])
	if h < 2 || h > maxHeader || p > maxPayload {
		return a, fmt.Errorf("answer has a header of %d and a payload of %d bytes: outside the bounds", h, p)
	}
	b := make([]byte, h+p)
	if _, err := io.ReadFull(r, b); err != nil {
		return a, err
	}
	if !a.plain(b[:h]) {
		a = answer{}
		if err := json.Unmarshal(b[:h], &a); err != nil {
			return answer{}, fmt.Errorf("answer: %w", err)
		}
	}
	if a.T != "ok" && a.T != "error" {
		return answer{}, fmt.Errorf("answer of unknown type %q", a.T)
	}
	if p > 0 {
		a.payload = b[h:]
	}
	return a, nil
}

// plain reads the everyday answers, in the form in which the engine writes them, without json: ok, and ok of
// open and aux. It returns false for all others, and may have touched a then.
func (a *answer) plain(b []byte) bool {
	number := func(before string) (v uint64, ok bool) {
		rest, ok := bytes.CutPrefix(b, []byte(before))
		n := 0
		for ; ok && n < len(rest) && n < 18 && '0' <= rest[n] && rest[n] <= '9'; n++ {
			v = 10*v + uint64(rest[n]-'0')
		}
		if n == 0 || n > 1 && rest[0] == '0' {
			return 0, false
		}
		b = rest[n:]
		return v, true
	}
	var ok bool
	if a.Seq, ok = number(`{"t":"ok","seq":`); !ok {
		return false
	}
	a.T = "ok"
	if slot, ok := number(`,"slot":`); ok {
		if a.Opener, ok = number(`,"opener":`); !ok || slot > math.MaxInt32 {
			return false
		}
		a.Slot = int32(slot)
	} else {
		number(`,"aux":`) // how long the payload is, which the frame says, too
	}
	return len(b) == 1 && b[0] == '}'
}
