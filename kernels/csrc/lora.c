// Low-rank updates of a projection: y += B @ (A @ x), where each row of x has the A and B of its own adapter.
#include "ops.h"

#define LINES 4          // of A that are multiplied at once
#define PART_WORK 32768  // products worth a part of their own
#define PANEL 64         // outputs that are summed at once: B lies in panels of so many, as lora.py packs it

struct lora {
    const char *x;       // of shrink
    ptrdiff_t x_stride;  // bytes
    float *h, *y;
    ptrdiff_t h_stride, y_stride;  // elements
    const int32_t *slots;          // the adapter of each row; below 0: none
    const char *const *weights;    // of each slot, of `dtype`, or null
    const int32_t *ranks;          // of each slot
    int64_t num_inputs, num_outputs;
    int splits, dtype;  // of x and the weights
};

// h[r] += the products of x and line r of A, for LINES lines, or the last `rank`; each sum is a chain of its own.
INLINE void add_dots(
    const char *x, const char *a, ptrdiff_t line_bytes, int64_t size, float *h, int rank, const int is_bf16) {
    f32s sums[LINES][VECTORS] = {{{0}}};
    const char *lines[LINES];
    for (int r = 0; r < LINES; r++) lines[r] = a + MIN(r, rank - 1) * line_bytes;
    int64_t i = 0;
    for (; i + CHAINS <= size; i += CHAINS)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            f32s values = load_lanes(x, i + v * LANES, is_bf16);
#pragma GCC unroll 4
            for (int r = 0; r < LINES; r++) sums[r][v] = multiply_add(values, load_lanes(lines[r], i + v * LANES, is_bf16), sums[r][v]);
        }
    for (int r = 0; r < MIN(LINES, rank); r++) {
        float sum = sum_chains(sums[r]);
        for (int64_t j = i; j < size; j++) sum += load_one(x, j, is_bf16) * load_one(lines[r], j, is_bf16);
        h[r] += sum;
    }
}

INLINE void shrink_row(const struct lora *l, const char *x, const char *a, float *h, int rank, const int is_bf16) {
    int64_t size = l->num_inputs / l->splits, bytes = size * (is_bf16 ? 2 : 4);
    for (int split = 0; split < l->splits; split++)
        for (int r = 0; r < rank; r += LINES)
            add_dots(x + split * bytes, a + (r * l->splits + split) * bytes, l->splits * bytes, size, h + r, rank - r, is_bf16);
}

static void shrink_rows(const void *context, int64_t begin, int64_t end, int thread) {
    const struct lora *l = context;
    (void)thread;
    for (int64_t t = begin; t < end; t++) {
        int32_t slot = l->slots[t];
        if (slot < 0 || !l->weights[slot]) continue;
        const char *x = l->x + t * l->x_stride;
        float *h = l->h + t * l->h_stride;
        if (l->dtype == BF16) shrink_row(l, x, l->weights[slot], h, l->ranks[slot], 1);
        else shrink_row(l, x, l->weights[slot], h, l->ranks[slot], 0);
    }
}

// x: [num_rows, num_inputs] of `dtype`. h: [num_rows, rank of the row's adapter], zeros, is added to where the row has a
// weight, which is [rank, num_inputs] of `dtype`. splits (1 or 2): as in baton_linear.
EXPORT void baton_lora_shrink(
    const char *x, ptrdiff_t x_stride, const int32_t *slots, const char *const *weights, const int32_t *ranks, float *h,
    ptrdiff_t h_stride, int64_t num_rows, int64_t num_inputs, int64_t mean_rank, int splits, int dtype) {
    struct lora l = {
        .x = x, .x_stride = x_stride, .h = h, .h_stride = h_stride, .slots = slots, .weights = weights, .ranks = ranks,
        .num_inputs = num_inputs, .splits = splits, .dtype = dtype};
    parallel_for(num_rows, grain_of(num_inputs * mean_rank, PART_WORK), shrink_rows, &l);
}

// The first `size` outputs of a panel: y += the lines of B, weighed by h.
INLINE void expand_panel(const float *h, const char *b, int rank, float *y, int64_t size, const int is_bf16) {
    f32s sums[PANEL / LANES] = {{0}};
    float added[PANEL];
    for (int r = 0; r < rank; r++)
#pragma GCC unroll 16
        for (int c = 0; c < PANEL / LANES; c++)
            sums[c] = multiply_add(splat(h[r]), load_lanes(b, r * PANEL + c * LANES, is_bf16), sums[c]);
    memcpy(added, sums, sizeof added);
    for (int64_t i = 0; i < size; i++) y[i] += added[i];
}

INLINE void expand_row(const struct lora *l, const float *h, const char *b, float *y, int rank, const int is_bf16) {
    int64_t line_bytes = rank * (is_bf16 ? 2 : 4);  // of B: an output
    for (int64_t n = 0; n < l->num_outputs; n += PANEL)
        expand_panel(h, b + n * line_bytes, rank, y + n, MIN(PANEL, l->num_outputs - n), is_bf16);
}

static void expand_rows(const void *context, int64_t begin, int64_t end, int thread) {
    const struct lora *l = context;
    (void)thread;
    for (int64_t t = begin; t < end; t++) {
        int32_t slot = l->slots[t];
        if (slot < 0 || !l->weights[slot]) continue;
        float *y = l->y + t * l->y_stride;
        const float *h = l->h + t * l->h_stride;
        if (l->dtype == BF16) expand_row(l, h, l->weights[slot], y, l->ranks[slot], 1);
        else expand_row(l, h, l->weights[slot], y, l->ranks[slot], 0);
    }
}

// y: [num_rows, num_outputs] fp32, added to. A weight is [panels, rank, PANEL] of `dtype`, with zeros after the last output.
EXPORT void baton_lora_expand(
    const float *h, ptrdiff_t h_stride, const int32_t *slots, const char *const *weights, const int32_t *ranks, float *y,
    ptrdiff_t y_stride, int64_t num_rows, int64_t num_outputs, int64_t mean_rank, int dtype) {
    struct lora l = {
        .h = (float *)h, .h_stride = h_stride, .y = y, .y_stride = y_stride, .slots = slots, .weights = weights,
        .ranks = ranks, .num_outputs = num_outputs, .dtype = dtype};
    parallel_for(num_rows, grain_of(num_outputs * mean_rank, PART_WORK), expand_rows, &l);
}
