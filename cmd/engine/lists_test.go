package main

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/terminus-kv/terminus/internal/admin"
	"github.com/terminus-kv/terminus/internal/admin/admintest"
)

// lineOf is the row of a table that begins with name, its columns cut at two spaces and more.
func lineOf(t *testing.T, out, name string) map[string]string {
	t.Helper()
	lines := strings.Split(out, "\n")
	for _, line := range lines[1:] {
		if !strings.HasPrefix(line, name) {
			continue
		}
		row := map[string]string{}
		columns := strings.Fields(lines[0])
		for i, c := range columns {
			at, end := strings.Index(lines[0], c), len(line)
			if i+1 < len(columns) {
				end = strings.Index(lines[0], columns[i+1])
			}
			row[c] = strings.TrimSpace(line[at:end])
		}
		return row
	}
	t.Fatalf("no %s in\n%s", name, out)
	return nil
}

// A dead plugin was listed with process 0, an uptime, and a beat of 0s ago.
func TestPluginsListOfADeadPlugin(t *testing.T) {
	e := admintest.Sample()
	e.Plugs = append(e.Plugs, admin.PluginInfo{
		Name: "rdma", Kind: "transfer", State: "backoff", Exec: "/bin/rdma", Restarts: 3, Detail: "epoch 4: process ended: signal: killed",
		Epochs: []admin.PluginEpoch{{Epoch: 4, State: "gone"}},
	})
	socket := serve(t, runtimeDir(t), "n", e, false)
	_, out, _ := command(t, nil, "plugins", "list", "--socket", socket)
	dead := lineOf(t, out, "rdma")
	if dead["EPOCH"] != "4 gone" || dead["PID"] != "-" || dead["UP"] != "-" || dead["BEAT"] != "-" {
		t.Errorf("%v\n%s", dead, out)
	}
	if up := lineOf(t, out, "tcp"); up["PID"] != "4130" || up["BEAT"] != "300ms ago" {
		t.Errorf("%v\n%s", up, out)
	}
	_, out, _ = command(t, nil, "plugins", "list", "-o", "json", "--socket", socket)
	_, out, _ = strings.Cut(out, "rdma")
	for _, false0 := range []string{"pid", "uptime_ns", "beat_age_ns"} {
		if strings.Contains(out, fmt.Sprintf("%q", false0)) {
			t.Errorf("%s of a dead plugin:\n%s", false0, out)
		}
	}
}

// A peer that never answered was listed as heard of 0s ago.
func TestPeersNeverHeard(t *testing.T) {
	e := admintest.Sample()
	e.Engines = append(e.Engines, admin.PeerInfo{Node: "mute", Address: "10.0.0.1:7411", State: "connecting", SinceNS: int64(time.Minute), Detail: "connection refused"})
	socket := serve(t, runtimeDir(t), "n", e, false)
	_, out, _ := command(t, nil, "peers", "--socket", socket)
	if row := lineOf(t, out, "mute"); row["HEARD"] != "never" {
		t.Errorf("%v\n%s", row, out)
	}
	if _, out, _ = command(t, nil, "peers", "-o", "json", "--socket", socket); strings.Count(out, `"heard_ns"`) != 1 {
		t.Errorf("%s", out)
	}
}
