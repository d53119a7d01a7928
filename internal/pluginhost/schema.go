package pluginhost

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/santhosh-tekuri/jsonschema/v6/kind"
)

// maxSchema bounds the schema of a plugin's options, bytes.
const maxSchema = 1 << 20

// OptionProblem is one way in which options break the plugin's schema.
type OptionProblem struct {
	Path []string // to the value, from the options; of an unknown option to itself
	Msg  string
	// Known are the options that there are, where Path is one that there is not.
	Known []string
}

// CheckOptions holds options (a JSON object, or empty) against the schema that the plugin sent
// (HandshakeResponse.config_schema). The error is of the schema, which is then no JSON Schema; an empty one
// allows everything.
func CheckOptions(schema string, options []byte) ([]OptionProblem, error) {
	if schema == "" {
		return nil, nil
	}
	if len(schema) > maxSchema {
		return nil, fmt.Errorf("config_schema has %d bytes, at most %d are read", len(schema), maxSchema)
	}
	doc, err := jsonschema.UnmarshalJSON(strings.NewReader(schema))
	if err != nil {
		return nil, fmt.Errorf("config_schema is not JSON: %w", err)
	}
	c := jsonschema.NewCompiler()
	c.UseLoader(noLoader{}) // a plugin does not choose what the engine reads
	const url = "plugin:///config_schema"
	if err := c.AddResource(url, doc); err != nil {
		return nil, fmt.Errorf("config_schema: %w", err)
	}
	compiled, err := c.Compile(url)
	if err != nil {
		return nil, fmt.Errorf("config_schema: %w", firstLine{err})
	}
	if len(bytes.TrimSpace(options)) == 0 {
		options = []byte("{}")
	}
	value, err := jsonschema.UnmarshalJSON(bytes.NewReader(options))
	if err != nil {
		return nil, fmt.Errorf("the options are not JSON: %w", err)
	}
	var invalid *jsonschema.ValidationError
	if err := compiled.Validate(value); !errors.As(err, &invalid) {
		return nil, err
	}
	var known []string
	if object, ok := doc.(map[string]any); ok {
		if properties, ok := object["properties"].(map[string]any); ok {
			for name := range properties {
				known = append(known, name)
			}
			slices.Sort(known)
		}
	}
	return leaves(invalid, known, nil), nil
}

type noLoader struct{}

func (noLoader) Load(url string) (any, error) {
	return nil, fmt.Errorf("it refers to %s; a plugin's schema has to be complete in itself", url)
}

// maxProblems bounds what is said of one plugin's options.
const maxProblems = 50

// leaves collects the causes that have none themselves.
func leaves(e *jsonschema.ValidationError, known []string, to []OptionProblem) []OptionProblem {
	if len(to) == maxProblems {
		return to
	}
	if extra, ok := e.ErrorKind.(*kind.AdditionalProperties); ok {
		slices.Sort(extra.Properties)
		for _, name := range extra.Properties {
			p := OptionProblem{Path: append(slices.Clone(e.InstanceLocation), name), Msg: "is not an option of this plugin"}
			if len(e.InstanceLocation) == 0 {
				p.Known = known
			}
			to = append(to, p)
		}
		return to
	}
	if len(e.Causes) == 0 {
		return append(to, OptionProblem{Path: e.InstanceLocation, Msg: e.BasicOutput().Error.String()})
	}
	for _, cause := range e.Causes {
		to = leaves(cause, known, to)
	}
	return to
}
