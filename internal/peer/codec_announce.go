package peer

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/terminus-kv/terminus/core/statemachine"
	"github.com/terminus-kv/terminus/internal/peer/wire"
)

// Bounds of what one engine may announce.
const (
	maxGroups    = 1024
	maxPools     = 16384
	maxTensors   = 4096 // of one pool
	maxEndpoints = 64
	maxLost      = 64 // the newest are repeated after a Hello
	maxBlob      = 64 << 10
	tokenBytes   = 32
	maxGroupSize = 65536
	maxDetail    = 1024
)

// Fingerprint is SHA-256 over the fields of the layout in a fixed text form. Both sides compute it:
// an announced one that differs from its own fields is refused.
func (l Layout) Fingerprint() [32]byte {
	text := fmt.Appendf(nil, "terminus layout 1\ndtype=%q\nlayers=%d\nkv_heads=%d\nhead_dim=%d\npage_tokens=%d\nkind=%q\n",
		l.DType, l.Layers, l.KVHeads, l.HeadDim, l.PageTokens, l.Kind)
	if l.Order != "" {
		text = fmt.Appendf(text, "order=%q\n", l.Order)
	}
	return sha256.Sum256(text)
}

// PairToken is the token of a peer engine for one endpoint: HMAC-SHA256 of (incarnation, node) under
// the endpoint's secret.
func PairToken(secret []byte, node string, incarnation uint64) []byte {
	h := hmac.New(sha256.New, secret)
	h.Write([]byte("terminus pair token 1\n"))
	h.Write(binary.LittleEndian.AppendUint64(nil, incarnation))
	h.Write([]byte(node))
	return h.Sum(nil)
}

func encodeGroup(g Group) (*wire.Frame, error) {
	fp := g.Layout.Fingerprint()
	w := &wire.Group{
		Name: g.Name, Role: wire.Role(g.Role), Size: uint32(g.Size), Fingerprint: fp[:],
		Layout: &wire.Layout{
			Dtype: g.Layout.DType, Layers: uint32(g.Layout.Layers), KvHeads: uint32(g.Layout.KVHeads),
			HeadDim: uint32(g.Layout.HeadDim), PageTokens: uint32(g.Layout.PageTokens), Kind: g.Layout.Kind, Order: g.Layout.Order,
		},
	}
	for _, r := range g.Ranks {
		w.Ranks = append(w.Ranks, uint32(r))
	}
	if _, err := decodeGroup(w); err != nil {
		return nil, fmt.Errorf("group %q: %w", g.Name, err)
	}
	return &wire.Frame{Frame: &wire.Frame_Group{Group: w}}, nil
}

func decodeGroup(w *wire.Group) (Group, error) {
	g := Group{Name: w.GetName()}
	var err error
	if g.Role, err = decodeRole("group.role", w.GetRole()); err != nil {
		return g, err
	}
	if err := checkName("group.name", g.Name); err != nil {
		return g, err
	}
	if w.GetSize() == 0 || w.GetSize() > maxGroupSize {
		return g, bad("group.size", "%d: want 1 to %d", w.GetSize(), maxGroupSize)
	}
	g.Size = int32(w.GetSize())
	if len(w.GetRanks()) > int(g.Size) {
		return g, bad("group.ranks", "%d ranks in a group of %d", len(w.GetRanks()), g.Size)
	}
	for i, r := range w.GetRanks() {
		if r >= w.GetSize() || i > 0 && r <= w.GetRanks()[i-1] {
			return g, bad("group.ranks", "want ascending ranks below %d", g.Size)
		}
		g.Ranks = append(g.Ranks, int32(r))
	}
	l := w.GetLayout()
	for _, n := range []uint32{l.GetLayers(), l.GetKvHeads(), l.GetHeadDim(), l.GetPageTokens()} {
		if n > math.MaxInt32 {
			return g, bad("group.layout", "%d is above 2^31-1", n)
		}
	}
	for _, f := range []struct{ name, text string }{{"dtype", l.GetDtype()}, {"kind", l.GetKind()}, {"order", l.GetOrder()}} {
		if err := checkOptional("group.layout."+f.name, f.text); err != nil {
			return g, err
		}
	}
	g.Layout = Layout{
		DType: l.GetDtype(), Layers: int32(l.GetLayers()), KVHeads: int32(l.GetKvHeads()),
		HeadDim: int32(l.GetHeadDim()), PageTokens: int32(l.GetPageTokens()), Kind: l.GetKind(), Order: l.GetOrder(),
	}
	if fp := g.Layout.Fingerprint(); !bytes.Equal(fp[:], w.GetFingerprint()) {
		return g, bad("group.fingerprint", "%x is not that of the announced layout", w.GetFingerprint())
	}
	return g, nil
}

func encodePool(p Pool) (*wire.Frame, error) {
	w := &wire.Pool{
		Pool: p.ID, Group: p.Group, Role: wire.Role(p.Role), Rank: uint32(p.Rank), Ordinal: uint32(p.Ordinal),
		Pages: uint32(p.Pages), Layers: uint32(p.Layers),
	}
	if p.State {
		w.Kind = wire.PoolKind_POOL_KIND_STATE
	}
	for _, t := range p.Tensors {
		w.Tensors = append(w.Tensors, &wire.Tensor{
			Region: t.Region, Offset: t.Offset, PageStride: t.PageStride, PageBytes: t.PageBytes, Layer: t.Layer,
		})
	}
	if _, err := decodePool(w); err != nil {
		return nil, fmt.Errorf("pool %d: %w", p.ID, err)
	}
	return &wire.Frame{Frame: &wire.Frame_Pool{Pool: w}}, nil
}

func decodePool(w *wire.Pool) (Pool, error) {
	p := Pool{ID: w.GetPool(), Group: w.GetGroup()}
	var err error
	if p.Role, err = decodeRole("pool.role", w.GetRole()); err != nil {
		return p, err
	}
	if err := checkName("pool.group", p.Group); err != nil {
		return p, err
	}
	if p.ID == 0 {
		return p, bad("pool.pool", "0")
	}
	if w.GetRank() >= maxGroupSize || w.GetOrdinal() >= maxParts {
		return p, bad("pool.rank", "rank %d, ordinal %d: at most %d and %d", w.GetRank(), w.GetOrdinal(), maxGroupSize-1, maxParts-1)
	}
	if w.GetPages() == 0 || w.GetPages() > math.MaxInt32 || w.GetLayers() == 0 || w.GetLayers() > math.MaxInt32 {
		return p, bad("pool.pages", "%d pages, %d layers: want 1 to 2^31-1", w.GetPages(), w.GetLayers())
	}
	if n := len(w.GetTensors()); n == 0 || n > maxTensors {
		return p, bad("pool.tensors", "%d: want 1 to %d", n, maxTensors)
	}
	switch w.GetKind() {
	case wire.PoolKind_POOL_KIND_UNSPECIFIED:
	case wire.PoolKind_POOL_KIND_STATE:
		p.State = true
	default:
		return p, bad("pool.kind", "%d is not known", w.GetKind())
	}
	p.Rank, p.Ordinal, p.Pages, p.Layers = int32(w.GetRank()), int32(w.GetOrdinal()), int32(w.GetPages()), int32(w.GetLayers())
	for i, t := range w.GetTensors() {
		if t.GetRegion() == 0 || t.GetPageBytes() == 0 || t.GetPageStride() < t.GetPageBytes() || t.GetLayer() > math.MaxInt32 {
			return p, bad("pool.tensors", "tensor %d: region %d, page bytes %d, page stride %d, layer %d", i, t.GetRegion(), t.GetPageBytes(), t.GetPageStride(), t.GetLayer())
		}
		// The end of the last page must be a number, or every later bound on it is void.
		last := uint64(p.Pages - 1)
		if last != 0 && t.GetPageStride() > math.MaxInt64/last {
			return p, bad("pool.tensors", "tensor %d does not fit into 2^63 bytes", i)
		}
		if end := last * t.GetPageStride(); t.GetOffset() > math.MaxInt64 || t.GetPageBytes() > math.MaxInt64 ||
			end > math.MaxInt64-t.GetOffset() || end+t.GetOffset() > math.MaxInt64-t.GetPageBytes() {
			return p, bad("pool.tensors", "tensor %d does not fit into 2^63 bytes", i)
		}
		p.Tensors = append(p.Tensors, Tensor{
			Region: t.GetRegion(), Offset: t.GetOffset(), PageStride: t.GetPageStride(), PageBytes: t.GetPageBytes(), Layer: t.GetLayer(),
		})
	}
	return p, nil
}

// checkEndpoint checks what the host announces.
func checkEndpoint(e Endpoint) error {
	if err := checkName("backend", e.Backend); err != nil {
		return fmt.Errorf("endpoint: %w", err)
	}
	if e.Epoch == 0 || len(e.Blob) > maxBlob || len(e.Secret) != tokenBytes {
		return fmt.Errorf("endpoint of %s: epoch %d, blob of %d bytes, secret of %d bytes: want an epoch from 1, at most %d and exactly %d bytes",
			e.Backend, e.Epoch, len(e.Blob), len(e.Secret), maxBlob, tokenBytes)
	}
	return nil
}

// encodeEndpoint makes the announcement of e, by the engine with incarnation own, for one peer.
func encodeEndpoint(e Endpoint, own uint64, node string, incarnation uint64) *wire.Frame {
	sum := sha256.Sum256(e.Blob)
	return &wire.Frame{Frame: &wire.Frame_Endpoint{Endpoint: &wire.Endpoint{
		Backend: e.Backend, Epoch: e.Epoch, Token: PairToken(e.Secret, node, incarnation),
		Envelope: &wire.Envelope{Incarnation: own, Epoch: e.Epoch, Sha256: sum[:], Blob: e.Blob},
	}}}
}

// decodeEndpoint verifies the envelope against the incarnation that the peer's Hello named.
func decodeEndpoint(w *wire.Endpoint, incarnation uint64) (Endpoint, error) {
	e := Endpoint{Backend: w.GetBackend(), Epoch: w.GetEpoch(), Blob: w.GetEnvelope().GetBlob(), Token: w.GetToken()}
	if err := checkName("endpoint.backend", e.Backend); err != nil {
		return e, err
	}
	v := w.GetEnvelope()
	if e.Epoch == 0 || v.GetEpoch() != e.Epoch || v.GetIncarnation() != incarnation {
		return e, bad("endpoint.envelope", "of incarnation %d, epoch %d: want incarnation %d, epoch %d and not 0", v.GetIncarnation(), v.GetEpoch(), incarnation, e.Epoch)
	}
	if len(e.Blob) > maxBlob || len(e.Token) != tokenBytes {
		return e, bad("endpoint.token", "blob of %d bytes, token of %d: at most %d, exactly %d", len(e.Blob), len(e.Token), maxBlob, tokenBytes)
	}
	if sum := sha256.Sum256(e.Blob); !bytes.Equal(sum[:], v.GetSha256()) {
		return e, bad("endpoint.envelope.sha256", "is not that of the blob")
	}
	return e, nil
}

func encodeLost(backend string, epoch uint32) *wire.Frame {
	return &wire.Frame{Frame: &wire.Frame_Lost{Lost: &wire.Lost{Backend: backend, Epoch: epoch}}}
}

func decodeLost(w *wire.Lost) (Endpoint, error) {
	e := Endpoint{Backend: w.GetBackend(), Epoch: w.GetEpoch()}
	if e.Epoch == 0 {
		return e, bad("lost.epoch", "0")
	}
	return e, checkName("lost.backend", e.Backend)
}

func decodeRole(field string, r wire.Role) (statemachine.Role, error) {
	switch r {
	case wire.Role_ROLE_SOURCE:
		return statemachine.Source, nil
	case wire.Role_ROLE_DESTINATION:
		return statemachine.Destination, nil
	}
	return 0, bad(field, "%d is no role", r)
}

func encodeRefused(r Refusal) *wire.Frame {
	return &wire.Frame{Frame: &wire.Frame_Refused{Refused: &wire.Refused{
		Code: wire.RefusalCode(r.Code), Field: cut(r.Field, maxName), Group: cut(r.Group, maxName),
		PeerGroup: cut(r.PeerGroup, maxName), Detail: cut(r.Detail, maxDetail),
	}}}
}

func decodeRefused(w *wire.Refused) (Refusal, error) {
	r := Refusal{
		Code: RefusalCode(w.GetCode()), Field: w.GetField(), Group: w.GetGroup(), PeerGroup: w.GetPeerGroup(),
		Detail: w.GetDetail(), ByPeer: true,
	}
	if w.GetCode() <= 0 || w.GetCode() > wire.RefusalCode(RefusedCertificate) {
		return r, bad("refused.code", "%d is no code", w.GetCode())
	}
	if len(r.Detail) > maxDetail {
		return r, bad("refused.detail", "%d bytes, at most %d", len(r.Detail), maxDetail)
	}
	return r, errors.Join(checkOptional("refused.field", r.Field), checkOptional("refused.group", r.Group),
		checkOptional("refused.peer_group", r.PeerGroup))
}

// hello is a checked Hello.
type hello struct {
	node        string
	incarnation uint64
	hostID      string
	version     uint32
	backends    []Backend
	features    []string
	attempt     uint64
	to          string
}

// wireVersions are those that this engine speaks, newest first.
var wireVersions = []uint32{1}

// decodeHello checks a Hello; the refusal says what is wrong with it.
func decodeHello(w *wire.Hello) (hello, *Refusal) {
	h := hello{node: w.GetNode(), incarnation: w.GetIncarnation(), hostID: w.GetHostId(), attempt: w.GetAttempt(), to: w.GetTo(), features: w.GetFeatures()}
	for _, v := range wireVersions {
		if h.version == 0 && slices.Contains(w.GetVersions(), v) {
			h.version = v
		}
	}
	if h.version == 0 {
		theirs := w.GetVersions()
		return h, &Refusal{Code: RefusedVersion, Field: "hello.versions",
			Detail: fmt.Sprintf("the peer speaks wire versions %v, this engine %v: upgrade the older one", theirs[:min(len(theirs), 16)], wireVersions)}
	}
	err := errors.Join(checkNode("hello.node", h.node), checkOptional("hello.host_id", h.hostID), checkOptional("hello.to", h.to))
	if h.incarnation == 0 {
		err = errors.Join(err, bad("hello.incarnation", "0"))
	}
	if len(w.GetBackends()) > maxBackends || len(h.features) > maxFeatures {
		err = errors.Join(err, bad("hello.backends", "%d backends, %d features: at most %d and %d", len(w.GetBackends()), len(h.features), maxBackends, maxFeatures))
	} else {
		for _, b := range w.GetBackends() {
			err = errors.Join(err, checkName("hello.backends", b.GetName()))
			h.backends = append(h.backends, Backend{Name: b.GetName(), Epoch: b.GetEpoch()})
		}
		for _, f := range h.features {
			err = errors.Join(err, checkName("hello.features", f))
		}
	}
	if err != nil {
		r := &Refusal{Code: RefusedHello, Detail: err.Error()}
		var fe *fieldError
		if errors.As(err, &fe) {
			r.Field = fe.field
		}
		return h, r
	}
	return h, nil
}

// cut shortens s to at most n bytes without cutting a character.
func cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && s[n]&0xc0 == 0x80 {
		n--
	}
	return s[:n]
}
