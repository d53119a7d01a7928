package nixl

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

const (
	libraryName = "libnixl_capi.so"
	installHint = "python3 -m pip install --no-deps nixl-cu12==1.5.1"
)

// locate finds the library: options.library, else the Python environment of options.python, else python3 on PATH,
// else the environment that `make nixl` made beside this program. The error says what was tried.
func locate(c *Config) (string, error) {
	if c.Library != "" {
		if _, err := os.Stat(c.Library); err != nil {
			return "", fmt.Errorf("option library: %w", err)
		}
		return c.Library, nil
	}
	var tried []string
	try := func(what string, dirs []string, err error) string {
		if err != nil {
			tried = append(tried, fmt.Sprintf("%s: %v", what, err))
			return ""
		}
		if path := inPackages(dirs); path != "" {
			return path
		}
		tried = append(tried, fmt.Sprintf("%s: no nixl-cu12 or nixl-cu13 in %s", what, strings.Join(dirs, ", ")))
		return ""
	}
	if c.Python != "" {
		dirs, err := packages(c.Python)
		if path := try("option python", dirs, err); path != "" {
			return path, nil
		}
	} else {
		dirs, err := packages("python3")
		if path := try("python3 on PATH", dirs, err); path != "" {
			return path, nil
		}
		if self, err := os.Executable(); err == nil {
			dir := filepath.Join(filepath.Dir(self), venvName)
			dirs, err := venvPackages(dir)
			if path := try("make nixl", dirs, err); path != "" {
				return path, nil
			}
		}
	}
	return "", fmt.Errorf("%s not found: %s; install it with: %s, or name it in option library", libraryName, strings.Join(tried, "; "), installHint)
}

// venvName is the directory beside the programs that `make nixl` fills.
const venvName = "nixl"

// inPackages looks for the library of a wheel. Without a GPU either does; the CUDA 12 one reads more kinds of store.
func inPackages(dirs []string) string {
	for _, dir := range dirs {
		for _, wheel := range []string{"nixl_cu12", "nixl_cu13"} {
			path := filepath.Join(dir, "."+wheel+".mesonpy.libs", libraryName)
			if _, err := os.Stat(path); err == nil {
				return path
			}
		}
	}
	return ""
}

// packages asks a Python for the directories of its packages. A directory is an environment (python -m venv).
func packages(python string) ([]string, error) {
	if st, err := os.Stat(python); err == nil && st.IsDir() {
		return venvPackages(python)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, python, "-c", `import site, sysconfig
for p in [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages(), site.getusersitepackages()]:
    print(p)`).Output()
	if err != nil {
		return nil, err
	}
	seen := map[string]bool{}
	var dirs []string
	for line := range strings.Lines(string(out)) {
		if dir := strings.TrimSpace(line); dir != "" && !seen[dir] {
			seen[dir] = true
			dirs = append(dirs, dir)
		}
	}
	return dirs, nil
}

func venvPackages(dir string) ([]string, error) {
	dirs, err := filepath.Glob(filepath.Join(dir, "lib", "python3*", "site-packages"))
	if err == nil && len(dirs) == 0 {
		err = errors.New(dir + " is no Python environment")
	}
	return dirs, err
}
