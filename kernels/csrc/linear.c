// y[M, N] = x[M, K] @ weight[N, K]^T + bias, with the weight packed once into panels of 32 columns.
//
// packed: [ceil(N / 32)][K / units][32] 32-bit units; a unit is one float or two neighbouring bf16 of K.
// A thread keeps ROWS x 32 sums in registers and streams one panel, so a small batch runs at the speed of
// memory and a large one at the speed of the multiplier. The sum over K is one chain per element in
// ascending order, in `splits` equal parts added in ascending order: as many parts as tensor-parallel
// ranks would have summed, which is why TP=2 gives the bits of TP=1.
#include "ops.h"

#define PANEL 32
#define ROWS 12
#define ROW_BLOCK 192  // rows whose x stays in L2 while the panels pass

#define PREFETCH_ROWS 6   // fewer rows wait for memory anyway, and the hardware's own prefetching does best
#define PART_WORK (1 << 19)  // multiplications worth a part of their own

struct linear {
    const char *x;          // [M, K]
    ptrdiff_t x_stride;     // bytes from row to row
    const char *packed;
    const float *bias;      // [N] or null
    char *y;                // [M, N]
    ptrdiff_t y_stride;     // bytes from row to row
    int64_t num_rows, num_columns, num_units;  // units of one row of x
    int splits;
    int y_is_bf16;
};

INLINE const char *panel_weights(const struct linear *p, int64_t panel) { return p->packed + panel * p->num_units * PANEL * 4; }

// While a tile is multiplied, the panel at `ahead` comes into the cache.
INLINE void tile_rows(
    const struct linear *p, int64_t row, int64_t panel, const char *ahead, const int rows, const int is_bf16) {
    f32x16 total[ROWS][2];
    const uint32_t *x[ROWS];
    for (int r = 0; r < rows; r++) x[r] = (const uint32_t *)(p->x + (row + r) * p->x_stride);
    const char *weights = panel_weights(p, panel);
    int64_t part = p->num_units / p->splits;
    for (int split = 0; split < p->splits; split++) {
        f32x16 acc[ROWS][2];
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) acc[r][0] = acc[r][1] = (f32x16){};
        int64_t end = split + 1 == p->splits ? p->num_units : (split + 1) * part;
        for (int64_t k = split * part; k < end; k++) {
            const char *b = weights + k * PANEL * 4;
            if (rows >= PREFETCH_ROWS) {
                __builtin_prefetch(ahead + k * PANEL * 4, 0, 2);
                __builtin_prefetch(ahead + k * PANEL * 4 + 64, 0, 2);
            }
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                acc[r][0] = dot_units(acc[r][0], x[r][k], b, is_bf16);
                acc[r][1] = dot_units(acc[r][1], x[r][k], b + 64, is_bf16);
            }
        }
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
            for (int h = 0; h < 2; h++) total[r][h] = split ? total[r][h] + acc[r][h] : acc[r][h];
    }
    for (int r = 0; r < rows; r++) {
        char *y = p->y + (row + r) * p->y_stride;
        for (int h = 0; h < 2; h++) {
            int64_t column = panel * PANEL + h * LANES;
            int64_t width = MIN(p->num_columns - column, LANES);
            if (width <= 0) break;
            float bias[LANES] = {0};
            if (p->bias) memcpy(bias, p->bias + column, width * sizeof(float));
            f32x16 sum = p->bias ? total[r][h] + load_f32(bias) : total[r][h];
            if (width == LANES) store_lanes(y, column, sum, p->y_is_bf16);
            else for (int64_t i = 0; i < width; i++) store_one(y, column + i, sum[i], p->y_is_bf16);
        }
    }
}

INLINE void tile(
    const struct linear *p, int64_t row, int64_t panel, const char *ahead, int64_t rows, const int is_bf16) {
    switch (rows) {
#define CASE(n) case n: tile_rows(p, row, panel, ahead, n, is_bf16); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
    }
}

INLINE int64_t num_panels_of(int64_t num_columns) { return (num_columns + PANEL - 1) / PANEL; }

INLINE void multiply_panel(const struct linear *p, int64_t block, int64_t panel, const int is_bf16) {
    int64_t row = block * ROW_BLOCK;
    int64_t rows_left = MIN(p->num_rows - row, ROW_BLOCK);
    // Tiles of nearly equal height: 14 rows are 7 + 7, never 12 + 2.
    for (int64_t tiles = (rows_left + ROWS - 1) / ROWS; tiles > 0; tiles--) {
        int64_t rows = (rows_left + tiles - 1) / tiles;
        // The last tile has the next panel fetched; past the end of memory a prefetch does nothing.
        tile(p, row, panel, panel_weights(p, tiles == 1 ? panel + 1 : panel), rows, is_bf16);
        row += rows;
        rows_left -= rows;
    }
}

// Item i is panel i % panels of row block i / panels.
static void multiply_bf16(const void *context, int64_t begin, int64_t end, int thread) {
    const struct linear *p = context;
    int64_t num_panels = num_panels_of(p->num_columns);
    (void)thread;
    for (int64_t i = begin; i < end; i++) multiply_panel(p, i / num_panels, i % num_panels, 1);
}

static void multiply_f32(const void *context, int64_t begin, int64_t end, int thread) {
    const struct linear *p = context;
    int64_t num_panels = num_panels_of(p->num_columns);
    (void)thread;
    for (int64_t i = begin; i < end; i++) multiply_panel(p, i / num_panels, i % num_panels, 0);
}

// x and packed share the element type `dtype`; y is of type `y_dtype`. num_inputs is even for bf16.
EXPORT void baton_linear(
    const char *x, ptrdiff_t x_stride, const char *packed, const float *bias, char *y, ptrdiff_t y_stride,
    int64_t num_rows, int64_t num_columns, int64_t num_inputs, int splits, int dtype, int y_dtype) {
    struct linear p = {
        .x = x, .x_stride = x_stride, .packed = packed, .bias = bias, .y = y, .y_stride = y_stride,
        .num_rows = num_rows, .num_columns = num_columns,
        .num_units = dtype == BF16 ? num_inputs / 2 : num_inputs, .splits = splits, .y_is_bf16 = y_dtype == BF16};
    int64_t num_items = num_panels_of(num_columns) * ((num_rows + ROW_BLOCK - 1) / ROW_BLOCK);
    int64_t grain = grain_of(MIN(num_rows, ROW_BLOCK) * num_inputs * PANEL, PART_WORK);
    parallel_for(num_items, grain, dtype == BF16 ? multiply_bf16 : multiply_f32, &p);
}

struct packing {
    const uint32_t *weight;
    ptrdiff_t row_units;
    uint32_t *packed;
    int64_t num_columns, num_units;
};

static void pack_panels(const void *context, int64_t begin, int64_t end, int thread) {
    const struct packing *p = context;
    (void)thread;
    for (int64_t panel = begin; panel < end; panel++)
        for (int64_t k = 0; k < p->num_units; k++)
            for (int64_t i = 0; i < PANEL; i++) {
                int64_t column = panel * PANEL + i;
                p->packed[(panel * p->num_units + k) * PANEL + i] =
                    column < p->num_columns ? p->weight[column * p->row_units + k] : 0;
            }
}

// weight: [num_columns, units] 32-bit units, row-major -> packed, the last panel filled up with zeros.
EXPORT void baton_pack_linear(const uint32_t *weight, ptrdiff_t row_units, uint32_t *packed, int64_t num_columns, int64_t num_units) {
    struct packing p = {weight, row_units, packed, num_columns, num_units};
    parallel_for(num_panels_of(num_columns), 4, pack_panels, &p);
}
