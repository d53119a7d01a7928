package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/santhosh-tekuri/jsonschema/v6"
)

const golden = "../../../configs/engine.schema.json"

func TestSchemaIsCurrent(t *testing.T) {
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir("..")
	got, err := schema()
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s is not what the struct says; run: go generate ./internal/config", golden)
	}
}

// compiled is the schema as an editor uses it.
func compiled(t *testing.T) *jsonschema.Schema {
	t.Helper()
	data, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource("engine.schema.json", doc); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile("engine.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func instance(t *testing.T, text []byte) any {
	t.Helper()
	j, err := yaml.YAMLToJSON(text)
	if err != nil {
		t.Fatal(err)
	}
	v, err := jsonschema.UnmarshalJSON(bytes.NewReader(j))
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func TestConfigsFitSchema(t *testing.T) {
	s := compiled(t)
	files, err := filepath.Glob("../../../configs/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no configs found: %v", err)
	}
	for _, f := range files {
		t.Run(filepath.Base(f), func(t *testing.T) {
			text, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Validate(instance(t, text)); err != nil {
				t.Error(err)
			}
			if !bytes.HasPrefix(text, []byte("# yaml-language-server: $schema=engine.schema.json\n")) {
				t.Error("the first line does not name the schema")
			}
		})
	}
}

func TestSchemaRefuses(t *testing.T) {
	s := compiled(t)
	for _, text := range []string{
		"nod: a", "clocks: {stall: 5}", "clocks: {stall: 5 s}", "limits: {op_bytes: 64}", "limits: {peer_ops: 0}",
		"limits: {quarantine: 10}", "transfer: {backend: 1}", "log: {level: loud}", "plugins: {nixl: {exce: x}}",
		"peers: {static: [{node: a}]}", "clocks: {transfer_floor_rate: 5MB}",
	} {
		if s.Validate(instance(t, []byte(text))) == nil {
			t.Errorf("the schema accepts %q", text)
		}
	}
}
