package nixl

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

const loaderEnv = "TERMINUS_NIXL_TEST_LOADER" // what TestLoader does: home, own, openssl or generation

// TestLoader loads the library in a process of its own, which has another environment; on its own it does nothing.
func TestLoader(t *testing.T) {
	what := os.Getenv(loaderEnv)
	if what == "" {
		return
	}
	library := os.Getenv(childEnv)
	if what == "openssl" {
		if err := hide("libssl.so.3"); err != nil {
			fmt.Println("cannot hide:", err)
			return
		}
	}
	if what == "home" { // as the library finds it when nobody cares
		os.Setenv("UCX_TLS", "tcp,self")
		os.Setenv("UCX_NET_DEVICES", "lo")
	} else if err := setEnvironment(&Config{Transports: "tcp,self", Devices: "lo"}, t.TempDir()); err != nil {
		t.Fatal(err)
	}
	l, err := open(library)
	if err != nil {
		fmt.Println("said:", err)
		return
	}
	if what == "generation" {
		fmt.Println("said:", l.generation)
		return
	}
	a, err := l.newAgent("loader", 1000)
	if err != nil {
		fmt.Println("said:", err)
		return
	}
	a.destroy()
	fmt.Println("said: nothing")
}

// hide puts an empty file in the place of a library of the system, for this process alone.
func hide(name string) error {
	found, _ := filepath.Glob("/usr/lib/*/" + name)
	more, _ := filepath.Glob("/usr/lib*/" + name)
	if found = append(found, more...); len(found) == 0 {
		return fmt.Errorf("no %s below /usr/lib", name)
	}
	if err := unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""); err != nil {
		return err
	}
	empty, err := os.CreateTemp("", "empty")
	if err != nil {
		return err
	}
	for _, path := range found {
		if err := unix.Mount(empty.Name(), path, "", unix.MS_BIND, ""); err != nil {
			return err
		}
	}
	return nil
}

// load runs TestLoader and returns what it said.
func load(t *testing.T, library, what string, attr *syscall.SysProcAttr, env ...string) string {
	t.Helper()
	if os.Geteuid() != 0 && attr != nil {
		if os.Getenv("CI") != "" {
			t.Fatal("only root can change what a process finds, and CI tests everything")
		}
		skipped++
		t.Skip("only root can change what a process finds")
	}
	dir, err := os.MkdirTemp("", "t") // where another user can reach it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(dir, "loader")
	if err := copyFile(program, os.Args[0]); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, "-test.run", "^TestLoader$", "-test.v")
	cmd.Dir = dir
	cmd.Env = append([]string{loaderEnv + "=" + what, childEnv + "=" + library, "TMPDIR=" + dir}, env...)
	cmd.SysProcAttr = attr
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	_, said, ok := strings.Cut(string(out), "said: ")
	if !ok {
		t.Fatalf("the loader: %s", out)
	}
	said, _, _ = strings.Cut(said, "\n")
	return said
}

func copyFile(to, from string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		return err
	}
	if _, err := io.Copy(out, in); err != nil {
		out.Close()
		return err
	}
	return out.Close()
}

// TestHomeOfAnotherUser: the library fails without a word where it may not look into $HOME, so the plugin gives it one.
func TestHomeOfAnotherUser(t *testing.T) {
	home := t.TempDir()
	if err := os.Chmod(home, 0o700); err != nil {
		t.Fatal(err)
	}
	nobody := &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	if said := load(t, wheel(t, venvName), "home", nobody, "HOME="+home); !strings.Contains(said, "create agent") {
		t.Errorf("without an environment of its own the library said %q; then the plugin need not set HOME", said)
	}
	if said := load(t, wheel(t, venvName), "own", nobody, "HOME="+home); said != "nothing" {
		t.Errorf("with an environment of its own: %s", said)
	}
}

// TestOpenSSLMissing: the library needs OpenSSL 3 of the system, and the loader's words do not say where it comes from.
func TestOpenSSLMissing(t *testing.T) {
	said := load(t, wheel(t, venvName), "openssl", &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS})
	if !strings.Contains(said, "libssl.so.3") || !strings.Contains(said, "apt-get install libssl3") {
		t.Errorf("said %q", said)
	}
}

// fake builds a library with the given functions.
func fake(t *testing.T, code string) string {
	t.Helper()
	compiler, err := exec.LookPath("cc")
	if err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal(err)
		}
		skipped++
		t.Skip(err)
	}
	dir := t.TempDir()
	source, library := filepath.Join(dir, "fake.c"), filepath.Join(dir, libraryName)
	if err := os.WriteFile(source, []byte(code), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(compiler, "-shared", "-fPIC", "-o", library, source).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return library
}

// TestForeignLibraries: a library that this plugin does not serve is refused by name before anything of it runs.
func TestForeignLibraries(t *testing.T) {
	var whole strings.Builder
	for i, name := range symbolNames {
		if symbol(i) != symIsStub {
			fmt.Fprintf(&whole, "int %s%s(void) { __builtin_trap(); }\n", symbolPrefix, name)
		}
	}
	for _, c := range []struct{ name, code, says string }{
		{"one function less", whole.String(), "lacks nixl_capi_is_stub"},
		{"a stub", whole.String() + "int nixl_capi_is_stub(void) { return 1; }", "is a stub"},
		{"the interface after 1.5", whole.String() + "int nixl_capi_is_stub(void) { return 0; } void nixl_capi_get_version(int *a, int *b, int *c) {}", "newer C interface"},
		{"no NIXL", "int x;", "lacks nixl_capi_is_stub, nixl_capi_create_configured_agent"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := open(fake(t, c.code))
			if err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v, want %q", err, c.says)
			}
		})
	}
	text := filepath.Join(t.TempDir(), libraryName)
	if err := os.WriteFile(text, []byte("no library"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := open(text); err == nil || !strings.Contains(err.Error(), text) {
		t.Errorf("a text file: %v", err)
	}
}

// TestGenerations: the C interfaces of the two wheels are told apart. (A process can load one of them only: what they
// are made of has the same names.)
func TestGenerations(t *testing.T) {
	for dir, want := range map[string]string{venvName: "1.5", "nixl-1.4.1": "1.0 to 1.4"} {
		path := wheel(t, dir)
		if said := load(t, path, "generation", nil); said != want {
			t.Errorf("%s: generation %q, want %q", dir, said, want)
		}
		if v := wheelVersion(path); !strings.HasPrefix(v, "1.") {
			t.Errorf("%s: version %q", dir, v)
		}
	}
}

// TestLocateSaysWhatItTried: nobody is left to guess where the library was looked for.
func TestLocateSaysWhatItTried(t *testing.T) {
	dir := t.TempDir()
	for name, c := range map[string]struct {
		config Config
		says   []string
	}{
		"library":            {Config{Library: dir + "/absent.so"}, []string{"option library", dir + "/absent.so"}},
		"python":             {Config{Python: dir + "/absent"}, []string{"option python", dir + "/absent", "pip install"}},
		"python environment": {Config{Python: dir}, []string{"option python", dir + " is no Python environment"}},
		"nothing":            {Config{}, []string{"python3 on PATH", "make nixl", "pip install --no-deps nixl-cu12==1.5.1"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("PATH", dir)
			_, err := locate(&c.config)
			if err == nil {
				t.Fatal("found")
			}
			for _, s := range c.says {
				if !strings.Contains(err.Error(), s) {
					t.Errorf("%v\nlacks %q", err, s)
				}
			}
		})
	}
}

// TestConfigCheck: what cannot work is refused at load, by name.
func TestConfigCheck(t *testing.T) {
	good := DefaultConfig()
	if err := good.check(); err != nil {
		t.Errorf("the defaults: %v", err)
	}
	for says, change := range map[string]func(*Config){
		"cma is not served":      func(c *Config) { c.Transports = "cma,tcp,self" },
		`"rc" is not served`:     func(c *Config) { c.Transports = "rc,tcp" },
		"tcp is missing":         func(c *Config) { c.Transports = "self" },
		"progress_delay_us: 0":   func(c *Config) { c.ProgressDelay = 0 },
		`option log: "loud"`:     func(c *Config) { c.Log = "loud" },
		"is a wildcard":          func(c *Config) { c.Listen = ":0" },
		"option advertise":       func(c *Config) { c.Advertise = []string{"nowhere"} },
		"addresses, at most 8":   func(c *Config) { c.Advertise = make([]string, 9) },
		`"nowhere" is not host:`: func(c *Config) { c.Listen = "nowhere" },
	} {
		c := DefaultConfig()
		change(&c)
		if err := c.check(); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("got %v, want %q", err, says)
		}
	}
}

// TestOwnEnvironment: what is set for other programs does not reach the library.
func TestOwnEnvironment(t *testing.T) {
	t.Setenv("NIXL_ETCD_ENDPOINTS", "http://127.0.0.1:1")
	t.Setenv("UCX_HANDLE_ERRORS", "bt")
	t.Setenv("UCX_TLS", "all")
	t.Setenv("HOME", os.Getenv("HOME")) // is put back afterwards
	for _, name := range []string{"NIXL_LOG_LEVEL", "UCX_LOG_FILE", "UCX_LOG_LEVEL", "UCX_NET_DEVICES"} {
		t.Setenv(name, "")
	}
	c := DefaultConfig()
	if err := setEnvironment(&c, "/home-of-the-plugin"); err != nil {
		t.Fatal(err)
	}
	if v, ok := os.LookupEnv("NIXL_ETCD_ENDPOINTS"); ok {
		t.Errorf("NIXL_ETCD_ENDPOINTS=%s", v)
	}
	for name, want := range map[string]string{"UCX_HANDLE_ERRORS": "none", "UCX_TLS": "tcp,self", "HOME": "/home-of-the-plugin", "UCX_LOG_FILE": "stderr", "UCX_NET_DEVICES": "lo"} {
		if got := os.Getenv(name); got != want {
			t.Errorf("%s=%s, want %s", name, got, want)
		}
	}
}
