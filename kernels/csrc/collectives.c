// Collectives between ranks of one machine, through memory that all of them have mapped.
//
// The memory has a `struct barrier` and then two slots for each rank. A collective goes through its bytes in rounds
// of at most a slot:
// 1. A rank copies its part of the round to its slot, and arrives.
// 2. The last rank to arrive opens the round and wakes the ranks that sleep.
// 3. Every rank reads the slots of all ranks, in the order of the ranks.
// Rounds use the two slots of a rank in turns. A rank that arrives has read the round before. So a slot is written
// only when all ranks have read what it had.
#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "ops.h"

#define MAX_RANKS 64
#define BARRIER_BYTES 4096
#define GRAIN_BYTES 65536
#define SPINS_PER_CLOCK_READ 16     // less than a microsecond
#define PREEMPTED_NS 10000          // a longer time between clock reads: another thread had the core
#define LIVENESS_CHECK_NS 50000000  // between checks whether other ranks live

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() ((void)0)
#endif

// Zeros at first. Each of these words has a cache line of its own.
struct barrier {
    _Alignas(64) _Atomic uint32_t num_arrived;  // in the next round
    _Alignas(64) _Atomic uint32_t round;        // the last one that is open
    _Alignas(64) _Atomic uint32_t num_sleeping;
    _Alignas(64) _Atomic uint32_t is_aborted;   // a rank has left
};

enum outcome { DONE, PEER_LOST, TIMED_OUT };

// A rank's view. As `_Group` in collectives.py.
struct group {
    char *memory;
    int64_t slot_bytes, rank, size;
    const int *processes;  // descriptors of the processes of other ranks
    int64_t num_processes, timeout_ns, spin_ns;
    int outcome;
};

static struct barrier *barrier_of(const struct group *g) { return (struct barrier *)g->memory; }

static char *slot_of(const struct group *g, int64_t rank, uint32_t round) {
    return g->memory + BARRIER_BYTES + (2 * rank + (round & 1)) * g->slot_bytes;
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

static int has_lost_a_rank(const struct group *g) {
    struct pollfd processes[MAX_RANKS];
    for (int64_t i = 0; i < g->num_processes; i++) processes[i] = (struct pollfd){g->processes[i], POLLIN, 0};
    return atomic_load(&barrier_of(g)->is_aborted) || poll(processes, g->num_processes, 0) > 0;
}

// Wait until another round than `last` is open. Spin for up to spin_ns, or until another thread has taken the core;
// then sleep.
static enum outcome wait_past(const struct group *g, uint32_t last) {
    struct barrier *b = barrier_of(g);
    const int64_t begin = now_ns();
    int64_t looked = begin;
    for (int spin = 1; atomic_load(&b->round) == last; spin++) {
        PAUSE();
        if (spin % SPINS_PER_CLOCK_READ) continue;
        int64_t now = now_ns();
        if (now - begin > g->spin_ns || now - looked > PREEMPTED_NS) break;
        looked = now;
        sched_yield();  // a rank that is awaited may need this core
    }
    while (atomic_load(&b->round) == last) {
        const struct timespec interval = {0, LIVENESS_CHECK_NS};
        atomic_fetch_add(&b->num_sleeping, 1);
        syscall(SYS_futex, &b->round, FUTEX_WAIT, last, &interval, NULL, 0);
        atomic_fetch_sub(&b->num_sleeping, 1);
        int is_lost = has_lost_a_rank(g);
        if (atomic_load(&b->round) != last) break;  // it arrived before it was lost
        if (is_lost) return PEER_LOST;
        if (now_ns() - begin > g->timeout_ns) return TIMED_OUT;
    }
    return DONE;
}

static enum outcome arrive(const struct group *g, uint32_t round) {
    struct barrier *b = barrier_of(g);
    if (atomic_fetch_add(&b->num_arrived, 1) + 1 < g->size) return wait_past(g, round - 1);
    atomic_store(&b->num_arrived, 0);
    atomic_store(&b->round, round);
    if (atomic_load(&b->num_sleeping)) syscall(SYS_futex, &b->round, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
    return DONE;
}

// One round: a part of the caller's tensor, and the same part of the tensors of all ranks.
struct part {
    const char *from[MAX_RANKS];
    char *to;
    int64_t begin;  // the part's place in the tensor, bytes
    int64_t size, row_bytes;
};

static void copy(const void *part, int64_t begin, int64_t end, int thread) {
    const struct part *p = part;
    memcpy(p->to + p->begin + begin, p->from[0] + begin, end - begin);
}

// Run `read` on every part of x: num_bytes of each rank. Ranks below num_writers give their tensors.
static void exchange(
    struct group *g, const char *x, int64_t num_bytes, int64_t num_writers, range_fn read, struct part *p) {
    int64_t begin = 0;
    g->outcome = atomic_load(&barrier_of(g)->is_aborted) ? PEER_LOST : DONE;
    if (g->outcome != DONE) return;
    do {  // at least one round: all ranks arrive even if there is nothing to exchange
        int64_t size = MIN(num_bytes - begin, g->slot_bytes);
        uint32_t round = atomic_load(&barrier_of(g)->round) + 1;
        if (g->rank < num_writers) {
            struct part own = {.from = {x + begin}, .to = slot_of(g, g->rank, round)};
            parallel_for(size, GRAIN_BYTES, copy, &own);
        }
        if ((g->outcome = arrive(g, round)) != DONE) return;
        for (int64_t rank = 0; rank < num_writers; rank++) p->from[rank] = slot_of(g, rank, round);
        p->begin = begin;
        if (read) parallel_for(size, GRAIN_BYTES, read, p);
        begin += size;
    } while (begin < num_bytes);
}

INLINE void add_parts(const struct part *p, int64_t begin, int64_t end, int is_bf16) {
    int64_t i = begin;
    char *to = p->to + p->begin;
    for (; i + LANES <= end; i += LANES) {
        f32s sum = load_lanes(p->from[0], i, is_bf16);
        for (int64_t rank = 1; rank < p->size; rank++) sum += load_lanes(p->from[rank], i, is_bf16);
        store_lanes(to, i, sum, is_bf16);
    }
    for (; i < end; i++) {
        float sum = load_one(p->from[0], i, is_bf16);
        for (int64_t rank = 1; rank < p->size; rank++) sum += load_one(p->from[rank], i, is_bf16);
        store_one(to, i, sum, is_bf16);
    }
}

static void add_f32(const void *part, int64_t begin, int64_t end, int thread) { add_parts(part, begin / 4, end / 4, 0); }
static void add_bf16(const void *part, int64_t begin, int64_t end, int thread) { add_parts(part, begin / 2, end / 2, 1); }

// x [num_elements] becomes the sum over the ranks: in the order of the ranks, in fp32, rounded once.
EXPORT void baton_all_reduce(struct group *g, char *x, int64_t num_elements, int dtype) {
    struct part p = {.to = x, .size = g->size};
    exchange(g, x, num_elements * (dtype == BF16 ? 2 : 4), g->size, dtype == BF16 ? add_bf16 : add_f32, &p);
}

static void gather(const void *part, int64_t begin, int64_t end, int thread) {
    const struct part *p = part;
    for (int64_t rank = 0; rank < p->size; rank++)
        for (int64_t at = begin, count; at < end; at += count) {
            int64_t row = (p->begin + at) / p->row_bytes, in_row = (p->begin + at) % p->row_bytes;
            count = MIN(p->row_bytes - in_row, end - at);
            memcpy(p->to + (row * p->size + rank) * p->row_bytes + in_row, p->from[rank] + at, count);
        }
}

// out: [num_rows, size, row_bytes], the rows x [num_rows, row_bytes] of every rank side by side.
EXPORT void baton_all_gather(struct group *g, const char *x, char *out, int64_t num_rows, int64_t row_bytes) {
    struct part p = {.to = out, .size = g->size, .row_bytes = row_bytes};
    exchange(g, x, num_rows * row_bytes, g->size, gather, &p);
}

// x [num_bytes] becomes that of rank 0.
EXPORT void baton_broadcast(struct group *g, char *x, int64_t num_bytes) {
    struct part p = {.to = x};
    exchange(g, x, num_bytes, 1, g->rank ? copy : NULL, &p);
}
