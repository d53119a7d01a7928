package config

import (
	"encoding"
	"reflect"
	"slices"
	"strings"
)

// assign sets the value of one variable or flag in a tree of maps.
func (r *reader) assign(root map[string]any, path []string, value string) {
	t, tag := configType, ""
	for i, name := range path {
		key := strings.Join(path[:i+1], ".")
		switch t.Kind() {
		case reflect.Struct:
			fs := fieldsOf(t)
			j := slices.IndexFunc(fs, func(f field) bool { return f.name == name })
			if j < 0 {
				r.problems.add(r.base, key, "unknown key", didYouMean(name, keysOf(fs)))
				return
			}
			t, tag = fs[j].typ, fs[j].tag
		case reflect.Map:
			t, tag = t.Elem(), ""
		case reflect.Interface: // options of a plugin go as deep as they like
		default:
			parent := strings.Join(path[:i], ".")
			r.problems.add(r.base, key, "unknown key", parent+" has no keys below it")
			return
		}
	}
	key := strings.Join(path, ".")
	v, ok := r.scalar(value, t, tag, key)
	if !ok {
		return
	}
	m := root
	for _, name := range path[:len(path)-1] {
		next, ok := m[name].(map[string]any)
		if !ok {
			next = map[string]any{}
			m[name] = next
		}
		m = next
	}
	m[path[len(path)-1]] = v
}

// scalar reads a value that was given as text. Text stays text; everything else is YAML.
func (r *reader) scalar(value string, t reflect.Type, tag, key string) (any, bool) {
	switch {
	case reflect.PointerTo(t).Implements(reflect.TypeFor[encoding.TextUnmarshaler]()):
		v, ok := r.checkUnit(r.base, value, t, key)
		if ok {
			r.origin[key] = r.base
		}
		return v, ok
	case t.Kind() == reflect.String:
		v, ok := r.checkString(r.base, value, tag, key)
		if ok {
			r.origin[key] = r.base
		}
		return v, ok
	}
	if len(value) > MaxFileBytes {
		r.problems.add(r.base, key, "the value is too long", "put it into a file")
		return nil, false
	}
	body, problem := parse([]byte(value))
	if problem != nil {
		r.problems.add(r.base, key, problem.Msg, problem.Fix)
		return nil, false
	}
	if body == nil {
		r.problems.add(r.base, key, "has no value", "write one after the equals sign")
		return nil, false
	}
	return r.value(body, t, tag, key)
}
