package nixl

import (
	"bytes"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/sdktest"
)

// TestHandshakeRefusals: who is not admitted, or does not know the token, is told no metadata, and no agent is made.
func TestHandshakeRefusals(t *testing.T) {
	b := New()
	h := sdktest.New(t, b, sdktest.WithConfig(opts(t)))
	b.recv.mu.Lock()
	b.recv.admit = 50 * time.Millisecond
	b.recv.mu.Unlock()
	token := bytes.Repeat([]byte{7}, 32)
	if err := b.Accept(&sdk.Peer{Handle: 1, Node: "w", Incarnation: 3, Epoch: 4, Token: token}); err != nil {
		t.Fatal(err)
	}
	good, err := decodeEndpoint(h.Response.Endpoint)
	if err != nil {
		t.Fatal(err)
	}
	writer := func(incarnation uint64, epoch uint32) *Backend {
		w := New()
		w.start = sdk.Start{Incarnation: incarnation, Epoch: epoch}
		return w
	}
	other, wrong := good, bytes.Clone(token)
	other.Instance = strings.Repeat("0", 32)
	wrong[31] ^= 1
	for name, c := range map[string]struct {
		w     *Backend
		e     endpoint
		token []byte
	}{
		"another token":       {writer(3, 4), good, wrong},
		"another incarnation": {writer(2, 4), good, token},
		"another epoch":       {writer(3, 5), good, token},
		"another process":     {writer(3, 4), other, token},
	} {
		if s, m, err := c.w.dial(t.Context(), c.e, c.token, "s"); err == nil {
			s.conn.Close()
			t.Errorf("%s was welcomed: %+v", name, m)
		}
	}
	b.recv.mu.Lock()
	links := b.recv.links
	b.recv.mu.Unlock()
	if links != 0 {
		t.Errorf("%d agents were made for writers that are not admitted", links)
	}
	s, m, err := writer(3, 4).dial(t.Context(), good, token, "s")
	if err != nil || m.Kind != kindWelcome || len(m.Metadata) == 0 {
		t.Fatalf("the admitted writer: %+v, %v", m, err)
	}
	s.conn.Close()
}

// TestImpostorReceiver: a receiver that does not know the token cannot make a writer load what it says.
func TestImpostorReceiver(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	served := make(chan struct{})
	go func() {
		defer close(served)
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		s := &stream{conn: conn, in: toReceiver}
		var g greeting
		var p proof
		mine := nonce()
		if s.read(&g) != nil || s.write(challenge{Nonce: mine}) != nil || s.read(&p) != nil {
			return
		}
		s.key = derive(make([]byte, 32), "key", g, mine)
		_ = s.write(message{Kind: kindWelcome, Agent: "x", Metadata: []byte("anything")})
	}()
	w := New()
	w.start = sdk.Start{Incarnation: 3, Epoch: 4}
	e := endpoint{Version: wireVersion, Instance: "i", Addrs: []string{listener.Addr().String()}}
	_, m, err := w.dial(t.Context(), e, bytes.Repeat([]byte{7}, 32), "s")
	var refused *sdk.Error
	if err == nil || !errors.As(err, &refused) {
		t.Errorf("got %+v, %v", m, err)
	}
	<-served
}

// TestBadEndpoint: what a peer's endpoint may hold is bounded.
func TestBadEndpoint(t *testing.T) {
	for _, text := range []string{
		"", "x", "null", "{}", `{"v":1}`, `{"v":2,"instance":"i","addrs":["127.0.0.1:1"]}`, `{"v":1,"addrs":["nowhere"]}`,
		`{"v":1,"instance":"` + strings.Repeat("x", 65) + `","addrs":["127.0.0.1:1"]}`,
		`{"v":1,"instance":"` + strings.Repeat("x", maxEndpoint) + `"}`,
		`{"v":1,"addrs":[` + strings.Repeat(`"h:1",`, maxAddrs) + `"h:1"]}`,
	} {
		if e, err := decodeEndpoint([]byte(text)); err == nil {
			t.Errorf("%.60s was taken: %+v", text, e)
		}
	}
}
