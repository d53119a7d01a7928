package netfault

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// Ports of every host.
const (
	controlPort = 7000 // between engines
	dataPort    = 7001 // between plugins
)

// A host is what makes two engines of this machine take each other for strangers: a network namespace, a mount
// namespace in which the other's files are not, and a boot id of its own.
type host struct {
	name   string
	ip     string
	mac    string
	dir    string // its files; short, for sockets are in it
	hidden string // the files of the other
	shared bool   // the boot id is that of this machine
	netns  *os.File
	far    *os.File // the other end of its cable
}

// cannot ends a test that this machine cannot run: as skipped, but CI tests everything.
func cannot(t *testing.T, why error) {
	t.Helper()
	if os.Getenv("CI") != "" {
		t.Fatal(why)
	}
	t.Skip(why)
}

// newHosts makes two hosts whose cables end in a third namespace, where the wire holds them.
func newHosts(t *testing.T) (hosts [2]*host, between *os.File) {
	t.Helper()
	lacking := unavailable
	if _, err := exec.LookPath("ip"); err != nil && lacking == nil {
		lacking = errors.New("ip is not there; on Debian install it with: apt-get install iproute2")
	}
	if lacking != nil {
		cannot(t, lacking)
	}
	dir, err := os.MkdirTemp("/tmp", "tnf-")
	must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	between, err = newNetns()
	if err != nil {
		cannot(t, err)
	}
	t.Cleanup(func() { between.Close() })
	for i, name := range [2]string{"a", "b"} {
		h := &host{
			name: name, ip: fmt.Sprintf("10.77.0.%d", i+1), mac: fmt.Sprintf("02:00:00:00:77:%02x", i+1),
			dir: filepath.Join(dir, name), hidden: filepath.Join(dir, [2]string{"b", "a"}[i]),
		}
		must(t, os.Mkdir(h.dir, 0o700))
		h.netns, err = newNetns()
		must(t, err)
		t.Cleanup(func() { h.netns.Close() })
		hosts[i] = h
	}
	for i, h := range hosts {
		other := hosts[1-i]
		// Neighbours are fixed: a black hole further away does not make a host forget the way to its router.
		must(t, h.ip4(
			fmt.Sprintf("link add eth0 address %s mtu 9000 type veth peer name %s netns /proc/%d/fd/%d", h.mac, h.name, os.Getpid(), between.Fd()),
			"link set lo up", "link set eth0 up",
			fmt.Sprintf("addr add %s/24 dev eth0", h.ip),
			fmt.Sprintf("neigh replace %s lladdr %s nud permanent dev eth0", other.ip, other.mac)))
		must(t, inNetns(between, func() error { return ip("link set dev " + h.name + " mtu 9000 up") }))
		must(t, inNetns(between, func() (err error) { h.far, err = openCable(h.name); return err }))
		t.Cleanup(func() { h.far.Close() })
	}
	return hosts, between
}

// ip4 runs ip in the host's network namespace.
func (h *host) ip4(commands ...string) error {
	return inNetns(h.netns, func() error {
		for _, c := range commands {
			if err := ip(c); err != nil {
				return err
			}
		}
		return nil
	})
}

func ip(command string) error {
	if text, err := exec.Command("ip", strings.Fields(command)...).CombinedOutput(); err != nil {
		return fmt.Errorf("ip %s: %w: %s", command, err, text)
	}
	return nil
}

// onThread runs f on a thread of its own, which ends with f: whatever f does to its namespaces.
func onThread(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked
		done <- f()
	}()
	return <-done
}

func newNetns() (ns *os.File, err error) {
	err = onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("make a network namespace: %w", err)
		}
		ns, err = os.Open("/proc/thread-self/ns/net")
		return err
	})
	return ns, err
}

func inNetns(ns *os.File, f func() error) error {
	return onThread(func() error {
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter a network namespace: %w", err)
		}
		return f()
	})
}

// openCable opens the end of a cable as raw frames, each with a virtio header: so it carries what the kernel
// has not yet cut or summed up.
func openCable(name string) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open a raw socket: %w", err)
	}
	var index uint32
	if b, rerr := unix.NewIfreq(name); rerr != nil {
		err = rerr
	} else if err = unix.IoctlIfreq(fd, unix.SIOCGIFINDEX, b); err == nil {
		index = b.Uint32()
	}
	for _, o := range []struct{ option, value int }{{unix.PACKET_IGNORE_OUTGOING, 1}, {unix.PACKET_VNET_HDR, 1}} {
		if err == nil {
			err = unix.SetsockoptInt(fd, unix.SOL_PACKET, o.option, o.value)
		}
	}
	if err == nil {
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 8<<20)
		if err != nil {
			err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 8<<20)
		}
	}
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: 0x0300, Ifindex: int(index)}) // ETH_P_ALL
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("open the cable %s: %w", name, err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// start starts this program again on the host. The thread that did lives as long as the process, which
// else the kernel would end with it.
func (h *host) start(cmd *exec.Cmd) (ended <-chan error, err error) {
	boot := filepath.Join(h.dir, "boot_id")
	if err := os.WriteFile(boot, []byte("77777777-0000-4000-8000-00000000000"+h.name+"\n"), 0o600); err != nil {
		return nil, err
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started, end := make(chan error), make(chan error, 1)
	go onThread(func() error {
		if err := h.enter(boot, cmd); err != nil {
			started <- err
			return nil
		}
		close(started)
		end <- cmd.Wait()
		return nil
	})
	return end, <-started
}

func (h *host) enter(boot string, cmd *exec.Cmd) error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if !h.shared {
		if err := unix.Mount(boot, "/proc/sys/kernel/random/boot_id", "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("give the host a boot id: %w", err)
		}
	}
	if err := unix.Mount("none", h.hidden, "tmpfs", 0, ""); err != nil {
		return fmt.Errorf("hide %s: %w", h.hidden, err)
	}
	if err := unix.Setns(int(h.netns.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("enter the network of %s: %w", h.name, err)
	}
	return cmd.Start()
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
