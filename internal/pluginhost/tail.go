package pluginhost

import (
	"bufio"
	"bytes"
	"io"
	"strings"
	"sync"
)

// tail keeps the last bytes of an output. It is an io.Writer.
type tail struct {
	max int

	mu    sync.Mutex
	buf   []byte
	cut   bool
	total uint64
}

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := len(b)
	t.total += uint64(n)
	if over := len(t.buf) + n - t.max; over > 0 {
		t.cut = true
		if over >= len(t.buf) {
			t.buf, b = t.buf[:0], b[max(0, n-t.max):]
		} else {
			t.buf = append(t.buf[:0], t.buf[over:]...)
		}
	}
	t.buf = append(t.buf, b...)
	return n, nil
}

// String returns what is kept, without the trailing newline; "…" stands for what was dropped.
func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := strings.ToValidUTF8(strings.TrimRight(string(t.buf), "\n"), "\uFFFD")
	if t.cut {
		return "…" + s
	}
	return s
}

// written returns how many bytes there were in all.
func (t *tail) written() uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.total
}

// maxLine is where a longer line is broken up.
const maxLine = 4096

// drain reads r to its end, in pieces of a line or at most maxLine bytes, so that the writer never
// blocks, whatever it writes. A piece has no newline; complete says whether one followed.
func drain(r io.Reader, piece func(text []byte, complete bool)) {
	br := bufio.NewReaderSize(r, maxLine)
	for {
		text, err := br.ReadSlice('\n')
		text, complete := bytes.CutSuffix(text, []byte("\n"))
		if complete {
			piece(bytes.TrimSuffix(text, []byte("\r")), true)
		} else if len(text) > 0 {
			piece(text, false)
		}
		if err != nil && err != bufio.ErrBufferFull {
			return
		}
	}
}
