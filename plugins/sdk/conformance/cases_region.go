package conformance

import (
	"encoding/binary"
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

func init() {
	register(
		Case{
			ID: "region/canary-both-ways", Rule: "R4", Profile: TransferCore,
			Title: "the plugin reads the canary where it lies, and writes its complement there, and nothing else",
			Script: `
> RegionAdds with the canary at the start, in the middle, at an odd place, at the end
< RegionReady of each
= the 8 bytes at the place are the complement; every other byte is as it was`,
			Run: func(t *T) {
				const size = 3*4096 + 100
				for _, at := range []uint64{0, 8, 4093, 8192, size - 8} {
					r := t.B().NewMemory(size)
					r.putCanary(at)
					e := t.B().OfferRegion(r, func(m *contract.RegionAdd) { m.CanaryOffset = at })
					regionTaken(t, e)
					got := binary.LittleEndian.Uint64(r.Bytes[at:])
					t.Check(got == ^uint64(canary), "R4", fmt.Sprintf("the complement of the canary, %#x, at %d", ^uint64(canary), at), "%#x", got)
					r.restore(size - 8)
					r.restore(at)
					r.intact(t, "R4", "nothing but the canary to be written")
				}
			},
		},
		Case{
			ID: "region/wrong-canary-refused", Rule: "R4", Profile: TransferCore,
			Title: "memory in which the canary is not found is refused: it is another file, or a private copy",
			Script: `
> RegionAdd whose canary is not what lies at the place
< RegionFailed(CAUSE_PROTOCOL)
= nothing was written; good memory is taken afterwards`,
			Run: func(t *T) {
				r := t.B().NewMemory(8192)
				e := t.B().OfferRegion(r, func(m *contract.RegionAdd) { m.Canary++ })
				regionRefused(t, e, "memory with another canary", contract.Cause_CAUSE_PROTOCOL)
				r.intact(t, "R4", "nothing to be written")
				t.B().AddRegion(4096)
			},
		},
		Case{
			ID: "region/no-canary-untouched", Rule: "R4", Profile: TransferCore,
			Title: "memory that is in use already is not written",
			Script: `
> RegionAdd with no_canary
< RegionReady
= not a byte has changed; ops into it are done`,
			Run: func(t *T) {
				r := t.B().NewMemory(64 << 10)
				e := t.B().OfferRegion(r, func(m *contract.RegionAdd) { m.NoCanary, m.Canary, m.CanaryOffset = true, 0, 0 })
				regionTaken(t, e)
				word := binary.LittleEndian.Uint64(r.Bytes[r.Size-8:])
				t.Check(word == canary, "R4", "nothing to be written", "%#x where canaries are, not %#x", word, uint64(canary))
				copy(r.Bytes[r.Size-8:], r.shadow[r.Size-8:]) // what the suite had put there
				r.export = e.GetRegionReady().GetExport()
				r.intact(t, "R4", "nothing to be written")
				p := t.Path(Shape{Pages: 4, PageBytes: 4096, NoPlan: true})
				p.Dst = t.B().AddPool(4, Tensor{Region: r, Offset: 4096, PageStride: 8192, PageBytes: 4096})
				p.Plan = p.AddPlan(p.Src, p.Dst, 1, 1, &contract.Slice{Len: 4096, Count: 1})
				p.Generation = p.NewGeneration()
				p.Grant(p.Generation.Destination, p.Dst, Pages(0, 4)...)
				p.Submit(Submit{Src: Pages(0, 4), Dst: Pages(0, 4)}).Done()
			},
		},
		Case{
			ID: "region/unsealed-refused", Rule: "R12", Profile: TransferCore,
			Title: "memory that could shrink under the plugin is refused",
			Script: `
> RegionAdds of memfds without seals, without SHRINK, without GROW, without SEAL
< RegionFailed of each
= nothing was written; good memory is taken afterwards`,
			Run: func(t *T) {
				const shrink, grow, seal = unix.F_SEAL_SHRINK, unix.F_SEAL_GROW, unix.F_SEAL_SEAL
				for _, seals := range []int{0, grow | seal, shrink | seal, shrink | grow} {
					r := t.B().newMemory(8192, seals)
					regionRefused(t, t.B().OfferRegion(r, nil), fmt.Sprintf("a memfd with seals %#x", seals))
					r.intact(t, "R12", "nothing to be written")
				}
				t.B().AddRegion(4096)
			},
		},
		Case{
			ID: "region/not-a-memfd-refused", Rule: "R12", Profile: TransferCore,
			Title: "memory that is a file on disk, or no file at all, is refused",
			Script: `
> RegionAdds whose descriptor is a file of a file system, a pipe
< RegionFailed of each; the plugin lives`,
			Run: func(t *T) {
				file, err := os.CreateTemp("", "node")
				if err != nil {
					t.broke("scratch file: %v", err)
				}
				defer os.Remove(file.Name())
				defer file.Close()
				if err := file.Truncate(16384); err != nil {
					t.broke("scratch file: %v", err)
				}
				read, write, err := os.Pipe()
				if err != nil {
					t.broke("pipe: %v", err)
				}
				defer read.Close()
				defer write.Close()
				for i, fd := range []uintptr{file.Fd(), write.Fd()} {
					r := t.B().NewMemory(8192)
					unix.Close(r.mem)
					if r.mem, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0); err != nil {
						t.broke("duplicate descriptor: %v", err)
					}
					regionRefused(t, t.B().OfferRegion(r, nil), []string{"a file", "a pipe"}[i])
				}
				t.B().AddRegion(4096)
			},
		},
		Case{
			ID: "region/beyond-the-file-refused", Rule: "R12", Profile: TransferCore,
			Title: "memory that is shorter than it is said to be is refused: a copy behind its end would be a fault",
			Script: `
> RegionAdds with a size of one byte more than the file, of 1 GiB more, of nearly 2^64
< RegionFailed of each; the plugin lives`,
			Run: func(t *T) {
				for _, more := range []uint64{guardBytes + 1, 1 << 30, 1<<64 - 1<<20} {
					r := t.B().NewMemory(8192)
					regionRefused(t, t.B().OfferRegion(r, func(m *contract.RegionAdd) { m.Size += more }), fmt.Sprintf("a size of %d bytes more than there are", more))
					r.intact(t, "R12", "nothing to be written")
				}
				t.B().AddRegion(4096)
			},
		},
		Case{
			ID: "region/canary-outside-refused", Rule: "R12", Profile: TransferCore,
			Title: "a canary that does not lie in the region is refused",
			Script: `
> RegionAdds with the canary at the last 7 bytes, at nearly 2^64
< RegionFailed(CAUSE_PROTOCOL) of each; the plugin lives`,
			Run: func(t *T) {
				for _, at := range []uint64{8192 - 7, 1<<64 - 4} {
					r := t.B().NewMemory(8192)
					regionRefused(t, t.B().OfferRegion(r, func(m *contract.RegionAdd) { m.CanaryOffset = at }), fmt.Sprintf("a canary at %d of 8192", at), contract.Cause_CAUSE_PROTOCOL)
					r.intact(t, "R12", "nothing to be written")
				}
			},
		},
		Case{
			ID: "region/unknown-kind-refused", Rule: "R12", Profile: TransferCore,
			Title: "memory of kind 0, or of a kind that this version does not know, is refused",
			Script: `
> RegionAdds of kind 0 and of kind 99
< RegionFailed(CAUSE_PROTOCOL) of each; the plugin lives`,
			Run: func(t *T) {
				for _, kind := range []contract.MemoryKind{0, 99} {
					r := t.B().NewMemory(8192)
					regionRefused(t, t.B().OfferRegion(r, func(m *contract.RegionAdd) { m.Kind = kind }), fmt.Sprintf("kind %d", kind), contract.Cause_CAUSE_PROTOCOL)
				}
				t.B().AddRegion(4096)
			},
		},
		Case{
			ID: "region/cuda-refused", Rule: "R12", Profile: TransferCore,
			Title: "a memory kind that the plugin does not declare is refused by name",
			Script: `
> RegionAdds of cuda-ipc and cuda-vmm memory, unless the plugin declares them
< RegionFailed(CAUSE_UNSUPPORTED) of each; the plugin lives`,
			Run: func(t *T) {
				asked := 0
				for _, kind := range []contract.MemoryKind{contract.MemoryKind_MEMORY_KIND_CUDA_IPC, contract.MemoryKind_MEMORY_KIND_CUDA_VMM} {
					if t.takes(kind) {
						continue
					}
					asked++
					r := t.B().NewMemory(8192)
					e := t.B().OfferRegion(r, func(m *contract.RegionAdd) { m.Kind, m.Handle = kind, make([]byte, 64) })
					regionRefused(t, e, kind.String(), contract.Cause_CAUSE_UNSUPPORTED)
				}
				if asked == 0 {
					t.Unsupported("the plugin declares both kinds of CUDA memory")
				}
				t.B().AddRegion(4096)
			},
		},
		Case{
			ID: "region/removed-is-unmapped", Rule: "R4", Profile: TransferCore,
			Title: "at RegionRemoved the memory is unmapped and the lease is given back",
			Script: `
> RegionAdd, RegionRemove; 8 times
< RegionReady, RegionRemoved
= the moment that RegionRemoved is read, the lease has ended and the process maps nothing of the region`,
			Run: func(t *T) {
				for i := range 8 {
					r := t.B().AddRegion(uint64(4096 + i*100_000))
					t.B().RemoveRegion(r)
					t.Check(r.LeaseEnded(), "R4", "the lease to have ended when RegionRemoved comes", "it is held")
					bad := t.held([]*Region{r})
					t.Check(bad == "", "R4", "no mapping when RegionRemoved comes", "%s", bad)
				}
			},
		},
		Case{
			ID: "region/either-order", Rule: "R12", Profile: TransferCore,
			Title: "descriptors and RegionAdd may come in either order, those of several regions mixed",
			Script: `
> RegionAdds of 4 regions; Stats; then their descriptors, last region first
< RegionReady of each
> descriptors of 4 regions; Stats; then their RegionAdds, last region first
< RegionReady of each
= every canary is answered in its own region`,
			Run: func(t *T) {
				n := t.B()
				for _, framesFirst := range []bool{true, false} {
					var regions []*Region
					for i := range 4 {
						r := n.NewMemory(uint64(4096 * (i + 1)))
						r.ID = n.NewID()
						binary.LittleEndian.PutUint64(r.Bytes[r.Size-8:], canary)
						regions = append(regions, r)
					}
					frames := func(r *Region) {
						n.Send(&contract.HostEvent{Event: &contract.HostEvent_RegionAdd{RegionAdd: &contract.RegionAdd{
							Region: r.ID, Kind: contract.MemoryKind_MEMORY_KIND_HOST_SHM, Size: r.Size, CanaryOffset: r.Size - 8, Canary: canary,
						}}})
					}
					descriptors := func(r *Region) {
						if err := n.plugin.SendRegion(r.ID, r.mem, r.lease[1]); err != nil {
							t.Fail("R12", "the plugin to take descriptors on its control socket", "%v", err)
						}
						unix.Close(r.lease[1])
						r.lease[1] = -1
						r.added = true
					}
					first, then := frames, descriptors
					if !framesFirst {
						first, then = descriptors, frames
					}
					for _, r := range regions {
						first(r)
					}
					n.Stats()
					for i := range regions {
						then(regions[len(regions)-1-i])
					}
					for _, r := range regions {
						regionTaken(t, n.Until("R12", fmt.Sprintf("RegionReady of region %d", r.ID), func(e *contract.PluginEvent) bool {
							return e.GetRegionReady() != nil && e.GetRegionReady().Region == r.ID || e.GetRegionFailed() != nil && e.GetRegionFailed().Region == r.ID
						}))
						got := binary.LittleEndian.Uint64(r.Bytes[r.Size-8:])
						t.Check(got == ^uint64(canary), "R4", "the complement of the canary in every region", "%#x in region %d", got, r.ID)
						copy(r.Bytes[r.Size-8:], r.shadow[r.Size-8:])
					}
				}
			},
		},
		Case{
			ID: "region/several-a-pool", Rule: "R1", Profile: TransferCore,
			Title: "one op writes a pool whose layers lie in several regions",
			Script: `
> a pool of 4 layers, each in a region of its own, at both ends
> Submit of all pages
< Accepted, Progress…, Done
= every page of every layer is there`,
			Run: func(t *T) {
				const pages, size, layers = 8, 4096, 4
				p := t.Connect(t.A(), t.B(), 0)
				tensors := func(n *Node) (list []Tensor) {
					for l := range uint32(layers) {
						list = append(list, Tensor{Region: n.AddRegion(pages*size + 64), PageStride: size, PageBytes: size, Layer: l})
					}
					return list
				}
				p.Src, p.Dst = t.A().AddPool(pages, tensors(t.A())...), t.B().AddPool(pages, tensors(t.B())...)
				var slices []*contract.Slice
				for l := range uint32(layers) {
					slices = append(slices, &contract.Slice{SrcTensor: l, DstTensor: l, Len: size, Count: 1})
				}
				p.Plan = p.AddPlan(p.Src, p.Dst, 1, 1, slices...)
				p.Grant(p.Generation.Destination, p.Dst, Pages(0, pages)...)
				p.Submit(Submit{Src: Pages(0, pages), Dst: Pages(0, pages)}).Done()
			},
		},
	)
}

// takes tells whether the plugin declares a memory kind.
func (t *T) takes(kind contract.MemoryKind) bool {
	return slices.Contains(t.A().Hello().GetMemoryKinds(), kind)
}

func regionTaken(t *T, e *contract.PluginEvent) {
	t.Check(e.GetRegionReady() != nil, "R12", "RegionReady", "%s", Describe(e))
}

// regionRefused fails the case unless memory was refused, by one of causes if any are given.
func regionRefused(t *T, e *contract.PluginEvent, what string, causes ...contract.Cause) {
	f := e.GetRegionFailed()
	t.Check(f != nil, "R12", "RegionFailed of "+what, "%s", Describe(e))
	t.Check(len(causes) == 0 || slices.Contains(causes, f.Cause), "R12", fmt.Sprintf("RegionFailed(%v) of %s", causes, what), "%s", Describe(e))
}
