package demo

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	python "github.com/terminus-kv/terminus/clients/python"
)

//go:embed worker.py
var pythonWorker []byte

const pythonProbe = `import sys; print(1 if sys.version_info >= (3, 9) and sys.byteorder == "little" else sys.version)`

// findPython returns the interpreter for the Python worker, or why there is none.
func findPython(ctx context.Context) (string, error) {
	path, err := exec.LookPath("python3")
	if err != nil {
		return "", errors.New("python3 was not found")
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, "-c", pythonProbe)
	cmd.WaitDelay = time.Second
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s does not run: %w", path, err)
	}
	if answer := strings.TrimSpace(string(out)); answer != "1" {
		return "", fmt.Errorf("%s is %s; 3.9 or later is needed", path, answer)
	}
	return path, nil
}

// unpackPython writes the worker and the client library below dir and returns the worker's path.
func unpackPython(dir string) (string, error) {
	dir = filepath.Join(dir, "python")
	err := fs.WalkDir(python.Files, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		to := filepath.Join(dir, filepath.FromSlash(path))
		if d.IsDir() {
			return os.MkdirAll(to, 0o700)
		}
		text, err := python.Files.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(to, text, 0o600)
	})
	if err != nil {
		return "", fmt.Errorf("unpack the Python client: %w", err)
	}
	to := filepath.Join(dir, "worker.py")
	if err := os.WriteFile(to, pythonWorker, 0o600); err != nil {
		return "", fmt.Errorf("unpack the Python worker: %w", err)
	}
	return to, nil
}
