package node_test

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	client "github.com/terminus-kv/terminus/clients/go"
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

// members are two ranks of a prefill group at p1 and p2, and two of a decode group at d1 and d2, in this order.
type members struct {
	engines [4]*engine
	workers [4]*worker
}

var memberNames = [4]string{"p1", "p2", "d1", "d2"}

// newMembers starts the engines with start or spawn, and the workers.
func newMembers(t *testing.T, start func(name string) *engine) *members {
	t.Helper()
	m := &members{}
	for i, name := range memberNames {
		m.engines[i] = start(name)
	}
	for i := range m.engines {
		m.join(t, i)
	}
	return m
}

// join connects the worker of a place.
func (m *members) join(t *testing.T, i int) {
	t.Helper()
	role, group := client.Source, "prefill"
	if i > 1 {
		role, group = client.Destination, "decode"
	}
	m.workers[i] = dial(t, m.engines[i], role, group, i%2, 2, 16)
}

// pages are those of a place, for every room.
func (m *members) pages(i int) []int32 { return []int32{int32(1 + i), int32(8 + i), int32(15 - i)} }

// bind opens a room at all ranks, and returns when every source may send.
func (m *members) bind(t *testing.T, room int64) (rooms [4]*client.Room) {
	t.Helper()
	for i, w := range m.workers {
		if i > 1 {
			rooms[i] = openTo(t, w, room)
			must(t, rooms[i].Register(short(t), client.RegisterPart{Pool: w.pool, Pages: m.pages(i)}))
			continue
		}
		var err error
		rooms[i], err = w.Open(short(t), client.OpenOptions{Room: room})
		must(t, err)
	}
	for end := time.Now().Add(10 * time.Second); rooms[0].Poll() != client.WaitingForInput || rooms[1].Poll() != client.WaitingForInput; time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("room %d is not bound:\n%s", room, explain(room))
		}
	}
	return rooms
}

// send hands the pages of a source rank over.
func (m *members) send(t *testing.T, room int64, i int, r *client.Room) {
	t.Helper()
	w := m.workers[i]
	fill(w, 10*room+int64(i), m.pages(i))
	must(t, r.Send(short(t), client.Chunk{Parts: []client.Part{{Pool: w.pool, Pages: m.pages(i)}}, Last: true}))
}

// end waits until all ranks see the room end, for the reasons that are said, and can reuse their pages.
func (m *members) end(t *testing.T, what string, room int64, rooms [4]*client.Room, reasons ...string) {
	t.Helper()
	began := time.Now()
	for i, r := range rooms {
		_, err := r.WaitTerminal(short(t))
		must(t, err)
		got := "success"
		if f, failed := r.Failure(short(t)); r.Poll() != client.Success {
			must(t, failed)
			got = string(f.Reason)
		}
		if !strings.Contains(reasons[i], got) {
			t.Errorf("%s: %s ended as %s, want %s\n%s", what, memberNames[i], got, reasons[i], explain(room))
		}
	}
	took := time.Since(began)
	for i, r := range rooms {
		if err := r.WaitReusable(short(t)); err != nil {
			t.Errorf("%s: pages of %s are %v: %v\n%s", what, memberNames[i], r.Residency(), err, explain(room))
			continue
		}
		if r.Poll() == client.Success && i > 1 {
			check(t, m.workers[i], 10*room+int64(i-2), m.pages(i))
		}
		must(t, r.Release(short(t)))
	}
	t.Logf("%s: ended after %v, reusable after %v", what, took, time.Since(began))
	if took > 5*time.Second {
		t.Errorf("%s: took %v: that was a clock", what, took)
	}
}

// handOver moves a room through all ranks.
func (m *members) handOver(t *testing.T, room int64) {
	t.Helper()
	rooms := m.bind(t, room)
	for i := range 2 {
		m.send(t, room, i, rooms[i])
	}
	m.end(t, "hand-over", room, rooms, "success", "success", "success", "success")
}

// TestSpanningFaults: whichever rank aborts a room, at whatever engine, the room ends at all engines; and whichever
// worker or plugin dies.
func TestSpanningFaults(t *testing.T) {
	t.Parallel()
	dir := tempDir(t)
	m := newMembers(t, func(name string) *engine { return start(t, dir, name) })
	room := int64(0)
	next := func() int64 { room++; return room }
	others := func(i int, own, other string) []string {
		out := []string{other, other, other, other}
		out[i] = own
		return out
	}
	m.handOver(t, next())
	why, err := m.engines[0].admin.GroupWhy(short(t), "decode")
	must(t, err)
	if want := `group "decode" (destination, 2 ranks) is complete: rank 0 at "d1", rank 1 at "d2"`; !strings.HasPrefix(why[0], want) || len(why) != 3 {
		t.Errorf("why of a group at two engines: %q", why)
	}
	for i, name := range memberNames {
		rooms := m.bind(t, next())
		must(t, rooms[i].Abort(short(t)))
		m.end(t, name+" aborts", room, rooms, others(i, "aborted", "peer_aborted")...)

		rooms = m.bind(t, next())
		if i < 2 { // the other source has sent everything
			m.send(t, room, 1-i, rooms[1-i])
		}
		m.workers[i].Close()
		m.end(t, "worker of "+name+" dies", room, rooms, others(i, "engine_lost worker_lost", "worker_lost peer_aborted")...)
		m.join(t, i)
		m.handOver(t, next())

		rooms = m.bind(t, next())
		pid, epoch := m.engines[i].plugin(t)
		must(t, unix.Kill(pid, unix.SIGKILL))
		if i > 1 {
			m.end(t, "plugin of "+name+" dies", room, rooms, others(i, "plugin_lost", "plugin_lost peer_aborted")...)
		}
		eventually(t, "the next epoch serves", func() bool {
			ps, err := m.engines[i].admin.Plugins(short(t))
			return err == nil && ps[0].Epochs[0].Epoch == epoch+1 && ps[0].Epochs[0].State == "ready"
		})
		if i < 2 { // nothing was under way: the next epoch does it
			for k := range 2 {
				m.send(t, room, k, rooms[k])
			}
			m.end(t, "plugin of "+name+" is replaced", room, rooms, "success", "success", "success", "success")
		}
		m.handOver(t, next())
	}
}

// TestSpanningEngineKilled: whichever engine of a group dies, and whenever: its own worker knows by itself, the others
// are told in bounded time, and the room ends with one verdict where that can be. The next incarnation serves.
func TestSpanningEngineKilled(t *testing.T) {
	t.Parallel()
	dir := tempDir(t)
	m := newMembers(t, func(name string) *engine { return spawn(t, dir, name) })
	room := int64(0)
	next := func() int64 { room++; return room }
	back := func(i int) {
		t.Helper()
		m.engines[i] = spawn(t, dir, memberNames[i])
		m.workers[i].redial(t)
		m.handOver(t, next())
	}
	const lost = "peer_lost peer_aborted"
	for i, name := range memberNames {
		rooms := m.bind(t, next())
		if i < 2 {
			m.send(t, room, 1-i, rooms[1-i]) // the other has sent everything
		}
		reasons := [4]string{lost, lost, lost, lost}
		reasons[i] = "engine_lost"
		m.engines[i].kill()
		m.end(t, name+" is killed", room, rooms, reasons[:]...)
		back(i)
	}

	// committed stops an engine and lets the sources say everything.
	committed := func(rooms [4]*client.Room, stopped int) {
		t.Helper()
		m.engines[stopped].signal(t, unix.SIGSTOP)
		for i := range 2 {
			m.send(t, room, i, rooms[i])
		}
		for i := range 2 {
			eventually(t, memberNames[i]+" has committed", func() bool {
				v, err := m.engines[i].admin.Room(short(t), room)
				return err == nil && v[0].State == "committed"
			})
		}
	}
	rooms := m.bind(t, next())
	committed(rooms, 2)
	eventually(t, "d2 has voted", func() bool {
		v, err := m.engines[3].admin.Room(short(t), room)
		return err == nil && v[0].State == "voted"
	})
	why, err := m.engines[3].admin.Why(short(t), room)
	must(t, err)
	if want := "every byte is here, waiting for the verdict of d1, the engine of rank 0"; !strings.Contains(why[0], want) {
		t.Errorf("a voter says %q, want %q", why[0], want)
	}
	m.engines[2].kill()
	const unknown = "outcome_unknown"
	m.end(t, "the judge is killed before its verdict", room, rooms, unknown, unknown, "engine_lost", unknown)
	back(2)

	rooms = m.bind(t, next())
	committed(rooms, 3)
	why, err = m.engines[2].admin.Why(short(t), room)
	must(t, err)
	if want := "every byte is here, waiting for the same of d2"; !strings.Contains(why[0], want) {
		t.Errorf("the judge says %q, want %q", why[0], want)
	}
	m.engines[3].kill()
	m.end(t, "a voter is killed before its vote", room, rooms, lost, lost, lost, "engine_lost")
	back(3)

	// Whether the judge has read what the source said before it died is chance: it is one verdict for all.
	rooms = m.bind(t, next())
	committed(rooms, 2)
	m.engines[0].kill()
	m.engines[2].signal(t, unix.SIGCONT)
	if st, err := rooms[2].WaitTerminal(short(t)); err != nil || st == client.Success {
		m.end(t, "a source is killed after RankEnd, the judge has it", room, rooms, "engine_lost", "success", "success", "success")
	} else {
		m.end(t, "a source is killed after RankEnd", room, rooms, "engine_lost", lost, lost, lost)
	}
	back(0)
}

// TestSpanningGroupList: the ranks of a decode group at two engines go by rank 0's list, also where one of them
// cannot hear the verdict any more.
func TestSpanningGroupList(t *testing.T) {
	t.Parallel()
	dir := tempDir(t)
	m := newMembers(t, func(name string) *engine { return spawn(t, dir, name) })
	for i := 2; i < 4; i++ { // the ranks of a group agree on whether they have a list
		m.workers[i].Close()
	}
	for i := 2; i < 4; i++ {
		o := options(m.engines[i].cfg.Worker.Socket, client.Destination, "decode", i-2, 2)
		o.GroupList = true
		eventually(t, "the rank is free", func() bool {
			c, err := client.Dial(short(t), o)
			if err == nil {
				m.workers[i] = &worker{Client: c}
			}
			return err == nil
		})
		w := m.workers[i]
		t.Cleanup(func() { w.Close(); w.region.Close() })
		must(t, w.add(short(t), 16))
	}
	ended := map[int64]client.Status{} // by the list, on every rank
	tick := func() {
		t.Helper()
		items, err := m.workers[2].PollGroup()
		must(t, err)
		for i := 2; i < 4; i++ {
			changes, err := m.workers[i].ApplyGroup(items)
			must(t, err)
			for _, c := range changes {
				if id := c.Room; c.Status.Terminal() {
					if st, other := ended[id]; i == 3 && (!other || st != c.Status) {
						t.Errorf("room %d is %v at rank 0 and %v at rank 1", id, st, c.Status)
					}
					ended[id] = c.Status
				}
			}
		}
	}
	end := func(room int64, want client.Status) {
		t.Helper()
		eventually(t, fmt.Sprintf("the list ends room %d", room), func() bool { tick(); _, ok := ended[room]; return ok })
		if ended[room] != want {
			t.Errorf("room %d is %v, want %v\n%s", room, ended[room], want, explain(room))
		}
	}
	rooms := m.bind(t, 1)
	must(t, rooms[3].Abort(short(t)))
	end(1, client.Failed)
	for _, r := range rooms {
		must(t, r.WaitReusable(short(t)))
		must(t, r.Release(short(t)))
	}
	rooms = m.bind(t, 2)
	for i := range 2 {
		m.send(t, 2, i, rooms[i])
	}
	if st, err := rooms[2].WaitTerminal(short(t)); err != nil || st != client.Success {
		t.Fatalf("%v, %v\n%s", st, err, explain(2))
	}
	m.engines[3].kill() // before its rank has looked
	if _, err := rooms[3].WaitTerminal(short(t)); err != nil {
		t.Fatal(err)
	}
	if rooms[3].Residency().Reusable() && rooms[3].Release(short(t)) == nil {
		t.Error("rank 1 gave up pages that the list has not ended")
	}
	end(2, client.Success)
	for i := 2; i < 4; i++ {
		check(t, m.workers[i], 20+int64(i-2), m.pages(i))
	}
}
