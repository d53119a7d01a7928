package pluginhost

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

func TestParseRef(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	script := write("copy_backend.py", "#!/usr/bin/env python3\nprint()\n", 0o755)
	direct := write("direct", "#!/bin/sh -\n", 0o755)
	plain := write("plain.sh", "#! /bin/sh\n", 0o755)
	plainData := write("data.py", "#!/bin/sh\n", 0o644)
	endless := write("endless", "#!"+strings.Repeat("x", 500), 0o755)
	for _, c := range []struct {
		ref  string
		args []string
		want Spec
	}{
		{"tcp", nil, Spec{Name: "tcp", Args: []string{"plugin", "tcp"}}},
		{"nixl", nil, Spec{Name: "nixl", Exec: "engine-plugin-nixl"}},
		{"exec:bin/engine-plugin-tcp", nil, Spec{Name: "tcp", Exec: "bin/engine-plugin-tcp"}},
		{"exec:/opt/My Backend-2.1", []string{"-v"}, Spec{Name: "my-backend-2", Exec: "/opt/My Backend-2.1", Args: []string{"-v"}}},
		{"exec:./42", nil, Spec{Name: "plugin", Exec: "./42"}},
		{"exec:/a:b", nil, Spec{Name: "a-b", Exec: "/a:b"}},
		{"exec:" + script, []string{"-x"}, Spec{Name: "copy-backend", Exec: "python3", Script: script, Args: []string{"-x"}}},
		{"exec:/venv/bin/python3.12", []string{script, "-x"}, Spec{Name: "copy-backend", Exec: "/venv/bin/python3.12", Script: script, Args: []string{"-x"}}},
		{"exec:/venv/python3", []string{"-m", script}, Spec{Name: "python3", Exec: "/venv/python3", Args: []string{"-m", script}}},
		{"exec:sh", []string{"/nowhere.sh"}, Spec{Name: "sh", Exec: "sh", Args: []string{"/nowhere.sh"}}},
		{"exec:" + plain, nil, Spec{Name: "plain", Exec: "/bin/sh", Script: plain}},
		{"wasm:out/repage.wasm", nil, Spec{Name: "repage", Wasm: "out/repage.wasm"}},
	} {
		got, err := ParseRef(c.ref, c.args)
		if err != nil || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %+v, %v\nwant %+v", c.ref, got, err, c.want)
		}
	}
	for _, c := range []struct {
		ref  string
		args []string
		says string
	}{
		{"", nil, "no plugin name"},
		{"Tcp", nil, "no plugin name"},
		{"exec:", nil, "names nothing"},
		{"wasm:", nil, "names nothing"},
		{"http://x", nil, "neither exec: nor wasm:"},
		{"./backend", nil, "write exec:./backend"},
		{"out/x.wasm", nil, "write wasm:out/x.wasm"},
		{"tcp", []string{"-x"}, "write exec:engine-plugin-tcp -- -x"},
		{"wasm:x", []string{"-x"}, "takes no arguments"},
		{"exec:" + direct, nil, "name the interpreter yourself: exec:INTERPRETER -- " + direct},
		{"exec:" + plainData, nil, "chmod +x"},
		{"exec:" + endless, nil, "names no interpreter"},
	} {
		if got, err := ParseRef(c.ref, c.args); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %+v, error %v; want %q", c.ref, got, err, c.says)
		}
	}
}
