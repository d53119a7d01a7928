package pluginhost

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// machines are the ELF machines of the architectures that an engine is built for.
var machines = map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}

// refused is an error that is ErrRefused, without its words.
type refused struct{ error }

func refusedf(format string, args ...any) error { return refused{fmt.Errorf(format, args...)} }

func (r refused) Unwrap() error        { return r.error }
func (r refused) Is(target error) bool { return target == ErrRefused }

// cause is an error without the call and the path that the package os puts before it: the caller has said
// which file it is about.
func cause(err error) error {
	var pe *fs.PathError
	if errors.As(err, &pe) {
		return pe.Err
	}
	return err
}

// openError says why a file cannot be opened, and what to do. what names the file.
func openError(what string, err error) error {
	switch err = cause(err); {
	case errors.Is(err, fs.ErrNotExist) && strings.HasPrefix(what, interpreter):
		return fmt.Errorf("%s: %w; install it, or name another one", what, err)
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%s: %w; build it, or name the file that it is", what, err)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%s: %w; the engine runs as user %d, which has to be able to read it", what, err, os.Geteuid())
	}
	return fmt.Errorf("%s: %w", what, err)
}

const interpreter = "interpreter "

// subject names the program at path, for errors.
func (s *Spec) subject(path string) string {
	if s.Script != "" {
		return interpreter + path + " of script " + s.Script
	}
	return "program " + path
}

// checkMode says what keeps a file from being executed.
func checkMode(what string, mode fs.FileMode) error {
	switch {
	case mode.IsDir():
		return fmt.Errorf("%s is a directory, not an executable file; name the file in it", what)
	case !mode.IsRegular():
		return fmt.Errorf("%s is not an executable file (mode %s); name the program itself", what, mode)
	case mode.Perm()&0o111 == 0:
		return fmt.Errorf("%s is not an executable file (mode %s); chmod +x it", what, mode)
	}
	return nil
}

// execError explains why the kernel does not execute a program that can be opened. It is asked after the
// failure, not before: some machines run programs of others. The next try would fail the same way.
func (p *program) execError(err error) error {
	path := p.file.Name()
	switch err = cause(err); {
	case errors.Is(err, unix.ENOEXEC):
		return refusedf("exec %s: %w; it is %s", path, err, p.describe())
	case errors.Is(err, unix.ENOENT): // the file is open: it is the loader that is missing
		return refusedf("exec %s: its dynamic loader %s does not exist on this machine; link it statically (CGO_ENABLED=0), or build it here", path, p.loader())
	case errors.Is(err, fs.ErrPermission):
		return refusedf("exec %s: %w; the user %d may not execute it, or its file system is mounted noexec", path, err, os.Geteuid())
	}
	return fmt.Errorf("exec %s: %w", path, err)
}

// describe says what a file is that cannot be executed.
func (p *program) describe() string {
	f, err := elf.NewFile(p.file)
	if err != nil {
		head := make([]byte, 4)
		if n, _ := p.file.ReadAt(head, 0); n == 0 {
			return "empty; build it anew"
		}
		if bytes.Equal(head, []byte("\x00asm")) {
			return "a WASM module; name it as wasm:FILE, or as wasm: in the configuration"
		}
		return "no program (neither ELF nor a script); name the program itself, or build it for linux"
	}
	if want, ok := machines[runtime.GOARCH]; ok && f.Machine != want {
		return fmt.Sprintf("built for %s, this machine is %s; build it with GOARCH=%s", f.Machine, want, runtime.GOARCH)
	}
	if f.Type != elf.ET_EXEC && f.Type != elf.ET_DYN {
		return fmt.Sprintf("an ELF file of type %s, not a program; link it", f.Type)
	}
	return "an ELF program that this kernel does not run"
}

func (p *program) loader() string {
	f, err := elf.NewFile(p.file)
	if err != nil {
		return "(unknown)"
	}
	for _, s := range f.Progs {
		if s.Type == elf.PT_INTERP && s.Filesz < 4096 {
			name := make([]byte, s.Filesz)
			if _, err := s.ReadAt(name, 0); err == nil {
				return string(bytes.TrimRight(name, "\x00"))
			}
		}
	}
	return "(unknown)"
}

// firstLine is an error of go-plugin without the advice of several lines that follows.
type firstLine struct{ error }

func (e firstLine) Error() string {
	text, _, _ := strings.Cut(e.error.Error(), "\n")
	return text
}

func (e firstLine) Unwrap() error { return e.error }
