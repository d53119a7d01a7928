package demo

import (
	"bufio"
	"fmt"
	"net"
	"path/filepath"
	"testing"
	"time"
)

// echoServer answers every line on a unix socket, and counts connections that it has lost.
func echoServer(t *testing.T) (path string, lost chan struct{}) {
	path, lost = filepath.Join(t.TempDir(), "peer.sock"), make(chan struct{}, 16)
	ln, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				for lines := bufio.NewScanner(c); lines.Scan(); {
					fmt.Fprintf(c, "%s\n", lines.Text())
				}
				lost <- struct{}{}
			}()
		}
	}()
	return path, lost
}

func ask(c net.Conn, text string) error {
	c.SetDeadline(time.Now().Add(10 * time.Second))
	fmt.Fprintf(c, "%s\n", text)
	answer, err := bufio.NewReader(c).ReadString('\n')
	if err == nil && answer != text+"\n" {
		err = fmt.Errorf("answered %q", answer)
	}
	return err
}

func TestRelayCutsBothWays(t *testing.T) {
	path, lost := echoServer(t)
	r, err := newRelay("unix:" + path)
	if err != nil {
		t.Fatal(err)
	}
	defer r.close()
	askAnew := func(text string) error {
		c, err := net.Dial("tcp", r.addr())
		if err != nil {
			return err
		}
		defer c.Close()
		return ask(c, text)
	}
	first, err := net.Dial("tcp", r.addr())
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	if err := ask(first, "one"); err != nil {
		t.Fatal(err)
	}
	if n := r.sever(); n != 2 {
		t.Errorf("%d ends were reset", n)
	}
	if err := ask(first, "two"); err == nil {
		t.Error("the connection lives on")
	}
	select {
	case <-lost:
	case <-time.After(10 * time.Second):
		t.Error("the far end is not told")
	}
	if err := askAnew("three"); err == nil {
		t.Error("a new connection gets through a cut cable")
	}
	r.mend()
	if err := askAnew("four"); err != nil {
		t.Error(err)
	}
}
