package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/terminus-kv/terminus/internal/admin"
	"github.com/terminus-kv/terminus/internal/config"
)

// engineFlags adds the flags that find the engine.
func (a *app) engineFlags(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&a.socket, "socket", "", "admin socket of the engine")
	f.StringVar(&a.node, "node", "", "node name of the engine, where several run on this machine")
	f.StringSliceVarP(&a.configs, "config", "c", nil, "configuration files of the engine")
	f.DurationVar(&a.timeout, "timeout", 10*time.Second, "longest wait for the engine")
}

// client is of the engine at adminSocket.
func (a *app) client() (*admin.Client, error) {
	socket, err := a.adminSocket()
	if err != nil {
		return nil, err
	}
	return admin.NewClient(socket), nil
}

// adminSocket finds the engine: --socket, the configuration of -c and TERMINUS_ADMIN__SOCKET, else the only
// one that answers in the runtime directory.
func (a *app) adminSocket() (string, error) {
	switch {
	case a.socket != "":
		return a.socket, nil
	case len(a.configs) > 0:
		c, err := config.Load(config.LoadOptions{Files: a.configs, Env: a.environ, Elsewhere: true})
		if err != nil {
			return "", err
		}
		return c.Admin.Socket, nil
	case a.getenv("TERMINUS_ADMIN__SOCKET") != "":
		return a.getenv("TERMINUS_ADMIN__SOCKET"), nil
	}
	dir := a.getenv("TERMINUS_RUNTIME_DIR")
	if dir == "" {
		dir = config.DefaultRuntimeDir(a.environ)
	}
	if a.node != "" {
		return filepath.Join(dir, a.node, "admin.sock"), nil
	}
	found, err := answering(dir)
	switch {
	case err != nil:
		return "", err
	case len(found) == 0:
		return "", fmt.Errorf("no engine answers in %s; start one with `engine run`, or name its socket with --socket", dir)
	case len(found) > 1:
		return "", fmt.Errorf("several engines answer in %s; choose with --node %s", dir, strings.Join(found, " or --node "))
	}
	return filepath.Join(dir, found[0], "admin.sock"), nil
}

// answering lists the nodes whose admin socket takes a connection.
func answering(dir string) ([]string, error) {
	sockets, err := filepath.Glob(filepath.Join(dir, "*", "admin.sock"))
	if err != nil {
		return nil, fmt.Errorf("look for engines in %s: %w", dir, err)
	}
	var nodes []string
	for _, s := range sockets {
		if c, err := net.DialTimeout("unix", s, time.Second); err == nil {
			c.Close()
			nodes = append(nodes, filepath.Base(filepath.Dir(s)))
		}
	}
	return nodes, nil
}

// ask runs a call against the engine within --timeout.
func ask[T any](cmd *cobra.Command, a *app, call func(context.Context, *admin.Client) (T, error)) (T, error) {
	var none T
	c, err := a.client()
	if err != nil {
		return none, err
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(cmd.Context(), a.timeout)
	defer cancel()
	v, err := call(ctx, c)
	if errors.Is(err, context.DeadlineExceeded) {
		return none, fmt.Errorf("no answer within %s (--timeout): %w", a.timeout, err)
	}
	return v, err
}
