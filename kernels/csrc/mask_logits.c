// Bans the tokens that a bit mask leaves out, row by row.
#include <math.h>
#include "simd.h"
#include "threads.h"

#define WORD_BITS 32
#define PART_WORK 65536  // logits worth a part of their own

struct masking {
    float *logits;
    ptrdiff_t stride;
    const int64_t *rows;
    const uint32_t *masks;
    int64_t num_words, size;
};

INLINE void mask_word(float *logits, uint32_t word, int64_t size) {
    if (word == 0)  // most words of a narrow mask: nothing is read
        for (int64_t v = 0; v < size; v++) logits[v] = -INFINITY;
    else
        for (int64_t v = 0; v < size; v++) logits[v] = word >> v & 1 ? logits[v] : -INFINITY;
}

static void mask_rows(const void *context, int64_t begin, int64_t end, int thread) {
    const struct masking *m = context;
    (void)thread;
    for (int64_t n = begin; n < end; n++) {
        float *logits = m->logits + m->rows[n] * m->stride;
        const uint32_t *mask = m->masks + n * m->num_words;
        int64_t whole = m->size / WORD_BITS;
        for (int64_t w = 0; w < whole; w++)
            if (mask[w] != UINT32_MAX) mask_word(logits + w * WORD_BITS, mask[w], WORD_BITS);
        if (m->size % WORD_BITS) mask_word(logits + whole * WORD_BITS, mask[whole], m->size % WORD_BITS);
    }
}

// logits: fp32, rows `stride` floats apart, of `size` each; rows: [num_masks], distinct; masks: [num_masks, num_words],
// contiguous. Bit 0 of a row's first word is token 0; a bit that is not set bans its token.
EXPORT void baton_mask_logits(
    float *logits, ptrdiff_t stride, const int64_t *rows, const uint32_t *masks, int64_t num_masks, int64_t num_words,
    int64_t size) {
    struct masking m = {logits, stride, rows, masks, num_words, size};
    parallel_for(num_masks, grain_of(size, PART_WORK), mask_rows, &m);
}
