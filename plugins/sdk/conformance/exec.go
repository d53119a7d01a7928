package conformance

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/terminus-kv/terminus/internal/pluginhost"
	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// Exec is the carrier of a plugin program: a path, or a name that is looked up beside this binary and in
// PATH.
func Exec(path string, args ...string) Carrier {
	abs := path
	if filepath.Base(path) != path {
		if a, err := filepath.Abs(path); err == nil {
			abs = a
		}
	}
	return FromSpec("exec:"+path, pluginhost.Spec{Name: "under-test", Exec: abs, Args: args})
}

// Script is the carrier of a plugin that an interpreter runs: Script("python3", "backend.py").
func Script(interpreter, file string, args ...string) Carrier {
	if a, err := filepath.Abs(file); err == nil {
		file = a
	}
	return FromSpec("exec:"+interpreter+" -- "+file, pluginhost.Spec{Name: "under-test", Exec: interpreter, Script: file, Args: args})
}

// Wasm is the carrier of a WASM guest, hosted by an engine: its program, as Exec takes one.
func Wasm(engine, module string) Carrier {
	if a, err := filepath.Abs(module); err == nil {
		module = a
	}
	return FromSpec("wasm:"+module, pluginhost.Spec{Name: "under-test", Exec: engine, Wasm: module})
}

// FromSpec is the carrier of a plugin as an engine's configuration describes it. ref is what people call
// it: the PLUGIN argument of `engine conformance run`.
func FromSpec(ref string, spec pluginhost.Spec) Carrier { return &execCarrier{ref: ref, spec: spec} }

// lingerBound is how long a plugin that was lost may take to exit by itself before it is killed.
const lingerBound = 10 * time.Second

// Command runs the program by hand.
func (c *execCarrier) Command(ctx context.Context, args ...string) (*exec.Cmd, error) {
	return c.spec.Command(ctx, args...)
}

var _ Commander = (*execCarrier)(nil)

type execCarrier struct {
	ref  string
	spec pluginhost.Spec
}

func (c *execCarrier) String() string { return c.ref }

func (c *execCarrier) digest() (file, sum string, err error) { return c.spec.Digest() }

// hostFeatures are what the suite plays: a host that knows every feature.
var hostFeatures = []string{sdk.FeatureReceiverChecked, sdk.FeatureByteProgress, sdk.FeatureFencePeer, sdk.FeatureStrided, sdk.FeatureLayerRange, sdk.FeatureRepage}

func (c *execCarrier) Launch(ctx context.Context, id Identity, sink func(Arrival)) (Plugin, error) {
	dir, err := os.MkdirTemp("", "node") // short: the path of a unix socket ends at 108 bytes
	if err != nil {
		return nil, err
	}
	p := &execPlugin{dir: dir, reaped: make(chan struct{}), shared: entriesOf(sharedDir)}
	spec := c.spec
	// A program gets a $TMPDIR of its own, so that what it leaves there is known for its own. (The host of a WASM
	// module may keep compiled modules in the common one.)
	if spec.Env["TMPDIR"] == "" && spec.Wasm == "" {
		p.temp = filepath.Join(dir, "tmp")
		if err := os.Mkdir(p.temp, 0o700); err != nil {
			os.RemoveAll(dir)
			return nil, err
		}
		spec.Env = maps.Clone(spec.Env)
		if spec.Env == nil {
			spec.Env = map[string]string{}
		}
		spec.Env["TMPDIR"] = p.temp
	}
	p.host, err = pluginhost.New(pluginhost.Config{
		Node: id.Node, Incarnation: id.Incarnation, HostID: id.HostID, EngineVersion: hostVersion, Features: hostFeatures,
		RuntimeDir: dir, Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
		Once: true, FirstEpoch: id.Epoch, HandshakeTimeout: id.HandshakeTimeout, Asking: id.Asking, Answered: id.Answered,
		Linger: lingerBound,
		Spawned: func(pid int) {
			setMark(pid)
			p.spawned.Store(int64(pid))
		},
		BeatTimeout: time.Hour, // a case that is about beats counts them
		Tap: func(_ uint32, control bool, frame *contract.PluginFrame) {
			sink(Arrival{Frame: frame, Control: control})
		},
		Sink: func(e pluginhost.Event) {
			switch e.Kind {
			case pluginhost.Lost:
				sink(Arrival{Lost: e.Err})
			case pluginhost.Reaped:
				sink(Arrival{Reaped: true})
				close(p.reaped)
			}
		},
	})
	if err != nil {
		os.RemoveAll(dir)
		return nil, err
	}
	p.plugin, err = p.host.Start(spec)
	if err == nil {
		err = p.plugin.Ready(ctx)
	}
	if err != nil {
		// The reason of the spawn says more than that there is none.
		if last := p.lastError(); last != nil {
			err = last
		}
		p.abandon()
		return nil, err
	}
	st := p.plugin.Status()
	p.epoch, p.hello, p.pid, p.runtime = st.Epoch, st.Handshake, st.PID, st.RuntimeDir
	return p, nil
}

type execPlugin struct {
	dir     string
	runtime string
	temp    string   // its $TMPDIR, "" if that is not its own
	shared  []string // names in /dev/shm before it was started
	host    *pluginhost.Host
	plugin  *pluginhost.Plugin
	epoch   uint32
	pid     int
	spawned atomic.Int64 // pid, known before the plugin is ready
	hello   *contract.HandshakeResponse
	reaped  chan struct{}

	closing sync.Once
	over    bool     // Close has ended; what follows is its:
	closed  error    // the result
	orphans bool     // see Orphans
	left    []string // see Leftovers
}

func (p *execPlugin) lastError() error {
	if p.plugin == nil {
		return nil
	}
	return p.plugin.Status().LastError
}

func (p *execPlugin) abandon() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = p.host.Close(ctx)
	p.clear()
}

// clear takes away what is left of a plugin that is gone.
func (p *execPlugin) clear() {
	if pid := p.spawned.Load(); pid != 0 {
		killStrays(int(pid))
	}
	os.RemoveAll(p.dir)
}

func (p *execPlugin) Hello() *contract.HandshakeResponse { return p.hello }
func (p *execPlugin) Epoch() uint32                      { return p.epoch }
func (p *execPlugin) Process() ProcessControl            { return p }

func (p *execPlugin) Send(events ...*contract.HostEvent) error {
	return p.plugin.Send(p.epoch, events...)
}

func (p *execPlugin) SendControl(events ...*contract.HostEvent) error {
	return p.plugin.SendControl(p.epoch, events...)
}

func (p *execPlugin) SendRegion(region uint64, memory, lease int) error {
	return p.plugin.SendRegion(p.epoch, region, memory, lease)
}

func (p *execPlugin) Close(ctx context.Context) error {
	p.closing.Do(func() {
		held := sharedOf(group(p.pid))
		p.closed = p.plugin.Stop(ctx)
		if err := p.host.Close(ctx); p.closed == nil {
			p.closed = err
		}
		p.orphans = p.plugin.Status().Orphans || ctx.Err() == nil && p.outlived()
		p.left = append(p.plugin.Status().Leftovers, p.strewn(held)...)
		p.over = true
		p.clear()
	})
	return p.closed
}

// Orphans may be asked before Close of a plugin that has ended by itself.
func (p *execPlugin) Orphans() bool {
	if p.over {
		return p.orphans
	}
	return p.plugin.Status().Orphans || p.outlived()
}

// outlived tells whether descendants live on, once the plugin is gone, that the host does not know of. They get the
// time to follow it that the host gives those that it knows of.
func (p *execPlugin) outlived() bool {
	deadline := time.Now().Add(time.Second)
	for pause := time.Millisecond; len(descendants(p.pid)) > 0; pause = min(2*pause, 50*time.Millisecond) {
		if time.Now().After(deadline) {
			return true
		}
		time.Sleep(pause)
	}
	return false
}

// strewn names what the plugin, which is gone, left where its host does not clean up. held are the files of /dev/shm
// that it had at last.
func (p *execPlugin) strewn(held []string) (left []string) {
	if p.temp != "" {
		for _, name := range entriesOf(p.temp) {
			left = append(left, "$TMPDIR/"+name)
		}
	}
	for _, name := range held {
		top, _, _ := strings.Cut(name, "/")
		if _, err := os.Lstat(sharedDir + name); err == nil && !slices.Contains(p.shared, top) {
			left = append(left, sharedDir+name)
		}
	}
	return left
}

func (p *execPlugin) PID() int            { return p.pid }
func (p *execPlugin) Kill() error         { return p.Signal(unix.SIGKILL) }
func (p *execPlugin) Stop() error         { return p.Signal(unix.SIGSTOP) }
func (p *execPlugin) Continue() error     { return p.Signal(unix.SIGCONT) }
func (p *execPlugin) EndSession() error   { return p.plugin.EndSession(p.epoch) }
func (p *execPlugin) HangUp() error       { return p.plugin.HangUp(p.epoch) }
func (p *execPlugin) Stdout() string      { return p.plugin.Status().Stdout }
func (p *execPlugin) Stderr() string      { return p.plugin.Status().Stderr }
func (p *execPlugin) Written() uint64     { return p.plugin.Status().Written }
func (p *execPlugin) RuntimeDir() string  { return p.runtime }
func (p *execPlugin) TempDir() string     { return p.temp }
func (p *execPlugin) Leftovers() []string { return p.left }
func (p *execPlugin) Exit() string        { return p.plugin.Status().Exit }

func (p *execPlugin) Signal(sig unix.Signal) error {
	if p.plugin.Status().PID != p.pid {
		return fmt.Errorf("signal %s: the process is gone", unix.SignalName(sig))
	}
	return unix.Kill(p.pid, sig)
}
