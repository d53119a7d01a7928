package node_test

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"
)

// fleet starts engines, two by two as those of a prefill and of a decode group: p1, p2, d1, d2.
func fleet(t *testing.T, dir string, set ...string) (p, d [2]*engine) {
	t.Helper()
	for i := range 2 {
		p[i] = launch(t, dir, fmt.Sprint("p", i+1), set...)
		d[i] = launch(t, dir, fmt.Sprint("d", i+1), set...)
	}
	for i := range 2 {
		p[i].awaitReady(t)
		d[i].awaitReady(t)
	}
	return p, d
}

// overTCP is set for a fleet whose engines know each other by address and whose pages go by TCP.
func overTCP(t *testing.T, dir string) (p, d [2]*engine) {
	t.Helper()
	names := []string{"p1", "p2", "d1", "d2"}
	address := map[string]string{}
	for _, n := range names {
		address[n] = freePort(t)
	}
	engines := map[string]*engine{}
	for _, n := range names {
		var others []string
		for _, o := range names {
			if o != n {
				others = append(others, fmt.Sprintf("{node: %s, address: %q}", o, address[o]))
			}
		}
		engines[n] = launch(t, dir, n, "peers.driver=static", "peers.listen="+address[n], "peers.static=["+strings.Join(others, ", ")+"]",
			"plugins.tcp.options.shm=false", "runtime_dir="+filepath.Join(dir, n))
	}
	for _, e := range engines {
		e.awaitReady(t)
	}
	return [2]*engine{engines["p1"], engines["p2"]}, [2]*engine{engines["d1"], engines["d2"]}
}

// placed tells where the ranks of a group are: at[rank] is the engine's index.
func placed(e [2]*engine, at ...int) func(rank int) *engine {
	return func(rank int) *engine { return e[at[rank]] }
}

// TestSpanningGroups: groups whose ranks sit on several engines, every rank a process of its own. Whatever the
// numbers of ranks, and wherever rank 0 is, every byte of every rank is what it must be when a rank sees Success.
func TestSpanningGroups(t *testing.T) {
	same := func(ranks int) mappedSide { return mappedSide{ranks, 16, "nhd"} }
	for _, lane := range []string{"shm", "tcp"} {
		t.Run(lane, func(t *testing.T) {
			dir := tempDir(t)
			var p, d [2]*engine
			if lane == "shm" {
				p, d = fleet(t, dir)
			} else {
				p, d = overTCP(t, dir)
			}
			for i, c := range []struct {
				mappedPair
				src, dst []int
			}{
				{mappedPair{Name: "2-at-2-to-2-at-1", Kind: "mha", Heads: 2, Src: same(2), Dst: same(2)}, []int{0, 1}, []int{0, 0}},
				{mappedPair{Name: "2-at-1-to-2-at-2", Kind: "mha", Heads: 2, Src: same(2), Dst: same(2), LayerWise: true}, []int{0, 0}, []int{1, 0}},
				{mappedPair{Name: "4-at-2-to-4-at-2", Kind: "mha", Heads: 4, Src: same(4), Dst: same(4)}, []int{0, 0, 1, 1}, []int{0, 0, 1, 1}},
				{mappedPair{Name: "4-at-2-to-2-at-1", Kind: "mha", Heads: 8, Src: same(4), Dst: same(2), LayerWise: true}, []int{1, 0, 1, 0}, []int{0, 0}},
				{mappedPair{Name: "2-at-2-to-4-at-2", Kind: "mha", Heads: 4, Src: mappedSide{2, 8, "hnd"}, Dst: mappedSide{4, 32, "nhd"}}, []int{1, 0}, []int{0, 1, 1, 0}},
				{mappedPair{Name: "latent", Kind: "mla", Heads: 1, Src: mappedSide{2, 16, ""}, Dst: mappedSide{2, 16, ""}}, []int{0, 1}, []int{0, 1}},
				{mappedPair{Name: "latent-to-1", Kind: "mla", Heads: 1, Src: mappedSide{2, 16, ""}, Dst: mappedSide{1, 16, ""}}, []int{0, 1}, []int{0}},
				{mappedPair{Name: "state", Kind: "mha", Heads: 2, Src: same(2), Dst: mappedSide{2, 32, "nhd"}, State: true}, []int{0, 1}, []int{1, 0}},
			} {
				if testing.Short() && lane == "tcp" && i > 4 {
					break
				}
				t.Run(c.Name, func(t *testing.T) {
					pair := c.mappedPair
					pair.Tokens, pair.Room = []int{16, 100, 77}, int64(100*i)
					runPair(t, pair, placed(p, c.src...), placed(d, c.dst...))
				})
			}
			if t.Failed() {
				return
			}
			info, err := p[0].admin.Room(short(t), 0)
			must(t, err)
			if len(info) > 0 && info[0].Lane != lane {
				t.Errorf("lane %q, want %s", info[0].Lane, lane)
			}
		})
	}
}
