// Command schemagen writes the JSON Schema of the configuration, made from the struct, its comments and
// its defaults. Run it by `go generate ./internal/config`.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"reflect"
	"strings"

	"github.com/invopop/jsonschema"
	"github.com/terminus-kv/terminus/internal/config"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage (in the folder of package config): schemagen OUTPUT_FILE")
		os.Exit(2)
	}
	b, err := schema()
	if err == nil {
		err = os.WriteFile(os.Args[1], b, 0o644)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "schemagen:", err)
		os.Exit(1)
	}
}

// schema reads the doc comments in the working directory, that of package config.
func schema() ([]byte, error) {
	r := &jsonschema.Reflector{
		ExpandedStruct: true,
		Anonymous:      true,
		Mapper:         units,
	}
	if err := r.AddGoComments("github.com/terminus-kv/terminus/internal/config", "."); err != nil {
		return nil, fmt.Errorf("read the comments: %w", err)
	}
	s := r.Reflect(&config.Config{})
	s.Title = "Terminus engine"
	setDefaults(s, s.Definitions, reflect.ValueOf(config.Default()))
	b, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return nil, err
	}
	return append(b, '\n'), nil
}

// units describes the types that are written as text with a unit.
func units(t reflect.Type) *jsonschema.Schema {
	text := func(pattern string, examples ...any) *jsonschema.Schema {
		return &jsonschema.Schema{Type: "string", Pattern: pattern, Examples: examples}
	}
	switch t {
	case reflect.TypeFor[config.Duration]():
		return text(`^([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+$`, "10s", "500ms", "1m30s")
	case reflect.TypeFor[config.Bytes]():
		return text(`^[0-9]+(\.[0-9]+)? ?([KMGT]iB|[kMGT]?B)$`, "64MiB", "1GiB")
	case reflect.TypeFor[config.Rate]():
		return text(`^[0-9]+(\.[0-9]+)? ?([KMGT]iB|[kMGT]?B)/s$`, "50MB/s")
	case reflect.TypeFor[config.Percent]():
		return text(`^[0-9]+(\.[0-9]+)? ?%$`, "10%")
	case reflect.TypeFor[config.Names]():
		return &jsonschema.Schema{OneOf: []*jsonschema.Schema{
			{Type: "string"},
			{Type: "array", Items: &jsonschema.Schema{Type: "string"}},
		}}
	}
	return nil
}

// setDefaults puts the defaults into the properties. Empty ones are left out: they depend on the machine
// or mean "none".
func setDefaults(s *jsonschema.Schema, defs jsonschema.Definitions, v reflect.Value) {
	t := v.Type()
	for i := range t.NumField() {
		f := t.Field(i)
		if !f.IsExported() || v.Field(i).IsZero() {
			continue
		}
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		p, ok := s.Properties.Get(name)
		if !ok {
			continue
		}
		if f.Type.Kind() == reflect.Struct {
			if d, ok := defs[f.Type.Name()]; ok {
				setDefaults(d, defs, v.Field(i))
			}
			continue
		}
		p.Default = v.Field(i).Interface()
	}
}
