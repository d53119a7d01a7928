package core

import (
	"testing"

	"github.com/terminus-kv/terminus/core/layout"
)

func TestBitmapArmsAllOrNone(t *testing.T) {
	var b bitmap
	run := func(start, count, stride int32) []layout.Run {
		return []layout.Run{{Start: start, Count: count, Stride: stride}}
	}
	if p := b.arm(run(10, 5, 3), 0, 200); p != -1 { // 10 13 16 19 22
		t.Fatalf("page %d is armed in an empty bitmap", p)
	}
	if p := b.arm(run(17, 6, 1), 0, 200); p != 19 {
		t.Fatalf("page %d is reported, want 19", p)
	}
	if p := b.arm(run(17, 2, 1), 0, 200); p != -1 {
		t.Fatalf("a refused list left page %d armed", p)
	}
	if p := b.arm(run(100, 3, 1), 2, 200); p != -1 { // only 102: the prefix is read, not written
		t.Fatal(p)
	}
	if p := b.arm(run(100, 2, 1), 0, 200); p != -1 {
		t.Fatalf("the prefix page %d is armed", p)
	}
	if p := b.arm(run(102, 1, 1), 0, 200); p != 102 {
		t.Fatal(p)
	}
	b.disarm(run(10, 5, 3), 0, 5)
	if p := b.arm(run(10, 1, 1), 0, 200); p != -1 {
		t.Fatal(p)
	}
	if p := b.arm([]layout.Run{{Start: 50, Count: 1, Stride: 1}, {Start: 50, Count: 1, Stride: 1}}, 0, 200); p != 50 {
		t.Fatalf("a page named twice: %d", p)
	}
}
