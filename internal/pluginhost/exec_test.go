package pluginhost

import (
	"bytes"
	"context"
	"debug/elf"
	"encoding/binary"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
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
	for _, c := range []struct {
		name string
		exec string
		says []string
	}{
		{"absent", filepath.Join(dir, "absent"), []string{"no such file", "build it"}},
		{"directory", dir, []string{"is a directory", "name the file"}},
		{"not executable", write("plain", []byte("x"), 0o644), []string{"not an executable file", "chmod +x"}},
		{"fifo", "/dev/null", []string{"not an executable file"}},
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
			if strings.ContainsRune(err.Error(), '\n') {
				t.Error("more than one line")
			}
			if d := time.Since(began); d > 10*time.Second {
				t.Errorf("it took %v", d)
			}
		})
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
		{"no-answer", "no handshake within", false},
		{"crash-at-start", "ended before its handshake", false},
		{"new-version", "contract version", true},
		{"refuses", "refused", true},
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
		"echo '2|1|unix|/tmp/x|grpc|'; sleep 100": "core API version with plugin. Plugin version: 2",
		"echo '1|7|unix|/tmp/x|grpc|'; sleep 100": "Plugin version: 7",
		"echo 'hello'; sleep 100":                 "it printed \"hello\" on stdout",
		"echo; echo hello; sleep 100":             `it printed "\n" on stdout`,
		"sleep 100":                               "no handshake within",
		"exit 0":                                  "ended before its handshake: exit status 0",
	} {
		_, err := probe(t, Spec{Name: "a", Exec: sh, Args: []string{"-c", script}}, time.Second)
		wantText(t, err, says, "plugin a")
		if strings.ContainsRune(err.Error(), '\n') {
			t.Error("more than one line")
		}
	}
}
