package tcp

import "io"

// intake buffers what comes in on a connection, so that one call of the kernel brings several frames and a
// frame is looked at as a whole. Over TCP it is the private buffer of the slices.
type intake struct {
	r    io.Reader
	buf  []byte
	from int // buf[from:to] is not taken yet
	to   int
}

func newIntake(r io.Reader, size int) *intake { return &intake{r: r, buf: make([]byte, size)} }

// buffered returns how many bytes are here.
func (k *intake) buffered() int { return k.to - k.from }

// peek returns the next n bytes, at most the size of the buffer, and waits until they are here. They are
// valid until the next call.
func (k *intake) peek(n int) ([]byte, error) {
	if k.from == k.to {
		k.from, k.to = 0, 0 // the start of the buffer is in the processor's cache
	}
	if len(k.buf)-k.from < n {
		k.to = copy(k.buf, k.buf[k.from:k.to])
		k.from = 0
	}
	for k.to-k.from < n {
		m, err := k.r.Read(k.buf[k.to:])
		k.to += m
		if err != nil && k.to-k.from < n {
			return nil, err
		}
	}
	return k.buf[k.from : k.from+n], nil
}

// skip takes n bytes that peek has shown.
func (k *intake) skip(n int) { k.from += n }
