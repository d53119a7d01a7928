package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func TestPluginsInspect(t *testing.T) {
	code, out, errOut := command(t, nil, "plugins", "inspect", "tcp", "-o", "json")
	var d pluginDescription
	if err := json.Unmarshal([]byte(out), &d); code != 0 || err != nil {
		t.Fatalf("code %d, %v: %s%s", code, err, out, errOut)
	}
	if d.Name != "tcp" || d.Contract != 1 || len(d.Features) == 0 || len(d.Limits) == 0 || d.EndpointBytes == 0 || len(d.Schema) == 0 ||
		strings.Join(d.Kinds, " ") != "transfer" || strings.Join(d.Memory, " ") != "host-shm" {
		t.Errorf("%+v", d)
	}
	code, out, _ = command(t, nil, "plugins", "inspect", "tcp")
	for _, want := range []string{"name      tcp", "kinds     transfer", "window (integer, default 8388608)"} {
		if code != 0 || !strings.Contains(out, want) {
			t.Errorf("code %d, no %q in\n%s", code, want, out)
		}
	}
}

// A plugin that cannot be started: exit code 3 and one line with the cause, in bounded time.
func TestPluginNeverReady(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	fifo := filepath.Join(dir, "fifo")
	if err := syscall.Mkfifo(fifo, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		args []string
		says string
	}{
		{"absent", []string{"exec:" + dir + "/absent"}, "no such file or directory; build it"},
		{"not executable", []string{"exec:" + write("data", "x", 0o644)}, "chmod +x"},
		{"directory", []string{"exec:" + dir}, "is a directory"},
		{"no program", []string{"exec:" + write("text", "hello", 0o755)}, "exec format error"},
		{"empty", []string{"exec:" + write("empty", "", 0o755)}, "it is empty; build it anew"},
		{"fifo", []string{"exec:" + fifo}, "(mode prwxr-xr-x); name the "},
		{"no interpreter", []string{"exec:" + write("mine.py", "#!/no/such/python\n", 0o755)},
			"plugin mine: interpreter /no/such/python of script " + dir + "/mine.py: no such file"},
		{"prints", []string{"exec:" + write("prints", "#!/bin/sh\necho Welcome\nsleep 60\n", 0o755)}, `printed "Welcome" on stdout`},
		{"ends", []string{"exec:" + write("ends", "#!/bin/sh\necho no licence >&2\nexit 4\n", 0o755)}, "exit status 4; stderr ends with \"no licence"},
		{"crashes", []string{"exec:" + write("crashes", "#!/bin/sh\nkill -SEGV $$\n", 0o755)}, "signal: segmentation fault; it wrote nothing to stderr"},
		{"never answers", []string{"--wait", "300ms", "exec:" + write("mute", "#!/bin/sh\nsleep 60\n", 0o755)}, "no handshake within 300ms"},
		{"another version", []string{"exec:/bin/sh", "--", "-c", "echo '1|9|unix|/tmp/x|grpc|'; sleep 60"}, "Plugin version: 9"},
		{"not found", []string{"engine-plugin-nowhere"}, "neither beside the engine nor in PATH"},
		{"no module", []string{"wasm:" + dir + "/absent.wasm"}, "no such file or directory; build it"},
		{"fifo as module", []string{"wasm:" + fifo}, "name the file itself"},
		{"broken module", []string{"wasm:" + write("broken.wasm", "\x00asm\x01\x00\x00\x00garb", 0o644)},
			"the module cannot be loaded: guest broken.wasm: compile: "},
		{"foreign module", []string{"wasm:" + write("foreign.wasm", "\x00asm\x01\x00\x00\x00", 0o644)},
			`the module cannot be loaded: guest foreign.wasm: the module does not export its memory as "memory"`},
		{"options", []string{"tcp", "--options", `{"windov":1}`}, `did you mean "window"?`},
	} {
		for _, verb := range []string{"plugins inspect", "plugins verify", "conformance run"} {
			if verb == "conformance run" && c.args[0] == "--wait" {
				continue // it waits as long as an engine
			}
			t.Run(verb+" "+c.name, func(t *testing.T) {
				t.Parallel()
				code, out, errOut := command(t, nil, append(strings.Fields(verb), c.args...)...)
				if code != exitNotReady || !strings.Contains(errOut, c.says) {
					t.Errorf("code %d: %s\nwant 3, %q", code, errOut, c.says)
				}
				if strings.Count(errOut, "\n") != 1 {
					t.Errorf("not one line:\n%s", errOut)
				}
				if strings.Contains(c.name, "module") && strings.Contains(out, "1.0.0") {
					t.Errorf("the host of the module described in its place:\n%s", out)
				}
			})
		}
	}
}

func TestPluginUsage(t *testing.T) {
	for _, c := range []struct {
		args string
		says string
	}{
		{"inspect", "want one PLUGIN"},
		{"inspect tcp tcp", "want one PLUGIN"},
		{"inspect ./x", "write exec:./x"},
		{"verify http:x", "neither exec: nor wasm:"},
		{"verify tcp --sha256 abc", "64 hexadecimal digits"},
		{"inspect tcp --options 1", "no JSON object"},
		{"new", "want one NAME"},
		{"new Mine", "lower-case"},
		{"new mine --sdk /nowhere", "/nowhere"},
		{"new mine --lang cobol", "want go, python, wasm-go"},
	} {
		code, _, errOut := command(t, nil, append([]string{"plugins"}, strings.Fields(c.args)...)...)
		if code != exitUsage || !strings.Contains(errOut, c.says) {
			t.Errorf("%s: code %d, %s; want %q", c.args, code, errOut, c.says)
		}
	}
}

func TestPluginsVerify(t *testing.T) {
	code, out, errOut := command(t, nil, "plugins", "verify", "tcp", "-o", "json")
	var v verification
	if err := json.Unmarshal([]byte(out), &v); code != 0 || err != nil {
		t.Fatalf("code %d, %v: %s%s", code, err, out, errOut)
	}
	if len(v.SHA256) != 64 || len(v.Checks) != 5 || v.failed() != 0 || len(v.NotCovered) == 0 {
		t.Errorf("%+v", v)
	}
	code, _, _ = command(t, nil, "plugins", "verify", "tcp", "--sha256", strings.ToUpper(v.SHA256))
	if code != 0 {
		t.Errorf("with the right pin: code %d", code)
	}
	code, out, _ = command(t, nil, "plugins", "verify", "tcp", "--sha256", strings.Repeat("0", 64))
	if code != exitFailed || !strings.Contains(out, "it was not started") || strings.Contains(out, "handshake") {
		t.Errorf("with a wrong pin: code %d\n%s", code, out)
	}
	script := filepath.Join(t.TempDir(), "backend.sh")
	if err := os.WriteFile(script, []byte("#!/bin/sh\nexit 1\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	code, out, _ = command(t, nil, "plugins", "verify", "exec:"+script)
	for _, want := range []string{script, "the interpreter /bin/sh", "whatever backend.sh imports", "libc.so"} {
		if code != exitNotReady || !strings.Contains(out, want) {
			t.Errorf("code %d, no %q in\n%s", code, want, out)
		}
	}
}

func TestPluginOfConfig(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "engine.yaml")
	text := "plugins:\n  mine:\n    exec: " + self + "\n    args: [plugin, tcp]\n    options: {window: 65536}\n"
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	code, out, errOut := command(t, nil, "plugins", "inspect", "mine", "-c", file)
	if code != 0 || !strings.Contains(out, "name      tcp") {
		t.Errorf("code %d: %s%s", code, out, errOut)
	}
	code, _, errOut = command(t, nil, "plugins", "inspect", "mime", "-c", file)
	if code != exitUsage || !strings.Contains(errOut, `did you mean "mine"?`) {
		t.Errorf("code %d: %s", code, errOut)
	}
}

// Every problem of every plugin in one run, each at its place.
func TestValidateProbe(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "text.wasm"), []byte("hello"), 0o644); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "engine.yaml")
	write := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write(`transfer: {backend: [mine, tcp]}
plugins:
  mine:
    exec: ` + self + `
    args: [plugin, tcp]
    options:
      windov: 1
      connections: 99
      advertise: [7]
  gone: {exec: engine-plugin-nowhere}
  prints:
    exec: /bin/echo
  module: {wasm: ` + filepath.Join(dir, "text.wasm") + `}
  tcp:
    options: {slice: 1}
`)
	code, out, errOut := command(t, nil, "validate", "--probe", file)
	if code != exitUsage || !strings.Contains(errOut, "7 problems") {
		t.Errorf("code %d: %s", code, errOut)
	}
	for _, want := range []string{
		file + `:7:15: plugins.mine.options.windov: plugin mine: is not an option of this plugin; fix: did you mean "window"?`,
		file + ":8:20: plugins.mine.options.connections: plugin mine: maximum: got 99, want 16",
		file + ":9:19: plugins.mine.options.advertise[0]: plugin mine: got number, want string",
		file + ":10:16: plugins.gone.exec: ",
		file + ":12:11: plugins.prints.exec: plugin prints: start: it printed ",
		file + ":13:18: plugins.module.wasm: plugin module: the module cannot be loaded: guest text.wasm: this is not a WebAssembly module",
		file + ":15:22: plugins.tcp.options.slice: plugin tcp: minimum: got 1, want 4,096",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	write("transfer: {backend: [tcp]}\nplugins:\n  tcp: {options: {slice: 8192}}\n")
	if code, out, errOut := command(t, nil, "validate", "--probe", file, "-o", "json"); code != 0 || !strings.Contains(out, `"valid": true`) {
		t.Errorf("a good one: code %d: %s%s", code, out, errOut)
	}
}

func TestPluginsNew(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "mine")
	code, out, errOut := command(t, nil, "plugins", "new", "mine", "--dir", dir)
	if code != 0 || !strings.Contains(out, "main.go\n") || !strings.Contains(errOut, "next: cd "+dir+" && make ENGINE=") {
		t.Fatalf("code %d: %s%s", code, out, errOut)
	}
	code, _, errOut = command(t, nil, "validate", filepath.Join(dir, "engine.yaml"))
	if code != 0 {
		t.Errorf("the example configuration: code %d: %s", code, errOut)
	}
	code, _, errOut = command(t, nil, "plugins", "new", "mine", "--dir", dir)
	if code != exitUsage || !strings.Contains(errOut, "is not overwritten") {
		t.Errorf("once more: code %d: %s", code, errOut)
	}
}
