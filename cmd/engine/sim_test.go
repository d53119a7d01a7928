package main

import (
	"strings"
	"testing"
)

// TestSimRefusesNumbersThatMeanNothing: they were accepted, and left nothing out or looked at no schedule.
func TestSimRefusesNumbersThatMeanNothing(t *testing.T) {
	for args, want := range map[string]string{
		"run --violations -1":                  "--violations -1: want at least 1",
		"run --violations 0":                   "--violations 0: want at least 1",
		"repro 4711 --without-faults 0,99":     "--without-faults 99: the schedule of seed 4711 has faults 0 to ",
		"repro 4711 --without-requests -1":     "--without-requests -1: the schedule of seed 4711 has requests 0 to ",
		"repro 4711 --without-faults=-1,0,1,2": "--without-faults -1: ",
	} {
		code, out, errOut := command(t, nil, append([]string{"sim"}, strings.Fields(args)...)...)
		if code != exitUsage || out != "" || !strings.Contains(errOut, want) {
			t.Errorf("sim %s: exit %d, want %q on stderr\n%s%s", args, code, want, out, errOut)
		}
	}
}

// TestSimReproSaysThatNothingIsBroken: a story ended in the middle, and who read it did not know the outcome.
func TestSimReproSaysThatNothingIsBroken(t *testing.T) {
	for _, args := range []string{"4711", "4711 --without-faults 0,2"} {
		code, out, errOut := command(t, nil, append([]string{"sim", "repro"}, strings.Fields(args)...)...)
		if code != exitOK || !strings.HasSuffix(out, "\nThis schedule breaks no promise.\n") {
			t.Errorf("sim repro %s: exit %d, %q\n%s", args, code, out[max(0, len(out)-200):], errOut)
		}
	}
}
