package telemetry

import (
	"fmt"
	"net"
	"net/http"
	"time"
)

// Listen opens the Prometheus listener of config.Metrics and returns a server for it: Serve it, and
// Shutdown it in the end.
func Listen(addr string, metrics http.Handler) (net.Listener, *http.Server, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, nil, fmt.Errorf("listen for Prometheus (metrics.listen): %w", err)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", metrics)
	return l, &http.Server{
		Handler:           mux,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       5 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    16 << 10,
	}, nil
}
