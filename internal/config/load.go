package config

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/go-viper/mapstructure/v2"
	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/lexer"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"
	"github.com/knadh/koanf/providers/confmap"
	"github.com/knadh/koanf/providers/structs"
	"github.com/knadh/koanf/v2"
)

// EnvPrefix starts every environment variable of the configuration: TERMINUS_LIMITS__PEER_OPS is
// limits.peer_ops.
const EnvPrefix = "TERMINUS_"

// Bounds of a configuration file. The parser's time grows with the square of a line and of the nesting;
// within these bounds the worst text costs it a second or two.
const (
	MaxFileBytes = 64 << 10
	maxLineBytes = 4096
	maxNesting   = 64 // of [ and {
)

// LoadOptions are the sources, weakest first: the defaults, Files in order, Env, Flags.
type LoadOptions struct {
	// Files are YAML; a later one wins key by key, lists are replaced. A relative path in a file is
	// relative to the file's folder.
	Files []string
	// Env is NAME=VALUE as os.Environ returns it. Only names with EnvPrefix are read, and
	// XDG_RUNTIME_DIR, XDG_STATE_HOME and HOME for the default directories.
	Env []string
	// Flags are key=value, such as limits.peer_ops=8.
	Flags []string
	// Elsewhere leaves out Config.CheckMachine: the configuration is for another machine.
	Elsewhere bool
}

// Load merges the sources, checks everything and fills in what depends on the machine. The error is a
// Problems with every problem of every source.
func Load(o LoadOptions) (*Config, error) {
	l := &loader{origin: map[string]Source{}, above: map[string]Source{}}
	k := koanf.New(".")
	if err := k.Load(structs.Provider(Default(), "json"), nil); err != nil {
		return nil, fmt.Errorf("load the defaults: %w", err)
	}
	layers := make([]map[string]any, 0, len(o.Files)+2)
	for _, f := range o.Files {
		layers = append(layers, l.file(f))
	}
	layers = append(layers, l.env(o.Env), l.flags(o.Flags))
	for _, layer := range layers {
		if err := k.Load(confmap.Provider(layer, ""), nil); err != nil {
			return nil, fmt.Errorf("merge the configuration: %w", err)
		}
	}

	var c Config
	err := k.UnmarshalWithConf("", &c, koanf.UnmarshalConf{Tag: "json", DecoderConfig: &mapstructure.DecoderConfig{
		ErrorUnused: true,
		MatchName:   func(key, field string) bool { return key == field },
	}})
	if err != nil {
		return nil, fmt.Errorf("decode the configuration: %w", err)
	}
	c.origin, c.above = l.origin, l.above
	c.resolve(o.Env)
	c.check(&l.problems)
	if !o.Elsewhere {
		c.checkMachine(&l.problems)
	}
	if len(l.problems) > 0 {
		return nil, l.problems.sorted(o.Files)
	}
	return &c, nil
}

// loader reads the layers; what is wrong in one is left out of its map and put down as a problem.
type loader struct {
	problems Problems
	origin   map[string]Source // see Config
	above    map[string]Source
}

func (l *loader) file(name string) map[string]any {
	src := Source{Kind: FromFile, Name: name}
	data, err := readFile(name)
	if err != nil {
		l.problems.add(src, "", err.Error(), "check the path and its permissions")
		return nil
	}
	if len(bytes.TrimSpace(data)) == 0 {
		src.Line, src.Col = 1, 1
		l.problems.add(src, "", "the file is empty", "write the configuration or leave the file out: no key is needed")
		return nil
	}
	body, problem := parse(data)
	if problem != nil {
		problem.Source.Kind, problem.Source.Name = FromFile, name
		l.problems = append(l.problems, *problem)
		return nil
	}
	if body == nil {
		return nil // comments only
	}
	r := &reader{loader: l, base: src, dir: filepath.Dir(name)}
	m, _ := r.mapping(body, configType, "").(map[string]any)
	return m
}

func readFile(name string) ([]byte, error) {
	info, err := os.Stat(name)
	switch {
	case err != nil:
		return nil, plainPathError("cannot read the file", err)
	case !info.Mode().IsRegular():
		return nil, errors.New("is not a regular file")
	case info.Size() > MaxFileBytes:
		return nil, fmt.Errorf("has %d bytes, more than %d", info.Size(), MaxFileBytes)
	}
	data, err := os.ReadFile(name)
	if err != nil {
		return nil, plainPathError("cannot read the file", err)
	}
	return data, nil
}

// plainPathError leaves the path out: the problem names it.
func plainPathError(what string, err error) error {
	var pe *os.PathError
	if errors.As(err, &pe) {
		err = pe.Err
	}
	return fmt.Errorf("%s: %w", what, err)
}

// parse returns the body of the only document of a YAML text; nil when it has none.
func parse(data []byte) (body ast.Node, problem *Problem) {
	// The parser is not ours and the text is anybody's.
	defer func() {
		if r := recover(); r != nil {
			body, problem = nil, &Problem{Msg: "is not YAML that this program can read", Fix: "write plain block mappings"}
		}
	}()
	n := 0
	for line := range bytes.Lines(data) {
		if n++; len(line) > maxLineBytes {
			return nil, &Problem{Source: Source{Line: n, Col: 1}, Msg: fmt.Sprintf("the line has %d bytes, more than %d", len(line), maxLineBytes), Fix: "break it up"}
		}
	}
	tokens := lexer.Tokenize(string(data))
	if deep := nested(tokens); deep != nil {
		return nil, &Problem{Source: Source{Line: deep.Position.Line, Col: deep.Position.Column}, Msg: fmt.Sprintf("brackets are nested deeper than %d", maxNesting), Fix: "write it flatter"}
	}
	f, err := parser.Parse(tokens, 0, parser.AllowDuplicateMapKey())
	if err != nil {
		return nil, syntaxProblem(err)
	}
	for _, d := range f.Docs {
		if d == nil || d.Body == nil {
			continue
		}
		if body != nil {
			p := at(d.Body)
			p.Msg, p.Fix = "a second document starts here", "write one document in a file; several files can be given"
			return nil, &p
		}
		body = d.Body
	}
	return body, nil
}

// nested returns the first bracket that is nested too deep.
func nested(tokens token.Tokens) *token.Token {
	depth := 0
	for _, t := range tokens {
		switch t.Type {
		case token.SequenceStartType, token.MappingStartType:
			if depth++; depth > maxNesting {
				return t
			}
		case token.SequenceEndType, token.MappingEndType:
			depth--
		}
	}
	return nil
}

func syntaxProblem(err error) *Problem {
	p := Problem{Msg: err.Error(), Fix: "correct the YAML"}
	var ye yaml.Error
	if errors.As(err, &ye) {
		p.Msg = ye.GetMessage()
		if t := ye.GetToken(); t != nil && t.Position != nil {
			p.Source.Line, p.Source.Col = t.Position.Line, t.Position.Column
		}
	}
	p.Msg = "not YAML: " + strings.Join(strings.Fields(strings.ReplaceAll(p.Msg, "\t", `\t`)), " ")
	if strings.Contains(p.Msg, `\t`) {
		p.Fix = "indent with spaces, not with tabs"
	}
	return &p
}

// env reads the variables with EnvPrefix.
func (l *loader) env(environ []string) map[string]any {
	root := map[string]any{}
	for _, kv := range environ {
		name, value, ok := strings.Cut(kv, "=")
		rest, mine := strings.CutPrefix(name, EnvPrefix)
		if !ok || !mine {
			continue
		}
		path := strings.Split(strings.ToLower(rest), "__")
		r := &reader{loader: l, base: Source{Kind: FromEnv, Name: name}, dir: "."}
		r.assign(root, path, value)
	}
	return root
}

// flags reads key=value pairs.
func (l *loader) flags(flags []string) map[string]any {
	root := map[string]any{}
	for _, kv := range flags {
		key, value, ok := strings.Cut(kv, "=")
		src := Source{Kind: FromFlag, Name: key}
		if !ok || key == "" {
			src.Name = kv
			l.problems.add(src, "", fmt.Sprintf("%q is not key=value", kv), "write for example --set limits.peer_ops=8")
			continue
		}
		r := &reader{loader: l, base: src, dir: "."}
		r.assign(root, strings.Split(key, "."), value)
	}
	return root
}
