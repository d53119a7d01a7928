package conformance

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/conformance/internal/cuda/cudatest"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// onGPU makes the reference backend one that serves memory of the driver of cudatest: this, too, is memfds, so
// it is enough to check what is special about device memory and to pass it on as host memory.
type onGPU struct {
	Carrier
	noCanary bool // the fault: device memory is taken without it
}

func (onGPU) InProcess() bool { return true }

func (c onGPU) Launch(ctx context.Context, id Identity, sink func(Arrival)) (Plugin, error) {
	p, err := c.Carrier.Launch(ctx, id, sink)
	if err != nil {
		return nil, err
	}
	hello := clone(p.Hello())
	hello.MemoryKinds = append(hello.MemoryKinds, cudaVMM, cudaIPC)
	return &gpuPlugin{Plugin: p, hello: hello, noCanary: c.noCanary, leases: map[uint64]int{}, foreign: map[uint64]bool{}}, nil
}

type gpuPlugin struct {
	Plugin
	hello    *contract.HandshakeResponse
	noCanary bool

	mu      sync.Mutex
	leases  map[uint64]int  // of memory whose handle is still to come
	foreign map[uint64]bool // the descriptor is no memory of the device
}

func (p *gpuPlugin) Hello() *contract.HandshakeResponse { return p.hello }

func (p *gpuPlugin) SendRegion(region uint64, memory, lease int) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if memory >= 0 {
		path, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", memory))
		p.foreign[region] = !strings.HasPrefix(path, "/memfd:fakecuda")
		if err != nil {
			return err
		}
		return p.Plugin.SendRegion(region, memory, lease)
	}
	own, err := unix.FcntlInt(uintptr(lease), unix.F_DUPFD_CLOEXEC, 0)
	p.leases[region] = own
	return err
}

func (p *gpuPlugin) Send(events ...*contract.HostEvent) error {
	for i, e := range events {
		if add := e.GetRegionAdd(); add != nil && (add.Kind == cudaVMM || add.Kind == cudaIPC) {
			add = clone(add)
			p.translate(add)
			events[i] = &contract.HostEvent{Event: &contract.HostEvent_RegionAdd{RegionAdd: add}}
		}
	}
	return p.Plugin.Send(events...)
}

// translate makes host memory of what is good, and of the rest what the SDK refuses.
func (p *gpuPlugin) translate(add *contract.RegionAdd) {
	p.mu.Lock()
	defer p.mu.Unlock()
	good := !p.foreign[add.Region]
	if add.Kind == cudaIPC {
		lease := p.leases[add.Region]
		delete(p.leases, add.Region)
		defer unix.Close(lease)
		fd, err := unix.Open(unix.ByteSliceToString(add.Handle), unix.O_RDWR|unix.O_CLOEXEC, 0)
		if good = err == nil && len(add.Handle) == 64; good {
			defer unix.Close(fd)
			good = p.Plugin.SendRegion(add.Region, fd, lease) == nil
		}
	}
	if add.Kind = hostSHM; !good || add.Device != 0 {
		add.Kind = 99
	}
	if p.noCanary {
		add.NoCanary, add.Canary, add.CanaryOffset = true, 0, 0
	}
	add.Handle, add.Device = nil, 0
}

// TestGPU: on a machine with a GPU a sound plugin passes every case of the group, and each fault is found by
// exactly the cases that are named.
func TestGPU(t *testing.T) {
	var all []string
	for _, c := range Cases() {
		if strings.HasPrefix(c.ID, "gpu/") {
			all = append(all, c.ID)
		}
	}
	for _, m := range []struct {
		name     string
		backend  func(*hooks)
		frames   func(*mangler)
		noCanary bool
		fails    []string
	}{
		{name: "sound", backend: func(h *hooks) { h.piece = linger }},
		{name: "canary ignored", noCanary: true, fails: all},
		{
			name: "written after quiet", fails: []string{"gpu/vmm-abort"},
			backend: func(h *hooks) {
				h.piece = linger
				h.cancelled = func(b *reference, op *sdk.Op, left []sdk.Copy) {
					write := b.poke(op.Peer(), left[0])
					op.Aborted(true)
					time.Sleep(20 * time.Millisecond)
					write()
				}
			},
		},
		{
			name: "another place on the device",
			fails: []string{
				"gpu/ipc-one-page", "gpu/ipc-removed", "gpu/vmm-from-host", "gpu/vmm-one-page", "gpu/vmm-removed",
				"gpu/vmm-strided-slices", "gpu/vmm-to-host",
			},
			backend: func(h *hooks) {
				h.covers = func(*reference, sdk.Opener, uint64, uint64, uint64) error { return nil }
				h.piece = func(_ *reference, _ *sdk.Op, _ int, c *sdk.Copy) bool {
					c.DstOff += 8
					return true
				}
			},
		},
		{
			name: "strides ignored", fails: []string{"gpu/vmm-strided-slices"},
			backend: func(h *hooks) {
				h.covers = func(*reference, sdk.Opener, uint64, uint64, uint64) error { return nil }
				h.pieces = func(op *sdk.Op) (list []sdk.Copy) {
					for c := range op.Pieces(pieceBytes) {
						if n := len(list); n > 0 && c.Len < 4096 {
							c.SrcOff, c.DstOff = list[n-1].SrcOff+c.Len, list[n-1].DstOff+c.Len
						}
						list = append(list, c)
					}
					return list
				}
			},
		},
		{
			name: "largest op cut short", fails: []string{"gpu/vmm-large-op"},
			backend: func(h *hooks) {
				h.piece = func(_ *reference, op *sdk.Op, i int, _ *sdk.Copy) bool { return op.Bytes() < 16<<20 || i < 100 }
			},
		},
		{
			name: "anything taken", fails: []string{"gpu/ipc-bad-handle", "gpu/vmm-bad-descriptor", "gpu/vmm-canary", "gpu/vmm-wrong-device"},
			frames: func(m *mangler) { acceptMemory(m, contract.Cause_CAUSE_PROTOCOL) },
		},
	} {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			var carrier Carrier = onGPU{(&mutant{backend: func(h *hooks) {
				limited(&contract.Limits{MaxOpBytes: 16 << 20})(h) // so that the largest op takes less time
				if m.backend != nil {
					m.backend(h)
				}
			}}).carrier(), m.noCanary}
			if m.frames != nil {
				carrier = mangled{carrier, m.frames}
			}
			var ids []string
			for _, id := range all {
				// The long ones move much memory: a fault runs them if they are there for it.
				if long := id == "gpu/vmm-large-op" || id == "gpu/vmm-abort"; !long || m.name == "sound" || slices.Contains(m.fails, id) {
					ids = append(ids, id)
				}
			}
			library := cudatest.Library(t)
			res, err := Run(t.Context(), Config{Carrier: carrier, Run: ids, Seed: 1, cuda: library})
			if err != nil {
				t.Fatal(err)
			}
			if n := cudatest.Live(t, library); n != 0 {
				t.Errorf("the suite left %d objects of the driver", n)
			}
			for _, r := range res.Cases {
				want := Passed
				switch {
				case !slices.Contains(ids, r.Case.ID):
					continue
				case slices.Contains(m.fails, r.Case.ID):
					want = Failed
				}
				t.Logf("%6d ms %s %s", r.Took.Milliseconds(), r.Case.ID, r.Outcome)
				if r.Outcome != want {
					t.Errorf("%s %s, want %s %s\n%s", r.Case.ID, r.Outcome, want, r.Reason, r.Text(m.name))
				}
			}
		})
	}
}

// TestDeviceRegion: a byte that somebody writes into device memory is found, and memory that the suite cannot
// read is a fault of the suite, not of the plugin.
func TestDeviceRegion(t *testing.T) {
	n := harness(t)
	library := cudatest.Library(t)
	for _, kind := range []contract.MemoryKind{cudaVMM, cudaIPC} {
		if lacks := n.t.run.gpu.lacks(library, kind); lacks != "" {
			t.Fatal(lacks)
		}
		r := n.NewDeviceMemory(kind, 100)
		if bad := r.check(); bad != "" {
			t.Errorf("fresh memory: %s", bad)
		}
		last := []byte{^r.shadow[r.Size-1]}
		if err := r.gpu.Write(last, r.Size-1); err != nil {
			t.Fatal(err)
		}
		if bad := r.check(); !strings.Contains(bad, fmt.Sprintf("byte %d of region", r.Size-1)) {
			t.Errorf("the last byte was changed; check says %q", bad)
		}
		r.Rewrite(r.Size-1, last)
		if bad := r.check(); bad != "" {
			t.Errorf("after Rewrite: %s", bad)
		}
		if err := r.gpu.Free(); err != nil {
			t.Fatal(err)
		}
		n.t.outcome = Unknown
		if bad := r.check(); bad != "" || n.t.outcome != Errored {
			t.Errorf("memory that cannot be read: check says %q, the outcome is %s", bad, n.t.outcome)
		}
	}
}

// TestGPULacks: cases are unsupported when the plugin does not declare the memory, or the driver is not there.
func TestGPULacks(t *testing.T) {
	res, err := Run(t.Context(), Config{Carrier: (&mutant{}).carrier(), Run: []string{"gpu/vmm-one-page"}, cuda: "no-such-library"})
	if err != nil {
		t.Fatal(err)
	}
	onlyUnsupported(t, res, "the plugin does not take cuda-vmm memory")
	res, err = Run(t.Context(), Config{Carrier: onGPU{Carrier: (&mutant{}).carrier()}, Run: []string{"gpu/vmm-one-page"}, cuda: "no-such-library"})
	if err != nil {
		t.Fatal(err)
	}
	onlyUnsupported(t, res, "this machine has no GPU that can be used: open the CUDA driver: no-such-library: ")
}

func onlyUnsupported(t *testing.T, res *Results, reason string) {
	t.Helper()
	for _, r := range res.Cases {
		if r.Case.ID == "gpu/vmm-one-page" && (r.Outcome != Unsupported || !strings.HasPrefix(r.Reason, reason)) {
			t.Errorf("%s: %q, want %s: %q", r.Outcome, r.Reason, Unsupported, reason)
		}
	}
}
