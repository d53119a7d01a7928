package config

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
)

// Effective lists every leaf of the configuration with its value and the source of the value, in the
// order of the struct. Entries of maps are sorted.
func (c *Config) Effective() []Value {
	var out []Value
	c.walk(reflect.ValueOf(c).Elem(), "", &out)
	return out
}

func (c *Config) walk(v reflect.Value, key string, out *[]Value) {
	switch {
	case v.Kind() == reflect.Struct && v.Type() != reflect.TypeFor[StaticPeer]():
		for _, f := range fieldsOf(v.Type()) {
			c.walk(v.Field(f.index), join(key, f.name), out)
		}
	case v.Kind() == reflect.Map && v.Len() > 0:
		m := map[string]reflect.Value{}
		for _, k := range v.MapKeys() {
			m[k.String()] = v.MapIndex(k)
		}
		for _, k := range slices.Sorted(maps.Keys(m)) {
			c.walk(m[k], join(key, k), out)
		}
	case v.Kind() == reflect.Interface && !v.IsNil() && v.Elem().Kind() == reflect.Map && v.Elem().Len() > 0:
		c.walk(v.Elem(), key, out)
	default:
		*out = append(*out, Value{Key: key, Value: inline(v.Interface()), Source: c.leafSource(key)})
	}
}

func (c *Config) leafSource(key string) Source {
	if s, ok := c.origin[key]; ok {
		return s
	}
	return Source{Kind: FromDefault}
}

// inline writes a value as YAML on one line.
func inline(v any) string {
	switch x := v.(type) {
	case fmt.Stringer:
		return x.String()
	case string:
		if x == "" || strings.ContainsAny(x, ":#{}[],&*!|>'\"%@`\n") || strings.TrimSpace(x) != x {
			return strconv.Quote(x)
		}
		if _, err := strconv.ParseFloat(x, 64); err == nil {
			return strconv.Quote(x)
		}
		return x
	case Names:
		return "[" + strings.Join(x, ", ") + "]"
	}
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Sprint(v)
	}
	if string(b) == "null" {
		if k := reflect.ValueOf(v).Kind(); k == reflect.Slice {
			return "[]"
		} else if k == reflect.Map {
			return "{}"
		}
	}
	return string(b)
}
