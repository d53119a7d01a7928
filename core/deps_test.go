package core_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/terminus-kv/terminus/"

// imports returns the packages that a package needs, directly or not, tests left out.
func imports(t *testing.T, pattern string, deps bool) map[string][]string {
	t.Helper()
	format := `{{.ImportPath}}{{range .Imports}} {{.}}{{end}}`
	if deps {
		format = `{{.ImportPath}}{{range .Deps}} {{.}}{{end}}`
	}
	cmd := exec.Command("go", "list", "-f", format, pattern)
	cmd.Dir = ".."
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list %s: %v", pattern, err)
	}
	all := map[string][]string{}
	for _, line := range strings.Split(strings.TrimSpace(string(out)), "\n") {
		if f := strings.Fields(line); len(f) > 0 {
			all[strings.TrimPrefix(f[0], module)] = f[1:]
		}
	}
	if len(all) == 0 {
		t.Fatalf("go list %s names no package", pattern)
	}
	return all
}

func stdlib(path string) bool { return !strings.Contains(strings.SplitN(path, "/", 2)[0], ".") }

func under(path string, dirs ...string) bool {
	path = strings.TrimPrefix(path, module)
	return slices.ContainsFunc(dirs, func(d string) bool { return path == d || strings.HasPrefix(path, d+"/") })
}

// TestCoreImports: the core does no I/O, and knows no wire, host process or C. What the standard
// library's formatting pulls in below (os for Printf) is not the core's to import.
func TestCoreImports(t *testing.T) {
	for pkg, in := range imports(t, "./core/...", false) {
		for _, i := range in {
			ok := stdlib(i) || under(i, "core/statemachine", "core/layout") || slices.Contains([]string{"core/coretest", "core/explore"}, pkg) && under(i, "core")
			if !ok || slices.Contains([]string{"C", "unsafe", "os", "os/exec", "io/fs", "io/ioutil", "net", "syscall", "log", "log/slog", "sync", "sync/atomic", "context", "math/rand", "math/rand/v2", "crypto/rand", "runtime"}, i) || strings.HasPrefix(i, "net/") {
				t.Errorf("%s imports %s", pkg, i)
			}
		}
	}
	for pkg, in := range imports(t, "./core/...", true) {
		for _, i := range in {
			switch {
			case pkg == "core/statemachine" && !stdlib(i):
				t.Errorf("%s needs %s: only the standard library is allowed", pkg, i)
			case !stdlib(i) && !under(i, "core"), i == "net", i == "os/exec", i == "runtime/cgo", i == "crypto/tls":
				t.Errorf("%s needs %s", pkg, i)
			}
		}
	}
}

// TestLayers: imports point one way, cmd → internal → core; plugins import only the SDK (and cuda);
// clients and the SDK import nothing that is replaceable.
func TestLayers(t *testing.T) {
	rules := []struct {
		dir     string
		allowed []string
	}{
		{"core", []string{"core"}},
		{"internal", []string{"internal", "core", "plugins/sdk", "clients"}},
		{"plugins/sdk", []string{"plugins/sdk"}},
		{"clients", []string{"clients"}},
	}
	for pkg, in := range imports(t, "./...", false) {
		for _, i := range in {
			if !strings.HasPrefix(i, module) {
				continue
			}
			for _, r := range rules {
				if under(pkg, r.dir) && !under(i, r.allowed...) {
					// The conformance runner hosts plugins as the engine does.
					if under(pkg, "plugins/sdk/conformance") && under(i, "internal/pluginhost") {
						continue
					}
					// A program of its tests is the reference plugin with a fault.
					if pkg == "plugins/sdk/conformance/mutant" && i == module+"plugins/tcp" {
						continue
					}
					t.Errorf("%s imports %s; %s may import %s only", pkg, i, r.dir, strings.Join(r.allowed, ", "))
				}
			}
			if under(pkg, "plugins") && !under(pkg, "plugins/sdk") {
				own := strings.Join(strings.SplitN(pkg, "/", 3)[:2], "/") // plugins/NAME
				if !under(i, "plugins/sdk", "cuda", own) {
					t.Errorf("%s imports %s; a plugin imports plugins/sdk and cuda only", pkg, i)
				}
			}
		}
	}
}

// TestCoreIsPure: time is an argument, and one goroutine owns the machine. The sources of the core read
// no clock, wait for nothing and start nothing.
func TestCoreIsPure(t *testing.T) {
	var files []string
	for _, pattern := range []string{"*.go", "statemachine/*.go", "layout/*.go", "coretest/*.go"} {
		m, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, m...)
	}
	banned := []string{"Now", "Since", "Until", "Sleep", "After", "AfterFunc", "Tick", "NewTicker", "NewTimer"}
	n := 0
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		n++
		fset := token.NewFileSet()
		f, err := parser.ParseFile(fset, file, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(f, func(node ast.Node) bool {
			switch x := node.(type) {
			case *ast.GoStmt:
				t.Errorf("%s: starts a goroutine", fset.Position(x.Pos()))
			case *ast.SelectStmt, *ast.SendStmt, *ast.ChanType:
				t.Errorf("%s: uses a channel", fset.Position(x.Pos()))
			case *ast.SelectorExpr:
				if id, ok := x.X.(*ast.Ident); ok && id.Name == "time" && slices.Contains(banned, x.Sel.Name) {
					t.Errorf("%s: time.%s; core time is an argument", fset.Position(x.Pos()), x.Sel.Name)
				}
			}
			return true
		})
	}
	if n < 10 {
		t.Fatalf("looked at %d files only", n)
	}
}
