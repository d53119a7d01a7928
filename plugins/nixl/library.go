package nixl

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"unsafe"

	"github.com/ebitengine/purego"
)

// library is an open libnixl_capi.so. A process opens it once and never closes it: it and its plugins keep
// threads.
type library struct {
	path       string
	generation string // of its C ABI
	calls      [symbols]uintptr
	free       uintptr // of the C library, for what this one allocates
}

// status is what most functions of the C ABI return.
type status int32

const (
	statusDone       status = 0
	statusInProgress status = 1
)

func (s status) Error() string {
	switch s {
	case -1:
		return "invalid parameter (-1)"
	case -2:
		return "backend error (-2)"
	case -3:
		return "invalid state (-3)"
	case -4:
		return "exception (-4)"
	case -6:
		return "not found (-6)"
	}
	return fmt.Sprintf("status %d", int32(s))
}

// err is nil for success.
func (s status) err(call string) error {
	if s < 0 {
		return fmt.Errorf("nixl %s: %w", call, s)
	}
	return nil
}

// open loads the library and checks everything that can be checked before an agent is made. The environment of the
// process must be as setEnvironment leaves it: constructors read it.
func open(path string) (*library, error) {
	// dlopen leaves its reason with the thread, and a goroutine that moved to another one finds none.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	handle, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w%s", path, err, missingHint(err))
	}
	l := &library{path: path}
	if _, err := purego.Dlsym(handle, versionSymbol); err == nil {
		return nil, fmt.Errorf("%s speaks a newer C interface (it exports %s); this plugin serves NIXL 1.0 to 1.5", path, versionSymbol)
	}
	var missing []string
	for i, name := range symbolNames {
		if l.calls[i], err = purego.Dlsym(handle, symbolPrefix+name); err != nil {
			missing = append(missing, symbolPrefix+name)
		}
	}
	if len(missing) > 0 {
		return nil, fmt.Errorf("%s lacks %s; this plugin serves NIXL 1.0 to 1.5", path, strings.Join(missing, ", "))
	}
	for _, g := range generations {
		if _, err := purego.Dlsym(handle, symbolPrefix+g.mark); err == nil {
			l.generation = g.name
			break
		}
	}
	if stub := l.call(symIsStub); stub&0xff != 0 { // a C bool
		return nil, fmt.Errorf("%s is a stub that does nothing: install the library itself (%s)", path, installHint)
	}
	if l.free, err = purego.Dlsym(handle, "free"); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return l, nil
}

// missingHint says what to install when the dynamic loader names a library of the system.
func missingHint(err error) string {
	for _, m := range []struct{ file, say string }{
		{"libssl.so.3", "; NIXL needs OpenSSL 3 of the system: on Debian install it with: apt-get install libssl3"},
		{"libcrypto.so.3", "; NIXL needs OpenSSL 3 of the system: on Debian install it with: apt-get install libssl3"},
		{"libstdc++.so.6", "; on Debian install it with: apt-get install libstdc++6"},
		{"libz.so.1", "; on Debian install it with: apt-get install zlib1g"},
	} {
		if strings.Contains(err.Error(), m.file) {
			return m.say
		}
	}
	return ""
}

func (l *library) call(s symbol, args ...uintptr) status {
	r, _, _ := purego.SyscallN(l.calls[s], args...)
	return status(int32(uint32(r)))
}

// take copies n bytes that the library allocated and gives them back.
func (l *library) take(p uintptr, n int) []byte {
	if p == 0 {
		return nil
	}
	b := append([]byte(nil), unsafe.Slice((*byte)(pointer(p)), n)...)
	purego.SyscallN(l.free, p)
	return b
}

// takeString is take for a string that ends with a zero.
func (l *library) takeString(p uintptr) string {
	if p == 0 {
		return ""
	}
	n := 0
	for *(*byte)(pointer(p + uintptr(n))) != 0 {
		n++
	}
	return string(l.take(p, n))
}

// pointer makes a pointer of an address outside of the Go heap.
func pointer(p uintptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&p)) }

func address(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

// setEnvironment gives the library an environment of its own: what the user has set for other programs would
// start threads (an etcd client, exporters), print on standard output, which belongs to the handshake, or take
// SIGSEGV away from the Go runtime.
func setEnvironment(c *Config, home string) error {
	for _, entry := range os.Environ() {
		name, _, _ := strings.Cut(entry, "=")
		if strings.HasPrefix(name, "NIXL_") || strings.HasPrefix(name, "UCX_") {
			if err := os.Unsetenv(name); err != nil {
				return err
			}
		}
	}
	set := [][2]string{
		{"HOME", home}, // the agent looks for a file there, and fails without a word where it may not look
		{"NIXL_LOG_LEVEL", "FATAL"},
		{"UCX_HANDLE_ERRORS", "none"},
		{"UCX_LOG_FILE", "stderr"}, // not /dev/stderr: where that cannot be opened, UCX aborts the process
		{"UCX_LOG_LEVEL", "fatal"},
		{"UCX_TLS", c.Transports},
	}
	if c.Log != "" {
		set = append(set, [2]string{"NIXL_LOG_LEVEL", strings.ToUpper(c.Log)}, [2]string{"UCX_LOG_LEVEL", strings.ToLower(c.Log)})
	}
	if c.Devices != "" {
		set = append(set, [2]string{"UCX_NET_DEVICES", c.Devices})
	}
	var errs []error
	for _, kv := range set {
		errs = append(errs, os.Setenv(kv[0], kv[1]))
	}
	return errors.Join(errs...)
}

// wheelVersion reads the version of a wheel from the directory beside the library, "" when there is none.
func wheelVersion(path string) string {
	libs := filepath.Base(filepath.Dir(path)) // .nixl_cu12.mesonpy.libs
	name, _, _ := strings.Cut(strings.TrimPrefix(libs, "."), ".")
	found, _ := filepath.Glob(filepath.Join(filepath.Dir(filepath.Dir(path)), name+"-*.dist-info"))
	if len(found) != 1 {
		return ""
	}
	return strings.TrimSuffix(strings.TrimPrefix(filepath.Base(found[0]), name+"-"), ".dist-info")
}
