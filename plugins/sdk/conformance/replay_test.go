package conformance

import (
	"bytes"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// conversation is a trace in words: "> submit 7 4096", "< accepted 7", "< progress 7 100", "< done 7 4096",
// "< failed 7 loud" (quiet=false), "< quiesced 7", "gap", "lost".
func conversation(t *testing.T, steps ...string) (entries []Entry) {
	t.Helper()
	for _, s := range steps {
		var dir, what, flag string
		var op, n uint64
		fmt.Sscanf(s, "%s %s %d %s", &dir, &what, &op, &flag)
		fmt.Sscanf(flag, "%d", &n)
		var m proto.Message
		switch what {
		case "submit":
			m = &contract.HostEvent{Event: &contract.HostEvent_Submit{Submit: &contract.Submit{Op: op, Bytes: n}}}
		case "accepted":
			m = &contract.PluginEvent{Event: &contract.PluginEvent_Accepted{Accepted: &contract.Accepted{Op: op}}}
		case "progress":
			m = &contract.PluginEvent{Event: &contract.PluginEvent_Progress{Progress: &contract.Progress{Op: op, Bytes: n}}}
		case "done":
			m = &contract.PluginEvent{Event: &contract.PluginEvent_Done{Done: &contract.Done{Op: op, Bytes: n, Quiet: true}}}
		case "failed":
			m = &contract.PluginEvent{Event: &contract.PluginEvent_Failed{Failed: &contract.Failed{Op: op, Quiet: flag != "loud"}}}
		case "quiesced":
			m = &contract.PluginEvent{Event: &contract.PluginEvent_Quiesced{Quiesced: &contract.Quiesced{Op: op}}}
		case "ready":
			m = &contract.PluginEvent{Event: &contract.PluginEvent_RegionReady{RegionReady: &contract.RegionReady{Region: op}}}
		case "":
			if s == "gap" {
				entries = append(entries, Entry{Node: "A", Text: "(3 events left out)"})
				continue
			}
			dir, m = "<", &contract.Fault{Rule: "-", Detail: "the plugin is lost"}
		}
		wire, err := proto.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		entries = append(entries, Entry{Node: "A", ToHost: dir == "<", Text: Describe(m), Wire: wire})
	}
	return entries
}

func TestReplay(t *testing.T) {
	for _, c := range []struct {
		name  string
		steps []string
		want  string // "rule entry" of each breach
		loose int
	}{
		{"sound", []string{"< ready 1", "> submit 7 10", "< accepted 7", "< progress 7 4", "< done 7 10"}, "", 0},
		{"quiesced", []string{"> submit 7 10", "< accepted 7", "< failed 7 loud", "< quiesced 7"}, "", 0},
		{"no accepted", []string{"> submit 7 10", "< done 7 10"}, "R8 1 R1 -1", 0},
		{"two ends", []string{"> submit 7 10", "< accepted 7", "< done 7 10", "< failed 7"}, "R1 3", 0},
		{"progress after the end", []string{"> submit 7 10", "< accepted 7", "< done 7 10", "< progress 7 10"}, "R8 3", 0},
		{"progress beyond the size", []string{"> submit 7 10", "< accepted 7", "< progress 7 11", "< done 7 10"}, "R9 2", 0},
		{"wrong bytes", []string{"> submit 7 10", "< accepted 7", "< done 7 9"}, "R1 2", 0},
		{"quiesced twice", []string{"> submit 7 10", "< accepted 7", "< failed 7 loud", "< quiesced 7", "< quiesced 7"}, "R4 4", 0},
		{"unknown op", []string{"< accepted 9"}, "R8 0", 0},
		{"never ended", []string{"> submit 7 10", "< accepted 7"}, "R1 -1", 0},
		{"never quiet", []string{"> submit 7 10", "< accepted 7", "< failed 7 loud"}, "R4 -1", 0},
		{"lost", []string{"> submit 7 10", "< accepted 7", "lost"}, "", 0},
		{"a gap", []string{"> submit 7 10", "gap", "< accepted 9", "< done 9 1", "< accepted 7"}, "", 2},
		{"a gap hides no breach of what is there", []string{"gap", "> submit 7 10", "< accepted 7", "< accepted 7"}, "R8 3", 0},
	} {
		breaches, unjudged, err := Replay(conversation(t, c.steps...))
		var got []string
		for _, b := range breaches {
			got = append(got, fmt.Sprintf("%s %d", b.Rule, b.Entry))
		}
		if err != nil || strings.Join(got, " ") != c.want || unjudged != c.loose {
			t.Errorf("%s: breaches %v, unjudged %d, error %v; want %q, %d", c.name, breaches, unjudged, err, c.want, c.loose)
		}
	}
	broken := conversation(t, "< accepted 7")
	broken[0].Wire = []byte{0xff}
	if _, _, err := Replay(broken); !errors.Is(err, ErrTrace) || !strings.Contains(err.Error(), "event 1") {
		t.Errorf("broken wire: %v", err)
	}
}

// TestTraceFile: what is written is read back; a broken file is an error that names the line.
func TestTraceFile(t *testing.T) {
	trace := Trace{TraceHeader{"a/b", "R1", Failed, "exec:p", 1, 9}, conversation(t, "> submit 7 10", "< accepted 7")}
	trace.Entries[1].Mark = "R8: late"
	var b bytes.Buffer
	if err := WriteTrace(&b, trace); err != nil {
		t.Fatal(err)
	}
	whole := b.String()
	got, err := ReadTrace(strings.NewReader(whole))
	if err != nil || fmt.Sprint(*got) != fmt.Sprint(trace) {
		t.Errorf("got %v %v\nwant %v", got, err, trace)
	}
	for _, c := range []struct{ name, text, says string }{
		{"empty", "", "it is empty"},
		{"no header", strings.SplitAfterN(whole, "\n", 2)[1], "line 1"},
		{"not JSON", strings.Replace(whole, `"node"`, `node`, 1), "line 2"},
		{"bad direction", strings.Replace(whole, `"dir":">"`, `"dir":"-"`, 1), "line 2: dir"},
		{"no event", strings.SplitAfterN(whole, "\n", 2)[0], "no event"},
		{"wire that is none", regexp.MustCompile(`"wire":"[^"]*"`).ReplaceAllString(whole, `"wire":"/w=="`), "line 2: wire of"},
		{"time that runs back", strings.Replace(whole, `"ms":0`, `"ms":5.5`, 1), "line 3: ms: it runs back, from 5.5ms to 0s"},
		{"time before the start", strings.Replace(whole, `"ms":0`, `"ms":-1`, 1), "line 2: ms"},
		{"time beyond a Duration", strings.Replace(whole, `"ms":0`, `"ms":1e300`, 1), "line 2: ms"},
		{"cut", whole[:len(whole)-20], "line 3"},
		{"endless line", whole + strings.Repeat("x", maxTraceLine+1), "after line 3"},
	} {
		if _, err := ReadTrace(strings.NewReader(c.text)); !errors.Is(err, ErrTrace) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want %q", c.name, err, c.says)
		}
	}
}

// TestTraceTextIsOfTheWire: a trace whose texts were edited showed one conversation and judged another.
func TestTraceTextIsOfTheWire(t *testing.T) {
	var b bytes.Buffer
	if err := WriteTrace(&b, Trace{TraceHeader{Case: "a/b"}, conversation(t, "> submit 7 10", "< failed 7", "lost", "gap")}); err != nil {
		t.Fatal(err)
	}
	edited := strings.NewReplacer("Failed(", "Done(", "lost", "well").Replace(b.String())
	got, err := ReadTrace(strings.NewReader(edited))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"Submit(op=7 bytes=10)", "Failed(op=7 quiet=true)", `Fault(rule="-" detail="the plugin is lost")`, "(3 events left out)"}
	for i, w := range want {
		if text := got.Entries[i].Text; text != w {
			t.Errorf("event %d: %s, want %s", i+1, text, w)
		}
	}
}
