// Package tail keeps the end of what a child process wrote, for an error that says how it ended.
package tail

import (
	"bytes"
	"sync"
)

// Bytes is how much is kept at least.
const Bytes = 4 << 10

// Writer is where a process writes to. Its zero value is empty.
type Writer struct {
	mu   sync.Mutex
	text []byte
}

// Write keeps at least the last Bytes.
func (w *Writer) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.text = append(w.text, b...); len(w.text) > 2*Bytes {
		w.text = append(w.text[:0], w.text[len(w.text)-Bytes:]...)
	}
	return len(b), nil
}

// String is what is kept, without space around it.
func (w *Writer) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return string(bytes.TrimSpace(w.text))
}
