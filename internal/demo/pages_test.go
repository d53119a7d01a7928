package demo

import (
	"os/exec"
	"strings"
	"testing"
)

func testMemory() (memory, PlanHeader) {
	h := PlanHeader{PageBytes: 512, PageTokens: 64, Heads: 1, Tensors: 4, PoolPages: 64, BlockPages: 8, Seed: 5}
	return newMemory(make([]byte, h.poolBytes()), h), h
}

func TestAllocatorCountsLeaksAndLateWrites(t *testing.T) {
	mem, h := testMemory()
	a := newAllocator(mem, h.BlockPages, h.Seed)
	if n := countRuns(a.take(64)); n < 4 {
		t.Errorf("all pages are %d runs: not fragmented", n)
	}
	a = newAllocator(mem, h.BlockPages, h.Seed)
	first, second := a.take(10), a.take(10)
	if a.take(45) != nil || a.available() != 44 {
		t.Fatal("handed out more than there is")
	}
	if err := a.give(first); err != nil {
		t.Fatal(err)
	}
	if err := a.give(first[:1]); err == nil {
		t.Error("a page was taken back twice")
	}
	mem.page(3, first[2])[511] = 1 // late: found when the page is handed out again
	a.take(54)
	if a.written != 1 {
		t.Errorf("%d pages written, want 1", a.written)
	}
	if err := a.give(second); err != nil {
		t.Fatal(err)
	}
	mem.page(0, second[0])[0] = 1 // late: found at the end
	if written, leaked := a.finish(); written != 2 || leaked != 54 {
		t.Errorf("written %d, leaked %d, want 2 and 54", written, leaked)
	}
}

func TestPrefixCacheEvictsOldestIdleBlock(t *testing.T) {
	mem, h := testMemory()
	a := newAllocator(mem, h.BlockPages, h.Seed)
	c := newPrefixCache(a)
	for b := range 4 {
		if !c.put(blockKey{1, b}, a.take(8)) {
			t.Fatal("put")
		}
	}
	if c.put(blockKey{1, 0}, nil) {
		t.Fatal("a block was cached twice")
	}
	for b := range 3 { // block 3 stays in use
		c.drop(blockKey{1, b})
	}
	c.use(blockKey{1, 0})
	c.drop(blockKey{1, 0})
	if err := c.shrink(40); err != nil {
		t.Fatal(err)
	}
	if c.use(blockKey{1, 1}) != nil || c.blocks[blockKey{1, 2}] == nil || c.blocks[blockKey{1, 0}] == nil {
		t.Fatal("the oldest was not the one to go")
	}
	if err := c.flush(); err != nil {
		t.Fatal(err)
	}
	if len(c.blocks) != 1 || a.available() != 56 {
		t.Fatalf("%d blocks, %d pages", len(c.blocks), a.available())
	}
}

func TestContentTellsPagesApart(t *testing.T) {
	mem, h := testMemory()
	c := newContent(h, 0, 1)
	b := mem.page(0, 0)
	c.fill(b, 7, 3, 1)
	if !c.holds(b, 7, 3, 1) {
		t.Fatal("what was filled is not held")
	}
	for _, o := range []struct {
		room         int64
		page, tensor int
	}{{8, 3, 1}, {7, 4, 1}, {7, 3, 2}} {
		if c.holds(b, o.room, o.page, o.tensor) {
			t.Errorf("taken for %+v", o)
		}
	}
	b[len(b)-1]++
	if c.holds(b, 7, 3, 1) {
		t.Error("a changed byte was not seen")
	}
}

// Both workers must make the same bytes: one writes them, the other checks.
func TestPythonMakesTheSameContent(t *testing.T) {
	python, err := findPython(t.Context())
	if err != nil {
		t.Skip(err)
	}
	dir := t.TempDir()
	if _, err := unpackPython(dir); err != nil {
		t.Fatal(err)
	}
	const script = `
import hashlib, worker
c = worker.Content(5, 512)
h = hashlib.sha256()
for room in (0, 7, 2**62 - 1):
    for page in (0, 3, 70000):
        for tensor in range(4):
            h.update(c.expected(c.room(room), room, page, tensor))
    h.update(c.aux(room))
print(h.hexdigest())
`
	cmd := exec.CommandContext(t.Context(), python, "-B", "-c", script)
	cmd.Dir = dir + "/python"
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if got, want := strings.TrimSpace(string(out)), contentSum(); got != want {
		t.Fatalf("Python %s, Go %s", got, want)
	}
}
