// Runs of bytes from one area of memory to another.
//
// Pages are written once and read much later, if at all by this core: stores that go past the cache spare the
// read of every line before it is overwritten, a third of the memory's traffic. The source is asked for ahead
// of the copy, over the end of a run into the next one, where the CPU's own prefetcher cannot know the way.
#include "ops.h"

#if defined(__AVX__)
#include <immintrin.h>
#endif

#define AHEAD 2048  // bytes of the source that are on their way
#define BLOCK 256   // bytes copied at a time
#define STRIP 4096  // runs of a few of these are copied as four strips side by side
#define STRIPS_BELOW 65536

#if defined(__AVX512F__)
#define CAN_STREAM 1
INLINE void stream_line(char *to, const char *from) {
    _mm512_stream_si512((void *)to, _mm512_loadu_si512(from));
}
#elif defined(__AVX__)
#define CAN_STREAM 1
INLINE void stream_line(char *to, const char *from) {
    for (int half = 0; half < 64; half += 32)
        _mm256_stream_si256((void *)(to + half), _mm256_loadu_si256((const void *)(from + half)));
}
#else
#define CAN_STREAM 0
INLINE void stream_line(char *to, const char *from) { memcpy(to, from, 64); }
#endif

INLINE void stream_block(char *to, const char *from) {
    for (int line = 0; line < BLOCK; line += 64) stream_line(to + line, from + line);
}

// `to` lies on a line; size is a multiple of 4 * STRIP.
static void stream_strips(char *to, const char *from, int64_t size) {
    for (; size > 0; size -= 4 * STRIP, to += 4 * STRIP, from += 4 * STRIP)
        for (int block = 0; block < STRIP; block += BLOCK)
            for (int strip = 0; strip < 4 * STRIP; strip += STRIP) stream_block(to + strip + block, from + strip + block);
}

// next: where the source goes on after this run.
static void stream_run(char *to, const char *from, int64_t size, const char *next) {
    int64_t head = MIN((int64_t)(-(uintptr_t)to & 63), size);  // up to the destination's first whole line
    memcpy(to, from, head);
    to += head, from += head, size -= head;
    if (size < STRIPS_BELOW) {
        int64_t in_strips = size & -(4 * STRIP);
        stream_strips(to, from, in_strips);
        to += in_strips, from += in_strips, size -= in_strips;
    }
    for (; size >= BLOCK; size -= BLOCK, to += BLOCK, from += BLOCK) {
        const char *ahead = size > AHEAD ? from + AHEAD : next + (AHEAD - size);
        for (int line = 0; line < BLOCK; line += 64) __builtin_prefetch(ahead + line, 0, 0);
        stream_block(to, from);
    }
    memcpy(to, from, size);
}

// Run n: run_bytes bytes from source + source_offsets[n] to destination + destination_offsets[n].
// keep_in_cache: the destination is read next, by this core or a neighbour.
EXPORT void baton_copy_runs(
    const char *source, char *destination, const int64_t *source_offsets, const int64_t *destination_offsets,
    int64_t num_runs, int64_t run_bytes, int keep_in_cache) {
    for (int64_t run = 0; run < num_runs; run++) {
        const char *from = source + source_offsets[run];
        char *to = destination + destination_offsets[run];
        if (CAN_STREAM && !keep_in_cache)
            stream_run(to, from, run_bytes, run + 1 < num_runs ? source + source_offsets[run + 1] : from);
        else memcpy(to, from, run_bytes);
    }
#if defined(__AVX__)
    _mm_sfence();  // a thread that is told of the bytes then sees them
#endif
}
