package tcp

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"time"
)

// The handshake proves the peer token both ways and names the writer:
//
//	writer    hello      magic, version, instance meant, incarnation, epoch, connection, nonce, node
//	receiver  challenge  status, nonce, HMAC(token, "receiver" hello nonce)
//	writer    proof      connections given up, HMAC(token, "writer" hello nonce connections)
//	receiver  welcome    status
//
// A welcome also says that the connections given up are over at the receiver: nothing that was sent on
// them can land any more. That is how a writer learns that the ops of a lost connection are gone.
const (
	magic        = "TERMTCP"
	nonceLen     = 32
	macLen       = sha256.Size
	helloFixed   = len(magic) + 1 + 16 + 8 + 4 + 8 + nonceLen + 2
	maxNode      = 255
	challengeLen = 1 + nonceLen + macLen
	maxGivenUp   = 256
	tokenLen     = 32
)

// status is the receiver's answer in the handshake.
type status uint8

const (
	statusOK status = iota + 1
	// statusUnknown: that writer epoch is not admitted, or not yet.
	statusUnknown
	// statusOther: the connection was meant for another run of the plugin.
	statusOther
	statusVersion
	// statusFull: no more connections.
	statusFull
	// statusRefused: that writer epoch is refused for good, but a slice of it may be landing still.
	statusRefused
)

func (s status) Error() string {
	switch s {
	case statusUnknown:
		return "the receiver does not admit this writer (yet)"
	case statusOther:
		return "another plugin process answers at this address"
	case statusVersion:
		return "the receiver speaks another version; run the same release on both hosts"
	case statusRefused:
		return "the receiver refuses this writer for good: it was fenced, or is being removed"
	case statusFull:
		return "the receiver has no connection left; raise max_connections there"
	}
	return fmt.Sprintf("the receiver answered with status %d", uint8(s))
}

// errToken is returned when the other end does not know the token.
var errToken = errors.New("the other end does not know the peer token")

// hello names the writer of a connection.
type hello struct {
	target      instance
	incarnation uint64
	epoch       uint32
	conn        uint64
	nonce       [nonceLen]byte
	node        string
}

func (h *hello) append(b []byte) []byte {
	b = append(b, magic...)
	b = append(b, wireVersion)
	b = append(b, h.target[:]...)
	b = binary.LittleEndian.AppendUint64(b, h.incarnation)
	b = binary.LittleEndian.AppendUint32(b, h.epoch)
	b = binary.LittleEndian.AppendUint64(b, h.conn)
	b = append(b, h.nonce[:]...)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(h.node)))
	return append(b, h.node...)
}

// readHello reads and decodes a hello; raw is what the proofs cover.
func readHello(r io.Reader) (h hello, raw []byte, err error) {
	raw = make([]byte, helloFixed, helloFixed+maxNode)
	if _, err = io.ReadFull(r, raw); err != nil {
		return h, raw, err
	}
	b := raw
	if string(b[:len(magic)]) != magic {
		return h, raw, errors.New("not a terminus tcp connection")
	}
	b = b[len(magic):]
	if b[0] != wireVersion {
		return h, raw, statusVersion
	}
	b = b[1:]
	b = b[copy(h.target[:], b):]
	h.incarnation = binary.LittleEndian.Uint64(b)
	h.epoch = binary.LittleEndian.Uint32(b[8:])
	h.conn = binary.LittleEndian.Uint64(b[12:])
	b = b[20:]
	b = b[copy(h.nonce[:], b):]
	n := int(binary.LittleEndian.Uint16(b))
	if n > maxNode {
		return h, raw, fmt.Errorf("node name of %d bytes, at most %d are allowed", n, maxNode)
	}
	raw = raw[:helloFixed+n]
	if _, err = io.ReadFull(r, raw[helloFixed:]); err != nil {
		return h, raw, err
	}
	h.node = string(raw[helloFixed:])
	return h, raw, nil
}

// proof is what each end shows: it covers who is meant, both nonces and, from the writer, the list.
func proof(token []byte, who string, parts ...[]byte) []byte {
	m := hmac.New(sha256.New, token)
	m.Write([]byte("terminus tcp " + who))
	for _, p := range parts {
		m.Write(p)
	}
	return m.Sum(nil)
}

// introduce is the writer's half. givenUp are connections whose end it wants confirmed.
func introduce(c net.Conn, h hello, token []byte, givenUp []uint64, timeout time.Duration) error {
	if len(h.node) > maxNode {
		return fmt.Errorf("node name of %d bytes, at most %d are allowed", len(h.node), maxNode)
	}
	if err := c.SetDeadline(time.Now().Add(timeout)); err != nil {
		return err
	}
	if _, err := rand.Read(h.nonce[:]); err != nil {
		return err
	}
	raw := h.append(make([]byte, 0, helloFixed+len(h.node)))
	if _, err := c.Write(raw); err != nil {
		return err
	}
	var answer [challengeLen]byte
	if _, err := io.ReadFull(c, answer[:1]); err != nil {
		return err
	}
	if s := status(answer[0]); s != statusOK {
		return s
	}
	if _, err := io.ReadFull(c, answer[1:]); err != nil {
		return err
	}
	nonce, mac := answer[1:1+nonceLen], answer[1+nonceLen:]
	if !hmac.Equal(mac, proof(token, "receiver", raw, nonce)) {
		return errToken
	}
	list := binary.LittleEndian.AppendUint16(nil, uint16(len(givenUp)))
	for _, n := range givenUp {
		list = binary.LittleEndian.AppendUint64(list, n)
	}
	if _, err := c.Write(append(list, proof(token, "writer", raw, nonce, list)...)); err != nil {
		return err
	}
	if _, err := io.ReadFull(c, answer[:1]); err != nil {
		return err
	}
	if s := status(answer[0]); s != statusOK {
		return s
	}
	return c.SetDeadline(time.Time{})
}

// examine is the receiver's half up to the welcome. admit returns the token of the writer. The deadline
// of the connection stays set.
func examine(c net.Conn, timeout time.Duration, admit func(hello) ([]byte, status)) (h hello, givenUp []uint64, err error) {
	if err = c.SetDeadline(time.Now().Add(timeout)); err != nil {
		return h, nil, err
	}
	h, raw, err := readHello(c)
	if err != nil {
		if s, ok := err.(status); ok {
			c.Write([]byte{byte(s)})
		}
		return h, nil, err
	}
	token, s := admit(h)
	if s != statusOK {
		c.Write([]byte{byte(s)})
		return h, nil, s
	}
	answer := make([]byte, 1+nonceLen, challengeLen)
	answer[0] = byte(statusOK)
	nonce := answer[1:]
	if _, err = rand.Read(nonce); err != nil {
		return h, nil, err
	}
	if _, err = c.Write(append(answer, proof(token, "receiver", raw, nonce)...)); err != nil {
		return h, nil, err
	}
	list := make([]byte, 2, 2+8*8)
	if _, err = io.ReadFull(c, list); err != nil {
		return h, nil, err
	}
	n := int(binary.LittleEndian.Uint16(list))
	if n > maxGivenUp {
		return h, nil, fmt.Errorf("%d connections given up, at most %d are allowed", n, maxGivenUp)
	}
	list = append(list, make([]byte, 8*n+macLen)...)
	if _, err = io.ReadFull(c, list[2:]); err != nil {
		return h, nil, err
	}
	list, mac := list[:2+8*n], list[2+8*n:]
	if !hmac.Equal(mac, proof(token, "writer", raw, nonce, list)) {
		return h, nil, errToken
	}
	for i := range n {
		givenUp = append(givenUp, binary.LittleEndian.Uint64(list[2+8*i:]))
	}
	return h, givenUp, nil
}
