// y[M, N] = x[M, K] @ weight[N, K]^T + bias, with the weight packed once into panels of 32 columns.
//
// packed: [ceil(N / 32)][K / units][32] 32-bit units; a unit is one float or two neighbouring bf16 of K.
// A thread keeps ROWS x 32 sums in registers and streams one panel, so a small batch runs at the speed of
// memory and a large one at the speed of the multiplier. The sum over K is one chain per element in
// ascending order, in `splits` equal parts added in ascending order: as many parts as tensor-parallel
// ranks would have summed, which is why TP=2 gives the bits of TP=1.
//
// Where pairs are widened (products.h), x is widened to floats once. A unit of weights is widened in registers, once
// for all rows of a tile.
#include <stdlib.h>

#include "ops.h"
#include "panels.h"
#include "products.h"

#define WIDE_ROWS 2           // of one row memory is the limit, and widening gains nothing
#define WIDE_BYTES (1 << 25)  // of widened x at a time; one block of rows may take more
#define WIDEN_WORK 16         // multiplications that take as long as widening an element
#define PART_WORK (1 << 19)   // multiplications worth a part of their own

struct linear {
    const char *x;          // [M, K], or what `widen_row` makes of it
    ptrdiff_t x_stride;     // bytes from row to row
    const char *packed;
    struct output out;
    int64_t num_rows, num_units;  // units of one row of x
    int splits;
};

INLINE const char *panel_weights(const struct linear *p, int64_t panel) { return p->packed + panel * p->num_units * PANEL * 4; }

// While a tile is multiplied, the panel at `ahead` comes into the cache.
INLINE void tile_rows(
    const struct linear *p, int64_t row, int64_t panel, const char *ahead, const int rows, const enum products products) {
    f32s total[ROWS][COLUMNS];
    const uint32_t *x[ROWS];
    for (int r = 0; r < rows; r++) x[r] = (const uint32_t *)(p->x + (row + r) * p->x_stride);
    const float *wide = (const float *)p->x + row * 2 * p->num_units;
    const char *weights = panel_weights(p, panel);
    int64_t part = p->num_units / p->splits;
    for (int split = 0; split < p->splits; split++) {
        f32s acc[ROWS][COLUMNS];
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int c = 0; c < COLUMNS; c++) acc[r][c] = (f32s){};
        int64_t end = split + 1 == p->splits ? p->num_units : (split + 1) * part;
        for (int64_t k = split * part; k < end; k++) {
            const char *b = weights + k * PANEL * 4;
            if (rows >= PREFETCH_ROWS || cpu_products.prefetches_few) {
                __builtin_prefetch(ahead + k * PANEL * 4, 0, 2);
                __builtin_prefetch(ahead + k * PANEL * 4 + 64, 0, 2);
            }
            if (products == WIDE) {
#pragma GCC unroll 4
                for (int c = 0; c < COLUMNS; c += 2) {
                    struct wide left = widen(b + c * 4 * LANES), right = widen(b + (c + 1) * 4 * LANES);
#pragma GCC unroll 12
                    for (int r = 0; r < rows; r++) {
                        f32s factor = splat(wide[2 * k * rows + r]);
                        acc[r][c] = multiply_add(factor, left.second, acc[r][c]);
                        acc[r][c + 1] = multiply_add(factor, right.second, acc[r][c + 1]);
                    }
#pragma GCC unroll 12
                    for (int r = 0; r < rows; r++) {
                        f32s factor = splat(wide[(2 * k + 1) * rows + r]);
                        acc[r][c] = multiply_add(factor, left.first, acc[r][c]);
                        acc[r][c + 1] = multiply_add(factor, right.first, acc[r][c + 1]);
                    }
                }
                continue;
            }
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
                for (int c = 0; c < COLUMNS; c++)
                    acc[r][c] = dot_units(acc[r][c], x[r][k], b + c * 4 * LANES, products == PAIRS);
        }
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int c = 0; c < COLUMNS; c++) total[r][c] = split ? total[r][c] + acc[r][c] : acc[r][c];
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS; c++) store_sums(&p->out, row + r, panel * PANEL + c * LANES, total[r][c]);
}

INLINE void multiply_panel(const struct linear *p, int64_t block, int64_t panel, const enum products products) {
    int64_t first = block * ROW_BLOCK, num_rows = MIN(p->num_rows - first, ROW_BLOCK), num_tiles = 1;
    for (int64_t tile = 0; tile < num_tiles; tile++) {
        int64_t row = tile_begin(num_rows, tile, &num_tiles), end = tile_begin(num_rows, tile + 1, &num_tiles);
        // The last tile has the next panel fetched; past the end of memory a prefetch does nothing.
        const char *ahead = panel_weights(p, tile + 1 == num_tiles ? panel + 1 : panel);
        WITH_ROWS(n, end - row, tile_rows(p, first + row, panel, ahead, n, products))
    }
}

// Item i is panel i % panels of row block i / panels.
INLINE void multiply(const struct linear *p, int64_t begin, int64_t end, const enum products products) {
    int64_t num_panels = num_panels_of(p->out.num_columns);
    unsigned int mode = begin_products(products);
    for (int64_t i = begin; i < end; i++) multiply_panel(p, i / num_panels, i % num_panels, products);
    end_products(products, mode);
}

static void multiply_floats(const void *context, int64_t begin, int64_t end, int thread) {
    (void)thread;
    multiply(context, begin, end, FLOATS);
}

static void multiply_pairs(const void *context, int64_t begin, int64_t end, int thread) {
    (void)thread;
    multiply(context, begin, end, PAIRS);
}

static void multiply_wide(const void *context, int64_t begin, int64_t end, int thread) {
    (void)thread;
    multiply(context, begin, end, WIDE);
}

struct widening {
    const struct linear *linear;
    float *wide;
};

// Row `row` as floats. The rows of a tile lie together: [units][second, first of the pair][rows of the tile].
static void widen_row(const struct widening *w, int64_t row) {
    const struct linear *p = w->linear;
    int64_t block = row / ROW_BLOCK * ROW_BLOCK;
    struct place place = place_of(MIN(p->num_rows - block, ROW_BLOCK), row - block);
    const bf16 *x = (const bf16 *)(p->x + row * p->x_stride);
    float *wide = w->wide + (block + place.tile_begin) * 2 * p->num_units + place.row;
    for (int64_t k = 0; k < p->num_units; k++) {
        wide[2 * k * place.tile_rows] = bf16_to_f32(x[2 * k + 1]);
        wide[(2 * k + 1) * place.tile_rows] = bf16_to_f32(x[2 * k]);
    }
}

static void widen_rows(const void *context, int64_t begin, int64_t end, int thread) {
    (void)thread;
    for (int64_t row = begin; row < end; row++) widen_row(context, row);
}

static void multiply_rows(const struct linear *p, int64_t num_inputs, range_fn products) {
    int64_t num_items = num_panels_of(p->out.num_columns) * ((p->num_rows + ROW_BLOCK - 1) / ROW_BLOCK);
    parallel_for(num_items, grain_of(MIN(p->num_rows, ROW_BLOCK) * num_inputs * PANEL, PART_WORK), products, p);
}

// Returns 0, with nothing done, if there is no memory for widened rows.
static int multiply_widened(const struct linear *p, int64_t num_inputs) {
    int64_t row_bytes = num_inputs * sizeof(float);
    int64_t num_rows = MIN(p->num_rows, MAX(1, WIDE_BYTES / (ROW_BLOCK * row_bytes)) * ROW_BLOCK);
    float *wide = malloc(num_rows * row_bytes);
    if (!wide) return 0;
    for (int64_t row = 0; row < p->num_rows; row += num_rows) {
        struct linear rows = *p;
        rows.x += row * p->x_stride;
        rows.out.y += row * p->out.stride;
        rows.num_rows = MIN(num_rows, p->num_rows - row);
        struct linear widened = rows;
        widened.x = (const char *)wide;
        struct widening w = {&rows, wide};
        parallel_for(rows.num_rows, grain_of(num_inputs * WIDEN_WORK, PART_WORK), widen_rows, &w);
        multiply_rows(&widened, num_inputs, multiply_wide);
    }
    free(wide);
    return 1;
}

// x and the weight share the element type `dtype`. The number of inputs is even for bf16.
void multiply_plain(
    const struct weight *w, const char *x, ptrdiff_t x_stride, char *y, ptrdiff_t y_stride, int64_t num_rows, int splits,
    int dtype, int y_dtype) {
    struct linear p = {
        .x = x, .x_stride = x_stride, .packed = w->packed, .out = {y, y_stride, w->bias, w->num_columns, y_dtype == BF16},
        .num_rows = num_rows, .num_units = dtype == BF16 ? w->num_inputs / 2 : w->num_inputs, .splits = splits};
    if (dtype != BF16) multiply_rows(&p, w->num_inputs, multiply_floats);
    else if (num_rows < WIDE_ROWS || !cpu_products.widen || !multiply_widened(&p, w->num_inputs))
        multiply_rows(&p, w->num_inputs, multiply_pairs);
}

// A product of a weight in any format: as multiply_weight.
EXPORT void baton_linear(
    const char *x, ptrdiff_t x_stride, const char *packed, const float *bias, char *y, ptrdiff_t y_stride,
    int64_t num_rows, int64_t num_columns, int64_t num_inputs, int64_t group, int format, int splits, int dtype, int y_dtype) {
    struct weight w = {packed, bias, num_columns, num_inputs, group, format};
    multiply_weight(&w, x, x_stride, y, y_stride, num_rows, splits, dtype, y_dtype);
}

// Products of several weights with a part of the rows each: what one `linear` is to a weight.
struct products_of_experts {
    const struct linear *linears;  // of the experts that have rows
    const range_fn *products;
    const int64_t *first_items;    // [num_linears + 1]
    int64_t num_linears;
};

static void multiply_experts(const void *context, int64_t begin, int64_t end, int thread) {
    const struct products_of_experts *p = context;
    int64_t index = 0, above = p->num_linears;  // first_items[index] <= begin < first_items[above]
    while (above - index > 1) {
        int64_t middle = (index + above) / 2;
        if (p->first_items[middle] <= begin) index = middle;
        else above = middle;
    }
    for (; begin < end; index++) {
        int64_t first = p->first_items[index], stop = MIN(end, p->first_items[index + 1]);
        p->products[index](p->linears + index, begin - first, stop - first, thread);
        begin = stop;
    }
}

static void widen_experts(const void *context, int64_t begin, int64_t end, int thread) {
    const struct widening *widenings = context;
    for (int64_t i = begin; i < end; i++)
        if (widenings[i].wide) widen_rows(widenings + i, 0, widenings[i].linear->num_rows, thread);
}

static struct linear linear_of_expert(
    const char *x, ptrdiff_t x_stride, const struct expert_weights *w, const int64_t *starts, int64_t expert, char *y,
    ptrdiff_t y_stride, int dtype, int y_dtype) {
    int64_t first = starts[expert];
    const float *bias = w->bias ? w->bias + expert * w->num_columns : 0;
    return (struct linear){
        .x = x + first * x_stride, .x_stride = x_stride, .packed = w->packed[expert],
        .out = {y + first * y_stride, y_stride, bias, w->num_columns, y_dtype == BF16},
        .num_rows = starts[expert + 1] - first, .num_units = dtype == BF16 ? w->num_inputs / 2 : w->num_inputs, .splits = 1};
}

// Few rows of each expert: the products of all experts share the threads. `wide` has room for all rows, or is null.
static void multiply_few(
    const char *x, ptrdiff_t x_stride, const struct expert_weights *w, const int64_t *starts, int64_t num_experts, char *y,
    ptrdiff_t y_stride, int dtype, int y_dtype, float *wide) {
    struct linear linears[num_experts], rows[num_experts];
    struct widening widenings[num_experts];
    range_fn products[num_experts];
    int64_t first_items[num_experts + 1], count = 0, num_panels = num_panels_of(w->num_columns);
    first_items[0] = 0;
    for (int64_t expert = 0; expert < num_experts; expert++) {
        if (starts[expert] == starts[expert + 1]) continue;
        struct linear *p = linears + count;
        *p = rows[count] = linear_of_expert(x, x_stride, w, starts, expert, y, y_stride, dtype, y_dtype);
        int widens = wide && p->num_rows >= WIDE_ROWS;
        widenings[count] = (struct widening){rows + count, widens ? wide + starts[expert] * w->num_inputs : 0};
        if (widens) p->x = (const char *)widenings[count].wide;
        products[count] = dtype != BF16 ? multiply_floats : widens ? multiply_wide : multiply_pairs;
        first_items[count + 1] = first_items[count] + num_panels * ((p->num_rows + ROW_BLOCK - 1) / ROW_BLOCK);
        count++;
    }
    if (!count) return;
    int64_t rows_an_expert = MAX(1, starts[num_experts] / count);
    if (wide) parallel_for(count, grain_of(rows_an_expert * w->num_inputs * WIDEN_WORK, PART_WORK), widen_experts, widenings);
    struct products_of_experts p = {linears, products, first_items, count};
    parallel_for(first_items[count], grain_of(rows_an_expert * w->num_inputs * PANEL, PART_WORK), multiply_experts, &p);
}

// Rows [starts[e], starts[e + 1]) of x times the weight of expert e, with the bits of baton_linear.
EXPORT void baton_linear_experts(
    const char *x, ptrdiff_t x_stride, const struct expert_weights *w, const int64_t *starts, int64_t num_experts, char *y,
    ptrdiff_t y_stride, int dtype, int y_dtype) {
    int64_t wide_bytes = starts[num_experts] * w->num_inputs * (int64_t)sizeof(float);
    if (!w->group && wide_bytes <= WIDE_BYTES) {
        int widens = dtype == BF16 && cpu_products.widen && starts[num_experts] >= WIDE_ROWS;
        float *wide = widens ? malloc(wide_bytes) : 0;
        multiply_few(x, x_stride, w, starts, num_experts, y, y_stride, dtype, y_dtype, wide);
        free(wide);
        return;
    }
    for (int64_t expert = 0; expert < num_experts; expert++) {
        int64_t first = starts[expert], num_rows = starts[expert + 1] - first;
        struct weight one = {
            w->packed[expert], w->bias ? w->bias + expert * w->num_columns : 0, w->num_columns, w->num_inputs, w->group, w->format};
        if (num_rows) multiply_weight(&one, x + first * x_stride, x_stride, y + first * y_stride, y_stride, num_rows, 1, dtype, y_dtype);
    }
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
