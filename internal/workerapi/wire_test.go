package workerapi

import (
	"bytes"
	"errors"
	"io"
	"testing"
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

func FuzzHeader(f *testing.F) {
	for _, x := range append(buildVectors().Source, buildVectors().Destination...) {
		f.Add([]byte(x.Request.Header), []byte{1, 0, 0, 0})
	}
	f.Add([]byte(`{"t":"open","seq":1,"room":1e400}`), []byte{})
	f.Fuzz(func(t *testing.T, b, payload []byte) {
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
