package nixl

import (
	"bytes"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"
)

// recorded is a connection that reads from memory.
type recorded struct {
	net.Conn
	in  io.Reader
	out bytes.Buffer
}

func (r *recorded) Read(b []byte) (int, error)  { return r.in.Read(b) }
func (r *recorded) Write(b []byte) (int, error) { return r.out.Write(b) }

// welcome is a frame as a receiver sends it, with metadata of a usual size.
func welcome(t *testing.T, key []byte) []byte {
	t.Helper()
	c := &recorded{}
	s := &stream{conn: c, key: key, in: toReceiver}
	if err := s.write(message{Kind: kindWelcome, Agent: "n-1-1-abcd-r1", Metadata: bytes.Repeat([]byte("nixlSerDes|"), 32)}); err != nil {
		t.Fatal(err)
	}
	return c.out.Bytes()
}

func readFrame(key, frame []byte) (message, error) {
	var m message
	err := (&stream{conn: &recorded{in: bytes.NewReader(frame)}, key: key, in: toWriter}).read(&m)
	return m, err
}

// TestDamagedMetadata: a bit that flips on its way, anywhere in a frame, and a frame that ends early, are found before
// the library sees the metadata: some flips would end the process, and some make a peer unreachable for ever.
func TestDamagedMetadata(t *testing.T) {
	key := []byte("0123456789abcdef0123456789abcdef")
	frame := welcome(t, key)
	if m, err := readFrame(key, frame); err != nil || m.Kind != kindWelcome {
		t.Fatalf("the frame itself: %+v, %v", m, err)
	}
	for bit := range len(frame) * 8 {
		bad := bytes.Clone(frame)
		bad[bit/8] ^= 1 << (bit % 8)
		if m, err := readFrame(key, bad); err == nil {
			t.Fatalf("bit %d flipped: %+v", bit, m)
		}
	}
	for n := range frame {
		if m, err := readFrame(key, frame[:n]); err == nil {
			t.Fatalf("cut to %d bytes: %+v", n, m)
		}
	}
	if _, err := readFrame([]byte("another key of the same length.."), frame); !errors.Is(err, errFrame) {
		t.Errorf("another key: %v", err)
	}
}

// TestReplayedFrame: a frame is good once, in its place and direction.
func TestReplayedFrame(t *testing.T) {
	key := []byte("key")
	frame := welcome(t, key)
	s := &stream{conn: &recorded{in: bytes.NewReader(append(bytes.Clone(frame), frame...))}, key: key, in: toWriter}
	var m message
	if err := s.read(&m); err != nil {
		t.Fatal(err)
	}
	if err := s.read(&m); !errors.Is(err, errFrame) {
		t.Errorf("the same frame again: %v", err)
	}
	back := &stream{conn: &recorded{in: bytes.NewReader(frame)}, key: key, in: toReceiver}
	if err := back.read(&m); !errors.Is(err, errFrame) {
		t.Errorf("the frame sent back: %v", err)
	}
}

// TestProofNeedsEverything: the proof of one greeting is none for another.
func TestProofNeedsEverything(t *testing.T) {
	g := greeting{Version: 1, Instance: "i", Incarnation: 2, Epoch: 3, Nonce: []byte("n")}
	seen := map[string]string{}
	add := func(what string, b []byte) {
		if other, ok := seen[string(b)]; ok {
			t.Errorf("%s has the proof of %s", what, other)
		}
		seen[string(b)] = what
	}
	token, other := []byte("token"), []byte("tokem")
	add("itself", derive(token, "proof", g, []byte("m")))
	add("another token", derive(other, "proof", g, []byte("m")))
	add("the key", derive(token, "key", g, []byte("m")))
	add("another receiver's nonce", derive(token, "proof", g, []byte("o")))
	for what, change := range map[string]func(*greeting){
		"another instance":    func(g *greeting) { g.Instance = "j" },
		"another incarnation": func(g *greeting) { g.Incarnation++ },
		"another epoch":       func(g *greeting) { g.Epoch++ },
		"another session":     func(g *greeting) { g.Session = "s" },
		"another nonce":       func(g *greeting) { g.Nonce = []byte("o") },
	} {
		c := g
		change(&c)
		add(what, derive(token, "proof", c, []byte("m")))
	}
}

// TestFrameLength: a length is believed only up to a bound.
func TestFrameLength(t *testing.T) {
	in := io.MultiReader(bytes.NewReader([]byte{0xff, 0xff, 0xff, 0x7f}), strings.NewReader("x"))
	s := &stream{conn: &recorded{in: in}, in: toWriter}
	done := make(chan error, 1)
	go func() { done <- s.read(&message{}) }()
	select {
	case err := <-done:
		if !errors.Is(err, errFrame) {
			t.Errorf("got %v", err)
		}
	case <-time.After(5 * time.Second):
		t.Error("it waits for 2 GiB")
	}
}
