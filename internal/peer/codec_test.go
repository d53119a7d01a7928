package peer

import (
	"bytes"
	"errors"
	"hash/crc32"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/terminus-kv/terminus/core"
	"github.com/terminus-kv/terminus/core/layout"
	"github.com/terminus-kv/terminus/core/statemachine"
	"github.com/terminus-kv/terminus/internal/peer/wire"
)

var (
	opS = statemachine.Opener{Inc: 7, Seq: 11}
	opD = statemachine.Opener{Inc: 9, Seq: 13}
)

func aux() []byte { return []byte("first token") }

// roomFrames is one frame of every kind that version 1 carries.
func roomFrames() map[string]core.Frame {
	ranks := []core.RankPages{
		{Rank: 0, Parts: []core.PartPages{{Ordinal: 0, Pool: 5, Prefix: 2, Runs: []layout.Run{{Start: 4, Count: 3, Stride: 1}, {Start: 90, Count: 1, Stride: 1}}}}},
		{Rank: 1, Parts: []core.PartPages{{Ordinal: 0, Pool: 6, Runs: []layout.Run{{Start: 0, Count: 4, Stride: 2}}}, {Ordinal: 1, Pool: 7, Runs: []layout.Run{{Start: 1, Count: 1, Stride: 1}}}}},
	}
	return map[string]core.Frame{
		"queued":         {Kind: core.FrameQueued, Room: 42, D: opD, Att: 3, Group: "decode", PeerGroup: "prefill"},
		"register":       {Kind: core.FrameRegister, Room: math.MaxInt64, D: opD, Att: 3, Group: "decode", PeerGroup: "prefill", Backend: "tcp", Epoch: 2, Ranks: ranks},
		"bound":          {Kind: core.FrameBound, Room: 42, S: opS, D: opD, Att: 3, NeedPages: true},
		"confirm":        {Kind: core.FrameConfirm, Room: 42, S: opS, D: opD, Att: 3, ClockLog2: 7},
		"confirm_pages":  {Kind: core.FrameConfirm, Room: 42, S: opS, D: opD, Att: 3, ClockLog2: 7, Backend: "tcp", Epoch: 2, Ranks: ranks},
		"progress":       {Kind: core.FrameProgress, Room: 42, S: opS, D: opD, Bytes: 1 << 40, Outstanding: true},
		"rank_end":       {Kind: core.FrameRankEnd, Room: 42, S: opS, D: opD, Quiet: true, Sent: []core.RankSent{{Rank: 0, Chunks: 2, Parts: []core.PartSent{{Ordinal: 0, Pages: 4}}}, {Rank: 1}}, Aux: aux(), CRC: crc32.Checksum(aux(), castagnoli)},
		"rank_end_empty": {Kind: core.FrameRankEnd, Room: 0, S: opS, D: opD},
		"verdict":        {Kind: core.FrameVerdict, Room: 42, S: opS, D: opD, Outcome: core.OutcomeFailed, Reason: statemachine.Stalled},
		"abort":          {Kind: core.FrameAbort, Room: 42, S: opS, Att: 3, Reason: statemachine.Aborted},
		"abort_pair":     {Kind: core.FrameAbort, Room: 42, S: opS, D: opD, Reason: statemachine.WorkerLost},
		"drained":        {Kind: core.FrameDrained, Room: 42, S: opS, D: opD},
		"ready":          {Kind: core.FrameReady, Room: 42, D: opD, Att: 3, Sources: []statemachine.Opener{opS, opD, opS}},
		"group_verdict":  {Kind: core.FrameGroupVerdict, Room: 42, D: opD, Att: 3, Outcome: core.OutcomeFailed, Reason: statemachine.WorkerLost},
		"group_abort":    {Kind: core.FrameGroupAbort, Room: 42, Att: 3},
	}
}

func TestRoomRoundTrip(t *testing.T) {
	for name, f := range roomFrames() {
		w, err := encodeRoom(f)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		b, err := proto.Marshal(&wire.Batch{Frames: []*wire.Frame{w}})
		if err != nil {
			t.Fatal(err)
		}
		var batch wire.Batch
		if err := proto.Unmarshal(b, &batch); err != nil {
			t.Fatal(err)
		}
		got, err := decodeRoom(batch.Frames[0].GetRoom())
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if len(got.Aux) == 0 {
			got.Aux = nil
		}
		if !reflect.DeepEqual(got, f) {
			t.Errorf("%s:\n got %+v\nwant %+v", name, got, f)
		}
	}
}

// What encodeRoom returns shares nothing with the frame.
func TestEncodeCopies(t *testing.T) {
	f := roomFrames()["rank_end"]
	w, err := encodeRoom(f)
	if err != nil {
		t.Fatal(err)
	}
	f.Aux[0] = 'X'
	if _, err := decodeRoom(w.GetRoom()); err != nil {
		t.Fatal("the frame changed with its source: ", err)
	}
}

func TestBadRoomFrames(t *testing.T) {
	room := func(name string, change func(*wire.Room)) *wire.Room {
		w, err := encodeRoom(roomFrames()[name])
		if err != nil {
			t.Fatal(err)
		}
		change(w.GetRoom())
		return w.GetRoom()
	}
	part := func(r *wire.Room) *wire.PartPages { return r.GetRegister().Ranks[0].Parts[0] }
	for _, c := range []struct {
		name  string
		frame *wire.Room
		want  string
	}{
		{"no kind", &wire.Room{Room: 1}, "kind"},
		{"room too large", room("bound", func(r *wire.Room) { r.Room = 1 << 63 }), "room"},
		{"source sequence 0", room("bound", func(r *wire.Room) { r.Source.Sequence = 0 }), "source"},
		{"destination incarnation 0", room("bound", func(r *wire.Room) { r.Destination.Incarnation = 0 }), "destination"},
		{"no source", room("confirm", func(r *wire.Room) { r.Source = nil }), "source"},
		{"no destination", room("register", func(r *wire.Room) { r.Destination = nil }), "destination"},
		{"abort of nobody", room("abort", func(r *wire.Room) { r.Source = nil }), "source"},
		{"no group", room("queued", func(r *wire.Room) { r.GetQueued().Group = "" }), "queued.group"},
		{"long group", room("queued", func(r *wire.Room) { r.GetQueued().PeerGroup = strings.Repeat("x", maxName+1) }), "queued.peer_group"},
		{"epoch 0", room("register", func(r *wire.Room) { r.GetRegister().Epoch = 0 }), "register.epoch"},
		{"no backend", room("register", func(r *wire.Room) { r.GetRegister().Backend = "" }), "register.backend"},
		{"no ranks", room("register", func(r *wire.Room) { r.GetRegister().Ranks = nil }), "register.ranks"},
		{"rank twice", room("register", func(r *wire.Room) { r.GetRegister().Ranks[1].Rank = 0 }), "register.ranks.rank"},
		{"rank too large", room("register", func(r *wire.Room) { r.GetRegister().Ranks[1].Rank = 1 << 31 }), "register.ranks.rank"},
		{"ordinal twice", room("register", func(r *wire.Room) { r.GetRegister().Ranks[1].Parts[1].Ordinal = 0 }), "register.ranks.ordinal"},
		{"too many ranks", room("register", func(r *wire.Room) {
			for i := range uint32(maxRanks) {
				r.GetRegister().Ranks = append(r.GetRegister().Ranks, &wire.RankPages{Rank: i + 2})
			}
		}), "register.ranks"},
		{"too many parts", room("register", func(r *wire.Room) {
			for i := range uint32(maxParts) {
				r.GetRegister().Ranks[0].Parts = append(r.GetRegister().Ranks[0].Parts, &wire.PartPages{Ordinal: i + 2, Pool: 1})
			}
		}), "register.ranks.parts"},
		{"too many runs", room("register", func(r *wire.Room) {
			part(r).Pages = &wire.Runs{Start: make([]uint32, maxRuns+1), Count: slices.Repeat([]uint32{1}, maxRuns+1)}
		}), "register.ranks.pages"},
		{"pool 0", room("register", func(r *wire.Room) { part(r).Pool = 0 }), "register.ranks.pool"},
		{"prefix beyond pages", room("register", func(r *wire.Room) { part(r).Prefix = 5 }), "register.ranks.prefix"},
		{"columns differ", room("register", func(r *wire.Room) { part(r).Pages.Count = part(r).Pages.Count[:1] }), "register.ranks.pages"},
		{"stride column short", room("register", func(r *wire.Room) { part(r).Pages.Stride = []uint32{1} }), "register.ranks.pages"},
		{"count 0", room("register", func(r *wire.Room) { part(r).Pages.Count[0] = 0 }), "register.ranks.pages"},
		{"stride 0", room("register", func(r *wire.Room) { part(r).Pages.Stride = []uint32{1, 0} }), "register.ranks.pages"},
		{"count negative", room("register", func(r *wire.Room) { part(r).Pages.Count[0] = 1 << 31 }), "register.ranks.pages"},
		{"run overflows", room("register", func(r *wire.Room) {
			part(r).Pages = &wire.Runs{Start: []uint32{1}, Count: []uint32{math.MaxInt32}, Stride: []uint32{math.MaxInt32}}
		}), "register.ranks.pages"},
		{"total overflows", room("register", func(r *wire.Room) {
			part(r).Pages = &wire.Runs{Start: []uint32{0, 0}, Count: []uint32{1 << 30, 1 << 30}}
		}), "register.ranks.pages"},
		{"clock", room("confirm", func(r *wire.Room) { r.GetConfirm().ClockLog2 = maxClock + 1 }), "confirm.clock_log2"},
		{"progress", room("progress", func(r *wire.Room) { r.GetProgress().Bytes = 1 << 63 }), "progress.bytes"},
		{"crc", room("rank_end", func(r *wire.Room) { r.GetRankEnd().AuxCrc32C++ }), "rank_end.aux_crc32c"},
		{"aux too long", room("rank_end", func(r *wire.Room) { r.GetRankEnd().Aux = make([]byte, maxAux+1) }), "rank_end.aux"},
		{"sent twice", room("rank_end", func(r *wire.Room) { r.GetRankEnd().Sent[1].Rank = 0 }), "rank_end.sent.rank"},
		{"sent pages", room("rank_end", func(r *wire.Room) { r.GetRankEnd().Sent[0].Parts[0].Pages = 1 << 63 }), "rank_end.sent.pages"},
		{"chunks", room("rank_end", func(r *wire.Room) { r.GetRankEnd().Sent[0].Chunks = 1 << 31 }), "rank_end.sent.chunks"},
		{"outcome 0", room("verdict", func(r *wire.Room) { r.GetVerdict().Outcome = 0 }), "verdict.outcome"},
		{"outcome 4", room("verdict", func(r *wire.Room) { r.GetVerdict().Outcome = 4 }), "verdict.outcome"},
		{"vote of nobody", room("ready", func(r *wire.Room) { r.Destination = nil }), "destination"},
		{"vote for nobody", room("ready", func(r *wire.Room) { r.GetReady().Sources = nil }), "ready.sources"},
		{"vote for opener 0", room("ready", func(r *wire.Room) { r.GetReady().Sources[1].Sequence = 0 }), "ready.sources"},
		{"vote for no opener", room("ready", func(r *wire.Room) { r.GetReady().Sources[1] = nil }), "ready.sources"},
		{"too many votes", room("ready", func(r *wire.Room) {
			r.GetReady().Sources = slices.Repeat(r.GetReady().Sources[:1], maxRanks+1)
		}), "ready.sources"},
		{"group verdict for nobody", room("group_verdict", func(r *wire.Room) { r.Destination = nil }), "destination"},
		{"group outcome 0", room("group_verdict", func(r *wire.Room) { r.GetGroupVerdict().Outcome = 0 }), "group_verdict.outcome"},
		{"group abort of a half opener", room("group_abort", func(r *wire.Room) { r.Destination = &wire.Opener{Incarnation: 1} }), "destination"},
	} {
		_, err := decodeRoom(c.frame)
		var fe *fieldError
		if !errors.As(err, &fe) || fe.field != c.want {
			t.Errorf("%s: error %v, want field %s", c.name, err, c.want)
		}
	}
	for _, k := range []*wire.Room{{Room: 1, Kind: &wire.Room_Ready{}}, {Room: 1, Kind: &wire.Room_GroupVerdict{}}} { // as a broken peer may send them
		if _, err := decodeRoom(k); err == nil {
			t.Errorf("%v was taken", k)
		}
	}
	for _, f := range []core.Frame{{}, {Kind: core.FrameReady}, {Kind: core.FrameReady, D: opD}, {Kind: core.FrameReady, D: opD, Sources: make([]statemachine.Opener, 2)}, {Kind: core.FrameGroupVerdict, D: opD}, {Kind: core.FrameBound, Room: -1, S: opS, D: opD}, {Kind: core.FrameBound}, {Kind: 99, S: opS, D: opD}, {Kind: core.FrameRankEnd, S: opS, D: opD, Aux: make([]byte, maxAux+1)}} {
		if _, err := encodeRoom(f); err == nil {
			t.Errorf("encodeRoom took kind %d, room %d", f.Kind, f.Room)
		}
	}
}

// A reason that a newer release appended reads as one that is still true.
func TestUnknownReason(t *testing.T) {
	f, err := decodeRoom(&wire.Room{Source: encodeOpener(opS, &wire.Opener{}), Kind: &wire.Room_Abort{Abort: &wire.Abort{Reason: 9999}}})
	if err != nil || f.Reason != statemachine.PeerAborted {
		t.Fatalf("%v, %v", f.Reason, err)
	}
}

func testGroup() Group {
	return Group{Name: "decode", Role: statemachine.Destination, Size: 4, Ranks: []int32{0, 2},
		Layout: Layout{DType: "bf16", Layers: 32, KVHeads: 8, HeadDim: 128, PageTokens: 16, Kind: "mha"}}
}

func testPool() Pool {
	return Pool{ID: 5, Group: "decode", Role: statemachine.Destination, Rank: 2, Ordinal: 1, Pages: 1000, Layers: 2,
		Tensors: []Tensor{{Region: 3, Offset: 64, PageStride: 8192, PageBytes: 4096, Layer: 0}, {Region: 3, Offset: 4160, PageStride: 8192, PageBytes: 4096, Layer: 1}}}
}

func testEndpoint() Endpoint {
	return Endpoint{Backend: "tcp", Epoch: 3, Blob: []byte("where to dial"), Secret: bytes.Repeat([]byte{7}, tokenBytes)}
}

func TestAnnouncementRoundTrip(t *testing.T) {
	w, err := encodeGroup(testGroup())
	if err != nil {
		t.Fatal(err)
	}
	if g, err := decodeGroup(w.GetGroup()); err != nil || !reflect.DeepEqual(g, testGroup()) {
		t.Errorf("%+v, %v", g, err)
	}
	if w, err = encodePool(testPool()); err != nil {
		t.Fatal(err)
	}
	if p, err := decodePool(w.GetPool()); err != nil || !reflect.DeepEqual(p, testPool()) {
		t.Errorf("%+v, %v", p, err)
	}
	e, err := decodeEndpoint(encodeEndpoint(testEndpoint(), 77, "b", 9).GetEndpoint(), 77)
	if err != nil || e.Backend != "tcp" || e.Epoch != 3 || !bytes.Equal(e.Blob, testEndpoint().Blob) || e.Secret != nil {
		t.Errorf("%+v, %v", e, err)
	}
	secret := testEndpoint().Secret
	if !bytes.Equal(e.Token, PairToken(secret, "b", 9)) || bytes.Equal(e.Token, PairToken(secret, "b", 10)) || bytes.Equal(e.Token, PairToken(secret, "c", 9)) {
		t.Error("the token is not that of the pair")
	}
}

func TestBadAnnouncements(t *testing.T) {
	group := func(change func(*wire.Group)) error {
		w, err := encodeGroup(testGroup())
		if err != nil {
			t.Fatal(err)
		}
		change(w.GetGroup())
		_, err = decodeGroup(w.GetGroup())
		return err
	}
	pool := func(change func(*wire.Pool)) error {
		w, err := encodePool(testPool())
		if err != nil {
			t.Fatal(err)
		}
		change(w.GetPool())
		_, err = decodePool(w.GetPool())
		return err
	}
	endpoint := func(change func(*wire.Endpoint)) error {
		w := encodeEndpoint(testEndpoint(), 77, "b", 9).GetEndpoint()
		change(w)
		_, err := decodeEndpoint(w, 77)
		return err
	}
	for want, err := range map[string]error{
		"group.role":                       group(func(g *wire.Group) { g.Role = 0 }),
		"group.name":                       group(func(g *wire.Group) { g.Name = "" }),
		"group.size":                       group(func(g *wire.Group) { g.Size = 0 }),
		"group.ranks: want":                group(func(g *wire.Group) { g.Ranks = []uint32{0, 4} }),
		"group.ranks: want ascending":      group(func(g *wire.Group) { g.Ranks = []uint32{1, 1} }),
		"group.ranks: 5":                   group(func(g *wire.Group) { g.Ranks = make([]uint32, 5) }),
		"group.layout:":                    group(func(g *wire.Group) { g.Layout.HeadDim = 1 << 31 }),
		"group.layout.dtype":               group(func(g *wire.Group) { g.Layout.Dtype = strings.Repeat("x", 300) }),
		"group.fingerprint":                group(func(g *wire.Group) { g.Layout.HeadDim++ }),
		"pool.role":                        pool(func(p *wire.Pool) { p.Role = 3 }),
		"pool.pool":                        pool(func(p *wire.Pool) { p.Pool = 0 }),
		"pool.group":                       pool(func(p *wire.Pool) { p.Group = "" }),
		"pool.rank":                        pool(func(p *wire.Pool) { p.Rank = 1 << 20 }),
		"pool.pages":                       pool(func(p *wire.Pool) { p.Pages = 0 }),
		"pool.tensors: 0":                  pool(func(p *wire.Pool) { p.Tensors = nil }),
		"pool.tensors: tensor 0: region":   pool(func(p *wire.Pool) { p.Tensors[0].PageStride = 1 }),
		"pool.tensors: tensor 0 does":      pool(func(p *wire.Pool) { p.Tensors[0].PageStride = 1 << 62 }),
		"pool.tensors: tensor 1 does":      pool(func(p *wire.Pool) { p.Tensors[1].Offset = math.MaxInt64 - 1 }),
		"endpoint.backend":                 endpoint(func(e *wire.Endpoint) { e.Backend = "" }),
		"endpoint.envelope: of inc":        endpoint(func(e *wire.Endpoint) { e.Envelope.Incarnation++ }),
		"endpoint.envelope: of incarn":     endpoint(func(e *wire.Endpoint) { e.Epoch++ }),
		"endpoint.envelope: of incarna":    endpoint(func(e *wire.Endpoint) { e.Envelope = nil }),
		"endpoint.token":                   endpoint(func(e *wire.Endpoint) { e.Token = e.Token[:31] }),
		"endpoint.token: blob":             endpoint(func(e *wire.Endpoint) { e.Envelope.Blob = make([]byte, maxBlob+1) }),
		"endpoint.envelope.sha256":         endpoint(func(e *wire.Endpoint) { e.Envelope.Blob[0]++ }),
		"endpoint of tcp: epoch 3, blob o": checkEndpoint(Endpoint{Backend: "tcp", Epoch: 3}),
	} {
		if err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("error %q, want it to begin with %q", err, want)
		}
	}
}

func TestHelloRefusals(t *testing.T) {
	good := func() *wire.Hello {
		return &wire.Hello{Versions: []uint32{9, 1}, Node: "a", Incarnation: 1, Backends: []*wire.Backend{{Name: "tcp", Epoch: 1}}}
	}
	if h, r := decodeHello(good()); r != nil || h.version != 1 || h.node != "a" || len(h.backends) != 1 {
		t.Fatalf("%+v, %+v", h, r)
	}
	for _, c := range []struct {
		change func(*wire.Hello)
		code   RefusalCode
		field  string
	}{
		{func(h *wire.Hello) { h.Versions = []uint32{2} }, RefusedVersion, "hello.versions"},
		{func(h *wire.Hello) { h.Versions = nil }, RefusedVersion, "hello.versions"},
		{func(h *wire.Hello) { h.Node = "a/b" }, RefusedHello, "hello.node"},
		{func(h *wire.Hello) { h.Incarnation = 0 }, RefusedHello, "hello.incarnation"},
		{func(h *wire.Hello) { h.Backends[0].Name = "" }, RefusedHello, "hello.backends"},
		{func(h *wire.Hello) { h.Features = make([]string, maxFeatures+1) }, RefusedHello, "hello.backends"},
	} {
		w := good()
		c.change(w)
		if _, r := decodeHello(w); r == nil || r.Code != c.code || r.Field != c.field {
			t.Errorf("%v: %+v, want %v at %s", w, r, c.code, c.field)
		}
	}
}

func TestCut(t *testing.T) {
	if got := cut("aé", 2); got != "a" {
		t.Errorf("%q", got)
	}
	if got := cut("aé", 3); got != "aé" {
		t.Errorf("%q", got)
	}
}

// FuzzDecode: bytes from a peer never panic, and what is accepted survives a round trip.
func FuzzDecode(f *testing.F) {
	for _, r := range roomFrames() {
		w, err := encodeRoom(r)
		if err != nil {
			f.Fatal(err)
		}
		b, err := proto.Marshal(&wire.Batch{Frames: []*wire.Frame{w, encodeLost("tcp", 1), beatFrame}})
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	g, _ := encodeGroup(testGroup())
	p, _ := encodePool(testPool())
	b, err := proto.Marshal(&wire.Batch{Frames: []*wire.Frame{g, p, encodeEndpoint(testEndpoint(), 1, "b", 2), encodeRefused(Refusal{Code: RefusedStale}),
		{Frame: &wire.Frame_Hello{Hello: &wire.Hello{Versions: []uint32{1}, Node: "a", Incarnation: 1}}}}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		var batch wire.Batch
		if proto.Unmarshal(b, &batch) != nil {
			return
		}
		for _, w := range batch.GetFrames() {
			switch m := w.GetFrame().(type) {
			case *wire.Frame_Room:
				got, err := decodeRoom(m.Room)
				if err != nil {
					continue
				}
				again, err := encodeRoom(got)
				if err != nil {
					t.Fatalf("accepted but cannot be encoded: %v", err)
				}
				back, err := decodeRoom(again.GetRoom())
				if err != nil || len(back.Aux) != len(got.Aux) {
					t.Fatal(err)
				}
				back.Aux = got.Aux // nil or empty
				if !reflect.DeepEqual(got, back) {
					t.Fatalf("round trip:\n%+v\n%+v", got, back)
				}
			case *wire.Frame_Group:
				if g, err := decodeGroup(m.Group); err == nil {
					if _, err := encodeGroup(g); err != nil {
						t.Fatal(err)
					}
				}
			case *wire.Frame_Pool:
				if p, err := decodePool(m.Pool); err == nil {
					if _, err := encodePool(p); err != nil {
						t.Fatal(err)
					}
				}
			case *wire.Frame_Endpoint:
				decodeEndpoint(m.Endpoint, 1)
			case *wire.Frame_Lost:
				decodeLost(m.Lost)
			case *wire.Frame_Refused:
				decodeRefused(m.Refused)
			case *wire.Frame_Hello:
				decodeHello(m.Hello)
			}
		}
	})
}
