package node_test

import (
	"net"
	"path/filepath"
	"sync"
	"testing"
	"time"

	client "github.com/terminus-kv/terminus/clients/go"
)

// proxy stands between two engines. It can be cut, and it can swallow what it is given.
type proxy struct {
	address string // where it listens
	target  string
	mu      sync.Mutex
	down    bool // nobody gets through
	mute    bool // bytes are read and dropped
	conns   map[net.Conn]struct{}
	through int // connections that were forwarded
}

func newProxy(t *testing.T, target string) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	p := &proxy{address: l.Addr().String(), target: target, conns: map[net.Conn]struct{}{}}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", p.target)
			if err != nil || !p.keep(in, out) {
				in.Close()
				if out != nil {
					out.Close()
				}
				continue
			}
			wg.Go(func() { p.copy(in, out) })
			wg.Go(func() { p.copy(out, in) })
		}
	})
	t.Cleanup(func() { l.Close(); p.cut(true); wg.Wait() })
	return p
}

func (p *proxy) keep(conns ...net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		if !p.down {
			p.conns[c] = struct{}{}
		}
	}
	if !p.down {
		p.through++
	}
	return !p.down
}

func (p *proxy) copy(from, to net.Conn) {
	defer from.Close()
	defer to.Close()
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		p.mu.Lock()
		mute := p.mute
		if err != nil {
			delete(p.conns, from)
			delete(p.conns, to)
		}
		p.mu.Unlock()
		if err != nil {
			return
		}
		if !mute {
			to.Write(buf[:n])
		}
	}
}

// cut ends what goes through; down: until cut(false).
func (p *proxy) cut(down bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.down = down
	for c := range p.conns {
		c.Close()
	}
}

func (p *proxy) swallow(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mute = on
}

// connections counts those that went through.
func connections(proxies []*proxy) int {
	n := 0
	for _, p := range proxies {
		p.mu.Lock()
		n += p.through
		p.mu.Unlock()
	}
	return n
}

// viaProxies starts two engines that reach each other only through proxies, each way.
func viaProxies(t *testing.T, set ...string) (pe, de *engine, proxies []*proxy) {
	t.Helper()
	dir := tempDir(t)
	address := map[string]string{"p": freePort(t), "d": freePort(t)}
	engines := map[string]*engine{}
	for name, other := range map[string]string{"p": "d", "d": "p"} {
		px := newProxy(t, address[other])
		proxies = append(proxies, px)
		engines[name] = start(t, dir, name, append([]string{
			"peers.driver=static", "peers.listen=" + address[name], `peers.static=[{node: ` + other + `, address: "` + px.address + `"}]`,
			"runtime_dir=" + filepath.Join(dir, name),
		}, set...)...)
	}
	return engines["p"], engines["d"], proxies
}

// A link that breaks for a second, again and again, costs no room: it is redialled within the dead time
// and both sides resync.
func TestFlappingLinkFailsNoRoom(t *testing.T) {
	t.Parallel()
	pe, de, proxies := viaProxies(t)
	p, d := dial(t, pe, client.Source, "prefill", 0, 1, 64), dial(t, de, client.Destination, "decode", 0, 1, 64)
	handOver(t, p, d, 0, []int32{1, 2}, []int32{3, 4})
	ctx := short(t)
	over := make(chan struct{})
	go func() {
		defer close(over)
		for range 3 {
			for _, px := range proxies {
				px.cut(true)
			}
			time.Sleep(time.Second)
			before := connections(proxies)
			for _, px := range proxies {
				px.cut(false)
			}
			for end := time.Now().Add(5 * time.Second); connections(proxies) == before && time.Now().Before(end); {
				time.Sleep(10 * time.Millisecond)
			}
			time.Sleep(100 * time.Millisecond)
		}
	}()
	const at = 32 // rooms at once
	done, failed := 0, 0
	for room := int64(1); ; {
		var rooms []*client.Room
		for i := range int32(at) {
			rs, err := p.Open(ctx, client.OpenOptions{Room: room})
			must(t, err)
			rd := openTo(t, d, room)
			must(t, rd.Register(ctx, client.RegisterPart{Pool: d.pool, Pages: []int32{i, 32 + i}}))
			must(t, rs.Send(ctx, client.Chunk{Parts: []client.Part{{Pool: p.pool, Pages: []int32{i}}}}))
			must(t, rs.Send(ctx, client.Chunk{Parts: []client.Part{{Pool: p.pool, Pages: []int32{32 + i}}}, Last: true}))
			rooms = append(rooms, rs, rd)
			room++
		}
		for _, r := range rooms {
			st, err := r.WaitTerminal(ctx)
			must(t, err)
			done++
			if st != client.Success {
				failed++
				f, _ := r.Failure(ctx)
				t.Errorf("room %d is %v: %+v", r.ID(), st, f)
			}
			must(t, r.WaitReusable(ctx))
			must(t, r.Release(ctx))
		}
		select {
		case <-over:
			through := connections(proxies)
			t.Logf("%d room ends, %d failed, %d connections", done, failed, through)
			if through < 4 {
				t.Errorf("%d connections: the cuts were not felt", through)
			}
			return
		default:
		}
	}
}

// A link that swallows everything looks open. Beats tell: suspect first, then dead, and when it heals
// rooms go through again.
func TestHalfOpenLink(t *testing.T) {
	t.Parallel()
	pe, de, proxies := viaProxies(t, "clocks.peer_suspect=1s", "clocks.peer_dead=2s")
	p, d := dial(t, pe, client.Source, "prefill", 0, 1, 16), dial(t, de, client.Destination, "decode", 0, 1, 16)
	ctx := short(t)
	rs, rd := bind(t, p, d, 1, []int32{1})
	began := time.Now()
	for _, px := range proxies {
		px.swallow(true)
	}
	for _, r := range []*client.Room{rs, rd} {
		st, err := r.WaitTerminal(ctx)
		must(t, err)
		if f, _ := r.Failure(ctx); st != client.Failed || f.Reason != "peer_lost" {
			t.Errorf("room is %v: %+v", st, f)
		}
		took := time.Since(began)
		t.Logf("known after %v", took)
		if took < 1500*time.Millisecond { // a beat may have been under way
			t.Error("that was before the dead time")
		}
	}
	for _, px := range proxies {
		px.swallow(false)
		px.cut(false)
	}
	must(t, rd.WaitReusable(ctx))
	must(t, rs.WaitReusable(ctx))
	eventually(t, "the link is up again", func() bool {
		ps, err := de.admin.Peers(ctx)
		return err == nil && len(ps) == 1 && ps[0].State == "ready"
	})
	handOver(t, p, d, 2, []int32{1, 2}, []int32{3, 4})
	t.Logf("healed and handed over after %v", time.Since(began))
}
