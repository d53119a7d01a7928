package sdk

import (
	"fmt"
	"runtime"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

const (
	// outboxHigh is the backlog of events at which the session stops reading new host frames (aborts
	// and beats still pass). It only fills when the host does not read.
	outboxHigh = 16384
	// outboxLogs is how many log events may wait; further ones are dropped and counted.
	outboxLogs = 256
	// logsPerSecond bounds the log events of one second.
	logsPerSecond = 100
	// frameEvents and frameBytes bound one PluginFrame.
	frameEvents = 1024
	frameBytes  = MaxFrame / 2
)

// outEvent is one event to send. progress, when set, stands for a Progress of that op, whose value is
// read when the frame is built: so an op has at most one waiting Progress.
type outEvent struct {
	event    *contract.PluginEvent
	progress *opState
	size     int
}

// outbox holds events in order until the writer takes them. Guarded by Session.mu. Nothing in it is
// ever dropped except logs: its size is bounded by the ops that the session admits, each of which has
// at most one Accepted, one waiting Progress, one end and one Quiesced.
type outbox struct {
	events []outEvent
	spare  []outEvent // the writer's, given back empty
	logs   int        // waiting
	second time.Time  // when the count of logged began
	logged int
	wake   chan struct{} // 1: there is something to send
	room   chan struct{} // 1: the backlog fell below outboxHigh
}

func newOutbox() outbox {
	return outbox{wake: make(chan struct{}, 1), room: make(chan struct{}, 1)}
}

// notify leaves one token in c.
func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

func (o *outbox) put(e outEvent) {
	o.events = append(o.events, e)
	notify(o.wake)
}

func (o *outbox) full() bool { return len(o.events) >= outboxHigh }

// take gives all waiting events to the writer.
func (o *outbox) take() []outEvent {
	taken := o.events
	o.events = o.spare[:0]
	o.spare = nil
	o.logs = 0
	if len(taken) >= outboxHigh {
		notify(o.room)
	}
	return taken
}

// emit queues an event. The caller holds s.mu.
func (s *Session) emit(e *contract.PluginEvent, size int) {
	s.out.put(outEvent{event: e, size: size + 32})
}

// post queues an event; for callers that do not hold s.mu.
func (s *Session) post(e *contract.PluginEvent, size int) {
	s.mu.Lock()
	s.emit(e, size)
	s.mu.Unlock()
}

// logf sends a log line to the host. Lines beyond logsPerSecond, or faster than the host reads, are
// dropped and counted (sdk.logs_dropped in Stats).
func (s *Session) logf(level contract.Log_Level, format string, args ...any) {
	if !known(contract.Log_Level_name, int32(level)) {
		level = contract.Log_LEVEL_INFO
	}
	message := cut(fmt.Sprintf(format, args...), 4096)
	s.mu.Lock()
	defer s.mu.Unlock()
	if now := time.Now(); now.Sub(s.out.second) >= time.Second {
		s.out.second, s.out.logged = now, 0
	}
	if s.out.logged++; s.out.logs >= outboxLogs || s.out.logged > logsPerSecond {
		s.counts["logs_dropped"]++
		return
	}
	s.out.logs++
	s.emit(&contract.PluginEvent{Event: &contract.PluginEvent_Log{Log: &contract.Log{Level: level, Message: message}}}, len(message))
}

// write sends what the outbox holds, then looks again, until the session is over and the outbox empty
// or the stream breaks.
func (s *Session) write(stream Stream) error {
	frame := &contract.PluginFrame{}
	for {
		runtime.Gosched() // whoever can run may have more to say: an op's end goes with its Accepted
		s.mu.Lock()
		batch := s.out.take()
		s.mu.Unlock()
		for i := 0; i < len(batch); {
			frame.Events = frame.Events[:0]
			for size := 0; i < len(batch) && len(frame.Events) < frameEvents && size < frameBytes; i++ {
				e := batch[i].event
				if st := batch[i].progress; st != nil {
					e = s.progressEvent(st)
				}
				frame.Events = append(frame.Events, e)
				size += batch[i].size
			}
			if err := stream.Send(frame); err != nil {
				return fmt.Errorf("send to the host: %w", err)
			}
			frame = &contract.PluginFrame{Events: make([]*contract.PluginEvent, 0, len(frame.Events))}
		}
		clear(batch)
		s.mu.Lock()
		s.out.spare = batch[:0]
		empty := len(s.out.events) == 0
		s.mu.Unlock()
		if !empty {
			continue
		}
		select {
		case <-s.out.wake:
		case <-s.over:
			s.mu.Lock()
			empty = len(s.out.events) == 0
			s.mu.Unlock()
			if empty {
				return nil
			}
		}
	}
}

// cut shortens text to at most n bytes, at a rune boundary, so that it stays valid UTF-8.
func cut(text string, n int) string {
	text = validUTF8(text)
	if len(text) <= n {
		return text
	}
	for n > 0 && text[n]&0xC0 == 0x80 {
		n--
	}
	return text[:n]
}
