package tail

import (
	"strings"
	"testing"
)

func TestWriterKeepsTheEnd(t *testing.T) {
	var w Writer
	if w.String() != "" {
		t.Errorf("nothing was written: %q", w.String())
	}
	for range 3 * Bytes {
		if n, err := w.Write([]byte("a\n")); n != 2 || err != nil {
			t.Fatal(n, err)
		}
	}
	w.Write([]byte("the end\n"))
	if s := w.String(); !strings.HasSuffix(s, "a\nthe end") || len(s) < Bytes || len(s) > 2*Bytes {
		t.Errorf("%d bytes are kept, which end with %q", len(s), s[max(0, len(s)-20):])
	}
}
