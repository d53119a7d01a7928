// A transfer backend as a WASM guest without any SDK and without libc, written from docs/wasm-abi.md and
// contract.proto. It serves every plan: whole pages, strided slices, layer ranges, groups of pages.
//
//   python3 -m ziglang cc -target wasm32-freestanding -O2 -nostdlib -fno-builtin -Wl,--no-entry -o rawguest.wasm rawguest.c
//
// Any clang that knows the target wasm32 will do.
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef _Bool bool;

// ---- the ABI

#define IMPORT(name) __attribute__((import_module("engine_v1"), import_name(#name)))
#define EXPORT(name) __attribute__((export_name(#name)))

IMPORT(emit) int host_emit(const u8 *frame, u32 len);
IMPORT(now_ns) u64 host_now(void);
IMPORT(region_copy) int host_copy(u32 peer, u64 dst, u64 dst_off, u64 src, u64 src_off, u64 len);

enum { DESCRIBE = 1, START = 2, FRAME = 3 };
enum { CODE_OK = 1, CODE_ERROR = 2 };
enum { LANE_SHM = 3, CAUSE_TRANSPORT = 1, CAUSE_PROTOCOL = 7 };
enum { COPY_MOST = 4 << 20 }; // in one call of region_copy; the host's limit is twice that

// ---- memory: a list of free blocks, first fit, and memory.grow when there is none

typedef struct block {
  u32 size; // with this head; a multiple of 16
  struct block *next;
} __attribute__((aligned(16))) block;

extern u8 __heap_base;
static block *free_blocks;
static u32 heap_end;

static void *alloc(u32 n) {
  if (n > 0x7FFFFFFF) __builtin_trap();
  n = (n + sizeof(block) + 15) & ~15u;
  for (block **at = &free_blocks; *at; at = &(*at)->next) {
    block *b = *at;
    if (b->size < n) continue;
    if (b->size - n >= 64) { // split
      block *rest = (block *)((u8 *)b + n);
      rest->size = b->size - n;
      rest->next = b->next;
      b->size = n;
      *at = rest;
    } else {
      *at = b->next;
    }
    return b + 1;
  }
  if (!heap_end) heap_end = ((u32)&__heap_base + 15) & ~15u;
  u32 have = __builtin_wasm_memory_size(0) << 16;
  if (have - heap_end < n && __builtin_wasm_memory_grow(0, (n - (have - heap_end) + 65535) >> 16) == (u32)-1)
    __builtin_trap(); // out of memory
  block *b = (block *)heap_end;
  b->size = n;
  heap_end += n;
  return b + 1;
}

// release puts a block back, in order of address, and joins neighbours.
static void release(void *p) {
  if (!p) return;
  block *b = (block *)p - 1, **at = &free_blocks;
  while (*at && *at < b) at = &(*at)->next;
  b->next = *at;
  *at = b;
  for (block *i = free_blocks; i && i->next;)
    if ((u8 *)i + i->size == (u8 *)i->next) {
      i->size += i->next->size;
      i->next = i->next->next;
    } else {
      i = i->next;
    }
}

// ---- protobuf: reading

typedef struct { const u8 *at, *end; bool bad; } reader;
typedef struct { u32 num; u64 v; reader bytes; } field; // v of a varint, bytes of what has a length

static u64 varint(reader *r) {
  u64 v = 0;
  for (u32 shift = 0; shift < 64 && r->at < r->end; shift += 7) {
    u8 b = *r->at++;
    v |= (u64)(b & 127) << shift;
    if (b < 128) return v;
  }
  r->bad = 1;
  return 0;
}

static bool skip(reader *r, u64 n) {
  if (n > (u64)(r->end - r->at)) r->bad = 1;
  else r->at += n;
  return !r->bad;
}

// next reads a field. Fixed-width ones, which a guest needs none of, are passed over.
static bool next(reader *r, field *f) {
  while (r->at < r->end && !r->bad) {
    u64 tag = varint(r);
    f->num = (u32)(tag >> 3), f->v = 0, f->bytes = (reader){0, 0, 0};
    switch (tag & 7) {
    case 0: f->v = varint(r); return !r->bad;
    case 2: {
      u64 n = varint(r);
      f->bytes.at = r->at;
      if (r->bad || !skip(r, n)) return 0;
      f->bytes.end = r->at;
      return 1;
    }
    case 1: skip(r, 8); break;
    case 5: skip(r, 4); break;
    default: r->bad = 1;
    }
  }
  return 0;
}

static u64 number(reader r, u32 num) { // the value of one field
  u64 v = 0;
  for (field f; next(&r, &f);)
    if (f.num == num) v = f.v;
  return v;
}

static u32 count(reader r, u32 num) { // how often a field is there
  u32 n = 0;
  for (field f; next(&r, &f);) n += f.num == num;
  return n;
}

// ---- protobuf: writing. Events gather in out and go at the end of a call.

static u8 out[32768];
static u32 out_len;

static void flush(void) {
  if (out_len && host_emit(out, out_len) != 0) __builtin_trap(); // the host says what was wrong
  out_len = 0;
}

static u32 put_varint(u8 *to, u64 v) {
  u32 n = 0;
  for (; v > 127; v >>= 7) to[n++] = (u8)(v | 128);
  to[n++] = (u8)v;
  return n;
}

static u8 message[256];
static u32 message_len;

static void put(u32 num, u64 v) {
  if (!v) return;
  message_len += put_varint(message + message_len, num << 3);
  message_len += put_varint(message + message_len, v);
}

static void put_text(u32 num, const char *s) {
  message_len += put_varint(message + message_len, num << 3 | 2);
  u32 n = 0;
  while (s[n]) n++;
  message_len += put_varint(message + message_len, n);
  for (u32 i = 0; i < n; i++) message[message_len++] = (u8)s[i];
}

// event puts the message into the frame as PluginEvent with that field.
static void event(u32 num) {
  if (out_len + message_len + 16 > sizeof out) flush();
  u8 head[8];
  u32 n = put_varint(head, num << 3 | 2);
  n += put_varint(head + n, message_len);
  out[out_len++] = 1 << 3 | 2;
  out_len += put_varint(out + out_len, n + message_len);
  for (u32 i = 0; i < n; i++) out[out_len++] = head[i];
  for (u32 i = 0; i < message_len; i++) out[out_len++] = message[i];
  message_len = 0;
}

static void say(u32 num, u64 id) { put(1, id); event(num); }

// ---- geometry

typedef struct { u64 region, offset, page_stride; u32 layer; } tensor;
typedef struct pool { struct pool *next; u64 id; u32 peer, tensors; bool remote; tensor t[]; } pool;
typedef struct { u64 src_off, dst_off, len, src_stride, dst_stride; u32 src, dst, count, src_page, dst_page; } slice;
typedef struct plan { struct plan *next; u64 id; u32 peer, src_pages, dst_pages, slices; pool *src, *dst; slice s[]; } plan;

static pool *pools;
static plan *plans;

static pool *find_pool(bool remote, u32 peer, u64 id) {
  for (pool *p = pools; p; p = p->next)
    if (p->remote == remote && p->id == id && (!remote || p->peer == peer)) return p;
  return 0;
}

static void add_pool(bool remote, u32 peer, reader m) {
  u32 n = count(m, 3);
  pool *p = alloc(sizeof(pool) + n * sizeof(tensor));
  p->id = number(m, 1), p->peer = peer, p->remote = remote, p->tensors = 0;
  for (field f; next(&m, &f);)
    if (f.num == 3)
      p->t[p->tensors++] = (tensor){number(f.bytes, 1), number(f.bytes, 2), number(f.bytes, 3), (u32)number(f.bytes, 5)};
  p->next = pools, pools = p;
}

static void add_plan(reader m) {
  u32 n = count(m, 7);
  plan *p = alloc(sizeof(plan) + n * sizeof(slice));
  p->id = number(m, 1), p->peer = (u32)number(m, 3), p->slices = 0;
  p->src_pages = (u32)number(m, 5), p->dst_pages = (u32)number(m, 6);
  p->src = find_pool(0, 0, number(m, 2)), p->dst = find_pool(1, p->peer, number(m, 4));
  for (field f; next(&m, &f);) {
    if (f.num != 7) continue;
    reader s = f.bytes;
    p->s[p->slices++] = (slice){number(s, 3), number(s, 4), number(s, 5), number(s, 6), number(s, 7), (u32)number(s, 1),
                                (u32)number(s, 2), (u32)number(s, 8), (u32)number(s, 9), (u32)number(s, 10)};
  }
  p->next = plans, plans = p;
}

static void drop_pool(bool remote, u32 peer, u64 id) {
  for (pool **at = &pools; *at; at = &(*at)->next)
    if ((*at)->remote == remote && (*at)->id == id && (!remote || (*at)->peer == peer)) {
      pool *p = *at;
      *at = p->next;
      release(p);
      return;
    }
}

static void drop_plan(u64 id) {
  for (plan **at = &plans; *at; at = &(*at)->next)
    if ((*at)->id == id) {
      plan *p = *at;
      *at = p->next;
      release(p);
      return;
    }
}

static void drop_peer(u32 peer) { // its pools and plans go without events of their own
  for (plan **at = &plans; *at;) {
    plan *p = *at;
    if (p->peer == peer) *at = p->next, release(p);
    else at = &p->next;
  }
  for (pool **at = &pools; *at;) {
    pool *p = *at;
    if (p->remote && p->peer == peer) *at = p->next, release(p);
    else at = &p->next;
  }
  say(6, peer);
}

// ---- ops

typedef struct op {
  struct op *next;
  u64 id, bytes, moved, told;
  plan *plan;
  u32 from, to, groups;
  u32 *src, *dst;               // pages, in order
  u32 slice, group, piece;      // what is copied next
  u64 within;                   // of the piece
} op;

static op *first, **last = &first; // a queue; they take turns

// expand lists the pages of runs; n tells how many.
static u32 *expand(reader m, u32 *n) {
  u32 *col[4] = {0}, len[4] = {0};
  u32 room = (u32)(m.end - m.at) + 1; // no list has more numbers than bytes
  for (u32 i = 1; i <= 3; i++) col[i] = alloc(room * 4);
  for (field f; next(&m, &f);) {
    if (f.num < 1 || f.num > 3) continue;
    if (!f.bytes.at) col[f.num][len[f.num]++] = (u32)f.v; // not packed
    while (f.bytes.at < f.bytes.end) col[f.num][len[f.num]++] = (u32)varint(&f.bytes);
  }
  *n = 0;
  for (u32 i = 0; i < len[2]; i++) *n += col[2][i];
  u32 *list = alloc(*n * 4 + 4), k = 0;
  for (u32 i = 0; i < len[1]; i++)
    for (u32 j = 0; j < col[2][i]; j++) list[k++] = col[1][i] + j * (len[3] ? col[3][i] : 1);
  for (u32 i = 1; i <= 3; i++) release(col[i]);
  return list;
}

static void forget(op *o) {
  release(o->src), release(o->dst), release(o);
}

static void done(op *o) { put(1, o->id), put(2, o->bytes), put(3, 1), put(4, LANE_SHM), event(9); }

static void failed(u64 id, u32 cause, const char *detail) {
  put(1, id), put(2, cause), put_text(3, detail), put(4, 1), event(10);
}

static void submit(reader m) {
  u64 id = number(m, 1), wanted = number(m, 6);
  say(7, id); // Accepted
  plan *p = plans;
  while (p && p->id != wanted) p = p->next;
  if (!p || !p->src || !p->dst || !p->src_pages || !p->dst_pages) {
    failed(id, CAUSE_PROTOCOL, "Submit.plan is unknown");
    return;
  }
  op *o = alloc(sizeof(op));
  *o = (op){.id = id, .plan = p, .from = (u32)number(m, 9), .to = (u32)number(m, 10), .bytes = number(m, 13)};
  u32 n = 0, k = 0;
  for (field f; next(&m, &f);) {
    if (f.num == 7) o->src = expand(f.bytes, &n);
    if (f.num == 8) o->dst = expand(f.bytes, &k);
  }
  o->groups = n / p->src_pages;
  *last = o, last = &o->next;
}

static op *take_first(void) {
  op *o = first;
  first = o->next, o->next = 0;
  if (!first) last = &first;
  return o;
}

static void abort_op(u64 id) {
  for (op **at = &first; *at; at = &(*at)->next)
    if ((*at)->id == id) {
      op *o = *at;
      *at = o->next;
      if (last == &o->next) last = at;
      put(1, id), put(2, 1), event(12); // Aborted, quiet: copies are over when they return
      forget(o);
      return;
    }
}

// step copies one piece, or what the host takes of it in one call. 1: the op is over.
static bool step(op *o) {
  plan *p = o->plan;
  for (; o->slice < p->slices; o->slice++, o->group = 0) {
    slice *s = &p->s[o->slice];
    tensor *a = &p->src->t[s->src], *b = &p->dst->t[s->dst];
    if (a->layer < o->from || a->layer >= o->to) continue;
    for (; o->group < o->groups; o->group++, o->piece = 0) {
      if (o->piece == s->count) continue;
      u64 src = a->offset + a->page_stride * o->src[o->group * p->src_pages + s->src_page] + s->src_off + o->piece * s->src_stride;
      u64 dst = b->offset + b->page_stride * o->dst[o->group * p->dst_pages + s->dst_page] + s->dst_off + o->piece * s->dst_stride;
      u64 n = s->len - o->within;
      if (n > COPY_MOST) n = COPY_MOST;
      if (host_copy(p->peer, b->region, dst + o->within, a->region, src + o->within, n) != 0) {
        failed(o->id, CAUSE_TRANSPORT, "the host refused a copy");
        return 1;
      }
      o->moved += n, o->within += n;
      if (o->within == s->len) o->within = 0, o->piece++;
      return 0;
    }
  }
  done(o);
  return 1;
}

// ---- exports

static void host_event(field e) {
  reader m = e.bytes;
  switch (e.num) {
  case 1: say(1, number(m, 1)); break;                             // RegionAdd: RegionReady
  case 2: say(3, number(m, 1)); break;                             // RegionRemove: RegionRemoved
  case 3: add_pool(0, 0, m); break;                                // PoolAdd
  case 4: drop_pool(0, 0, number(m, 1)); break;                    // PoolRemove
  case 5: put(1, number(m, 1)), put(2, LANE_SHM), event(4); break; // PeerAdd: PeerReady
  case 7: drop_peer((u32)number(m, 1)); break;                     // PeerRemove
  case 8:                                                          // RemotePoolAdd
    for (field f; next(&m, &f);)
      if (f.num == 2) add_pool(1, (u32)number(e.bytes, 1), f.bytes);
    break;
  case 9: add_plan(m); break;                                          // PlanAdd
  case 10: drop_plan(number(m, 1)); break;                             // PlanRemove
  case 11: submit(m); break;                                           // Submit
  case 12: abort_op(number(m, 1)); break;                              // AbortOp
  case 20: drop_pool(1, (u32)number(m, 1), number(m, 2)); break;       // RemotePoolRemove
  }                                                                    // what is newer is ignored
}

static u8 reply[512];

// result makes a CallResult, with the message so far as its payload.
static u64 result(u32 code, const char *text) {
  u32 n = message_len, at = 0;
  u8 payload[sizeof message];
  for (u32 i = 0; i < n; i++) payload[i] = message[i];
  message_len = 0;
  put(1, code);
  if (text) put_text(2, text);
  for (u32 i = 0; i < message_len; i++) reply[at++] = message[i];
  message_len = 0;
  if (n) {
    reply[at++] = 3 << 3 | 2;
    at += put_varint(reply + at, n);
    for (u32 i = 0; i < n; i++) reply[at++] = payload[i];
  }
  return (u64)(u32)reply << 32 | at;
}

EXPORT(engine_v1_alloc) void *engine_v1_alloc(u32 n) { return alloc(n); }

EXPORT(engine_v1_free) void engine_v1_free(void *p, u32 n) {
  (void)n;
  release(p);
}

EXPORT(engine_v1_call) u64 engine_v1_call(u32 method, const u8 *p, u32 n) {
  switch (method) {
  case DESCRIBE:
    put_text(2, "rawguest"), put_text(3, "1.0.0");
    put_text(6, "byte_progress"), put_text(6, "strided"), put_text(6, "layer_range"), put_text(6, "repage");
    return result(CODE_OK, 0);
  case START:
    return result(CODE_OK, 0);
  case FRAME: {
    reader r = {p, p + n, 0};
    for (field f; next(&r, &f);)
      if (f.num == 1)
        for (field e; next(&f.bytes, &e);) host_event(e);
    flush();
    return r.bad ? result(CODE_ERROR, "the frame is malformed") : result(CODE_OK, 0);
  }
  }
  return result(CODE_ERROR, "the method is unknown");
}

EXPORT(engine_v1_pump) u32 engine_v1_pump(u32 budget_us) {
  u64 until = host_now() + (u64)budget_us * 1000;
  while (first) {
    op *o = take_first();
    bool over = 0, late = 0;
    u64 turn = o->moved + (8 << 20);
    while (!over && !late && o->moved < turn) over = step(o), late = host_now() >= until;
    if (over) {
      forget(o);
    } else {
      if (o->moved > o->told) put(1, o->id), put(2, o->told = o->moved), event(8); // Progress
      *last = o, last = &o->next;
    }
    if (late) break;
  }
  flush();
  return first != 0;
}
