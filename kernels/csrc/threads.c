// A pool of threads that take the parts of one loop at a time.
//
// OpenMP hands each thread a fixed share and spins until the last is done: on a machine where anything else
// runs, every loop waits for a thread that the kernel has descheduled, and a step takes ten times as long. Here any
// free thread takes the next part, the caller works as well, and an idle thread sleeps after a few microseconds.
//
// The ticket says which loop is on (generation), how many parts it has and which is next, in one word, so a
// part is claimed by one compare-and-swap; a thread reads the loop's other fields only when it holds a part,
// and they change only when no part is held.
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_THREADS 256
#define PART_BITS 20
#define MAX_PARTS ((1 << PART_BITS) - 1)
#define SPINS 2000         // tens of microseconds: longer than between two kernels, shorter than a step
#define SPINS_TO_YIELD 200

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() ((void)0)
#endif

static struct {
    _Atomic uint64_t ticket;  // generation | number of parts | next part
    _Atomic int64_t num_done;
    range_fn fn;
    const void *context;
    int64_t size, grain;
    pthread_mutex_t busy;     // held by the caller whose loop is on
    pthread_mutex_t sleep;
    pthread_cond_t wake;
    _Atomic int num_sleeping;
    _Atomic int num_threads;  // the caller included
    int num_started;
} pool = {.busy = PTHREAD_MUTEX_INITIALIZER, .sleep = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .num_threads = 1};

static uint64_t parts_of(uint64_t ticket) { return ticket >> PART_BITS & MAX_PARTS; }
static uint64_t next_of(uint64_t ticket) { return ticket & MAX_PARTS; }

// Take the next part of the loop that is on; false when there is none. The number of threads changes between
// loops only, so a thread too many that read it before finds the ticket changed.
static bool claim(int64_t *part, int thread) {
    uint64_t ticket = atomic_load(&pool.ticket);
    while (next_of(ticket) < parts_of(ticket) && thread < atomic_load(&pool.num_threads))
        if (atomic_compare_exchange_weak(&pool.ticket, &ticket, ticket + 1)) {
            *part = (int64_t)next_of(ticket);
            return true;
        }
    return false;
}

static void run_part(int64_t part, int thread) {
    int64_t begin = part * pool.grain, end = begin + pool.grain;
    pool.fn(pool.context, begin, end < pool.size ? end : pool.size, thread);
    atomic_fetch_add(&pool.num_done, 1);
}

static bool is_on(void) {
    uint64_t ticket = atomic_load(&pool.ticket);
    return next_of(ticket) < parts_of(ticket);
}

static void wait_for_work(int thread) {
    for (int spin = 0; spin < SPINS; spin++) {
        if (is_on() && thread < atomic_load(&pool.num_threads)) return;
        PAUSE();
    }
    pthread_mutex_lock(&pool.sleep);
    atomic_fetch_add(&pool.num_sleeping, 1);
    while (!is_on() || thread >= atomic_load(&pool.num_threads)) pthread_cond_wait(&pool.wake, &pool.sleep);
    atomic_fetch_sub(&pool.num_sleeping, 1);
    pthread_mutex_unlock(&pool.sleep);
}

static void *work(void *number) {
    int thread = (int)(intptr_t)number;
    for (;;) {
        int64_t part;
        wait_for_work(thread);
        while (claim(&part, thread)) run_part(part, thread);
    }
    return NULL;
}

static void publish(uint64_t num_parts) {
    uint64_t generation = (atomic_load(&pool.ticket) >> 2 * PART_BITS) + 1;
    atomic_store(&pool.num_done, 0);
    atomic_store(&pool.ticket, generation << 2 * PART_BITS | num_parts << PART_BITS);
    if (atomic_load(&pool.num_sleeping) > 0) {
        pthread_mutex_lock(&pool.sleep);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.sleep);
    }
}

static void run_alone(int64_t size, int64_t grain, range_fn fn, const void *context) {
    for (int64_t begin = 0; begin < size; begin += grain)
        fn(context, begin, begin + grain < size ? begin + grain : size, 0);
}

int num_threads(void) { return atomic_load(&pool.num_threads); }

void parallel_for(int64_t size, int64_t grain, range_fn fn, const void *context) {
    if (size <= 0) return;
    if ((size + grain - 1) / grain > MAX_PARTS) grain = (size + MAX_PARTS - 1) / MAX_PARTS;
    int64_t num_parts = (size + grain - 1) / grain, part;
    // Two engines may step at once in two threads: the second one works by itself.
    if (num_parts == 1 || num_threads() == 1 || pthread_mutex_trylock(&pool.busy) != 0) {
        run_alone(size, grain, fn, context);
        return;
    }
    pool.fn = fn;
    pool.context = context;
    pool.size = size;
    pool.grain = grain;
    publish((uint64_t)num_parts);
    while (claim(&part, 0)) run_part(part, 0);
    for (int spin = 1; atomic_load(&pool.num_done) < num_parts; spin++) {
        if (spin % SPINS_TO_YIELD == 0) sched_yield();  // a thread that has a part may need this core
        else PAUSE();
    }
    pthread_mutex_unlock(&pool.busy);
}

// Threads do not survive a fork; the child works alone until it asks for threads.
static void forget_threads(void) {
    pthread_mutex_init(&pool.busy, NULL);
    pthread_mutex_init(&pool.sleep, NULL);
    pthread_cond_init(&pool.wake, NULL);
    atomic_store(&pool.num_sleeping, 0);
    atomic_store(&pool.num_threads, 1);
    atomic_store(&pool.ticket, 0);
    pool.num_started = 0;
}

EXPORT int baton_num_threads(void) { return num_threads(); }

// Use `count` threads from now on, the caller included.
EXPORT void baton_set_num_threads(int count) {
    static bool is_registered = false;
    count = count < 1 ? 1 : count > MAX_THREADS ? MAX_THREADS : count;
    pthread_mutex_lock(&pool.busy);
    if (!is_registered) pthread_atfork(NULL, NULL, forget_threads);
    is_registered = true;
    while (pool.num_started < count - 1) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work, (void *)(intptr_t)(pool.num_started + 1)) != 0) break;
        pthread_detach(thread);
        pool.num_started++;
    }
    atomic_store(&pool.num_threads, pool.num_started + 1 < count ? pool.num_started + 1 : (int)count);
    pthread_mutex_unlock(&pool.busy);
}
