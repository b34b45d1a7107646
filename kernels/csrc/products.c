// Chooses how this CPU multiplies pairs of bf16.
#include "products.h"

#include <time.h>

#define NUM_CHAINS 12  // independent sums
#define TIMED_ROUNDS 512
#define NUM_TIMED 8

struct cpu_products cpu_products = {.widen = 1, .prefetches_few = 1};

#if defined(__AVX512BF16__)
// Returns the seconds that many independent products take.
INLINE double seconds_of(const enum products products) {
    f32s acc[NUM_CHAINS], factor = splat(1.0f);
    for (int r = 0; r < NUM_CHAINS; r++) acc[r] = splat((float)r);
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (int i = 0; i < TIMED_ROUNDS; i++) {
        __asm__ volatile("" : "+v"(factor));  // so that the compiler leaves no round out
#pragma GCC unroll 12
        for (int r = 0; r < NUM_CHAINS; r++)
            acc[r] = products == PAIRS ? dot_units(acc[r], 0x3f803f80u, &factor, 1) : multiply_add(factor, factor, acc[r]);
    }
#pragma GCC unroll 12
    for (int r = 0; r < NUM_CHAINS; r++) __asm__ volatile("" : : "v"(acc[r]));
    clock_gettime(CLOCK_MONOTONIC, &end);
    return (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
}
#endif

// Runs once, in a tenth of a millisecond. Both ways give the same bits, so a disturbed measurement costs time alone.
__attribute__((constructor)) static void choose_products(void) {
#if defined(__AVX512BF16__)
    double floats = 1, pairs = 1;
    for (int i = 0; i < NUM_TIMED; i++) {
        floats = MIN(floats, seconds_of(FLOATS));
        pairs = MIN(pairs, seconds_of(PAIRS));
    }
    cpu_products.widen = 2 * floats < 0.8 * pairs;  // two multiply-adds of floats do the work of one of pairs
#endif
#if defined(__x86_64__)
    // On AMD the hardware's own prefetching is best. On Intel one row takes a fifth longer without prefetches.
    if (__builtin_cpu_is("amd")) cpu_products.prefetches_few = 0;
#endif
}
