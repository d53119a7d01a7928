package peer

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/terminus-kv/terminus/internal/membership"
)

type ca struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newCA(t *testing.T) *ca {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &ca{t: t, key: key, cert: &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test CA"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}}
	der, err := x509.CreateCertificate(rand.Reader, c.cert, c.cert, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	if c.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	return c
}

// issue writes a certificate for names into dir; it ends at notAfter.
func (c *ca) issue(dir string, notAfter time.Time, names ...string) *TLS {
	c.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		c.t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: names[0]}, DNSNames: names,
		NotBefore: time.Now().Add(-2 * time.Hour), NotAfter: notAfter, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}, c.cert, key.Public(), c.key)
	if err != nil {
		c.t.Fatal(err)
	}
	keyDER, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		c.t.Fatal(err)
	}
	files := &TLS{Cert: filepath.Join(dir, "cert.pem"), Key: filepath.Join(dir, "key.pem"), CA: filepath.Join(dir, "ca.pem")}
	for file, block := range map[string]*pem.Block{
		files.Cert: {Type: "CERTIFICATE", Bytes: der}, files.Key: {Type: "EC PRIVATE KEY", Bytes: keyDER}, files.CA: {Type: "CERTIFICATE", Bytes: c.cert.Raw},
	} {
		if err := os.WriteFile(file+".new", pem.EncodeToMemory(block), 0o600); err != nil {
			c.t.Fatal(err)
		}
		if err := os.Rename(file+".new", file); err != nil {
			c.t.Fatal(err)
		}
	}
	return files
}

func tlsNode(t *testing.T, name string, files *TLS) *node {
	cfg := fast(name, 1, "127.0.0.1:0")
	cfg.TLS = files
	return start(t, cfg)
}

func TestTLS(t *testing.T) {
	good, other := newCA(t), newCA(t)
	later, past := time.Now().Add(time.Hour), time.Now().Add(-time.Hour)
	for _, c := range []struct {
		name  string
		files *TLS // of b
		node  string
		// what a (which dials, or is dialled) and b see; empty: up
		refusal RefusalCode
	}{
		{"good", good.issue(t.TempDir(), later, "b"), "b", 0},
		{"expired", good.issue(t.TempDir(), past, "b"), "b", RefusedCertificate},
		{"of another CA", other.issue(t.TempDir(), later, "b"), "b", RefusedCertificate},
		{"of another node", good.issue(t.TempDir(), later, "mallory"), "mallory", RefusedNode},
		{"wildcard and name", good.issue(t.TempDir(), later, "*.x", "b"), "b", 0},
	} {
		for _, dialler := range []string{"a dials", "b dials"} {
			t.Run(c.name+", "+dialler, func(t *testing.T) {
				a, b := tlsNode(t, "a", good.issue(t.TempDir(), later, "a")), tlsNode(t, c.node, c.files)
				pa, pb := a.as(), b.as()
				pb.Node = "b" // membership of a names "b" at that address
				if dialler == "a dials" {
					pa.Address = ""
				} else {
					pb.Address = ""
				}
				a.SetPeers([]membership.Peer{pb})
				b.SetPeers([]membership.Peer{pa})
				if c.refusal == 0 {
					p := a.awaitUp("b", 1)
					b.awaitUp("a", 1)
					if !strings.Contains(p.Credentials, "CN=") || !a.Status().TLS {
						t.Errorf("credentials %q", p.Credentials)
					}
					return
				}
				who, peer := a, "b"
				if dialler == "b dials" {
					who, peer = b, "a"
				}
				who.await("refusal", func() bool {
					return len(who.peer(peer).Refusals) > 0
				})
				codes := []RefusalCode{c.refusal}
				if c.refusal == RefusedNode && dialler == "b dials" {
					codes = []RefusalCode{RefusedUnknown, RefusedNode} // mallory says that it is mallory
				}
				if r := who.peer(peer).Refusals[0]; !slices.Contains(codes, r.Code) || r.Detail == "" {
					t.Errorf("%+v", r)
				}
				if len(a.find(Hello)) != 0 || len(b.find(Hello)) != 0 {
					t.Error("a stream came up")
				}
			})
		}
	}
}

// A certificate of the same CA does not let its holder speak for another node, not even a wildcard.
func TestTLSImpersonation(t *testing.T) {
	good := newCA(t)
	later := time.Now().Add(time.Hour)
	a := tlsNode(t, "a.x", good.issue(t.TempDir(), later, "a.x"))
	a.SetPeers([]membership.Peer{{Record: membership.Record{Node: "b.x"}}})
	for _, names := range [][]string{{"mallory.x", "m.x"}, {"*.x", "m.x"}} {
		m := tlsNode(t, "m.x", good.issue(t.TempDir(), later, names...))
		m.Links.cfg.Node = "b.x" // before it dials: it claims to be b.x
		m.SetPeers([]membership.Peer{a.as()})
		m.await("refused", func() bool {
			p := m.peer("a.x")
			return p.State == "refused" && p.Refusals[0].Code == RefusedNode && p.Refusals[0].ByPeer
		})
	}
	if p := a.peer("b.x"); p.State != "waiting" || len(p.Refusals) != 0 {
		t.Errorf("the impostor left traces at the peer that it is not: %+v", p)
	}
	if a.Status().Rejected == 0 {
		t.Error("not counted")
	}
}

func TestTLSReload(t *testing.T) {
	good, other := newCA(t), newCA(t)
	later := time.Now().Add(time.Hour)
	dirB := t.TempDir()
	a := tlsNode(t, "a", good.issue(t.TempDir(), later, "a"))
	b := tlsNode(t, "b", good.issue(dirB, later, "b"))
	meet(a, b)
	first := a.awaitUp("b", 1).Credentials

	// A new certificate is used from the next handshake on.
	good.issue(dirB, later.Add(time.Minute), "b")
	a.await("the new certificate", func() bool {
		p := a.peer("b")
		if p.State == "up" && p.Credentials == first {
			breakLink(a, "b")
		}
		return p.State == "up" && p.Credentials != first
	})

	// Unusable files: the old certificate stays in use, and Status says so.
	if err := os.WriteFile(filepath.Join(dirB, "cert.pem"), []byte("nonsense"), 0o600); err != nil {
		t.Fatal(err)
	}
	ups := len(a.find(Hello))
	breakLink(a, "b")
	a.await("up again", func() bool { return len(a.find(Hello)) > ups && a.peer("b").State == "up" })
	b.await("the error in Status", func() bool { return strings.Contains(b.Status().TLSError, "cert.pem") })

	// A certificate that a does not trust is refused, and a good one heals the link without a restart.
	other.issue(dirB, later, "b")
	breakLink(a, "b")
	a.await("refused", func() bool { return a.peer("b").State == "refused" })
	good.issue(dirB, later, "b")
	a.await("healed", func() bool { return a.peer("b").State == "up" })
	b.await("no error", func() bool { return b.Status().TLSError == "" })

	// The node's own certificate must carry its name: said at start.
	cfg := fast("c", 1, "127.0.0.1:0")
	cfg.TLS, cfg.Sink = good.issue(t.TempDir(), later, "d"), func(Event) {}
	if _, err := New(cfg); err == nil || !strings.Contains(err.Error(), "DNS:c") {
		t.Errorf("%v", err)
	}
}
