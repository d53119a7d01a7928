package wasmhost

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
	"github.com/tetratelabs/wazero/imports/wasi_snapshot_preview1"
)

// maxModule is the largest module file.
const maxModule = 64 << 20

// Exports of a guest.
const (
	exportAlloc = "engine_v1_alloc"
	exportFree  = "engine_v1_free"
	exportCall  = "engine_v1_call"
	exportPump  = "engine_v1_pump"
	exportInit  = "_initialize"
)

var exports = []struct {
	name            string
	params, results []api.ValueType
	optional        bool
}{
	{exportAlloc, []api.ValueType{i32}, []api.ValueType{i32}, false},
	{exportFree, []api.ValueType{i32, i32}, nil, false},
	{exportCall, []api.ValueType{i32, i32, i32}, []api.ValueType{i64}, false},
	{exportPump, []api.ValueType{i32}, []api.ValueType{i32}, false},
	{exportInit, nil, nil, true},
}

const (
	i32 = api.ValueTypeI32
	i64 = api.ValueTypeI64
)

// readModule reads the file and compares the pin. What it returns is what gets compiled.
func readModule(path, pin string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a pipe is not waited for
	if err != nil {
		return nil, fmt.Errorf("module: %w", err)
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() { // a directory, a pipe, a device
		return nil, fmt.Errorf("module %s is no regular file; name the file itself", path)
	}
	code, err := io.ReadAll(io.LimitReader(f, maxModule+1))
	if err != nil {
		return nil, fmt.Errorf("module %s: %w", path, err)
	}
	if len(code) > maxModule {
		return nil, fmt.Errorf("module %s has more than %d MiB, which is the limit", path, maxModule>>20)
	}
	if pin == "" {
		return code, nil
	}
	sum := sha256.Sum256(code)
	if got := hex.EncodeToString(sum[:]); !strings.EqualFold(got, pin) {
		return nil, fmt.Errorf("module %s has sha256 %s, the configuration pins %s; if the new file is meant, change the pin", path, got, strings.ToLower(pin))
	}
	return code, nil
}

// load compiles and instantiates the module. g gets its runtime and exports; on error nothing is left.
func (g *guest) load(ctx context.Context, code []byte, cache wazero.CompilationCache) (err error) {
	if !bytes.HasPrefix(code, []byte("\x00asm")) {
		return errors.New("this is not a WebAssembly module")
	}
	config := wazero.NewRuntimeConfig().WithCloseOnContextDone(true).WithMemoryLimitPages(g.limits.Pages)
	if cache != nil {
		config = config.WithCompilationCache(cache)
	}
	g.runtime = wazero.NewRuntimeWithConfig(ctx, config)
	defer func() {
		if err != nil {
			_ = g.close()
		}
	}()
	if code, err = boundTables(code); err != nil {
		return err
	}
	compiled, err := g.runtime.CompileModule(ctx, code)
	if err != nil {
		return fmt.Errorf("compile: %s", firstLine(err))
	}
	wasi, err := checkImports(compiled)
	if err != nil {
		return err
	}
	if err := checkExports(compiled); err != nil {
		return err
	}
	if wasi {
		if _, err := wasi_snapshot_preview1.Instantiate(ctx, g.runtime); err != nil {
			return fmt.Errorf("wasi: %w", err)
		}
	}
	if err := g.provide(ctx); err != nil {
		return err
	}
	instance := wazero.NewModuleConfig().WithName("").WithStartFunctions().
		WithStdout(&g.output).WithStderr(&g.output).WithRandSource(rand.Reader).
		WithSysWalltime().WithSysNanotime()
	start, cancel := context.WithTimeout(ctx, g.limits.Call)
	defer cancel()
	if g.module, err = g.runtime.InstantiateModule(start, compiled, instance); err != nil {
		return fmt.Errorf("instantiate: %s", g.why(err))
	}
	g.alloc, g.free = g.module.ExportedFunction(exportAlloc), g.module.ExportedFunction(exportFree)
	g.call, g.pump = g.module.ExportedFunction(exportCall), g.module.ExportedFunction(exportPump)
	if init := g.module.ExportedFunction(exportInit); init != nil {
		if err := g.invoke(ctx, init, exportInit, nil); err != nil {
			return err
		}
	}
	return nil
}

// checkImports refuses what no host of this version provides, by name, and tells whether WASI is needed.
func checkImports(m wazero.CompiledModule) (wasi bool, err error) {
	if len(m.ImportedMemories()) > 0 {
		return false, errors.New("the module imports a memory; it has to export its own")
	}
	for _, f := range m.ImportedFunctions() {
		module, name, _ := f.Import()
		switch module {
		case wasi_snapshot_preview1.ModuleName:
			wasi = true
		case importModule:
			known := false
			for i := range imports {
				if imports[i].name != name {
					continue
				}
				known = true
				if !bytes.Equal(imports[i].params, f.ParamTypes()) || !bytes.Equal(imports[i].results, f.ResultTypes()) {
					return false, fmt.Errorf("the module imports %s.%s as %s, it is %s", module, name, signature(f.ParamTypes(), f.ResultTypes()), signature(imports[i].params, imports[i].results))
				}
			}
			if !known {
				return false, fmt.Errorf("the module imports %s.%s, which this version of the ABI does not have", module, name)
			}
		default:
			return false, fmt.Errorf("the module imports %s.%s; a guest can import only %s and %s", module, name, importModule, wasi_snapshot_preview1.ModuleName)
		}
	}
	return wasi, nil
}

func checkExports(m wazero.CompiledModule) error {
	if m.ExportedMemories()["memory"] == nil {
		return errors.New(`the module does not export its memory as "memory"`)
	}
	have := m.ExportedFunctions()
	for _, e := range exports {
		f := have[e.name]
		if f == nil && e.optional {
			continue
		}
		if f == nil {
			return fmt.Errorf("the module does not export %s %s", e.name, signature(e.params, e.results))
		}
		if !bytes.Equal(f.ParamTypes(), e.params) || !bytes.Equal(f.ResultTypes(), e.results) {
			return fmt.Errorf("the module exports %s as %s, it must be %s", e.name, signature(f.ParamTypes(), f.ResultTypes()), signature(e.params, e.results))
		}
	}
	return nil
}

func signature(params, results []api.ValueType) string {
	list := func(types []api.ValueType) string {
		names := make([]string, len(types))
		for i, t := range types {
			names[i] = api.ValueTypeName(t)
		}
		return "(" + strings.Join(names, ", ") + ")"
	}
	return list(params) + " → " + list(results)
}

// openCache opens a directory of compiled modules. It holds machine code that will be executed: what is not
// a directory of ours alone is refused.
func openCache(dir string) (wazero.CompilationCache, error) {
	if dir == "" {
		base, err := os.UserCacheDir()
		if err != nil {
			base = filepath.Join(os.TempDir(), fmt.Sprintf("terminus-%d", os.Getuid()))
			if err := private(base); err != nil {
				return nil, err
			}
		}
		dir = filepath.Join(base, "terminus-wasm")
	}
	if err := private(dir); err != nil {
		return nil, err
	}
	cache, err := wazero.NewCompilationCacheWithDir(dir)
	if err != nil {
		return nil, fmt.Errorf("cache of compiled modules: %w", err)
	}
	return cache, nil
}
