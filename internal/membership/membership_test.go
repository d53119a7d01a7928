package membership

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// TestMain also plays an engine that registers and waits to be killed.
func TestMain(m *testing.M) {
	if dir := os.Getenv("MEMBERSHIP_TEST_ENGINE"); dir != "" {
		engine(dir, os.Getenv("MEMBERSHIP_TEST_NODE"))
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		cleanUp()
		os.Exit(code)
	}))
}

func engine(dir, node string) {
	var d Driver
	var err error
	if endpoint := os.Getenv("MEMBERSHIP_TEST_ETCD"); endpoint != "" {
		c := etcdConfig(endpoint, dir)
		c.Lease, _ = time.ParseDuration(os.Getenv("MEMBERSHIP_TEST_LEASE"))
		d, err = NewEtcd(c)
	} else {
		d, err = NewLocal(LocalConfig{Dir: dir})
	}
	if err == nil {
		var l Lease
		if l, err = d.Register(context.Background(), record(node)); err == nil {
			fmt.Println(l.Incarnation())
			io.Copy(io.Discard, os.Stdin) // until killed, or the test is gone
			os.Exit(0)
		}
	}
	fmt.Println(err)
	os.Exit(1)
}

func record(node string) Record {
	return Record{Node: node, Address: "unix:/run/x/" + node, HostID: "host", PID: os.Getpid()}
}

// drivers makes two drivers, for engines "a" and "b", that share what engines of that kind share.
// remake is a driver for "a" after a restart.
var drivers = map[string]func(t *testing.T) (a, b Driver, remake func() Driver){
	"local": func(t *testing.T) (Driver, Driver, func() Driver) {
		dir := t.TempDir()
		mk := func() Driver {
			return must(NewLocal(LocalConfig{Dir: filepath.Join(dir, "run"), Poll: 5 * time.Millisecond}))
		}
		return mk(), mk(), mk
	},
	"static": func(t *testing.T) (Driver, Driver, func() Driver) {
		dir := t.TempDir()
		peers := []StaticPeer{{"b", "127.0.0.1:2"}, {"a", "127.0.0.1:1"}}
		mk := func() Driver { return must(NewStatic(StaticConfig{StateDir: dir, Peers: peers})) }
		return mk(), mk(), mk
	},
	"etcd": func(t *testing.T) (Driver, Driver, func() Driver) {
		c := sharedStore(t).config(t, "/"+url.PathEscape(t.Name()))
		mk := func() Driver { return newEtcd(t, c) }
		return mk(), mk(), mk
	},
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// TestEveryDriver holds for every driver.
func TestEveryDriver(t *testing.T) {
	for name, mk := range drivers {
		t.Run(name, func(t *testing.T) {
			t.Run("incarnations grow and a name is taken while its engine lives", func(t *testing.T) {
				a, b, remake := mk(t)
				la := must(a.Register(t.Context(), record("a")))
				lb := must(b.Register(t.Context(), record("b")))
				defer lb.Close()
				if la.Incarnation() == 0 || lb.Incarnation() == 0 {
					t.Fatal("incarnation 0")
				}
				if _, err := a.Register(t.Context(), record("a")); !errors.Is(err, ErrRegistered) {
					t.Fatalf("second Register: %v", err)
				}
				twin := remake()
				if _, err := twin.Register(t.Context(), record("a")); !errors.Is(err, ErrNodeTaken) {
					t.Fatalf("a twin registered: %v", err)
				}
				last := la.Incarnation()
				if err := errors.Join(la.Close(), la.Close()); err != nil {
					t.Fatal(err)
				}
				for range 3 {
					l := must(remake().Register(t.Context(), record("a")))
					if l.Incarnation() <= last {
						t.Fatalf("incarnation %d after %d", l.Incarnation(), last)
					}
					last = l.Incarnation()
					l.Close()
				}
			})
			t.Run("a watch names the other engine and not oneself", func(t *testing.T) {
				a, b, _ := mk(t)
				la := must(a.Register(t.Context(), record("a")))
				defer la.Close()
				lb := must(b.Register(t.Context(), record("b")))
				defer lb.Close()
				ctx, cancel := context.WithCancel(t.Context())
				w := a.Watch(ctx)
				wait(t, w, func(u Update) bool { return nodes(u) == "b" && u.Err == nil && len(u.Gone) == 0 })
				cancel()
				closed(t, w)
			})
			t.Run("Close ends watches", func(t *testing.T) {
				a, _, _ := mk(t)
				w := a.Watch(t.Context())
				if err := a.Close(); err != nil {
					t.Fatal(err)
				}
				closed(t, w)
			})
			t.Run("bad records are refused", func(t *testing.T) {
				a, _, _ := mk(t)
				for _, r := range []Record{{}, {Node: "../x", Address: "unix:/x"}, {Node: "x"}, {Node: "x", Address: "nowhere"}, {Node: "x", Address: "unix:relative"}} {
					if l, err := a.Register(t.Context(), r); err == nil {
						l.Close()
						t.Fatalf("%+v was accepted", r)
					}
				}
			})
			if name == "etcd" {
				return // there the record counts: TestEtcdLost
			}
			t.Run("the lease is lost when the lock file is replaced", func(t *testing.T) {
				a, _, _ := mk(t)
				l := must(a.Register(t.Context(), record("a")))
				defer l.Close()
				if l.Err() != nil {
					t.Fatal("lost already")
				}
				if err := os.Remove(l.(*lease).lock.f.Name()); err != nil {
					t.Fatal(err)
				}
				select {
				case <-l.Lost():
					if l.Err() == nil {
						t.Error("lost, and nobody says why")
					}
				case <-time.After(10 * time.Second):
					t.Fatal("the lease was not lost")
				}
			})
		})
	}
}

func wait(t *testing.T, w <-chan Update, ok func(Update) bool) Update {
	t.Helper()
	timeout := time.After(20 * time.Second)
	var last Update
	for {
		select {
		case u, open := <-w:
			if !open {
				t.Fatalf("watch ended; last update %+v", last)
			}
			if last = u; ok(u) {
				return u
			}
		case <-timeout:
			t.Fatalf("timeout; last update %+v", last)
		}
	}
}

func closed(t *testing.T, w <-chan Update) {
	t.Helper()
	timeout := time.After(10 * time.Second)
	for {
		select {
		case _, open := <-w:
			if !open {
				return
			}
		case <-timeout:
			t.Fatal("the channel was not closed")
		}
	}
}

func nodes(u Update) string {
	var s []string
	for _, p := range u.Peers {
		s = append(s, p.Node)
	}
	return strings.Join(s, " ")
}

// spawn starts an engine process and returns its incarnation.
func spawn(t *testing.T, dir, node string, env ...string) (*exec.Cmd, uint64) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "MEMBERSHIP_TEST_ENGINE="+dir, "MEMBERSHIP_TEST_NODE="+node)
	cmd.Env = append(cmd.Env, env...)
	stdin := must(cmd.StdinPipe())
	out := must(cmd.StdoutPipe())
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stdin.Close(); cmd.Process.Kill(); cmd.Wait() })
	line := must(bufio.NewReader(out).ReadString('\n'))
	var inc uint64
	if _, err := fmt.Sscan(line, &inc); err != nil {
		t.Fatalf("engine said %q", line)
	}
	return cmd, inc
}

func TestLocalProofOfDeath(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	d := must(NewLocal(LocalConfig{Dir: dir, Poll: 10 * time.Millisecond}))
	defer d.Close()
	l := must(d.Register(t.Context(), record("a")))
	defer l.Close()
	w := d.Watch(t.Context())

	cmd, inc := spawn(t, dir, "b")
	u := wait(t, w, func(u Update) bool { return nodes(u) == "b" })
	if p := u.Peers[0]; p.Incarnation != inc || p.PID != cmd.Process.Pid || p.Address != "unix:/run/x/b" {
		t.Fatalf("peer %+v, want incarnation %d", p, inc)
	}
	cmd.Process.Kill() // SIGKILL
	u = wait(t, w, func(u Update) bool { return len(u.Gone) > 0 })
	if !slices.Equal(u.Gone, []Gone{{"b", inc}}) || len(u.Peers) != 0 {
		t.Fatalf("after kill -9: %+v", u)
	}
	// The next start is newer, and a later watch learns the old death no more, only the new life.
	cmd.Wait()
	_, inc2 := spawn(t, dir, "b")
	if inc2 <= inc {
		t.Fatalf("incarnation %d after %d", inc2, inc)
	}
	u = wait(t, w, func(u Update) bool { return nodes(u) == "b" })
	if len(u.Gone) != 0 || u.Peers[0].Incarnation != inc2 {
		t.Fatalf("after restart: %+v", u)
	}
}

// A death was noticed when the watch looked the next time, up to 200 ms later, though the engine's stream had ended at
// once.
func TestLookedForAtOnce(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	d := must(NewLocal(LocalConfig{Dir: dir, Poll: time.Hour}))
	defer d.Close()
	cmd, inc := spawn(t, dir, "b")
	w := d.Watch(t.Context())
	wait(t, w, func(u Update) bool { return nodes(u) == "b" })
	d.(Looker).Look() // of one that lives nothing is said
	cmd.Process.Kill()
	d.(Looker).Look() // it may not be dead yet
	cmd.Wait()
	d.(Looker).Look() // and on a busy machine this was too early
	if u := wait(t, w, func(u Update) bool { return len(u.Gone) > 0 }); !slices.Equal(u.Gone, []Gone{{"b", inc}}) {
		t.Fatalf("%+v", u)
	}
}

// A restart that happens between two looks is proved by the successor's record.
func TestLocalFastRestart(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	mk := func() *local { return must(NewLocal(LocalConfig{Dir: dir})).(*local) }
	first := must(mk().Register(t.Context(), record("b")))
	w := watch{driver: mk(), known: make(map[string]*knownNode)}
	if u, changed := w.look(); !changed || nodes(u) != "b" {
		t.Fatalf("%+v", u)
	}
	if _, changed := w.look(); changed {
		t.Fatal("a second look without a change reports one")
	}
	first.Close()
	second := must(mk().Register(t.Context(), record("b")))
	defer second.Close()
	u, _ := w.look()
	if !slices.Equal(u.Gone, []Gone{{"b", first.Incarnation()}}) || nodes(u) != "b" || u.Peers[0].Incarnation != second.Incarnation() {
		t.Fatalf("%+v", u)
	}
}

// What somebody did to the directory is never taken for a proof.
func TestLocalNoFalseProof(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	mk := func() *local { return must(NewLocal(LocalConfig{Dir: dir})).(*local) }
	l := must(mk().Register(t.Context(), record("b")))
	defer l.Close()
	d := mk()
	w := watch{driver: d, known: make(map[string]*knownNode)}
	w.look()
	rec := must(os.ReadFile(d.path("b", recordSuffix)))
	lockPath := d.path("b", lockSuffix)
	for _, step := range []struct {
		name  string
		do    func() error
		nodes string
		err   bool
	}{
		{"record damaged", func() error { return os.WriteFile(d.path("b", recordSuffix), []byte("{"), 0o600) }, "b", true},
		{"record too long", func() error { return os.WriteFile(d.path("b", recordSuffix), make([]byte, maxRecord+1), 0o600) }, "b", true},
		{"record of another", func() error {
			return os.WriteFile(d.path("b", recordSuffix), []byte(strings.Replace(string(rec), `"b"`, `"c"`, 1)), 0o600)
		}, "b", true},
		{"record removed", func() error { return os.Remove(d.path("b", recordSuffix)) }, "", false},
		{"record back", func() error { return os.WriteFile(d.path("b", recordSuffix), rec, 0o600) }, "b", false},
		{"lock file removed", func() error { return os.Remove(lockPath) }, "b", false},
		{"lock file replaced", func() error {
			// Keep the old inode busy so that the new file cannot get its number.
			return os.WriteFile(lockPath, nil, 0o600)
		}, "b", false},
		{"directory gone", func() error { return os.Rename(dir, dir+"2") }, "b", true},
		{"directory back", func() error { return os.Rename(dir+"2", dir) }, "b", false},
	} {
		if err := step.do(); err != nil {
			t.Fatal(err)
		}
		if u, _ := w.look(); len(u.Gone) != 0 || nodes(u) != step.nodes || (u.Err != nil) != step.err {
			t.Fatalf("%s: %+v", step.name, u)
		}
	}
}

func TestCounter(t *testing.T) {
	file := filepath.Join(t.TempDir(), "n")
	first := must(nextIncarnation(file))
	if now := uint64(time.Now().UnixMilli()); first > now+1 || first < now-60_000 {
		t.Fatalf("first incarnation %d, clock %d", first, now)
	}
	if n := must(nextIncarnation(file)); n <= first {
		t.Fatalf("%d after %d", n, first)
	}
	// Another incarnation was of this name since, with another file: peers refuse what is not above it.
	if err := os.WriteFile(file, []byte("1000 restored"), 0o600); err != nil {
		t.Fatal(err)
	}
	if n := must(nextIncarnation(file)); n <= first {
		t.Fatalf("%d after %d, with a counter that was restored", n, first)
	}
	ahead := uint64(time.Now().Add(time.Hour).UnixMilli())
	if err := os.WriteFile(file, fmt.Append(nil, ahead), 0o600); err != nil {
		t.Fatal(err)
	}
	if n := must(nextIncarnation(file)); n != ahead+1 {
		t.Fatalf("%d after %d, with a clock that was set back", n, ahead)
	}
	for _, text := range []string{"", "x", "-1 y", "99999999999999999999 z"} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if n, err := nextIncarnation(file); err == nil || !strings.Contains(err.Error(), "remove it") {
			t.Fatalf("%q: %d, %v", text, n, err)
		}
	}
	if left := must(filepath.Glob(filepath.Join(filepath.Dir(file), ".new-*"))); len(left) != 0 {
		t.Fatalf("left behind: %v", left)
	}
}

func TestBadConfig(t *testing.T) {
	open := filepath.Join(t.TempDir(), "open")
	if err := errors.Join(os.Mkdir(open, 0o777), os.Chmod(open, 0o777)); err != nil {
		t.Fatal(err)
	}
	for _, c := range []LocalConfig{{}, {Dir: open}, {Dir: t.TempDir(), Poll: -1}, {Dir: t.TempDir(), StateDir: open}} {
		if _, err := NewLocal(c); err == nil {
			t.Errorf("%+v was accepted", c)
		}
	}
	_, err := NewStatic(StaticConfig{StateDir: t.TempDir(), Peers: []StaticPeer{{"a", "x:1"}, {"a", ""}, {"b", "nowhere"}, {"", "x:1"}, {"c", "unix:/" + strings.Repeat("x", 120)}}})
	for _, want := range []string{"peer 1", "stands twice", "peer 2", "peer 3", "peer 4", "107"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("want %q in %v", want, err)
		}
	}
	if _, err := NewStatic(StaticConfig{}); err == nil {
		t.Error("no state directory was accepted")
	}
}

func FuzzRecord(f *testing.F) {
	f.Add([]byte(`{"node":"b","address":"unix:/x","incarnation":1,"lock_inode":2}`))
	f.Add([]byte(`{`))
	f.Add([]byte(`{"node":"b","incarnation":-1}`))
	dir := f.TempDir()
	d := must(NewLocal(LocalConfig{Dir: dir})).(*local)
	f.Fuzz(func(t *testing.T, b []byte) {
		if err := os.WriteFile(d.path("b", recordSuffix), b, 0o600); err != nil {
			t.Fatal(err)
		}
		r, err := d.read("b")
		if err == nil && (r.Node != "b" || r.Incarnation == 0 || CheckAddress(r.Address) != nil) {
			t.Fatalf("accepted %+v", r)
		}
		(&watch{driver: d, known: make(map[string]*knownNode)}).look()
	})
}
