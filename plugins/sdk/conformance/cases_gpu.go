package conformance

import (
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

const (
	hostSHM = contract.MemoryKind_MEMORY_KIND_HOST_SHM
	cudaVMM = contract.MemoryKind_MEMORY_KIND_CUDA_VMM
	cudaIPC = contract.MemoryKind_MEMORY_KIND_CUDA_IPC
)

// All have plugins of their own: a library that finds a GPU opens descriptors that it keeps.
func init() {
	register(
		Case{
			ID: "gpu/vmm-canary", Rule: "R4", Profile: TransferCore, Needs: []string{NeedCUDAVMM}, Fresh: true,
			Title: "the canary is read and answered in the memory of the device, and memory without it is refused",
			Script: `
> RegionAdds of cuda-vmm with the canary at the start, in the middle, at an odd place, at the end
< RegionReady of each
= the 8 bytes at the place are the complement; every other byte is as it was
> RegionAdd whose canary is not what lies at the place
< RegionFailed(CAUSE_PROTOCOL)
= nothing was written`,
			Run: func(t *T) {
				gpuWarm(t, cudaVMM)
				for _, at := range []uint64{0, 1 << 20, 4093, math.MaxUint64} {
					r := t.B().NewDeviceMemory(cudaVMM, 1)
					at = min(at, r.Size-8)
					r.putCanary(at)
					regionTaken(t, t.B().OfferRegion(r, func(m *contract.RegionAdd) { m.CanaryOffset = at }))
					r.pull(at, 8)
					got := binary.LittleEndian.Uint64(r.Bytes[at:])
					t.Check(got == ^uint64(canary), "R4", fmt.Sprintf("the complement of the canary, %#x, at %d", ^uint64(canary), at), "%#x", got)
					r.restore(r.Size - 8)
					r.restore(at)
					r.intact(t, "R4", "nothing but the canary to be written")
				}
				r := t.B().NewDeviceMemory(cudaVMM, 1)
				regionRefused(t, t.B().OfferRegion(r, func(m *contract.RegionAdd) { m.Canary++ }), "memory with another canary", contract.Cause_CAUSE_PROTOCOL)
				r.intact(t, "R4", "nothing to be written")
			},
		},
		Case{
			ID: "gpu/vmm-one-page", Rule: "R1", Profile: TransferCore, Needs: []string{NeedCUDAVMM}, Fresh: true,
			Title:  "a page arrives from device to device, whole and alone, however often the worker has rewritten it",
			Script: gpuOnePageScript,
			Run:    func(t *T) { gpuOnePage(t, cudaVMM) },
		},
		Case{
			ID: "gpu/ipc-one-page", Rule: "R1", Profile: TransferCore, Needs: []string{NeedCUDAIPC}, Fresh: true,
			Title:  "a page arrives from device to device, whole and alone, however often the worker has rewritten it",
			Script: gpuOnePageScript,
			Run:    func(t *T) { gpuOnePage(t, cudaIPC) },
		},
		Case{
			ID: "gpu/vmm-from-host", Rule: "R1", Profile: TransferCore, Needs: []string{NeedCUDAVMM}, Fresh: true,
			Title: "pages of host memory arrive on the device",
			Script: `
> a pool in host-shm at the source, in cuda-vmm at the destination
> Submit of 64 pages in 4 layers
< Accepted, Progress…, Done
= every page of every layer is there; the gaps between them are untouched`,
			Run: func(t *T) { gpuPages(t, hostSHM, cudaVMM) },
		},
		Case{
			ID: "gpu/vmm-to-host", Rule: "R1", Profile: TransferCore, Needs: []string{NeedCUDAVMM}, Fresh: true,
			Title: "pages of the device arrive in host memory",
			Script: `
> a pool in cuda-vmm at the source, in host-shm at the destination
> Submit of 64 pages in 4 layers
< Accepted, Progress…, Done
= every page of every layer is there; the gaps between them are untouched`,
			Run: func(t *T) { gpuPages(t, cudaVMM, hostSHM) },
		},
		Case{
			ID: "gpu/vmm-removed", Rule: "R4", Profile: TransferCore, Needs: []string{NeedCUDAVMM}, Fresh: true,
			Title:  "the lease of device memory is given back at RegionRemoved, and nothing is written later",
			Script: gpuRemovedScript,
			Run:    func(t *T) { gpuRemoved(t, cudaVMM) },
		},
		Case{
			ID: "gpu/ipc-removed", Rule: "R4", Profile: TransferCore, Needs: []string{NeedCUDAIPC}, Fresh: true,
			Title:  "the lease of device memory is given back at RegionRemoved, and nothing is written later",
			Script: gpuRemovedScript,
			Run:    func(t *T) { gpuRemoved(t, cudaIPC) },
		},
		Case{
			ID: "gpu/vmm-bad-descriptor", Rule: "R12", Profile: TransferCore, Needs: []string{NeedCUDAVMM}, Fresh: true,
			Title: "a descriptor that is no memory of a device is refused",
			Script: `
> RegionAdds of cuda-vmm whose descriptor is a pipe, host memory
< RegionFailed of each; the plugin lives
= good memory is taken afterwards`,
			Run: func(t *T) {
				gpuWarm(t, cudaVMM)
				read, write, err := os.Pipe()
				if err != nil {
					t.broke("pipe: %v", err)
				}
				defer read.Close()
				defer write.Close()
				host := t.B().NewMemory(2 << 20)
				for _, bad := range []struct {
					fd   int
					what string
				}{{int(write.Fd()), "a pipe"}, {host.mem, "host memory"}} {
					r := t.B().NewDeviceMemory(cudaVMM, 1)
					unix.Close(r.mem)
					if r.mem, err = unix.FcntlInt(uintptr(bad.fd), unix.F_DUPFD_CLOEXEC, 0); err != nil {
						t.broke("duplicate descriptor: %v", err)
					}
					regionRefused(t, t.B().OfferRegion(r, nil), bad.what)
					r.intact(t, "R12", "nothing to be written")
				}
				host.intact(t, "R12", "nothing to be written")
				t.B().addRegion(cudaVMM, 1)
			},
		},
		Case{
			ID: "gpu/ipc-bad-handle", Rule: "R12", Profile: TransferCore, Needs: []string{NeedCUDAIPC}, Fresh: true,
			Title: "a handle that is none is refused",
			Script: `
> RegionAdds of cuda-ipc with a handle of zeroes, a handle cut short, no handle
< RegionFailed of each; the plugin lives
= good memory is taken afterwards`,
			Run: func(t *T) {
				gpuWarm(t, cudaIPC)
				for _, bad := range []struct {
					bytes int
					what  string
				}{{64, "a handle of zeroes"}, {3, "a handle of 3 bytes"}, {0, "memory without a handle"}} {
					r := t.B().NewDeviceMemory(cudaIPC, 1)
					regionRefused(t, t.B().OfferRegion(r, func(m *contract.RegionAdd) { m.Handle = make([]byte, bad.bytes) }), bad.what)
					r.intact(t, "R12", "nothing to be written")
				}
				t.B().addRegion(cudaIPC, 1)
			},
		},
		Case{
			ID: "gpu/vmm-wrong-device", Rule: "R12", Profile: TransferCore, Needs: []string{NeedCUDAVMM}, Fresh: true,
			Title: "memory of a device that this machine does not have is refused",
			Script: `
> RegionAdds of cuda-vmm on the device behind the last one, on device -1, on device 2^31-1
< RegionFailed of each; the plugin lives
= nothing was written; good memory is taken afterwards`,
			Run: func(t *T) {
				gpuWarm(t, cudaVMM)
				for _, device := range []int32{int32(t.run.gpu.devices), -1, math.MaxInt32} {
					r := t.B().NewDeviceMemory(cudaVMM, 1)
					regionRefused(t, t.B().OfferRegion(r, func(m *contract.RegionAdd) { m.Device = device }), fmt.Sprintf("memory of device %d", device))
					r.intact(t, "R12", "nothing to be written")
				}
				t.B().addRegion(cudaVMM, 1)
			},
		},
		Case{
			ID: "gpu/vmm-strided-slices", Rule: "R1", Profile: TransferLayout, Needs: []string{NeedCUDAVMM}, Fresh: true,
			Title: "slices with strides go to their places on the device, and what lies between them stays",
			Script: `
> pages of 16 tokens with 4 heads at the source, with 3 at the destination
> a plan that makes the last 2 heads of each token, 136 bytes each, the last 2 there
> Submit of 8 pages
< Accepted, Progress…, Done
= every head is in its place; every other byte is as it was`,
			Run: func(t *T) {
				gpuWarm(t, cudaVMM)
				const tokens, head = 16, 136
				p := t.Path(Shape{
					Pages: 10, PageBytes: tokens * 4 * head, DstPages: 10, DstPageBytes: tokens * 3 * head, Gap: 40, NoPlan: true,
					SrcKind: cudaVMM, DstKind: cudaVMM,
				})
				p.Plan = p.AddPlan(p.Src, p.Dst, 1, 1, &contract.Slice{
					SrcOff: 2 * head, SrcStride: 4 * head, DstOff: head, DstStride: 3 * head, Len: 2 * head, Count: tokens,
				})
				p.Submit(Submit{Src: Pages(1, 8), Dst: Pages(2, 8)}).Done()
			},
		},
		Case{
			ID: "gpu/vmm-large-op", Rule: "R1", Profile: TransferLayout, Needs: []string{NeedCUDAVMM}, Fresh: true,
			Title: "an op of the largest size that a host makes, 64 MiB or the plugin's own limit, arrives on the device",
			Script: `
> Submit of 64 MiB from device to device
< Accepted, Progress…, Done
= every page is there`,
			Run: func(t *T) {
				gpuWarm(t, cudaVMM)
				newLoadOf(t, t.A(), t.B(), 1, 64<<20, Shape{SrcKind: cudaVMM, DstKind: cudaVMM}).submit(0).Done()
			},
		},
		Case{
			ID: "gpu/vmm-abort", Rule: "R4", Profile: TransferAbort, Needs: []string{NeedCUDAVMM}, Fresh: true,
			Title:    "nothing of an aborted op lands on the device once it is quiet",
			Incident: "sglang#36707: the abort was acknowledged as drained while a write could still land",
			Script: `
> 4 Submits of 8 MiB from device to device in one frame; AbortOp of each; 4 rounds
< for each: Aborted or Done; Quiesced if that said quiet=false
> for a second: small ops the other way; the memory of the aborted ones stays registered
= a canary over the pages of the aborted ops is whole at the end`,
			Run: func(t *T) {
				gpuWarm(t, cudaVMM)
				l := newLoadOf(t, t.A(), t.B(), 4, 8<<20, Shape{SrcKind: cudaVMM, DstKind: cudaVMM})
				aborted := false
				for range 4 {
					ops := l.submitAll()
					for i, op := range ops {
						if i%2 == 1 {
							op.Accepted()
						}
						op.Abort()
					}
					for _, op := range ops {
						end := op.Quiet()
						orderOver(t, end)
						aborted = aborted || end.Kind == "aborted"
					}
				}
				const watch, pause = time.Second, 50 * time.Millisecond
				back := t.PathBetween(t.B(), t.A(), Shape{Pages: 8, PageBytes: 4096, SrcKind: cudaVMM, DstKind: cudaVMM})
				for began := time.Now(); time.Since(began) < watch; t.Sleep(pause) {
					back.Submit(Submit{Src: Pages(0, 8), Dst: Pages(0, 8)}).Done()
					l.DstMem.intact(t, "R4", "nothing to be written after an op was quiet")
				}
				l.submit(0).Done()
				if !aborted {
					t.Unsupported("no op was slow enough here to be aborted")
				}
			},
		},
	)
}

// gpuWarm has both plugins open the GPU, and takes what they hold then as what they may hold in the end.
func gpuWarm(t *T, kind contract.MemoryKind) {
	for _, n := range []*Node{t.A(), t.B()} {
		n.RemoveRegion(n.addRegion(kind, 1))
		n.hasBase = false
		n.measure()
	}
}

const gpuOnePageScript = `
> a pool in memory of the device at both ends
> 8 rounds: the worker writes page 3; Submit of page 3 to page 5
< Accepted, Progress…, Done with the size of the page
= the moment that Done is read, page 5 holds page 3 of this round; nothing else has changed`

func gpuOnePage(t *T, kind contract.MemoryKind) {
	const size = 4096
	gpuWarm(t, kind)
	p := t.Path(Shape{Pages: 8, PageBytes: size, SrcKind: kind, DstKind: kind})
	fresh := make([]byte, size)
	for range 8 {
		fill(fresh, t.Rand())
		p.SrcMem.Rewrite(p.Src.Tensors[0].Offset+3*size, fresh)
		p.Submit(Submit{Src: Pages(3, 1), Dst: Pages(5, 1)}).Done()
	}
}

func gpuPages(t *T, src, dst contract.MemoryKind) {
	gpuWarm(t, cudaVMM)
	p := t.Path(Shape{Pages: 64, PageBytes: 4096, Layers: 4, Gap: 128, SrcKind: src, DstKind: dst})
	p.Submit(Submit{Src: Pages(0, 64), Dst: Pages(0, 64)}).Done()
}

const gpuRemovedScript = `
> RegionAdd, RegionRemove; 8 times
< RegionReady, RegionRemoved
= the moment that RegionRemoved is read, the lease has ended
> an op into a region; then Revoke, RegionRemove of the destination
< Done; RegionRemoved
= the lease has ended; a canary over the pages is whole`

func gpuRemoved(t *T, kind contract.MemoryKind) {
	gpuWarm(t, kind)
	removed := func(r *Region) {
		r.node.RemoveRegion(r)
		t.Check(r.LeaseEnded(), "R4", "the lease to have ended when RegionRemoved comes", "it is held")
		r.intact(t, "R4", "nothing to be written")
	}
	for range 8 {
		removed(t.B().addRegion(kind, 1))
	}
	p := t.Path(Shape{Pages: 8, PageBytes: 4096, SrcKind: kind, DstKind: kind})
	p.Submit(Submit{Src: Pages(0, 8), Dst: Pages(0, 8)}).Done()
	for _, g := range p.Grants() {
		p.Revoke(g)
	}
	p.teardown()
	removed(p.DstMem)
}
