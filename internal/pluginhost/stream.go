package pluginhost

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// stream is what Session and Control have in common.
type stream = grpc.BidiStreamingClient[contract.HostFrame, contract.PluginFrame]

// sizeKey is the context key of a stream's *int: the encoded size of the message that Recv returns next.
// gRPC knows it anyway; measuring a decoded frame again would cost as much as decoding it.
type sizeKey struct{}

// frameSizes is the gRPC stats handler that fills it in, on the goroutine that calls Recv.
type frameSizes struct{}

func (frameSizes) HandleRPC(ctx context.Context, s stats.RPCStats) {
	if in, ok := s.(*stats.InPayload); ok {
		if size, ok := ctx.Value(sizeKey{}).(*int); ok {
			*size = in.Length
		}
	}
}

func (frameSizes) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context   { return ctx }
func (frameSizes) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }
func (frameSizes) HandleConn(context.Context, stats.ConnStats)                       {}

// serve runs the two streams of an epoch that is up.
func (e *epoch) serve() {
	for i, name := range []string{"session", "control"} {
		s, q := e.streams[i], []*queue{e.session, e.control}[i]
		e.workers.Go(func() {
			if err := q.write(s.Send); err != nil {
				// The reader knows the reason: Send only says io.EOF.
				e.p.log.Debug("plugin stream takes no more", "stream", name, "epoch", e.n, "error", err)
			}
		})
		e.workers.Go(func() { e.read(name, s) })
	}
	e.workers.Go(e.heartbeat)
}

// read accepts frames until the stream ends.
func (e *epoch) read(name string, s stream) {
	size := s.Context().Value(sizeKey{}).(*int)
	for {
		frame, err := s.Recv()
		switch {
		case err == nil:
			if tap := e.p.h.cfg.Tap; tap != nil {
				tap(e.n, name == "control", frame)
			}
			e.receive(frame, *size, name == "control")
		case errors.Is(err, io.EOF):
			e.fail(symptom("the plugin ended its " + name + " stream"))
			return
		case status.Code(err) == codes.ResourceExhausted:
			e.violate(&contract.Fault{Rule: "frame", Field: "PluginFrame", Detail: status.Convert(err).Message()})
			return
		default:
			e.fail(symptom(fmt.Sprintf("%s stream: %v", name, err)))
			return
		}
	}
}

// receive checks a frame, takes out what is for the host, and hands on the rest.
func (e *epoch) receive(frame *contract.PluginFrame, size int, control bool) {
	if fault := checkFrame(frame, size, control); fault != nil {
		e.violate(fault)
		return
	}
	var gaveUp *contract.Fault
	unknown := uint64(0)
	rest := frame.Events[:0]
	for _, ev := range frame.Events {
		switch ev := ev.Event.(type) {
		case nil:
			unknown++
			continue
		case *contract.PluginEvent_Beat:
			e.mu.Lock()
			e.beat, e.busy = time.Now(), ev.Beat.Busy
			e.mu.Unlock()
			continue
		case *contract.PluginEvent_Log:
			e.log(ev.Log)
			continue
		case *contract.PluginEvent_Fault:
			gaveUp = ev.Fault
		}
		if gaveUp != nil {
			break
		}
		rest = append(rest, ev)
	}
	if unknown > 0 {
		e.p.count(&e.p.unknown, unknown)
	}
	clear(frame.Events[len(rest):])
	frame.Events = rest
	if len(rest) > 0 {
		e.deliverFrame(frame)
	}
	if gaveUp != nil {
		e.confess(gaveUp)
	}
}

func (e *epoch) deliverFrame(frame *contract.PluginFrame) {
	e.deliver.Lock()
	defer e.deliver.Unlock()
	if e.over.Load() {
		return
	}
	drained := false
	for _, ev := range frame.Events {
		drained = drained || ev.GetDrained() != nil
	}
	e.p.emit(Event{Kind: Frame, Epoch: e.n, Frame: frame})
	if drained {
		e.drainOnce.Do(func() { close(e.drained) })
	}
}

// beatEvery is the host's own beat (contract: every second).
const beatEvery = time.Second

// heartbeat sends the host's beats and watches the plugin's, until the epoch is lost.
func (e *epoch) heartbeat() {
	cfg := &e.p.h.cfg
	tick := min(max(cfg.BeatTimeout/20, 10*time.Millisecond), 250*time.Millisecond)
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	var seq uint64
	var sent time.Time
	last := time.Now()
	for {
		select {
		case <-e.lost:
			return
		case <-e.ctx.Done():
			return
		case <-ticker.C:
		}
		now := time.Now()
		pause := now.Sub(last) - tick
		last = now
		if now.Sub(sent) >= beatEvery {
			seq, sent = seq+1, now
			// A full queue needs no answer here: the plugin's beats tell.
			_ = e.control.push([]*contract.HostEvent{{Event: &contract.HostEvent_Beat{Beat: &contract.Beat{Seq: seq}}}})
		}
		e.mu.Lock()
		if pause > maxPause {
			e.beat = e.beat.Add(pause) // we stood still, not the plugin
		}
		age, bound := now.Sub(e.beat), cfg.BeatTimeout
		if len(e.busy) > 0 {
			bound = max(bound, cfg.BusyTimeout)
		}
		e.mu.Unlock()
		if age > bound {
			e.fail(fmt.Errorf("no beat for %s (bound %s)", age.Round(time.Millisecond), bound))
			return
		}
	}
}

// maxPause is how late a tick may be before the engine itself counts as having been paused.
const maxPause = 500 * time.Millisecond

// logLimit bounds what a plugin may write into the engine's log: 100 lines a second.
type logLimit struct {
	second  int64
	lines   int
	dropped int
}

const maxLogLines = 100

func (e *epoch) log(l *contract.Log) {
	level, ok := map[contract.Log_Level]slog.Level{
		contract.Log_LEVEL_DEBUG: slog.LevelDebug,
		contract.Log_LEVEL_INFO:  slog.LevelInfo,
		contract.Log_LEVEL_WARN:  slog.LevelWarn,
		contract.Log_LEVEL_ERROR: slog.LevelError,
	}[l.Level]
	ctx := context.Background()
	if !ok || !e.p.log.Enabled(ctx, level) {
		return
	}
	e.logMu.Lock()
	dropped, allowed := e.logged.allow(time.Now().Unix())
	e.logMu.Unlock()
	if dropped > 0 {
		e.p.log.Warn("plugin log lines dropped", "epoch", e.n, "lines", dropped)
	}
	if allowed {
		e.p.log.Log(ctx, level, l.Message, "epoch", e.n)
	}
}

// allow counts a line. At the first one of a new second it returns how many were dropped before.
func (l *logLimit) allow(second int64) (dropped int, ok bool) {
	if second != l.second {
		dropped = l.dropped
		*l = logLimit{second: second}
	}
	l.lines++
	if l.lines > maxLogLines {
		l.dropped++
		return dropped, false
	}
	return dropped, true
}
