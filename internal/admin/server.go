package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"strconv"
	"sync"
	"time"
)

// Bounds of the server.
const (
	maxConnections = 64
	callTimeout    = 5 * time.Second  // of the engine, for everything but watch and drain
	writeTimeout   = 10 * time.Second // for a reader to take an answer or a change
	watchBeat      = 5 * time.Second  // an idle watch sends an empty line: a dead reader is noticed
)

// Options of a Server.
type Options struct {
	Engine Engine
	// Mutations allows abort and drain.
	Mutations bool
	// Metrics serves /metrics; nil: none.
	Metrics http.Handler
	// Log gets one line per mutation, with who asked for it. Nil: slog.Default.
	Log *slog.Logger
}

// Server serves the API on one listener.
type Server struct {
	o        Options
	http     *http.Server
	stopping chan struct{} // closed by Shutdown: ends the watches
	stopOnce sync.Once
}

// NewServer returns a server that Serve starts.
func NewServer(o Options) *Server {
	if o.Log == nil {
		o.Log = slog.Default()
	}
	s := &Server{o: o, stopping: make(chan struct{})}
	s.http = &http.Server{
		Handler:           bodiless(s.routes()),
		ReadHeaderTimeout: 5 * time.Second,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    16 << 10,
		ConnContext:       withCaller,
		ErrorLog:          slog.NewLogLogger(o.Log.Handler(), slog.LevelDebug),
	}
	return s
}

// Serve answers until Shutdown; l is one that Listen returned. It returns nil after Shutdown.
func (s *Server) Serve(l net.Listener) error {
	if err := s.http.Serve(newLimit(l, maxConnections)); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve the admin API: %w", err)
	}
	return nil
}

// Shutdown ends the watches, lets other requests finish until ctx ends, then closes every connection.
func (s *Server) Shutdown(ctx context.Context) error {
	s.stopOnce.Do(func() { close(s.stopping) })
	if err := s.http.Shutdown(ctx); err != nil {
		return errors.Join(fmt.Errorf("shut the admin API down: %w", err), s.http.Close())
	}
	return nil
}

func (s *Server) routes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /live", s.live)
	mux.HandleFunc("GET /ready", s.ready)
	mux.HandleFunc("GET /v1/status", func(w http.ResponseWriter, r *http.Request) {
		answer(w, r, func(ctx context.Context) (any, error) { return s.o.Engine.Status(ctx) })
	})
	mux.HandleFunc("GET /v1/rooms", s.rooms)
	mux.HandleFunc("GET /v1/rooms/{room}", s.room)
	mux.HandleFunc("GET /v1/rooms/{room}/why", s.why)
	mux.HandleFunc("GET /v1/watch", s.watch)
	mux.HandleFunc("POST /v1/rooms/{room}/abort", s.mutation(s.abort))
	mux.HandleFunc("GET /v1/plugins", func(w http.ResponseWriter, r *http.Request) {
		answer(w, r, func(ctx context.Context) (any, error) {
			v, err := s.o.Engine.Plugins(ctx)
			return List[PluginInfo]{APIVersion, v}, err
		})
	})
	mux.HandleFunc("GET /v1/peers", func(w http.ResponseWriter, r *http.Request) {
		answer(w, r, func(ctx context.Context) (any, error) {
			v, err := s.o.Engine.Peers(ctx)
			return List[PeerInfo]{APIVersion, v}, err
		})
	})
	mux.HandleFunc("GET /v1/groups", func(w http.ResponseWriter, r *http.Request) {
		answer(w, r, func(ctx context.Context) (any, error) {
			v, err := s.o.Engine.Groups(ctx)
			return List[GroupInfo]{APIVersion, v}, err
		})
	})
	mux.HandleFunc("GET /v1/groups/why", func(w http.ResponseWriter, r *http.Request) {
		name := r.URL.Query().Get("group") // a name may hold any character, so it is no part of the path
		if name == "" {
			fail(w, http.StatusBadRequest, "bad_request", errors.New("group is missing; want ?group=NAME"))
			return
		}
		answer(w, r, func(ctx context.Context) (any, error) {
			v, err := s.o.Engine.GroupWhy(ctx, name)
			return List[string]{APIVersion, v}, err
		})
	})
	mux.HandleFunc("POST /v1/plugins/{name}/upgrade", s.mutation(s.upgrade))
	mux.HandleFunc("POST /v1/drain", s.mutation(s.drain))
	if s.o.Metrics != nil {
		mux.Handle("GET /metrics", s.o.Metrics)
	}
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	return mux
}

// bodiless refuses requests with a body: no endpoint reads one, and there is no read deadline after the
// header because it would end the long answers of watch and drain.
func bodiless(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ContentLength != 0 {
			w.Header().Set("Connection", "close")
			fail(w, http.StatusBadRequest, "bad_request", errors.New("no endpoint takes a body; use the query"))
			return
		}
		h.ServeHTTP(w, r)
	})
}

// List is the answer that lists things.
type List[T any] struct {
	APIVersion string `json:"api_version"`
	Items      []T    `json:"items"`
}

// failure is the body of every answer that is not 2xx.
type failure struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

// live answers as long as the process can: it says nothing about the engine.
func (s *Server) live(w http.ResponseWriter, _ *http.Request) {
	write(w, http.StatusOK, map[string]bool{"live": true})
}

// Readiness is the answer of /ready, 200 or 503.
type Readiness struct {
	Ready   bool     `json:"ready"`
	Reasons []string `json:"reasons,omitempty"`
}

func (s *Server) ready(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), callTimeout)
	defer cancel()
	st, err := s.o.Engine.Status(ctx)
	switch {
	case err != nil:
		write(w, http.StatusServiceUnavailable, Readiness{Reasons: []string{err.Error()}})
	case !st.Ready:
		write(w, http.StatusServiceUnavailable, Readiness{Reasons: st.NotReady})
	default:
		write(w, http.StatusOK, Readiness{Ready: true})
	}
}

func (s *Server) rooms(w http.ResponseWriter, r *http.Request) {
	f, err := parseFilter(r.URL.Query())
	if err != nil {
		fail(w, http.StatusBadRequest, "bad_request", err)
		return
	}
	answer(w, r, func(ctx context.Context) (any, error) {
		v, err := s.o.Engine.Rooms(ctx, f)
		return List[RoomInfo]{APIVersion, v}, err
	})
}

func (s *Server) room(w http.ResponseWriter, r *http.Request) {
	withRoom(w, r, func(room int64) {
		answer(w, r, func(ctx context.Context) (any, error) {
			v, err := s.o.Engine.Room(ctx, room)
			return List[RoomInfo]{APIVersion, v}, err
		})
	})
}

func (s *Server) why(w http.ResponseWriter, r *http.Request) {
	withRoom(w, r, func(room int64) {
		answer(w, r, func(ctx context.Context) (any, error) {
			v, err := s.o.Engine.Why(ctx, room)
			return List[string]{APIVersion, v}, err
		})
	})
}

func (s *Server) abort(w http.ResponseWriter, r *http.Request) {
	role := r.URL.Query().Get("role")
	if role != "" && role != "source" && role != "destination" {
		fail(w, http.StatusBadRequest, "bad_request", fmt.Errorf("role is %q; want source, destination or nothing", role))
		return
	}
	withRoom(w, r, func(room int64) {
		s.o.Log.Info("admin abort", "room", room, "role", role, "caller", callerOf(r.Context()))
		answer(w, r, func(ctx context.Context) (any, error) { return s.o.Engine.AbortRoom(ctx, room, role) })
	})
}

func (s *Server) drain(w http.ResponseWriter, r *http.Request) {
	s.o.Log.Info("admin drain", "caller", callerOf(r.Context()))
	res, err := s.o.Engine.Drain(r.Context())
	reply(w, res, err)
}

// watch streams one JSON object a line; an empty line is a beat.
func (s *Server) watch(w http.ResponseWriter, r *http.Request) {
	room := int64(-1)
	if q := r.URL.Query().Get("room"); q != "" {
		var err error
		if room, err = parseRoom(q); err != nil {
			fail(w, http.StatusBadRequest, "bad_request", err)
			return
		}
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	changes, err := s.o.Engine.WatchRooms(ctx, room)
	if err != nil {
		reply(w, nil, err)
		return
	}
	stream(ctx, s, w, changes)
}

// upgrade streams the steps as watch does the changes.
func (s *Server) upgrade(w http.ResponseWriter, r *http.Request) {
	name, q := r.PathValue("name"), r.URL.Query()
	u := Upgrade{Exec: q.Get("exec"), Wasm: q.Get("wasm"), SHA256: q.Get("sha256")}
	s.o.Log.Info("admin plugin upgrade", "plugin", name, "exec", u.Exec, "wasm", u.Wasm, "caller", callerOf(r.Context()))
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	steps, err := s.o.Engine.UpgradePlugin(ctx, name, u)
	if err != nil {
		reply(w, nil, err)
		return
	}
	stream(ctx, s, w, steps)
}

// stream writes one JSON object a line until the channel is closed.
func stream[T any](ctx context.Context, s *Server, w http.ResponseWriter, changes <-chan T) {
	var err error
	out := http.NewResponseController(w)
	w.Header().Set("Content-Type", "application/x-ndjson")
	line := []byte("\n")
	beat := time.NewTicker(watchBeat)
	defer beat.Stop()
	for {
		if err := out.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
			return
		}
		if _, err := w.Write(line); err != nil {
			return
		}
		if err := out.Flush(); err != nil {
			return
		}
		select {
		case c, ok := <-changes:
			if !ok {
				return
			}
			if line, err = json.Marshal(c); err != nil {
				return
			}
			line = append(line, '\n')
		case <-beat.C:
			line = []byte("\n")
		case <-ctx.Done():
			return
		case <-s.stopping:
			return
		}
	}
}

// mutation refuses unless mutations are enabled.
func (s *Server) mutation(h http.HandlerFunc) http.HandlerFunc {
	if s.o.Mutations {
		return h
	}
	return func(w http.ResponseWriter, _ *http.Request) {
		fail(w, http.StatusForbidden, "read_only", errors.New("the admin API is read-only; set admin.enable_mutations: true in the engine's configuration"))
	}
}

func withRoom(w http.ResponseWriter, r *http.Request, do func(room int64)) {
	room, err := parseRoom(r.PathValue("room"))
	if err != nil {
		fail(w, http.StatusBadRequest, "bad_request", err)
		return
	}
	do(room)
}

func parseRoom(s string) (int64, error) {
	room, err := strconv.ParseInt(s, 10, 64)
	if err != nil || room < 0 {
		return 0, fmt.Errorf("%q is not a room; want a number from 0 to 2^63-1", s)
	}
	return room, nil
}

// answer calls the engine with a bound and writes what it returns.
func answer(w http.ResponseWriter, r *http.Request, call func(context.Context) (any, error)) {
	ctx, cancel := context.WithTimeout(r.Context(), callTimeout)
	defer cancel()
	v, err := call(ctx)
	reply(w, v, err)
}

func reply(w http.ResponseWriter, v any, err error) {
	switch {
	case err == nil:
		write(w, http.StatusOK, v)
	case errors.Is(err, ErrNotFound):
		fail(w, http.StatusNotFound, "not_found", err)
	case errors.Is(err, ErrRefused):
		fail(w, http.StatusConflict, "refused", err)
	default:
		fail(w, http.StatusServiceUnavailable, "unavailable", err)
	}
}

func fail(w http.ResponseWriter, status int, code string, err error) {
	write(w, status, failure{code, err.Error()})
}

func write(w http.ResponseWriter, status int, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		status, b = http.StatusInternalServerError, []byte(`{"code":"internal","message":"the answer cannot be written as JSON"}`)
	}
	// A server whose connections cannot have a deadline still answers.
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(writeTimeout))
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(b, '\n')) // the reader went away: nobody is left to tell
}
