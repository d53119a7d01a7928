package peer

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/credentials"

	"github.com/terminus-kv/terminus/internal/regular"
)

// tlsFiles is the certificate, key and CA on disk. They are looked at before every handshake and read
// again when they changed; while the new ones are unusable the old ones stay in use. Streams that are
// up are not touched.
type tlsFiles struct {
	files TLS

	mu     sync.Mutex
	stamps [3]stamp
	cert   tls.Certificate
	roots  *x509.CertPool
	err    error // of the last reload
}

type stamp struct {
	modified time.Time
	size     int64
	inode    uint64
}

// openTLS reads the files and checks that the certificate carries this node's name.
func openTLS(files TLS, node string) (*tlsFiles, error) {
	t := &tlsFiles{files: files}
	if _, _, err := t.load(); err != nil {
		return nil, err
	}
	if err := namesNode(t.cert.Leaf, node); err != nil {
		return nil, fmt.Errorf("peers.tls.cert %s: %w", files.Cert, err)
	}
	return t, nil
}

// load returns what is on disk, or the last usable state of it; an error only when there is none.
func (t *tlsFiles) load() (tls.Certificate, *x509.CertPool, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	stamps, err := t.look()
	if err == nil && (t.roots == nil || stamps != t.stamps) {
		var cert tls.Certificate
		var roots *x509.CertPool
		if cert, roots, err = t.read(); err == nil {
			t.cert, t.roots, t.stamps = cert, roots, stamps
		}
	}
	t.err = err
	if t.roots == nil {
		return tls.Certificate{}, nil, err
	}
	return t.cert, t.roots, nil
}

func (t *tlsFiles) look() (stamps [3]stamp, err error) {
	for i, name := range []string{t.files.Cert, t.files.Key, t.files.CA} {
		var st unix.Stat_t
		if err := unix.Stat(name, &st); err != nil {
			return stamps, fmt.Errorf("peers.tls: %w", &os.PathError{Op: "stat", Path: name, Err: err})
		}
		stamps[i] = stamp{time.Unix(st.Mtim.Unix()), st.Size, st.Ino}
	}
	return stamps, nil
}

func (t *tlsFiles) read() (tls.Certificate, *x509.CertPool, error) {
	cert, err := regular.KeyPair(t.files.Cert, t.files.Key)
	if err != nil {
		return cert, nil, fmt.Errorf("peers.tls: cert %s with key %s: %w", t.files.Cert, t.files.Key, err)
	}
	pem, err := regular.Read(t.files.CA, regular.MaxPEM)
	if err != nil {
		return cert, nil, fmt.Errorf("peers.tls: %w", err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return cert, nil, fmt.Errorf("peers.tls: ca %s holds no certificate in PEM form", t.files.CA)
	}
	return cert, roots, nil
}

func (t *tlsFiles) lastError() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.err
}

func (t *tlsFiles) server() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		NextProtos: []string{"h2"},
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			cert, roots, err := t.load()
			if err != nil {
				return nil, err
			}
			return &tls.Config{
				MinVersion: tls.VersionTLS13, NextProtos: []string{"h2"},
				Certificates: []tls.Certificate{cert}, ClientCAs: roots, ClientAuth: tls.RequireAndVerifyClientCert,
				SessionTicketsDisabled: true, // every stream is verified against today's CA
			}, nil
		},
	}
}

func (t *tlsFiles) client(node string) (*tls.Config, error) {
	cert, roots, err := t.load()
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13, ServerName: node, RootCAs: roots,
		// Always ours, also when the server's list of CAs has another: its refusal then says so.
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &cert, nil },
	}, nil
}

// namesNode reports whether the certificate has node as a DNS name. A wildcard does not count: it would
// let one certificate speak for every node.
func namesNode(cert *x509.Certificate, node string) error {
	for _, name := range cert.DNSNames {
		if strings.EqualFold(name, node) {
			return nil
		}
	}
	return fmt.Errorf("the certificate names %q, not the node %q: issue one with DNS:%s as subject alternative name", cert.DNSNames, node, node)
}

// seenCreds is what the transport learned about the other side.
type seenCreds struct {
	mu   sync.Mutex
	auth credentials.AuthInfo
	err  error // of our own verification, or the alert by which the peer refused our certificate
}

func (s *seenCreds) set(auth credentials.AuthInfo, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if auth != nil {
		s.auth = auth
	}
	if s.err == nil {
		s.err = err
	}
}

// refusal is set when the certificate of either side was not accepted.
func (s *seenCreds) refusal() *Refusal {
	s.mu.Lock()
	defer s.mu.Unlock()
	var alert *net.OpError
	switch {
	case s.err == nil:
		return nil
	case errors.As(s.err, &alert) && alert.Op == remoteError:
		return &Refusal{Code: RefusedCertificate, ByPeer: true, Detail: "the peer does not accept this engine's certificate: " + alert.Err.Error()}
	}
	var host x509.HostnameError
	if errors.As(s.err, &host) {
		return &Refusal{Code: RefusedNode, Field: "certificate", Detail: s.err.Error()}
	}
	return &Refusal{Code: RefusedCertificate, Detail: "the peer's certificate is not acceptable: " + s.err.Error()}
}

// checkNode checks that the certificate, where there is one, carries the name that Hello claims.
func (s *seenCreds) checkNode(node string) *Refusal {
	s.mu.Lock()
	defer s.mu.Unlock()
	info, ok := s.auth.(credentials.TLSInfo)
	if !ok {
		return nil
	}
	if len(info.State.PeerCertificates) == 0 {
		return &Refusal{Code: RefusedCertificate, Detail: "the peer showed no certificate"}
	}
	if err := namesNode(info.State.PeerCertificates[0], node); err != nil {
		return &Refusal{Code: RefusedNode, Field: "hello.node", Detail: err.Error()}
	}
	return nil
}

// String says who the peer is, for Status and logs.
func (s *seenCreds) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch a := s.auth.(type) {
	case credentials.TLSInfo:
		if len(a.State.PeerCertificates) > 0 {
			c := a.State.PeerCertificates[0]
			return fmt.Sprintf("certificate %s, valid until %s", c.Subject, c.NotAfter.UTC().Format(time.RFC3339))
		}
	case ucred:
		return fmt.Sprintf("uid %d pid %d", a.uid, a.pid)
	}
	return ""
}

// remoteError is net.OpError.Op of a TLS alert that the peer sent.
const remoteError = "remote error"

// recorder is client credentials that note in seen what the handshake, and a later alert, say.
type recorder struct {
	credentials.TransportCredentials
	seen *seenCreds
}

// ClientHandshake implements credentials.TransportCredentials.
func (r recorder) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, auth, err := r.TransportCredentials.ClientHandshake(ctx, authority, raw)
	if err != nil {
		var op *net.OpError
		var verify *tls.CertificateVerificationError
		if errors.As(err, &verify) || errors.As(err, &op) && op.Op == remoteError {
			r.seen.set(nil, err)
		}
		return nil, nil, err
	}
	r.seen.set(auth, nil)
	return alertConn{conn, r.seen}, auth, nil
}

// Clone implements credentials.TransportCredentials.
func (r recorder) Clone() credentials.TransportCredentials {
	return recorder{r.TransportCredentials.Clone(), r.seen}
}

// alertConn notes the alert by which a TLS 1.3 server refuses the client's certificate: it comes after
// the client's handshake has ended well.
type alertConn struct {
	net.Conn
	seen *seenCreds
}

func (c alertConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	var op *net.OpError
	if errors.As(err, &op) && op.Op == remoteError {
		c.seen.set(nil, op)
	}
	return n, err
}

// ucred is SO_PEERCRED of the process at the other end of a unix socket.
type ucred struct {
	uid uint32
	pid int32
}

// AuthType implements credentials.AuthInfo.
func (ucred) AuthType() string { return "unix" }

// unixCreds admits processes of this user and of root.
type unixCreds struct{}

func (unixCreds) handshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	under := conn
	if c, ok := conn.(*countedConn); ok {
		under = c.NetConn()
	}
	u, ok := under.(*net.UnixConn)
	if !ok {
		return nil, nil, fmt.Errorf("%T is no unix socket", conn)
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return nil, nil, fmt.Errorf("peer credentials: %w", err)
	}
	var c *unix.Ucred
	var cerr error
	err = raw.Control(func(fd uintptr) { c, cerr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err := errors.Join(err, cerr); err != nil {
		return nil, nil, fmt.Errorf("peer credentials: %w", err)
	}
	if c.Uid != uint32(os.Geteuid()) && c.Uid != 0 {
		return nil, nil, fmt.Errorf("process %d is of user %d: only user %d and root may connect", c.Pid, c.Uid, os.Geteuid())
	}
	return conn, ucred{uid: c.Uid, pid: c.Pid}, nil
}

// ClientHandshake implements credentials.TransportCredentials.
func (u unixCreds) ClientHandshake(_ context.Context, _ string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return u.handshake(conn)
}

// ServerHandshake implements credentials.TransportCredentials.
func (u unixCreds) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return u.handshake(conn)
}

// Info implements credentials.TransportCredentials.
func (unixCreds) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "unix"}
}

// Clone implements credentials.TransportCredentials.
func (u unixCreds) Clone() credentials.TransportCredentials { return u }

// OverrideServerName implements credentials.TransportCredentials.
func (unixCreds) OverrideServerName(string) error { return nil }
