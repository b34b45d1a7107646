// y[M, N] = x[M, K] @ weight[N, K]^T + bias, with a weight of 8 or 4 bits and inputs as they are.
//
// Inputs come in groups. In each group every column of the weight has a scale, and perhaps a zero that is subtracted from
// its values. Codes become floats in registers, once for all rows of a tile. Products within a group are one chain of
// sums for each column; the sums of groups are scaled and added in ascending order, in `splits` equal parts of groups as in
// linear.c. So a row's bits depend on neither the batch nor the number of ranks.
//
// packed: a panel of 32 columns after another, in each panel a group after another, in each group
//   INT8   int8 [group / 4][32][4]   units of four neighbouring inputs
//   INT4*  [group / 8][32][4]        bytes of two such units, the first in the lower halves; values in two's complement
//   MXFP4  the same, with the codes of E2M1
//   FP8    [group][32]               E4M3
//   float [32]                       the scales
//   float [32]                       the zeros, of INT4_ZEROS alone
#include <stdlib.h>

#include "ops.h"
#include "panels.h"
#include "products.h"

#define UNIT 4                // inputs
#define STEP 8                // inputs that are decoded at a time
#define MAX_GROUPS 4          // that are summed at a time: with few rows one chain of sums waits for itself
#define FEW_ROWS 3
#define PART_WORK (1 << 19)   // multiplications worth a part of their own
#define WIDENING_WORK 16      // multiplications that take as long as widening an element

static const float INT4_VALUES[16] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
static const float MXFP4_VALUES[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

// At most ROW_BLOCK rows.
struct linear_codes {
    const char *x;       // [M, K]
    ptrdiff_t x_stride;  // bytes from row to row
    float *wide;         // of x, a tile after another: [inputs][rows of the tile]
    const char *packed;
    const float *table;  // the values of codes of 4 bits
    struct output out;
    int64_t num_rows, num_inputs, group, num_groups, group_bytes;
    int splits, x_is_bf16;
};

INLINE int bits_of(const enum weight_format format) { return format == INT8 || format == FP8 ? 8 : 4; }

struct table {
    f32s values[VECTORS];  // 16
};

INLINE f32s look_up(struct table table, i32s index) {
#if defined(__AVX512F__)
    return (f32s)_mm512_permutexvar_ps((__m512i)index, (__m512)table.values[0]);
#elif LANES == 8
    __m256 low = _mm256_permutevar8x32_ps((__m256)table.values[0], (__m256i)index);
    __m256 high = _mm256_permutevar8x32_ps((__m256)table.values[1], (__m256i)index);
    return (f32s)_mm256_blendv_ps(low, high, _mm256_castsi256_ps((__m256i)(index << 28)));
#else
    f32s found;
    for (int i = 0; i < LANES; i++) found[i] = table.values[(index[i] & 15) / LANES][index[i] % LANES];
    return found;
#endif
}

// The values of one vector of a panel in input `input_of(i)` of a step.
INLINE f32s decode(const char *codes, int c, struct table table, int i, const enum weight_format format) {
    i32s unit;
    if (format == FP8) return load_fp8(codes + i * PANEL + c * LANES);
    memcpy(&unit, codes + (format == INT8 ? i / UNIT * PANEL * UNIT : 0) + c * LANES * UNIT, sizeof unit);
    if (format == INT8) return __builtin_convertvector(unit << (24 - 8 * (i % UNIT)) >> 24, f32s);
    return look_up(table, unit >> 4 * i);
}

INLINE int input_of(int i, const enum weight_format format) { return bits_of(format) == 8 ? i : i / 2 + i % 2 * UNIT; }

// acc += one input's products, of one vector of a panel.
INLINE void add_input(
    const char *codes, const float *inputs, struct table table, f32s zero, f32s acc[ROWS][COLUMNS], int c, int i,
    const int rows, const enum weight_format format) {
    f32s value = decode(codes, c, table, i, format);
    if (format == INT4_ZEROS) value = value - zero;
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) acc[r][c] = multiply_add(splat(inputs[input_of(i, format) * rows + r]), value, acc[r][c]);
}

// Some groups of a tile: part += each group's sums, scaled. Meanwhile the same groups of the panel at `ahead` are fetched.
INLINE void add_groups(
    const struct linear_codes *p, const char *weights, const char *ahead, const float *x, f32s part[ROWS][COLUMNS],
    const int rows, const int groups, const enum weight_format format) {
    const int prefetches = rows >= PREFETCH_ROWS || cpu_products.prefetches_few, step_bytes = STEP * PANEL * bits_of(format) / 8;
    int64_t code_bytes = p->group * PANEL * bits_of(format) / 8;
    f32s acc[MAX_GROUPS][ROWS][COLUMNS], scale[COLUMNS], zero[MAX_GROUPS][COLUMNS] = {{{0}}};
    struct table table;
    memcpy(table.values, p->table, sizeof table.values);
#pragma GCC unroll 4
    for (int g = 0; g < groups; g++) {
        if (format == INT4_ZEROS) memcpy(zero[g], weights + g * p->group_bytes + code_bytes + sizeof scale, sizeof scale);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int c = 0; c < COLUMNS; c++) acc[g][r][c] = (f32s){0};
    }
    for (int64_t k = 0; k < p->group; k += STEP)
#pragma GCC unroll 4
        for (int g = 0; g < groups; g++) {
            const char *codes = weights + g * p->group_bytes + k / STEP * step_bytes;
            const float *inputs = x + (g * p->group + k) * rows;
            for (int i = 0; i < step_bytes && prefetches; i += 64) __builtin_prefetch(ahead + (codes - weights) + i, 0, 2);
            if (rows <= FEW_ROWS)
#pragma GCC unroll 8
                for (int c = 0; c < COLUMNS; c++)
#pragma GCC unroll 8
                    for (int i = 0; i < STEP; i++) add_input(codes, inputs, table, zero[g][c], acc[g], c, i, rows, format);
            else  // the same sums in less code, which takes a third of the time to compile
#pragma GCC unroll 1
                for (int i = 0; i < STEP; i++)
#pragma GCC unroll 8
                    for (int c = 0; c < COLUMNS; c++) add_input(codes, inputs, table, zero[g][c], acc[g], c, i, rows, format);
        }
#pragma GCC unroll 4
    for (int g = 0; g < groups; g++) {
        memcpy(scale, weights + g * p->group_bytes + code_bytes, sizeof scale);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int c = 0; c < COLUMNS; c++) part[r][c] = multiply_add(acc[g][r][c], scale[c], part[r][c]);
    }
}

INLINE void tile_rows(
    const struct linear_codes *p, int64_t row, int64_t panel, const char *ahead, const int rows, const enum weight_format format) {
    const int groups = rows * COLUMNS <= 2 ? MAX_GROUPS : rows * COLUMNS <= 6 ? 2 : 1;
    f32s total[ROWS][COLUMNS];
    const float *x = p->wide + row * p->num_inputs;
    const char *weights = p->packed + panel * p->num_groups * p->group_bytes;
    for (int split = 0; split < p->splits; split++) {
        f32s part[ROWS][COLUMNS] = {{{0}}};
        for (int64_t g = 0; g < p->num_groups / p->splits;) {
            int all = g + groups <= p->num_groups / p->splits, count = all ? groups : 1;
            if (all) add_groups(p, weights, ahead, x, part, rows, groups, format);
            else add_groups(p, weights, ahead, x, part, rows, 1, format);
            g += count;
            weights += count * p->group_bytes;
            ahead += count * p->group_bytes;
            x += count * p->group * rows;
        }
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int c = 0; c < COLUMNS; c++) total[r][c] = split ? total[r][c] + part[r][c] : part[r][c];
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS; c++) store_sums(&p->out, row + r, panel * PANEL + c * LANES, total[r][c]);
}

INLINE void multiply(const struct linear_codes *p, int64_t begin, int64_t end, const enum weight_format format) {
    int64_t panel_bytes = p->num_groups * p->group_bytes, num_tiles = 1;
    for (int64_t panel = begin; panel < end; panel++)
        for (int64_t tile = 0; tile < num_tiles; tile++) {
            int64_t row = tile_begin(p->num_rows, tile, &num_tiles), stop = tile_begin(p->num_rows, tile + 1, &num_tiles);
            int64_t next = tile + 1 == num_tiles ? panel + 1 : panel;  // past the end of memory a prefetch does nothing
            WITH_ROWS(n, stop - row, tile_rows(p, row, panel, p->packed + next * panel_bytes, n, format))
        }
}

#define MULTIPLY(name, format)                                                                \
    static void name(const void *context, int64_t begin, int64_t end, int thread) {           \
        (void)thread;                                                                         \
        multiply(context, begin, end, format);                                                \
    }
MULTIPLY(multiply_int8, INT8)
MULTIPLY(multiply_int4, INT4)
MULTIPLY(multiply_int4_zeros, INT4_ZEROS)
MULTIPLY(multiply_fp8, FP8)

static void widen_rows(const void *context, int64_t begin, int64_t end, int thread) {
    const struct linear_codes *p = context;
    (void)thread;
    for (int64_t row = begin; row < end; row++) {
        struct place place = place_of(p->num_rows, row);
        float *wide = p->wide + place.tile_begin * p->num_inputs + place.row;
        for (int64_t k = 0; k < p->num_inputs; k++) wide[k * place.tile_rows] = load_one(p->x + row * p->x_stride, k, p->x_is_bf16);
    }
}

// As baton_linear. The inputs are a multiple of the group, which is one of STEP; the number of groups is a multiple of
// `splits`.
void multiply_codes(
    const struct weight *w, const char *x, ptrdiff_t x_stride, char *y, ptrdiff_t y_stride, int64_t num_rows, int splits,
    int dtype, int y_dtype) {
    static const range_fn PRODUCTS[] = {
        [INT8] = multiply_int8, [INT4] = multiply_int4, [INT4_ZEROS] = multiply_int4_zeros, [FP8] = multiply_fp8,
        [MXFP4] = multiply_int4};  // with another table
    int64_t block = MIN(num_rows, ROW_BLOCK);
    int num_vectors = w->format == INT4_ZEROS ? 2 : 1;
    struct linear_codes p = {
        .x = x, .x_stride = x_stride, .packed = w->packed, .table = w->format == MXFP4 ? MXFP4_VALUES : INT4_VALUES,
        .out = {y, y_stride, w->bias, w->num_columns, y_dtype == BF16},
        .num_inputs = w->num_inputs, .group = w->group, .num_groups = w->num_inputs / w->group, .splits = splits,
        .x_is_bf16 = dtype == BF16,
        .group_bytes = w->group * PANEL * bits_of(w->format) / 8 + num_vectors * PANEL * (int64_t)sizeof(float)};
    p.wide = malloc(block * w->num_inputs * sizeof(float));
    if (!p.wide) abort();  // a few megabytes
    for (; num_rows > 0; num_rows -= block) {
        p.num_rows = MIN(num_rows, block);
        parallel_for(p.num_rows, grain_of(p.num_inputs * WIDENING_WORK, PART_WORK), widen_rows, &p);
        parallel_for(
            num_panels_of(w->num_columns), grain_of(p.num_rows * p.num_inputs * PANEL, PART_WORK), PRODUCTS[w->format], &p);
        p.x += block * x_stride;
        p.out.y += block * y_stride;
    }
    free(p.wide);
}
