// A CUDA driver for tests: one device whose memory is memfds. It refuses what cuda.h forbids: a structure
// that is not laid out or filled in as it must be, a size that is no multiple of the granularity, a call
// without a context, a copy that leaves mapped memory. fake_live counts what was not given back.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int CUresult;
enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, INVALID_HANDLE = 400 };
enum { GRAIN = 2 << 20, MAX = 1024, CONTEXT = 0xC0 };

struct prop {
  int32_t type, handle_types, location_type, location_id;
  void *win32;
  uint8_t compression, rdma;
  uint16_t usage;
  uint8_t reserved[4];
};
struct access {
  int32_t location_type, location_id, flags;
};

// An allocation; an entry of what a process has mapped or reserved.
struct memory {
  int fd;
  size_t size;
};
struct range {
  uintptr_t at;
  size_t size;
  struct memory *memory; // NULL: reserved
  int fd;                // of cuMemAlloc, else -1
  int readable;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct range ranges[MAX];
static int ready, retained, handles;
static __thread uintptr_t current;

// What cuMemcpyHtoD has taken and not yet put into the memory.
static struct {
  void *to, *bytes;
  size_t n;
} pending;

static void land(void) {
  if (pending.bytes == NULL) return;
  memcpy(pending.to, pending.bytes, pending.n);
  free(pending.bytes);
  pending.bytes = NULL;
}

static struct range *find(uintptr_t at, size_t size) {
  for (int i = 0; i < MAX; i++)
    if (ranges[i].size != 0 && at >= ranges[i].at && size <= ranges[i].size && at - ranges[i].at <= ranges[i].size - size) return &ranges[i];
  return NULL;
}

static struct range *whole(uintptr_t at, size_t size) {
  struct range *r = find(at, size);
  return r != NULL && r->at == at && r->size == size ? r : NULL;
}

static CUresult take(uintptr_t at, size_t size, int fd) {
  for (int i = 0; i < MAX; i++)
    if (ranges[i].size == 0) {
      ranges[i] = (struct range){at, size, NULL, fd, fd >= 0};
      return OK;
    }
  return OUT_OF_MEMORY;
}

static int make(size_t size) {
  int fd = memfd_create("fakecuda", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd >= 0 && (ftruncate(fd, (off_t)size) != 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)) {
    close(fd);
    return -1;
  }
  return fd;
}

static int good(const struct prop *p) {
  static const uint8_t zero[4];
  return p->type == 1 && p->handle_types == 1 && p->location_type == 1 && p->location_id == 0 && p->win32 == NULL && p->compression == 0 &&
         p->rdma == 1 && p->usage == 0 && memcmp(p->reserved, zero, 4) == 0;
}

// Every call runs alone and, but for the first ones, with the context of the device.
#define CALL(...)                     \
  {                                   \
    pthread_mutex_lock(&lock);        \
    CUresult r = (__VA_ARGS__);       \
    pthread_mutex_unlock(&lock);      \
    return r;                         \
  }
#define HERE (!ready ? NOT_INITIALIZED : current != CONTEXT || retained == 0 ? INVALID_CONTEXT : OK)

CUresult cuGetErrorName(CUresult r, const char **name) {
  *name = r == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : r == INVALID_DEVICE ? "CUDA_ERROR_INVALID_DEVICE" : r == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT" : NULL;
  return *name == NULL ? INVALID_VALUE : OK;
}

CUresult cuInit(unsigned flags) CALL(flags != 0 ? INVALID_VALUE : (ready = 1, OK))
CUresult cuDeviceGetCount(int *n) CALL(!ready ? NOT_INITIALIZED : (*n = 1, OK))
CUresult cuDeviceGet(int *device, int ordinal) CALL(!ready ? NOT_INITIALIZED : ordinal != 0 ? INVALID_DEVICE : (*device = 0, OK))
CUresult cuDeviceGetAttribute(int *value, int attribute, int device) CALL(attribute != 110 || device != 0 ? INVALID_VALUE : (*value = 1, OK))
CUresult cuDevicePrimaryCtxRetain(uintptr_t *ctx, int device) CALL(!ready || device != 0 ? INVALID_DEVICE : (retained++, *ctx = CONTEXT, OK))
CUresult cuDevicePrimaryCtxRelease_v2(int device) CALL(device != 0 || retained == 0 ? INVALID_CONTEXT : (retained--, OK))
CUresult cuCtxSetCurrent(uintptr_t ctx) CALL(ctx != CONTEXT || retained == 0 ? INVALID_CONTEXT : (current = ctx, OK))
CUresult cuCtxSynchronize(void) CALL(HERE ? HERE : (land(), OK))

CUresult cuMemGetAllocationGranularity(size_t *n, const struct prop *p, int option) CALL(!good(p) || option != 0 ? INVALID_VALUE : (*n = GRAIN, OK))

static CUresult create(struct memory **handle, size_t size, const struct prop *p, unsigned long long flags) {
  if (HERE) return HERE;
  if (!good(p) || flags != 0 || size == 0 || size % GRAIN != 0) return INVALID_VALUE;
  int fd = make(size);
  if (fd < 0) return OUT_OF_MEMORY;
  *handle = malloc(sizeof **handle);
  **handle = (struct memory){fd, size};
  handles++;
  return OK;
}
CUresult cuMemCreate(struct memory **handle, size_t size, const struct prop *p, unsigned long long flags) CALL(create(handle, size, p, flags))

static CUresult release(struct memory *m) {
  for (int i = 0; i < MAX; i++)
    if (ranges[i].memory == m) ranges[i].memory = (void *)-1; // mapped, by no handle any more
  close(m->fd);
  free(m);
  handles--;
  return OK;
}
CUresult cuMemRelease(struct memory *m) CALL(release(m))

static CUresult export(int *fd, struct memory *m, int type, unsigned long long flags) {
  if (type != 1 || flags != 0) return INVALID_VALUE;
  *fd = dup(m->fd); // without close-on-exec, like the driver
  return *fd < 0 ? OUT_OF_MEMORY : OK;
}
CUresult cuMemExportToShareableHandle(int *fd, struct memory *m, int type, unsigned long long flags) CALL(export(fd, m, type, flags))

static CUresult reserve(uintptr_t *at, size_t size, size_t alignment, uintptr_t hint, unsigned long long flags) {
  if (HERE) return HERE;
  if (size == 0 || size % GRAIN != 0 || alignment != 0 || hint != 0 || flags != 0) return INVALID_VALUE;
  void *p = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return OUT_OF_MEMORY;
  *at = (uintptr_t)p;
  return take(*at, size, -1);
}
CUresult cuMemAddressReserve(uintptr_t *at, size_t size, size_t alignment, uintptr_t hint, unsigned long long flags) CALL(reserve(at, size, alignment, hint, flags))

static CUresult unreserve(uintptr_t at, size_t size) {
  struct range *r = whole(at, size);
  if (r == NULL || r->memory != NULL || r->fd >= 0) return INVALID_VALUE;
  munmap((void *)at, size);
  r->size = 0;
  return OK;
}
CUresult cuMemAddressFree(uintptr_t at, size_t size) CALL(unreserve(at, size))

static CUresult map(uintptr_t at, size_t size, size_t offset, struct memory *m, unsigned long long flags) {
  struct range *r = whole(at, size);
  if (r == NULL || r->memory != NULL || offset != 0 || flags != 0 || size != m->size) return INVALID_VALUE;
  if (mmap((void *)at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, m->fd, 0) == MAP_FAILED) return OUT_OF_MEMORY;
  r->memory = m;
  return OK;
}
CUresult cuMemMap(uintptr_t at, size_t size, size_t offset, struct memory *m, unsigned long long flags) CALL(map(at, size, offset, m, flags))

static CUresult unmap(uintptr_t at, size_t size) {
  struct range *r = whole(at, size);
  if (r == NULL || r->memory == NULL) return INVALID_VALUE;
  land();
  mmap((void *)at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  r->memory = NULL;
  r->readable = 0;
  return OK;
}
CUresult cuMemUnmap(uintptr_t at, size_t size) CALL(unmap(at, size))

static CUresult set_access(uintptr_t at, size_t size, const struct access *a, size_t n) {
  struct range *r = whole(at, size);
  if (r == NULL || r->memory == NULL || n != 1 || a->location_type != 1 || a->location_id != 0 || a->flags != 3) return INVALID_VALUE;
  r->readable = 1;
  return mprotect((void *)at, size, PROT_READ | PROT_WRITE) == 0 ? OK : INVALID_VALUE;
}
CUresult cuMemSetAccess(uintptr_t at, size_t size, const struct access *a, size_t n) CALL(set_access(at, size, a, n))

static CUresult alloc(uintptr_t *at, size_t size) {
  if (HERE) return HERE;
  int fd = make(size);
  if (fd < 0) return OUT_OF_MEMORY;
  void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (p == MAP_FAILED) return OUT_OF_MEMORY;
  *at = (uintptr_t)p;
  return take(*at, size, fd);
}
CUresult cuMemAlloc_v2(uintptr_t *at, size_t size) CALL(alloc(at, size))

static CUresult unalloc(uintptr_t at) {
  for (int i = 0; i < MAX; i++)
    if (ranges[i].size != 0 && ranges[i].at == at && ranges[i].fd >= 0) {
      land();
      munmap((void *)at, ranges[i].size);
      close(ranges[i].fd);
      ranges[i].size = 0;
      return OK;
    }
  return INVALID_VALUE;
}
CUresult cuMemFree_v2(uintptr_t at) CALL(HERE ? HERE : unalloc(at))

// The handle is the path of the memory, for whoever opens it in this process.
static CUresult ipc(char handle[64], uintptr_t at) {
  struct range *r = find(at, 1);
  if (HERE) return HERE;
  if (r == NULL || r->fd < 0) return INVALID_VALUE;
  memset(handle, 0, 64);
  snprintf(handle, 64, "/proc/self/fd/%d", r->fd);
  return OK;
}
CUresult cuIpcGetMemHandle(char handle[64], uintptr_t at) CALL(ipc(handle, at))

static CUresult put(uintptr_t to, const void *from, size_t n) {
  struct range *r = find(to, n);
  if (HERE) return HERE;
  if (r == NULL || !r->readable) return INVALID_VALUE;
  land();
  pending.to = (void *)to;
  pending.n = n;
  pending.bytes = malloc(n);
  memcpy(pending.bytes, from, n);
  return OK;
}
CUresult cuMemcpyHtoD_v2(uintptr_t to, const void *from, size_t n) CALL(put(to, from, n))

static CUresult get(void *to, uintptr_t from, size_t n) {
  struct range *r = find(from, n);
  if (HERE) return HERE;
  if (r == NULL || !r->readable) return INVALID_VALUE;
  land();
  memcpy(to, (void *)from, n);
  return OK;
}
CUresult cuMemcpyDtoH_v2(void *to, uintptr_t from, size_t n) CALL(get(to, from, n))

int fake_live(void) {
  pthread_mutex_lock(&lock);
  int n = handles + retained;
  for (int i = 0; i < MAX; i++) n += ranges[i].size != 0;
  pthread_mutex_unlock(&lock);
  return n;
}
