// Package scaffold writes the beginning of a plugin: a project that builds, tests itself against the
// conformance suite, and works.
package scaffold

import (
	"bytes"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"text/template"
)

//go:embed templates
var templates embed.FS

// module is the Go module of the SDK.
const module = "github.com/terminus-kv/terminus"

// file is one file of a project.
type file struct {
	name     string // in the project
	template string // below templates/, or below the source tree of the SDK if it starts with sdk:
	mode     fs.FileMode
}

// languages are the kinds of projects.
var languages = map[string][]file{
	"go": {
		{"main.go", "go/main.go.tmpl", 0o644},
		{"main_test.go", "go/main_test.go.tmpl", 0o644},
		{"go.mod", "go/go.mod.tmpl", 0o644},
		{"go.sum", "sdk:go.sum", 0o644},
		{"Makefile", "go/Makefile.tmpl", 0o644},
		{"engine.yaml", "go/engine.yaml.tmpl", 0o644},
		{"README.md", "go/README.md.tmpl", 0o644},
		{".gitignore", "go/gitignore.tmpl", 0o644},
	},
	"python": {
		{"backend.py", "python/backend.py.tmpl", 0o644},
		{"test_backend.py", "python/test_backend.py.tmpl", 0o644},
		{"requirements.txt", "python/requirements.txt.tmpl", 0o644},
		{"Makefile", "python/Makefile.tmpl", 0o644},
		{"engine.yaml", "python/engine.yaml.tmpl", 0o644},
		{"README.md", "python/README.md.tmpl", 0o644},
		{".gitignore", "python/gitignore.tmpl", 0o644},
	},
	"wasm-go": {
		{"main.go", "wasm/main.go.tmpl", 0o644},
		{"conformance/conformance_test.go", "wasm/conformance_test.go.tmpl", 0o644},
		{"go.mod", "wasm/go.mod.tmpl", 0o644},
		{"go.sum", "sdk:go.sum", 0o644},
		{"Makefile", "wasm/Makefile.tmpl", 0o644},
		{"engine.yaml", "wasm/engine.yaml.tmpl", 0o644},
		{"README.md", "wasm/README.md.tmpl", 0o644},
		{".gitignore", "wasm/gitignore.tmpl", 0o644},
	},
}

// Languages returns what Options.Lang may be, sorted.
func Languages() []string { return slices.Sorted(maps.Keys(languages)) }

// Options of a new project.
type Options struct {
	Name string // of the plugin: [a-z][a-z0-9-]*, at most 32 bytes
	Lang string // one of Languages
	// Dir is the project's directory; it is made if need be. Empty: Name.
	Dir string
	// SDK is the source tree that the SDK is taken from. Empty: the one that this program was built from.
	SDK string
}

// Project is what was written.
type Project struct {
	Dir   string   // absolute
	SDK   string   // absolute
	Files []string // relative to Dir
}

var nameRE = regexp.MustCompile(`^[a-z][a-z0-9-]{0,31}$`)

// taken are names that mean something else to an engine.
var taken = []string{"tcp", "nixl", "mooncake", "mnnvl"}

// New writes a project. Nothing that exists is overwritten: if a file is in the way, nothing is written.
// The errors are of usage and name the fix.
func New(o Options) (Project, error) {
	files, ok := languages[o.Lang]
	if !ok {
		return Project{}, fmt.Errorf("language %q: want one of %s", o.Lang, strings.Join(Languages(), ", "))
	}
	if !nameRE.MatchString(o.Name) {
		return Project{}, fmt.Errorf("plugin name %q: want a lower-case letter and up to 31 lower-case letters, digits and dashes", o.Name)
	}
	if slices.Contains(taken, o.Name) {
		return Project{}, fmt.Errorf("plugin name %q is that of a backend of Terminus; choose another", o.Name)
	}
	v, err := newValues(o)
	if err != nil {
		return Project{}, err
	}
	if o.Dir == "" {
		o.Dir = o.Name
	}
	p := Project{SDK: v.SDK}
	if p.Dir, err = filepath.Abs(o.Dir); err != nil {
		return Project{}, err
	}
	texts := make([][]byte, len(files))
	for i, f := range files {
		p.Files = append(p.Files, f.name)
		if texts[i], err = v.text(f); err != nil {
			return Project{}, err
		}
	}
	for _, name := range p.Files {
		if _, err := os.Lstat(filepath.Join(p.Dir, name)); err == nil {
			return Project{}, fmt.Errorf("%s exists and is not overwritten; choose another --dir", filepath.Join(p.Dir, name))
		} else if !errors.Is(err, fs.ErrNotExist) {
			return Project{}, err
		}
	}
	for i, name := range p.Files {
		if err := create(filepath.Join(p.Dir, name), texts[i], files[i].mode); err != nil {
			return Project{}, err
		}
	}
	return p, nil
}

// create writes a file that does not exist yet.
func create(path string, text []byte, mode fs.FileMode) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	return errors.Join(err, f.Close())
}

// values are what templates see.
type values struct {
	Name           string
	SDK            string
	SDKQuoted      string   // for go.mod
	Go             string   // version of the language
	Requires       []string // of go.mod
	PythonRequires []string // of requirements.txt
}

func newValues(o Options) (*values, error) {
	sdk, err := sourceTree(o.SDK)
	if err != nil {
		return nil, err
	}
	mod, err := os.ReadFile(filepath.Join(sdk, "go.mod"))
	if err != nil {
		return nil, fmt.Errorf("--sdk: %w", err)
	}
	v := &values{Name: o.Name, SDK: sdk, SDKQuoted: sdk}
	if strings.ContainsAny(sdk, " \t\"'`(),") {
		v.SDKQuoted = strconv.Quote(sdk)
	}
	v.Go, v.Requires = parseMod(mod)
	if v.Go == "" {
		return nil, fmt.Errorf("--sdk: %s names no version of Go", filepath.Join(sdk, "go.mod"))
	}
	if o.Lang == "python" {
		pins, err := os.ReadFile(filepath.Join(sdk, "plugins/sdk/python/requirements-dev.txt"))
		if err != nil {
			return nil, fmt.Errorf("--sdk: %w", err)
		}
		v.PythonRequires = parsePins(pins)
	}
	return v, nil
}

// text is the content of a file.
func (v *values) text(f file) ([]byte, error) {
	if path, ok := strings.CutPrefix(f.template, "sdk:"); ok {
		b, err := os.ReadFile(filepath.Join(v.SDK, path))
		if err != nil {
			return nil, fmt.Errorf("--sdk: %w", err)
		}
		return b, nil
	}
	b, err := templates.ReadFile("templates/" + f.template)
	if err != nil {
		return nil, err
	}
	return render(f.template, string(b), v)
}

func render(name, text string, v *values) ([]byte, error) {
	t, err := template.New(name).Option("missingkey=error").Parse(text)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	if err := t.Execute(&b, v); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// sourceTree finds the tree of the SDK: the one given, or the one that this program was built from.
func sourceTree(given string) (string, error) {
	if given != "" {
		tree, err := filepath.Abs(given)
		if err != nil {
			return "", err
		}
		if err := checkTree(tree); err != nil {
			return "", fmt.Errorf("--sdk %s: %w", given, err)
		}
		return tree, nil
	}
	_, here, _, _ := runtime.Caller(0)
	tree := filepath.Dir(filepath.Dir(filepath.Dir(here)))
	if !filepath.IsAbs(here) {
		return "", errors.New("this engine does not know the source tree that it was built from; name one with --sdk PATH")
	}
	if err := checkTree(tree); err != nil {
		return "", fmt.Errorf("the source tree that this engine was built from is gone (%w); name another with --sdk PATH", err)
	}
	return tree, nil
}

// checkTree makes sure that a directory is the root of the SDK's module.
func checkTree(dir string) error {
	b, err := os.ReadFile(filepath.Join(dir, "go.mod"))
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(b)) {
		if name, ok := strings.CutPrefix(strings.TrimSpace(line), "module "); ok {
			if strings.TrimSpace(name) == module {
				return nil
			}
			return fmt.Errorf("%s is of module %s, not %s", filepath.Join(dir, "go.mod"), strings.TrimSpace(name), module)
		}
	}
	return fmt.Errorf("%s names no module", filepath.Join(dir, "go.mod"))
}

// parseMod returns the version of Go and what the module requires, all of it as indirect.
func parseMod(text []byte) (version string, requires []string) {
	block := false
	for line := range strings.Lines(string(text)) {
		line, _, _ = strings.Cut(line, "//")
		words := strings.Fields(line)
		switch {
		case len(words) == 0:
		case words[0] == ")":
			block = false
		case words[0] == "require" && len(words) == 2 && words[1] == "(":
			block = true
		case words[0] == "require" && len(words) == 3:
			requires = append(requires, words[1]+" "+words[2]+" // indirect")
		case block && len(words) == 2:
			requires = append(requires, words[0]+" "+words[1]+" // indirect")
		case words[0] == "go" && len(words) == 2:
			version = words[1]
		}
	}
	slices.Sort(requires)
	return version, requires
}

// parsePins returns the lines of a requirements file that the Python SDK itself needs.
func parsePins(text []byte) (pins []string) {
	for line := range strings.Lines(string(text)) {
		line, _, _ = strings.Cut(line, "#")
		line = strings.TrimSpace(line)
		if name, _, ok := strings.Cut(line, "=="); ok && (name == "grpcio" || name == "protobuf") {
			pins = append(pins, line)
		}
	}
	return pins
}
