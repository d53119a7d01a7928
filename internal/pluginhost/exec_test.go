package pluginhost

import (
	"bytes"
	"context"
	"debug/elf"
	"encoding/binary"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The ways in which a program cannot be started: one line with the cause and the fix, at once.
func TestProgramCannotRun(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, text []byte, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, text, mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	other := elf.EM_AARCH64
	if runtime.GOARCH == "arm64" {
		other = elf.EM_X86_64
	}
	object := elfHeader(elf.ET_REL, machines[runtime.GOARCH])
	fifo := filepath.Join(dir, "fifo")
	if err := unix.Mkfifo(fifo, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		exec string
		says []string
	}{
		{"absent", filepath.Join(dir, "absent"), []string{"no such file", "build it"}},
		{"directory", dir, []string{"is a directory", "name the file"}},
		{"not executable", write("plain", []byte("x"), 0o644), []string{"not an executable file", "chmod +x"}},
		{"device", "/dev/null", []string{"not an executable file", "name the program itself"}},
		{"fifo", fifo, []string{"not an executable file", "name the program itself"}},
		{"another machine", write("foreign", elfHeader(elf.ET_EXEC, other), 0o755), []string{"exec format error", "built for " + other.String(), "GOARCH=" + runtime.GOARCH}},
		{"object file", write("object.o", object, 0o755), []string{"ET_REL", "link it"}},
		{"text", write("text", []byte("hello, world\n"), 0o755), []string{"exec format error", "no program"}},
		{"empty", write("empty", nil, 0o755), []string{"empty"}},
		{"module", write("guest.wasm", []byte("\x00asm\x01\x00\x00\x00"), 0o755), []string{"WASM module", "wasm:FILE"}},
		{"no loader", write("musl", elfWithLoader("/lib/ld-nowhere.so.1"), 0o755), []string{"/lib/ld-nowhere.so.1", "does not exist", "statically"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			began := time.Now()
			_, err := probe(t, Spec{Name: "a", Exec: c.exec}, 0)
			wantText(t, err, append(c.says, "plugin a")...)
			oneLine(t, err)
			if d := time.Since(began); d > 10*time.Second {
				t.Errorf("it took %v", d)
			}
		})
	}
}

// A script whose interpreter cannot be started: the error names both.
func TestInterpreterCannotRun(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	shim := write("python3", "#!/bin/sh\nexec /opt/python3 \"$@\"\n", 0o755)
	for _, c := range []struct{ interpreter, says string }{
		{"/no/such/python", "/no/such/python of script SCRIPT: no such file or directory; install it, or name another one"},
		{"nosuchpython", "nosuchpython of script SCRIPT is neither beside the engine nor in PATH; give its full path"},
		{dir, "of script SCRIPT is a directory"},
		{write("plain", "x", 0o644), "of script SCRIPT is not an executable file (mode -rw-r--r--); chmod +x it"},
		{shim, shim + " of script SCRIPT is a script itself"},
	} {
		script := write("backend.py", "#!"+c.interpreter+"\n", 0o755)
		spec, err := ParseRef("exec:"+script, nil)
		if err != nil {
			t.Fatal(err)
		}
		_, err = probe(t, spec, 0)
		wantText(t, err, "plugin backend: interpreter ", strings.ReplaceAll(c.says, "SCRIPT", script))
		oneLine(t, err)
	}
}

// oneLine fails when an error has several lines, or says the same thing twice.
func oneLine(t *testing.T, err error) {
	t.Helper()
	if strings.ContainsRune(err.Error(), '\n') {
		t.Errorf("more than one line: %v", err)
	}
	seen := map[string]bool{}
	for _, part := range regexp.MustCompile(`[:;] `).Split(err.Error(), -1) {
		if seen[part] {
			t.Errorf("%q is said twice: %v", part, err)
		}
		seen[part] = true
	}
	if strings.Contains(err.Error(), "/proc/self/fd") {
		t.Errorf("the path of a descriptor: %v", err)
	}
}

func elfHeader(kind elf.Type, machine elf.Machine) []byte {
	h := elf.Header64{
		Ident: [16]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)},
		Type:  uint16(kind), Machine: uint16(machine), Version: uint32(elf.EV_CURRENT), Ehsize: 64, Phentsize: 56, Shentsize: 64,
	}
	var b bytes.Buffer
	_ = binary.Write(&b, binary.LittleEndian, h)
	return b.Bytes()
}

// elfWithLoader is a program whose dynamic loader is elsewhere.
func elfWithLoader(loader string) []byte {
	var b bytes.Buffer
	h := elfHeader(elf.ET_EXEC, machines[runtime.GOARCH])
	binary.LittleEndian.PutUint64(h[32:], 64) // phoff
	binary.LittleEndian.PutUint16(h[56:], 1)  // phnum
	b.Write(h)
	n := uint64(len(loader) + 1)
	_ = binary.Write(&b, binary.LittleEndian, elf.Prog64{Type: uint32(elf.PT_INTERP), Flags: uint32(elf.PF_R), Off: 120, Filesz: n, Memsz: n, Align: 1})
	b.WriteString(loader + "\x00")
	return b.Bytes()
}

// probe runs Probe with the features and times of a test.
func probe(t *testing.T, spec Spec, timeout time.Duration) (Probed, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return Probe(ctx, ProbeConfig{Node: "n0", EngineVersion: "test", HostID: "boot", Timeout: timeout}, spec)
}

func TestProbe(t *testing.T) {
	before, _ := filepath.Glob(filepath.Join(os.TempDir(), "probe*"))
	got, err := probe(t, mode("echo"), 0)
	if err != nil || got.Handshake.GetName() != "test" || got.Took <= 0 {
		t.Fatalf("%+v, %v", got, err)
	}
	for _, c := range []struct {
		mode    string
		says    string
		answers bool
	}{
		{"pollute", "on stdout in place of its handshake", false},
		{"mute", "no handshake within", false},
		{"no-answer", "no handshake within 2s: it listens, and does not answer", false},
		{"crash-at-start", "ended before its handshake", false},
		{"new-version", "contract version", true},
		{"refuses", `plugin test: option ucx_tls: unknown transport "foo"`, true},
	} {
		t.Run(c.mode, func(t *testing.T) {
			t.Parallel()
			got, err := probe(t, mode(c.mode), 2*time.Second)
			wantText(t, err, c.says)
			if (got.Handshake != nil) != c.answers {
				t.Errorf("handshake %v", got.Handshake)
			}
		})
	}
	t.Run("left behind", func(t *testing.T) {
		after, _ := filepath.Glob(filepath.Join(os.TempDir(), "probe*"))
		if len(after) > len(before)+8 {
			t.Errorf("%d directories, %d before", len(after), len(before))
		}
	})
}

// A program that speaks another version of go-plugin's line, or none of it.
func TestProbeForeignPrograms(t *testing.T) {
	sh, err := exec.LookPath("sh")
	if err != nil {
		t.Fatal(err)
	}
	for script, says := range map[string]string{
		"echo '2|1|unix|/tmp/x|grpc|'; sleep 100":                    "core API version with plugin. Plugin version: 2",
		"echo '1|7|unix|/tmp/x|grpc|'; sleep 100":                    "Plugin version: 7, Client versions: [1]; take the release",
		`echo "1|1|unix|$PLUGIN_UNIX_SOCKET_DIR/x|grpc|"; sleep 100`: "nobody answers at the socket that it named: dial unix ",
		"echo 'hello'; sleep 100":                                    "it printed \"hello\" on stdout",
		"printf '1|1|unix|/tmp/x|grpc'; sleep 100":                   `it printed "1|1|unix|/tmp/x|grpc" on stdout, and the line does not end`,
		"printf '1|1|unix|/tmp/x|grpc'":                              `it printed "1|1|unix|/tmp/x|grpc" on stdout, and the line does not end`,
		"printf hello; sleep 100":                                    `it printed "hello" on stdout in place`,
		"echo; echo hello; sleep 100":                                `it printed "\n" on stdout`,
		"sleep 100":                                                  "no handshake within 1s: it runs, and prints nothing on stdout",
		"exit 0":                                                     "ended before its handshake: exit status 0; it wrote nothing to stderr",
		"kill -SEGV $$":                                              "ended before its handshake: signal: segmentation fault; it wrote nothing to stderr",
	} {
		_, err := probe(t, Spec{Name: "a", Exec: sh, Args: []string{"-c", script}}, time.Second)
		wantText(t, err, says, "plugin a")
		oneLine(t, err)
	}
}
