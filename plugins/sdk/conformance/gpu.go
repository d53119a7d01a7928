package conformance

import (
	"cmp"
	"fmt"

	"github.com/terminus-kv/terminus/plugins/sdk/conformance/internal/cuda"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// gpu is the first GPU of this machine, for a run with a plugin that takes such memory. It is opened when the
// first case asks for it, from the runner's goroutine.
type gpu struct {
	asked   bool
	device  *cuda.Device
	devices int
	err     error                         // why there is none
	shares  map[contract.MemoryKind]error // what making memory of a kind came to
}

// lacks says why this machine cannot make memory of the kind, "" if it can.
func (g *gpu) lacks(library string, kind contract.MemoryKind) string {
	if !g.asked {
		g.asked, g.shares = true, map[contract.MemoryKind]error{}
		g.err = g.open(cmp.Or(library, cuda.Library))
	}
	if g.err != nil {
		return fmt.Sprintf("this machine has no GPU that can be used: %v", g.err)
	}
	err, known := g.shares[kind]
	if !known {
		var m *cuda.Memory
		if m, err = g.make(kind, 1); err == nil {
			err = m.Free()
		}
		g.shares[kind] = err
	}
	if err != nil {
		return fmt.Sprintf("the GPU of this machine cannot share memory of this kind: %v", err)
	}
	return ""
}

func (g *gpu) open(library string) error {
	driver, err := cuda.Open(library)
	if err != nil {
		return err
	}
	if g.devices, err = driver.Devices(); err != nil {
		return err
	}
	g.device, err = driver.Device(0)
	return err
}

func (g *gpu) make(kind contract.MemoryKind, size uint64) (*cuda.Memory, error) {
	if kind == contract.MemoryKind_MEMORY_KIND_CUDA_IPC {
		return g.device.NewIPC(size)
	}
	return g.device.NewVMM(size)
}

// close lets go of the GPU at the end of the run.
func (g *gpu) close() {
	if g.device != nil {
		_ = g.device.Close()
	}
}
