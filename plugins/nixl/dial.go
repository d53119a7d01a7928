package nixl

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// errFarewell: the receiver has dropped this writer, and nothing of it lands any more.
var errFarewell = errors.New("the receiver has dropped this writer")

// dial makes a control connection and returns the receiver's welcome. It takes at most connectBound.
func (b *Backend) dial(ctx context.Context, e endpoint, token []byte, session string) (*stream, message, error) {
	ctx, cancel := context.WithTimeout(ctx, connectBound)
	defer cancel()
	var conn net.Conn
	var errs []error
	for _, addr := range e.Addrs {
		c, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
		if err == nil {
			conn = c
			break
		}
		errs = append(errs, err)
	}
	if conn == nil {
		return nil, message{}, errors.Join(errs...)
	}
	s := &stream{conn: conn, in: toWriter}
	unhook := context.AfterFunc(ctx, func() { conn.Close() })
	m, err := s.greet(b, e, token, session)
	if !unhook() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		conn.Close()
		return nil, message{}, err
	}
	_ = conn.SetDeadline(time.Time{})
	return s, m, nil
}

func (s *stream) greet(b *Backend, e endpoint, token []byte, session string) (message, error) {
	g := greeting{Version: wireVersion, Instance: e.Instance, Incarnation: b.start.Incarnation, Epoch: b.start.Epoch, Session: session, Nonce: nonce()}
	if err := s.write(g); err != nil {
		return message{}, err
	}
	var c challenge
	if err := s.read(&c); err != nil {
		return message{}, err
	}
	if c.Refused != "" || len(c.Nonce) != 16 {
		return message{}, refused("%s: %.200q", s.conn.RemoteAddr(), c.Refused)
	}
	if err := s.write(proof{derive(token, "proof", g, c.Nonce)}); err != nil {
		return message{}, err
	}
	s.key = derive(token, "key", g, c.Nonce)
	var m message
	if err := s.read(&m); err != nil {
		return message{}, refused("%s ended the handshake: it has not admitted this writer (%v)", s.conn.RemoteAddr(), err)
	}
	switch m.Kind {
	case kindWelcome:
		return m, nil
	case kindFarewell:
		return message{}, errFarewell
	case kindFailed:
		return message{}, fmt.Errorf("the receiver: %.200s", m.Detail)
	}
	return message{}, errFrame
}

func refused(format string, args ...any) error {
	return &sdk.Error{Cause: contract.Cause_CAUSE_REFUSED, Err: fmt.Errorf(format, args...)}
}
