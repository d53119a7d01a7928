package sdk

import (
	"io"
	"sync"

	"google.golang.org/protobuf/proto"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// Pipe is the in-memory carrier: one stream whose frames are encoded and decoded as on a real one.
// The plugin's end is the Stream; HostSend and HostRecv are the host's end.
type Pipe struct {
	toPlugin chan []byte
	toHost   chan []byte
	closed   chan struct{}
	once     sync.Once
}

// NewPipe makes a pipe that holds a few frames each way.
func NewPipe() *Pipe {
	return &Pipe{toPlugin: make(chan []byte, 16), toHost: make(chan []byte, 16), closed: make(chan struct{})}
}

// Recv is the plugin's; io.EOF after Close.
func (p *Pipe) Recv() (*contract.HostFrame, error) {
	frame := &contract.HostFrame{}
	return frame, pipeRecv(p, p.toPlugin, frame)
}

// Send is the plugin's; io.EOF after Close.
func (p *Pipe) Send(frame *contract.PluginFrame) error { return pipeSend(p, p.toHost, frame) }

// HostRecv is the host's; io.EOF after Close.
func (p *Pipe) HostRecv() (*contract.PluginFrame, error) {
	frame := &contract.PluginFrame{}
	return frame, pipeRecv(p, p.toHost, frame)
}

// HostSend is the host's; io.EOF after Close.
func (p *Pipe) HostSend(frame *contract.HostFrame) error { return pipeSend(p, p.toPlugin, frame) }

// Close ends both directions.
func (p *Pipe) Close() { p.once.Do(func() { close(p.closed) }) }

func pipeSend(p *Pipe, to chan<- []byte, m proto.Message) error {
	b, err := proto.Marshal(m)
	if err != nil {
		return err
	}
	select {
	case to <- b:
		return nil
	case <-p.closed:
		return io.EOF
	}
}

func pipeRecv(p *Pipe, from <-chan []byte, m proto.Message) error {
	select {
	case b := <-from:
		return proto.Unmarshal(b, m)
	default:
	}
	select {
	case b := <-from:
		return proto.Unmarshal(b, m)
	case <-p.closed:
		return io.EOF
	}
}
