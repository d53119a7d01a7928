package conformance

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/terminus-kv/terminus/plugins/sdk"
	"github.com/terminus-kv/terminus/plugins/sdk/contract"
)

func init() {
	register(
		Case{
			ID: "handshake/says-what-it-is", Rule: "R12", Profile: Process,
			Title: "the handshake's answer is complete: name, kinds, version, schema, endpoint",
			Script: `
> Handshake
< version 1, a name, at least one kind, features once each, a JSON Schema of the options, an endpoint of at most 64 KiB`,
			Run: func(t *T) { handshakeComplete(t, t.A().Hello()) },
		},
		Case{
			ID: "handshake/no-common-version", Rule: "R12", Profile: Process,
			Title: "without a common version the plugin answers 0 and names its own",
			Script: `
> Handshake(versions [99])
< version 0, error naming its own versions`,
			Run: func(t *T) {
				a := handshakeWith(t, func(r *contract.HandshakeRequest) { r.Versions = []uint32{99} })
				own := strconv.Itoa(int(t.A().Hello().Version))
				t.Check(a.Version == 0, "R12", "version 0, none being common", "version %d", a.Version)
				t.Check(slices.Contains(handshakeWords.FindAllString(a.Error, -1), own), "R12", "an error that names the plugin's own version, "+own, "%q", a.Error)
			},
		},
		Case{
			ID: "handshake/newer-host", Rule: "R12", Profile: Process,
			Title: "of the host's versions the plugin takes the newest that it speaks",
			Script: `
> Handshake(versions [99, 1])
< version 1
> Stats
< Stats`,
			Run: func(t *T) {
				want := t.A().Hello().Version
				a := handshakeWith(t, func(r *contract.HandshakeRequest) { r.Versions = []uint32{99, want} })
				t.Check(a.Version == want && a.Error == "", "R12", fmt.Sprintf("version %d", want), "version %d, error %q", a.Version, a.Error)
			},
		},
		Case{
			ID: "handshake/unknown-host-feature", Rule: "R12", Profile: Process,
			Title: "a feature of the host that the plugin does not know is ignored",
			Script: `
> Handshake(features: all known ones and one from the future)
< version 1, no error
> Stats
< Stats`,
			Run: func(t *T) {
				a := handshakeWith(t, func(r *contract.HandshakeRequest) { r.Features = append(slices.Clone(r.Features), "from-the-future") })
				t.Check(a.Error == "" && a.Version != 0, "R12", "no error for a feature that is not known", "version %d, error %q", a.Version, a.Error)
			},
		},
		Case{
			ID: "handshake/unknown-option", Rule: "R12", Profile: Process,
			Title: "an option that the plugin does not know is an error that names it",
			Script: `
> Handshake(config_json {"no_such_option_of_it": true})
< error naming the option`,
			Run: func(t *T) {
				const option = "no_such_option_of_it"
				a := handshakeWith(t, func(r *contract.HandshakeRequest) { r.ConfigJson = []byte(`{"` + option + `": true}`) })
				t.Check(strings.Contains(a.Error, option), "R12", "an error that names the unknown option", "%q", a.Error)
			},
		},
		Case{
			ID: "handshake/garbage-config", Rule: "R12", Profile: Process,
			Title: "options that are no JSON object are an error, not a crash",
			Script: `
> Handshake(config_json: half an object; an array; a string)
< error, each time`,
			Run: func(t *T) {
				for _, garbage := range []string{`{"a":`, `[1]`, `"x"`} {
					a := handshakeWith(t, func(r *contract.HandshakeRequest) { r.ConfigJson = []byte(garbage) })
					t.Check(a.Error != "", "R12", "an error for options that are no JSON object: "+garbage, "none")
				}
			},
		},
		Case{
			ID: "cli/info", Rule: "R12", Profile: Process, Needs: []string{NeedProcess},
			Title: "PLUGIN info prints as JSON what the handshake says, without an engine",
			Script: `
> PLUGIN info
= JSON on standard output: name, version, features, limits, config_schema as in the handshake; exit status 0`,
			Run: cliInfo,
		},
		Case{
			ID: "cli/by-hand", Rule: "R12", Profile: Process, Needs: []string{NeedProcess},
			Title: "a plugin that somebody starts by hand says what it is and exits",
			Script: `
> PLUGIN, without the cookie
= it says something, exits with a status other than 0, and does not hang`,
			Run: func(t *T) {
				out, problems, code := cliRun(t)
				t.Check(code != 0, "R12", "an exit status other than 0 without the cookie", "0")
				t.Check(strings.TrimSpace(out+problems) != "", "R12", "some words on what it is", "nothing")
			},
		},
	)
}

// handshakeWords are the words and numbers of a text.
var handshakeWords = regexp.MustCompile(`[A-Za-z]+|[0-9]+`)

// handshakeWith starts a further plugin with another request and returns its answer. A plugin that went on
// belongs to the case, whose checks ask it for Stats.
func handshakeWith(t *T, change func(*contract.HandshakeRequest)) *contract.HandshakeResponse {
	answers := make(chan *contract.HandshakeResponse, 1)
	n, err := t.run.launch("door", Identity{
		Node: t.run.newNode(), Incarnation: 1, Epoch: 1, HostID: hostID(), Asking: change,
		Answered: func(r *contract.HandshakeResponse) { answers <- proto.Clone(r).(*contract.HandshakeResponse) },
	})
	if n != nil {
		t.adopt(n)
	}
	select {
	case a := <-answers:
		return a
	default:
		t.Fail("R12", "an answer to the handshake", "%v", err)
		return nil
	}
}

var handshakeName = regexp.MustCompile(`^[a-z][a-z0-9-]{0,31}$`)

func handshakeComplete(t *T, h *contract.HandshakeResponse) {
	t.Check(handshakeName.MatchString(h.Name), "R12", "a name of the form [a-z][a-z0-9-]*, at most 32 bytes", "%q", h.Name)
	t.Check(h.PluginVersion != "", "R12", "a version of the plugin", "none")
	t.Check(h.Version == sdk.ContractVersion, "R12", fmt.Sprintf("contract version %d", sdk.ContractVersion), "%d", h.Version)
	t.Check(len(h.Kinds) > 0, "R12", "at least one kind", "none")
	t.Check(len(h.Endpoint) <= sdk.MaxEndpoint, "R12", fmt.Sprintf("an endpoint of at most %d bytes", sdk.MaxEndpoint), "%d", len(h.Endpoint))
	features := slices.Sorted(slices.Values(h.Features))
	t.Check(len(slices.Compact(slices.Clone(features))) == len(features), "R12", "each feature once", "%v", h.Features)
	if h.ConfigSchema != "" {
		var schema map[string]any
		err := json.Unmarshal([]byte(h.ConfigSchema), &schema)
		t.Check(err == nil, "R12", "a config_schema that is a JSON object", "%v", err)
	}
}

// cliRun runs the plugin's program by hand, in bounded time.
func cliRun(t *T, args ...string) (stdout, stderr string, code int) {
	c, ok := t.run.cfg.Carrier.(Commander)
	if !ok {
		t.Unsupported("the carrier has no program that could be run by hand")
	}
	bound := t.scaled(15 * time.Second)
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	cmd, err := c.Command(ctx, args...)
	if err != nil {
		t.broke("run the plugin by hand: %v", err)
	}
	var out, problems bytes.Buffer
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay, cmd.Dir = &out, &problems, time.Second, os.TempDir()
	err = cmd.Run()
	t.Check(ctx.Err() == nil, "R12", fmt.Sprintf("`%s` to end", strings.Join(cmd.Args, " ")), "nothing within %v", bound)
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fail("R12", fmt.Sprintf("`%s` to run", strings.Join(cmd.Args, " ")), "%v", err)
	}
	return out.String(), problems.String(), cmd.ProcessState.ExitCode()
}

func cliInfo(t *T) {
	out, problems, code := cliRun(t, "info")
	t.Check(code == 0, "R12", "exit status 0 of `info`", "%d, saying %q", code, strings.TrimSpace(problems))
	var info struct {
		Name     string
		Version  string
		Features []string
		Limits   json.RawMessage
		Schema   any `json:"config_schema"`
	}
	err := json.Unmarshal([]byte(out), &info)
	t.Check(err == nil, "R12", "JSON on standard output of `info`", "%v in %.200q", err, out)
	h := t.A().Hello()
	same := func(what string, got, want any) {
		t.Check(reflect.DeepEqual(got, want), "R12", fmt.Sprintf("%s as in the handshake, %v", what, want), "%v", got)
	}
	same("name", info.Name, h.Name)
	same("version", info.Version, h.PluginVersion)
	same("features", slices.Sorted(slices.Values(info.Features)), slices.Sorted(slices.Values(h.Features)))
	var schema any
	if h.ConfigSchema != "" {
		if err := json.Unmarshal([]byte(h.ConfigSchema), &schema); err != nil {
			t.Fail("R12", "a config_schema that is JSON", "%v", err)
		}
	}
	same("config_schema", info.Schema, schema)
	limits := &contract.Limits{}
	if err := protojson.Unmarshal(info.Limits, limits); err != nil {
		t.Fail("R12", "limits, with the names of the contract", "%v", err)
	}
	want := h.Limits
	if want == nil {
		want = &contract.Limits{}
	}
	t.Check(proto.Equal(limits, want), "R12", "limits as in the handshake, "+Describe(want), "%s", Describe(limits))
}
