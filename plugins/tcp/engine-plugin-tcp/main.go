// Command engine-plugin-tcp is the tcp backend as a plugin process of its own. The engine binary
// contains the same backend; this one is for hosts that want to pin or replace it separately.
package main

import (
	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/tcp"
)

func main() { sdk.Main(tcp.New()) }
