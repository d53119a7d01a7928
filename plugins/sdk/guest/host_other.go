//go:build !wasm

package guest

import (
	"fmt"
	"os"
)

// Serve makes b the backend of this module. Call it from an init function. Outside of WebAssembly there is no
// host: it says so and exits.
func Serve(b Backend) {
	fmt.Fprintf(os.Stderr, "%s is a WASM guest: build it with GOOS=wasip1 GOARCH=wasm go build -buildmode=c-shared, and name the file in plugins.%s.wasm\n",
		b.Info().Name, b.Info().Name)
	os.Exit(2)
}

// Log writes a line to the engine's log.
func Log(level Level, text string) { fmt.Fprintln(os.Stderr, level, text) }

// Read copies bytes of a region of this engine's workers, at most 64 KiB.
func Read(_, _ uint64, _ []byte) error { return ErrHandle }

// Write copies bytes to a region of a peer's, at most 64 KiB, while an op is open that leads there.
func Write(_ uint32, _, _ uint64, _ []byte) error { return ErrHandle }
