package pluginhost

import (
	"fmt"
	"path/filepath"

	"github.com/terminus-kv/terminus/internal/regular"
)

// Digest hashes what a pin of this plugin (SHA256) would cover: the script of an interpreter, the module
// of a guest, else the program. file is its path. It starts nothing; for reports and for who writes a pin.
func (s *Spec) Digest() (file, sum string, err error) {
	what, path := "script", s.Script
	if s.Wasm != "" {
		what, path = "module", s.Wasm
	}
	if path == "" {
		what = "program"
		if path, err = s.resolve(); err != nil {
			return "", "", fmt.Errorf("plugin %s: %w", s.Name, err)
		}
	}
	if path, err = filepath.Abs(path); err != nil {
		return "", "", fmt.Errorf("plugin %s: %w", s.Name, err)
	}
	f, err := regular.Open(path)
	if err != nil {
		return "", "", fmt.Errorf("plugin %s: %w", s.Name, openError(what+" "+path, err))
	}
	defer f.Close()
	if sum, err = hashFile(f); err != nil {
		return "", "", fmt.Errorf("plugin %s: hash %s: %w", s.Name, path, err)
	}
	return path, sum, nil
}
