package node_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	client "github.com/terminus-kv/terminus/clients/go"
)

// mappedSide is one group of a pair whose ranks or page sizes differ.
type mappedSide struct {
	Ranks, PageTokens int
	Order             string
}

// mappedPair is two groups and the rooms that they hand over.
type mappedPair struct {
	Name      string
	Kind      string
	Heads     int
	Src, Dst  mappedSide
	State     bool  // beside the pages of tokens
	Room      int64 // the first
	Tokens    []int // of each room
	LayerWise bool
}

// rankSpec is what the process of one rank must know.
type rankSpec struct {
	Pair   mappedPair
	Socket string
	Role   client.Role
	Rank   int
}

const (
	mappedLayers  = 2
	mappedHeadDim = 8
	mappedPages   = 31 // of each pool; a prime, see pageIDs
	rowBytes      = 2 * mappedHeadDim
	stateBytes    = 96
	untouched     = 0xee
)

func (s *rankSpec) side() mappedSide {
	if s.Role == client.Source {
		return s.Pair.Src
	}
	return s.Pair.Dst
}

// heads are the KV heads that the rank has, by the definition of tensor parallelism: head h of H is on rank
// h*n/H of n; with more ranks than heads rank r has head r*H/n; a latent is everywhere.
func (s *rankSpec) heads() (list []int) {
	n := s.side().Ranks
	for h := range s.Pair.Heads {
		if s.Pair.Kind == "mla" || n <= s.Pair.Heads && h*n/s.Pair.Heads == s.Rank || n > s.Pair.Heads && s.Rank*s.Pair.Heads/n == h {
			list = append(list, h)
		}
	}
	return list
}

// pageIDs are the pages of a room, in no order that the other side has.
func (s *rankSpec) pageIDs(room, n int) (ids []int32) {
	for i := range n {
		ids = append(ids, int32((i*7+room*11+s.Rank*3+len(s.Role))%mappedPages))
	}
	return ids
}

// content is the byte that stands for (tensor, head, token, byte of the row) of a room; it is never untouched.
func content(room, tensor, head, token, b int) byte {
	x := uint32(room)
	for _, v := range []int{tensor, head, token, b} {
		x = (x ^ uint32(v)) * 0x9e3779b1
		x ^= x >> 15
	}
	return byte(x % untouched)
}

func up(a, b int) int { return (a + b - 1) / b }

// rankMain is the process of one rank: it says ready, waits for a line, hands over every room and compares every
// byte of its pools with what must be there.
func rankMain(arg string) {
	var s rankSpec
	err := json.Unmarshal([]byte(arg), &s)
	if err == nil {
		err = s.run()
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("ok")
	os.Exit(0)
}

func (s *rankSpec) run() error {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	side := s.side()
	group, peer := s.Pair.Name+"-decode", s.Pair.Name+"-prefill"
	if s.Role == client.Source {
		group, peer = peer, ""
	}
	c, err := client.Dial(ctx, client.Options{
		Socket: s.Socket, Group: group, Role: s.Role, Rank: s.Rank, Size: side.Ranks, Notify: true,
		Layout: client.Layout{DType: "bf16", Layers: mappedLayers, KVHeads: s.Pair.Heads, HeadDim: mappedHeadDim, PageTokens: side.PageTokens, Kind: s.Pair.Kind, Order: side.Order},
	})
	if err != nil {
		return err
	}
	defer c.Close()
	heads := s.heads()
	pageBytes := len(heads) * side.PageTokens * rowBytes
	region, err := c.CreateRegion(ctx, int64(mappedPages*(2*mappedLayers*pageBytes+stateBytes)))
	if err != nil {
		return err
	}
	defer region.Close()
	memory := region.Bytes()[:mappedPages*(2*mappedLayers*pageBytes+stateBytes)]
	for i := range memory {
		memory[i] = untouched
	}
	var kv []client.Tensor
	for i := range 2 * mappedLayers { // K and V of each layer
		kv = append(kv, client.Tensor{Region: region, Offset: int64(i * mappedPages * pageBytes), PageBytes: int64(pageBytes), Layer: i / 2})
	}
	if _, err := c.AddPool(ctx, client.Pool{Pages: mappedPages, Tensors: kv}); err != nil {
		return err
	}
	stateAt := 2 * mappedLayers * mappedPages * pageBytes
	if s.Pair.State {
		state := client.Pool{Pages: mappedPages, State: true, Tensors: []client.Tensor{{Region: region, Offset: int64(stateAt), PageBytes: stateBytes, Layer: 1}}}
		if _, err := c.AddPool(ctx, state); err != nil {
			return err
		}
	}
	fmt.Println("ready")
	bufio.NewReader(os.Stdin).ReadString('\n')

	for i, tokens := range s.Pair.Tokens {
		want := bytes.Clone(memory)
		// A source has something in every token of its pages, also after the last of the room.
		there := up(tokens, s.Pair.Src.PageTokens) * s.Pair.Src.PageTokens
		ids := s.pageIDs(i, up(tokens, side.PageTokens))
		for p, id := range ids {
			for tensor := range 2 * mappedLayers {
				for t := range side.PageTokens {
					for hi, h := range heads {
						slot := t*len(heads) + hi
						if side.Order == "hnd" {
							slot = hi*side.PageTokens + t
						}
						if token := p*side.PageTokens + t; token < there {
							at := (tensor*mappedPages+int(id))*pageBytes + slot*rowBytes
							for b := range rowBytes {
								want[at+b] = content(i, tensor, h, token, b)
							}
						}
					}
				}
			}
		}
		if id := int(ids[0]); s.Pair.State {
			for b := range stateBytes {
				want[stateAt+id*stateBytes+b] = content(i, 99, s.Rank, 0, b)
			}
		}
		if s.Role == client.Source {
			copy(memory, want)
		}
		room, err := s.open(ctx, c, client.OpenOptions{Room: s.Pair.Room + int64(i), PeerGroup: peer})
		if err != nil {
			return err
		}
		if s.Role == client.Source {
			err = s.send(ctx, room, i, ids)
		} else {
			parts := []client.RegisterPart{{Pages: ids}}
			if s.Pair.State {
				parts = append(parts, client.RegisterPart{Pool: 1, Pages: ids[:1]})
			}
			err = room.Register(ctx, parts...)
		}
		if err != nil {
			return fmt.Errorf("room %d: %w", i, err)
		}
		if st, err := room.WaitTerminal(ctx); err != nil || st != client.Success {
			f, _ := room.Failure(ctx)
			return fmt.Errorf("room %d is %v, %v: %+v", i, st, err, f)
		}
		for at := range memory {
			if memory[at] != want[at] {
				return fmt.Errorf("room %d: byte %d has %#x, want %#x", i, at, memory[at], want[at])
			}
		}
		if err := errors.Join(room.WaitReusable(ctx), room.Release(ctx)); err != nil {
			return err
		}
	}
	return nil
}

// open opens a room. A machine that is too busy for beats makes peers suspect for a moment.
func (s *rankSpec) open(ctx context.Context, c *client.Client, o client.OpenOptions) (*client.Room, error) {
	for {
		room, err := c.Open(ctx, o)
		if err == nil || !strings.Contains(err.Error(), "clocks.peer_suspect") {
			return room, err
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// send hands the pages over in chunks of 1, 2, 3, … pages.
func (s *rankSpec) send(ctx context.Context, room *client.Room, number int, ids []int32) error {
	if s.Pair.Kind == "mla" && s.Rank > 0 && number%2 == 1 && s.Pair.Dst.Ranks == 1 { // rank 0 suffices
		return room.Send(ctx, client.Chunk{Last: true})
	}
	for at, n := 0, 1; at < len(ids); at, n = at+n, n+1 {
		n = min(n, len(ids)-at)
		chunk := client.Chunk{Parts: []client.Part{{Pages: ids[at : at+n]}}}
		last := at+n == len(ids)
		if s.Pair.LayerWise {
			for l := range mappedLayers {
				chunk.Layers, chunk.Last = [2]int{l, l + 1}, last && !s.Pair.State && l == mappedLayers-1
				if err := room.Send(ctx, chunk); err != nil {
					return err
				}
			}
		} else {
			chunk.Last = last && !s.Pair.State
			if err := room.Send(ctx, chunk); err != nil {
				return err
			}
		}
	}
	if s.Pair.State {
		return room.Send(ctx, client.Chunk{Parts: []client.Part{{Pool: 1, Pages: ids[:1]}}, Last: true})
	}
	return nil
}

// rankProcess is a rank that runs.
type rankProcess struct {
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines *bufio.Scanner
}

func (p *rankProcess) line() string {
	p.lines.Scan()
	return p.lines.Text()
}

func startRank(t *testing.T, s rankSpec) *rankProcess {
	t.Helper()
	arg, err := json.Marshal(s)
	must(t, err)
	p := &rankProcess{cmd: exec.Command("/proc/self/exe", "rank", string(arg))}
	p.cmd.Stderr = os.Stderr
	p.in, err = p.cmd.StdinPipe()
	must(t, err)
	out, err := p.cmd.StdoutPipe()
	must(t, err)
	p.lines = bufio.NewScanner(out)
	must(t, p.cmd.Start())
	t.Cleanup(func() {
		p.in.Close()
		p.cmd.Process.Kill()
		p.cmd.Wait()
	})
	return p
}

// TestMappedGroups: every rank is a process of its own, the source ranks at one engine, the destination ranks at
// another. Whatever their numbers, page sizes and orders, every byte of every pool is what it must be.
func TestMappedGroups(t *testing.T) {
	dir := tempDir(t)
	pe, de := start(t, dir, "p"), start(t, dir, "d")
	same := func(ranks int) mappedSide { return mappedSide{ranks, 16, "nhd"} }
	tokens := []int{16, 100, 77}
	for i, pair := range []mappedPair{
		{Name: "2-to-4", Kind: "mha", Heads: 4, Src: same(2), Dst: same(4)},
		{Name: "4-to-2", Kind: "mha", Heads: 8, Src: same(4), Dst: same(2), LayerWise: true},
		{Name: "1-to-2", Kind: "mha", Heads: 2, Src: mappedSide{1, 16, "hnd"}, Dst: mappedSide{2, 16, "nhd"}},
		{Name: "latent", Kind: "mla", Heads: 1, Src: mappedSide{2, 16, ""}, Dst: mappedSide{1, 16, ""}},
		{Name: "repeated-heads", Kind: "mha", Heads: 2, Src: same(4), Dst: same(2), LayerWise: true},
		{Name: "16-to-32", Kind: "mha", Heads: 2, Src: mappedSide{1, 16, "nhd"}, Dst: mappedSide{1, 32, "nhd"}},
		{Name: "32-to-16", Kind: "mha", Heads: 2, Src: mappedSide{1, 32, "hnd"}, Dst: mappedSide{1, 16, "hnd"}},
		{Name: "both", Kind: "mha", Heads: 4, Src: mappedSide{2, 8, "hnd"}, Dst: mappedSide{1, 32, "nhd"}},
		{Name: "state", Kind: "mha", Heads: 2, Src: mappedSide{2, 16, "nhd"}, Dst: mappedSide{2, 32, "nhd"}, State: true},
	} {
		t.Run(pair.Name, func(t *testing.T) {
			pair.Tokens, pair.Room = tokens, int64(100*i)
			runPair(t, pair, func(int) *engine { return pe }, func(int) *engine { return de })
		})
	}
}

// runPair hands the rooms of a pair over between rank processes, each at the engine where the functions place it.
func runPair(t *testing.T, pair mappedPair, src, dst func(rank int) *engine) {
	t.Helper()
	var ranks []*rankProcess
	for r := range pair.Src.Ranks {
		ranks = append(ranks, startRank(t, rankSpec{pair, src(r).cfg.Worker.Socket, client.Source, r}))
	}
	for r := range pair.Dst.Ranks {
		ranks = append(ranks, startRank(t, rankSpec{pair, dst(r).cfg.Worker.Socket, client.Destination, r}))
	}
	for i, p := range ranks {
		if l := p.line(); l != "ready" {
			t.Fatalf("rank process %d: %s", i, l)
		}
	}
	for _, p := range ranks {
		_, err := io.WriteString(p.in, "go\n")
		must(t, err)
	}
	var wg sync.WaitGroup
	for i, p := range ranks {
		wg.Go(func() {
			if l := p.line(); l != "ok" {
				t.Errorf("rank process %d of %d and %d: %s\n%s", i, pair.Src.Ranks, pair.Dst.Ranks, l, explain(pair.Room+int64(len(pair.Tokens))-1))
			}
		})
	}
	wg.Wait()
}

// TestUnmappedGroupsAreRefusedByName: pairs of groups that cannot be mapped are refused before any room, with the field.
func TestUnmappedGroupsAreRefusedByName(t *testing.T) {
	dir := tempDir(t)
	pe, de := start(t, dir, "p"), start(t, dir, "d")
	for i, c := range []struct {
		want             string
		from, to         int // ranks
		tokens, toTokens int
		order            string
		state            bool
	}{
		{want: "layout.ranks: source has 2 for 8 KV heads, destination has 3 for 8 KV heads", from: 2, to: 3, tokens: 16, toTokens: 16, order: "nhd"},
		{want: "layout.page_tokens: source has 16, destination has 24", from: 1, to: 1, tokens: 16, toTokens: 24, order: "nhd"},
		{want: "layout.order: source has none, destination has none", from: 1, to: 2, tokens: 16, toTokens: 16},
		{want: "layout.ranks: source has 1, destination has 2, and pool 0 is of kind state", from: 1, to: 2, tokens: 16, toTokens: 16, order: "hnd", state: true},
	} {
		prefill, decode := fmt.Sprint("prefill-", i), fmt.Sprint("decode-", i)
		join := func(e *engine, role client.Role, group string, ranks, tokens int) (clients []*client.Client) {
			for r := range ranks {
				cl, err := client.Dial(short(t), client.Options{
					Socket: e.cfg.Worker.Socket, Group: group, Role: role, Rank: r, Size: ranks,
					Layout: client.Layout{DType: "bf16", Layers: 1, KVHeads: 8, HeadDim: 8, PageTokens: tokens, Kind: "mha", Order: c.order},
				})
				must(t, err)
				defer t.Cleanup(func() { cl.Close() })
				clients = append(clients, cl)
			}
			return clients
		}
		ps := join(pe, client.Source, prefill, c.from, c.tokens)
		if c.state {
			region, err := ps[0].CreateRegion(short(t), 4096)
			must(t, err)
			t.Cleanup(func() { region.Close() })
			_, err = ps[0].AddPool(short(t), client.Pool{Pages: 1, State: true, Tensors: []client.Tensor{{Region: region, PageBytes: 64}}})
			must(t, err)
		}
		d := join(de, client.Destination, decode, c.to, c.toTokens)[0]
		room := int64(0)
		eventually(t, c.want, func() bool {
			room++
			r, err := d.Open(short(t), client.OpenOptions{Room: room, PeerGroup: prefill})
			if err == nil { // the group is not known yet, or the pool of state is not
				must(t, r.Abort(short(t)))
				must(t, r.WaitReusable(short(t)))
				must(t, r.Release(short(t)))
				return false
			}
			return strings.Contains(err.Error(), c.want)
		})
	}
}
