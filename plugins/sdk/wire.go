package sdk

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	goplugin "github.com/hashicorp/go-plugin"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// What both ends of a plugin connection share.
const (
	// ContractVersion is the newest contract version that this SDK speaks.
	ContractVersion = 1
	// ControlFDEnv names the environment variable that holds the number of the plugin's end of the
	// control socketpair (AF_UNIX, SOCK_SEQPACKET).
	ControlFDEnv = "ENGINE_CTRL_FD"
	// PluginName is the go-plugin name under which the contract is dispensed.
	PluginName = "terminus"
	// MaxMessage is the gRPC message limit of both sides, both ways.
	MaxMessage = 16 << 20
	// Window is the gRPC stream and connection window of both sides.
	Window = 4 << 20
	// MaxFrame is the largest encoded frame that a sender may make.
	MaxFrame = 1 << 20
	// MaxDetail is the longest detail of an event, in bytes.
	MaxDetail = 256
	// MaxEndpoint is the longest endpoint that a backend may return from Start.
	MaxEndpoint = 64 << 10
)

// HandshakeConfig is the go-plugin handshake of engine and plugins. The cookie is no secret: it only lets a
// plugin that is started by hand say what it is.
var HandshakeConfig = goplugin.HandshakeConfig{
	ProtocolVersion:  ContractVersion,
	MagicCookieKey:   "ENGINE_PLUGIN_COOKIE",
	MagicCookieValue: "every-request-reaches-a-terminal-status",
}

// GRPCPlugin is the go-plugin glue. On the host leave Service nil and dispense PluginName: the result
// is a contract.PluginClient.
type GRPCPlugin struct {
	goplugin.NetRPCUnsupportedPlugin
	Service contract.PluginServer
}

// GRPCServer registers the contract; called by go-plugin in the plugin process.
func (p *GRPCPlugin) GRPCServer(_ *goplugin.GRPCBroker, s *grpc.Server) error {
	if p.Service == nil {
		return errors.New("sdk: GRPCPlugin without a service")
	}
	contract.RegisterPluginServer(s, p.Service)
	return nil
}

// GRPCClient returns a contract.PluginClient; called by go-plugin in the host.
func (p *GRPCPlugin) GRPCClient(_ context.Context, _ *goplugin.GRPCBroker, c *grpc.ClientConn) (any, error) {
	return contract.NewPluginClient(c), nil
}

// HostPlugins is the plugin set of the host side, for goplugin.ClientConfig.Plugins.
func HostPlugins() goplugin.PluginSet {
	return goplugin.PluginSet{PluginName: &GRPCPlugin{}}
}

// HostDialOptions are the gRPC limits and the codec of the host side, for goplugin.ClientConfig.GRPCDialOptions.
func HostDialOptions() []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxMessage), grpc.MaxCallSendMsgSize(MaxMessage),
			grpc.ForceCodecV2(newFrameCodec())),
		grpc.WithInitialWindowSize(Window),
		grpc.WithInitialConnWindowSize(Window),
	}
}

// SendRegion hands the descriptors of a region over the control socketpair; called by the host, which
// keeps its own copies. sock is the host's end.
func SendRegion(sock int, region uint64, memory, lease int) error {
	var id [8]byte
	binary.LittleEndian.PutUint64(id[:], region)
	for {
		err := unix.Sendmsg(sock, id[:], unix.UnixRights(memory, lease), nil, unix.MSG_NOSIGNAL)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("send descriptors of region %d: %w", region, err)
		}
	}
}
