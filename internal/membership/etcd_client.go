package membership

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"github.com/terminus-kv/terminus/internal/regular"
)

// load reads the files; nil where nothing is configured.
func (t EtcdTLS) load() (*tls.Config, error) {
	if t == (EtcdTLS{}) {
		return nil, nil
	}
	c := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: t.ServerName}
	if t.CA != "" {
		pem, err := regular.Read(t.CA, regular.MaxPEM)
		if err != nil {
			return nil, fmt.Errorf("peers.etcd.tls.ca: %w", err)
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("peers.etcd.tls.ca: %s holds no certificate in PEM form", t.CA)
		}
	}
	if t.Cert == "" {
		return c, nil
	}
	read := func() (*tls.Certificate, error) {
		cert, err := regular.KeyPair(t.Cert, t.Key)
		if err != nil {
			return nil, fmt.Errorf("peers.etcd.tls: cert %s with key %s: %w", t.Cert, t.Key, err)
		}
		return &cert, nil
	}
	if _, err := read(); err != nil {
		return nil, err
	}
	c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return read() }
	return c, nil
}

// maxPassword is more than the store takes.
const maxPassword = 64 << 10

func readPassword(file string) (string, error) {
	if file == "" {
		return "", nil
	}
	b, err := regular.Read(file, maxPassword)
	if err != nil {
		return "", fmt.Errorf("peers.etcd.password_file: %w", err)
	}
	password := strings.TrimRight(string(b), "\r\n")
	if password == "" {
		return "", fmt.Errorf("peers.etcd.password_file: %s is empty", file)
	}
	return password, nil
}

// dialOptions are for a store that may be away for long. The client's own have it wait for a connection, so
// that a request ends as a timeout and nobody learns why; and gRPC's wait up to two minutes between two
// attempts to connect: by then every lease that the store has kept would have run out.
func dialOptions(cfg EtcdConfig, tlsConfig *tls.Config) []grpc.DialOption {
	again := backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: min(time.Second, cfg.Lease/8)}
	options := []grpc.DialOption{
		grpc.WithNoProxy(),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: again, MinConnectTimeout: cfg.Timeout + time.Second}),
		grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			return invoke(ctx, method, req, reply, cc, append(opts, grpc.WaitForReady(false))...)
		}),
	}
	if cfg.TLS.ServerName != "" {
		options = append(options, grpc.WithTransportCredentials(namedCreds{credentials.NewTLS(tlsConfig), cfg.TLS.ServerName}))
	}
	return options
}

// namedCreds expects a server of that name: the client would have gRPC look for the endpoint's host, whatever
// the tls.Config says.
type namedCreds struct {
	credentials.TransportCredentials
	name string
}

func (c namedCreds) ClientHandshake(ctx context.Context, _ string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return c.TransportCredentials.ClientHandshake(ctx, c.name, conn)
}

func (c namedCreds) Clone() credentials.TransportCredentials {
	return namedCreds{c.TransportCredentials.Clone(), c.name}
}

func leaseNotFound(err error) bool { return errors.Is(err, rpctypes.ErrLeaseNotFound) }

func (d *etcd) endpoints() string { return strings.Join(d.cfg.Endpoints, ", ") }

// explain makes one line of an error of the client: which store, what is wrong, what to do.
func (d *etcd) explain(err error) error {
	if err == nil {
		return nil
	}
	why := err.Error()
	if s, ok := status.FromError(err); ok {
		why = s.Message()
	}
	fix := ""
	switch {
	case errors.Is(err, rpctypes.ErrAuthFailed):
		why, fix = "the user name or the password is wrong", "peers.etcd.username and password_file must be those of a user of the store"
	case errors.Is(err, rpctypes.ErrUserEmpty):
		why, fix = "it asks for a user", "set peers.etcd.username and password_file"
	case errors.Is(err, rpctypes.ErrPermissionDenied):
		user := fmt.Sprintf("user %q", d.cfg.Username)
		if d.cfg.Username == "" {
			user = "the user that this engine's certificate names"
		}
		why = user + " may not do that"
		fix = fmt.Sprintf("grant a role with readwrite on the prefix %s/, or set another peers.etcd.username", d.cfg.Prefix)
	case errors.Is(err, context.DeadlineExceeded), status.Code(err) == codes.DeadlineExceeded:
		why, fix = fmt.Sprintf("no answer within %v", d.cfg.Timeout), "see that peers.etcd.endpoints can be reached and that most members are up"
	case strings.Contains(why, "tls:"), strings.Contains(why, "x509:"):
		fix = "see peers.etcd.tls and the https in peers.etcd.endpoints"
	case status.Code(err) == codes.Unavailable && strings.HasPrefix(d.cfg.Endpoints[0], "https:") && !strings.Contains(why, "dial tcp"):
		// Of the refusal of our certificate often nothing is left to read but the end of the connection.
		fix = "if it lasts the store refuses the certificate of this engine: see peers.etcd.tls"
	case status.Code(err) == codes.Unavailable:
		fix = "see that peers.etcd.endpoints can be reached and that most members are up"
	}
	// gRPC wraps what the network said in several layers of its own.
	if _, inner, ok := strings.Cut(why, `desc = "`); ok {
		why = strings.TrimSuffix(inner, `"`)
	}
	why = strings.TrimPrefix(strings.TrimPrefix(why, "transport: "), "Error while dialing: ")
	if fix != "" {
		fix = "; fix: " + fix
	}
	return &etcdError{fmt.Sprintf("etcd at %s: %s%s", d.endpoints(), strings.Join(strings.Fields(why), " "), fix), err}
}

// etcdError keeps the client's error below a text for people.
type etcdError struct {
	text string
	err  error
}

func (e *etcdError) Error() string { return e.text }
func (e *etcdError) Unwrap() error { return e.err }
