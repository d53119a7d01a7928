// The reference of `engine bench transfer`: the same bytes between two processes without a backend's
// checks. Compiled by the benchmark itself.
//
//	transfer REGION_BYTES DEPTH CONNECTIONS
//
// A sender (this process) and a receiver (its child); one memory file belongs to each. A line of standard input
//
//	shm|tcp|memcpy OP_BYTES OPS
//
// moves OPS ops, cycling through both files, with at most DEPTH ops not acknowledged, and prints the
// nanoseconds that it took and those of processor time of both processes. Each connection has one thread at either end. Lane shm: the receiver, which maps
// both files, copies each op when its header comes. Lane tcp: the receiver reads the bytes straight into
// its file. Either way it acknowledges every op. memcpy is one thread of one process.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { MAX_CONNECTIONS = 16, MAX_DEPTH = 256 };

struct header { // of one op
  uint64_t offset, bytes;
};

static char *source, *destination; // both processes map both
static size_t region;
static int connections, window; // window: ops not acknowledged on one connection
static int ends[2][2][MAX_CONNECTIONS]; // [lane][0 sender, 1 receiver][connection]

static void die(const char *what) {
  fprintf(stderr, "%s: %s\n", what, strerror(errno));
  exit(1);
}

static void read_all(int fd, void *to, size_t n) {
  while (n > 0) {
    ssize_t got = read(fd, to, n);
    if (got == 0) exit(0); // the other end is gone
    if (got < 0) {
      if (errno == EINTR) continue;
      die("read");
    }
    to = (char *)to + got;
    n -= got;
  }
}

static void write_all(int fd, struct iovec *v, int n) {
  while (n > 0) {
    ssize_t put = writev(fd, v, n);
    if (put < 0) {
      if (errno == EINTR) continue;
      die("writev");
    }
    for (; n > 0 && (size_t)put >= v->iov_len; v++, n--) put -= v->iov_len;
    if (n > 0) {
      v->iov_base = (char *)v->iov_base + put;
      v->iov_len -= put;
    }
  }
}

static char *map_file(const char *name) {
  int fd = memfd_create(name, MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, region) < 0) die("memfd");
  char *p = mmap(NULL, region, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  if (p == MAP_FAILED) die("mmap");
  memset(p, name[0], region);
  return p;
}

// touch maps every page of this process, so that none is missing when the clock runs.
static void touch(void) {
  for (size_t i = 0; i < region; i += 4096) {
    (void)*(volatile char *)(source + i);
    *(volatile char *)(destination + i) = 0;
  }
}

struct end {
  int lane, fd;
};

// receive serves one connection until the sender is gone.
static void *receive(void *arg) {
  struct end *e = arg;
  struct header h;
  for (;;) {
    read_all(e->fd, &h, sizeof h);
    if (e->lane == 0)
      memcpy(destination + h.offset, source + h.offset, h.bytes);
    else
      read_all(e->fd, destination + h.offset, h.bytes);
    struct iovec ack = {&h.offset, sizeof h.offset};
    write_all(e->fd, &ack, 1);
  }
  return NULL;
}

struct job {
  int lane, number;
  uint64_t bytes, ops, slots;
};

// send_ops moves every op of a job whose number modulo the connections is its own.
static void *send_ops(void *arg) {
  struct job *j = arg;
  int fd = ends[j->lane][0][j->number];
  uint64_t acks[MAX_DEPTH];
  size_t pending = 0, part = 0; // part: bytes of an acknowledgement that was cut
  for (uint64_t k = j->number; k < j->ops || pending > 0;) {
    if (pending < (size_t)window && k < j->ops) {
      struct header h = {k % j->slots * j->bytes, j->bytes};
      struct iovec v[2] = {{&h, sizeof h}, {source + h.offset, h.bytes}};
      write_all(fd, v, j->lane == 0 ? 1 : 2);
      k += connections;
      pending++;
      continue;
    }
    ssize_t got = read(fd, acks, pending * sizeof acks[0] - part);
    if (got <= 0) die("acknowledgement");
    part += got;
    pending -= part / sizeof acks[0];
    part %= sizeof acks[0];
  }
  return NULL;
}

static uint64_t now(clockid_t clock) {
  struct timespec t;
  if (clock_gettime(clock, &t) < 0) die("clock_gettime");
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static void connect_lanes(void) {
  for (int i = 0; i < connections; i++) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0) die("socketpair");
    ends[0][0][i] = pair[0];
    ends[0][1][i] = pair[1];
  }
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t len = sizeof a;
  int l = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;
  if (l < 0 || bind(l, (struct sockaddr *)&a, len) < 0 || listen(l, MAX_CONNECTIONS) < 0 ||
      getsockname(l, (struct sockaddr *)&a, &len) < 0)
    die("listen");
  for (int i = 0; i < connections; i++) {
    int c = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (c < 0 || connect(c, (struct sockaddr *)&a, len) < 0) die("connect");
    int s = accept(l, NULL, NULL);
    if (s < 0) die("accept");
    setsockopt(c, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    ends[1][0][i] = c;
    ends[1][1][i] = s;
  }
  close(l);
}

static void start(pthread_t *t, void *(*run)(void *), void *arg) {
  if ((errno = pthread_create(t, NULL, run, arg)) != 0) die("pthread_create");
}

int main(int argc, char **argv) {
  if (argc != 4) {
    fprintf(stderr, "usage: transfer REGION_BYTES DEPTH CONNECTIONS\n");
    return 2;
  }
  region = strtoull(argv[1], NULL, 10);
  connections = atoi(argv[3]);
  if (region == 0 || connections < 1 || connections > MAX_CONNECTIONS) die("arguments");
  window = atoi(argv[2]) / connections;
  if (window < 1 || window > MAX_DEPTH) die("depth");
  signal(SIGPIPE, SIG_IGN);
  source = map_file("source");
  destination = map_file("destination");
  connect_lanes();

  pid_t parent = getpid(), child = fork();
  if (child < 0) die("fork");
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) return 1;
    touch();
    static struct end all[2 * MAX_CONNECTIONS];
    for (int i = 0; i < 2 * connections; i++) {
      pthread_t t;
      all[i].lane = i % 2;
      all[i].fd = ends[i % 2][1][i / 2];
      close(ends[i % 2][0][i / 2]);
      start(&t, receive, &all[i]);
    }
    for (;;) pause();
  }
  for (int i = 0; i < 2 * connections; i++) close(ends[i % 2][1][i / 2]);

  clockid_t receiver;
  if ((errno = clock_getcpuclockid(child, &receiver)) != 0) die("clock_getcpuclockid");
  char name[16];
  unsigned long long bytes, ops;
  while (scanf("%15s %llu %llu", name, &bytes, &ops) == 3) {
    if (bytes == 0 || bytes > region) die("op size");
    uint64_t slots = region / bytes, cpu = now(CLOCK_PROCESS_CPUTIME_ID) + now(receiver), begin = now(CLOCK_MONOTONIC);
    if (strcmp(name, "memcpy") == 0) {
      for (uint64_t k = 0; k < ops; k++) memcpy(destination + k % slots * bytes, source + k % slots * bytes, bytes);
    } else {
      struct job jobs[MAX_CONNECTIONS];
      pthread_t threads[MAX_CONNECTIONS];
      for (int i = 0; i < connections; i++) {
        jobs[i] = (struct job){strcmp(name, "tcp") == 0, i, bytes, ops, slots};
        start(&threads[i], send_ops, &jobs[i]);
      }
      for (int i = 0; i < connections; i++) pthread_join(threads[i], NULL);
    }
    uint64_t ns = now(CLOCK_MONOTONIC) - begin;
    cpu = now(CLOCK_PROCESS_CPUTIME_ID) + now(receiver) - cpu;
    printf("%llu %llu\n", (unsigned long long)ns, (unsigned long long)cpu);
    fflush(stdout);
  }
  kill(child, SIGKILL);
  return 0;
}
