package config

import (
	"encoding"
	"fmt"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/token"
)

var (
	configType = reflect.TypeFor[Config]()
	pluginType = reflect.TypeFor[Plugin]()
	namesType  = reflect.TypeFor[Names]()
	textType   = reflect.TypeFor[encoding.TextUnmarshaler]()
	decimal    = regexp.MustCompile(`^[-+]?(0|[1-9][0-9]*)$`)
)

// pathKeys are the keys that hold a path.
var pathKeys = map[string]bool{
	"runtime_dir": true, "state_dir": true, "worker.socket": true, "admin.socket": true,
	"peers.tls.cert": true, "peers.tls.key": true, "peers.tls.ca": true,
	"peers.etcd.tls.cert": true, "peers.etcd.tls.key": true, "peers.etcd.tls.ca": true, "peers.etcd.password_file": true,
}

// reader turns the nodes of one source into plain maps and values of the right types, and puts down
// a problem for what does not fit the struct.
type reader struct {
	*loader
	base Source
	dir  string // that relative paths are relative to
}

// place is where a node is; of a variable or a flag it is the variable or flag.
func (r *reader) place(n ast.Node) Source {
	s := r.base
	if s.Kind == FromFile {
		p := at(n)
		s.Line, s.Col = p.Source.Line, p.Source.Col
	}
	return s
}

// at returns a problem with the line and column of a node.
func at(n ast.Node) Problem {
	var p Problem
	if n == nil {
		return p
	}
	switch m := n.(type) {
	case *ast.MappingNode:
		if len(m.Values) > 0 {
			return at(m.Values[0].Key)
		}
	case *ast.MappingValueNode:
		return at(m.Key)
	}
	if t := n.GetToken(); t != nil && t.Position != nil {
		p.Source.Line, p.Source.Col = t.Position.Line, t.Position.Column
	}
	return p
}

// entries returns the pairs of a mapping node; ok is false for another kind of node.
func entries(n ast.Node) (pairs []*ast.MappingValueNode, ok bool) {
	switch m := n.(type) {
	case *ast.MappingNode:
		return m.Values, true
	case *ast.MappingValueNode:
		return []*ast.MappingValueNode{m}, true
	}
	return nil, false
}

// field is one YAML key of a struct.
type field struct {
	index int // in the struct
	name  string
	typ   reflect.Type
	tag   string // jsonschema
}

func fieldsOf(t reflect.Type) []field {
	var fs []field
	for i := range t.NumField() {
		f := t.Field(i)
		if !f.IsExported() {
			continue
		}
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		fs = append(fs, field{i, name, f.Type, f.Tag.Get("jsonschema")})
	}
	return fs
}

// keysOf lists the keys of a struct.
func keysOf(fs []field) []string {
	names := make([]string, len(fs))
	for i, f := range fs {
		names[i] = f.name
	}
	return names
}

func join(key, name string) string {
	if key == "" {
		return name
	}
	return key + "." + name
}

// mapping reads a node that must be a mapping, for a struct or a map type; nil when it is not.
func (r *reader) mapping(n ast.Node, t reflect.Type, key string) any {
	pairs, ok := entries(n)
	if !ok {
		if _, null := n.(*ast.NullNode); !null {
			r.wrong(n, key, "a mapping")
		}
		return nil
	}
	var fs []field
	if t.Kind() == reflect.Struct {
		fs = fieldsOf(t)
	}
	out := make(map[string]any, len(pairs))
	first := make(map[string]int, len(pairs))
	if _, given := r.above[key]; !given {
		r.above[key] = r.place(n)
	}
	for _, p := range pairs {
		if p == nil || p.Key == nil || p.Value == nil {
			continue
		}
		name, ok := r.keyName(p, key)
		if !ok {
			continue
		}
		src := r.place(p.Key)
		full := join(key, name)
		r.above[full] = src
		if line, dup := first[name]; dup {
			r.problems.add(src, full, fmt.Sprintf("is given twice, first in line %d", line), "keep one")
			continue
		}
		first[name] = src.Line
		var v any
		switch t.Kind() {
		case reflect.Struct:
			i := slices.IndexFunc(fs, func(f field) bool { return f.name == name })
			if i < 0 {
				r.problems.add(src, full, "unknown key", didYouMean(name, keysOf(fs)))
				continue
			}
			v, ok = r.value(p.Value, fs[i].typ, fs[i].tag, full)
		case reflect.Map:
			v, ok = r.value(p.Value, t.Elem(), "", full)
			if _, null := p.Value.(*ast.NullNode); null && t.Elem() == pluginType {
				v, ok = map[string]any{}, true
				r.origin[full] = src
			}
		default: // free form
			v, ok = r.value(p.Value, t, "", full)
		}
		if ok {
			out[name] = v
		}
	}
	if t.Kind() == reflect.Map && len(pairs) == 0 {
		r.origin[key] = r.place(n)
	}
	return out
}

func (r *reader) keyName(p *ast.MappingValueNode, key string) (string, bool) {
	switch p.Key.(type) {
	case *ast.StringNode, *ast.IntegerNode, *ast.BoolNode, *ast.FloatNode, *ast.NullNode:
		if t := p.Key.GetToken(); t != nil {
			return t.Value, true
		}
	}
	r.problems.add(r.place(p.Key), key, "anchors, aliases, merge keys, tags and complex keys are not read here", "write plain keys and values")
	return "", false
}

// value reads a node for a type; ok is false when nothing is to be set.
func (r *reader) value(n ast.Node, t reflect.Type, tag, key string) (v any, ok bool) {
	switch n.(type) {
	case *ast.AnchorNode, *ast.AliasNode, *ast.TagNode, *ast.MergeKeyNode, *ast.DirectiveNode:
		r.problems.add(r.place(n), key, "anchors, aliases, merge keys, tags and complex keys are not read here", "write plain keys and values")
		return nil, false
	}
	_, null := n.(*ast.NullNode)
	switch {
	case t.Kind() == reflect.Struct, t.Kind() == reflect.Map:
		m := r.mapping(n, t, key)
		return m, m != nil
	case t == namesType:
		if s, isString := text(n); isString {
			r.origin[key] = r.place(n)
			return []any{s}, true
		}
		return r.list(n, reflect.TypeFor[string](), key, "a name or a list of names")
	case t.Kind() == reflect.Slice:
		if null {
			return nil, false
		}
		return r.list(n, t.Elem(), key, "a list")
	case t.Kind() == reflect.Interface:
		v, ok = r.free(n, key)
	case reflect.PointerTo(t).Implements(textType):
		v, ok = r.unit(n, t, key)
	case t.Kind() == reflect.String:
		v, ok = r.str(n, tag, key)
	case t.Kind() == reflect.Bool:
		b, isBool := n.(*ast.BoolNode)
		if ok = isBool; ok {
			v = b.Value
		} else {
			r.wrong(n, key, "true or false")
		}
	case t.Kind() == reflect.Int:
		v, ok = r.integer(n, tag, key)
	}
	if ok {
		r.origin[key] = r.place(n)
	}
	return v, ok
}

func (r *reader) list(n ast.Node, elem reflect.Type, key, want string) (any, bool) {
	s, ok := n.(*ast.SequenceNode)
	if !ok {
		r.wrong(n, key, want)
		return nil, false
	}
	out := make([]any, 0, len(s.Values))
	for i, e := range s.Values {
		v, ok := r.value(e, elem, "", key+"["+strconv.Itoa(i)+"]")
		if !ok {
			return nil, false
		}
		out = append(out, v)
	}
	r.origin[key] = r.place(n)
	return out, true
}

// free reads the options of a plugin: anything.
func (r *reader) free(n ast.Node, key string) (any, bool) {
	switch v := n.(type) {
	case *ast.MappingNode, *ast.MappingValueNode:
		m := r.mapping(n, reflect.TypeFor[any](), key)
		return m, m != nil
	case *ast.SequenceNode:
		return r.list(n, reflect.TypeFor[any](), key, "a list")
	case *ast.NullNode:
		return nil, true
	case *ast.BoolNode:
		return v.Value, true
	case *ast.FloatNode:
		return v.Value, true
	case *ast.IntegerNode:
		return r.integer(n, "", key)
	}
	if s, ok := text(n); ok {
		return s, true
	}
	r.wrong(n, key, "a value")
	return nil, false
}

// text returns the text of a string node.
func text(n ast.Node) (string, bool) {
	switch s := n.(type) {
	case *ast.StringNode:
		return s.Value, true
	case *ast.LiteralNode:
		if s.Value != nil {
			return s.Value.Value, true
		}
	}
	return "", false
}

// unit reads a value that needs a unit.
func (r *reader) unit(n ast.Node, t reflect.Type, key string) (any, bool) {
	s, ok := text(n)
	if !ok {
		switch n.(type) {
		case *ast.IntegerNode, *ast.FloatNode:
			s = n.GetToken().Value // the type says which unit is missing
		default:
			r.wrong(n, key, "a value with a unit")
			return nil, false
		}
	}
	return r.checkUnit(r.place(n), s, t, key)
}

func (r *reader) checkUnit(src Source, s string, t reflect.Type, key string) (any, bool) {
	v := reflect.New(t)
	if err := v.Interface().(encoding.TextUnmarshaler).UnmarshalText([]byte(s)); err != nil {
		msg, fix := split(err)
		r.problems.add(src, key, msg, fix)
		return nil, false
	}
	return v.Elem().Interface(), true
}

func (r *reader) str(n ast.Node, tag, key string) (any, bool) {
	s, ok := text(n)
	if !ok {
		if tok := n.GetToken(); isScalar(n) && tok != nil {
			r.problems.add(r.place(n), key, "want text, got "+kindName(n), "quote it: \""+tok.Value+"\"")
		} else {
			r.wrong(n, key, "text")
		}
		return nil, false
	}
	return r.checkString(r.place(n), s, tag, key)
}

func (r *reader) checkString(src Source, s, tag, key string) (any, bool) {
	if allowed := tagValues(tag, "enum"); len(allowed) > 0 && !slices.Contains(allowed, s) {
		r.problems.add(src, key, fmt.Sprintf("%q is not one of %s", s, strings.Join(allowed, ", ")), didYouMean(s, allowed))
		return nil, false
	}
	if strings.ContainsRune(s, 0) {
		r.problems.add(src, key, "contains a NUL byte", "remove it")
		return nil, false
	}
	isPath := pathKeys[key]
	if name, ok := strings.CutPrefix(key, "plugins."); ok {
		_, field, _ := strings.Cut(name, ".")
		// A program without a slash is looked up.
		isPath = field == "script" || field == "wasm" || field == "exec" && strings.Contains(s, "/")
	}
	if isPath && s != "" && !filepath.IsAbs(s) {
		if abs, err := filepath.Abs(filepath.Join(r.dir, s)); err == nil {
			s = abs
		}
	}
	return s, true
}

func (r *reader) integer(n ast.Node, tag, key string) (any, bool) {
	s, isText := text(n)
	if _, ok := n.(*ast.IntegerNode); ok {
		s = n.GetToken().Value
	} else if !isText || !decimal.MatchString(s) || n.GetToken().Type != token.StringType {
		r.wrong(n, key, "a whole number")
		return nil, false
	}
	if !decimal.MatchString(s) {
		r.problems.add(r.place(n), key, s+" is not a plain decimal number", "write digits only, without leading zeros, underscores or a base")
		return nil, false
	}
	v, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		r.problems.add(r.place(n), key, s+" is out of range", "write a smaller number")
		return nil, false
	}
	lo, hi := tagInt(tag, "minimum"), tagInt(tag, "maximum")
	if lo != nil && hi != nil && (v < *lo || v > *hi) {
		r.problems.add(r.place(n), key, s+" is out of range", fmt.Sprintf("write %d to %d", *lo, *hi))
		return nil, false
	}
	return int(v), true
}

func (r *reader) wrong(n ast.Node, key, want string) {
	got := kindName(n)
	if got == "nothing" {
		r.problems.add(r.place(n), key, "has no value", "write "+want+" or leave the key out")
		return
	}
	r.problems.add(r.place(n), key, "want "+want+", got "+got, "write "+want)
}

func isScalar(n ast.Node) bool {
	switch n.(type) {
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode, *ast.InfinityNode, *ast.NanNode:
		return true
	}
	return false
}

func kindName(n ast.Node) string {
	switch n.(type) {
	case *ast.MappingNode, *ast.MappingValueNode:
		return "a mapping"
	case *ast.SequenceNode:
		return "a list"
	case *ast.NullNode:
		return "nothing"
	case *ast.BoolNode:
		return "true or false"
	case *ast.StringNode, *ast.LiteralNode:
		return "text"
	case *ast.IntegerNode, *ast.FloatNode, *ast.InfinityNode, *ast.NanNode:
		return "a number"
	}
	return "something else"
}

// tagValues lists the values of a repeated key of a jsonschema tag, such as enum.
func tagValues(tag, key string) []string {
	var vs []string
	for part := range strings.SplitSeq(tag, ",") {
		if v, ok := strings.CutPrefix(part, key+"="); ok {
			vs = append(vs, v)
		}
	}
	return vs
}

func tagInt(tag, key string) *int64 {
	for _, v := range tagValues(tag, key) {
		if n, err := strconv.ParseInt(v, 10, 64); err == nil {
			return &n
		}
	}
	return nil
}
