package admin

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

// maxAnswer bounds what the client reads of one answer.
const maxAnswer = 64 << 20

// ErrReadOnly: the engine's configuration does not allow mutations.
var ErrReadOnly = errors.New("read-only")

// Client calls the API of one engine. Its methods are those of Engine; the context bounds each call.
type Client struct {
	socket string
	http   *http.Client
}

// NewClient returns a client of the engine at a socket; it connects when it is used.
func NewClient(socket string) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		d := net.Dialer{Timeout: 3 * time.Second}
		return d.DialContext(ctx, "unix", socket)
	}
	return &Client{socket: socket, http: &http.Client{Transport: &http.Transport{
		DialContext:            dial,
		MaxIdleConns:           1,
		IdleConnTimeout:        30 * time.Second,
		MaxResponseHeaderBytes: 16 << 10,
	}}}
}

// Close drops the idle connection.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Status tells who the engine is and whether it is ready.
func (c *Client) Status(ctx context.Context) (Status, error) {
	return get[Status](ctx, c, "/v1/status", nil)
}

// Ready returns the answer of /ready.
func (c *Client) Ready(ctx context.Context) (Readiness, error) {
	res, err := c.do(ctx, http.MethodGet, "/ready", nil)
	if err != nil {
		return Readiness{}, err
	}
	defer res.Body.Close()
	var r Readiness
	return r, decode(res.Body, &r)
}

// Rooms lists records.
func (c *Client) Rooms(ctx context.Context, f RoomFilter) ([]RoomInfo, error) {
	return list[RoomInfo](ctx, c, "/v1/rooms", f.values())
}

// Room returns the records of one room.
func (c *Client) Room(ctx context.Context, room int64) ([]RoomInfo, error) {
	return list[RoomInfo](ctx, c, roomPath(room), nil)
}

// Why explains the records of one room.
func (c *Client) Why(ctx context.Context, room int64) ([]string, error) {
	return list[string](ctx, c, roomPath(room)+"/why", nil)
}

// AbortRoom ends a room.
func (c *Client) AbortRoom(ctx context.Context, room int64, role string) (AbortResult, error) {
	q := url.Values{}
	if role != "" {
		q.Set("role", role)
	}
	return call[AbortResult](ctx, c, http.MethodPost, roomPath(room)+"/abort", q)
}

// Plugins lists plugins.
func (c *Client) Plugins(ctx context.Context) ([]PluginInfo, error) {
	return list[PluginInfo](ctx, c, "/v1/plugins", nil)
}

// Peers lists engines.
func (c *Client) Peers(ctx context.Context) ([]PeerInfo, error) {
	return list[PeerInfo](ctx, c, "/v1/peers", nil)
}

// Groups lists groups.
func (c *Client) Groups(ctx context.Context) ([]GroupInfo, error) {
	return list[GroupInfo](ctx, c, "/v1/groups", nil)
}

// GroupWhy explains a group and its pairs.
func (c *Client) GroupWhy(ctx context.Context, name string) ([]string, error) {
	return list[string](ctx, c, "/v1/groups/why", url.Values{"group": {name}})
}

// Drain begins a drain and waits for its end.
func (c *Client) Drain(ctx context.Context) (DrainResult, error) {
	return call[DrainResult](ctx, c, http.MethodPost, "/v1/drain", nil)
}

// UpgradePlugin begins an upgrade and calls each for its steps; its error is that of the last one.
func (c *Client) UpgradePlugin(ctx context.Context, name string, u Upgrade, each func(UpgradeStep)) error {
	q := url.Values{}
	for key, value := range map[string]string{"exec": u.Exec, "wasm": u.Wasm, "sha256": u.SHA256} {
		if value != "" {
			q.Set(key, value)
		}
	}
	over := false
	err := c.stream(ctx, http.MethodPost, "/v1/plugins/"+url.PathEscape(name)+"/upgrade", q, func(line []byte) error {
		var s UpgradeStep
		if err := json.Unmarshal(line, &s); err != nil {
			return fmt.Errorf("read a step: %w", err)
		}
		if s.Done {
			over = true
			if s.Error != "" {
				return errors.New(s.Error)
			}
			return nil
		}
		each(s)
		return nil
	})
	switch {
	case err != nil:
		return err
	case over:
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	}
	return fmt.Errorf("the engine ended the answer: %w", io.ErrUnexpectedEOF)
}

// WatchRooms calls each for every change until ctx ends (nil), each returns an error, or the engine
// ends the stream (io.ErrUnexpectedEOF). room < 0 watches all rooms.
func (c *Client) WatchRooms(ctx context.Context, room int64, each func(RoomChange) error) error {
	q := url.Values{}
	if room >= 0 {
		q.Set("room", strconv.FormatInt(room, 10))
	}
	err := c.stream(ctx, http.MethodGet, "/v1/watch", q, func(line []byte) error {
		var change RoomChange
		if err := json.Unmarshal(line, &change); err != nil {
			return fmt.Errorf("read a change: %w", err)
		}
		return each(change)
	})
	switch {
	case ctx.Err() != nil:
		return nil
	case err != nil:
		return err
	}
	return fmt.Errorf("the engine ended the watch: %w", io.ErrUnexpectedEOF)
}

// stream calls each for every line of an answer that is not a beat, until its end, which is nil.
func (c *Client) stream(ctx context.Context, method, path string, q url.Values, each func(line []byte) error) error {
	res, err := c.do(ctx, method, path, q)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return refusal(res)
	}
	lines := bufio.NewScanner(res.Body)
	lines.Buffer(make([]byte, 64<<10), 4<<20)
	for lines.Scan() {
		line := bytes.TrimSpace(lines.Bytes())
		if len(line) == 0 {
			continue // a beat
		}
		if err := each(line); err != nil {
			return err
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("read the engine's lines: %w", err)
	}
	return nil
}

func roomPath(room int64) string { return "/v1/rooms/" + strconv.FormatInt(room, 10) }

func list[T any](ctx context.Context, c *Client, path string, q url.Values) ([]T, error) {
	l, err := get[List[T]](ctx, c, path, q)
	return l.Items, err
}

func get[T any](ctx context.Context, c *Client, path string, q url.Values) (T, error) {
	return call[T](ctx, c, http.MethodGet, path, q)
}

func call[T any](ctx context.Context, c *Client, method, path string, q url.Values) (T, error) {
	var v T
	res, err := c.do(ctx, method, path, q)
	if err != nil {
		return v, err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return v, refusal(res)
	}
	return v, decode(res.Body, &v)
}

func (c *Client) do(ctx context.Context, method, path string, q url.Values) (*http.Response, error) {
	u := url.URL{Scheme: "http", Host: "engine", Path: path, RawQuery: q.Encode()}
	req, err := http.NewRequestWithContext(ctx, method, u.String(), nil)
	if err != nil {
		return nil, err
	}
	res, err := c.http.Do(req)
	if err != nil {
		var ue *url.Error
		if errors.As(err, &ue) {
			err = ue.Err
		}
		return nil, fmt.Errorf("ask the engine at %s: %w", c.socket, err)
	}
	return res, nil
}

func decode(r io.Reader, v any) error {
	b, err := io.ReadAll(io.LimitReader(r, maxAnswer+1))
	switch {
	case err != nil:
		return fmt.Errorf("read the engine's answer: %w", err)
	case len(b) > maxAnswer:
		return fmt.Errorf("the engine's answer is larger than %d bytes; narrow the filter", maxAnswer)
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("read the engine's answer: %w", err)
	}
	return nil
}

// refusal turns an answer that is not 200 into an error that matches the sentinel of its code.
func refusal(res *http.Response) error {
	var f failure
	if err := decode(res.Body, &f); err != nil || f.Message == "" {
		return fmt.Errorf("the engine answered %s", res.Status)
	}
	sentinel := map[string]error{"not_found": ErrNotFound, "refused": ErrRefused, "read_only": ErrReadOnly}[f.Code]
	if sentinel == nil {
		return errors.New(f.Message)
	}
	return &answerError{f.Message, sentinel}
}

// answerError has the engine's words and matches a sentinel.
type answerError struct {
	msg  string
	kind error
}

func (e *answerError) Error() string { return e.msg }
func (e *answerError) Unwrap() error { return e.kind }
