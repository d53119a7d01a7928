package workerapi

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"flag"
	"os"
	"reflect"
	"testing"
)

var update = flag.Bool("update", false, "rewrite docs/worker-api-vectors.json")

const vectorsFile = "../../docs/worker-api-vectors.json"

// The file's form. Clients in other languages read it too: only add to it.
type (
	vectors struct {
		About       string       `json:"about"`
		Source      []exchange   `json:"source_session"`
		Destination []exchange   `json:"destination_session"`
		Answers     []vector     `json:"more_answers"`
		Bad         []badRequest `json:"bad_requests"`
		Page        pageVector   `json:"status_page"`
	}
	exchange struct {
		Name    string `json:"name"`
		Request vector `json:"request"`
		Answer  vector `json:"answer"`
	}
	vector struct {
		Name        string          `json:"name,omitempty"`
		Frame       string          `json:"frame"` // hex: the whole message
		Header      json.RawMessage `json:"header"`
		IDs         []int32         `json:"ids,omitempty"`
		Aux         string          `json:"aux,omitempty"` // hex
		Descriptors int             `json:"descriptors,omitempty"`
	}
	badRequest struct {
		Name   string `json:"name"`
		Frame  string `json:"frame"` // hex, sent after the hello of source_session
		Code   string `json:"code"`
		Field  string `json:"field"`
		Closes bool   `json:"closes"` // the engine answers with seq 0 and closes
	}
	pageVector struct {
		Size    int        `json:"size"`
		Bytes   string     `json:"bytes"` // hex; zeros follow up to size
		Counter uint64     `json:"counter"`
		Beat    uint64     `json:"beat"`
		Inc     uint64     `json:"incarnation"`
		Slots   []pageSlot `json:"slots"`
		Changed []int32    `json:"changed_after_5"` // slots of the changes 6 … counter, in order
	}
	pageSlot struct {
		Slot      int32  `json:"slot"`
		Tag       uint64 `json:"tag"`
		Status    uint8  `json:"status"`
		Residency uint8  `json:"residency"`
	}
)

// vec builds a message from a header that was written by hand, not by an encoder of ours.
func vec(header string, ids []int32, aux []byte, fds int) vector {
	var p []byte
	for _, id := range ids {
		p = binary.LittleEndian.AppendUint32(p, uint32(id))
	}
	p = append(p, aux...)
	return vector{Frame: hex.EncodeToString(rawFrame([]byte(header), p)), Header: json.RawMessage(header), IDs: ids, Aux: hex.EncodeToString(aux), Descriptors: fds}
}

func rawFrame(h, p []byte) []byte {
	m := binary.LittleEndian.AppendUint32(nil, uint32(len(h)))
	m = binary.LittleEndian.AppendUint32(m, uint32(len(p)))
	return append(append(m, h...), p...)
}

func buildVectors() vectors {
	const (
		limits = `"limits":{"header_bytes":65536,"payload_bytes":8388608,"aux_bytes":1048576,"inflight":4096,"regions":64,"pools":16,"region_bytes":0}`
		layout = `"layout":{"dtype":"bfloat16","layers":2,"kv_heads":8,"head_dim":128,"page_tokens":16,"kind":"mha","order":"nhd"}`
		tensor = `"tensors":[{"region":1,"offset":0,"page_stride":4096,"page_bytes":4096,"layer":0},{"region":1,"offset":32768,"page_stride":4096,"page_bytes":4096,"layer":1}]`
	)
	aux := []byte("first token 42\x00\xff")
	x := func(name string, req, ans vector) exchange { return exchange{name, req, ans} }
	v := vectors{
		About: "Byte-exact messages of the worker API, version 1 (docs/worker-api.md). A reader must accept these frames; a writer is compared after parsing: header as JSON, ids and aux as bytes, number of descriptors. Numbers go up to 2^63-1; canary is unsigned 64 bit.",
		Source: []exchange{
			x("hello", vec(`{"t":"hello","seq":1,"v":1,"group":"prefill-0","role":"source","rank":0,"size":1,"slots":8,"notify":false,`+layout+`}`, nil, nil, 0),
				vec(`{"t":"ok","seq":1,"node":"node-a","incarnation":9223372036854775807,"slots":8,"page_bytes":4096,`+limits+`}`, nil, nil, 1)),
			x("region_add", vec(`{"t":"region_add","seq":2,"region":1,"size":65600,"canary_offset":65592,"canary":18446744073709551615}`, nil, nil, 2),
				vec(`{"t":"ok","seq":2}`, nil, nil, 0)),
			x("pool_add", vec(`{"t":"pool_add","seq":3,"pool":0,"pages":8,`+tensor+`}`, nil, nil, 0),
				vec(`{"t":"ok","seq":3}`, nil, nil, 0)),
			x("open", vec(`{"t":"open","seq":4,"room":9223372036854775807,"attempt":0,"priority":-1,"deadline_ms":60000}`, nil, nil, 0),
				vec(`{"t":"ok","seq":4,"slot":0,"opener":281474976710655}`, nil, nil, 0)),
			x("send", vec(`{"t":"send","seq":5,"slot":0,"room":9223372036854775807,"chunk":0,"parts":[{"pool":0,"pages":3}]}`, []int32{0, 1, 7}, nil, 0),
				vec(`{"t":"ok","seq":5}`, nil, nil, 0)),
			x("send last with layers and aux", vec(`{"t":"send","seq":6,"slot":0,"room":9223372036854775807,"chunk":1,"parts":[{"pool":0,"pages":2},{"pool":0,"pages":1}],"layers":[0,2],"last":true,"aux":16}`, []int32{4, 2, 6}, aux, 0),
				vec(`{"t":"ok","seq":6}`, nil, nil, 0)),
			x("failure", vec(`{"t":"failure","seq":7,"slot":0,"room":9223372036854775807}`, nil, nil, 0),
				vec(`{"t":"ok","seq":7,"status":3,"residency":1,"reason":"none","doc":"The room has not ended.","detail":""}`, nil, nil, 0)),
			x("release too early", vec(`{"t":"release","seq":8,"slot":0,"room":9223372036854775807}`, nil, nil, 0),
				vec(`{"t":"error","seq":8,"code":"not_reusable","field":"","rule":"R4","message":"pages are armed"}`, nil, nil, 0)),
			x("release", vec(`{"t":"release","seq":9,"slot":0,"room":9223372036854775807}`, nil, nil, 0),
				vec(`{"t":"ok","seq":9}`, nil, nil, 0)),
		},
		Destination: []exchange{
			x("hello", vec(`{"t":"hello","seq":1,"v":1,"group":"decode-0","role":"destination","rank":1,"size":2,"slots":8,"notify":true,`+layout+`}`, nil, nil, 0),
				vec(`{"t":"ok","seq":1,"node":"node-b","incarnation":2,"slots":8,"page_bytes":4096,`+limits+`}`, nil, nil, 2)),
			x("region_add", vec(`{"t":"region_add","seq":2,"region":1,"size":65600,"canary_offset":65592,"canary":1}`, nil, nil, 2),
				vec(`{"t":"ok","seq":2}`, nil, nil, 0)),
			x("pool_add", vec(`{"t":"pool_add","seq":3,"pool":0,"pages":8,`+tensor+`}`, nil, nil, 0),
				vec(`{"t":"ok","seq":3}`, nil, nil, 0)),
			x("open", vec(`{"t":"open","seq":4,"room":7,"attempt":3,"peer_group":"prefill-0"}`, nil, nil, 0),
				vec(`{"t":"ok","seq":4,"slot":5,"opener":1}`, nil, nil, 0)),
			x("register with prefix", vec(`{"t":"register","seq":5,"slot":5,"room":7,"parts":[{"pool":0,"pages":4,"prefix":1}]}`, []int32{3, 0, 1, 2}, nil, 0),
				vec(`{"t":"ok","seq":5}`, nil, nil, 0)),
			x("aux", vec(`{"t":"aux","seq":6,"slot":5,"room":7}`, nil, nil, 0),
				vec(`{"t":"ok","seq":6,"aux":16}`, nil, aux, 0)),
			x("abort of an ended room", vec(`{"t":"abort","seq":7,"slot":5,"room":7}`, nil, nil, 0),
				vec(`{"t":"ok","seq":7,"ended":true,"reason":"success"}`, nil, nil, 0)),
			x("pool_add of state", vec(`{"t":"pool_add","seq":8,"pool":1,"pages":8,"kind":"state",`+tensor+`}`, nil, nil, 0),
				vec(`{"t":"ok","seq":8}`, nil, nil, 0)),
		},
		Answers: []vector{
			vec(`{"t":"ok","seq":4,"ended":true,"reason":"peer_aborted"}`, nil, nil, 0),
			vec(`{"t":"error","seq":0,"code":"bad_frame","field":"header","rule":"W1","message":"the header is not UTF-8"}`, nil, nil, 0),
			vec("{ \"seq\" : 12,\n  \"t\" : \"ok\", \"a field of a later version\" : [1, {}] }", nil, nil, 0),
			vec(`{"t":"ok","seq":3,"status":0,"residency":4,"reason":"transfer_failed","doc":"\u00e9","detail":"\ud83d\ude00"}`, nil, nil, 0),
		},
	}
	for i, name := range []string{"open of an ended attempt", "unparsable message", "white space, order and unknown fields", "escapes"} {
		v.Answers[i].Name = name
	}
	bad := func(name, header string, payload []byte, code, field string, closes bool) {
		v.Bad = append(v.Bad, badRequest{name, hex.EncodeToString(rawFrame([]byte(header), payload)), code, field, closes})
	}
	bad("not JSON", `hello`, nil, "bad_frame", "header", true)
	bad("not an object", `[1]`, nil, "bad_frame", "header", true)
	bad("not UTF-8", "{\"t\":\"open\",\"seq\":2,\"x\":\"\xff\"}", nil, "bad_frame", "header", true)
	bad("no seq", `{"t":"open","room":1}`, nil, "bad_frame", "seq", true)
	bad("seq again", `{"t":"open","seq":1,"room":1}`, nil, "bad_frame", "seq", true)
	v.Bad = append(v.Bad,
		badRequest{"header too long", hex.EncodeToString(binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(nil, maxHeader+1), 0)), "bad_frame", "header", true},
		badRequest{"payload too long", hex.EncodeToString(binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(nil, 2), maxPayload+1)), "bad_frame", "payload", true})
	bad("unknown request", `{"t":"opne","seq":2}`, nil, "bad_field", "t", false)
	bad("hello again", `{"t":"hello","seq":2}`, nil, "bad_state", "t", false)
	bad("room is a string", `{"t":"open","seq":2,"room":"7"}`, nil, "bad_field", "room", false)
	bad("room is missing", `{"t":"open","seq":2}`, nil, "bad_field", "room", false)
	bad("room beyond 2^63-1", `{"t":"open","seq":2,"room":9223372036854775808}`, nil, "bad_field", "room", false)
	bad("foreign slot", `{"t":"abort","seq":2,"slot":3,"room":7}`, nil, "bad_field", "slot", false)
	bad("register from a source", `{"t":"register","seq":2,"slot":0,"room":7,"parts":[]}`, nil, "bad_state", "t", false)
	bad("no descriptors", `{"t":"region_add","seq":2,"region":1,"size":4096,"canary_offset":0,"canary":1}`, nil, "bad_fd", "descriptors", false)
	bad("ids are missing", `{"t":"send","seq":2,"slot":0,"room":7,"chunk":0,"parts":[{"pool":0,"pages":2}]}`, []byte{1, 0, 0, 0}, "bad_field", "payload", false)
	bad("payload where none is taken", `{"t":"abort","seq":2,"slot":0,"room":7}`, []byte{1, 0, 0, 0}, "bad_field", "payload", false)
	v.Page = buildPage()
	return v
}

// buildPage writes a page of 4 slots through 12 changes: the ring of 8 has gone round.
func buildPage() pageVector {
	_, ring, size := pageOffsets(4)
	p := &page{mem: make([]byte, size), fd: -1, slots: 4, ring: 8, words: pageHeader, plane: pageHeader + 32, rings: ring}
	initPage(p.mem, 4, 1_000_000_007)
	p.store(offInc, 77)
	v := pageVector{Size: size, Beat: 1_000_000_007, Inc: 77}
	set := func(slot int32, tag uint64, status, residency uint8) {
		p.set(slot, word(status, residency, tag))
		if p.n > 5 {
			v.Changed = append(v.Changed, slot)
		}
		for i := range v.Slots {
			if v.Slots[i].Slot == slot {
				v.Slots[i] = pageSlot{slot, tag, status, residency}
				return
			}
		}
		v.Slots = append(v.Slots, pageSlot{slot, tag, status, residency})
	}
	for slot := int32(0); slot < 4; slot++ {
		set(slot, 281474976710655-uint64(slot), 1, 0)
	}
	set(0, 281474976710655, 2, 1)
	set(1, 281474976710654, 0, 2)
	set(0, 281474976710655, 3, 1)
	set(3, 281474976710652, 2, 1)
	set(1, 281474976710654, 0, 4)
	set(0, 281474976710655, 4, 4)
	set(0, 281474976710655, 4, 6)
	set(0, 12345, 1, 0)
	v.Counter = p.n
	v.Bytes = hex.EncodeToString(p.mem[:ring+64])
	return v
}

func TestVectorsAreCurrent(t *testing.T) {
	v := buildVectors()
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", " ")
	if err := e.Encode(v); err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile(vectorsFile, b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(vectorsFile)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, b.Bytes()) {
		t.Errorf("%s differs from what this test builds; run go test -run Vectors -update and tell the clients", vectorsFile)
	}
}

// The engine reads the requests and writes the answers.
func TestVectorsRequests(t *testing.T) {
	v := buildVectors()
	for _, x := range append(v.Source, v.Destination...) {
		b, err := hex.DecodeString(x.Request.Frame)
		if err != nil {
			t.Fatal(err)
		}
		m, err := (&frames{src: &byteSource{b: b, chunk: 3}}).next()
		if err != nil {
			t.Fatalf("%s: %v", x.Name, err)
		}
		h, _, e := parseHeader(m.header)
		if e != nil {
			t.Fatalf("%s: %v", x.Name, e)
		}
		var want map[string]any
		if err := json.Unmarshal(x.Request.Header, &want); err != nil {
			t.Fatal(err)
		}
		if h.T != want["t"] || float64(h.Seq) != want["seq"] {
			t.Errorf("%s: read %q %d", x.Name, h.T, h.Seq)
		}
		n := 4 * len(x.Request.IDs)
		if !reflect.DeepEqual(append([]int32(nil), ids(m.payload[:n])...), x.Request.IDs) {
			t.Errorf("%s: ids %v, want %v", x.Name, ids(m.payload[:n]), x.Request.IDs)
		}
		if got := hex.EncodeToString(m.payload[n:]); got != x.Request.Aux {
			t.Errorf("%s: aux %s, want %s", x.Name, got, x.Request.Aux)
		}
	}
}
