package pluginhost

import (
	"bytes"
	"io"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

func TestCheckFrame(t *testing.T) {
	beat := &contract.PluginEvent{Event: &contract.PluginEvent_Beat{Beat: &contract.Beat{Seq: 1}}}
	for _, c := range []struct {
		name    string
		event   *contract.PluginEvent
		control bool
		field   string
	}{
		{"done", &contract.PluginEvent{Event: &contract.PluginEvent_Done{Done: &contract.Done{Lane: contract.Lane_LANE_TCP}}}, false, ""},
		{"done without lane", &contract.PluginEvent{Event: &contract.PluginEvent_Done{Done: &contract.Done{}}}, false, "Done.lane"},
		{"done by any lane", &contract.PluginEvent{Event: &contract.PluginEvent_Done{Done: &contract.Done{Lane: contract.Lane_LANE_ANY}}}, false, "Done.lane"},
		{"skipped", &contract.PluginEvent{Event: &contract.PluginEvent_Skipped{Skipped: &contract.Skipped{}}}, false, "Skipped.cause"},
		{"peer ready", &contract.PluginEvent{Event: &contract.PluginEvent_PeerReady{PeerReady: &contract.PeerReady{}}}, false, "PeerReady.lane"},
		{"fenced", &contract.PluginEvent{Event: &contract.PluginEvent_Fenced{Fenced: &contract.Fenced{}}}, false, "Fenced.result"},
		{"log", &contract.PluginEvent{Event: &contract.PluginEvent_Log{Log: &contract.Log{Message: "x"}}}, false, "Log.level"},
		{"beat", beat, true, ""},
		{"beat on session", beat, false, ""},
		{"busy", &contract.PluginEvent{Event: &contract.PluginEvent_Beat{Beat: &contract.Beat{Busy: []*contract.Busy{{Kind: 1}, {}}}}}, true, "Beat.busy[1].kind"},
		{"accepted on control", &contract.PluginEvent{Event: &contract.PluginEvent_Accepted{Accepted: &contract.Accepted{}}}, true, "Accepted"},
		{"stats", &contract.PluginEvent{Event: &contract.PluginEvent_Stats{Stats: &contract.Stats{Counters: map[string]uint64{"a": 1}}}}, false, ""},
		{"unknown", &contract.PluginEvent{}, false, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := checkFrame(frame(beat, c.event), 100, c.control).GetField(); got != c.field {
				t.Errorf("violation in %q, want %q", got, c.field)
			}
		})
	}
}

// FuzzFrame: whatever a plugin sends is a violation or has only defined enums.
func FuzzFrame(f *testing.F) {
	for _, ev := range []*contract.PluginEvent{
		{Event: &contract.PluginEvent_Done{Done: &contract.Done{Op: 1, Lane: contract.Lane_LANE_TCP, Quiet: true}}},
		{Event: &contract.PluginEvent_Failed{Failed: &contract.Failed{Op: 1}}},
		{Event: &contract.PluginEvent_Beat{Beat: &contract.Beat{Busy: []*contract.Busy{{Kind: 1}}}}},
		{Event: &contract.PluginEvent_Diagnosis{Diagnosis: &contract.Diagnosis{AbsentRanks: []uint32{1}}}},
	} {
		b, err := proto.Marshal(frame(ev))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b, true)
		f.Add(b, false)
	}
	f.Fuzz(func(t *testing.T, b []byte, control bool) {
		var got contract.PluginFrame
		if proto.Unmarshal(b, &got) != nil || checkFrame(&got, len(b), control) != nil {
			return
		}
		for _, ev := range got.Events {
			if failed := ev.GetFailed(); failed != nil && contract.Cause_name[int32(failed.Cause)] == "" || failed != nil && failed.Cause == 0 {
				t.Errorf("passed: %v", ev)
			}
			if control && ev.Event != nil && ev.GetBeat() == nil {
				t.Errorf("passed on control: %v", ev)
			}
		}
	})
}

// FuzzDrain: no output of a plugin stops the reader or outgrows the tail.
func FuzzDrain(f *testing.F) {
	f.Add([]byte("1|1|unix|/x|grpc\nhello"), 10)
	f.Add([]byte("\r\n\n\xff\xfe"), 1)
	f.Add(bytes.Repeat([]byte("a"), 3*maxLine+7), 4096)
	f.Fuzz(func(t *testing.T, b []byte, keep int) {
		last := tail{max: 1 + max(0, keep)%10000}
		read := 0
		drain(bytes.NewReader(b), func(text []byte, complete bool) {
			if len(text) > maxLine {
				t.Errorf("piece of %d bytes", len(text))
			}
			read += len(text)
			last.Write(text)
			if complete {
				last.Write([]byte{'\n'})
			}
		})
		if n := len(last.buf); n > last.max {
			t.Errorf("tail holds %d bytes of %d", n, last.max)
		}
		if endings := 2 * (1 + bytes.Count(b, []byte{'\n'})); read > len(b) || read < len(b)-endings {
			t.Errorf("read %d of %d bytes", read, len(b))
		}
	})
}

func TestTail(t *testing.T) {
	last := tail{max: 8}
	for _, c := range []struct{ write, want string }{
		{"abc\n", "abc"},
		{"defg", "abc\ndefg"},
		{"h", "…bc\ndefgh"},
		{"0123456789\n", "…3456789"},
	} {
		io.WriteString(&last, c.write)
		if got := last.String(); got != c.want {
			t.Errorf("after %q: %q, want %q", c.write, got, c.want)
		}
	}
	if got := quote(strings.Repeat("a", 2000)); len(got) > 1010 {
		t.Errorf("quote has %d bytes", len(got))
	}
}

func TestBudget(t *testing.T) {
	cfg := Config{BackoffMin: 100 * time.Millisecond, BackoffMax: 300 * time.Millisecond, RestartBudget: 3, RestartWindow: time.Minute}
	b := budget{cfg: &cfg}
	now := time.Unix(1000, 0)
	for i, want := range []time.Duration{100, 200, 300} {
		if d, ok := b.next(now); !ok || d != want*time.Millisecond {
			t.Errorf("restart %d: %s, %v", i, d, ok)
		}
		now = now.Add(10 * time.Second)
	}
	if _, ok := b.next(now); ok {
		t.Error("a fourth restart within the window")
	}
	if d, ok := b.next(now.Add(31 * time.Second)); !ok || d != cfg.BackoffMax {
		t.Errorf("after the first left the window: %s, %v", d, ok)
	}
	b.reset()
	if d, ok := b.next(now); !ok || d != cfg.BackoffMin {
		t.Errorf("after reset: %s, %v", d, ok)
	}
}

func TestLogLimit(t *testing.T) {
	var l logLimit
	for i := range 2 * maxLogLines {
		if dropped, ok := l.allow(1); ok != (i < maxLogLines) || dropped != 0 {
			t.Fatalf("line %d: %d, %v", i, dropped, ok)
		}
	}
	if dropped, ok := l.allow(2); !ok || dropped != maxLogLines {
		t.Errorf("next second: %d, %v", dropped, ok)
	}
}

func BenchmarkCheckFrame(b *testing.B) {
	var f contract.PluginFrame
	for op := range uint64(32) {
		f.Events = append(f.Events,
			&contract.PluginEvent{Event: &contract.PluginEvent_Accepted{Accepted: &contract.Accepted{Op: op}}},
			&contract.PluginEvent{Event: &contract.PluginEvent_Done{Done: &contract.Done{Op: op, Quiet: true, Lane: contract.Lane_LANE_SHM}}})
	}
	b.ReportAllocs()
	for b.Loop() {
		if checkFrame(&f, 1000, false) != nil {
			b.Fatal("violation")
		}
	}
}
