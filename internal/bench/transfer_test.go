package bench

import (
	"strings"
	"testing"
)

func TestTransfer(t *testing.T) {
	names := []string{
		"shm_worst", "tcp_worst",
		"shm_4kib", "shm_64kib", "shm_256kib", "shm_1mib",
		"tcp_4kib", "tcp_64kib", "tcp_256kib", "tcp_1mib",
		"memcpy_4kib", "memcpy_64kib", "memcpy_256kib", "memcpy_1mib",
	}
	report := measure(t, transfer, names...)
	for _, r := range report.Results {
		if r.Name == "iperf3" {
			continue
		}
		if r.Value <= 0 {
			t.Errorf("%s is %v", r.Name, r.Value)
		}
		lane := strings.HasPrefix(r.Name, "shm_") || strings.HasPrefix(r.Name, "tcp_")
		if (r.Reference != nil) != lane {
			t.Errorf("%s: reference %v", r.Name, r.Reference)
		}
		promised := lane && (strings.HasSuffix(r.Name, "mib") || strings.HasSuffix(r.Name, "_worst"))
		if (r.Target != nil) != promised {
			t.Errorf("%s: target %v", r.Name, r.Target)
		}
	}
}

// TestTransferWithoutCompiler: the bench says what is missing and what to do.
func TestTransferWithoutCompiler(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	_, err := transfer.Measure(t.Context(), testOptions(t))
	if err == nil || !strings.Contains(err.Error(), "unavailable") || !strings.Contains(err.Error(), "install") {
		t.Fatalf("error %v", err)
	}
}

func TestTransferOtherBackend(t *testing.T) {
	o := testOptions(t)
	o.Backend = "nixl"
	if _, err := transfer.Measure(t.Context(), o); err == nil || !strings.Contains(err.Error(), "nixl") {
		t.Fatalf("error %v", err)
	}
}
