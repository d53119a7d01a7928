package main

import (
	"fmt"
	"math"
	"time"

	"github.com/spf13/cobra"

	"github.com/terminus-kv/terminus/internal/sim"
	"github.com/terminus-kv/terminus/internal/trace"
)

// policiesJSON is what engine sim policies prints.
type policiesJSON struct {
	Trace      string             `json:"trace"`
	Requests   int                `json:"requests"`
	Span       float64            `json:"span_seconds"` // from the first arrival to the last
	Arrivals   string             `json:"arrivals"`     // spread, burst, or recorded: real times
	Seed       uint64             `json:"seed"`
	Peers      int                `json:"peers"`
	TokenBytes int64              `json:"bytes_per_token"`
	MeanGain   float64            `json:"want_mean_gain"`
	WorstRatio float64            `json:"want_worst_ratio"`
	Results    []sim.PolicyResult `json:"results"`
}

func newSimPolicies(a *app) *cobra.Command {
	// A token of Llama-3-70B: 80 layers, K and V, 8 heads of 128 numbers of 2 bytes.
	cfg := sim.PoliciesConfig{Peers: 1, TokenBytes: 327_680}
	res := policiesJSON{Seed: 1, Arrivals: "spread"}
	var file string
	c := &cobra.Command{
		Use:   "policies",
		Short: "Compare scheduling policies on a request trace",
		Long: `Replays a trace through the shipped core of a prefill engine on virtual time, with the shipped policy (srf),
in order of arrival (fifo) and by turns (round-robin), and prints how long rooms took from the arrival of
the request until Success; last what an oracle would reach, that always sends the room with the least left. One link carries the ops; its rate is such that the trace fills 80 % of it.
What moves is the part of a prompt that no earlier one shares (cached), and the whole prompt (all).

The trace is a file of Mooncake's format, or generated from the published distribution of its conversation
trace. A missed target is shown, and does not change the exit code; docs/benchmarks.md has the figures`,
		Example: `  engine sim policies
  engine sim policies --trace conversation.jsonl --peers 4 -o json`,
		Args:        arguments(0, 0, "no arguments"),
		Annotations: effect(readOnly),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cfg.Peers < 1 || cfg.Peers > sim.MaxPeers {
				return &usageError{fmt.Errorf("--peers %d: want 1 to %d", cfg.Peers, sim.MaxPeers), cmd}
			}
			if cfg.TokenBytes < 1 || cfg.TokenBytes > sim.MaxTokenBytes {
				return &usageError{fmt.Errorf("--bytes-per-token %d: want 1 to %d", cfg.TokenBytes, sim.MaxTokenBytes), cmd}
			}
			limit := math.MaxInt
			if file == "" {
				limit = trace.Published
			}
			reqs, err := trace.Load(file, limit, res.Seed)
			if err != nil {
				return err
			}
			if res.Arrivals == "spread" && !trace.Spread(reqs, res.Seed) {
				res.Arrivals = "recorded"
			}
			if a.colour { // somebody is watching
				last := time.Now()
				cfg.Progress = func(variant, policy string, done int) {
					if time.Since(last) > time.Second {
						last = time.Now()
						fmt.Fprintf(a.stderr, "\r\033[K%s, %s: %d of %d rooms", variant, policy, done, len(reqs))
					}
				}
				defer fmt.Fprint(a.stderr, "\r\033[K")
			}
			cfg.Requests = reqs
			if res.Results, err = sim.Policies(cmd.Context(), cfg); err != nil {
				return err
			}
			res.Trace, res.Requests, res.Peers, res.TokenBytes = trace.Source(file), len(reqs), cfg.Peers, cfg.TokenBytes
			res.Span = float64(reqs[len(reqs)-1].Timestamp-reqs[0].Timestamp) / 1000
			res.MeanGain, res.WorstRatio = sim.WantMeanGain, sim.WantWorstRatio
			if a.output == "table" {
				policiesHead(a, &res)
			}
			return a.print(&res, func(t *table) { policiesRows(t, &res) })
		},
	}
	f := c.Flags()
	f.StringVar(&file, "trace", "", "Mooncake-format trace; default: a generated one")
	f.Var(&choice{&res.Arrivals, []string{"spread", "burst"}}, "arrival", "of requests with one timestamp in a trace of ticks: spread over the tick, or burst")
	f.Uint64Var(&res.Seed, "seed", res.Seed, "of the generated trace and of where in its tick a request arrives")
	f.IntVar(&cfg.Peers, "peers", cfg.Peers, "decode engines, which share the link equally; each request goes to the next one")
	f.Int64Var(&cfg.TokenBytes, "bytes-per-token", cfg.TokenBytes, "of KV; default: Llama-3-70B")
	a.outputFlag(c)
	return c
}

// policiesHead says what was replayed.
func policiesHead(a *app, r *policiesJSON) {
	arrivals := map[string]string{
		"spread": "spread over ticks of 3 s", "burst": "in bursts", "recorded": "as recorded",
	}[r.Arrivals]
	fmt.Fprintf(a.stdout, "%s: %s in %.0f s, %s, seed %d; %s\n", r.Trace, count(r.Requests, "request"), r.Span, arrivals, r.Seed, count(r.Peers, "peer"))
	for i := range r.Results {
		if p := &r.Results[i]; i == 0 || p.Variant != r.Results[i-1].Variant {
			fmt.Fprintf(a.stdout, "%s: %.0f GB, %d rooms move no page; link of %.1f GB/s\n", p.Variant, float64(p.Bytes)/1e9, p.Empty, float64(p.Rate)/1e9)
		}
	}
}

func policiesRows(t *table, r *policiesJSON) {
	t.row("MOVES", "POLICY", "MEAN", "P50", "P99", "WORST", "FIFO MEAN/MEAN", "WORST/FIFO WORST", "TARGET", "VERDICT")
	seconds := func(v float64) string { return fmt.Sprintf("%.3fs", v) }
	for i := range r.Results {
		p := &r.Results[i]
		target, verdict := "", cell{}
		if p.Met != nil {
			target = fmt.Sprintf(">= %gx, <= %gx", r.MeanGain, r.WorstRatio)
			if verdict = (cell{"met", green}); !*p.Met {
				verdict = cell{"missed", red}
			}
		}
		t.row(p.Variant, p.Policy, seconds(p.Mean), seconds(p.P50), seconds(p.P99), seconds(p.Worst),
			fmt.Sprintf("%.2fx", p.MeanGain), fmt.Sprintf("%.2fx", p.WorstRatio), target, verdict)
	}
}
