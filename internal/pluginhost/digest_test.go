package pluginhost

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"testing"
)

// TestDigest: what is hashed is what the pin covers.
func TestDigest(t *testing.T) {
	dir := t.TempDir()
	write := func(name string) (file, sum string) {
		file = filepath.Join(dir, name)
		if err := os.WriteFile(file, []byte(name), 0o700); err != nil {
			t.Fatal(err)
		}
		s := sha256.Sum256([]byte(name))
		return file, hex.EncodeToString(s[:])
	}
	program, programSum := write("program")
	script, scriptSum := write("script")
	module, moduleSum := write("module")
	for _, c := range []struct {
		name      string
		spec      Spec
		file, sum string
	}{
		{"program", Spec{Exec: program}, program, programSum},
		{"script", Spec{Exec: program, Script: script}, script, scriptSum},
		{"module", Spec{Wasm: module}, module, moduleSum},
	} {
		file, sum, err := c.spec.Digest()
		if err != nil || file != c.file || sum != c.sum {
			t.Errorf("%s: %s %s %v", c.name, file, sum, err)
		}
	}
	if _, _, err := (&Spec{Name: "p", Exec: filepath.Join(dir, "none")}).Digest(); err == nil {
		t.Error("a file that is not there was hashed")
	}
}
