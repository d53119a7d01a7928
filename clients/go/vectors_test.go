package client

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The byte-exact messages that all clients and the engine share.
type vectorFile struct {
	Source      []vectorExchange `json:"source_session"`
	Destination []vectorExchange `json:"destination_session"`
	Answers     []vector         `json:"more_answers"`
	Page        struct {
		Size    int    `json:"size"`
		Bytes   string `json:"bytes"`
		Counter uint64 `json:"counter"`
		Beat    uint64 `json:"beat"`
		Inc     uint64 `json:"incarnation"`
		Slots   []struct {
			Slot      int32  `json:"slot"`
			Tag       uint64 `json:"tag"`
			Status    uint8  `json:"status"`
			Residency uint8  `json:"residency"`
		} `json:"slots"`
		Changed []int32 `json:"changed_after_5"`
	} `json:"status_page"`
}

type vectorExchange struct {
	Name            string
	Request, Answer vector
}

type vector struct {
	Name        string
	Frame       string
	Header      json.RawMessage
	IDs         []int32
	Aux         string
	Descriptors int
}

func readVectors(t *testing.T) vectorFile {
	t.Helper()
	b, err := os.ReadFile("../../docs/worker-api-vectors.json")
	if err != nil {
		t.Fatal(err)
	}
	var v vectorFile
	if err := json.Unmarshal(b, &v); err != nil {
		t.Fatal(err)
	}
	return v
}

func unhex(t *testing.T, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// alignedPage returns the vector's page in memory that is aligned as a mapping is.
func alignedPage(t *testing.T, v vectorFile) []byte {
	words := make([]uint64, v.Page.Size/8)
	mem := unsafe.Slice((*byte)(unsafe.Pointer(&words[0])), v.Page.Size)
	copy(mem, unhex(t, v.Page.Bytes))
	return mem
}

func TestVectorPage(t *testing.T) {
	v := readVectors(t)
	p, err := parsePage(alignedPage(t, v))
	if err != nil {
		t.Fatal(err)
	}
	if p.counter() != v.Page.Counter || p.beat() != v.Page.Beat || p.load(16) != v.Page.Inc || p.slots != 4 {
		t.Errorf("counter %d, beat %d, incarnation %d, slots %d", p.counter(), p.beat(), p.load(16), p.slots)
	}
	for _, s := range v.Page.Slots {
		w := p.word(s.Slot)
		if w>>16 != s.Tag || uint8(w&7) != s.Status || uint8(w>>3&7) != s.Residency || byte(p.planeWord(0)>>(8*s.Slot)) != uint8(w&63) {
			t.Errorf("slot %d: word %#x, want %+v", s.Slot, w, s)
		}
	}
	var got []int32
	for n := uint64(6); n <= p.counter(); n++ {
		if slot, ok := p.entry(n); ok {
			got = append(got, slot)
		}
	}
	if !reflect.DeepEqual(got, v.Page.Changed) {
		t.Errorf("changes after 5: %v, want %v", got, v.Page.Changed)
	}
	if _, ok := p.entry(4); ok {
		t.Error("an overwritten entry was taken for change 4")
	}
}

func TestVectorAnswers(t *testing.T) {
	v := readVectors(t)
	all := v.Answers
	for _, x := range append(v.Source, v.Destination...) {
		all = append(all, x.Answer)
	}
	for _, a := range all {
		got, err := readFrame(unhex(t, a.Frame))
		if err != nil {
			t.Errorf("%s: %v", a.Header, err)
			continue
		}
		var want answer
		if err := json.Unmarshal(a.Header, &want); err != nil {
			t.Fatal(err)
		}
		want.payload = got.payload
		if !reflect.DeepEqual(got, want) || hex.EncodeToString(got.payload) != a.Aux {
			t.Errorf("%s: read %+v", a.Header, got)
		}
	}
}

func readFrame(b []byte) (answer, error) {
	var l [8]byte
	if copy(l[:], b) < 8 {
		return answer{}, io.ErrUnexpectedEOF
	}
	return readAnswer(bufio.NewReader(&byteReader{b[8:]}), l)
}

type byteReader struct{ b []byte }

func (r *byteReader) Read(p []byte) (int, error) {
	if len(r.b) == 0 {
		return 0, io.EOF
	}
	n := copy(p, r.b)
	r.b = r.b[n:]
	return n, nil
}

// TestVectorSessions lets the client do what the vectors' sessions do against an engine that answers
// with the vectors' bytes.
func TestVectorSessions(t *testing.T) {
	v := readVectors(t)
	for name, xs := range map[string][]vectorExchange{"source": v.Source, "destination": v.Destination} {
		t.Run(name, func(t *testing.T) {
			dir, err := os.MkdirTemp("", "t")
			if err != nil {
				t.Fatal(err)
			}
			defer os.RemoveAll(dir)
			l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "s"), Net: "unix"})
			if err != nil {
				t.Fatal(err)
			}
			done := make(chan error, 1)
			go func() { done <- script(t, l, xs) }()
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			if name == "source" {
				sourceSession(ctx, t, l.Addr().String())
			} else {
				destinationSession(ctx, t, l.Addr().String())
			}
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	}
}

var vectorLayout = Layout{DType: "bfloat16", Layers: 2, KVHeads: 8, HeadDim: 128, PageTokens: 16, Kind: "mha", Order: "nhd"}

func setUp(ctx context.Context, t *testing.T, o Options) (*Client, int) {
	t.Helper()
	o.Slots, o.Layout = 8, vectorLayout
	c, err := Dial(ctx, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	r, err := c.CreateRegion(ctx, 65600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	p, err := c.AddPool(ctx, Pool{Pages: 8, Tensors: []Tensor{{Region: r, PageBytes: 4096}, {Region: r, Offset: 32768, PageBytes: 4096, Layer: 1}}})
	if err != nil {
		t.Fatal(err)
	}
	return c, p
}

func sourceSession(ctx context.Context, t *testing.T, socket string) {
	c, p := setUp(ctx, t, Options{Socket: socket, Group: "prefill-0", Role: Source, Size: 1})
	r, err := c.Open(ctx, OpenOptions{Room: 1<<63 - 1, Priority: -1, Deadline: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Send(ctx, Chunk{Parts: []Part{{Pool: p, Pages: []int32{0, 1, 7}}}}); err != nil {
		t.Error(err)
	}
	aux := []byte("first token 42\x00\xff")
	if err := r.Send(ctx, Chunk{Parts: []Part{{p, []int32{4, 2}}, {p, []int32{6}}}, Layers: [2]int{0, 2}, Last: true, Aux: aux}); err != nil {
		t.Error(err)
	}
	if f, err := r.Failure(ctx); err != nil || f.Status != Transferring || f.Residency != Armed || f.Reason != "none" {
		t.Errorf("%+v %v", f, err)
	}
	if err := r.Release(ctx); !errors.Is(err, ErrNotReusable) {
		t.Errorf("release: %v", err)
	}
	if err := r.Release(ctx); err != nil {
		t.Error(err)
	}
}

func destinationSession(ctx context.Context, t *testing.T, socket string) {
	c, p := setUp(ctx, t, Options{Socket: socket, Group: "decode-0", Role: Destination, Rank: 1, Size: 2, Notify: true})
	r, err := c.Open(ctx, OpenOptions{Room: 7, Attempt: 3, PeerGroup: "prefill-0"})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Register(ctx, RegisterPart{Pool: p, Pages: []int32{3, 0, 1, 2}, Prefix: 1}); err != nil {
		t.Error(err)
	}
	if aux, err := r.Aux(ctx); err != nil || string(aux) != "first token 42\x00\xff" {
		t.Errorf("aux %q %v", aux, err)
	}
	if err := r.Abort(ctx); err != nil {
		t.Error(err)
	}
	state := c.pools[p]
	state.State = true
	if n, err := c.AddPool(ctx, state); err != nil || n != 1 {
		t.Errorf("pool of state: %d, %v", n, err)
	}
}

// script is the engine: it compares each request with the vector, after parsing, and sends its answer.
func script(t *testing.T, l *net.UnixListener, xs []vectorExchange) error {
	defer l.Close()
	conn, err := l.AcceptUnix()
	if err != nil {
		return err
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(10 * time.Second))
	for _, x := range xs {
		var b [8]byte
		oob := make([]byte, 256)
		n, on, _, _, err := conn.ReadMsgUnix(b[:], oob)
		if err != nil || n != 8 {
			return errors.Join(err, errors.New(x.Name+": no lengths"))
		}
		body := make([]byte, binary.LittleEndian.Uint32(b[:])+binary.LittleEndian.Uint32(b[4:]))
		if _, err := io.ReadFull(conn, body); err != nil {
			return err
		}
		h := binary.LittleEndian.Uint32(b[:])
		var fds []int
		if cms, err := unix.ParseSocketControlMessage(oob[:on]); err == nil && len(cms) == 1 {
			fds, _ = unix.ParseUnixRights(&cms[0])
		}
		if len(fds) != x.Request.Descriptors {
			t.Errorf("%s: %d descriptors, want %d", x.Name, len(fds), x.Request.Descriptors)
		}
		var got, want map[string]any
		if err := errors.Join(json.Unmarshal(body[:h], &got), json.Unmarshal(x.Request.Header, &want)); err != nil {
			return err
		}
		if x.Name == "region_add" { // the canary is random
			answerVectorCanary(t, fds[0], body[:h])
			delete(got, "canary")
			delete(want, "canary")
		}
		closeAll(fds)
		if !reflect.DeepEqual(strip(got), strip(want)) {
			t.Errorf("%s: header %v, want %v", x.Name, got, want)
		}
		vf := unhex(t, x.Request.Frame)
		if wantP := vf[8+binary.LittleEndian.Uint32(vf):]; string(body[h:]) != string(wantP) {
			t.Errorf("%s: payload %x, want %x", x.Name, body[h:], wantP)
		}
		var rights []byte
		if n := x.Answer.Descriptors; n > 0 {
			page := vectorPageFD(t)
			defer unix.Close(page)
			fds := []int{page}
			if n == 2 {
				efd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
				if err != nil {
					return err
				}
				defer unix.Close(efd)
				fds = append(fds, efd)
			}
			rights = unix.UnixRights(fds...)
		}
		if _, _, err := conn.WriteMsgUnix(unhex(t, x.Answer.Frame), rights, nil); err != nil {
			return err
		}
	}
	return nil
}

// strip removes fields that hold their default: a writer may leave them out.
func strip(m map[string]any) map[string]any {
	for _, k := range []string{"notify", "rank", "attempt", "last", "aux"} {
		if v := m[k]; v == false || v == float64(0) {
			delete(m, k)
		}
	}
	return m
}

func answerVectorCanary(t *testing.T, fd int, header []byte) {
	var h struct {
		Canary uint64
		Offset int64 `json:"canary_offset"`
	}
	if err := json.Unmarshal(header, &h); err != nil {
		t.Error(err)
	}
	var b [8]byte
	if _, err := unix.Pread(fd, b[:], h.Offset); err != nil || binary.LittleEndian.Uint64(b[:]) != h.Canary {
		t.Errorf("canary %x, want %x (%v)", b, h.Canary, err)
	}
	binary.LittleEndian.PutUint64(b[:], ^h.Canary)
	if _, err := unix.Pwrite(fd, b[:], h.Offset); err != nil {
		t.Error(err)
	}
}

// vectorPageFD makes an empty page of 8 slots.
func vectorPageFD(t *testing.T) int {
	fd, err := unix.MemfdCreate("page", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	h := make([]byte, 4096)
	for off, v := range map[int]uint32{0: pageMagic, 4: 1, 8: 8, 12: 16, 40: 64, 44: 128, 48: 136, 52: 4096} {
		binary.LittleEndian.PutUint32(h[off:], v)
	}
	if _, err := unix.Write(fd, h); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, wantedSeals); err != nil {
		t.Fatal(err)
	}
	return fd
}

func FuzzAnswer(f *testing.F) {
	f.Add([]byte("\x14\x00\x00\x00\x00\x00\x00\x00" + `{"t":"ok","seq":123}`))
	f.Add([]byte("\x02\x00\x00\x00\x02\x00\x00\x00{}xx"))
	f.Add([]byte("\xff\xff\xff\xff\xff\xff\xff\xff"))
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := readFrame(b)
		if err == nil && a.T != "ok" && a.T != "error" {
			t.Fatalf("accepted %+v", a)
		}
		_ = a.err()
		_ = a.limits()
	})
}

func FuzzPage(f *testing.F) {
	le := binary.LittleEndian
	good := make([]byte, 4096)
	for off, v := range map[int]uint32{0: pageMagic, 4: 1, 8: 8, 12: 16, 40: 64, 44: 128, 48: 136, 52: 4096} {
		le.PutUint32(good[off:], v)
	}
	f.Add(good[:400])
	f.Add([]byte("TSP1"))
	f.Fuzz(func(t *testing.T, b []byte) {
		words := make([]uint64, len(b)/8+1)
		mem := unsafe.Slice((*byte)(unsafe.Pointer(&words[0])), len(b))
		copy(mem, b)
		p, err := parsePage(mem)
		if err != nil {
			return
		}
		// Everything that a reader touches lies inside, whatever the engine wrote there.
		for i := range p.slots {
			p.word(int32(i))
		}
		for k := range (p.slots + 7) / 8 {
			p.planeWord(k)
		}
		for n := range p.ring {
			if slot, ok := p.entry(n + 1); ok && (slot < 0 || int(slot) >= p.slots) {
				t.Fatalf("slot %d of %d", slot, p.slots)
			}
		}
		var c cursor
		c.next(p, func(slot int32) { p.word(slot) })
	})
}
