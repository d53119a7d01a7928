package membership

import (
	"fmt"
	"net"
	"strconv"
)

// maxUnixPath is the longest path of a unix socket on Linux, without the final NUL.
const maxUnixPath = 107

func checkHostPort(address string) error {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return fmt.Errorf("address %q: want host:port or unix:/path: %w", address, err)
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 || host == "" {
		return fmt.Errorf("address %q: want host:port with a port from 1 to 65535", address)
	}
	return nil
}
