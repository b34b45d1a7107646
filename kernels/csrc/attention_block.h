// The arithmetic of attention on one block of 32 keys: transpose, score, softmax, add the values.
//
// Whatever a row's sums are, their order depends on the row alone.
//
// `ahead` is 16 rows of keys or values that a later block reads. Fetching them at once would fill the core's
// miss buffers and stall it; so each loop here asks for a line or two a turn, and memory works meanwhile.
#pragma once

#include "products.h"

#define BLOCK 32
#define RUN 16       // neighbouring keys; a block has two runs
#define KEYS (BLOCK / LANES)  // vectors of keys in a block
#define MAX_ROWS 16  // of a tile
#define MAX_HEAD_DIM 576  // of latent attention: 512 elements of the latent, 64 that are rotated
#define GROUP (REGISTERS / 8)  // rows whose sums fit in registers: 4 or 2
#define SLICE 4                // vectors of a row's sums

// Runs `call` over rows [first, last) in groups of n = 4, 2 or 1 rows, n known to the compiler.
#define IN_GROUPS(r, n, first, last, call)         \
    for (int64_t r = (first); r < (last);) {       \
        if (GROUP >= 4 && (last) - r >= 4) { enum { n = GROUP >= 4 ? 4 : 1 }; call; r += 4; } \
        else if ((last) - r >= 2) { enum { n = 2 }; call; r += 2; } \
        else { enum { n = 1 }; call; r += 1; }     \
    }

INLINE void fetch(const char *ahead, int64_t line) { __builtin_prefetch(ahead + line * 64, 0, 2); }

// A value of each row of the tile.
struct by_row {
    f32s lanes[MAX_ROWS / LANES];
};

struct softmax {
    struct by_row maximum, sum;
};

#if defined(__AVX512F__)
// As many rows as lanes, of as many units -> for each unit a vector of all rows.
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
#elif LANES == 8
INLINE void transpose_units(const char *rows, ptrdiff_t stride, uint32_t out[][LANES]) {
    __m256i a[LANES], b[LANES];
    for (int i = 0; i < LANES; i++) a[i] = _mm256_loadu_si256((const __m256i *)(rows + i * stride));
    for (int i = 0; i < LANES; i += 2) {
        b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4) {
        a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_si256((__m256i *)out[i], _mm256_permute2x128_si256(a[i], a[i + 4], 0x20));
        _mm256_storeu_si256((__m256i *)out[i + 4], _mm256_permute2x128_si256(a[i], a[i + 4], 0x31));
    }
}
#else
INLINE void transpose_units(const char *rows, ptrdiff_t stride, uint32_t out[][LANES]) {
    for (int i = 0; i < LANES; i++)
        for (int unit = 0; unit < LANES; unit++) memcpy(&out[unit][i], rows + i * stride + unit * 4, 4);
}
#endif

// A run of keys -> units[RUN / LANES][head_dim * element_bytes / 4][LANES keys]. Fetches half as many lines as there are
// units.
INLINE void transpose_keys(const char *keys, int64_t num_units, const char *ahead, uint32_t units[][MAX_HEAD_DIM][LANES]) {
    const int num_lines = LANES * LANES / (2 * RUN);  // for LANES units of LANES keys
    for (int v = 0; v < RUN / LANES; v++, keys += LANES * num_units * 4) {
        int64_t unit = 0;
        for (; unit + LANES <= num_units; unit += LANES, ahead += num_lines * 64) {
            for (int i = 0; i < num_lines; i++) fetch(ahead, i);
            transpose_units(keys + unit * 4, num_units * 4, units[v] + unit);
        }
        for (; unit < num_units; unit++)
            for (int64_t i = 0; i < LANES; i++) memcpy(&units[v][unit][i], keys + (i * num_units + unit) * 4, 4);
    }
}

// Two rows of bf16 -> pairs of the same dimension: a vector of units at `out`.
INLINE void pair_up(const bf16 *even, const bf16 *odd, uint32_t *out) {
    u32s pair = load_u16(even) | load_u16(odd) << 16;
    memcpy(out, &pair, sizeof pair);
}

// A run of bf16 values -> pairs[RUN / 2][head_dim] of neighbouring keys. Fetches a line for 32 pairs.
INLINE void pair_values(const bf16 *values, int64_t head_dim, const char *ahead, uint32_t *pairs) {
    int64_t line = 0;
    for (int64_t i = 0; i < RUN; i += 2, values += 2 * head_dim, pairs += head_dim) {
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
        for (; d < head_dim; d += LANES) {
            if (LANES < 16 && d % 32 == 0) fetch(ahead, line++);
            pair_up(values + d, values + head_dim + d, pairs + d);
        }
    }
}

// Scores of two vectors of keys. A score has two chains, of even and odd units, then their sum. Fetches `num_lines` lines
// for two units.
INLINE void score_keys(
    const uint32_t *const *query, const uint32_t units[][MAX_HEAD_DIM][LANES], int64_t num_units, float scale,
    const char *ahead, f32s scores[][KEYS], int v, const int rows, const enum products products) {
    const int num_lines = 2 * LANES / 16;
    f32s even[GROUP][2], odd[GROUP][2];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
        for (int h = 0; h < 2; h++) even[r][h] = odd[r][h] = (f32s){};
    for (int64_t u = 0; u < num_units; u += 2, ahead += num_lines * 64) {
        for (int i = 0; i < num_lines; i++) fetch(ahead, i);
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            struct factor even_units = load_factor(units[v + h][u], products);
            struct factor odd_units = load_factor(units[v + h][u + 1], products);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                even[r][h] = add_product(even[r][h], query[r], u, even_units, products);
                odd[r][h] = add_product(odd[r][h], query[r], u + 1, odd_units, products);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
        for (int h = 0; h < 2; h++) scores[r][v + h] = (even[r][h] + odd[r][h]) * splat(scale);
}

// Fetches a line a unit.
INLINE void score_rows(
    const uint32_t *const *query, const uint32_t units[KEYS][MAX_HEAD_DIM][LANES], int64_t num_units, float scale,
    const char *ahead, f32s scores[][KEYS], const int rows, const enum products products) {
    for (int v = 0; v < KEYS; v += 2, ahead += num_units * 64 * LANES / 16)
        score_keys(query, units, num_units, scale, ahead, scores, v, rows, products);
}

// out[r][d, d + vectors * LANES) = out * rescale + probabilities . values. For 64 elements it fetches a line a key, or two
// of floats.
INLINE void add_slice(
    float out[][MAX_HEAD_DIM], const uint32_t weights[][BLOCK], const float *rescale, const uint32_t *values,
    const char *ahead, int64_t head_dim, int64_t d, const int rows, const int vectors, const enum products products) {
    const int num_lines = 2 * LANES / 16;
    f32s acc[GROUP][SLICE];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) acc[r][v] = load_f32(out[r] + d + v * LANES) * splat(rescale[r]);
    for (int j = 0; j < (products == FLOATS ? BLOCK : BLOCK / 2); j++) {
        for (int i = 0; i < num_lines; i++) fetch(ahead, num_lines * j + i);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            struct factor units = load_factor(values + j * head_dim + d + v * LANES, products);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) acc[r][v] = add_product(acc[r][v], weights[r], j, units, products);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) store_f32(out[r] + d + v * LANES, acc[r][v]);
}

// The first `value_dim` of `head_dim` elements of the values.
INLINE void add_values(
    float out[][MAX_HEAD_DIM], const f32s probabilities[][KEYS], const float *rescale, const uint32_t *values,
    const char *ahead, int64_t head_dim, int64_t value_dim, const int rows, const enum products products) {
    uint32_t weights[GROUP][BLOCK];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < KEYS; v++) {
            f32s rounded = round_to(probabilities[r][v], products != FLOATS);
            store_lanes(weights[r], v * LANES, rounded, products == PAIRS);
        }
    int64_t d = 0;
    for (; d + SLICE * LANES <= value_dim; d += SLICE * LANES) {
        add_slice(out, weights, rescale, values, ahead, head_dim, d, rows, SLICE, products);
        ahead += (products == FLOATS ? 2 * BLOCK : BLOCK) * 64 * LANES / 16;
    }
    for (; d < value_dim; d += LANES) add_slice(out, weights, rescale, values, ahead, head_dim, d, rows, 1, products);
}

INLINE i32s lane_numbers(void) {
    static const int32_t NUMBERS[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    i32s numbers;
    memcpy(&numbers, NUMBERS, sizeof numbers);
    return numbers;
}

INLINE f32s mask_keys(f32s score, int64_t first, int64_t low, int64_t high) {
    i32s position = lane_numbers() + ((int32_t)first - (i32s){});
    i32s seen = (position >= ((int32_t)low - (i32s){})) & (position <= ((int32_t)high - (i32s){}));
    return select_lanes(seen, score, splat(-INFINITY));
}

INLINE f32s larger_lanes(f32s a, f32s b) { return select_lanes(a > b, a, b); }

INLINE struct by_row all_rows(float value) {
    struct by_row values;
    for (int v = 0; v < MAX_ROWS / LANES; v++) values.lanes[v] = splat(value);
    return values;
}

INLINE void set_row(struct by_row *values, int64_t row, float value) {
    for (int v = 0; v < MAX_ROWS / LANES; v++)
        values->lanes[v] = select_lanes(lane_numbers() == ((int32_t)row - v * LANES - (i32s){}), splat(value), values->lanes[v]);
}

INLINE float largest_of(const f32s keys[KEYS]) {
    f32s largest = larger_lanes(keys[0], keys[1]);
    for (int v = 2; v < KEYS; v++) largest = larger_lanes(keys[v], largest);
    return max_lanes(largest);
}

// In the order of CHAINS lanes: the two runs of the block, then as sum_chains.
INLINE float sum_of(const f32s keys[KEYS]) {
    f32s sums[VECTORS];
    for (int v = 0; v < VECTORS; v++) sums[v] = keys[v] + keys[v + VECTORS];
    return sum_chains(sums);
}

// Scores of one block for rows [first, last) -> probabilities; `rescale` is what the rows' sums and outputs
// so far are multiplied by.
INLINE void softmax_block(struct softmax *state, f32s scores[][KEYS], int64_t first, int64_t last, float rescale[MAX_ROWS]) {
    struct by_row maximum = all_rows(-INFINITY), sum = all_rows(0);
    for (int64_t r = first; r < last; r++) set_row(&maximum, r, largest_of(scores[r]));
    float row_maximum[MAX_ROWS];
    for (int v = 0; v < MAX_ROWS / LANES; v++) {
        maximum.lanes[v] = larger_lanes(maximum.lanes[v], state->maximum.lanes[v]);
        store_f32(row_maximum + v * LANES, maximum.lanes[v]);
    }
    for (int64_t r = first; r < last; r++) {
        for (int v = 0; v < KEYS; v++) scores[r][v] = exp_lanes(scores[r][v] - splat(row_maximum[r]));
        set_row(&sum, r, sum_of(scores[r]));
    }
    for (int v = 0; v < MAX_ROWS / LANES; v++) {
        f32s factor = exp_lanes(state->maximum.lanes[v] - maximum.lanes[v]);
        store_f32(rescale + v * LANES, factor);
        state->sum.lanes[v] = multiply_add(state->sum.lanes[v], factor, sum.lanes[v]);
    }
    state->maximum = maximum;
}
