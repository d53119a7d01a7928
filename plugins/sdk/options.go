package sdk

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strings"

	"github.com/invopop/jsonschema"
)

// configSchema makes the JSON Schema of the author's options, with their defaults. Without options it
// allows {} only.
func configSchema(config any) (json.RawMessage, error) {
	if config == nil {
		return json.RawMessage(`{"$schema":"https://json-schema.org/draft/2020-12/schema","type":"object","additionalProperties":false}`), nil
	}
	if err := checkConfigType(config); err != nil {
		return nil, err
	}
	// Every option has a default, so none is required unless its tag says so.
	r := &jsonschema.Reflector{DoNotReference: true, Anonymous: true, RequiredFromJSONSchemaTags: true}
	schema := r.Reflect(config)
	if values, err := json.Marshal(config); err == nil && schema.Properties != nil {
		var defaults map[string]any
		_ = json.Unmarshal(values, &defaults)
		for p := schema.Properties.Oldest(); p != nil; p = p.Next() {
			if p.Value.Default == nil {
				p.Value.Default = defaults[p.Key]
			}
		}
	}
	out, err := json.Marshal(schema)
	if err != nil {
		return nil, fmt.Errorf("schema of Info.Config: %w", err)
	}
	return out, nil
}

func checkConfigType(config any) error {
	t := reflect.TypeOf(config)
	if t.Kind() != reflect.Pointer || t.Elem().Kind() != reflect.Struct || reflect.ValueOf(config).IsNil() {
		return fmt.Errorf("Info.Config is a %T; it must be nil or a pointer to a struct that holds the defaults", config)
	}
	return nil
}

// decodeOptions reads the options into config, strictly: every unknown field is an error that says
// what was probably meant.
func decodeOptions(raw json.RawMessage, config any) error {
	if len(bytes.TrimSpace(raw)) == 0 {
		return nil
	}
	var tree any
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	if err := d.Decode(&tree); err != nil {
		return fmt.Errorf("not JSON: %w", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("not JSON: more than one value")
	}
	object, ok := tree.(map[string]any)
	if !ok {
		return fmt.Errorf("must be an object, not %s", kindOf(tree))
	}
	if config == nil {
		for key := range object {
			return fmt.Errorf("unknown option %q: this backend has no options", key)
		}
		return nil
	}
	if err := unknownFields("", object, reflect.TypeOf(config)); err != nil {
		return err
	}
	if err := json.Unmarshal(raw, config); err != nil {
		var wrong *json.UnmarshalTypeError
		if errors.As(err, &wrong) && wrong.Field != "" {
			return fmt.Errorf("option %q must be of type %s, not %s", wrong.Field, wrong.Type, wrong.Value)
		}
		return err
	}
	return nil
}

// unknownFields compares the keys of a decoded tree with the JSON names of a type, exactly and in depth.
func unknownFields(path string, tree any, t reflect.Type) error {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t.Implements(unmarshaler) || reflect.PointerTo(t).Implements(unmarshaler) {
		return nil
	}
	switch tree := tree.(type) {
	case []any:
		if t.Kind() != reflect.Slice && t.Kind() != reflect.Array {
			return nil // a type error, which Unmarshal names
		}
		for i, v := range tree {
			if err := unknownFields(fmt.Sprintf("%s[%d]", path, i), v, t.Elem()); err != nil {
				return err
			}
		}
	case map[string]any:
		if t.Kind() == reflect.Map {
			for key, v := range tree {
				if err := unknownFields(join(path, key), v, t.Elem()); err != nil {
					return err
				}
			}
		}
		if t.Kind() != reflect.Struct {
			return nil
		}
		fields := map[string]reflect.Type{}
		jsonFields(t, fields)
		keys := make([]string, 0, len(tree))
		for key := range tree {
			keys = append(keys, key)
		}
		slices.Sort(keys)
		for _, key := range keys {
			ft, ok := fields[key]
			if !ok {
				return fmt.Errorf("unknown option %q%s", join(path, key), suggest(key, fields))
			}
			if err := unknownFields(join(path, key), tree[key], ft); err != nil {
				return err
			}
		}
	}
	return nil
}

var unmarshaler = reflect.TypeFor[json.Unmarshaler]()

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

// jsonFields collects the names that encoding/json knows of a struct, embedded ones included.
func jsonFields(t reflect.Type, into map[string]reflect.Type) {
	for i := range t.NumField() {
		f := t.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name == "-" {
			continue
		}
		if f.Anonymous && name == "" {
			ft := f.Type
			if ft.Kind() == reflect.Pointer {
				ft = ft.Elem()
			}
			if ft.Kind() == reflect.Struct {
				jsonFields(ft, into)
				continue
			}
		}
		if !f.IsExported() {
			continue
		}
		if name == "" {
			name = f.Name
		}
		into[name] = f.Type
	}
}

// suggest names the closest field, or all of them when none is close.
func suggest(key string, fields map[string]reflect.Type) string {
	names := make([]string, 0, len(fields))
	for name := range fields {
		names = append(names, name)
	}
	slices.Sort(names)
	best, distance := "", 4
	for _, name := range names {
		if d := editDistance(strings.ToLower(key), strings.ToLower(name)); d < distance && d < len(name) {
			best, distance = name, d
		}
	}
	switch {
	case best != "":
		return fmt.Sprintf(": did you mean %q?", best)
	case len(names) == 0:
		return ": there are no options here"
	}
	return ": known are " + strings.Join(names, ", ")
}

// editDistance is Levenshtein's.
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		last := row[0]
		row[0] = i + 1
		for j := range len(b) {
			next := last
			if a[i] != b[j] {
				next = 1 + min(last, row[j], row[j+1])
			}
			last, row[j+1] = row[j+1], next
		}
	}
	return row[len(b)]
}

func kindOf(v any) string {
	switch v.(type) {
	case nil:
		return "null"
	case []any:
		return "an array"
	case string:
		return "a string"
	case bool:
		return "a boolean"
	}
	return "a number"
}
