package config

import (
	"fmt"
	"maps"
	"net"
	"net/url"
	"os"
	"os/user"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/terminus-kv/terminus/internal/regular"
)

var (
	nodeName   = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$`)
	pluginName = regexp.MustCompile(`^[a-z][a-z0-9-]{0,31}$`)
	envName    = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
	hexSum     = regexp.MustCompile(`^[0-9a-fA-F]{64}$`)
)

// InsecureWords is what peers.insecure_listen must say; the peer listener asks for the same words.
const InsecureWords = "i accept that anyone who reaches this port can read and write KV cache"

// maxSocketPath is the longest path of a unix socket: sun_path holds 108 bytes with the final NUL.
const maxSocketPath = 107

// maxOpBytes is the largest operation that a plugin is ever given.
const maxOpBytes = Bytes(64 << 20)

// checker looks at a merged Config. A key that already has a problem is not judged again.
type checker struct {
	*Config
	problems *Problems
}

// fail puts down a problem at the source of key.
func (c *checker) fail(key, msg, fix string) { c.failAt(key, key, msg, fix) }

// failAt puts down a problem of key at the source of another key, which makes it one.
func (c *checker) failAt(cause, key, msg, fix string) {
	if !c.problems.has(key) {
		c.problems.add(c.sourceOf(cause), key, msg, fix)
	}
}

// given returns the first of the keys that a source set, or the first.
func (c *checker) given(keys ...string) string {
	for _, k := range keys {
		if _, ok := c.origin[k]; ok {
			return k
		}
	}
	return keys[0]
}

// sourceOf is the source of a key, or the place of the nearest mapping or list around it.
func (c *Config) sourceOf(key string) Source {
	for {
		if s, ok := c.origin[key]; ok {
			return s
		}
		if s, ok := c.above[key]; ok {
			return s
		}
		i := strings.LastIndexAny(key, ".[")
		if i < 0 {
			return Source{Kind: FromDefault}
		}
		key = key[:i]
	}
}

// check judges what can be judged without looking at the machine.
func (cfg *Config) check(problems *Problems) {
	c := &checker{cfg, problems}
	if !nodeName.MatchString(c.Node) {
		c.fail("node", fmt.Sprintf("%q cannot be a node name", c.Node), "use 1 to 63 letters, digits, dots, dashes and underscores, starting and ending with a letter or digit")
	}
	c.checkSockets()
	c.checkBackends()
	c.checkPeers()
	c.checkLimits()
	c.checkClocks()
	if c.Metrics.Listen != "" {
		c.checkAddress("metrics.listen", c.Metrics.Listen, true)
	}
}

func (c *checker) checkSockets() {
	for _, s := range []struct{ key, path string }{{"worker.socket", c.Worker.Socket}, {"admin.socket", c.Admin.Socket}} {
		if len(s.path) > maxSocketPath {
			c.fail(c.given(s.key, "runtime_dir", "node"), fmt.Sprintf("the path %s has %d bytes, a unix socket allows %d", s.path, len(s.path), maxSocketPath), "set a shorter path or a shorter runtime_dir")
		}
	}
	if c.Worker.Socket == c.Admin.Socket {
		c.fail("worker.socket", "is the same path as admin.socket", "give each its own path")
	}
	if c.Worker.Group != "" && c.Worker.Mode == "0600" {
		c.fail("worker.group", "has no effect while worker.mode is 0600", `set worker.mode: "0660"`)
	}
}

func (c *checker) checkBackends() {
	names := slices.Sorted(maps.Keys(c.Plugins))
	known := names
	if !slices.Contains(known, BuiltinBackend) {
		known = append([]string{BuiltinBackend}, names...)
	}
	if len(c.Transfer.Backend) == 0 {
		c.fail("transfer.backend", "names no backend", "write for example tcp")
	}
	for i, b := range c.Transfer.Backend {
		switch {
		case !slices.Contains(known, b):
			fix := didYouMean(b, known)
			if Suggest(b, known) == "" && pluginName.MatchString(b) {
				fix = fmt.Sprintf("add it: plugins: {%s: {exec: engine-plugin-%s}}, or use one of: %s", b, b, strings.Join(known, ", "))
			}
			c.fail("transfer.backend", fmt.Sprintf("%q is neither built in nor under plugins", b), fix)
		case slices.Contains(c.Transfer.Backend[:i], b):
			c.fail("transfer.backend", fmt.Sprintf("names %q twice", b), "keep one")
		}
	}
	if l := c.Transfer.RequireLane; l != "" && !slices.Contains(Lanes, l) {
		c.fail("transfer.require_lane", fmt.Sprintf("%q is not a lane", l), "use one of: "+strings.Join(Lanes, ", "))
	}
	if c.Collective.Backend != "" {
		c.fail("collective.backend", "collectives are not served by this version", "remove the key")
	}
	for _, name := range names {
		key, p := "plugins."+name, c.Plugins[name]
		if !pluginName.MatchString(name) {
			c.fail(key, fmt.Sprintf("%q cannot be a plugin name", name), "use a lower-case letter and up to 31 lower-case letters, digits and dashes")
			continue
		}
		if p.Wasm != "" && p.Exec != "" {
			c.fail(key+".wasm", "is set together with exec: a plugin is a module or a program", "keep one")
		} else if p.Wasm != "" && (p.Script != "" || len(p.Args) > 0 || len(p.Env) > 0) {
			c.fail(key+".wasm", "is a module, and script, args and env are of a program", "remove them; what a guest is told goes into options")
		}
		if p.Script != "" && p.Exec == "engine-plugin-"+name {
			c.fail(key+".script", "is a file for an interpreter, and exec names none", "set exec to the interpreter, such as python3")
		}
		if p.SHA256 != "" && !hexSum.MatchString(p.SHA256) {
			c.fail(key+".sha256", "is not a SHA-256", "write the 64 hexadecimal digits that sha256sum prints")
		}
		if name == BuiltinBackend && p.Exec == "" && p.Wasm == "" && (len(p.Args) > 0 || p.SHA256 != "") {
			c.fail(key, "args and sha256 are of a program, and the built-in backend has none", "set exec, or remove them")
		}
		for _, v := range slices.Sorted(maps.Keys(p.Env)) {
			if !envName.MatchString(v) {
				c.fail(key+".env", fmt.Sprintf("%q cannot be the name of a variable", v), "use letters, digits and underscores")
			}
		}
	}
}

func (c *checker) checkPeers() {
	p := c.Peers
	c.checkTLS()
	if p.Listen != "" && c.checkAddress("peers.listen", p.Listen, true) && !p.TLS.Enabled() && !loopback(p.Listen) {
		switch p.InsecureListen {
		case InsecureWords:
		case "":
			c.fail("peers.listen", p.Listen+" is open to the network and peers.tls is not set: anyone who reaches it could read and write KV cache",
				"set peers.tls, listen on a loopback address, or set peers.insecure_listen: "+InsecureWords)
		default:
			c.fail("peers.insecure_listen", "does not say the words that allow a listener without TLS", "write exactly: "+InsecureWords)
		}
	}
	if p.Advertise != "" && p.Advertise != p.Listen {
		c.checkAddress("peers.advertise", p.Advertise, false)
	}
	if len(p.Static) > 0 && p.Driver != "static" {
		c.fail("peers.static", "is not read by driver "+p.Driver, "set peers.driver: static, or remove the list")
	}
	if len(p.Etcd.Endpoints) > 0 && p.Driver != "etcd" {
		c.fail("peers.etcd.endpoints", "is not read by driver "+p.Driver, "set peers.driver: etcd, or remove the endpoints")
	}
	if p.Driver == "local" {
		return
	}
	if p.Listen == "" {
		c.failAt("peers.driver", "peers.listen", "driver "+p.Driver+" needs an address to listen on", "set for example peers.listen: 127.0.0.1:7000")
	} else if host, port, err := net.SplitHostPort(p.Advertise); err == nil && (host == "" || net.ParseIP(host).IsUnspecified()) {
		c.fail(c.given("peers.advertise", "peers.listen"), p.Advertise+" is no address that another engine could dial", "set peers.advertise to this node's address and port")
	} else if err == nil && port == "0" && p.Driver == "etcd" {
		c.fail(c.given("peers.advertise", "peers.listen"), p.Advertise+" has no port that another engine could dial", "write a port, or set peers.advertise")
	}
	if p.Driver == "etcd" {
		c.checkEtcd()
		return
	}
	if len(p.Static) == 0 {
		c.failAt("peers.driver", "peers.static", "driver static needs the other engines", "list them: static: [{node: decode-0, address: \"10.0.0.2:7000\"}]")
	}
	seen := map[string]bool{}
	for i, s := range p.Static {
		key := fmt.Sprintf("peers.static[%d]", i)
		switch {
		case s.Node == "":
			c.fail(key+".node", "the entry has no node name", "write node: and the name that the other engine has in its configuration")
		case !nodeName.MatchString(s.Node):
			c.fail(key+".node", fmt.Sprintf("%q cannot be a node name", s.Node), "write the other engine's node")
		case s.Node == c.Node:
			c.fail(key+".node", fmt.Sprintf("%q is this engine", s.Node), "list only the others")
		case seen[s.Node]:
			c.fail(key+".node", fmt.Sprintf("%q is listed twice", s.Node), "keep one")
		}
		seen[s.Node] = true
		if s.Address == "" {
			c.fail(key+".address", "the entry has no address", "write address: and the host:port that the other engine listens on")
		} else {
			c.checkAddress(key+".address", s.Address, false)
		}
	}
}

func (c *checker) checkEtcd() {
	e := c.Peers.Etcd
	const key = "peers.etcd."
	if len(e.Endpoints) == 0 {
		c.failAt("peers.driver", key+"endpoints", "driver etcd needs the store", "set for example peers.etcd.endpoints: [\"https://10.0.0.9:2379\"]")
	}
	secure, open := 0, ""
	for _, ep := range e.Endpoints {
		u, err := url.Parse(ep)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Port() == "" || u.Hostname() == "" || ep != u.Scheme+"://"+u.Host {
			c.fail(key+"endpoints", fmt.Sprintf("%q is not the URL of a member", ep), "write such as https://10.0.0.9:2379")
			return
		}
		if u.Scheme == "https" {
			secure++
		} else if !loopback(u.Host) {
			open = ep
		}
	}
	if secure != 0 && secure != len(e.Endpoints) {
		c.fail(key+"endpoints", "mixes http and https", "write the same for all")
	}
	if secure == 0 && len(e.Endpoints) > 0 && e.TLS != (EtcdTLS{}) {
		c.fail(c.given(key+"tls.ca", key+"tls.cert", key+"tls.key", key+"tls.server_name"), "has no effect on http endpoints", "write https in peers.etcd.endpoints, or remove peers.etcd.tls")
	}
	if (e.TLS.Cert == "") != (e.TLS.Key == "") {
		c.fail(c.given(key+"tls.cert", key+"tls.key"), "cert and key go together", "set both or none")
	}
	if (e.Username == "") != (e.PasswordFile == "") {
		c.fail(c.given(key+"username", key+"password_file"), "username and password_file go together", "set both or none")
	} else if e.Username != "" && open != "" {
		c.fail(key+"endpoints", "the password would go to "+open+" in the clear", "write https in peers.etcd.endpoints")
	}
	if e.Prefix == "" || e.Prefix[0] != '/' || strings.HasSuffix(e.Prefix, "/") {
		c.fail(key+"prefix", fmt.Sprintf("%q cannot be a prefix", e.Prefix), "write one that starts with a slash and does not end with one, such as /terminus")
	}
	if l := e.Lease.Std(); l < 2*time.Second || l > 10*time.Minute || l%time.Second != 0 {
		c.fail(key+"lease", e.Lease.String()+" cannot be a lease", "write whole seconds from 2s to 10m")
	}
}

func (c *checker) checkTLS() {
	t := c.Peers.TLS
	if !t.Enabled() {
		return
	}
	for _, f := range []struct{ key, path string }{{"cert", t.Cert}, {"key", t.Key}, {"ca", t.CA}} {
		if f.path == "" {
			c.fail("peers.tls."+f.key, "is missing while another of cert, key and ca is set", "set all three")
		}
	}
}

func (c *checker) checkLimits() {
	l := c.Limits
	if l.OpBytes > maxOpBytes {
		c.fail("limits.op_bytes", l.OpBytes.String()+" is more than an operation may have", "write at most "+maxOpBytes.String())
	}
	if l.OpBytes > l.PeerBytes {
		c.fail(c.given("limits.peer_bytes", "limits.op_bytes"), fmt.Sprintf("peer_bytes (%s) is less than one operation (op_bytes, %s): nothing could be sent", l.PeerBytes, l.OpBytes), "write at least "+l.OpBytes.String())
	}
	if l.OpBytes > l.InflightBytes {
		c.fail(c.given("limits.inflight_bytes", "limits.op_bytes"), fmt.Sprintf("inflight_bytes (%s) is less than one operation (op_bytes, %s)", l.InflightBytes, l.OpBytes), "write at least "+l.OpBytes.String())
	}
}

func (c *checker) checkClocks() {
	k := c.Clocks
	if k.PeerSuspect >= k.PeerDead {
		c.fail(c.given("clocks.peer_suspect", "clocks.peer_dead"), fmt.Sprintf("peer_suspect (%s) is not shorter than peer_dead (%s)", k.PeerSuspect, k.PeerDead), "a peer is suspected before it is dead; write such as 2s and 10s")
	}
	if k.Verdict <= k.PeerDead {
		c.fail(c.given("clocks.verdict", "clocks.peer_dead"), fmt.Sprintf("verdict (%s) is not longer than peer_dead (%s): an outcome would be unknown before the judge can be dead", k.Verdict, k.PeerDead), "write peer_dead and time for one resync, such as "+(k.PeerDead+k.PeerDead/2).String())
	}
}

// CheckBackend judges what only a running backend can tell: progress is its own progress timeout, 0 when
// it has none. The node calls it when a plugin's handshake says so.
func (c *Config) CheckBackend(name string, progress Duration) error {
	if progress < c.Clocks.Stall {
		return nil
	}
	return Problems{{Source: c.sourceOf("clocks.stall"), Key: "clocks.stall",
		Msg: fmt.Sprintf("%s is not longer than the progress timeout of backend %s (%s)", c.Clocks.Stall, name, progress),
		Fix: "write more than " + progress.String() + ", or shorten the backend's own timeout"}}
}

// checkAddress judges host:port; a listener may leave the host out.
func (c *checker) checkAddress(key, addr string, listen bool) bool {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		c.fail(key, fmt.Sprintf("%q is not host:port", addr), "write such as 127.0.0.1:7000 or [::1]:7000")
		return false
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || (n == 0 && !listen) {
		c.fail(key, fmt.Sprintf("%q is not a port", port), "write a number from 1 to 65535")
		return false
	}
	if host == "" && !listen {
		c.fail(key, fmt.Sprintf("%q has no host", addr), "write host:port")
		return false
	}
	return true
}

func loopback(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	return err == nil && (host == "localhost" || net.ParseIP(host).IsLoopback())
}

// CheckMachine judges whether this machine has what the configuration names. The error is a Problems.
// Load calls it, unless told that the configuration is for elsewhere.
func (c *Config) CheckMachine() error {
	var ps Problems
	c.checkMachine(&ps)
	if len(ps) > 0 {
		return ps.sorted(nil)
	}
	return nil
}

func (cfg *Config) checkMachine(problems *Problems) {
	c := &checker{cfg, problems}
	t, e := c.Peers.TLS, c.Peers.Etcd
	for _, f := range []struct{ key, path, what string }{
		{"tls.cert", t.Cert, "PEM file"}, {"tls.key", t.Key, "PEM file"}, {"tls.ca", t.CA, "PEM file"},
		{"etcd.tls.cert", e.TLS.Cert, "PEM file"}, {"etcd.tls.key", e.TLS.Key, "PEM file"}, {"etcd.tls.ca", e.TLS.CA, "PEM file"},
		{"etcd.password_file", e.PasswordFile, "file"},
	} {
		if f.path == "" {
			continue
		}
		if fh, err := regular.Open(f.path); err != nil {
			c.fail("peers."+f.key, plainPathError("cannot read "+f.path, err).Error(), "name a "+f.what+" that the engine can read")
		} else {
			fh.Close()
		}
	}
	if g := c.Worker.Group; g != "" {
		if _, err := strconv.ParseUint(g, 10, 32); err != nil {
			if _, err := user.LookupGroup(g); err != nil {
				c.fail("worker.group", fmt.Sprintf("this machine has no group %q", g), "create it, or write its number")
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(c.Plugins)) {
		if wasm := c.Plugins[name].Wasm; wasm != "" {
			if info, err := os.Stat(wasm); err != nil {
				c.fail("plugins."+name+".wasm", plainPathError("cannot find "+wasm, err).Error(), "name the module's file")
			} else if !info.Mode().IsRegular() {
				c.fail("plugins."+name+".wasm", wasm+" is not a file", "name the module's file")
			}
		}
		if p := c.Plugins[name]; filepath.IsAbs(p.Exec) {
			if info, err := os.Stat(p.Exec); err != nil {
				c.fail("plugins."+name+".exec", plainPathError("cannot find "+p.Exec, err).Error(), "name the plugin's program")
			} else if info.IsDir() || info.Mode()&0o111 == 0 {
				c.fail("plugins."+name+".exec", p.Exec+" is not executable", "name the plugin's program, or chmod +x it")
			}
		}
	}
}
