package pluginhost

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/internal/regular"
)

// Spec is one plugin of the configuration.
type Spec struct {
	// Name is the key in the configuration: [a-z][a-z0-9-]*, at most 32 bytes.
	Name string
	// Exec is the program: a path, or a name that is looked up beside the engine's binary and then in
	// PATH. Empty means the engine's own binary, re-executed (the embedded backends). A #! script is
	// refused: Exec names its interpreter, Script the file.
	Exec string
	// Script is the file that the interpreter Exec runs. It becomes the first argument.
	Script string
	// Wasm is a module file, a guest: Exec (empty: the engine's own binary) hosts it, as the command
	// "plugin wasm". It takes no Script and no Args.
	Wasm string
	// WasmCache is the directory for compiled modules. Empty: one of the user's.
	WasmCache string
	Args      []string
	// Env is added to the few variables that a plugin inherits, and wins over them.
	Env map[string]string
	// SHA256 pins the program by its hex digest: the very file that is hashed is executed, and one
	// that is written to between the two is refused. With Script it pins the script instead, which the interpreter opens once more by its path; what the
	// script imports, and the interpreter, are not covered. With Wasm it pins the module: the process
	// that hosts it hashes the very bytes that it compiles. Empty: not pinned.
	SHA256 string
	// Options go to the plugin as HandshakeRequest.config_json: a JSON object, or empty.
	Options []byte
	// MTLS turns on go-plugin's automatic mutual TLS. Off by default: the socket lives in a private
	// directory and its server is checked by process id, and Python's gRPC refuses the certificate.
	MTLS bool

	// running is the program itself where it is the one that was handed over from: its file may have been
	// replaced. Nil: it is looked up. It is closed when nothing refers to it any more.
	running *os.File
}

// Fresh is the spec for whatever lies at the program's path now. An Event's may mean the file that lay there.
func (s Spec) Fresh() Spec {
	s.running = nil
	return s
}

var (
	nameRE = regexp.MustCompile(`^[a-z][a-z0-9-]{0,31}$`)
	envRE  = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
)

// reservedEnv are prefixes that belong to the plumbing between host and plugin.
var reservedEnv = []string{"ENGINE_", "PLUGIN_"}

// inheritedEnv is what a plugin inherits of the engine's environment: names, and prefixes ending in
// an underscore. Everything else comes from Spec.Env.
var inheritedEnv = []string{
	"PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "LC_",
	"GODEBUG", "GORACE", "GOTRACEBACK", "GOMAXPROCS", "GOMEMLIMIT", "GOCOVERDIR",
	"CUDA_", "NVIDIA_", "NCCL_", "UCX_", "NIXL_", "MC_",
}

func (s *Spec) check() error {
	if !nameRE.MatchString(s.Name) {
		return fmt.Errorf("plugin name %q: want [a-z][a-z0-9-]*, at most 32 bytes", s.Name)
	}
	for key, value := range s.Env {
		if !envRE.MatchString(key) || strings.ContainsRune(value, 0) {
			return fmt.Errorf("plugin %s: env %q is not a valid variable", s.Name, key)
		}
		for _, prefix := range reservedEnv {
			if strings.HasPrefix(key, prefix) {
				return fmt.Errorf("plugin %s: env %s: names with %s are set by the engine; choose another name", s.Name, key, prefix)
			}
		}
	}
	if len(s.Options) > 0 {
		var object map[string]json.RawMessage
		if err := json.Unmarshal(s.Options, &object); err != nil {
			return fmt.Errorf("plugin %s: options are not a JSON object: %w", s.Name, err)
		}
		if object == nil {
			return fmt.Errorf("plugin %s: options are not a JSON object: null", s.Name)
		}
	}
	if s.SHA256 != "" {
		if sum, err := hex.DecodeString(s.SHA256); err != nil || len(sum) != sha256.Size {
			return fmt.Errorf("plugin %s: sha256 %q: want 64 hex digits", s.Name, s.SHA256)
		}
	}
	if s.Wasm != "" && (s.Script != "" || len(s.Args) > 0) {
		return fmt.Errorf("plugin %s: wasm %s takes no script and no args; remove them", s.Name, s.Wasm)
	}
	if s.Script != "" && s.Exec == "" {
		return fmt.Errorf("plugin %s: script %s has no interpreter; name it in exec", s.Name, s.Script)
	}
	return nil
}

// program is an opened executable, ready to be executed by its descriptor.
type program struct {
	file  *os.File
	argv  []string
	other bool        // the pin covers the script or the module, not file
	sum   string      // hex SHA-256 of what the pin covers; empty without a pin
	stat  unix.Stat_t // of file, before it was hashed
}

// minProgramFD keeps the descriptor clear of the numbers that the child's own descriptors take.
const minProgramFD = 64

// open opens the program, hashes it, and compares the pin. The caller closes it.
func (s *Spec) open() (*program, error) {
	path, err := s.resolve()
	if err != nil {
		return nil, err
	}
	open := path
	if s.Exec == "" {
		open = "/proc/self/exe" // the running image, even if the file has been replaced meanwhile
	}
	if s.running != nil {
		open = fmt.Sprintf("/proc/self/fd/%d", s.running.Fd())
	}
	fd, err := unix.Open(open, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0) // a pipe is not waited for
	if err != nil {
		return nil, openError(s.subject(path), err)
	}
	high, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, minProgramFD)
	unix.Close(fd)
	if err != nil {
		return nil, fmt.Errorf("open program %s: %w", path, err)
	}
	prog := &program{file: os.NewFile(uintptr(high), path), argv: append([]string{path}, s.Args...)}
	if err := prog.inspect(s); err != nil {
		prog.close()
		return nil, err
	}
	return prog, nil
}

func (s *Spec) resolve() (string, error) {
	if s.Exec == "" {
		return os.Executable()
	}
	if strings.ContainsRune(s.Exec, '/') {
		return filepath.Abs(s.Exec)
	}
	if self, err := os.Executable(); err == nil {
		beside := filepath.Join(filepath.Dir(self), s.Exec)
		if info, err := os.Stat(beside); err == nil && info.Mode().IsRegular() {
			return beside, nil
		}
	}
	path, err := exec.LookPath(s.Exec)
	if err != nil { // which would only repeat the name
		return "", fmt.Errorf("%s is neither beside the engine nor in PATH; give its full path", s.subject(s.Exec))
	}
	return path, nil
}

func (p *program) inspect(s *Spec) error {
	info, err := p.file.Stat()
	if err != nil {
		return fmt.Errorf("program %s: %w", p.file.Name(), err)
	}
	if err := checkMode(s.subject(p.file.Name()), info.Mode()); err != nil {
		return err
	}
	head := make([]byte, 2)
	if _, err := p.file.ReadAt(head, 0); err == nil && bytes.Equal(head, []byte("#!")) {
		if s.Script != "" {
			return fmt.Errorf("%s is a script itself, as those of version managers are; name the program that it leads to", s.subject(p.file.Name()))
		}
		return fmt.Errorf("program %s is a script; name its interpreter in exec and the file in script", p.file.Name())
	}
	pinned := p.file
	if s.Script != "" {
		script, err := filepath.Abs(s.Script)
		if err != nil {
			return fmt.Errorf("script %s: %w", s.Script, err)
		}
		if pinned, err = regular.Open(script); err != nil {
			return openError("script "+script, err)
		}
		defer pinned.Close()
		p.argv, p.other = slices.Insert(p.argv, 1, script), true
	}
	if s.Wasm != "" {
		module, err := filepath.Abs(s.Wasm)
		if err != nil {
			return fmt.Errorf("module %s: %w", s.Wasm, err)
		}
		if pinned, err = regular.Open(module); err != nil {
			return openError("module "+module, err)
		}
		defer pinned.Close()
		p.argv, p.other = append(p.argv, s.hostGuest(module)...), true
	}
	if s.SHA256 == "" {
		return nil
	}
	if err := unix.Fstat(int(p.file.Fd()), &p.stat); err != nil {
		return fmt.Errorf("program %s: %w", p.file.Name(), err)
	}
	if p.sum, err = hashFile(pinned); err != nil {
		return fmt.Errorf("hash %s: %w", pinned.Name(), err)
	}
	if !strings.EqualFold(p.sum, s.SHA256) {
		return refusedf("%s has sha256 %s, the configuration pins %s; if the new file is meant, change the pin",
			pinned.Name(), p.sum, strings.ToLower(s.SHA256))
	}
	return nil
}

// hostGuest are the arguments by which an engine's binary becomes the host of a module.
func (s *Spec) hostGuest(module string) []string {
	args := []string{"plugin", "wasm"}
	if s.WasmCache != "" {
		args = append(args, "-cache", s.WasmCache)
	}
	if s.SHA256 != "" {
		args = append(args, "-sha256", strings.ToLower(s.SHA256))
	}
	return append(args, module)
}

// childFDs is more than the runtime needs above the highest descriptor that it hands to a child: the child
// shuffles them, and its end of a pipe, to numbers from there on, over whatever is open under those.
const childFDs = 16

// clear moves the descriptor out of the way of a child that is handed descriptors up to highest.
func (p *program) clear(highest int) error {
	if fd := int(p.file.Fd()); fd > highest+childFDs {
		return nil
	}
	fd, err := unix.FcntlInt(p.file.Fd(), unix.F_DUPFD_CLOEXEC, highest+childFDs+1)
	if err != nil {
		return fmt.Errorf("move the descriptor of program %s above %d: %w", p.file.Name(), highest, err)
	}
	file := os.NewFile(uintptr(fd), p.file.Name())
	p.file.Close()
	p.file = file
	return nil
}

// path is what the child executes: the descriptor itself, so that what was hashed is what runs.
func (p *program) path() string { return fmt.Sprintf("/proc/self/fd/%d", p.file.Fd()) }

// unchanged makes sure, once the program runs, that it is what was hashed: the descriptor protects from
// a file put in its place, but not from one overwritten in place. A file that was touched is hashed
// again; while it runs the kernel lets nobody write to it. (A write within the tick of the file
// system's clock that saw the one before goes unseen.)
func (p *program) unchanged() error {
	if p.sum == "" || p.other {
		return nil
	}
	var now unix.Stat_t
	if err := unix.Fstat(int(p.file.Fd()), &now); err != nil {
		return fmt.Errorf("program %s: %w", p.file.Name(), err)
	}
	if now.Ctim == p.stat.Ctim {
		return nil
	}
	sum, err := hashFile(io.NewSectionReader(p.file, 0, now.Size))
	if err != nil {
		return fmt.Errorf("hash %s: %w", p.file.Name(), err)
	}
	if sum != p.sum {
		return refusedf("%s was overwritten after it was checked against its pin; replace a program by renaming the new file over it",
			p.file.Name())
	}
	return nil
}

func hashFile(r io.Reader) (string, error) {
	hash := sha256.New()
	if _, err := io.Copy(hash, r); err != nil {
		return "", err
	}
	return hex.EncodeToString(hash.Sum(nil)), nil
}

func (p *program) close() { p.file.Close() }

// environment is what the plugin sees before go-plugin's own variables are added.
func (s *Spec) environment() []string {
	env := make([]string, 0, len(inheritedEnv)+len(s.Env))
	for _, kv := range os.Environ() {
		key, _, _ := strings.Cut(kv, "=")
		if slices.ContainsFunc(inheritedEnv, func(name string) bool {
			return key == name || strings.HasSuffix(name, "_") && strings.HasPrefix(key, name)
		}) {
			env = append(env, kv)
		}
	}
	keys := make([]string, 0, len(s.Env))
	for key := range s.Env {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	for _, key := range keys {
		env = append(env, key+"="+s.Env[key])
	}
	return env
}
