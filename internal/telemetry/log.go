package telemetry

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"
)

// Limits of the log: of one message (level and text; attributes do not count) Burst records are written in
// a Window; the rest is counted, and the count is written with the next record of the message or, at
// the latest, when the next record of any message comes after the window. Nothing is ever "once".
const (
	LogBurst  = 10
	LogWindow = 10 * time.Second
	maxKeys   = 1024
)

// NewLogger returns the engine's logger. level and format are those of config.Log.
func NewLogger(w io.Writer, level, format string) (*slog.Logger, *Limiter, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, nil, fmt.Errorf("log level %q: %w", level, err)
	}
	o := &slog.HandlerOptions{Level: l}
	var h slog.Handler
	switch format {
	case "text":
		h = slog.NewTextHandler(w, o)
	case "json":
		h = slog.NewJSONHandler(w, o)
	default:
		return nil, nil, fmt.Errorf("log format %q: want text or json", format)
	}
	lim := NewLimiter(h, time.Now)
	return slog.New(lim), lim, nil
}

// Limiter is a slog.Handler that bounds how often the same message is written. Handlers made by
// WithAttrs and WithGroup share its counts.
type Limiter struct {
	next  slog.Handler
	state *limiterState
}

type limiterState struct {
	now        func() time.Time
	root       slog.Handler
	suppressed atomic.Uint64

	mu    sync.Mutex
	keys  map[logKey]*window
	swept time.Time
}

type logKey struct {
	level slog.Level
	msg   string
}

type window struct {
	start   time.Time
	written int
	left    uint64 // suppressed since the last record that was written
}

// NewLimiter wraps a handler; now is the clock.
func NewLimiter(next slog.Handler, now func() time.Time) *Limiter {
	return &Limiter{next, &limiterState{now: now, root: next, keys: map[logKey]*window{}, swept: now()}}
}

// Suppressed counts the records that were left out.
func (l *Limiter) Suppressed() uint64 { return l.state.suppressed.Load() }

// Enabled implements slog.Handler.
func (l *Limiter) Enabled(ctx context.Context, level slog.Level) bool {
	return l.next.Enabled(ctx, level)
}

// WithAttrs implements slog.Handler.
func (l *Limiter) WithAttrs(as []slog.Attr) slog.Handler {
	return &Limiter{l.next.WithAttrs(as), l.state}
}

// WithGroup implements slog.Handler.
func (l *Limiter) WithGroup(name string) slog.Handler {
	return &Limiter{l.next.WithGroup(name), l.state}
}

// Handle implements slog.Handler.
func (l *Limiter) Handle(ctx context.Context, r slog.Record) error {
	write, left, overdue := l.state.count(logKey{r.Level, r.Message})
	l.state.report(ctx, overdue)
	if !write {
		return nil
	}
	if left > 0 {
		r = r.Clone()
		r.AddAttrs(slog.Uint64("suppressed", left))
	}
	return l.next.Handle(ctx, r)
}

// Flush writes the counts that no record has carried yet. The engine calls it before it exits.
func (l *Limiter) Flush() {
	s := l.state
	s.mu.Lock()
	overdue := s.take(func(*window) bool { return true })
	s.mu.Unlock()
	s.report(context.Background(), overdue)
}

// summary is a count that no record of its message carried within the window.
type summary struct {
	logKey
	left uint64
}

func (s *limiterState) report(ctx context.Context, sums []summary) {
	for _, sum := range sums {
		r := slog.NewRecord(s.now(), sum.level, "more of: "+sum.msg, 0)
		r.AddAttrs(slog.Uint64("suppressed", sum.left))
		_ = s.root.Handle(ctx, r) // where would a failing log be reported
	}
}

// count decides about one record. overdue are counts of other messages whose window is over.
func (s *limiterState) count(k logKey) (write bool, left uint64, overdue []summary) {
	now := s.now()
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.keys[k]
	if w == nil {
		w = &window{start: now}
		if len(s.keys) >= maxKeys {
			overdue = s.take(func(*window) bool { return true })
		}
		s.keys[k] = w
	}
	if now.Sub(w.start) >= LogWindow {
		w.start, w.written = now, 0
	}
	if w.written < LogBurst {
		w.written++
		left, w.left = w.left, 0
		write = true
	} else {
		w.left++
		s.suppressed.Add(1)
	}
	if now.Sub(s.swept) >= LogWindow {
		s.swept = now
		overdue = append(overdue, s.take(func(w *window) bool { return now.Sub(w.start) >= LogWindow })...)
	}
	return write, left, overdue
}

// take forgets the windows that match and returns their counts. The caller holds mu.
func (s *limiterState) take(match func(*window) bool) (sums []summary) {
	for k, w := range s.keys {
		if match(w) {
			if w.left > 0 {
				sums = append(sums, summary{k, w.left})
			}
			delete(s.keys, k)
		}
	}
	return sums
}
