package workerapi

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"reflect"
	"testing"

	"golang.org/x/sys/unix"
)

// byteSource hands bytes out in small pieces.
type byteSource struct {
	b     []byte
	chunk int
}

func (s *byteSource) read(p []byte) (int, []int, bool, error) {
	if len(s.b) == 0 {
		return 0, nil, false, io.EOF
	}
	n := copy(p[:min(len(p), max(1, s.chunk))], s.b)
	s.b = s.b[n:]
	return n, nil, false, nil
}

func FuzzFrames(f *testing.F) {
	f.Add(rawFrame([]byte(`{"t":"open","seq":1,"room":7}`), nil), 3)
	f.Add(rawFrame([]byte(`{"t":"send","seq":2,"slot":0,"room":7,"chunk":0,"parts":[{"pool":0,"pages":1}]}`), []byte{1, 0, 0, 0}), 1)
	f.Add([]byte{0, 0, 0, 0, 0, 0, 0, 0}, 8)
	f.Add([]byte{255, 255, 255, 255, 255, 255, 255, 255, 1}, 8)
	f.Fuzz(func(t *testing.T, b []byte, chunk int) {
		r := frames{src: &byteSource{b: b, chunk: chunk}}
		used := 0
		for {
			m, err := r.next()
			if err != nil {
				var e *Error
				if err == io.EOF && used != len(b) || !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.As(err, &e) {
					t.Fatalf("after %d of %d bytes: %v", used, len(b), err)
				}
				return
			}
			if !bytes.Equal(b[used+8:used+8+len(m.header)], m.header) {
				t.Fatal("header is not what was sent")
			}
			used += 8 + len(m.header) + len(m.payload)
			for _, id := range ids(m.payload) {
				_ = id
			}
		}
	})
}

// checkQuick: what quick accepts, json reads the same.
func checkQuick(t *testing.T, b []byte) (accepted bool) {
	t.Helper()
	quick, slow := noHeader, noHeader
	if !quick.quick(b) {
		return false
	}
	if _, e := slow.parse(b); e != nil {
		t.Fatalf("quick accepts %q; json says %v", b, e)
	}
	if !reflect.DeepEqual(quick, slow) {
		t.Fatalf("quick reads %q as %+v, json as %+v", b, quick, slow)
	}
	return true
}

var plainHeaders = []string{
	`{"t":"open","room":7,"attempt":1,"peer_group":"a b","priority":-3,"deadline_ms":250,"seq":9}`,
	`{"t": "send", "slot": 0, "room": 7, "chunk": 0, "parts": [{"pool": 0, "pages": 2}, {"pool": 1, "pages": 0}], "last": true, "aux": 64, "seq": 10}`,
	`{"t":"register","slot":3,"room":999999999999999999,"parts":[{"pool":0,"pages":2,"prefix":1}],"seq":11}`,
	`{"t":"release","slot":0,"room":7,"seq":12}`,
	`{"t":"abort","slot":0,"slot":1,"room":7,"last":false,"seq":13}`,
}

var otherHeaders = []string{
	`{}`, `{"t":"open","seq":1,}`, `{"t":"open","seq":1}x`, `{"t":"open","seq":1`, `{"t":"hello","seq":1,"group":"g"}`,
	`{"t":"open","seq":01}`, `{"t":"open","seq":-0}`, `{"t":"open","seq":1.0}`, `{"t":"open","seq":1e3}`, `{"t":"open","seq":1234567890123456789}`,
	`{"t":"op\u0065n","seq":1}`, `{"t":"open","seq":1,"peer_group":"ä"}`, `{"T":"open","seq":1}`, `{"t":"open","seq":1,"unknown":2}`, `{"t":"open","seq":null}`,
	`{"t":"send","seq":1,"parts":[]}`, `{"t":"send","seq":1,"parts":[{}]}`, `{"t":"send","seq":1,"parts":[{"pool":0}],"parts":[{"pages":1}]}`, `{"t":"send","seq":1,"layers":[0,1]}`,
}

func TestQuickHeader(t *testing.T) {
	for _, x := range plainHeaders {
		if !checkQuick(t, []byte(x)) {
			t.Errorf("%s is not read quickly", x)
		}
	}
	for _, x := range otherHeaders {
		if checkQuick(t, []byte(x)) {
			t.Errorf("%s is not for quick", x)
		}
	}
}

// TestPlainAnswers: what is written by hand is what json writes.
func TestPlainAnswers(t *testing.T) {
	for _, h := range []any{ok(1), openHeader{ok(1 << 62), 65535, 1<<48 - 1}, auxHeader{ok(3), 1 << 20}, auxHeader{ok(4), 0}} {
		want, err := json.Marshal(h)
		if err != nil {
			t.Fatal(err)
		}
		if got, plain := appendPlain(nil, h); !plain || string(got) != string(want) {
			t.Errorf("%T: %s, want %s", h, got, want)
		}
	}
	if _, plain := appendPlain(nil, errorHeader{}); plain {
		t.Error("an error is no everyday answer")
	}
}

// burst hands out pieces as the kernel does: a read ends behind bytes that carry descriptors.
type burst struct {
	pieces []piece
	reads  int
}

type piece struct {
	b   []byte
	fds int
}

func (s *burst) read(p []byte) (n int, fds []int, dropped bool, err error) {
	s.reads++
	for n < len(p) && len(s.pieces) > 0 && fds == nil {
		x := &s.pieces[0]
		for range x.fds {
			fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
			if err != nil {
				return n, fds, false, err
			}
			fds = append(fds, fd)
		}
		x.fds = 0
		k := copy(p[n:], x.b)
		n += k
		if x.b = x.b[k:]; len(x.b) == 0 {
			s.pieces = s.pieces[1:]
		}
	}
	if n == 0 {
		return 0, nil, false, io.EOF
	}
	return n, fds, false, nil
}

// TestFramesTakesAhead: descriptors stay with the message that they came with, whatever came before it in
// the same read, and a message costs one read.
func TestFramesTakesAhead(t *testing.T) {
	plain, memory := rawFrame([]byte(`{"t":"open"}`), []byte{1, 2, 3, 4}), rawFrame([]byte(`{"t":"region_add"}`), nil)
	for _, c := range []struct {
		name   string
		pieces []piece
		fds    []int // of each message
		bad    int   // message whose descriptors are refused, or -1
	}{
		{"none", []piece{{plain, 0}, {plain, 0}, {plain, 0}}, []int{0, 0, 0}, -1},
		{"alone", []piece{{memory, 2}}, []int{2}, -1},
		{"behind another", []piece{{plain, 0}, {memory, 2}, {plain, 0}}, []int{0, 2, 0}, -1},
		{"two in a row", []piece{{memory, 2}, {memory, 2}}, []int{2, 2}, -1},
		{"with the first bytes", []piece{{plain, 0}, {memory[:3], 2}, {memory[3:], 0}, {plain, 0}}, []int{0, 2, 0}, -1},
		{"in the lengths, which is not told from the first byte", []piece{{plain, 0}, {memory[:3], 0}, {memory[3:], 2}, {plain, 0}}, []int{0, 2, 0}, -1},
		{"in the middle", []piece{{plain, 0}, {memory[:12], 0}, {memory[12:], 2}, {plain, 0}}, []int{0, 0, 0}, 1},
	} {
		src := &burst{pieces: c.pieces}
		f := frames{src: src}
		for i, want := range c.fds {
			m, err := f.next()
			if err != nil {
				t.Fatalf("%s: message %d: %v", c.name, i, err)
			}
			if len(m.fds) != want || (m.fdErr != nil) != (i == c.bad) {
				t.Errorf("%s: message %d has %d descriptors (%v), want %d", c.name, i, len(m.fds), m.fdErr, want)
			}
			closeAll(m.fds)
		}
		if _, err := f.next(); err != io.EOF {
			t.Errorf("%s: then %v", c.name, err)
		}
		f.drop()
		if c.name == "none" && src.reads != 1+len(c.fds)+1 {
			t.Errorf("%d messages took %d reads", len(c.fds), src.reads)
		}
	}
}

// TestFramesDropsWhatIsNotRead: the descriptors of a message that nobody reads are closed.
func TestFramesDropsWhatIsNotRead(t *testing.T) {
	f := frames{src: &burst{pieces: []piece{{rawFrame([]byte(`{"t":"open"}`), nil), 0}, {rawFrame([]byte(`{"t":"region_add"}`), nil), 2}}}}
	if _, err := f.next(); err != nil || len(f.coming.fds) != 2 {
		t.Fatalf("%v, %d descriptors ahead", err, len(f.coming.fds))
	}
	fd := f.coming.fds[0]
	f.drop()
	if err := unix.Close(fd); err != unix.EBADF {
		t.Errorf("the descriptor is open: %v", err)
	}
}

func FuzzHeader(f *testing.F) {
	for _, x := range append(buildVectors().Source, buildVectors().Destination...) {
		f.Add([]byte(x.Request.Header), []byte{1, 0, 0, 0})
	}
	f.Add([]byte(`{"t":"open","seq":1,"room":1e400}`), []byte{})
	for _, x := range plainHeaders {
		f.Add([]byte(x), []byte{})
	}
	for _, x := range otherHeaders {
		f.Add([]byte(x), []byte{})
	}
	f.Fuzz(func(t *testing.T, b, payload []byte) {
		checkQuick(t, b)
		h, fatal, e := parseHeader(b)
		if e != nil && fatal != (e.Code == BadFrame) {
			t.Fatalf("only what cannot be parsed ends a session: %v, fatal %v", e, fatal)
		}
		if e != nil {
			return
		}
		if h.Seq == 0 {
			t.Fatal("seq 0 was accepted")
		}
		// Whatever the numbers are, checking them neither panics nor lets a page outside the pool pass.
		ss := &session{pools: []*pool{{pages: 10, ready: true}}}
		parts, _, e := ss.parts(&h, payload)
		if e != nil {
			return
		}
		for _, p := range parts {
			for _, r := range p.Runs {
				if last := int64(r.Start) + int64(r.Count-1)*int64(r.Stride); r.Start < 0 || last > 9 {
					t.Fatalf("run %+v of a pool of 10 pages was accepted", r)
				}
			}
		}
		for i, ts := range h.Tensors {
			if checkTensor(i, ts, 5, 1<<20) == nil && ts.Offset+4*ts.PageStride+ts.PageBytes > 1<<20 {
				t.Fatalf("tensor %+v was accepted", ts)
			}
		}
	})
}
