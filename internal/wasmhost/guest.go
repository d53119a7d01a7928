package wasmhost

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
	"github.com/tetratelabs/wazero/sys"
	"google.golang.org/protobuf/proto"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// Methods of engine_v1_call.
const (
	methodDescribe = 1
	methodStart    = 2
	methodFrame    = 3
)

// maxReply is the largest CallResult that is read.
const maxReply = 1 << 20

// guest is one instance of a module. It is not safe for concurrent use: one goroutine at a time calls it.
type guest struct {
	name    string // of the file, for errors
	limits  Limits
	runtime wazero.Runtime
	module  api.Module
	alloc   api.Function
	free    api.Function
	call    api.Function
	pump    api.Function
	began   time.Time
	output  output
	sink    sink // who takes what the guest says; set before the first call

	copied atomic.Uint64 // bytes that host functions moved

	buffer     uint32 // in the guest's memory, from engine_v1_alloc
	bufferSize uint32
	stack      [4]uint64

	// Of the running call.
	ctx       context.Context
	cancel    context.CancelFunc
	violation error // found inside a host function; the call is cut short
	frames    int
	bytes     int
}

// sink is the part of the host that a running guest can reach.
type sink interface {
	// take carries out one event of the guest. An error is a violation.
	take(e *contract.PluginEvent) error
	// own returns memory of this engine's workers, peer the n bytes at off of a peer's that are to be written:
	// the bytes, or the code why not.
	own(region uint64) ([]byte, code)
	peer(peer uint32, region, off, n uint64) ([]byte, code)
	logf(level contract.Log_Level, format string, args ...any)
}

// invoke calls an export within the budget of one call and puts the results into g.stack. what names the
// call for the operator.
func (g *guest) invoke(ctx context.Context, f api.Function, what string, detail func() string, params ...uint64) error {
	g.violation, g.frames, g.bytes = nil, 0, 0
	g.ctx, g.cancel = context.WithTimeout(ctx, g.limits.Call)
	copy(g.stack[:], params)
	err := f.CallWithStack(g.ctx, g.stack[:])
	g.cancel()
	if g.violation != nil {
		err = g.violation
	} else if err != nil {
		if ctx.Err() != nil { // the session ends, and the guest was in the middle of something
			return context.Cause(ctx)
		}
		err = errors.New(g.why(err))
	}
	if err == nil {
		return nil
	}
	if detail != nil {
		what += " (" + detail() + ")"
	}
	return fmt.Errorf("guest %s: %s: %w", g.name, what, err)
}

// why says what ended a call, in one line.
func (g *guest) why(err error) string {
	var exit *sys.ExitError
	if errors.As(err, &exit) {
		switch exit.ExitCode() {
		case sys.ExitCodeDeadlineExceeded:
			return fmt.Sprintf("did not return within %v, the budget of one call", g.limits.Call)
		case sys.ExitCodeContextCanceled:
			return "cut short"
		}
		return fmt.Sprintf("exited with code %d%s", exit.ExitCode(), g.output.lastWords())
	}
	what := firstLine(err)
	if _, trap, ok := strings.Cut(what, "wasm error: "); ok {
		what = trap
	}
	return fmt.Sprintf("trapped: %s%s", what, g.output.lastWords())
}

func firstLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return strings.TrimSuffix(line, " (recovered by wazero)")
}

// request calls a method and returns the payload of its result.
func (g *guest) request(ctx context.Context, method uint64, what string, detail func() string, payload []byte) ([]byte, error) {
	if err := g.put(ctx, payload); err != nil {
		return nil, err
	}
	if err := g.invoke(ctx, g.call, what, detail, method, uint64(g.buffer), uint64(len(payload))); err != nil {
		return nil, err
	}
	result, err := g.result(g.stack[0])
	if err != nil {
		return nil, fmt.Errorf("guest %s: %s: %w", g.name, what, err)
	}
	if result.Code == contract.CallResult_CODE_ERROR {
		return nil, &refusal{g.name, what, result.Message}
	}
	return result.Payload, nil
}

// refusal is CODE_ERROR of a guest.
type refusal struct{ guest, what, message string }

func (r *refusal) Error() string {
	return fmt.Sprintf("guest %s: %s: refused: %s", r.guest, r.what, r.message)
}

// put copies the payload into a buffer in the guest's memory.
func (g *guest) put(ctx context.Context, payload []byte) error {
	if n := uint32(len(payload)); n > g.bufferSize || g.bufferSize == 0 {
		if g.bufferSize != 0 {
			if err := g.invoke(ctx, g.free, exportFree, nil, uint64(g.buffer), uint64(g.bufferSize)); err != nil {
				return err
			}
			g.bufferSize = 0
		}
		size := max(n+n/2, 4096)
		if err := g.invoke(ctx, g.alloc, exportAlloc, nil, uint64(size)); err != nil {
			return err
		}
		ptr := uint32(g.stack[0])
		if _, ok := g.module.Memory().Read(ptr, size); ptr == 0 || !ok {
			return fmt.Errorf("guest %s: %s returned %#x for %d bytes, which is not in its memory of %d bytes", g.name, exportAlloc, ptr, size, g.module.Memory().Size())
		}
		g.buffer, g.bufferSize = ptr, size
	}
	if !g.module.Memory().Write(g.buffer, payload) {
		return fmt.Errorf("guest %s: the memory from %s is gone", g.name, exportAlloc)
	}
	return nil
}

// result decodes what engine_v1_call returned.
func (g *guest) result(packed uint64) (*contract.CallResult, error) {
	if packed == 0 {
		return nil, errors.New("returned 0, which is no result")
	}
	ptr, n := uint32(packed>>32), uint32(packed)
	if n == 0 || n > maxReply {
		return nil, fmt.Errorf("returned a result of %d bytes; it has 1 to %d", n, maxReply)
	}
	view, ok := g.module.Memory().Read(ptr, n)
	if !ok {
		return nil, fmt.Errorf("returned a result at [%#x,+%d), outside its memory of %d bytes", ptr, n, g.module.Memory().Size())
	}
	var r contract.CallResult
	if err := proto.Unmarshal(view, &r); err != nil { // copies what it keeps
		return nil, errors.New("returned what is no CallResult")
	}
	switch r.Code {
	case contract.CallResult_CODE_OK, contract.CallResult_CODE_ERROR:
		return &r, nil
	}
	return nil, fmt.Errorf("returned a CallResult with code %d", r.Code)
}

// work pumps once and reports whether work is left.
func (g *guest) work(ctx context.Context) (more bool, err error) {
	if err := g.invoke(ctx, g.pump, exportPump, nil, uint64(g.limits.Pump.Microseconds())); err != nil {
		return false, err
	}
	switch left := int32(g.stack[0]); left {
	case 0, 1:
		return left == 1, nil
	default:
		return false, fmt.Errorf("guest %s: %s returned %d; 0 and 1 are legal", g.name, exportPump, left)
	}
}

func (g *guest) close() error {
	if g.runtime == nil {
		return nil
	}
	return g.runtime.Close(context.Background())
}
