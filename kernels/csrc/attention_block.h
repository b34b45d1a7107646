// The arithmetic of attention on one block of 32 keys: transpose, score, softmax, add the values.
//
// Whatever a row's sums are, their order depends on the row alone.
//
// `ahead` is 16 rows of keys or values that a later block reads. Fetching them at once would fill the core's
// miss buffers and stall it; so each loop here asks for a line or two a turn, and memory works meanwhile.
#pragma once

#include "products.h"

#define BLOCK 32
#define HALVES 2  // vectors of keys in a block
#define MAX_ROWS 16  // of a tile
#define MAX_HEAD_DIM 256

// Runs `call` over rows [first, last) in groups of n = 4, 2 or 1 rows, n known to the compiler.
#define IN_FOURS(r, n, first, last, call)          \
    for (int64_t r = (first); r < (last);) {       \
        if ((last) - r >= 4) { enum { n = 4 }; call; r += 4; } \
        else if ((last) - r >= 2) { enum { n = 2 }; call; r += 2; } \
        else { enum { n = 1 }; call; r += 1; }     \
    }

INLINE void fetch(const char *ahead, int64_t line) { __builtin_prefetch(ahead + line * 64, 0, 2); }

// Lane r belongs to row r of the tile.
struct softmax {
    f32x16 maximum, sum;
};

#if defined(__AVX512F__)
// Sixteen rows of 16 units -> 16 vectors of one unit of every row.
INLINE void transpose_units(const char *rows, ptrdiff_t stride, uint32_t out[][LANES]) {
    __m512i a[LANES], b[LANES];
    for (int i = 0; i < LANES; i++) a[i] = _mm512_loadu_si512(rows + i * stride);
    for (int i = 0; i < LANES; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        _mm512_storeu_si512(out[i], _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88));
        _mm512_storeu_si512(out[i + 4], _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88));
        _mm512_storeu_si512(out[i + 8], _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd));
        _mm512_storeu_si512(out[i + 12], _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd));
    }
}
#else
INLINE void transpose_units(const char *rows, ptrdiff_t stride, uint32_t out[][LANES]) {
    for (int i = 0; i < LANES; i++)
        for (int unit = 0; unit < LANES; unit++) memcpy(&out[unit][i], rows + i * stride + unit * 4, 4);
}
#endif

// 16 rows of keys -> units[head_dim * element_bytes / 4][16 keys]. Fetches half as many lines as there are units.
INLINE void transpose_keys(const char *keys, int64_t num_units, const char *ahead, uint32_t units[MAX_HEAD_DIM][LANES]) {
    int64_t unit = 0;
    for (; unit + LANES <= num_units; unit += LANES) {
        for (int i = 0; i < LANES / 2; i++) fetch(ahead, unit / 2 + i);
        transpose_units(keys + unit * 4, num_units * 4, units + unit);
    }
    for (; unit < num_units; unit++)
        for (int64_t i = 0; i < LANES; i++) memcpy(&units[unit][i], keys + (i * num_units + unit) * 4, 4);
}

// Two rows of bf16 -> pairs of the same dimension: 16 units at `out`.
INLINE void pair_up(const bf16 *even, const bf16 *odd, uint32_t *out) {
    u16x16 low, high;
    memcpy(&low, even, sizeof low);
    memcpy(&high, odd, sizeof high);
    u32x16 pair = __builtin_convertvector(low, u32x16) | __builtin_convertvector(high, u32x16) << 16;
    memcpy(out, &pair, sizeof pair);
}

// 16 rows of bf16 values -> pairs[8][head_dim] of neighbouring keys. Fetches a line for 32 pairs.
INLINE void pair_values(const bf16 *values, int64_t head_dim, const char *ahead, uint32_t *pairs) {
    int64_t line = 0;
    for (int64_t i = 0; i < LANES; i += 2, values += 2 * head_dim, pairs += head_dim) {
        int64_t d = 0;
#if defined(__AVX512BW__)
        const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                             37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
        const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
        for (; d + 2 * LANES <= head_dim; d += 2 * LANES) {
            fetch(ahead, line++);
            __m512i even = _mm512_loadu_si512(values + d), odd = _mm512_loadu_si512(values + head_dim + d);
            _mm512_storeu_si512(pairs + d, _mm512_permutex2var_epi16(even, low, odd));
            _mm512_storeu_si512(pairs + d + LANES, _mm512_permutex2var_epi16(even, high, odd));
        }
#endif
        for (; d < head_dim; d += LANES) pair_up(values + d, values + head_dim + d, pairs + d);
    }
}

// Each half of the block has two chains per row, even and odd units, then their sum. Fetches a line a unit.
INLINE void score_rows(
    const uint32_t *const *query, const uint32_t units[HALVES][MAX_HEAD_DIM][LANES], int64_t num_units, float scale,
    const char *ahead, f32x16 scores[][HALVES], const int rows, const enum products products) {
    f32x16 even[4][HALVES], odd[4][HALVES];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
        for (int h = 0; h < HALVES; h++) even[r][h] = odd[r][h] = (f32x16){};
    for (int64_t u = 0; u < num_units; u += 2) {
        fetch(ahead, u);
        fetch(ahead, u + 1);
#pragma GCC unroll 2
        for (int h = 0; h < HALVES; h++) {
            struct factor even_units = load_factor(units[h][u], products), odd_units = load_factor(units[h][u + 1], products);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                even[r][h] = multiply_add(even[r][h], query[r], u, even_units, products);
                odd[r][h] = multiply_add(odd[r][h], query[r], u + 1, odd_units, products);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
        for (int h = 0; h < HALVES; h++) scores[r][h] = (even[r][h] + odd[r][h]) * splat(scale);
}

// out[r][d, d + 16 * vectors) = out * rescale + probabilities . values. Fetches two lines a vector of weights.
INLINE void add_slice(
    float out[][MAX_HEAD_DIM], const uint32_t weights[][BLOCK], const float *rescale, const uint32_t *values,
    const char *ahead, int64_t head_dim, int64_t d, const int rows, const int vectors, const enum products products) {
    f32x16 acc[4][4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) acc[r][v] = load_f32(out[r] + d + v * LANES) * splat(rescale[r]);
    for (int j = 0; j < (products == FLOATS ? BLOCK : BLOCK / 2); j++) {
        fetch(ahead, 2 * j);
        fetch(ahead, 2 * j + 1);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            struct factor units = load_factor(values + j * head_dim + d + v * LANES, products);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) acc[r][v] = multiply_add(acc[r][v], weights[r], j, units, products);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) store_f32(out[r] + d + v * LANES, acc[r][v]);
}

INLINE void add_values(
    float out[][MAX_HEAD_DIM], const f32x16 probabilities[][HALVES], const float *rescale, const uint32_t *values,
    const char *ahead, int64_t head_dim, const int rows, const enum products products) {
    uint32_t weights[4][BLOCK];
    for (int r = 0; r < rows; r++)
        for (int h = 0; h < HALVES; h++) {
            f32x16 rounded = round_to(probabilities[r][h], products != FLOATS);
            store_lanes(weights[r], h * LANES, rounded, products == PAIRS);
        }
    int64_t d = 0;
    for (; d + 4 * LANES <= head_dim; d += 4 * LANES) {
        add_slice(out, weights, rescale, values, ahead, head_dim, d, rows, 4, products);
        ahead += (products == FLOATS ? 2 * BLOCK : BLOCK) * 64;
    }
    for (; d < head_dim; d += LANES) add_slice(out, weights, rescale, values, ahead, head_dim, d, rows, 1, products);
}

INLINE f32x16 mask_keys(f32x16 score, int64_t first, int64_t low, int64_t high) {
    i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    i32x16 position = lane + ((int32_t)first - (i32x16){});
    i32x16 seen = (position >= ((int32_t)low - (i32x16){})) & (position <= ((int32_t)high - (i32x16){}));
    return select_lanes(seen, score, splat(-INFINITY));
}

INLINE f32x16 set_lane(f32x16 v, int64_t lane, float value) {
    i32x16 index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return select_lanes(index == ((int32_t)lane - (i32x16){}), splat(value), v);
}

// Scores of one block for rows [first, last) -> probabilities; `rescale` is what the rows' sums and outputs
// so far are multiplied by. Lane r of the state belongs to row r.
INLINE void softmax_block(struct softmax *state, f32x16 scores[][HALVES], int64_t first, int64_t last, float rescale[MAX_ROWS]) {
    f32x16 highest = splat(-INFINITY), sum = {0};
    for (int64_t r = first; r < last; r++) {
        f32x16 larger = select_lanes(scores[r][0] > scores[r][1], scores[r][0], scores[r][1]);
        highest = set_lane(highest, r, max_lanes(larger));
    }
    f32x16 maximum = select_lanes(highest > state->maximum, highest, state->maximum);
    float row_maximum[MAX_ROWS];
    store_f32(row_maximum, maximum);
    for (int64_t r = first; r < last; r++) {
        for (int h = 0; h < HALVES; h++) scores[r][h] = exp_lanes(scores[r][h] - splat(row_maximum[r]));
        sum = set_lane(sum, r, sum_lanes(scores[r][0] + scores[r][1]));
    }
    f32x16 factor = exp_lanes(state->maximum - maximum);
    store_f32(rescale, factor);
    state->sum = state->sum * factor + sum;
    state->maximum = maximum;
}
