// Package cudatest builds a CUDA driver for tests on machines without a GPU.
package cudatest

import (
	_ "embed"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/ebitengine/purego"
)

//go:embed testdata/fake.c
var fake []byte

// Library compiles the driver and returns its path. Each call gives a driver of its own.
func Library(t testing.TB) string {
	t.Helper()
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("no C compiler (cc): nothing to build the driver with")
	}
	dir := t.TempDir()
	source, library := filepath.Join(dir, "fake.c"), filepath.Join(dir, "libcuda.so.1")
	if err := os.WriteFile(source, fake, 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(cc, "-shared", "-fPIC", "-O1", "-o", library, source, "-lpthread").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return library
}

// Live counts what a driver was not given back.
func Live(t testing.TB, library string) int {
	t.Helper()
	lib, err := purego.Dlopen(library, purego.RTLD_NOW)
	if err != nil {
		t.Fatal(err)
	}
	defer purego.Dlclose(lib)
	var live func() int32
	purego.RegisterLibFunc(&live, lib, "fake_live")
	return int(live())
}
