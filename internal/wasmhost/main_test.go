package wasmhost

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/tetratelabs/wazero"
	"go.uber.org/goleak"

	"github.com/terminus-kv/terminus/plugins/sdk/sdktest"
)

// Built and compiled once for all tests.
var (
	scratch string // of this test binary
	repage  string // the module of plugins/sdk/example/repage
	hostile string // and of testdata/hostile
	cache   wazero.CompilationCache
)

func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "plugin" && os.Args[2] == "wasm" {
		Main(os.Args[3:]) // as an engine's binary does
	}
	os.Exit(run(m))
}

func run(m *testing.M) int {
	var err error
	if scratch, err = os.MkdirTemp("", "wasmhost"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(scratch)
	repage, hostile = filepath.Join(scratch, "repage.wasm"), filepath.Join(scratch, "hostile.wasm")
	if err := prepare(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	code := m.Run()
	_ = cache.Close(context.Background())
	if err := goleak.Find(); code == 0 && err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

// prepare builds the guests and compiles them into the cache: by this very program, but never under the race
// detector.
func prepare() error {
	host, err := os.Executable()
	if err != nil {
		return err
	}
	if raced {
		host = filepath.Join(scratch, "norace.test")
		if err := execute(nil, "go", "test", "-c", "-o", host, "."); err != nil {
			return err
		}
	}
	for file, source := range map[string]string{repage: "../../plugins/sdk/example/repage", hostile: "./testdata/hostile"} {
		env := []string{"GOOS=wasip1", "GOARCH=wasm"}
		if err := execute(env, "go", "build", "-ldflags", "-s -w", "-buildmode=c-shared", "-o", file, source); err != nil {
			return err
		}
		if err := execute(nil, host, "plugin", "wasm", "-cache", cacheDir(), file, "info"); err != nil {
			return err
		}
	}
	cache, err = openCache(cacheDir())
	return err
}

func execute(env []string, command ...string) error {
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Env = append(append(os.Environ(), "GOFLAGS="), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%v: %w\n%s", command, err, out)
	}
	return nil
}

func cacheDir() string { return filepath.Join(scratch, "cache") }

// load makes a backend of a module file.
func load(t testing.TB, file string, limits Limits) *Backend {
	t.Helper()
	b, err := New(context.Background(), Config{File: file, Limits: limits, cache: cache})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// pair starts two sessions around two instances of a module; peer leads from the first to the second.
func pair(t testing.TB, file string) (a, b *sdktest.Host, peer *sdktest.Peer) {
	t.Helper()
	a, b = sdktest.New(t, load(t, file, Limits{})), sdktest.New(t, load(t, file, Limits{}))
	return a, b, sdktest.Connect(a, b)
}
