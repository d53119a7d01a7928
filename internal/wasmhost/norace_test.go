//go:build !race

package wasmhost

const raced = false
