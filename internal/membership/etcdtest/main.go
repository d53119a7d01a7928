// Command etcdtest is a real etcd of one member, for the tests and for `engine demo --peers etcd`. It is a
// module of its own, so that the product has only the client among its dependencies.
//
// It writes "listening ADDRESS" on standard output once clients are served, and ends when its standard
// input does.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"net/url"
	"os"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/transport"
	"go.etcd.io/etcd/server/v3/embed"
)

func main() {
	dir := flag.String("dir", "", "data directory; a member that was killed goes on with what is there")
	listen := flag.String("listen", "127.0.0.1:0", "address for clients")
	cert := flag.String("cert", "", "certificate; clients then need one that -ca has signed")
	key := flag.String("key", "", "its private key")
	ca := flag.String("ca", "", "authority of the clients' certificates")
	flag.Parse()
	if err := run(*dir, *listen, transport.TLSInfo{CertFile: *cert, KeyFile: *key, TrustedCAFile: *ca, ClientCertAuth: *ca != ""}); err != nil {
		fmt.Fprintln(os.Stderr, "etcdtest:", err)
		os.Exit(1)
	}
}

func run(dir, listen string, tls transport.TLSInfo) error {
	if dir == "" {
		return errors.New("-dir is missing")
	}
	cfg := embed.NewConfig()
	cfg.Dir = dir
	cfg.LogLevel = "error"
	cfg.ListenPeerUrls = []url.URL{{Scheme: "http", Host: "127.0.0.1:0"}} // nobody dials it: there is one member
	client := url.URL{Scheme: "http", Host: listen}
	if !tls.Empty() {
		client.Scheme, cfg.ClientTLSInfo = "https", tls
	}
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = []url.URL{client}, []url.URL{client}
	e, err := embed.StartEtcd(cfg)
	if err != nil {
		return err
	}
	defer e.Close()
	select {
	case <-e.Server.ReadyNotify():
	case err := <-e.Err():
		return err
	case <-time.After(30 * time.Second):
		return errors.New("not ready after 30s")
	}
	fmt.Println("listening", e.Clients[0].Addr())
	ended := make(chan struct{})
	go func() {
		io.Copy(io.Discard, os.Stdin)
		close(ended)
	}()
	select {
	case <-ended:
		return nil
	case err := <-e.Err():
		return err
	}
}
