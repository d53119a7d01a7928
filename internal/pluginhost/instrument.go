package pluginhost

import (
	"context"
	"fmt"
	"os/exec"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// CheckFrame returns what makes a frame of a plugin a violation that ends its epoch, or nil. size is its
// encoded size in bytes; control tells the Control stream from the Session. The host checks every frame
// with it; the conformance suite does for plugins that it runs without a host.
func CheckFrame(f *contract.PluginFrame, size int, control bool) *contract.Fault {
	return checkFrame(f, size, control)
}

// HangUp ends the host's direction of the control socketpair: what the plugin sees when its host dies.
// Nothing else of the epoch is touched, so a plugin that stays is seen to stay. For the conformance
// suite.
func (p *Plugin) HangUp(epoch uint32) error {
	e, err := p.live(epoch)
	if err != nil {
		return err
	}
	raw, err := e.ctrl.conn.SyscallConn()
	if err != nil {
		return p.named(fmt.Errorf("hang up the control socket: %w", err))
	}
	var shut error
	if err := raw.Control(func(fd uintptr) { shut = unix.Shutdown(int(fd), unix.SHUT_WR) }); err != nil {
		shut = err
	}
	if shut != nil {
		return p.named(fmt.Errorf("hang up the control socket: %w", shut))
	}
	return nil
}

// EndSession ends the Session stream and nothing else: what the plugin sees when its host closes it. The
// epoch is lost by it. For the conformance suite.
func (p *Plugin) EndSession(epoch uint32) error {
	e, err := p.live(epoch)
	if err != nil {
		return err
	}
	e.endSession()
	return nil
}

// Command is the program of the spec as a command of its own, with further arguments: `PLUGIN info`, or
// the plugin as somebody starts it by hand. It has the environment that a plugin inherits, without the
// variables that the host adds.
func (s *Spec) Command(ctx context.Context, args ...string) (*exec.Cmd, error) {
	if err := s.check(); err != nil {
		return nil, err
	}
	prog, err := s.open()
	if err != nil {
		return nil, err
	}
	prog.close()
	path, err := s.resolve()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, path, append(prog.argv[1:], args...)...)
	cmd.Env = s.environment()
	return cmd, nil
}
