package sdk

import (
	"encoding/json"
	"strings"
	"testing"
	"time"
)

type common struct {
	Debug bool `json:"debug"`
}

type duration time.Duration

func (d *duration) UnmarshalJSON(b []byte) error {
	v, err := time.ParseDuration(strings.Trim(string(b), `"`))
	*d = duration(v)
	return err
}

type testOptions struct {
	common
	Connections int               `json:"connections" jsonschema:"minimum=1,description=streams per peer"`
	Timeout     duration          `json:"timeout"`
	Rails       []rail            `json:"rails"`
	Env         map[string]string `json:"env"`
	Hidden      int               `json:"-"`
	Plain       int
}

type rail struct {
	Device string `json:"device"`
}

func TestDecodeOptions(t *testing.T) {
	for _, tc := range []struct{ raw, want string }{
		{``, ""},
		{`  `, ""},
		{`{}`, ""},
		{`{"debug":true,"connections":3,"timeout":"2s","rails":[{"device":"a"},{}],"env":{"ANY":"x"},"Plain":1}`, ""},
		{`{"conections":3}`, `unknown option "conections": did you mean "connections"?`},
		{`{"Connections":3}`, `unknown option "Connections": did you mean "connections"?`},
		{`{"rails":[{},{"devise":"a"}]}`, `unknown option "rails[1].devise": did you mean "device"?`},
		{`{"zzzzzz":1}`, `unknown option "zzzzzz": known are Plain, connections, debug, env, rails, timeout`},
		{`{"Hidden":1}`, `unknown option "Hidden"`},
		{`{"connections":"3"}`, `option "connections" must be of type int, not string`},
		{`{"connections":{"x":1}}`, `option "connections" must be of type int, not object`},
		{`{"timeout":"soon"}`, "soon"},
		{`[1]`, "must be an object, not an array"},
		{`null`, "must be an object, not null"},
		{`{`, "not JSON"},
		{`{} {}`, "more than one value"},
	} {
		err := decodeOptions(json.RawMessage(tc.raw), &testOptions{})
		if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", tc.raw, err, tc.want)
		}
	}
	o := testOptions{Connections: 4, Plain: 5}
	if err := decodeOptions(json.RawMessage(`{"debug":true,"timeout":"2s","Plain":6}`), &o); err != nil ||
		o.Connections != 4 || o.Plain != 6 || !o.Debug || time.Duration(o.Timeout) != 2*time.Second {
		t.Errorf("%+v, %v", o, err)
	}
	if err := decodeOptions(json.RawMessage(`{"x":1}`), nil); err == nil || !strings.Contains(err.Error(), "no options") {
		t.Errorf("%v", err)
	}
}

func TestConfigSchema(t *testing.T) {
	schema, err := configSchema(&testOptions{Connections: 4})
	if err != nil {
		t.Fatal(err)
	}
	var s struct {
		Schema     string `json:"$schema"`
		Properties map[string]struct {
			Description string
			Minimum     int
			Default     any
		}
		Required             []string
		AdditionalProperties bool
	}
	if err := json.Unmarshal(schema, &s); err != nil || !strings.Contains(s.Schema, "2020-12") ||
		s.Properties["connections"].Minimum != 1 || s.Properties["connections"].Description != "streams per peer" || s.AdditionalProperties ||
		len(s.Required) != 0 || s.Properties["connections"].Default != 4.0 {
		t.Errorf("%v: %s", err, schema)
	}
	for _, bad := range []any{testOptions{}, (*testOptions)(nil), new(int), "x"} {
		if _, err := configSchema(bad); err == nil {
			t.Errorf("%T was taken", bad)
		}
	}
	if s, err := configSchema(nil); err != nil || !json.Valid(s) {
		t.Errorf("%s, %v", s, err)
	}
}
