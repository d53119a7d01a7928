// Package python holds the files of the Python worker client, so that programs which start a Python
// worker can bring it along.
package python

import "embed"

// Files is the package terminus_client.
//
//go:embed terminus_client/*.py
var Files embed.FS
