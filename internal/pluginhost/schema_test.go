package pluginhost

import (
	"fmt"
	"strings"
	"testing"
)

func TestCheckOptions(t *testing.T) {
	const schema = `{"$schema":"https://json-schema.org/draft/2020-12/schema","type":"object","additionalProperties":false,"required":["mode"],
		"properties":{"listen":{"type":"string"},"connections":{"type":"integer","minimum":1,"maximum":16},"mode":{"enum":["a","b"]},
		"tls":{"type":"object","additionalProperties":false,"properties":{"cert":{"type":"string"}}},"list":{"type":"array","items":{"type":"string"}}}}`
	for _, c := range []struct{ options, want string }{
		{`{"mode":"a"}`, ""},
		{``, "/ missing property 'mode'"},
		{`{"mode":"a","listen":1,"connections":17}`, "/connections maximum: got 17, want 16; /listen got number, want string"},
		{`{"mode":"a","lisen":"x","x":1}`, "/lisen is not an option of this plugin [connections list listen mode tls]; /x is not an option of this plugin [connections list listen mode tls]"},
		{`{"mode":"c"}`, "/mode value must be one of 'a', 'b'"},
		{`{"mode":"a","tls":{"key":1}}`, "/tls/key is not an option of this plugin"},
		{`{"mode":"a","list":["x",1]}`, "/list/1 got number, want string"},
	} {
		problems, err := CheckOptions(schema, []byte(c.options))
		if err != nil {
			t.Fatal(err)
		}
		var said []string
		for _, p := range problems {
			text := "/" + strings.Join(p.Path, "/") + " " + p.Msg
			if len(p.Known) > 0 {
				text += fmt.Sprint(" ", p.Known)
			}
			said = append(said, text)
		}
		for _, want := range strings.Split(c.want, "; ") {
			if !strings.Contains(strings.Join(said, "; "), want) || (want == "") != (len(said) == 0) {
				t.Errorf("%s: %q; want %q", c.options, said, want)
			}
		}
	}
	for schema, says := range map[string]string{
		`{`:                                   "not JSON",
		`{"type":"objekt"}`:                   "config_schema",
		`{"$ref":"file:///etc/passwd"}`:       "complete in itself",
		`{"$ref":"https://example.com/x"}`:    "complete in itself",
		`{"x":"` + strings.Repeat("x", 1<<20): "at most",
	} {
		if _, err := CheckOptions(schema, nil); err == nil || !strings.Contains(err.Error(), says) || strings.ContainsRune(err.Error(), '\n') {
			t.Errorf("schema %.40s: %v, want %q", schema, err, says)
		}
	}
	if p, err := CheckOptions("", []byte(`{"x":1}`)); p != nil || err != nil {
		t.Errorf("no schema: %v, %v", p, err)
	}
}
