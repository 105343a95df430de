// SPDX-License-Identifier: Apache-2.0

// A FUSE server of one file, f, in memory, that does nothing else: the upper bound of a block
// device that is made of FUSE and a loop device.
//
//	bare PLACE MIB plain|uring
//
// It mounts itself at PLACE, prints "ready", and ends when its input ends. With "uring" the
// requests come over io_uring, one pinned thread for each processor; otherwise two threads read
// them.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <linux/io_uring.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define MAXIO (1 << 20)
#define DEPTH 64
#define INIT_EXT (1u << 30)
#define OVER_URING (1u << (41 - 32))
#define OPENED (1 | 32 | 64) // direct I/O, no flush, parallel direct writes

static int fd, uring, cpus, agreed;
static uint8_t *memory;
static uint64_t size;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static void fail(const char *what) {
	perror(what);
	exit(1);
}

static void *memory_of(size_t n) {
	void *p = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (p == MAP_FAILED)
		fail("mmap");
	return p;
}

static void attributes(struct fuse_attr *a, uint64_t node) {
	memset(a, 0, sizeof *a);
	a->ino = node;
	a->blksize = 4096;
	a->nlink = 1;
	a->mode = S_IFDIR | 0700;
	if (node == 2) {
		a->mode = S_IFREG | 0600;
		a->size = size;
		a->blocks = size / 512;
	}
}

static int begin(struct fuse_init_in *in, void *out) {
	struct fuse_init_out o = {
		.major = 7,
		.minor = in->minor < 36 ? in->minor : 36,
		.max_readahead = in->max_readahead,
		.flags = in->flags & (FUSE_ASYNC_READ | FUSE_BIG_WRITES | FUSE_ASYNC_DIO | FUSE_MAX_PAGES),
		.max_background = 256,
		.congestion_threshold = 256,
		.max_write = MAXIO,
		.max_pages = MAXIO / 4096,
		.time_gran = 1,
	};
	if (uring) {
		uint32_t more = ((uint32_t *)in)[4];
		if (!(in->flags & INIT_EXT) || !(more & OVER_URING)) {
			fprintf(stderr, "the kernel does not offer io_uring\n");
			exit(1);
		}
		o.flags |= INIT_EXT;
		((uint32_t *)&o)[8] = OVER_URING; // flags2, also where the header is older
	}
	memcpy(out, &o, sizeof o);
	return sizeof o;
}

static uint64_t readable(struct fuse_read_in *in) {
	uint64_t left = in->offset < size ? size - in->offset : 0;
	return in->size < left ? in->size : left;
}

// serve carries out a request: in is its structure, data what is written. It returns the length
// of what it puts into out, or a negated errno; 1 stands for no answer.
static int serve(struct fuse_in_header *h, void *in, void *data, void *out) {
	switch (h->opcode) {
	case FUSE_INIT:
		return begin(in, out);
	case FUSE_READ: {
		uint64_t n = readable(in);
		memcpy(out, memory + ((struct fuse_read_in *)in)->offset, n);
		return n;
	}
	case FUSE_WRITE: {
		struct fuse_write_in *w = in;
		struct fuse_write_out o = {.size = w->size};
		if (w->offset > size || w->size > size - w->offset)
			return -EINVAL;
		memcpy(memory + w->offset, data, w->size);
		memcpy(out, &o, sizeof o);
		return sizeof o;
	}
	case FUSE_LOOKUP: {
		struct fuse_entry_out o = {.nodeid = 2};
		if (h->nodeid != 1 || strcmp(in, "f"))
			return -ENOENT;
		attributes(&o.attr, 2);
		memcpy(out, &o, sizeof o);
		return sizeof o;
	}
	case FUSE_GETATTR: {
		struct fuse_attr_out o = {0};
		attributes(&o.attr, h->nodeid);
		memcpy(out, &o, sizeof o);
		return sizeof o;
	}
	case FUSE_OPEN:
	case FUSE_OPENDIR: {
		struct fuse_open_out o = {.fh = 1, .open_flags = h->opcode == FUSE_OPEN ? OPENED : 0};
		memcpy(out, &o, sizeof o);
		return sizeof o;
	}
	case FUSE_FORGET:
	case FUSE_BATCH_FORGET:
		return 1;
	case FUSE_FSYNC:
	case FUSE_FLUSH:
	case FUSE_RELEASE:
	case FUSE_RELEASEDIR:
	case FUSE_DESTROY:
		return 0;
	}
	return -ENOSYS;
}

static struct fuse_out_header answer_of(struct fuse_in_header *h, int *n) {
	struct fuse_out_header o = {.unique = h->unique};
	if (*n < 0) {
		o.error = *n;
		*n = 0;
	}
	o.len = sizeof o + *n;
	return o;
}

// plain reads requests and writes answers.
static void *plain(void *unused) {
	uint8_t *buffer = memory_of(MAXIO + 8192), *out = memory_of(MAXIO);
	for (;;) {
		ssize_t got = read(fd, buffer, MAXIO + 8192);
		if (got < 0 && (errno == EINTR || errno == ENOENT || errno == EAGAIN))
			continue;
		if (got < 0)
			return 0;
		struct fuse_in_header *h = (void *)buffer;
		uint8_t *in = buffer + sizeof *h;
		struct iovec parts[2];
		int n;
		if (h->opcode == FUSE_READ) { // without a copy of ours
			n = readable((void *)in);
			parts[1] = (struct iovec){memory + ((struct fuse_read_in *)in)->offset, n};
		} else {
			n = serve(h, in, in + sizeof(struct fuse_write_in), out);
			if (n == 1)
				continue;
			parts[1] = (struct iovec){out, n > 0 ? n : 0};
		}
		struct fuse_out_header o = answer_of(h, &n);
		parts[0] = (struct iovec){&o, sizeof o};
		writev(fd, parts, 2);
		if (h->opcode == FUSE_INIT) {
			pthread_mutex_lock(&lock);
			agreed = 1;
			pthread_cond_broadcast(&changed);
			pthread_mutex_unlock(&lock);
		}
	}
}

struct request { // fuse_uring_req_header
	char in_out[128], op[128];
	uint64_t flags, commit_id;
	uint32_t bytes, padding;
	uint64_t reserved;
};

struct command { // fuse_uring_cmd_req
	uint64_t flags, commit_id;
	uint16_t cpu;
	uint8_t padding[6];
};

struct ring {
	int fd;
	unsigned *sq_tail, *cq_head, *cq_tail, sq_mask, cq_mask, *array, prepared;
	uint8_t *entries;
	struct io_uring_cqe *completions;
};

static void set_up(struct ring *r) {
	struct io_uring_params p = {.flags = IORING_SETUP_SQE128 | IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN};
	r->fd = syscall(SYS_io_uring_setup, DEPTH, &p);
	if (r->fd < 0)
		fail("io_uring_setup");
	size_t n = p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe), m = p.sq_off.array + p.sq_entries * 4;
	uint8_t *rings = mmap(0, n > m ? n : m, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, r->fd, IORING_OFF_SQ_RING);
	r->entries = mmap(0, p.sq_entries * 128, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, r->fd, IORING_OFF_SQES);
	if (rings == MAP_FAILED || r->entries == MAP_FAILED)
		fail("map io_uring");
	r->sq_tail = (void *)(rings + p.sq_off.tail);
	r->sq_mask = *(unsigned *)(rings + p.sq_off.ring_mask);
	r->array = (void *)(rings + p.sq_off.array);
	r->cq_head = (void *)(rings + p.cq_off.head);
	r->cq_tail = (void *)(rings + p.cq_off.tail);
	r->cq_mask = *(unsigned *)(rings + p.cq_off.ring_mask);
	r->completions = (void *)(rings + p.cq_off.cqes);
}

static struct io_uring_sqe *next(struct ring *r, int op, int number) {
	unsigned i = *r->sq_tail & r->sq_mask;
	struct io_uring_sqe *s = (void *)(r->entries + i * 128);
	memset(s, 0, 128);
	s->opcode = IORING_OP_URING_CMD;
	s->fd = fd;
	*(uint32_t *)&s->off = op; // cmd_op
	s->user_data = number;
	r->array[i] = i;
	__atomic_store_n(r->sq_tail, *r->sq_tail + 1, __ATOMIC_RELEASE);
	r->prepared++;
	return s;
}

// over_uring serves the requests that are made on one processor.
static void *over_uring(void *number) {
	int cpu = (intptr_t)number;
	cpu_set_t set;
	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	sched_setaffinity(0, sizeof set, &set);
	struct ring r = {0};
	set_up(&r);
	struct request *requests = memory_of(DEPTH * 4096);
	uint8_t *data = memory_of((size_t)DEPTH * MAXIO);
	struct iovec parts[DEPTH][2];
	for (int i = 0; i < DEPTH; i++) {
		parts[i][0] = (struct iovec){(char *)requests + 4096 * i, sizeof *requests};
		parts[i][1] = (struct iovec){data + (size_t)i * MAXIO, MAXIO};
		struct io_uring_sqe *s = next(&r, 1, i);
		s->addr = (uintptr_t)parts[i];
		s->len = 2;
		((struct command *)((char *)s + 48))->cpu = cpu;
	}
	for (;;) {
		int n = syscall(SYS_io_uring_enter, r.fd, r.prepared, 1, IORING_ENTER_GETEVENTS, 0, 0);
		if (n < 0 && errno != EINTR)
			fail("io_uring_enter");
		r.prepared -= n > 0 ? n : 0;
		unsigned head = *r.cq_head, tail = __atomic_load_n(r.cq_tail, __ATOMIC_ACQUIRE);
		for (; head != tail; head++) {
			struct io_uring_cqe *c = &r.completions[head & r.cq_mask];
			int i = c->user_data;
			if (c->res) // the connection has ended
				return 0;
			struct request *q = parts[i][0].iov_base;
			struct fuse_in_header h = *(struct fuse_in_header *)q->in_out;
			uint8_t *p = parts[i][1].iov_base;
			char small[sizeof(struct fuse_init_out) + sizeof(struct fuse_entry_out)];
			int in_place = h.opcode == FUSE_READ;
			int got = serve(&h, h.opcode == FUSE_LOOKUP ? p : (void *)q->op, p, in_place ? (void *)p : small);
			if (!in_place && got > 1)
				memcpy(p, small, got);
			struct fuse_out_header o = answer_of(&h, &got);
			memcpy(q->in_out, &o, sizeof o);
			q->bytes = got;
			struct command *m = (void *)((char *)next(&r, 2, i) + 48);
			m->cpu = cpu;
			m->commit_id = q->commit_id;
		}
		__atomic_store_n(r.cq_head, head, __ATOMIC_RELEASE);
	}
}

int main(int n, char **args) {
	if (n != 4)
		return 2;
	size = strtoull(args[2], 0, 10) << 20;
	uring = !strcmp(args[3], "uring");
	cpus = sysconf(_SC_NPROCESSORS_CONF);
	memory = memory_of(size);
	memset(memory, 7, size);
	fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);
	char options[100];
	snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=0,group_id=0,max_read=%d", fd, MAXIO);
	if (fd < 0 || mount("bare", args[1], "fuse.bare", 0, options))
		fail("mount");
	pthread_t t;
	for (int i = 0; i < 2; i++)
		pthread_create(&t, 0, plain, 0);
	pthread_mutex_lock(&lock);
	while (!agreed)
		pthread_cond_wait(&changed, &lock);
	pthread_mutex_unlock(&lock);
	for (intptr_t i = 0; uring && i < cpus; i++)
		pthread_create(&t, 0, over_uring, (void *)i);
	struct stat st; // over io_uring the kernel answers when all threads have begun
	if (stat(args[1], &st))
		fail("stat");
	printf("ready\n");
	fflush(stdout);
	while (getchar() != EOF)
		;
	umount2(args[1], MNT_FORCE | MNT_DETACH);
	return 0;
}
