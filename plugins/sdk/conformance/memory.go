package conformance

import (
	"context"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/terminus-kv/terminus/internal/pluginhost"
	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// Memory is the carrier of a backend that runs in this process: each launch makes a new one. Fast, and
// good for a debugger; what only a process can show (crash, lease, leftovers) is Unsupported.
func Memory(newBackend func() sdk.Backend) Carrier { return memoryCarrier{newBackend} }

type memoryCarrier struct{ newBackend func() sdk.Backend }

func (memoryCarrier) String() string { return "memory" }

// InProcess marks carriers whose plugins are no processes.
func (memoryCarrier) InProcess() bool { return true }

func (c memoryCarrier) Launch(ctx context.Context, id Identity, sink func(Arrival)) (Plugin, error) {
	dir, err := os.MkdirTemp("", "node")
	if err != nil {
		return nil, err
	}
	p := &memoryPlugin{
		dir: dir, epoch: id.Epoch, sink: sink,
		own: sdk.NewSession(c.newBackend()), session: sdk.NewPipe(), control: sdk.NewPipe(),
	}
	request := &contract.HandshakeRequest{
		Versions: []uint32{sdk.ContractVersion}, EngineVersion: hostVersion, Node: id.Node, Incarnation: id.Incarnation,
		Epoch: id.Epoch, RuntimeDir: dir, HostId: id.HostID, Features: hostFeatures,
	}
	if id.Asking != nil {
		id.Asking(request)
	}
	p.hello, err = p.own.Handshake(ctx, request)
	if err == nil && id.Answered != nil {
		id.Answered(p.hello)
	}
	if err == nil && p.hello.Error != "" {
		err = fmt.Errorf("%w: %s", pluginhost.ErrRefused, p.hello.Error)
	}
	if err != nil {
		_ = p.own.Close()
		os.RemoveAll(dir)
		return nil, err
	}
	p.work.Go(func() { p.lose(p.own.ServeSession(p.session), "the plugin ended its session") })
	p.work.Go(func() { p.lose(p.own.ServeControl(p.control), "the plugin ended its control stream") })
	p.work.Go(func() { p.read(p.session, false) })
	p.work.Go(func() { p.read(p.control, true) })
	return p, nil
}

type memoryPlugin struct {
	dir     string
	epoch   uint32
	hello   *contract.HandshakeResponse
	own     *sdk.Session
	session *sdk.Pipe
	control *sdk.Pipe
	sink    func(Arrival)
	work    sync.WaitGroup

	lost   sync.Once
	closed sync.Once
}

func (p *memoryPlugin) read(pipe *sdk.Pipe, control bool) {
	for {
		frame, err := pipe.HostRecv()
		if err != nil {
			return
		}
		p.sink(Arrival{Frame: frame, Control: control})
		if f := pluginhost.CheckFrame(frame, proto.Size(frame), control); f != nil {
			p.lose(fmt.Errorf("%w: %s of %s: %s", pluginhost.ErrViolation, f.Rule, f.Field, f.Detail), "")
			return
		}
		for _, e := range frame.Events {
			if f := e.GetFault(); f != nil {
				p.lose(fmt.Errorf("the plugin gave up: %s %s", f.Field, f.Detail), "")
				return
			}
		}
	}
}

func (p *memoryPlugin) lose(err error, otherwise string) {
	p.lost.Do(func() {
		if err == nil {
			err = fmt.Errorf("%s", otherwise)
		}
		p.sink(Arrival{Lost: err})
		p.session.Close()
		p.control.Close()
	})
}

func (p *memoryPlugin) Hello() *contract.HandshakeResponse { return p.hello }
func (p *memoryPlugin) Epoch() uint32                      { return p.epoch }
func (p *memoryPlugin) Process() ProcessControl            { return nil }

func (p *memoryPlugin) Send(events ...*contract.HostEvent) error {
	return p.session.HostSend(&contract.HostFrame{Events: events})
}

func (p *memoryPlugin) SendControl(events ...*contract.HostEvent) error {
	return p.control.HostSend(&contract.HostFrame{Events: events})
}

// SendRegion hands over copies of the descriptors: the session owns what it gets. The SDK drops those of memory with a
// handle, which it refuses.
func (p *memoryPlugin) SendRegion(region uint64, memory, lease int) error {
	if memory < 0 {
		return nil
	}
	m, err := unix.FcntlInt(uintptr(memory), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("duplicate memory descriptor: %w", err)
	}
	l, err := unix.FcntlInt(uintptr(lease), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		unix.Close(m)
		return fmt.Errorf("duplicate lease: %w", err)
	}
	p.own.Descriptors(region, m, l)
	return nil
}

func (p *memoryPlugin) Close(context.Context) error {
	var err error
	p.closed.Do(func() {
		p.lose(pluginhost.ErrStopped, "")
		err = p.own.Close()
		p.work.Wait()
		p.sink(Arrival{Reaped: true})
		os.RemoveAll(p.dir)
	})
	return err
}
