package wasmhost

import (
	"bytes"
	"strings"
	"sync"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// maxLine is the longest line of a guest that is logged.
const maxLine = 4096

// output takes what the guest's runtime writes to standard output and error: each line goes to the log, and the
// one by which the runtime of a language says why it gives up stays for the cause of the trap.
type output struct {
	mu   sync.Mutex
	line []byte
	last string // panic or fatal error, the first
	logf func(level contract.Log_Level, format string, args ...any)
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for rest := b; len(rest) > 0; {
		line, after, ended := bytes.Cut(rest, []byte("\n"))
		o.line = append(o.line, line[:min(len(line), maxLine-len(o.line))]...)
		rest = after
		if ended {
			o.flush()
		}
	}
	return len(b), nil
}

// flush ends a line. o.mu is held.
func (o *output) flush() {
	text := strings.TrimSpace(strings.ToValidUTF8(string(o.line), "\uFFFD"))
	o.line = o.line[:0]
	if text == "" {
		return
	}
	if o.last == "" && (strings.HasPrefix(text, "panic: ") || strings.HasPrefix(text, "fatal error: ")) {
		o.last = text
	}
	if o.logf != nil {
		o.logf(contract.Log_LEVEL_WARN, "%s", text)
	}
}

// lastWords is what the runtime of the guest's language said before it gave up, or "".
func (o *output) lastWords() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.flush()
	if o.last == "" {
		return ""
	}
	return ": " + o.last
}

func (o *output) setLog(logf func(level contract.Log_Level, format string, args ...any)) {
	o.mu.Lock()
	o.logf = logf
	o.mu.Unlock()
}
