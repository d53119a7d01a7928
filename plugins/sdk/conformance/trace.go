package conformance

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// Entry is one event of a conversation.
type Entry struct {
	At      time.Duration // since the case began
	Node    string        // "A", "B" …
	ToHost  bool
	Control bool
	Text    string // one line, see Describe
	Mark    string // what is wrong with it, "" for nothing
	Wire    []byte // the encoded event
}

type entryJSON struct {
	Ms      float64 `json:"ms"`
	Node    string  `json:"node"`
	Dir     string  `json:"dir"` // ">" to the plugin, "<" from it
	Stream  string  `json:"stream"`
	Text    string  `json:"text"`
	Mark    string  `json:"mark,omitempty"`
	WireB64 string  `json:"wire,omitempty"`
}

// MarshalJSON writes one line of a trace file.
func (e Entry) MarshalJSON() ([]byte, error) {
	j := entryJSON{Ms: float64(e.At.Microseconds()) / 1000, Node: e.Node, Dir: ">", Stream: "session", Text: e.Text, Mark: e.Mark,
		WireB64: base64.StdEncoding.EncodeToString(e.Wire)}
	if e.ToHost {
		j.Dir = "<"
	}
	if e.Control {
		j.Stream = "control"
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false) // ">" is to be read
	err := enc.Encode(j)
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), err
}

// UnmarshalJSON reads one line of a trace file.
func (e *Entry) UnmarshalJSON(b []byte) error {
	var j entryJSON
	if err := json.Unmarshal(b, &j); err != nil {
		return err
	}
	wire, err := base64.StdEncoding.DecodeString(j.WireB64)
	if err != nil {
		return fmt.Errorf("wire: %w", err)
	}
	if j.Dir != ">" && j.Dir != "<" {
		return fmt.Errorf("dir: %q, want \">\" or \"<\"", j.Dir)
	}
	if math.IsNaN(j.Ms) || j.Ms < 0 || j.Ms > maxMs {
		return fmt.Errorf("ms: %g, want 0 to %g", j.Ms, float64(maxMs))
	}
	*e = Entry{At: time.Duration(math.Round(j.Ms*1000)) * time.Microsecond, Node: j.Node, ToHost: j.Dir == "<", Control: j.Stream == "control",
		Text: j.Text, Mark: j.Mark, Wire: wire}
	m, err := e.event()
	if err != nil {
		return err
	}
	if m != nil {
		e.Text = Describe(m) // the text is for people; wire is what came
	}
	return nil
}

// maxMs is a year: more than a case can take, less than a Duration can hold.
const maxMs = 366 * 24 * 3600 * 1000

// event decodes the entry: a HostEvent, a PluginEvent, or the Fault by which the suite notes that the plugin is
// lost. nil when there is nothing to decode: a gap, an event that was too large, or one without fields.
func (e *Entry) event() (proto.Message, error) {
	if len(e.Wire) == 0 {
		return nil, nil
	}
	var m proto.Message = &contract.HostEvent{}
	if e.ToHost {
		var lost contract.Fault // no PluginEvent decodes to it
		if proto.Unmarshal(e.Wire, &lost) == nil && lost.Rule == "-" {
			return &lost, nil
		}
		m = &contract.PluginEvent{}
	}
	if err := proto.Unmarshal(e.Wire, m); err != nil {
		return nil, fmt.Errorf("wire of %s: %w", e.Text, err)
	}
	return m, nil
}

// String is the entry as a failure shows it.
func (e Entry) String() string {
	dir, stream, mark := ">", "", ""
	if e.ToHost {
		dir = "<"
	}
	if e.Control {
		stream = "control "
	}
	if e.Mark != "" {
		mark = "   <== " + e.Mark
	}
	return fmt.Sprintf("%9.3f ms  %s %s %s%s%s", float64(e.At.Microseconds())/1000, e.Node, dir, stream, e.Text, mark)
}

// traceMax bounds what a case keeps: the first and the last half of it.
const traceMax = 4096

// recorder collects the entries of a case.
type recorder struct {
	mu      sync.Mutex
	began   time.Time
	head    []Entry
	tail    []Entry // a ring once it is full
	next    int
	dropped int
}

// add records an event and returns how to mark it later.
func (r *recorder) add(node string, toHost, control bool, m proto.Message) (mark func(string)) {
	wire, err := proto.Marshal(m)
	if err != nil {
		wire = nil
	}
	const keepWire = 16 << 10 // of one event: a full frame would make a trace of gigabytes
	if len(wire) > keepWire {
		wire = nil
	}
	text := Describe(m)
	r.mu.Lock()
	defer r.mu.Unlock()
	e := Entry{At: time.Since(r.began), Node: node, ToHost: toHost, Control: control, Text: text, Wire: wire}
	var at *Entry
	switch {
	case len(r.head) < traceMax/2:
		if r.head == nil {
			r.head = make([]Entry, 0, traceMax/2)
		}
		r.head = append(r.head, e)
		at = &r.head[len(r.head)-1]
	case len(r.tail) < traceMax/2:
		if r.tail == nil {
			r.tail = make([]Entry, 0, traceMax/2)
		}
		r.tail = append(r.tail, e)
		at = &r.tail[len(r.tail)-1]
	default:
		at = &r.tail[r.next]
		*at = e
		r.next = (r.next + 1) % len(r.tail)
		r.dropped++
	}
	return func(text string) {
		r.mu.Lock()
		defer r.mu.Unlock()
		if at.At == e.At && at.Text == e.Text && at.Mark == "" {
			at.Mark = text
		}
	}
}

// entries returns the trace in order.
func (r *recorder) entries() []Entry {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := append([]Entry(nil), r.head...)
	if r.dropped > 0 {
		out = append(out, Entry{At: r.tail[r.next].At, Node: "-", Text: fmt.Sprintf("(%d events left out)", r.dropped)})
	}
	out = append(out, r.tail[r.next:]...)
	return append(out, r.tail[:r.next]...)
}

// Describe is one event in one line: its name and the fields that are set, long ones cut.
func Describe(m proto.Message) string {
	switch e := m.(type) {
	case *contract.HostEvent, *contract.PluginEvent:
		r := e.ProtoReflect()
		fd := r.WhichOneof(r.Descriptor().Oneofs().Get(0))
		if fd == nil {
			return fmt.Sprintf("(unknown event, %d bytes)", len(r.GetUnknown()))
		}
		return Describe(r.Get(fd).Message().Interface())
	}
	var b strings.Builder
	b.WriteString(string(m.ProtoReflect().Descriptor().Name()))
	describeFields(&b, m.ProtoReflect())
	return b.String()
}

func describeFields(b *strings.Builder, m protoreflect.Message) {
	b.WriteByte('(')
	first := true
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		fd := fields.Get(i)
		if !m.Has(fd) {
			continue
		}
		if !first {
			b.WriteByte(' ')
		}
		first = false
		b.WriteString(string(fd.Name()) + "=")
		describeValue(b, fd, m.Get(fd))
	}
	b.WriteByte(')')
}

const maxList = 6

func describeValue(b *strings.Builder, fd protoreflect.FieldDescriptor, v protoreflect.Value) {
	switch {
	case fd.IsMap():
		fmt.Fprintf(b, "{%d}", v.Map().Len())
	case fd.IsList():
		l := v.List()
		b.WriteByte('[')
		for i := range min(l.Len(), maxList) {
			if i > 0 {
				b.WriteByte(' ')
			}
			describeScalar(b, fd, l.Get(i))
		}
		if l.Len() > maxList {
			fmt.Fprintf(b, " …%d", l.Len())
		}
		b.WriteByte(']')
	default:
		describeScalar(b, fd, v)
	}
}

func describeScalar(b *strings.Builder, fd protoreflect.FieldDescriptor, v protoreflect.Value) {
	switch fd.Kind() {
	case protoreflect.MessageKind:
		describeFields(b, v.Message())
	case protoreflect.EnumKind:
		if ev := fd.Enum().Values().ByNumber(v.Enum()); ev != nil {
			b.WriteString(string(ev.Name()))
		} else {
			fmt.Fprintf(b, "%d", v.Enum())
		}
	case protoreflect.BytesKind:
		fmt.Fprintf(b, "<%d bytes>", len(v.Bytes()))
	case protoreflect.StringKind:
		fmt.Fprintf(b, "%q", v.String())
	default:
		fmt.Fprintf(b, "%v", v.Interface())
	}
}
