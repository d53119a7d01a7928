package pluginhost

import (
	"context"
	"io"
	"log/slog"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// TestProgramInTheWayOfTheChild: the runtime moved the end of a pipe over the descriptor of the program, when
// that was the next above those that the child is handed, and the kernel was asked to execute a pipe:
// "permission denied", now and then, in a host with many descriptors.
func TestProgramInTheWayOfTheChild(t *testing.T) {
	spec := Spec{Name: "a", Exec: "/bin/true"}
	prog, err := spec.open()
	if err != nil {
		t.Fatal(err)
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pair[0])
	// The control socket gets a number, and the program the next.
	const number = 400
	for from, to := range map[int]int{pair[1]: number, int(prog.file.Fd()): number + 1} {
		if err := unix.Dup3(from, to, unix.O_CLOEXEC); err != nil {
			t.Fatal(err)
		}
	}
	unix.Close(pair[1])
	prog.file.Close()
	prog.file = os.NewFile(number+1, "/bin/true")

	p := newProcess("a", prog, nil, t.TempDir(), os.NewFile(number, "control"), slog.New(slog.NewTextHandler(io.Discard, nil)))
	p.prepare(nil)
	if err := p.Start(context.Background()); err != nil {
		t.Fatal(err)
	}
	<-p.exited
	p.kill()
	p.release()
	<-p.done
}
