package conformance

import (
	"context"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	goplugin "github.com/hashicorp/go-plugin"
	"google.golang.org/grpc"

	"github.com/terminus-kv/terminus/internal/pluginhost"
	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

// doorEnv makes this test binary a plugin that does not get through the door, in one of its ways.
const doorEnv = "TEST_DOOR"

func init() {
	switch os.Getenv(doorEnv) {
	case "":
		return
	case "pollute":
		fmt.Println("Welcome to my plugin!")
		time.Sleep(time.Minute)
	case "mute":
		time.Sleep(time.Minute)
	case "exit":
		fmt.Fprintln(os.Stderr, "cannot find libfrobnicator.so.3")
		os.Exit(7)
	case "stopped-talking": // the line, and then no answer to the handshake
		doorServe(func(context.Context) (*contract.HandshakeResponse, error) {
			time.Sleep(time.Minute)
			return nil, nil
		})
	case "other-version":
		doorServe(func(context.Context) (*contract.HandshakeResponse, error) {
			return &contract.HandshakeResponse{Error: "this plugin speaks contract version 9; upgrade the engine"}, nil
		})
	case "wrong-version":
		doorServe(func(context.Context) (*contract.HandshakeResponse, error) {
			return &contract.HandshakeResponse{Version: 9, Name: "door", Kinds: []contract.Kind{contract.Kind_KIND_TRANSFER}}, nil
		})
	}
	os.Exit(0)
}

type doorPlugin struct {
	contract.UnimplementedPluginServer
	answer func(context.Context) (*contract.HandshakeResponse, error)
}

func (p doorPlugin) Handshake(ctx context.Context, _ *contract.HandshakeRequest) (*contract.HandshakeResponse, error) {
	return p.answer(ctx)
}

func doorServe(answer func(context.Context) (*contract.HandshakeResponse, error)) {
	goplugin.Serve(&goplugin.ServeConfig{
		HandshakeConfig: sdk.HandshakeConfig,
		Plugins:         goplugin.PluginSet{sdk.PluginName: &sdk.GRPCPlugin{Service: doorPlugin{answer: answer}}},
		Logger:          hclog.NewNullLogger(),
		GRPCServer:      func(opts []grpc.ServerOption) *grpc.Server { return grpc.NewServer(opts...) },
	})
}

// TestNotReady starts what cannot be a plugin: each in bounded time ErrNotReady with one line that says why.
func TestNotReady(t *testing.T) {
	t.Parallel()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	file := func(name string, mode os.FileMode, content []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, content, mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	door := func(mode string) Carrier {
		return FromSpec("exec:"+mode, pluginhost.Spec{Name: "under-test", Exec: self, Env: map[string]string{doorEnv: mode}})
	}
	for _, c := range []struct {
		name    string
		carrier Carrier
		want    []string // in the error
		quick   bool     // does not wait for HandshakeTimeout
	}{
		{"no-file", Exec(filepath.Join(dir, "nothing")), []string{"nothing", "no such file"}, true},
		{"not-in-path", Exec("no-such-plugin-anywhere"), []string{"no-such-plugin-anywhere", "PATH"}, true},
		{"directory", Exec(dir), []string{dir, "not an executable file"}, true},
		{"not-executable", Exec(file("plain", 0o644, []byte("text"))), []string{"plain", "not an executable file"}, true},
		{"script", Exec(file("script", 0o755, []byte("#!/bin/sh\nexit 0\n"))), []string{"script", "interpreter"}, true},
		{"other-machine", Exec(file("other", 0o755, otherMachine())), []string{"other", "S390"}, true},
		{"text", Exec(file("text", 0o755, []byte("hello\n"))), []string{"text"}, true},
		{"exits", door("exit"), []string{"exit status 7", "libfrobnicator.so.3"}, true},
		{"pollutes", door("pollute"), []string{"Welcome to my plugin!", "stdout"}, true},
		{"mute", door("mute"), []string{"no handshake within 1s"}, false},
		{"stopped-talking", door("stopped-talking"), []string{"no handshake within 1s"}, false},
		{"other-version", door("other-version"), []string{"contract version 9"}, true},
		{"wrong-version", door("wrong-version"), []string{"contract version 9", "[1]"}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			cfg := Config{Carrier: c.carrier, HandshakeTimeout: time.Second}
			if c.quick {
				cfg.HandshakeTimeout = 20 * time.Second
			}
			began := time.Now()
			_, err := Run(t.Context(), cfg)
			if took := time.Since(began); took > 15*time.Second {
				t.Errorf("it took %v", took)
			}
			if !errors.Is(err, ErrNotReady) || !NotReady(err) {
				t.Fatalf("got %v, want ErrNotReady", err)
			}
			if text := err.Error(); strings.Contains(text, "\n") {
				t.Errorf("more than one line: %q", text)
			}
			for _, want := range c.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q does not say %q", err, want)
				}
			}
			t.Log(err)
		})
	}
}

// otherMachine is an ELF header of a machine that this is not.
func otherMachine() []byte {
	header := append([]byte("\x7fELF\x02\x01\x01"), make([]byte, 57)...)
	binary.LittleEndian.PutUint16(header[16:], uint16(elf.ET_EXEC))
	binary.LittleEndian.PutUint16(header[18:], uint16(elf.EM_S390))
	binary.LittleEndian.PutUint32(header[20:], 1)  // version
	binary.LittleEndian.PutUint16(header[52:], 64) // bytes of this header
	return header
}
