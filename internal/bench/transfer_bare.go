package bench

import (
	"bufio"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

//go:embed reference/transfer.c
var bareSource []byte

// bare is the reference program, waiting for its next order.
type bare struct {
	cmd    *exec.Cmd
	cancel context.CancelFunc
	in     io.WriteCloser
	out    *bufio.Reader
	errors *strings.Builder
}

// startBare compiles the reference program in dir and starts it.
func startBare(ctx context.Context, dir string, region int) (*bare, error) {
	cc, err := exec.LookPath("cc")
	if err != nil {
		return nil, errors.New("the reference is unavailable: there is no C compiler cc in PATH; install one (Debian: apt-get install gcc)")
	}
	source, program := filepath.Join(dir, "transfer.c"), filepath.Join(dir, "transfer")
	if err := os.WriteFile(source, bareSource, 0o600); err != nil {
		return nil, err
	}
	compile := exec.CommandContext(ctx, cc, "-O2", "-pthread", "-o", program, source)
	tie(compile)
	if out, err := compile.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("the reference is unavailable: %s: %w\n%s", strings.Join(compile.Args, " "), err, out)
	}
	b := &bare{errors: &strings.Builder{}}
	ctx, b.cancel = context.WithCancel(ctx)
	b.cmd = exec.CommandContext(ctx, program, strconv.Itoa(region), strconv.Itoa(transferDepth), strconv.Itoa(transferConnections))
	b.cmd.Stderr = b.errors
	b.cmd.WaitDelay = 3 * time.Second
	tie(b.cmd)
	out, err := b.cmd.StdoutPipe()
	if err == nil {
		b.in, err = b.cmd.StdinPipe()
	}
	if err == nil {
		err = b.cmd.Start()
	}
	if err != nil {
		b.cancel()
		return nil, fmt.Errorf("reference program: %w", err)
	}
	b.out = bufio.NewReader(out)
	return b, nil
}

// tie makes a process end with this one.
func tie(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }

// measure lets it move ops of size bytes. The end of the context of startBare ends it.
func (b *bare) measure(what string, size, ops int) (moved, error) {
	_, err := fmt.Fprintf(b.in, "%s %d %d\n", what, size, ops)
	line := ""
	if err == nil {
		line, err = b.out.ReadString('\n')
	}
	if err != nil {
		b.close() // and with it the writer of errors
		return moved{}, fmt.Errorf("reference program: %w %s", err, strings.TrimSpace(b.errors.String()))
	}
	var wall, cpu int64
	if _, err := fmt.Sscan(line, &wall, &cpu); err != nil || wall <= 0 || cpu < 0 {
		return moved{}, fmt.Errorf("reference program answered %q", line)
	}
	return moved{bytes: size * ops, wall: time.Duration(wall), cpu: time.Duration(cpu)}, nil
}

// close ends the program; its child ends with it.
func (b *bare) close() {
	b.in.Close()
	b.cancel()
	_ = b.cmd.Wait() // killed
}
