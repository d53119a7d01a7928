package wasmhost

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// module is a WebAssembly module to be assembled.
type module struct {
	imports []fn // body unused
	funcs   []fn // exported by name unless the name starts with a dash
	start   int  // 1 + index into funcs; 0: none
	pages   uint32
	tables  [][]byte // of the table section
	noMem   bool
	data    []byte // at dataAt
}

// fn is a function: its type, and the instructions of its body without the final end.
type fn struct {
	name            string
	params, results []byte
	body            []byte
}

const dataAt = 1024

// Opcodes.
const (
	opUnreachable = 0x00
	opLoop        = 0x03
	opIf          = 0x04
	opElse        = 0x05
	opEnd         = 0x0B
	opBr          = 0x0C
	opBrIf        = 0x0D
	opCall        = 0x10
	opDrop        = 0x1A
	opLocalGet    = 0x20
	opMemoryGrow  = 0x40
	opI32Const    = 0x41
	opI64Const    = 0x42
	opI32Eq       = 0x46
	opI32Ne       = 0x47
	opRefNull     = 0xD0
	opMisc        = 0xFC
	miscTableGrow = 15
	funcref       = 0x70
	voidBlock     = 0x40
)

func uleb(v uint64) []byte { return binary.AppendUvarint(nil, v) }

func sleb(v int64) (b []byte) {
	for {
		low := byte(v & 0x7F)
		v >>= 7
		if v == 0 && low&0x40 == 0 || v == -1 && low&0x40 != 0 {
			return append(b, low)
		}
		b = append(b, low|0x80)
	}
}

func vec(items ...[]byte) []byte {
	b := uleb(uint64(len(items)))
	for _, i := range items {
		b = append(b, i...)
	}
	return b
}

func sized(b []byte) []byte { return append(uleb(uint64(len(b))), b...) }

func join(parts ...[]byte) (b []byte) {
	for _, p := range parts {
		b = append(b, p...)
	}
	return b
}

func (m *module) assemble() []byte {
	var types, importList, funcs, exportList, codes [][]byte
	for i, f := range append(append([]fn{}, m.imports...), m.funcs...) {
		types = append(types, join([]byte{0x60}, sized(f.params), sized(f.results)))
		if i < len(m.imports) {
			mod, name, _ := strings.Cut(f.name, ".")
			importList = append(importList, join(sized([]byte(mod)), sized([]byte(name)), []byte{0}, uleb(uint64(i))))
			continue
		}
		funcs = append(funcs, uleb(uint64(i)))
		if !strings.HasPrefix(f.name, "-") {
			exportList = append(exportList, join(sized([]byte(f.name)), []byte{0}, uleb(uint64(i))))
		}
		codes = append(codes, sized(join([]byte{0}, f.body, []byte{opEnd})))
	}
	if !m.noMem {
		exportList = append(exportList, join(sized([]byte("memory")), []byte{2, 0}))
	}
	section := func(id byte, content []byte) []byte { return join([]byte{id}, sized(content)) }
	b := join([]byte("\x00asm\x01\x00\x00\x00"), section(1, vec(types...)), section(2, vec(importList...)), section(3, vec(funcs...)))
	if len(m.tables) > 0 {
		b = append(b, section(4, vec(m.tables...))...)
	}
	if !m.noMem {
		b = append(b, section(5, vec(join([]byte{0}, uleb(uint64(max(m.pages, 1))))))...)
	}
	b = append(b, section(7, vec(exportList...))...)
	if m.start != 0 {
		b = append(b, section(8, uleb(uint64(len(m.imports)+m.start-1)))...)
	}
	b = append(b, section(10, vec(codes...))...)
	if len(m.data) > 0 {
		b = append(b, section(11, vec(join([]byte{0, opI32Const}, sleb(dataAt), []byte{opEnd}, sized(m.data))))...)
	}
	return b
}

// i32Const and i64Const push; getLocal pushes a parameter.
func i32Const(v int32) []byte  { return join([]byte{opI32Const}, sleb(int64(v))) }
func i64Const(v uint64) []byte { return join([]byte{opI64Const}, sleb(int64(v))) }
func getLocal(i uint64) []byte { return join([]byte{opLocalGet}, uleb(i)) }
func endless() []byte          { return []byte{opLoop, voidBlock, opBr, 0, opEnd} }
func packed(at, n int) []byte  { return i64Const(uint64(at)<<32 | uint64(n)) }
func mustMarshal(m proto.Message) []byte {
	b, err := proto.Marshal(m)
	if err != nil {
		panic(err)
	}
	return b
}

const (
	describeAt = dataAt
	okAt       = dataAt + 512
	errorAt    = dataAt + 544
	badAt      = dataAt + 640
	bufferAt   = 4096
)

// polite is a guest that describes itself, takes its configuration and answers no event. change makes it
// something else.
func polite(change func(m *module, byName map[string]*fn)) *module {
	description := mustMarshal(&contract.CallResult{Code: contract.CallResult_CODE_OK, Payload: mustMarshal(&contract.HandshakeResponse{Name: "raw", PluginVersion: "1"})})
	data := make([]byte, 1024)
	copy(data, description)
	data[okAt-dataAt], data[okAt-dataAt+1] = 0x08, 0x01
	copy(data[errorAt-dataAt:], mustMarshal(&contract.CallResult{Code: contract.CallResult_CODE_ERROR, Message: "not today"}))
	copy(data[badAt-dataAt:], "\xFF\xFF\xFF")
	m := &module{data: data, funcs: []fn{
		{exportAlloc, []byte{i32}, []byte{i32}, i32Const(bufferAt)},
		{exportFree, []byte{i32, i32}, nil, nil},
		{exportCall, []byte{i32, i32, i32}, []byte{i64}, onMethod(methodDescribe, packed(describeAt, len(description)), packed(okAt, 2))},
		{exportPump, []byte{i32}, []byte{i32}, i32Const(0)},
	}}
	byName := map[string]*fn{}
	for i := range m.funcs {
		byName[m.funcs[i].name] = &m.funcs[i]
	}
	if change != nil {
		change(m, byName)
	}
	return m
}

// onMethod is a body of engine_v1_call that returns one value for a method and another for all others.
func onMethod(method int32, then, otherwise []byte) []byte {
	return join(getLocal(0), i32Const(method), []byte{opI32Eq, opIf, byte(i64)}, then, []byte{opElse}, otherwise, []byte{opEnd})
}

// answers is a body of engine_v1_call that is polite until START is over, and then does as told.
func answers(frame []byte) []byte {
	description := mustMarshal(&contract.CallResult{Code: contract.CallResult_CODE_OK, Payload: mustMarshal(&contract.HandshakeResponse{Name: "raw", PluginVersion: "1"})})
	return onMethod(methodDescribe, packed(describeAt, len(description)), onMethod(methodFrame, frame, packed(okAt, 2)))
}

// onStart is a body of engine_v1_call that is polite but for START.
func onStart(start []byte) []byte {
	description := mustMarshal(&contract.CallResult{Code: contract.CallResult_CODE_OK, Payload: mustMarshal(&contract.HandshakeResponse{Name: "raw", PluginVersion: "1"})})
	return onMethod(methodDescribe, packed(describeAt, len(description)), onMethod(methodStart, start, packed(okAt, 2)))
}

// emits makes a body of engine_v1_call emit n bytes at ptr, and return no result. The other functions call none.
func (m *module) emits(f *fn, ptr, n int32) {
	m.imports = []fn{{name: "engine_v1.emit", params: []byte{i32, i32}, results: []byte{i32}}}
	f.body = join(i32Const(ptr), i32Const(n), []byte{opCall, 0, opDrop}, i64Const(0))
}

func (m *module) write(t testing.TB) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "raw.wasm")
	if err := os.WriteFile(path, m.assemble(), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}
