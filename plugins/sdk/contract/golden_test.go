package contract_test

import (
	"bytes"
	"encoding/hex"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

var update = flag.Bool("update", false, "add messages that the golden file lacks; what it has is never rewritten")

const golden = "testdata/v1.txt"

// fill sets every field that the golden file knows of to a value made from its number. An event sets
// the one field of its oneof that is named.
func fill(m protoreflect.Message, only protoreflect.Name) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		fd := fields.Get(i)
		if only != "" && fd.Name() != only {
			continue
		}
		switch {
		case fd.IsMap():
			m.Mutable(fd).Map().Set(protoreflect.ValueOfString("key").MapKey(), protoreflect.ValueOfUint64(uint64(fd.Number())))
		case fd.IsList():
			list := m.Mutable(fd).List()
			for k := range 2 {
				if fd.Message() != nil {
					fill(list.AppendMutable().Message(), "")
				} else {
					list.Append(value(fd, k))
				}
			}
		case fd.Message() != nil:
			fill(m.Mutable(fd).Message(), "")
		default:
			m.Set(fd, value(fd, 0))
		}
	}
}

func value(fd protoreflect.FieldDescriptor, k int) protoreflect.Value {
	n := int(fd.Number()) + 100*k
	switch fd.Kind() {
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(true)
	case protoreflect.EnumKind:
		return protoreflect.ValueOfEnum(fd.Enum().Values().Get(1).Number())
	case protoreflect.Int32Kind, protoreflect.Sint32Kind:
		return protoreflect.ValueOfInt32(int32(-n))
	case protoreflect.Uint32Kind, protoreflect.Fixed32Kind:
		return protoreflect.ValueOfUint32(uint32(n))
	case protoreflect.Uint64Kind:
		return protoreflect.ValueOfUint64(uint64(n) << 33)
	case protoreflect.FloatKind:
		return protoreflect.ValueOfFloat32(float32(n) / 2)
	case protoreflect.StringKind:
		return protoreflect.ValueOfString(fmt.Sprint("s", n))
	case protoreflect.BytesKind:
		return protoreflect.ValueOfBytes([]byte{byte(n), 0xFF})
	}
	panic(fmt.Sprintf("field %s has kind %v; teach value", fd.FullName(), fd.Kind()))
}

// samples are one message of each kind that version 1 puts on the wire, by name.
func samples() (names []string, messages map[string]proto.Message) {
	messages = map[string]proto.Message{}
	add := func(name string, m proto.Message) {
		names = append(names, name)
		messages[name] = m
	}
	for _, m := range []proto.Message{&contract.HandshakeRequest{}, &contract.HandshakeResponse{}} {
		fill(m.ProtoReflect(), "")
		add(string(m.ProtoReflect().Descriptor().Name()), m)
	}
	events := (&contract.HostEvent{}).ProtoReflect().Descriptor().Fields()
	for i := range events.Len() {
		e := &contract.HostEvent{}
		fill(e.ProtoReflect(), events.Get(i).Name())
		add("HostFrame."+string(events.Get(i).Name()), &contract.HostFrame{Events: []*contract.HostEvent{e}})
	}
	events = (&contract.PluginEvent{}).ProtoReflect().Descriptor().Fields()
	for i := range events.Len() {
		e := &contract.PluginEvent{}
		fill(e.ProtoReflect(), events.Get(i).Name())
		add("PluginFrame."+string(events.Get(i).Name()), &contract.PluginFrame{Events: []*contract.PluginEvent{e}})
	}
	return names, messages
}

// TestGolden: the bytes of contract version 1, as recorded, still mean what they meant: today's code
// reads them without an unknown field, and writes the same bytes for the same content. A new field or
// event adds lines (go test -run Golden -update); no line may ever change.
func TestGolden(t *testing.T) {
	text, err := os.ReadFile(golden)
	if err != nil && !*update {
		t.Fatal(err)
	}
	recorded := map[string]string{}
	for line := range strings.Lines(string(text)) {
		if name, code, ok := strings.Cut(strings.TrimSpace(line), " "); ok && name != "#" {
			recorded[name] = code
		}
	}
	names, messages := samples()
	var missing []string
	for _, name := range names {
		m := messages[name]
		now, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		code, ok := recorded[name]
		delete(recorded, name)
		if !ok {
			missing = append(missing, fmt.Sprintf("%s %x\n", name, now))
			continue
		}
		then, err := hex.DecodeString(code)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		old := m.ProtoReflect().New().Interface()
		if err := proto.Unmarshal(then, old); err != nil {
			t.Errorf("%s: the recorded bytes do not decode: %v", name, err)
			continue
		}
		if field := unknown(old.ProtoReflect()); field != "" {
			t.Errorf("%s: the recorded bytes hold a field of %s that is gone", name, field)
		}
		again, err := proto.MarshalOptions{Deterministic: true}.Marshal(old)
		if err != nil || !bytes.Equal(again, then) {
			t.Errorf("%s: decoded and encoded again the recorded bytes differ (%v):\n then %x\n now  %x", name, err, then, again)
		}
		if field := differs(old.ProtoReflect(), m.ProtoReflect()); field != "" {
			t.Errorf("%s: %s no longer has the recorded value", name, field)
		}
	}
	for name := range recorded {
		t.Errorf("%s is recorded, but gone from the contract", name)
	}
	if len(missing) == 0 {
		return
	}
	if !*update {
		t.Fatalf("not recorded: %v; run go test ./plugins/sdk/contract -run Golden -update", missing)
	}
	if len(text) == 0 {
		text = []byte("# Contract version 1: one deterministic encoding a message. Lines are only ever added.\n")
	}
	if err := os.WriteFile(golden, append(text, strings.Join(missing, "")...), 0o644); err != nil {
		t.Fatal(err)
	}
}

// unknown returns the message that holds unknown fields, or "".
func unknown(m protoreflect.Message) (found string) {
	if len(m.GetUnknown()) > 0 {
		return string(m.Descriptor().FullName())
	}
	m.Range(func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case fd.Message() == nil || fd.IsMap():
		case fd.IsList():
			for i := range v.List().Len() {
				if found = unknown(v.List().Get(i).Message()); found != "" {
					return false
				}
			}
		default:
			found = unknown(v.Message())
		}
		return found == ""
	})
	return found
}

// differs returns a field that is set in old and has another value in now, or "".
func differs(old, now protoreflect.Message) (found string) {
	old.Range(func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case fd.IsList() && fd.Message() != nil:
			if now.Get(fd).List().Len() < v.List().Len() {
				found = string(fd.FullName())
				break
			}
			for i := range v.List().Len() {
				if found = differs(v.List().Get(i).Message(), now.Get(fd).List().Get(i).Message()); found != "" {
					break
				}
			}
		case fd.Message() != nil && !fd.IsMap():
			found = differs(v.Message(), now.Get(fd).Message())
		case !v.Equal(now.Get(fd)):
			found = string(fd.FullName())
		}
		return found == ""
	})
	return found
}

// TestEnumZero: the value 0 of every enum is called UNSPECIFIED and means a violation.
func TestEnumZero(t *testing.T) {
	file := (&contract.HostFrame{}).ProtoReflect().Descriptor().ParentFile()
	check := func(enums protoreflect.EnumDescriptors) {
		for i := range enums.Len() {
			if v := enums.Get(i).Values().ByNumber(0); v == nil || !strings.HasSuffix(string(v.Name()), "_UNSPECIFIED") {
				t.Errorf("enum %s: 0 is %v", enums.Get(i).FullName(), v)
			}
		}
	}
	check(file.Enums())
	for i := range file.Messages().Len() {
		check(file.Messages().Get(i).Enums())
	}
	var numbers []protoreflect.FieldNumber
	fields := (&contract.HostEvent{}).ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		numbers = append(numbers, fields.Get(i).Number())
	}
	if !slices.Contains(numbers, 11) {
		t.Error("HostEvent has lost its Submit")
	}
}
