//go:build race

package wasmhost

// raced says that this binary runs under the race detector, where the compiler of modules is twenty times as slow.
const raced = true
