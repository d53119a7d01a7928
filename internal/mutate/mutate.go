// Package mutate measures what a package's tests notice: it makes small changes to the package's code,
// one at a time, and runs the tests against each.
//
// All changes (mutants) are compiled into one test binary, each behind a switch, so that a thousand of
// them take seconds. It is meant for small, pure packages: code without loops that a change could make
// endless, and tests that run in milliseconds.
package mutate

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/constant"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Mutant is one change.
type Mutant struct {
	ID     int
	Pos    token.Position
	Func   string // the function it is in, "Record.Step"
	Line   string // the line of the source, trimmed
	Class  string // the kind of change: "drop statement", "negate", …
	Change string // what becomes of what: "PeerLost → WorkerLost"
	Nth    int    // 1, 2, … among the mutants that are equal in Func, Line and Change
	// KilledBy is the test that failed. Empty: the mutant survived.
	KilledBy string
}

// Key names a mutant without its position, so that the name outlives edits elsewhere.
func (m *Mutant) Key() string {
	key := m.Func + " | " + m.Line + " | " + m.Change
	if m.Nth > 1 {
		key += fmt.Sprintf(" #%d", m.Nth)
	}
	return key
}

// source is a parsed package whose files named by mutate are being rewritten.
type source struct {
	dir     string
	fset    *token.FileSet
	info    *types.Info
	pkg     *types.Package
	consts  map[types.Type][]*types.Const // of the package, by type, in order of value
	mutants []*Mutant
	seen    map[string]int // keys without Nth
}

// load parses and checks the package in dir, tests left out.
func load(dir string) (*source, map[string]*ast.File, error) {
	s := &source{
		dir: dir, fset: token.NewFileSet(), seen: map[string]int{}, consts: map[types.Type][]*types.Const{},
		info: &types.Info{Uses: map[*ast.Ident]types.Object{}, Types: map[ast.Expr]types.TypeAndValue{}},
	}
	paths, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		return nil, nil, err
	}
	files := map[string]*ast.File{}
	for _, path := range paths {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(s.fset, path, nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, nil, err
		}
		files[filepath.Base(path)] = f
	}
	list := make([]*ast.File, 0, len(files))
	for _, name := range slices.Sorted(maps.Keys(files)) {
		list = append(list, files[name])
	}
	conf := types.Config{Importer: importer.ForCompiler(s.fset, "source", nil)}
	if s.pkg, err = conf.Check(dir, s.fset, list, s.info); err != nil {
		return nil, nil, err
	}
	for _, name := range s.pkg.Scope().Names() {
		if c, ok := s.pkg.Scope().Lookup(name).(*types.Const); ok {
			if _, named := c.Type().(*types.Named); named {
				s.consts[c.Type()] = append(s.consts[c.Type()], c)
			}
		}
	}
	for _, list := range s.consts {
		slices.SortFunc(list, func(a, b *types.Const) int {
			if constant.Compare(a.Val(), token.LSS, b.Val()) {
				return -1
			}
			return 1
		})
	}
	return s, files, nil
}

// rewrite returns the file with a switch around everything that can be changed, and adds the mutants.
func (s *source) rewrite(name string, f *ast.File) ([]byte, error) {
	text, err := os.ReadFile(filepath.Join(s.dir, name))
	if err != nil {
		return nil, err
	}
	w := &rewriter{source: s, file: s.fset.File(f.Pos()), text: text, out: bytes.Clone(text), opens: map[int][]string{}, closes: map[int][]string{}}
	for _, decl := range f.Decls {
		fn, ok := decl.(*ast.FuncDecl)
		if !ok || fn.Body == nil {
			continue
		}
		w.fn = fn.Name.Name
		if fn.Recv != nil {
			w.fn = strings.TrimPrefix(types.ExprString(fn.Recv.List[0].Type), "*") + "." + w.fn
		}
		w.results(fn.Type, fn.Body)
		ast.Walk(w, fn.Body)
	}
	return w.render(), nil
}

// runtimeSource is compiled into the package: the switch and what the rewritten code calls.
const runtimeSource = `

var mutantOn int

func mutantIs(id int) bool { return mutantOn == id }

func mutantPick[T any](id int, changed, plain T) T {
	if mutantOn == id {
		return changed
	}
	return plain
}

func mutantZero[T any](id int, plain T) T {
	if mutantOn == id {
		var zero T
		return zero
	}
	return plain
}

func mutantAnd(id int, a bool, b func() bool) bool {
	if mutantOn == id {
		return a || b()
	}
	return a && b()
}

func mutantOr(id int, a bool, b func() bool) bool {
	if mutantOn == id {
		return a && b()
	}
	return a || b()
}
`
