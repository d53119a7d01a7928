package telemetry

import (
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"
)

// limited returns a logger with a clock that the test moves.
func limited() (*slog.Logger, *Limiter, *strings.Builder, *time.Time) {
	var out strings.Builder
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	h := slog.NewTextHandler(&out, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}})
	lim := NewLimiter(h, func() time.Time { return now })
	return slog.New(lim), lim, &out, &now
}

func TestLimiter(t *testing.T) {
	log, lim, out, now := limited()
	for i := range LogBurst + 5 {
		log.Warn("peer is slow", "i", i)
	}
	log.Error("peer is slow") // another level is another message
	if n := strings.Count(out.String(), "peer is slow"); n != LogBurst+1 {
		t.Errorf("%d lines", n)
	}
	if lim.Suppressed() != 5 {
		t.Errorf("suppressed %d", lim.Suppressed())
	}
	out.Reset()
	*now = now.Add(LogWindow)
	log.Warn("peer is slow")
	log.Warn("peer is slow")
	if got := out.String(); got != "level=WARN msg=\"peer is slow\" suppressed=5\nlevel=WARN msg=\"peer is slow\"\n" {
		t.Errorf("got %q", got)
	}
}

// TestLimiterReportsQuietMessages: a count is not lost when its message never comes again.
func TestLimiterReportsQuietMessages(t *testing.T) {
	log, lim, out, now := limited()
	for range LogBurst + 2 {
		log.Info("a")
	}
	out.Reset()
	*now = now.Add(2 * LogWindow)
	log.Info("b")
	if got := out.String(); got != "level=INFO msg=\"more of: a\" suppressed=2\nlevel=INFO msg=b\n" {
		t.Errorf("got %q", got)
	}
	for range LogBurst + 3 {
		log.Info("c")
	}
	out.Reset()
	lim.Flush()
	lim.Flush()
	if got := out.String(); got != "level=INFO msg=\"more of: c\" suppressed=4\n" && got != "level=INFO msg=\"more of: c\" suppressed=3\n" {
		t.Errorf("got %q", got)
	}
}

// TestLimiterIsBounded: messages that are all different neither fill memory nor lose counts.
func TestLimiterIsBounded(t *testing.T) {
	log, lim, out, _ := limited()
	for range LogBurst + 1 {
		log.Info("first")
	}
	for i := range 3 * maxKeys {
		log.Info(fmt.Sprint("message ", i))
	}
	if n := len(lim.state.keys); n > maxKeys {
		t.Errorf("%d keys", n)
	}
	if !strings.Contains(out.String(), "msg=\"more of: first\" suppressed=1") {
		t.Error("a count was lost")
	}
}

func TestLimiterShares(t *testing.T) {
	log, lim, out, _ := limited()
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			l := log.With("n", i).WithGroup("g")
			for range LogBurst {
				l.Info("same")
			}
		})
	}
	wg.Wait()
	if n := strings.Count(out.String(), "msg=same"); n != LogBurst || lim.Suppressed() != 3*LogBurst {
		t.Errorf("%d lines, %d suppressed", n, lim.Suppressed())
	}
}

func TestNewLogger(t *testing.T) {
	var out strings.Builder
	log, _, err := NewLogger(&out, "warn", "json")
	if err != nil {
		t.Fatal(err)
	}
	log.Info("no")
	log.Warn("yes", "room", int64(7))
	if got := out.String(); strings.Contains(got, "no\"") || !strings.Contains(got, `"msg":"yes","room":7`) {
		t.Errorf("got %q", got)
	}
	for _, bad := range [][2]string{{"loud", "text"}, {"info", "xml"}} {
		if _, _, err := NewLogger(&out, bad[0], bad[1]); err == nil {
			t.Errorf("%v was accepted", bad)
		}
	}
}
