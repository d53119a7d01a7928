// Command engine-plugin-nixl is the nixl backend as a plugin process. It is built without NIXL and finds the library
// when an engine starts it.
package main

import (
	"github.com/terminus-kv/terminus/plugins/nixl"
	"github.com/terminus-kv/terminus/plugins/sdk"
)

func main() { sdk.Main(nixl.New()) }
