package nixl

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
)

// The library's metadata says nothing of who made it and has no checksum: a flipped bit can end the process that loads
// it. So it travels on a control connection between the two plugins, on which every frame is authenticated by a key
// that only they know. The bytes of pages never take this connection.
//
// The writer dials. Frames are a length (u32, little-endian), JSON, and from the welcome on 16 bytes of HMAC-SHA256
// over direction, number and JSON.
//
//	writer    greeting    who it is, whom it means, a nonce
//	receiver  challenge   a nonce
//	writer    proof       HMAC of both by the token of PeerAdd and PeerAccept
//	receiver  welcome     the agent that it made for this writer, and its metadata
//
// Then the writer asks for regions (map), and the receiver asks for them back (withdraw, unmapped). The end of the
// connection is the end of the link: the receiver destroys the agent. It answers a session
// again only when the agent of its link before is destroyed, so that a welcome, or a farewell of a receiver that has dropped
// the writer, proves that no byte of the session's earlier ops can land any more.

const (
	wireVersion = 1
	maxFrame    = 2*maxMetadata + 4096 // metadata is base64 in it
	macSize     = 16
)

// greeting is the first frame of a connection.
type greeting struct {
	Version     int    `json:"v"`
	Instance    string `json:"instance"` // of the receiver that is meant
	Incarnation uint64 `json:"incarnation"`
	Epoch       uint32 `json:"epoch"`
	Session     string `json:"session"` // of the writer's peer: one link of it at a time
	Nonce       []byte `json:"nonce"`
}

// challenge is the receiver's answer.
type challenge struct {
	Nonce   []byte `json:"nonce,omitempty"`
	Refused string `json:"refused,omitempty"` // the greeting is not for this process
}

type proof struct {
	MAC []byte `json:"mac"`
}

// message is every frame after the proof.
type message struct {
	Kind     kind   `json:"kind"`
	Region   uint64 `json:"region,omitempty"`
	Address  uint64 `json:"address,omitempty"`
	Size     uint64 `json:"size,omitempty"`
	Agent    string `json:"agent,omitempty"`
	Metadata []byte `json:"metadata,omitempty"`
	Detail   string `json:"detail,omitempty"`
}

type kind string

const (
	kindWelcome  kind = "welcome"
	kindFarewell kind = "farewell" // the receiver has dropped this writer for good, and nothing of it lands any more
	kindFailed   kind = "failed"   // in place of a welcome
	kindMap      kind = "map"
	kindMapped   kind = "mapped"
	kindUnknown  kind = "unknown" // answers map: there is no such region
	kindWithdraw kind = "withdraw"
	kindUnmapped kind = "unmapped"
)

// stream is a connection with its keys. One goroutine reads; write may be called from several.
type stream struct {
	conn net.Conn
	key  []byte // nil before the proof
	in   direction

	got uint64

	mu   sync.Mutex
	sent uint64
}

type direction byte

const (
	toReceiver direction = 1
	toWriter   direction = 2
)

func (d direction) other() direction { return toReceiver + toWriter - d }

var errFrame = errors.New("control connection: a frame that its sender did not make")

func (s *stream) mac(d direction, n uint64, b []byte) []byte {
	h := hmac.New(sha256.New, s.key)
	h.Write([]byte{byte(d)})
	h.Write(binary.LittleEndian.AppendUint64(nil, n))
	h.Write(b)
	return h.Sum(nil)[:macSize]
}

func (s *stream) write(m any) error {
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.key != nil {
		b = append(b, s.mac(s.in.other(), s.sent, b)...)
		s.sent++
	}
	if len(b) > maxFrame {
		return fmt.Errorf("control connection: a frame of %d bytes", len(b))
	}
	_, err = s.conn.Write(append(binary.LittleEndian.AppendUint32(nil, uint32(len(b))), b...))
	return err
}

func (s *stream) read(m any) error {
	var head [4]byte
	if _, err := io.ReadFull(s.conn, head[:]); err != nil {
		return err
	}
	n := binary.LittleEndian.Uint32(head[:])
	if n > maxFrame {
		return errFrame
	}
	b := make([]byte, n)
	if _, err := io.ReadFull(s.conn, b); err != nil {
		return err
	}
	if s.key != nil {
		if n < macSize {
			return errFrame
		}
		body, mac := b[:n-macSize], b[n-macSize:]
		if !hmac.Equal(mac, s.mac(s.in, s.got, body)) {
			return errFrame
		}
		s.got++
		b = body
	}
	if err := json.Unmarshal(b, m); err != nil {
		return errFrame
	}
	return nil
}

func nonce() []byte {
	b := make([]byte, 16)
	_, _ = rand.Read(b) // never fails
	return b
}

// derive makes what both ends can make and nobody else: the proof and the key of a connection.
func derive(token []byte, purpose string, g greeting, receiver []byte) []byte {
	h := hmac.New(sha256.New, token)
	fmt.Fprintf(h, "nixl %d %s %q %d %d %q %x %x", g.Version, purpose, g.Instance, g.Incarnation, g.Epoch, g.Session, g.Nonce, receiver)
	return h.Sum(nil)
}
