package pluginhost

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/terminus-kv/terminus/internal/regular"
)

// RefUsage is how a plugin is named on a command line, for help texts and errors.
const RefUsage = "exec:PATH [-- ARGS...], wasm:FILE, or a name (tcp is built in; engine-plugin-NAME otherwise)"

// BuiltIn is the backend that is the engine's own binary, re-executed.
const BuiltIn = "tcp"

// ParseRef makes a spec of the PLUGIN argument of a command: `exec:PATH` with the program's arguments,
// `wasm:FILE`, or a name that needs no configuration. PATH is a path, or a name that is looked up beside
// the engine and in PATH; a #! script is run by the interpreter of its first line, and a file that follows a
// known interpreter is its script. It touches nothing but that: whether the program is any good is for Host.Start to say. The error is one of usage.
func ParseRef(ref string, args []string) (Spec, error) {
	scheme, rest, ok := strings.Cut(ref, ":")
	switch {
	case ok && rest == "":
		return Spec{}, fmt.Errorf("plugin %q names nothing; want %s", ref, RefUsage)
	case ok && scheme == "exec":
		s := Spec{Name: refName(rest), Exec: rest, Args: args}
		if err := s.interpret(); err != nil {
			return Spec{}, err
		}
		if s.Script == "" && interpreterRE.MatchString(filepath.Base(rest)) && len(args) > 0 && isFile(args[0]) {
			s.Name, s.Script, s.Args = refName(args[0]), args[0], args[1:]
		}
		return s, nil
	case ok && scheme == "wasm":
		if len(args) > 0 {
			return Spec{}, fmt.Errorf("plugin %q takes no arguments: a module has none; give it options in a configuration", ref)
		}
		return Spec{Name: refName(rest), Wasm: rest}, nil
	case ok:
		return Spec{}, fmt.Errorf("plugin %q starts with neither exec: nor wasm:; want %s", ref, RefUsage)
	case strings.ContainsRune(ref, '/'):
		kind := "exec:"
		if filepath.Ext(ref) == ".wasm" {
			kind = "wasm:"
		}
		return Spec{}, fmt.Errorf("plugin %q looks like a file; write %s%s", ref, kind, ref)
	case !nameRE.MatchString(ref):
		return Spec{}, fmt.Errorf("plugin %q is no plugin name ([a-z][a-z0-9-]*, at most 32 bytes); want %s", ref, RefUsage)
	case len(args) > 0:
		return Spec{}, fmt.Errorf("plugin %q takes no arguments; write exec:engine-plugin-%s -- %s", ref, ref, strings.Join(args, " "))
	case ref == BuiltIn:
		return Spec{Name: ref, Args: []string{"plugin", ref}}, nil
	}
	return Spec{Name: ref, Exec: "engine-plugin-" + ref}, nil
}

// interpreterRE are the programs whose first argument, if it is a file, is what really runs.
var interpreterRE = regexp.MustCompile(`^(python|pypy|node|ruby|perl|bash|sh)[0-9.]*$`)

func isFile(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular()
}

var notInName = regexp.MustCompile(`[^a-z0-9]+`)

// refName makes a plugin name of a file's: what a message calls it.
func refName(path string) string {
	name := strings.ToLower(filepath.Base(path))
	name = strings.TrimSuffix(strings.TrimPrefix(name, "engine-plugin-"), filepath.Ext(name))
	name = strings.Trim(notInName.ReplaceAllString(name, "-"), "-")
	if len(name) > 32 {
		name = strings.Trim(name[:32], "-")
	}
	if !nameRE.MatchString(name) {
		return "plugin"
	}
	return name
}

// interpret turns a script into its interpreter and the file, as the kernel would.
func (s *Spec) interpret() error {
	path, err := s.resolve()
	if err != nil {
		return nil // Start says so
	}
	f, err := regular.Open(path)
	if err != nil {
		return nil
	}
	defer f.Close()
	line := make([]byte, 256)
	n, _ := f.Read(line)
	line, ok := bytes.CutPrefix(line[:n], []byte("#!"))
	if !ok {
		return nil
	}
	line, _, whole := bytes.Cut(line, []byte("\n"))
	words := strings.Fields(string(line))
	if !whole || len(words) == 0 {
		return fmt.Errorf("script %s: its first line names no interpreter", path)
	}
	if info, err := f.Stat(); err == nil && info.Mode().Perm()&0o111 == 0 {
		return fmt.Errorf("script %s is not executable; chmod +x it", path)
	}
	if filepath.Base(words[0]) == "env" {
		words = words[1:]
	}
	if len(words) != 1 || strings.HasPrefix(words[0], "-") || strings.ContainsRune(words[0], '=') {
		return fmt.Errorf("script %[1]s: its first line has options; name the interpreter yourself: exec:INTERPRETER -- %[1]s", path)
	}
	s.Exec, s.Script = words[0], path
	return nil
}
