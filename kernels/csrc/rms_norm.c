// Root-mean-square normalisation of rows, alone or after adding to the residual stream.
#include "ops.h"

struct rows {
    ptrdiff_t outer, inner;  // bytes from row to row: row r is (r / num_inner, r % num_inner)
};

INLINE char *row_at(char *base, struct rows s, int64_t row, int64_t num_inner) {
    return base + row / num_inner * s.outer + row % num_inner * s.inner;
}

// y = round(x * rsqrt(mean(x^2) + eps)) * weight, rounded again: Hugging Face's order of rounding of most models. With a
// weight of floats the product alone is rounded: that of the others.
INLINE void norm_row(const char *x, const char *weight, char *y, int64_t width, float eps, const int is_bf16, const int weight_is_bf16) {
    f32s squares[VECTORS] = {{0}};
    int64_t i = 0;
    for (; i + CHAINS <= width; i += CHAINS)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            f32s values = load_lanes(x, i + v * LANES, is_bf16);
            squares[v] = multiply_add(values, values, squares[v]);
        }
    float sum = sum_chains(squares);
    for (int64_t j = i; j < width; j++) sum += load_one(x, j, is_bf16) * load_one(x, j, is_bf16);
    float inverse = 1.0f / sqrtf(sum / (float)width + eps);
    for (i = 0; i + LANES <= width; i += LANES) {
        f32s scaled = round_to(load_lanes(x, i, is_bf16) * splat(inverse), weight_is_bf16);
        store_lanes(y, i, scaled * load_lanes(weight, i, weight_is_bf16), is_bf16);
    }
    for (; i < width; i++) {
        float scaled = load_one(x, i, is_bf16) * inverse;
        if (weight_is_bf16) scaled = bf16_to_f32(f32_to_bf16(scaled));
        store_one(y, i, scaled * load_one(weight, i, weight_is_bf16), is_bf16);
    }
}

INLINE void add_row(char *residual, const char *x, int64_t width, const int is_bf16) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES)
        store_lanes(residual, i, load_lanes(residual, i, is_bf16) + load_lanes(x, i, is_bf16), is_bf16);
    for (; i < width; i++)
        store_one(residual, i, load_one(residual, i, is_bf16) + load_one(x, i, is_bf16), is_bf16);
}

#define PART_WORK 32768  // elements worth a part of their own

struct norm {
    const char *x;  // added to the rows, or null
    char *rows, *y;
    const char *weight;
    struct rows strides, y_strides;
    int64_t num_inner, width;
    float eps;
    int dtype, weight_dtype;
};

static void norm_rows(const void *context, int64_t begin, int64_t end, int thread) {
    const struct norm *n = context;
    int64_t row_bytes = n->width * (n->dtype == BF16 ? 2 : 4);
    (void)thread;
    for (int64_t r = begin; r < end; r++) {
        char *row = row_at(n->rows, n->strides, r, n->num_inner), *y = row_at(n->y, n->y_strides, r, n->num_inner);
        if (n->dtype == BF16) {
            if (n->x) add_row(row, n->x + r * row_bytes, n->width, 1);
            if (n->weight_dtype == BF16) norm_row(row, n->weight, y, n->width, n->eps, 1, 1);
            else norm_row(row, n->weight, y, n->width, n->eps, 1, 0);
        } else {
            if (n->x) add_row(row, n->x + r * row_bytes, n->width, 0);
            norm_row(row, n->weight, y, n->width, n->eps, 0, 0);
        }
    }
}

// rows += x, unless x is null; then y = norm(rows). rows, y: [num_outer, num_inner, width], last axis contiguous, strides in
// bytes. x is contiguous. y may be rows or x.
EXPORT void baton_rms_norm(
    const char *x, char *rows, ptrdiff_t outer, ptrdiff_t inner, const char *weight, char *y, ptrdiff_t y_outer,
    ptrdiff_t y_inner, int64_t num_outer, int64_t num_inner, int64_t width, float eps, int dtype, int weight_dtype) {
    struct norm n = {
        .x = x, .rows = rows, .y = y, .weight = weight, .strides = {outer, inner}, .y_strides = {y_outer, y_inner},
        .num_inner = num_inner, .width = width, .eps = eps, .dtype = dtype, .weight_dtype = weight_dtype};
    parallel_for(num_outer * num_inner, grain_of(width, PART_WORK), norm_rows, &n);
}
