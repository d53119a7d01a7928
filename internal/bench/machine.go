package bench

import (
	"bufio"
	"fmt"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// Machine describes where a run took place, in one line: processor, cores, memory, kernel, Go.
func Machine() string {
	var kernel unix.Utsname
	release := "unknown kernel"
	if unix.Uname(&kernel) == nil {
		release = unix.ByteSliceToString(kernel.Sysname[:]) + " " + unix.ByteSliceToString(kernel.Release[:])
	}
	var info unix.Sysinfo_t
	memory := ""
	if unix.Sysinfo(&info) == nil {
		memory = fmt.Sprintf(", %d GiB", (info.Totalram*uint64(info.Unit)+1<<29)>>30)
	}
	return fmt.Sprintf("%s, %d cores%s, %s %s, %s", processor(), runtime.NumCPU(), memory, release, runtime.GOARCH, runtime.Version())
}

// processor is the model name of the first core, or the architecture where the kernel gives none.
func processor() string {
	f, err := os.Open("/proc/cpuinfo")
	if err != nil {
		return runtime.GOARCH
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if key, value, ok := strings.Cut(lines.Text(), ":"); ok && strings.TrimSpace(key) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return runtime.GOARCH
}
