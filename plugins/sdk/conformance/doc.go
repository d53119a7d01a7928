// Package conformance decides whether a transfer plugin keeps the contract (docs/contract.md).
//
// One registry of cases has two front ends: Test, in an author's own `go test`, and the command
// `engine conformance run`. A case is the host's half of a conversation: it drives the frames of the
// contract from both ends of a transfer, against a pair of plugins with real memory, and so holds for
// every backend that moves bytes between host memory on one machine.
//
// A case says what it sends and what must come back. What must hold after any conversation is checked
// after every case without being asked for: each op ended once and is quiet, nothing came after an end,
// nobody wrote where or when it must not, nothing is left behind. See (*T).finish.
//
//	func TestConformance(t *testing.T) {
//		conformance.Test(t, conformance.Config{Carrier: conformance.Exec("bin/engine-plugin-mine")})
//	}
package conformance
