// Causal attention of a ragged batch of queries over paged keys and values: decode and prefill alike.
//
// A tile is some queries of one sequence and some KV heads. Each KV head has up to MAX_ROWS rows: the queries
// times the query heads of its group. A prefill tile is many queries and one KV head, for the arithmetic; a
// decode tile is one query and many KV heads, which lie side by side in a page, for the memory: its reads
// are long runs, and the next block is fetched meanwhile. The keys pass in blocks of 32 that start at multiples of 32 in the sequence,
// whatever the page size; for each block the tile
//   1. transposes the keys, so that lanes are keys and units (a float, or two bf16) run down the head,
//   2. scores the 32 keys for every row, two vectors that hide each other's latency,
//   3. updates each row's running maximum and sum (online softmax),
//   4. adds the probabilities times the values to each row's output.
// A row's arithmetic depends on its own position only: the same bits in a prefill chunk of any size and in
// decode, for any page size and any batch.
#include "ops.h"

#define BLOCK 32
#define HALVES 2  // vectors of keys in a block
#define MAX_ROWS 16       // of one KV head
#define MAX_TILE_ROWS 32  // of all KV heads of a tile
#define MAX_HEAD_DIM 256

// Runs `call` over rows [first, last) in groups of n = 4, 2 or 1 rows, n known to the compiler.
#define IN_FOURS(r, n, first, last, call)          \
    for (int64_t r = (first); r < (last);) {       \
        if ((last) - r >= 4) { enum { n = 4 }; call; r += 4; } \
        else if ((last) - r >= 2) { enum { n = 2 }; call; r += 2; } \
        else { enum { n = 1 }; call; r += 1; }     \
    }

struct tile {
    int64_t sequence, first_head, num_heads;  // KV heads
    int64_t first_query, num_queries;
    int64_t first_position;  // of the first query in its sequence
};

// Lane r belongs to row r of the tile.
struct softmax {
    f32x16 maximum, sum;
};

INLINE const char *key_pointer(
    const struct attention *p, const struct tile *t, int64_t kv_head, int64_t position, int element_bytes) {
    int64_t page = p->page_table[t->sequence * p->table_stride + (position >> p->page_shift)];
    int64_t offset = position & ((1 << p->page_shift) - 1);
    return p->pages + page * p->page_stride + kv_head * p->head_stride + offset * p->head_dim * element_bytes;
}

// The 16 keys from `first` on and their values, each as 16 consecutive rows: in place where one page holds
// them all, else copied to `spare`. Rows past the tile's last query are zeros: what lies there is somebody's past.
INLINE void find_run(
    const struct attention *p, const struct tile *t, int64_t kv_head, int64_t first, int element_bytes,
    char spare[2][LANES * MAX_HEAD_DIM * 4], const char **keys, const char **values) {
    int64_t last_position = t->first_position + t->num_queries - 1;
    if (p->page_shift >= 4 && first + LANES - 1 <= last_position && p->padded_dim == p->head_dim) {
        *keys = key_pointer(p, t, kv_head, first, element_bytes);
        *values = *keys + p->value_stride;
        return;
    }
    int64_t row_bytes = p->padded_dim * element_bytes;
    memset(spare[0], 0, LANES * row_bytes);
    memset(spare[1], 0, LANES * row_bytes);
    for (int64_t i = 0; i < MIN(LANES, last_position - first + 1); i++) {
        const char *key = key_pointer(p, t, kv_head, first + i, element_bytes);
        memcpy(spare[0] + i * row_bytes, key, p->head_dim * element_bytes);
        memcpy(spare[1] + i * row_bytes, key + p->value_stride, p->head_dim * element_bytes);
    }
    *keys = spare[0];
    *values = spare[1];
}

INLINE int64_t first_key(const struct attention *p, int64_t position) {
    return p->window > 0 ? MAX(0, position - p->window + 1) : 0;
}

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

// 16 rows of keys -> units[head_dim * element_bytes / 4][16 keys]
INLINE void transpose_keys(const char *keys, int64_t num_units, uint32_t units[MAX_HEAD_DIM][LANES]) {
    int64_t unit = 0;
    for (; unit + LANES <= num_units; unit += LANES) transpose_units(keys + unit * 4, num_units * 4, units + unit);
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

// 16 rows of bf16 values -> pairs[8][head_dim] of neighbouring keys
INLINE void pair_values(const bf16 *values, int64_t head_dim, uint32_t *pairs) {
    for (int64_t i = 0; i < LANES; i += 2, values += 2 * head_dim, pairs += head_dim) {
        int64_t d = 0;
#if defined(__AVX512BW__)
        const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                             37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
        const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
        for (; d + 2 * LANES <= head_dim; d += 2 * LANES) {
            __m512i even = _mm512_loadu_si512(values + d), odd = _mm512_loadu_si512(values + head_dim + d);
            _mm512_storeu_si512(pairs + d, _mm512_permutex2var_epi16(even, low, odd));
            _mm512_storeu_si512(pairs + d + LANES, _mm512_permutex2var_epi16(even, high, odd));
        }
#endif
        for (; d < head_dim; d += LANES) pair_up(values + d, values + head_dim + d, pairs + d);
    }
}

// Each half of the block has two chains per row, even and odd units, then their sum.
INLINE void score_rows(
    const uint32_t *const *query, const uint32_t units[HALVES][MAX_HEAD_DIM][LANES], int64_t num_units, float scale,
    f32x16 scores[][HALVES], const int rows, const int is_bf16) {
    f32x16 even[4][HALVES], odd[4][HALVES];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
        for (int h = 0; h < HALVES; h++) even[r][h] = odd[r][h] = (f32x16){};
    for (int64_t u = 0; u < num_units; u += 2)
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int h = 0; h < HALVES; h++) {
                even[r][h] = dot_units(even[r][h], query[r][u], units[h][u], is_bf16);
                odd[r][h] = dot_units(odd[r][h], query[r][u + 1], units[h][u + 1], is_bf16);
            }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
        for (int h = 0; h < HALVES; h++) scores[r][h] = (even[r][h] + odd[r][h]) * splat(scale);
}

// out[r][d, d + 16 * vectors) = out * rescale + probabilities . values
INLINE void add_slice(
    float out[][MAX_HEAD_DIM], const uint32_t weights[][BLOCK], const float *rescale, const uint32_t *values,
    int64_t head_dim, int64_t d, const int rows, const int vectors, const int is_bf16) {
    f32x16 acc[4][4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) acc[r][v] = load_f32(out[r] + d + v * LANES) * splat(rescale[r]);
    for (int j = 0; j < (is_bf16 ? BLOCK / 2 : BLOCK); j++)
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++)
                acc[r][v] = dot_units(acc[r][v], weights[r][j], values + j * head_dim + d + v * LANES, is_bf16);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) store_f32(out[r] + d + v * LANES, acc[r][v]);
}

INLINE void add_values(
    float out[][MAX_HEAD_DIM], const f32x16 probabilities[][HALVES], const float *rescale, const uint32_t *values,
    int64_t head_dim, const int rows, const int is_bf16) {
    uint32_t weights[4][BLOCK];
    for (int r = 0; r < rows; r++)
        for (int h = 0; h < HALVES; h++) store_lanes(weights[r], h * LANES, probabilities[r][h], is_bf16);
    int64_t d = 0;
    for (; d + 4 * LANES <= head_dim; d += 4 * LANES)
        add_slice(out, weights, rescale, values, head_dim, d, rows, 4, is_bf16);
    for (; d < head_dim; d += LANES) add_slice(out, weights, rescale, values, head_dim, d, rows, 1, is_bf16);
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

// What a tile works in; one per thread, on its stack.
struct workspace {
    _Alignas(64) uint32_t units[HALVES][MAX_HEAD_DIM][LANES];
    _Alignas(64) uint32_t values[BLOCK * MAX_HEAD_DIM];
    _Alignas(64) char spare[2][LANES * MAX_HEAD_DIM * 4];
    _Alignas(64) char padded_query[MAX_TILE_ROWS][MAX_HEAD_DIM * 4];
    _Alignas(64) float out[MAX_TILE_ROWS][MAX_HEAD_DIM];
    const uint32_t *query[MAX_TILE_ROWS];
    struct softmax state[MAX_TILE_ROWS];  // one a KV head
};

// Row r of KV head h of the tile -> its row in query and output.
INLINE int64_t token_of(const struct tile *t, int64_t group, int64_t r) { return t->first_query + r / group; }
INLINE int64_t head_of(const struct tile *t, int64_t group, int64_t h, int64_t r) {
    return (t->first_head + h) * group + r % group;
}

// Bring keys and values that will be needed soon into L2, page by page.
INLINE void prefetch_block(const struct attention *p, const struct tile *t, int64_t block, int64_t h, int element_bytes) {
    int64_t step = MIN(BLOCK, (int64_t)1 << p->page_shift), run_bytes = step * p->head_dim * element_bytes;
    for (int64_t i = 0; i < BLOCK && block + i <= t->first_position; i += step) {
        const char *key = key_pointer(p, t, t->first_head + h, block + i, element_bytes);
        for (int64_t byte = 0; byte < run_bytes; byte += 64) {
            __builtin_prefetch(key + byte, 0, 2);
            __builtin_prefetch(key + p->value_stride + byte, 0, 2);
        }
    }
}

// One block of keys against the rows of one KV head, h of the tile.
INLINE void attend_block(
    const struct attention *p, const struct tile *t, struct workspace *w, int64_t block, int64_t h, const int is_bf16) {
    const int element_bytes = is_bf16 ? 2 : 4;
    const int64_t head_dim = p->padded_dim, num_units = head_dim * element_bytes / 4, group = p->num_heads / p->num_kv_heads;
    const int64_t num_rows = t->num_queries * group;
    for (int half = 0; half < HALVES; half++) {
        const char *keys, *run;
        find_run(p, t, t->first_head + h, block + half * LANES, element_bytes, w->spare, &keys, &run);
        transpose_keys(keys, num_units, w->units[half]);
        uint32_t *values = w->values + half * LANES * num_units;
        if (is_bf16) pair_values((const bf16 *)run, head_dim, values);
        else memcpy(values, run, LANES * head_dim * 4);
    }
    // Rows [first, last) see this block: earlier queries end before it, later windows start after it.
    int64_t first = MAX(0, block - t->first_position) * group, last = num_rows;
    while (last > first && block + BLOCK <= first_key(p, t->first_position + (last - 1) / group)) last -= group;
    const uint32_t *const *query = w->query + h * num_rows;
    float(*out)[MAX_HEAD_DIM] = w->out + h * num_rows;
    f32x16 scores[MAX_ROWS][HALVES];
    float rescale[MAX_ROWS];
    IN_FOURS(r, n, first, last, score_rows(query + r, w->units, num_units, p->scale, scores + r, n, is_bf16))
    for (int64_t r = first; r < last; r++) {
        int64_t position = t->first_position + r / group, low = first_key(p, position);
        if (block >= low && block + BLOCK <= position + 1) continue;
        for (int half = 0; half < HALVES; half++)
            scores[r][half] = mask_keys(scores[r][half], block + half * LANES, low, position);
    }
    softmax_block(&w->state[h], scores, first, last, rescale);
    IN_FOURS(r, n, first, last, add_values(out + r, scores + r, rescale + r, w->values, head_dim, n, is_bf16))
}

INLINE void begin_tile(const struct attention *p, const struct tile *t, struct workspace *w, const int element_bytes) {
    const int64_t group = p->num_heads / p->num_kv_heads, num_rows = t->num_queries * group;
    for (int64_t h = 0; h < t->num_heads; h++) {
        w->state[h] = (struct softmax){.maximum = splat(-1e30f)};  // finite, so that no difference is NaN
        for (int64_t r = 0; r < num_rows; r++) {
            int64_t row = h * num_rows + r;
            const char *query = p->query + token_of(t, group, r) * p->query_token + head_of(t, group, h, r) * p->query_head;
            if (p->padded_dim != p->head_dim) {
                memset(w->padded_query[row], 0, p->padded_dim * element_bytes);
                query = memcpy(w->padded_query[row], query, p->head_dim * element_bytes);
            }
            w->query[row] = (const uint32_t *)query;
            memset(w->out[row], 0, p->padded_dim * sizeof(float));
        }
    }
}

INLINE void end_tile(const struct attention *p, const struct tile *t, struct workspace *w, const int is_bf16) {
    const int64_t group = p->num_heads / p->num_kv_heads, num_rows = t->num_queries * group;
    for (int64_t h = 0; h < t->num_heads; h++)
        for (int64_t r = 0; r < num_rows; r++) {
            const float *out = w->out[h * num_rows + r];
            float inverse = w->state[h].sum[r] > 0 ? 1.0f / w->state[h].sum[r] : 0.0f;
            int64_t row = (token_of(t, group, r) * p->num_heads + head_of(t, group, h, r)) * p->head_dim, d = 0;
            for (; d + LANES <= p->head_dim; d += LANES)
                store_lanes(p->output, row + d, load_f32(out + d) * splat(inverse), is_bf16);
            for (; d < p->head_dim; d++) store_one(p->output, row + d, out[d] * inverse, is_bf16);
        }
}

INLINE void run_tile(const struct attention *p, const struct tile *t, const int is_bf16) {
    struct workspace w;
    begin_tile(p, t, &w, is_bf16 ? 2 : 4);
    int64_t last_position = t->first_position + t->num_queries - 1;
    for (int64_t block = first_key(p, t->first_position) / BLOCK * BLOCK; block <= last_position; block += BLOCK) {
        for (int64_t h = 0; h < t->num_heads; h++) {
            if (t->num_queries == 1) prefetch_block(p, t, block + BLOCK, h, is_bf16 ? 2 : 4);
            attend_block(p, t, &w, block, h, is_bf16);
        }
    }
    end_tile(p, t, &w, is_bf16);
}

// How a sequence is cut into tiles: runs of queries times parts of the KV heads.
struct cut {
    int64_t run, heads;  // queries and KV heads of a tile
    int64_t num_runs, num_parts;
};

INLINE struct cut cut_sequence(const struct attention *p, int64_t sequence, int64_t decode_heads) {
    int64_t num_queries = p->query_starts[sequence + 1] - p->query_starts[sequence];
    struct cut c = {.run = 1, .heads = decode_heads};
    if (num_queries > 1) {
        c.run = MAX(1, MAX_ROWS / (p->num_heads / p->num_kv_heads));
        c.heads = 1;
    }
    c.num_runs = (num_queries + c.run - 1) / c.run;
    c.num_parts = (p->num_kv_heads + c.heads - 1) / c.heads;
    return c;
}

// Tile number `index`: sequences in order, their queries in runs, parts of the KV heads innermost.
INLINE struct tile find_tile(const struct attention *p, const int64_t *tile_starts, int64_t index, int64_t decode_heads) {
    int64_t low = 0, high = p->num_sequences;  // tile_starts[low] <= index < tile_starts[high]
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (tile_starts[middle] <= index) low = middle;
        else high = middle;
    }
    struct cut c = cut_sequence(p, low, decode_heads);
    int64_t in_sequence = index - tile_starts[low], end = p->query_starts[low + 1];
    struct tile t = {.sequence = low, .first_head = in_sequence % c.num_parts * c.heads};
    t.num_heads = MIN(c.heads, p->num_kv_heads - t.first_head);
    t.first_query = p->query_starts[low] + in_sequence / c.num_parts * c.run;
    t.num_queries = MIN(c.run, end - t.first_query);
    t.first_position = p->context_lens[low] - (end - t.first_query);
    return t;
}

struct tiles {
    const struct attention *attention;
    const int64_t *starts;
    int64_t count, decode_heads;
};

static void run_tiles(const void *context, int64_t begin, int64_t end, int thread) {
    const struct tiles *tiles = context;
    const struct attention *p = tiles->attention;
    (void)thread;
    for (int64_t i = begin; i < end; i++) {
        // The longest contexts of a prefill come last in each sequence; starting there evens the load.
        struct tile t = find_tile(p, tiles->starts, tiles->count - 1 - i, tiles->decode_heads);
        if (p->is_bf16) run_tile(p, &t, 1);
        else run_tile(p, &t, 0);
    }
}

// tile_starts: scratch of num_sequences + 1. head_dim: even, at most 256. A sequence whose
// context_len is 0 is padding: its rows come out as zeros.
EXPORT void baton_attention(const struct attention *p, int64_t *tile_starts) {
    // All KV heads in one tile where there are sequences enough to keep every thread busy.
    struct tiles tiles = {.attention = p, .starts = tile_starts, .decode_heads = 1};
    int64_t group = p->num_heads / p->num_kv_heads;
    if (p->num_sequences >= 2 * num_threads()) tiles.decode_heads = MAX(1, MIN(p->num_kv_heads, MAX_TILE_ROWS / group));
    tile_starts[0] = 0;
    for (int64_t s = 0; s < p->num_sequences; s++) {
        struct cut c = cut_sequence(p, s, tiles.decode_heads);
        tile_starts[s + 1] = tile_starts[s] + c.num_runs * c.num_parts;
    }
    tiles.count = tile_starts[p->num_sequences];
    parallel_for(tiles.count, 1, run_tiles, &tiles);
}
