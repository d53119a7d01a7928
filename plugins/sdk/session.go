package sdk

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

const (
	defaultOps         = 8192 // ops outstanding, when the author names no limit
	defaultConcurrency = 64
	maxTable           = 1 << 16 // regions, pools, peers, plans, descriptors that wait for their RegionAdd
	maxGrants          = 1 << 20
	recentIDs          = 1 << 14
	beatEvery          = time.Second
	fenceBound         = 5 * time.Second
	closeBound         = 2 * time.Second
)

// Stream is one bidirectional stream of frames as the plugin sees it. A gRPC server stream is one, a
// Pipe is another.
type Stream interface {
	Recv() (*contract.HostFrame, error)
	Send(*contract.PluginFrame) error
}

// Session is the plugin side of the contract for one process: it feeds host frames to a Backend and
// answers with plugin frames. Main makes one; tests drive one through a Pipe (see sdktest).
//
// One goroutine, the loop, owns the tables and sends the beats; long calls of the backend run beside
// it and hand their results back to it. Ops and the outbox are shared under mu.
type Session struct {
	backend     Backend
	info        Info
	maxOps      int
	concurrency int

	state   atomic.Int32 // handshake and stream order
	ctx     context.Context
	cancel  context.CancelCauseFunc
	over    chan struct{}
	overErr error
	once    sync.Once
	work    sync.WaitGroup // the loop, transfers and jobs

	control  chan *contract.HostFrame
	beats    chan *contract.PluginFrame
	fds      chan descriptors
	results  chan func()
	wake     chan struct{} // 1: the loop should look at its deferred removals and the drain
	declared chan struct{} // 1: a long call begins; the host should know before it may stop us from beating
	sems     [jobKinds]chan struct{}

	mu        sync.Mutex
	ops       map[uint64]*opState
	done      endedOps // that are quiet, too
	queue     []*opState
	running   int  // workers
	called    bool // one of them has not taken its first op yet
	out       outbox
	counts    map[string]uint64
	bytesDone uint64
	lastSeq   uint64
	draining  bool
	closed    bool // nothing new may start
	busy      map[uint64]busyCall
	nextBusy  uint64

	// The loop's own.
	regions       map[uint64]*regionState
	orphans       map[uint64]descriptors
	refused       recent // regions that failed
	pools         map[uint64]poolEntry
	peers         map[uint32]*peerState
	remote        map[remoteKey]poolEntry // pools of peers
	remoteRegions map[remoteKey]*remoteRegionState
	plans         map[uint64]planEntry
	grants        map[uint64]*grantState
	early         recent // aborts that overtook their Submit
	drainDone     <-chan time.Time
	statsBusy     bool
	beatSeq       uint64
}

type busyCall struct {
	kind    contract.BusyKind
	subject uint64
	since   time.Time
}

// Order of calls, in Session.state.
const (
	stateNew int32 = iota
	stateShaking
	stateReady
	stateServing
)

// NewSession makes a session around a backend. Nothing runs before Handshake.
func NewSession(b Backend) *Session {
	s := &Session{
		backend:       b,
		info:          b.Info(),
		over:          make(chan struct{}),
		control:       make(chan *contract.HostFrame),
		beats:         make(chan *contract.PluginFrame, 1),
		fds:           make(chan descriptors),
		results:       make(chan func()),
		wake:          make(chan struct{}, 1),
		declared:      make(chan struct{}, 1),
		ops:           map[uint64]*opState{},
		done:          newEndedOps(),
		early:         newRecent(recentIDs),
		refused:       newRecent(recentIDs),
		out:           newOutbox(),
		counts:        map[string]uint64{},
		busy:          map[uint64]busyCall{},
		regions:       map[uint64]*regionState{},
		orphans:       map[uint64]descriptors{},
		pools:         map[uint64]poolEntry{},
		peers:         map[uint32]*peerState{},
		remote:        map[remoteKey]poolEntry{},
		remoteRegions: map[remoteKey]*remoteRegionState{},
		plans:         map[uint64]planEntry{},
		grants:        map[uint64]*grantState{},
	}
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	s.sems = newSems()
	s.maxOps, s.concurrency = defaultOps, defaultConcurrency
	if l := s.info.Limits; l != nil && l.MaxOps != 0 {
		s.maxOps = int(min(l.MaxOps, maxTable)) // Stats lists them all in one frame
	}
	if s.info.OpConcurrency > 0 {
		s.concurrency = s.info.OpConcurrency
	}
	return s
}

var nameRE = regexp.MustCompile(`^[a-z][a-z0-9-]{0,31}$`)

// checkInfo finds what the author got wrong.
func checkInfo(b Backend, info Info) error {
	if !nameRE.MatchString(info.Name) {
		return fmt.Errorf("Info.Name %q is not of the form [a-z][a-z0-9-]*, at most 32 bytes", info.Name)
	}
	if info.Version == "" {
		return errors.New("Info.Version is empty")
	}
	if info.Schema != nil && info.Config != nil {
		return errors.New("Info.Schema is for options that the SDK does not decode, and Info.Config is set; leave one of them out")
	}
	for _, f := range info.Features {
		switch f {
		case FeatureReceiverChecked:
			if _, ok := b.(Granter); !ok {
				return fmt.Errorf("feature %s needs the methods of sdk.Granter", f)
			}
		case FeatureFencePeer:
			if _, ok := b.(Fencer); !ok {
				return fmt.Errorf("feature %s needs the method of sdk.Fencer", f)
			}
		}
	}
	return nil
}

func (s *Session) has(feature string) bool {
	for _, f := range s.info.Features {
		if f == feature {
			return true
		}
	}
	return false
}

// describe is what the plugin says of itself, before any configuration.
func (s *Session) describe() (*contract.HandshakeResponse, error) {
	if err := checkInfo(s.backend, s.info); err != nil {
		return nil, err
	}
	schema := s.info.Schema
	if schema == nil {
		var err error
		if schema, err = configSchema(s.info.Config); err != nil {
			return nil, err
		}
	}
	limits := &contract.Limits{}
	if l := s.info.Limits; l != nil {
		limits = &contract.Limits{
			MaxOpsPerPeer: l.MaxOpsPerPeer, MaxOpBytes: l.MaxOpBytes, MaxBytesPerPeer: l.MaxBytesPerPeer,
			MaxRuns: l.MaxRuns, MaxRegions: l.MaxRegions, ProgressTimeoutNs: l.ProgressTimeoutNs,
		}
	}
	limits.MaxOps = uint32(s.maxOps)
	kinds := s.info.MemoryKinds
	if len(kinds) == 0 {
		kinds = []contract.MemoryKind{contract.MemoryKind_MEMORY_KIND_HOST_SHM}
	}
	return &contract.HandshakeResponse{
		Name:          s.info.Name,
		PluginVersion: s.info.Version,
		Kinds:         []contract.Kind{contract.Kind_KIND_TRANSFER},
		MemoryKinds:   kinds,
		Features:      s.info.Features,
		Limits:        limits,
		ConfigSchema:  string(schema),
		Sdk:           &contract.SdkInfo{Language: "go", Version: Version},
	}, nil
}

// Handshake answers the host's first call and starts the backend. What the operator can mend comes
// back in HandshakeResponse.error; a Go error means that the call itself was out of order.
func (s *Session) Handshake(_ context.Context, req *contract.HandshakeRequest) (*contract.HandshakeResponse, error) {
	if !s.state.CompareAndSwap(stateNew, stateShaking) {
		return nil, errors.New("handshake: called twice in one process")
	}
	if b, ok := s.backend.(interface{ Unusable() error }); ok { // there is nothing to describe
		return &contract.HandshakeResponse{Error: b.Unusable().Error()}, nil
	}
	resp, err := s.describe()
	if err != nil {
		return &contract.HandshakeResponse{Error: fmt.Sprintf("plugin %q is built wrong: %v", s.info.Name, err)}, nil
	}
	for _, v := range req.GetVersions() {
		if v == ContractVersion {
			resp.Version = v
		}
	}
	if resp.Version == 0 {
		resp.Error = fmt.Sprintf("plugin %s speaks contract version %d, the engine %v; upgrade the older of the two", s.info.Name, ContractVersion, req.GetVersions())
		return resp, nil
	}
	if s.info.Schema != nil {
		// Start checks the options.
	} else if err := decodeOptions(req.GetConfigJson(), s.info.Config); err != nil {
		resp.Error = fmt.Sprintf("plugins.%s.options: %v", s.info.Name, err)
		return resp, nil
	}
	resp.Endpoint, err = s.start(req)
	if err == nil && len(resp.Endpoint) > MaxEndpoint {
		err = fmt.Errorf("the endpoint has %d bytes, at most %d are allowed", len(resp.Endpoint), MaxEndpoint)
	}
	if err != nil {
		resp.Endpoint = nil
		resp.Error = fmt.Sprintf("start backend %s: %v", s.info.Name, err)
		return resp, nil
	}
	s.state.Store(stateReady)
	return resp, nil
}

func (s *Session) start(req *contract.HandshakeRequest) (endpoint []byte, err error) {
	defer recovered(&err, "Start")
	config := bytes.TrimSpace(req.GetConfigJson())
	if len(config) == 0 {
		config = []byte("{}")
	}
	return s.backend.Start(s.ctx, Start{
		Node: req.GetNode(), Incarnation: req.GetIncarnation(), Epoch: req.GetEpoch(),
		HostID: req.GetHostId(), RuntimeDir: req.GetRuntimeDir(), Config: config,
		Busy: s.declareBusy, Logf: s.logf, Fatal: s.fatal, Over: s.over,
	})
}

// recovered turns a panic of the backend into an error of the named call.
func recovered(err *error, call string) {
	if r := recover(); r != nil {
		*err = fmt.Errorf("%s panicked: %v at %s", call, r, cut(string(debug.Stack()), 2048))
	}
}

// ServeSession speaks the Session stream until the host ends it, and returns nil then.
func (s *Session) ServeSession(stream Stream) error {
	if !s.state.CompareAndSwap(stateReady, stateServing) {
		return errors.New("session: opened before a good handshake, or twice")
	}
	frames := make(chan *contract.HostFrame)
	go s.read(stream, frames)
	written := make(chan struct{})
	go func() {
		defer close(written)
		if err := s.write(stream); err != nil {
			s.End(clean(err))
		}
	}()
	looped := make(chan struct{})
	if s.spawn(func() { defer close(looped); s.loop(frames) }) {
		<-looped
	}
	select { // let the last events out, within reason
	case <-written:
	case <-time.After(time.Second):
	}
	return s.overErr
}

// ServeControl speaks the Control stream: aborts in, beats out.
func (s *Session) ServeControl(stream Stream) error {
	if s.state.Load() < stateReady {
		return errors.New("control: opened before a good handshake")
	}
	broken := make(chan error, 1)
	go func() {
		for {
			frame, err := stream.Recv()
			if err != nil {
				broken <- err
				return
			}
			select {
			case s.control <- frame:
			case <-s.over:
				return
			}
		}
	}()
	for {
		select {
		case beat := <-s.beats:
			if err := stream.Send(beat); err != nil {
				return s.endControl(err)
			}
		case err := <-broken:
			return s.endControl(err)
		case <-s.over:
			return nil
		}
	}
}

// endControl ends the session: without a control stream aborts cannot arrive and beats cannot leave.
func (s *Session) endControl(err error) error {
	err = clean(err)
	s.End(err)
	return err
}

// clean drops the errors by which a stream says that the host closed it.
func clean(err error) error {
	if errors.Is(err, io.EOF) || status.Code(err) == codes.Canceled || status.Code(err) == codes.Unavailable {
		return nil
	}
	return err
}

func (s *Session) read(stream Stream, frames chan<- *contract.HostFrame) {
	for {
		frame, err := stream.Recv()
		if err != nil {
			s.End(clean(err))
			return
		}
		select {
		case frames <- frame:
		case <-s.over:
			return
		}
	}
}

// End ends the session; the first error stays. Contexts of all ops are done from here on.
func (s *Session) End(err error) {
	s.once.Do(func() {
		s.overErr = err
		close(s.over)
		s.cancel(ErrSessionOver)
	})
}

// Over is closed when the session has ended.
func (s *Session) Over() <-chan struct{} { return s.over }

// fatal is Start.Fatal: tell the host, then end.
func (s *Session) fatal(err error) {
	s.post(&contract.PluginEvent{Event: &contract.PluginEvent_Fault{Fault: &contract.Fault{
		Rule: "backend", Detail: cut(err.Error(), 4096),
	}}}, 4096)
	s.End(fmt.Errorf("the backend gave up: %w", err))
}

// Close ends the session, waits for the backend's running calls (2 s), closes the backend and unmaps
// the regions. Regions stay mapped when a call of the backend does not return.
func (s *Session) Close() error {
	s.End(nil)
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	idle := make(chan struct{})
	go func() {
		s.work.Wait()
		close(idle)
	}()
	stuck := false
	select {
	case <-idle:
	case <-time.After(closeBound):
		stuck = true
	}
	var err error
	if s.state.Load() >= stateReady {
		err = s.closeBackend()
	}
	if stuck {
		return errors.Join(fmt.Errorf("close: calls of backend %s did not return within %v of the end of their contexts", s.info.Name, closeBound), err)
	}
	s.unmapAll()
	return err
}

func (s *Session) closeBackend() (err error) {
	defer recovered(&err, "Close")
	return s.backend.Close()
}

// loop is the progress goroutine.
func (s *Session) loop(frames <-chan *contract.HostFrame) {
	ticker := time.NewTicker(beatEvery)
	defer ticker.Stop()
	s.beat()
	for {
		select { // aborts overtake
		case frame := <-s.control:
			s.handleControl(frame)
			continue
		default:
		}
		in := frames
		s.mu.Lock()
		if s.out.full() {
			in = nil
		}
		s.mu.Unlock()
		select {
		case frame := <-s.control:
			s.handleControl(frame)
		case frame := <-in:
			for _, e := range frame.GetEvents() {
				s.handle(e)
			}
		case f := <-s.results:
			f()
		case d := <-s.fds:
			s.takeDescriptors(d)
		case <-s.wake:
			s.settle()
		case <-s.declared:
			s.beat()
		case <-s.out.room:
		case <-s.drainDone:
			s.finishDrain()
		case now := <-ticker.C:
			s.flushProgress(now)
			s.beat()
		case <-s.over:
			return
		}
	}
}

// settle does what waited for ops: removals and the end of a drain.
func (s *Session) settle() {
	for _, r := range s.regions {
		if r.removing {
			s.tryRemoveRegion(r)
		}
	}
	for _, p := range s.peers {
		if p.removing {
			s.tryRemovePeer(p)
		}
	}
	if s.drainDone != nil && s.openOps() == 0 {
		s.finishDrain()
	}
}

func (s *Session) openOps() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.ops)
}

func (s *Session) count(name string, n uint64) {
	s.mu.Lock()
	s.counts[name] += n
	s.mu.Unlock()
}

// breach notes that the host broke the contract where there is nothing to answer.
func (s *Session) breach(format string, args ...any) {
	s.count("host_breaches", 1)
	s.logf(contract.Log_LEVEL_WARN, "the engine broke the contract: "+format, args...)
}

func (s *Session) declareBusy(kind contract.BusyKind, subject uint64) (done func()) {
	if !known(contract.BusyKind_name, int32(kind)) {
		kind = contract.BusyKind_BUSY_KIND_CONNECT
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.nextBusy++
	id := s.nextBusy
	s.busy[id] = busyCall{kind: kind, subject: subject, since: time.Now()}
	notify(s.declared)
	return func() {
		s.mu.Lock()
		delete(s.busy, id)
		s.mu.Unlock()
	}
}

// beat hands one beat to the control stream; if the last one still waits there it is replaced.
func (s *Session) beat() {
	s.beatSeq++
	beat := &contract.Beat{Seq: s.beatSeq}
	now := time.Now()
	s.mu.Lock()
	for _, b := range s.busy {
		if len(beat.Busy) == 64 {
			break
		}
		beat.Busy = append(beat.Busy, &contract.Busy{Kind: b.kind, Subject: b.subject, SinceNs: uint64(max(now.Sub(b.since), 0))})
	}
	s.mu.Unlock()
	frame := &contract.PluginFrame{Events: []*contract.PluginEvent{{Event: &contract.PluginEvent_Beat{Beat: beat}}}}
	select {
	case <-s.beats:
	default:
	}
	s.beats <- frame
}

// Kinds of jobs: long calls of the backend, bounded per kind.
type jobKind int

const (
	jobRegion jobKind = iota
	jobPeer
	jobRemove // of regions and peers
	jobGrant
	jobFence
	jobStats
	jobKinds
)

func newSems() (sems [jobKinds]chan struct{}) {
	// A removal lasts as long as somebody else holds what is removed: as many as there are may wait, so that one peer
	// which stands still holds up nobody else's.
	for i, n := range [jobKinds]int{jobRegion: 4, jobPeer: 16, jobRemove: 1 << 20, jobGrant: 64, jobFence: 16, jobStats: 1} {
		sems[i] = make(chan struct{}, n)
	}
	return sems
}

// spawn starts a goroutine that Close waits for; false after Close.
func (s *Session) spawn(f func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.spawnLocked(f)
}

func (s *Session) spawnLocked(f func()) bool {
	if s.closed {
		return false
	}
	s.work.Go(f)
	return true
}

// job runs work beside the loop and then result on it.
func (s *Session) job(kind jobKind, work func() (result func())) {
	s.spawn(func() {
		select {
		case s.sems[kind] <- struct{}{}:
		case <-s.over:
			return
		}
		result := work()
		<-s.sems[kind]
		select {
		case s.results <- result:
		case <-s.over:
		}
	})
}
