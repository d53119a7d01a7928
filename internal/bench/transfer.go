package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net"
	"os/exec"
	"slices"
	"strconv"
	"time"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

const (
	transferDepth       = 16
	transferConnections = 2         // the backend's default
	transferRegion      = 256 << 20 // of each side
	transferHeadline    = 1 << 20   // from this op size up the ratio is promised
	transferLimit       = 0.9
	kvPage              = 64 << 10 // a page of ops that are not smaller
)

// transferPlan is what one run measures.
type transferPlan struct {
	region int // bytes on each side
	sizes  []int
	pairs  int           // measurements of product and reference for each size from transferHeadline up
	few    int           // the same below
	sample time.Duration // about how long one measurement lasts
}

// planTransfer scales the run to the duration: below a second the memory is smaller, too.
func planTransfer(d time.Duration) transferPlan {
	p := transferPlan{
		region: transferRegion, pairs: 11, few: 3, sample: d / 20,
		sizes: []int{4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20},
	}
	if d < time.Second {
		p.region, p.pairs, p.few, p.sizes = 8<<20, 1, 1, p.sizes[:4]
	}
	return p
}

// lane is one way that the bytes go, forced by an option of the backend.
type lane struct {
	name    string
	options string
	want    contract.Lane
}

var transferLanes = []lane{
	{"shm", fmt.Sprintf(`{"connections":%d}`, transferConnections), contract.Lane_LANE_SHM},
	{"tcp", fmt.Sprintf(`{"connections":%d,"shm":false}`, transferConnections), contract.Lane_LANE_TCP},
}

var transfer = Bench{
	Name:  "transfer",
	Short: "throughput of the tcp backend against a bare C program",
	Long: fmt.Sprintf("The tcp backend with %d ops outstanding, cycling through %d MiB on each side: two plugin processes of two hosts, "+
		"driven by Submit frames, once by shared memory and once by TCP; against a C program that moves the same bytes between "+
		"two processes over as many connections with the same depth and without any check, compiled by cc in the same run. "+
		"Product and reference take turns; a row is the pair with the median ratio", transferDepth, transferRegion>>20),
	Run: runTransfer,
}

func runTransfer(ctx context.Context, o Options) ([]Result, error) {
	if o.Backend != "" && o.Backend != "tcp" {
		return nil, fmt.Errorf("backend %q has no reference program; want tcp", o.Backend)
	}
	return measureTransfer(ctx, o, planTransfer(o.Duration))
}

func measureTransfer(ctx context.Context, o Options, plan transferPlan) ([]Result, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	c, err := startBare(ctx, o.Dir, plan.region)
	if err != nil {
		return nil, err
	}
	defer c.close()
	var heads, rows []Result
	for _, l := range transferLanes {
		r, err := measureLane(ctx, o, plan, l, c)
		if err != nil {
			return nil, fmt.Errorf("lane %s: %w", l.name, err)
		}
		heads = append(heads, worst(l, r))
		rows = append(rows, r...)
	}
	results := append(heads, rows...)
	for _, size := range plan.sizes {
		m, err := c.measure("memcpy", size, countOf(plan, size, 4e9))
		if err != nil {
			return nil, err
		}
		results = append(results, Result{
			Name: "memcpy_" + sizeName(size), Value: m.rate() / 1e9, Unit: "GB/s", Better: Higher, Samples: 1,
			Note: "one thread of one C program",
		})
	}
	if rate, err := iperf3(ctx, plan.sample); err != nil {
		o.progress("iperf3 is left out: %v", err)
	} else {
		results = append(results, Result{
			Name: "iperf3", Value: rate / 1e9, Unit: "GB/s", Better: Higher, Samples: 1,
			Note: fmt.Sprintf("loopback, %d connections", transferConnections),
		})
	}
	return results, nil
}

// moved is one measurement.
type moved struct {
	bytes     int
	wall, cpu time.Duration
}

// rate is in bytes a second.
func (m moved) rate() float64 { return float64(m.bytes) / m.wall.Seconds() }

// pairOf is one measurement of the product and, right beside it, one of the reference.
type pairOf struct{ product, reference moved }

func (p pairOf) ratio() float64 { return p.product.rate() / p.reference.rate() }

// measureLane measures all sizes of one lane, largest last.
func measureLane(ctx context.Context, o Options, plan transferPlan, l lane, c *bare) ([]Result, error) {
	w, err := startWire(ctx, o, l, plan.region)
	if err != nil {
		return nil, err
	}
	defer w.close()
	var rows []Result
	for _, size := range plan.sizes {
		// A first pass over all memory warms both up and tells how much a measurement takes.
		pass := plan.region / size
		first, err := w.measure(ctx, size, max(pass, 2*transferDepth))
		if err != nil {
			return nil, err
		}
		if _, err := c.measure(l.name, size, max(pass, 2*transferDepth)); err != nil {
			return nil, err
		}
		ops, n := countOf(plan, size, first.rate()), plan.few
		if size >= transferHeadline {
			n = plan.pairs
		}
		pairs := make([]pairOf, n)
		for i := range pairs {
			p := &pairs[i]
			var errs [2]error
			product := func() { p.product, errs[0] = w.measure(ctx, size, ops) }
			reference := func() { p.reference, errs[1] = c.measure(l.name, size, ops) }
			if i%2 == 0 {
				product()
				reference()
			} else { // neither has the better place
				reference()
				product()
			}
			for _, err := range errs {
				if err != nil {
					return nil, err
				}
			}
		}
		r := transferRow(l, size, pairs)
		o.progress("%s %s: %.2f GB/s, bare C %.2f GB/s, ratio %.2f; %s", l.name, sizeName(size), r.Value, r.Reference.Value, r.Value/r.Reference.Value, r.Note)
		rows = append(rows, r)
	}
	return rows, nil
}

// countOf is how many ops of a size last about one sample at a rate: one cycle through the memory at least,
// and enough to fill the depth.
func countOf(plan transferPlan, size int, rate float64) int {
	n := int(rate * plan.sample.Seconds() / float64(size))
	return min(max(n, plan.region/size, 4*transferDepth), 1<<20)
}

// transferRow is the pair with the median ratio. The processor time, engine included, says what the figure
// would be on cores that nobody else uses.
func transferRow(l lane, size int, pairs []pairOf) Result {
	slices.SortFunc(pairs, func(a, b pairOf) int {
		if a.ratio() < b.ratio() {
			return -1
		}
		return 1
	})
	mid := pairs[(len(pairs)-1)/2]
	var product, reference moved
	for _, p := range pairs {
		product.bytes, product.cpu = product.bytes+p.product.bytes, product.cpu+p.product.cpu
		reference.bytes, reference.cpu = reference.bytes+p.reference.bytes, reference.cpu+p.reference.cpu
	}
	perGB := func(m moved) float64 { return m.cpu.Seconds() * 1e3 / (float64(m.bytes) / 1e9) }
	r := Result{
		Name: l.name + "_" + sizeName(size), Value: mid.product.rate() / 1e9, Unit: "GB/s", Better: Higher,
		Reference: &Reference{Name: "bare C", Value: mid.reference.rate() / 1e9}, Samples: len(pairs),
		Note: fmt.Sprintf("ratio %.2f to %.2f in %d pairs; CPU %.0f ms/GB against %.0f",
			pairs[0].ratio(), pairs[len(pairs)-1].ratio(), len(pairs), perGB(product), perGB(reference)),
	}
	if size >= transferHeadline {
		r.Target = &Target{Of: OfRatio, Limit: transferLimit}
	}
	return r
}

// worst is the headline of a lane: its lowest promised ratio.
func worst(l lane, rows []Result) Result {
	low, at := math.Inf(1), Result{}
	for _, r := range rows {
		if ratio := r.Value / r.Reference.Value; r.Target != nil && ratio < low {
			low, at = ratio, r
		}
	}
	at.Note = fmt.Sprintf("the lowest from 1 MiB up: %s; %s", at.Name, at.Note)
	at.Name = l.name + "_worst"
	return at
}

func sizeName(n int) string {
	if n >= 1<<20 {
		return strconv.Itoa(n>>20) + "mib"
	}
	return strconv.Itoa(n>>10) + "kib"
}

// iperf3 measures loopback TCP with the program of that name, in bytes a second.
func iperf3(ctx context.Context, d time.Duration) (float64, error) {
	path, err := exec.LookPath("iperf3")
	if err != nil {
		return 0, err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0") // to learn a free port
	if err != nil {
		return 0, err
	}
	port := strconv.Itoa(l.Addr().(*net.TCPAddr).Port)
	l.Close()
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	server := exec.CommandContext(ctx, path, "-s", "-1", "-B", "127.0.0.1", "-p", port)
	tie(server)
	if err := server.Start(); err != nil {
		return 0, fmt.Errorf("iperf3 -s: %w", err)
	}
	defer func() {
		cancel()
		_ = server.Wait() // killed, or done
	}()
	var report struct {
		Error string `json:"error"` // with exit code 0
		End   struct {
			Received struct {
				BitsPerSecond float64 `json:"bits_per_second"`
			} `json:"sum_received"`
		} `json:"end"`
	}
	for wait := 10 * time.Millisecond; ; wait *= 2 { // the server may not listen yet
		client := exec.CommandContext(ctx, path, "-c", "127.0.0.1", "-p", port, "-J",
			"-P", strconv.Itoa(transferConnections), "-t", strconv.Itoa(max(1, int(10*d.Seconds()))))
		tie(client)
		out, err := client.Output()
		if err == nil {
			err = json.Unmarshal(out, &report)
		}
		if err == nil && report.Error == "" {
			break
		}
		if wait > time.Second {
			return 0, fmt.Errorf("iperf3 -c: %w", errors.Join(err, errors.New(report.Error)))
		}
		report.Error = ""
		time.Sleep(wait)
	}
	if report.End.Received.BitsPerSecond <= 0 {
		return 0, fmt.Errorf("iperf3 reported no throughput")
	}
	return report.End.Received.BitsPerSecond / 8, nil
}
