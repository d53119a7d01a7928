package membership

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

// store is a real etcd, a child process.
type store struct {
	dir   string
	addr  string
	args  []string
	cmd   *exec.Cmd
	stdin io.Closer
}

// server is the program, and the store that tests share; made once.
var server struct {
	sync.Mutex
	dir    string
	shared *store
}

// cleanUp removes what tests share.
func cleanUp() {
	if server.shared != nil {
		server.shared.kill()
	}
	if server.dir != "" {
		os.RemoveAll(server.dir)
	}
}

// program builds the server, which is a module of its own.
func program(t testing.TB) string {
	t.Helper()
	if server.dir == "" {
		server.dir = must(os.MkdirTemp("", "membership-test-"))
	}
	path := filepath.Join(server.dir, "etcdtest")
	if _, err := os.Stat(path); err == nil {
		return path
	}
	cmd := exec.Command("go", "build", "-ldflags", "-s -w", "-o", path, ".")
	cmd.Dir = "etcdtest"
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go build etcdtest: %v\n%s", err, out)
	}
	return path
}

// sharedStore serves many tests; it is not to be stopped.
func sharedStore(t testing.TB) *store {
	t.Helper()
	server.Lock()
	defer server.Unlock()
	if server.shared == nil {
		path := program(t)
		server.shared = &store{dir: filepath.Join(server.dir, "shared"), addr: "127.0.0.1:0"}
		server.shared.run(t, path, os.Stderr) // it outlives the test
	}
	return server.shared
}

// ownStore is one that the test may do with as it likes.
func ownStore(t testing.TB, args ...string) *store {
	t.Helper()
	server.Lock()
	path := program(t)
	server.Unlock()
	s := &store{dir: filepath.Join(t.TempDir(), "store"), addr: "127.0.0.1:0", args: args}
	s.run(t, path, t.Output())
	t.Cleanup(s.kill)
	return s
}

func (s *store) run(t testing.TB, path string, stderr io.Writer) {
	t.Helper()
	s.cmd = exec.Command(path, append([]string{"-dir", s.dir, "-listen", s.addr}, s.args...)...)
	s.cmd.Stderr = stderr
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	s.stdin = must(s.cmd.StdinPipe())
	out := must(s.cmd.StdoutPipe())
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatalf("the store said %q: %v", line, err)
	}
	s.addr = strings.TrimSpace(strings.TrimPrefix(line, "listening "))
}

// again starts the store that was killed, with its data, at its address.
func (s *store) again(t testing.TB) {
	t.Helper()
	s.run(t, s.cmd.Path, t.Output())
}

func (s *store) kill() {
	s.cmd.Process.Kill()
	s.cmd.Wait()
	s.stdin.Close()
}

func (s *store) endpoint() string { return "http://" + s.addr }

// client is another program that uses the store.
func (s *store) client(t testing.TB) *clientv3.Client {
	t.Helper()
	return clientOf(t, etcdConfig(s.endpoint(), ""))
}

func clientOf(t testing.TB, c EtcdConfig) *clientv3.Client {
	t.Helper()
	files := must(c.TLS.load())
	client := must(clientv3.New(clientv3.Config{Endpoints: c.Endpoints, TLS: files, DialOptions: dialOptions(c, files), Logger: zap.NewNop()}))
	t.Cleanup(func() { client.Close() })
	return client
}

func etcdConfig(endpoint, dir string) EtcdConfig {
	return EtcdConfig{Endpoints: []string{endpoint}, Prefix: "/terminus", Lease: 2 * time.Second, Timeout: 2 * time.Second, StateDir: dir}
}

// config is for engines of one test, without what an earlier run of it left.
func (s *store) config(t testing.TB, prefix string) EtcdConfig {
	t.Helper()
	must(s.client(t).Delete(context.Background(), prefix+"/", clientv3.WithPrefix()))
	c := etcdConfig(s.endpoint(), t.TempDir())
	c.Prefix = prefix
	return c
}

func newEtcd(t testing.TB, c EtcdConfig) Driver {
	t.Helper()
	d, err := NewEtcd(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

// join registers node with a driver of its own.
func join(t testing.TB, c EtcdConfig, node string) (Driver, Lease) {
	t.Helper()
	d := newEtcd(t, c)
	l, err := d.Register(context.Background(), record(node))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return d, l
}

func TestEtcdIncarnationIsTheCreateRevision(t *testing.T) {
	s := sharedStore(t)
	c := s.config(t, "/revision")
	a, la := join(t, c, "a")
	resp := must(s.client(t).Get(t.Context(), "/revision/peers/a"))
	if len(resp.Kvs) != 1 || uint64(resp.Kvs[0].CreateRevision) != la.Incarnation() || resp.Kvs[0].Lease == 0 {
		t.Fatalf("%+v, incarnation %d", resp.Kvs, la.Incarnation())
	}
	_, lb := join(t, c, "b")
	w := a.Watch(t.Context())
	u := wait(t, w, func(u Update) bool { return nodes(u) == "b" })
	if want := record("b"); u.Peers[0].Record != want || u.Peers[0].Incarnation != lb.Incarnation() {
		t.Fatalf("%+v", u.Peers)
	}
	lb.Close()
	wait(t, w, func(u Update) bool { return nodes(u) == "" && len(u.Gone) == 0 && u.Err == nil })
}

// An engine that was killed is followed at once on its host, whose lock proves it dead, and elsewhere
// when its lease has run out.
func TestEtcdRestart(t *testing.T) {
	t.Parallel()
	s := sharedStore(t)
	dir := t.TempDir()
	c := etcdConfig(s.endpoint(), dir) // the prefix of the child
	killed := func(lease string) uint64 {
		cmd, inc := spawn(t, dir, "a", "MEMBERSHIP_TEST_ETCD="+s.endpoint(), "MEMBERSHIP_TEST_LEASE="+lease)
		cmd.Process.Kill()
		cmd.Wait()
		return inc
	}

	first := killed("30s")
	start := time.Now()
	d, l := join(t, c, "a")
	if took := time.Since(start); took > 10*time.Second || l.Incarnation() <= first {
		t.Errorf("incarnation %d after %d, and it took %v", l.Incarnation(), first, took)
	}
	twin := c
	twin.StateDir = t.TempDir()
	l.Close()
	d.Close()

	_, l = join(t, c, "a")
	_, err := newEtcd(t, twin).Register(t.Context(), record("a"))
	if want := fmt.Sprintf("node name is taken by process %d of host host at unix:/run/x/a, incarnation %d: stop", os.Getpid(), l.Incarnation()); !errors.Is(err, ErrNodeTaken) || !strings.Contains(err.Error(), want) {
		t.Errorf("got %v", err)
	}
	l.Close()

	first = killed("2s")
	start = time.Now()
	_, l = join(t, twin, "a")
	if took := time.Since(start); took < time.Second || l.Incarnation() <= first {
		t.Errorf("incarnation %d after %d, and it took only %v", l.Incarnation(), first, took)
	}
}

func TestEtcdGroups(t *testing.T) {
	s := sharedStore(t)
	c := s.config(t, "/groups")
	_, l := join(t, c, "a")
	p := l.(GroupPublisher)
	other := s.client(t)
	is := func(want ...string) {
		t.Helper()
		var got []string
		for give := time.Now().Add(10 * time.Second); time.Now().Before(give); time.Sleep(10 * time.Millisecond) {
			got = nil
			for _, kv := range must(other.Get(t.Context(), "/groups/groups/", clientv3.WithPrefix())).Kvs {
				got = append(got, fmt.Sprintf("%s %s", kv.Key, kv.Value))
			}
			if slices.Equal(got, want) {
				return
			}
		}
		t.Fatalf("the store has %q, want %q", got, want)
	}
	ranks := []int32{0}
	p.SetGroups([]Group{{"m", "source", 2, ranks}, {"a/b c", "destination", 1, []int32{0}}})
	is(`/groups/groups/a/a%2Fb%20c {"name":"a/b c","role":"destination","size":1,"ranks":[0]}`, `/groups/groups/a/m {"name":"m","role":"source","size":2,"ranks":[0]}`)
	ranks[0] = 7 // ours
	p.SetGroups([]Group{{"m", "source", 2, []int32{0, 1}}})
	is(`/groups/groups/a/m {"name":"m","role":"source","size":2,"ranks":[0,1]}`)
	l.Close()
	is()
}

// The store is killed for longer than a lease: nobody is lost, what is known stays, and what happens after
// it is back is seen.
func TestEtcdOutage(t *testing.T) {
	t.Parallel()
	s := ownStore(t)
	dir := t.TempDir()
	c := etcdConfig(s.endpoint(), dir)
	a, la := join(t, c, "a")
	_, lb := join(t, c, "b")
	w := a.Watch(t.Context())
	wait(t, w, func(u Update) bool { return nodes(u) == "b" && u.Err == nil })

	s.kill()
	u := wait(t, w, func(u Update) bool { return u.Err != nil })
	if text := u.Err.Error(); nodes(u) != "b" || !strings.Contains(text, "etcd at "+s.endpoint()) || !strings.Contains(text, "connection refused; fix: ") || strings.Contains(text, "\n") {
		t.Errorf("%+v", u)
	}
	time.Sleep(2 * c.Lease)
	for _, l := range []Lease{la, lb} {
		if l.Err() != nil {
			t.Fatalf("lost: %v", l.Err())
		}
	}
	s.again(t)
	wait(t, w, func(u Update) bool { return nodes(u) == "b" && u.Err == nil })
	_, lc := join(t, c, "c")
	wait(t, w, func(u Update) bool { return nodes(u) == "b c" && u.Peers[1].Incarnation == lc.Incarnation() })
	lb.Close()
	wait(t, w, func(u Update) bool { return nodes(u) == "c" })
	time.Sleep(2 * c.Lease) // renewed all the same
	if la.Err() != nil {
		t.Fatalf("lost: %v", la.Err())
	}
}

// Registered engines do not believe a store that has forgotten them, and one that starts does not take an
// incarnation that has been.
func TestEtcdStoreIsEmptied(t *testing.T) {
	t.Parallel()
	s := ownStore(t)
	other := s.client(t)
	fill := func(n int) {
		for range n {
			must(other.Put(t.Context(), "/x", ""))
		}
	}
	fill(20)
	dir := t.TempDir()
	c := etcdConfig(s.endpoint(), dir)
	a, la := join(t, c, "a")
	b, lb := join(t, c, "b")
	w, wb := a.Watch(t.Context()), b.Watch(t.Context())
	wait(t, w, func(u Update) bool { return nodes(u) == "b" })
	wait(t, wb, func(u Update) bool { return nodes(u) == "a" })
	s.kill()
	if err := os.RemoveAll(s.dir); err != nil {
		t.Fatal(err)
	}
	s.again(t)
	wait(t, w, func(u Update) bool { return errors.Is(u.Err, errOtherStore) && nodes(u) == "b" })
	wait(t, wb, func(u Update) bool { return errors.Is(u.Err, errOtherStore) && nodes(u) == "a" })
	fill(60) // its revisions catch up
	join(t, c, "c")
	time.Sleep(2 * c.Lease)
	select {
	case u := <-w:
		if nodes(u) != "b" {
			t.Errorf("%+v", u)
		}
	default:
	}
	if err := errors.Join(la.Err(), lb.Err()); err != nil {
		t.Errorf("lost: %v", err)
	}

	lb.Close()
	last := filepath.Join(dir, "b"+lastSuffix)
	if err := os.WriteFile(last, []byte("1000\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := newEtcd(t, c).Register(t.Context(), record("b"))
	if err == nil || !strings.Contains(err.Error(), "is not above 1000") || !strings.Contains(err.Error(), last) {
		t.Errorf("got %v", err)
	}
	if n := must(other.Get(t.Context(), "/terminus/peers/b")).Count; n != 0 {
		t.Error("a refused registration left its record")
	}
}

func TestEtcdLost(t *testing.T) {
	s := sharedStore(t)
	other := s.client(t)
	for name, c := range map[string]struct {
		do   func(key string, lease clientv3.LeaseID) error
		want string
	}{
		"lease revoked": {func(_ string, id clientv3.LeaseID) error {
			_, err := other.Revoke(t.Context(), id)
			return err
		}, "the store has no record"},
		"record removed": {func(key string, _ clientv3.LeaseID) error {
			_, err := other.Delete(t.Context(), key)
			return err
		}, "the store has no record"},
		"record of another": {func(key string, _ clientv3.LeaseID) error {
			if _, err := other.Delete(t.Context(), key); err != nil {
				return err
			}
			_, err := other.Put(t.Context(), key, "{}")
			return err
		}, "belongs to incarnation"},
		"lease alone": {func(key string, id clientv3.LeaseID) error {
			kv := must(other.Get(t.Context(), key)).Kvs[0] // the same record, held by nothing
			if _, err := other.Put(t.Context(), key, string(kv.Value)); err != nil {
				return err
			}
			_, err := other.Revoke(t.Context(), id)
			return err
		}, "does not know the lease"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := s.config(t, "/lost/"+strings.ReplaceAll(name, " ", "-"))
			_, l := join(t, cfg, "a")
			if err := c.do(cfg.Prefix+"/peers/a", l.(*etcdLease).id); err != nil {
				t.Fatal(err)
			}
			select {
			case <-l.Lost():
			case <-time.After(10 * time.Second):
				t.Fatal("not lost")
			}
			if text := fmt.Sprint(l.Err()); !strings.Contains(text, c.want) {
				t.Errorf("got %s", text)
			}
		})
	}
}

// cable passes one connection after another on to an address; it can be cut.
type cable struct {
	ln  net.Listener
	to  string
	wg  sync.WaitGroup
	mu  sync.Mutex
	cut bool
	all []net.Conn
}

func newCable(t *testing.T, to string) *cable {
	c := &cable{ln: must(net.Listen("tcp", "127.0.0.1:0")), to: to}
	c.wg.Go(func() {
		for {
			near, err := c.ln.Accept()
			if err != nil {
				return
			}
			c.mu.Lock()
			far, err := net.Dial("tcp", c.to)
			if c.cut || err != nil {
				near.Close()
				if err == nil {
					far.Close()
				}
			} else {
				c.all = append(c.all, near, far)
				c.wg.Go(func() { io.Copy(near, far); near.Close() })
				c.wg.Go(func() { io.Copy(far, near); far.Close() })
			}
			c.mu.Unlock()
		}
	})
	t.Cleanup(func() { c.ln.Close(); c.set(true); c.wg.Wait() })
	return c
}

func (c *cable) set(cut bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cut = cut
	for _, conn := range c.all {
		conn.Close()
	}
	c.all = nil
}

// What happened while an engine was cut off is compacted when it comes back: it reads all records again.
func TestEtcdCompaction(t *testing.T) {
	s := sharedStore(t)
	c := s.config(t, "/compaction")
	c.Lease = 10 * time.Second
	_, lb := join(t, c, "b")
	_, lc := join(t, c, "c")
	far := c
	line := newCable(t, s.addr)
	far.Endpoints = []string{"http://" + line.ln.Addr().String()}
	a, la := join(t, far, "a")
	w := a.Watch(t.Context())
	wait(t, w, func(u Update) bool { return nodes(u) == "b c" })

	line.set(true)
	lb.Close()
	lc.Close()
	_, lc = join(t, c, "c")
	_, _ = join(t, c, "d")
	other := s.client(t)
	rev := must(other.Get(t.Context(), "/x")).Header.Revision
	must(other.Compact(t.Context(), rev))
	line.set(false)
	u := wait(t, w, func(u Update) bool { return nodes(u) == "c d" })
	if len(u.Gone) != 0 || u.Peers[0].Incarnation != lc.Incarnation() || la.Err() != nil {
		t.Errorf("%+v, lost %v", u, la.Err())
	}
	must(other.Delete(t.Context(), "/compaction/peers/d"))
	wait(t, w, func(u Update) bool { return nodes(u) == "c" && u.Err == nil })
}

// follow itself says that it met a compaction.
func TestEtcdFollowCompacted(t *testing.T) {
	s := sharedStore(t)
	c := s.config(t, "/follow")
	d := newEtcd(t, c)
	w := &etcdWatch{d: d.(*etcd), out: make(chan Update, 1)}
	rev := must(w.list(t.Context()))
	other := s.client(t)
	must(other.Put(t.Context(), "/follow/x", ""))
	must(other.Compact(t.Context(), must(other.Put(t.Context(), "/follow/x", "")).Header.Revision))
	if err := w.follow(t.Context(), rev+1); err != nil {
		t.Errorf("got %v", err)
	}
}

// A record that cannot be read is said, and leaves the others and what was known of its node.
func TestEtcdBadRecord(t *testing.T) {
	s := sharedStore(t)
	c := s.config(t, "/bad")
	other := s.client(t)
	must(other.Put(t.Context(), "/bad/peers/x", "{"))
	a, _ := join(t, c, "a")
	join(t, c, "b")
	w := a.Watch(t.Context())
	wait(t, w, func(u Update) bool {
		return nodes(u) == "b" && u.Err != nil && strings.Contains(u.Err.Error(), "/bad/peers/x")
	})
	twin := c
	twin.StateDir = t.TempDir()
	if _, err := newEtcd(t, twin).Register(t.Context(), record("x")); !errors.Is(err, ErrNodeTaken) || !strings.Contains(err.Error(), "key /bad/peers/x holds what is no record of an engine") {
		t.Errorf("got %v", err)
	}
	must(other.Delete(t.Context(), "/bad/peers/x"))
	wait(t, w, func(u Update) bool { return nodes(u) == "b" && u.Err == nil })
	must(other.Put(t.Context(), "/bad/peers/b", strings.Repeat(" ", maxRecord+1)))
	wait(t, w, func(u Update) bool {
		return nodes(u) == "b" && u.Err != nil && strings.Contains(u.Err.Error(), "bytes, at most")
	})
}

// Nobody serves: one clear line in bounded time.
func TestEtcdDownAtStart(t *testing.T) {
	t.Parallel()
	ln := must(net.Listen("tcp", "127.0.0.1:0"))
	defer ln.Close() // it accepts and says nothing
	silent := "http://" + ln.Addr().String()
	gone := must(net.Listen("tcp", "127.0.0.1:0"))
	gone.Close()
	password := filepath.Join(t.TempDir(), "password")
	if err := os.WriteFile(password, []byte("x\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for endpoint, want := range map[string]string{
		silent:                           "no answer within 2s; fix: ",
		"http://" + gone.Addr().String(): "connection refused; fix: ",
	} {
		for _, user := range []string{"", "u"} {
			c := etcdConfig(endpoint, t.TempDir())
			if user != "" {
				c.Username, c.PasswordFile = user, password
			}
			start := time.Now()
			d, err := NewEtcd(c)
			if err == nil {
				_, err = d.Register(t.Context(), record("a"))
				d.Close()
			}
			text := fmt.Sprint(err)
			if !strings.Contains(text, "etcd at "+endpoint+": ") || !strings.Contains(text, want) || strings.Contains(text, "\n") {
				t.Errorf("user %q: %s", user, text)
			}
			if took := time.Since(start); took > 6*time.Second {
				t.Errorf("took %v", took)
			}
		}
	}
}

// A store that is away is dialled often enough to be found again within a lease: gRPC by itself waits longer and longer.
func TestEtcdKeepsDialling(t *testing.T) {
	t.Parallel()
	ln := must(net.Listen("tcp", "127.0.0.1:0"))
	defer ln.Close()
	dials := make(chan struct{}, 1000)
	go func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			conn.Close()
			dials <- struct{}{}
		}
	}()
	d := newEtcd(t, etcdConfig("http://"+ln.Addr().String(), t.TempDir()))
	for end := time.Now().Add(4 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if _, err := d.Register(t.Context(), record("a")); err == nil {
			t.Fatal("registered nowhere")
		}
	}
	if n := len(dials); n < 8 { // gRPC's own pace: about 4
		t.Errorf("%d dials in 4 s", n)
	}
}

// authority signs certificates for one test.
type authority struct {
	t    testing.TB
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t testing.TB) *authority {
	a := &authority{t: t, dir: t.TempDir()}
	a.key = must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "ca"}, NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	der := must(x509.CreateCertificate(rand.Reader, tmpl, tmpl, a.key.Public(), a.key))
	a.cert = must(x509.ParseCertificate(der))
	a.pem("ca.crt", "CERTIFICATE", der)
	return a
}

func (a *authority) pem(name, kind string, der []byte) string {
	path := filepath.Join(a.dir, name)
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		a.t.Fatal(err)
	}
	return path
}

func (a *authority) ca() string { return filepath.Join(a.dir, "ca.crt") }

// issue returns the files of a certificate for a DNS name.
func (a *authority) issue(name string) (cert, key string) {
	k := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name}, DNSNames: []string{name}, NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der := must(x509.CreateCertificate(rand.Reader, tmpl, a.cert, k.Public(), a.key))
	return a.pem(name+".crt", "CERTIFICATE", der), a.pem(name+".key", "EC PRIVATE KEY", must(x509.MarshalECPrivateKey(k)))
}

// enableAuth has the store ask for users: root, and one for engines.
func enableAuth(ctx context.Context, root *clientv3.Client) {
	must(root.RoleAdd(ctx, "root"))
	must(root.UserAdd(ctx, "root", "r"))
	must(root.UserGrantRole(ctx, "root", "root"))
	must(root.RoleAdd(ctx, "engines"))
	must(root.RoleGrantPermission(ctx, "engines", "/terminus/", clientv3.GetPrefixRangeEnd("/terminus/"), clientv3.PermissionType(clientv3.PermReadWrite)))
	must(root.UserAdd(ctx, "engine", "secret"))
	must(root.UserGrantRole(ctx, "engine", "engines"))
	must(root.AuthEnable(ctx))
}

func TestEtcdAsksForAUser(t *testing.T) {
	t.Parallel()
	s := ownStore(t)
	enableAuth(t.Context(), s.client(t))
	d := newEtcd(t, etcdConfig(s.endpoint(), t.TempDir()))
	if _, err := d.Register(t.Context(), record("a")); err == nil || !strings.HasSuffix(err.Error(), "it asks for a user; fix: set peers.etcd.username and password_file") {
		t.Errorf("got %v", err)
	}
}

func TestEtcdTLSAndAuth(t *testing.T) {
	t.Parallel()
	ca := newAuthority(t)
	cert, key := ca.issue("store.example.com")
	s := ownStore(t, "-cert", cert, "-key", key, "-ca", ca.ca())
	endpoint := "https://" + s.addr
	ownCert, ownKey := ca.issue("client")
	files := EtcdTLS{CA: ca.ca(), Cert: ownCert, Key: ownKey, ServerName: "store.example.com"}

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	good := etcdConfig(endpoint, t.TempDir())
	good.TLS = files
	root := clientOf(t, good)
	enableAuth(ctx, root)

	secret := filepath.Join(t.TempDir(), "secret")
	wrong := filepath.Join(t.TempDir(), "wrong")
	if err := errors.Join(os.WriteFile(secret, []byte("secret\n"), 0o600), os.WriteFile(wrong, []byte("wrong\n"), 0o600)); err != nil {
		t.Fatal(err)
	}
	good.Username, good.PasswordFile = "engine", secret

	stranger := newAuthority(t)
	strangerCert, strangerKey := stranger.issue("client")
	for name, c := range map[string]struct {
		change func(*EtcdConfig)
		want   string
	}{
		"wrong password":            {func(c *EtcdConfig) { c.PasswordFile = wrong }, "the user name or the password is wrong; fix: "},
		"no user":                   {func(c *EtcdConfig) { c.Username, c.PasswordFile = "", "" }, "the user that this engine's certificate names may not do that; fix: grant a role"},
		"other prefix":              {func(c *EtcdConfig) { c.Prefix = "/else" }, `user "engine" may not do that; fix: grant a role with readwrite on the prefix /else/`},
		"no certificate":            {func(c *EtcdConfig) { c.TLS.Cert, c.TLS.Key = "", "" }, "see peers.etcd.tls"},
		"other CA":                  {func(c *EtcdConfig) { c.TLS.CA = stranger.ca() }, "certificate signed by unknown authority"},
		"other name":                {func(c *EtcdConfig) { c.TLS.ServerName = "else" }, "certificate is valid for store.example.com, not else; fix: see peers.etcd.tls"},
		"certificate of a stranger": {func(c *EtcdConfig) { c.TLS.Cert, c.TLS.Key = strangerCert, strangerKey }, "see peers.etcd.tls"},
		"key of another":            {func(c *EtcdConfig) { c.TLS.Key = key }, "peers.etcd.tls: cert " + ownCert + " with key " + key},
		"CA is no CA":               {func(c *EtcdConfig) { c.TLS.CA = secret }, "holds no certificate"},
		"plain":                     {func(c *EtcdConfig) { c.Endpoints, c.TLS = []string{"http://" + s.addr}, EtcdTLS{} }, "fix: see "},
	} {
		bad := good
		bad.StateDir = t.TempDir()
		c.change(&bad)
		d, err := NewEtcd(bad)
		if err == nil {
			_, err = d.Register(ctx, record("x"))
			d.Close()
		}
		if text := fmt.Sprint(err); !strings.Contains(text, c.want) || strings.Contains(text, "\n") {
			t.Errorf("%s: %s", name, text)
		}
	}

	a, la := join(t, good, "a")
	_, _ = join(t, good, "b")
	w := a.Watch(ctx)
	wait(t, w, func(u Update) bool { return nodes(u) == "b" && u.Err == nil })
	// A store that starts again knows no token that it gave out before.
	s.kill()
	wait(t, w, func(u Update) bool { return nodes(u) == "b" && u.Err != nil })
	s.again(t)
	wait(t, w, func(u Update) bool { return nodes(u) == "b" && u.Err == nil })
	_, _ = join(t, good, "c")
	wait(t, w, func(u Update) bool { return nodes(u) == "b c" })
	time.Sleep(2 * good.Lease)
	if la.Err() != nil {
		t.Errorf("lost: %v", la.Err())
	}
}

func TestEtcdBadConfig(t *testing.T) {
	good := etcdConfig("http://127.0.0.1:1", t.TempDir())
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, []byte("\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for want, change := range map[string]func(*EtcdConfig){
		"no endpoint":              func(c *EtcdConfig) { c.Endpoints = nil },
		"no state directory":       func(c *EtcdConfig) { c.StateDir = "" },
		`prefix "x"`:               func(c *EtcdConfig) { c.Prefix = "x" },
		`prefix "/x/"`:             func(c *EtcdConfig) { c.Prefix = "/x/" },
		"lease of 1s":              func(c *EtcdConfig) { c.Lease = time.Second },
		"lease of 2.5s":            func(c *EtcdConfig) { c.Lease = 2500 * time.Millisecond },
		"timeout of 0s":            func(c *EtcdConfig) { c.Timeout = 0 },
		"peers.etcd.password_file": func(c *EtcdConfig) { c.Username, c.PasswordFile = "u", "/absent" },
		"empty is empty":           func(c *EtcdConfig) { c.Username, c.PasswordFile = "u", empty },
		"peers.etcd.tls.ca: open":  func(c *EtcdConfig) { c.TLS.CA = "/absent" },
		"peers.etcd.tls: cert /a":  func(c *EtcdConfig) { c.TLS.Cert, c.TLS.Key = "/a", "/b" },
	} {
		c := good
		change(&c)
		d, err := NewEtcd(c)
		if err == nil {
			d.Close()
		}
		if err == nil || !strings.HasPrefix(err.Error(), "etcd membership: ") || !strings.Contains(err.Error(), want) {
			t.Errorf("want %q in %v", want, err)
		}
	}
	last := filepath.Join(good.StateDir, "a"+lastSuffix)
	if err := os.WriteFile(last, []byte("x\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := newEtcd(t, good).Register(t.Context(), record("a")); err == nil || !strings.Contains(err.Error(), last+" is damaged") {
		t.Errorf("got %v", err)
	}
}

func FuzzEtcdRecord(f *testing.F) {
	f.Add([]byte(`{"node":"b","address":"10.0.0.1:7000","host_id":"h","pid":1,"lock":"1:2"}`))
	f.Add([]byte(`{`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if r, err := readRecord("b", b); err == nil && (r.Node != "b" || CheckAddress(r.Address) != nil) {
			t.Fatalf("accepted %+v", r)
		}
	})
}
