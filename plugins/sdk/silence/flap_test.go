package silence

import (
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// inNewNetwork runs f on a thread in a network namespace of its own, which ends with f but for what f has opened.
func inNewNetwork(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with this goroutine
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- err
			return
		}
		done <- f()
	}()
	return <-done
}

func run(command string) error {
	words := strings.Fields(command)
	if text, err := exec.Command(words[0], words[1:]...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", command, err, text)
	}
	return nil
}

// lacks says what this machine lacks for two hosts with a link in between, if anything.
func lacks() string {
	if os.Geteuid() != 0 {
		return "needs root, to make network namespaces"
	}
	for _, tool := range []string{"ip", "tc"} {
		if _, err := exec.LookPath(tool); err != nil {
			return tool + " is not there; on Debian install it with: apt-get install iproute2"
		}
	}
	return ""
}

// TestFlapIsNotSilence: the link of this host went down for 300 ms, and a connection that had lived through the same
// before was over. With TCP_USER_TIMEOUT Linux had kept the time of the first flap, for what was written after it left
// before the next probe was due, and at the second one took all the time between for silence.
func TestFlapIsNotSilence(t *testing.T) {
	t.Parallel()
	if lacking := lacks(); lacking != "" {
		if os.Getenv("CI") != "" {
			t.Fatal(lacking)
		}
		t.Skip(lacking)
	}
	const quiet = time.Second
	var written int64
	heard := make(chan int64, 1)
	err := inNewNetwork(func() error { // the other host
		ns, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			return err
		}
		defer ns.Close()
		l := make(chan net.Listener, 1)
		return inNewNetwork(func() error { // this one
			for _, c := range []string{
				fmt.Sprintf("ip link add v0 type veth peer name v1 netns /proc/%d/fd/%d", os.Getpid(), ns.Fd()),
				"ip addr add 10.78.0.1/24 dev v0", "ip link set v0 up",
			} {
				if err := run(c); err != nil {
					return err
				}
			}
			far := func(f func() error) error { // on a thread of the other host
				done := make(chan error)
				go func() {
					runtime.LockOSThread()
					if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
						done <- err
						return
					}
					done <- f()
				}()
				return <-done
			}
			if err := far(func() error {
				for _, c := range []string{"ip addr add 10.78.0.2/24 dev v1", "ip link set v1 up"} {
					if err := run(c); err != nil {
						return err
					}
				}
				ln, err := net.Listen("tcp", "10.78.0.2:0")
				l <- ln
				return err
			}); err != nil {
				return err
			}
			ln := <-l
			defer ln.Close()
			var (
				here  *net.TCPConn
				there net.Conn
				err   error
			)
			for range 2 { // the first comes up slowly, and what waits on it is sent again late
				if here, err = net.DialTCP("tcp", nil, ln.Addr().(*net.TCPAddr)); err != nil {
					return err
				}
				defer here.Close()
				if there, err = ln.Accept(); err != nil {
					return err
				}
				defer there.Close()
			}
			go func() {
				n, _ := io.Copy(io.Discard, there) // until it is closed
				heard <- n
			}()
			if err := Bound(here, quiet); err != nil {
				return err
			}
			write := func() {
				if err == nil {
					_, err = here.Write([]byte("x"))
					written++
				}
			}
			link := func(up bool) { // as the kernel does with what a link that is down cannot take
				qdisc := "tc qdisc replace dev v0 root pfifo limit 0"
				if up {
					qdisc = "tc qdisc del dev v0 root"
				}
				if err == nil {
					err = run(qdisc)
				}
			}
			write()
			time.Sleep(100 * time.Millisecond)
			for range 2 {
				link(false)
				write() // the kernel tries again after 200 ms, and then after 500 ms
				time.Sleep(300 * time.Millisecond)
				link(true)
				write() // and this takes it along
				time.Sleep(quiet)
			}
			return err
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	if n := <-heard; n != written {
		t.Errorf("%d bytes arrived, %d were written", n, written)
	}
}
