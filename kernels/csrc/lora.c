// Low-rank updates of a projection: y += B @ (A @ x), where each row of x has the A and B of its own adapter.
#include "ops.h"

#define PART_WORK 32768  // products worth a part of their own
#define COLUMNS 4        // vectors of outputs that are summed at once

struct lora {
    const char *x;       // of shrink
    ptrdiff_t x_stride;  // bytes
    float *h, *y;
    ptrdiff_t h_stride, y_stride;  // elements
    const int32_t *slots;          // the adapter of each row; below 0: none
    const float *const *weights;   // of each slot, or null
    const int32_t *ranks;          // of each slot
    int64_t num_inputs, num_outputs;
    int splits, dtype;
};

// Inputs [0, size) of one row and one line of A.
INLINE float dot(const char *x, int64_t first, const float *a, int64_t size, const int is_bf16) {
    f32x16 sums = {0};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) sums += load_lanes(x, first + i, is_bf16) * load_f32(a + i);
    float sum = sum_lanes(sums);
    for (; i < size; i++) sum += load_one(x, first + i, is_bf16) * a[i];
    return sum;
}

INLINE void shrink_row(const struct lora *l, const char *x, const float *a, float *h, int rank, const int is_bf16) {
    int64_t size = l->num_inputs / l->splits;
    for (int r = 0; r < rank; r++) {
        float sum = 0.0f;
        for (int split = 0; split < l->splits; split++)
            sum += dot(x, split * size, a + r * l->num_inputs + split * size, size, is_bf16);
        h[r] = sum;
    }
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

// x: [num_rows, num_inputs] of `dtype`. h: [num_rows, ranks of the row's adapter] is written for rows with a weight, which
// is [rank, num_inputs]. splits (1 or 2): as of baton_linear.
EXPORT void baton_lora_shrink(
    const char *x, ptrdiff_t x_stride, const int32_t *slots, const float *const *weights, const int32_t *ranks, float *h,
    ptrdiff_t h_stride, int64_t num_rows, int64_t num_inputs, int64_t mean_rank, int splits, int dtype) {
    struct lora l = {
        .x = x, .x_stride = x_stride, .h = h, .h_stride = h_stride, .slots = slots, .weights = weights, .ranks = ranks,
        .num_inputs = num_inputs, .splits = splits, .dtype = dtype};
    parallel_for(num_rows, grain_of(num_inputs * mean_rank, PART_WORK), shrink_rows, &l);
}

// Outputs [0, size), at most COLUMNS vectors: y += the lines of B, weighed by h. stride: from line to line.
INLINE void expand_columns(const float *h, const float *b, ptrdiff_t stride, int rank, float *y, int64_t size) {
    f32x16 sums[COLUMNS] = {{0}};
    for (int r = 0; r < rank; r++)
        for (int c = 0; c * LANES < size; c++) sums[c] += splat(h[r]) * load_f32(b + r * stride + c * LANES);
    for (int c = 0; c * LANES < size; c++)
        for (int i = 0; i < MIN(LANES, size - c * LANES); i++) y[c * LANES + i] += sums[c][i];
}

static void expand_rows(const void *context, int64_t begin, int64_t end, int thread) {
    const struct lora *l = context;
    ptrdiff_t stride = (l->num_outputs + LANES - 1) / LANES * LANES;
    (void)thread;
    for (int64_t t = begin; t < end; t++) {
        int32_t slot = l->slots[t];
        if (slot < 0 || !l->weights[slot]) continue;
        float *y = l->y + t * l->y_stride;
        const float *h = l->h + t * l->h_stride;
        for (int64_t n = 0; n < l->num_outputs; n += COLUMNS * LANES)
            expand_columns(h, l->weights[slot] + n, stride, l->ranks[slot], y + n, MIN(COLUMNS * LANES, l->num_outputs - n));
    }
}

// y: [num_rows, num_outputs] fp32, added to. A weight is [rank, num_outputs rounded up to LANES], the transpose of B.
EXPORT void baton_lora_expand(
    const float *h, ptrdiff_t h_stride, const int32_t *slots, const float *const *weights, const int32_t *ranks, float *y,
    ptrdiff_t y_stride, int64_t num_rows, int64_t num_outputs, int64_t mean_rank) {
    struct lora l = {
        .h = (float *)h, .h_stride = h_stride, .y = y, .y_stride = y_stride, .slots = slots, .weights = weights,
        .ranks = ranks, .num_outputs = num_outputs};
    parallel_for(num_rows, grain_of(num_outputs * mean_rank, PART_WORK), expand_rows, &l);
}
