// y[M, N] = x[M, K] @ weight[N, K]^T + bias, with weights of 8 or 4 bits and inputs that are rounded to 8 bits.
//
// Inputs come in groups. In each group every column of the weight and every row of x has a scale of its own; that of x
// is its largest magnitude / 127. Products within a group are summed as integers, exactly. The sums of groups are scaled
// and added in ascending order as floats, in `splits` equal parts of groups as in linear.c. So a row's bits depend on
// neither the batch nor the number of ranks.
//
// packed: a panel of 32 columns after another, in each panel a group after another, in each group
//   int8 [group / 4][32][4]  units of four neighbouring inputs. With 4 bits two units share their bytes, the first in
//                            the lower halves; a value then counts sixteenfold
//   int32 [32]               -128 * the sum of the column's values: x is stored with 128 added, as VNNI multiplies it
//   float [32]               the scales
#include <stdlib.h>

#include "ops.h"
#include "panels.h"
#include "products.h"

#define UNIT 4               // inputs
#define PART_WORK (1 << 20)  // multiplications worth a part of their own
#define QUANTISING_WORK 64   // multiplications that take as long as quantising an element
#define ROUNDING 12582912.0f // 1.5 * 2^23: adding it rounds to the nearest integer
#define ROUNDING_BITS 0x4b400000  // of ROUNDING: the difference is the integer
#define OFFSET 128

// At most ROW_BLOCK rows.
struct linear_rounded {
    const char *x;       // [M, K]
    ptrdiff_t x_stride;  // bytes from row to row
    uint8_t *bytes;      // of x, a tile after another: [units][rows of the tile][UNIT]
    float *scales;       // of x, a tile after another: [groups][rows of the tile]
    const char *packed;
    struct output out;
    int64_t num_rows, num_inputs, group, num_groups;
    int splits, x_is_bf16, bits;
};

// acc += a . b, for each lane the products of four bytes of a, which are the same for all lanes, and four of b.
INLINE i32s dot_bytes(i32s acc, uint32_t a, i32s b) {
#if defined(__AVX512VNNI__)
    return (i32s)_mm512_dpbusd_epi32((__m512i)acc, _mm512_set1_epi32((int)a), (__m512i)b);
#elif defined(__AVXVNNI__) && LANES == 8
    return (i32s)_mm256_dpbusd_avx_epi32((__m256i)acc, _mm256_set1_epi32((int)a), (__m256i)b);
#elif LANES == 8
    // Even and odd bytes as 16 bits each: a sum of two products fits in 32.
    __m256i bytes = (__m256i)b, all = _mm256_set1_epi32((int)a);
    __m256i even = _mm256_madd_epi16(_mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), _mm256_and_si256(all, _mm256_set1_epi16(0xff)));
    __m256i odd = _mm256_madd_epi16(_mm256_srai_epi16(bytes, 8), _mm256_srli_epi16(all, 8));
    return acc + (i32s)even + (i32s)odd;
#else
    for (int i = 0; i < UNIT; i++) acc += (b << (24 - 8 * i) >> 24) * (int32_t)(a >> 8 * i & 0xff);
    return acc;
#endif
}

INLINE int64_t value_bytes(const struct linear_rounded *p) { return p->group * PANEL * p->bits / 8; }
INLINE int64_t group_bytes(const struct linear_rounded *p) { return value_bytes(p) + 8 * PANEL; }

// Sets the values of one vector of a panel in as many units as share their bytes; returns their number.
INLINE int load_units(const char *values, i32s units[2], const int bits) {
    memcpy(units, values, sizeof *units);
    if (bits == 8) return 1;
    units[1] = units[0] & (int32_t)0xf0f0f0f0;
    units[0] = units[0] << 4 & (int32_t)0xf0f0f0f0;
    return 2;
}

// One group of a tile: part += the group's sums, scaled. Meanwhile the same group of the panel at `ahead` is fetched.
INLINE void add_group(
    const struct linear_rounded *p, const char *weights, const char *ahead, const uint32_t *x, const float *x_scales,
    f32s part[ROWS][COLUMNS], const int rows, const int bits) {
    const int prefetches = rows >= PREFETCH_ROWS || cpu_products.prefetches_few;
    const char *ends = weights + value_bytes(p);  // what follows the units
    i32s acc[ROWS][COLUMNS], start[COLUMNS];
    memcpy(start, ends, sizeof start);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; c++) acc[r][c] = start[c];
    for (int64_t offset = 0; offset < value_bytes(p); offset += PANEL * UNIT) {
        for (int i = 0; i < PANEL * UNIT && prefetches; i += 64) __builtin_prefetch(ahead + offset + i, 0, 2);
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; c++) {
            i32s units[2];
            const int num_units = load_units(weights + offset + c * LANES * UNIT, units, bits);
            for (int u = 0; u < num_units; u++)
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++) acc[r][c] = dot_bytes(acc[r][c], x[u * rows + r], units[u]);
        }
        x += 8 / bits * rows;
    }
    for (int i = 0; i < 4 && prefetches; i++) __builtin_prefetch(ahead + value_bytes(p) + i * 64, 0, 2);
    f32s scale[COLUMNS];
    memcpy(scale, ends + sizeof start, sizeof scale);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < COLUMNS; c++)
            part[r][c] = multiply_add(
                __builtin_convertvector(acc[r][c], f32s), scale[c] * splat(x_scales[r]), part[r][c]);
}

INLINE void tile_rows(const struct linear_rounded *p, int64_t row, int64_t panel, const char *ahead, const int rows, const int bits) {
    f32s total[ROWS][COLUMNS];
    const uint32_t *x = (const uint32_t *)(p->bytes + row * p->num_inputs);
    const float *x_scales = p->scales + row * p->num_groups;
    const char *weights = p->packed + panel * p->num_groups * group_bytes(p);
    for (int split = 0; split < p->splits; split++) {
        f32s part[ROWS][COLUMNS] = {{{0}}};
        for (int64_t g = 0; g < p->num_groups / p->splits; g++) {
            add_group(p, weights, ahead, x, x_scales, part, rows, bits);
            weights += group_bytes(p);
            ahead += group_bytes(p);
            x += p->group / UNIT * rows;
            x_scales += rows;
        }
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int c = 0; c < COLUMNS; c++) total[r][c] = split ? total[r][c] + part[r][c] : part[r][c];
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLUMNS; c++) store_sums(&p->out, row + r, panel * PANEL + c * LANES, total[r][c]);
}

INLINE void multiply(const struct linear_rounded *p, int64_t begin, int64_t end, const int bits) {
    int64_t panel_bytes = p->num_groups * group_bytes(p), num_tiles = 1;
    for (int64_t panel = begin; panel < end; panel++)
        for (int64_t tile = 0; tile < num_tiles; tile++) {
            int64_t row = tile_begin(p->num_rows, tile, &num_tiles), stop = tile_begin(p->num_rows, tile + 1, &num_tiles);
            int64_t next = tile + 1 == num_tiles ? panel + 1 : panel;  // past the end of memory a prefetch does nothing
            WITH_ROWS(n, stop - row, tile_rows(p, row, panel, p->packed + next * panel_bytes, n, bits))
        }
}

static void multiply_bytes(const void *context, int64_t begin, int64_t end, int thread) {
    (void)thread;
    multiply(context, begin, end, 8);
}

static void multiply_halves(const void *context, int64_t begin, int64_t end, int thread) {
    (void)thread;
    multiply(context, begin, end, 4);
}

// Writes the bytes of one group of a row, `stride` bytes from unit to unit, and returns its scale: NaN for a group
// with an element that is not finite.
INLINE float quantise_group(const struct linear_rounded *p, const char *x, int64_t first, uint8_t *bytes, int64_t stride) {
    float largest = 0;
    for (int64_t i = 0; i < p->group; i++) {
        float magnitude = fabsf(load_one(x, first + i, p->x_is_bf16));
        largest = magnitude > largest || magnitude != magnitude ? magnitude : largest;
    }
    int is_finite = largest < INFINITY;
    float inverse = is_finite && largest > 0 ? 127.0f / largest : 0.0f;
    for (int64_t i = 0; i < p->group; i++) {
        float value = is_finite ? load_one(x, first + i, p->x_is_bf16) : 0.0f;
        float rounded = __builtin_fmaf(value, inverse, ROUNDING);  // one rounding, on any CPU
        int32_t bits;
        memcpy(&bits, &rounded, sizeof bits);
        bytes[i / UNIT * stride + i % UNIT] = (uint8_t)(bits - ROUNDING_BITS + OFFSET);
    }
    return is_finite ? largest / 127.0f : NAN;
}

static void quantise_rows(const void *context, int64_t begin, int64_t end, int thread) {
    const struct linear_rounded *p = context;
    (void)thread;
    for (int64_t row = begin; row < end; row++) {
        struct place place = place_of(p->num_rows, row);
        uint8_t *bytes = p->bytes + place.tile_begin * p->num_inputs + place.row * UNIT;
        float *scales = p->scales + place.tile_begin * p->num_groups + place.row;
        for (int64_t g = 0; g < p->num_groups; g++)
            scales[g * place.tile_rows] = quantise_group(
                p, p->x + row * p->x_stride, g * p->group, bytes + g * p->group * place.tile_rows, place.tile_rows * UNIT);
    }
}

// As baton_linear. The inputs are a multiple of the group, which is one of UNIT, with 4 bits of 2 * UNIT; the number of
// groups is a multiple of `splits`.
void multiply_rounded(
    const struct weight *w, const char *x, ptrdiff_t x_stride, char *y, ptrdiff_t y_stride, int64_t num_rows, int splits,
    int dtype, int y_dtype) {
    int64_t num_groups = w->num_inputs / w->group, block = MIN(num_rows, ROW_BLOCK);
    struct linear_rounded p = {
        .x = x, .x_stride = x_stride, .packed = w->packed, .out = {y, y_stride, w->bias, w->num_columns, y_dtype == BF16},
        .num_inputs = w->num_inputs, .group = w->group, .num_groups = num_groups, .splits = splits, .x_is_bf16 = dtype == BF16,
        .bits = w->format == INT4_ROUNDED ? 4 : 8};
    range_fn products = p.bits == 4 ? multiply_halves : multiply_bytes;
    p.scales = malloc(block * (num_groups * sizeof(float) + p.num_inputs));
    p.bytes = (uint8_t *)(p.scales + block * num_groups);
    if (!p.scales) abort();  // a few megabytes
    for (; num_rows > 0; num_rows -= block) {
        p.num_rows = MIN(num_rows, block);
        parallel_for(p.num_rows, grain_of(p.num_inputs * QUANTISING_WORK, PART_WORK), quantise_rows, &p);
        parallel_for(num_panels_of(w->num_columns), grain_of(p.num_rows * p.num_inputs * PANEL, PART_WORK), products, &p);
        p.x += block * x_stride;
        p.out.y += block * y_stride;
    }
    free(p.scales);
}
