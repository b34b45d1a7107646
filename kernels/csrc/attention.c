// Causal attention of a ragged batch of queries over paged keys and values: decode and prefill alike.
//
// A tile is some queries of one sequence and some KV heads. Each KV head has up to MAX_ROWS rows: the queries
// times the query heads of its group. A prefill tile is many queries and one KV head, for the arithmetic; a
// decode tile is one query and many KV heads, which lie side by side in a page, for the memory: its reads
// are long runs, and the next block is fetched meanwhile. The keys pass in blocks of 32 that start at
// multiples of 32 in the sequence, whatever the page size; for each block (attention_block.h) the tile
//   1. transposes the keys, so that lanes are keys and units (a float, or two bf16) run down the head,
//   2. scores the 32 keys for every row, two vectors that hide each other's latency,
//   3. updates each row's running maximum and sum (online softmax),
//   4. adds the probabilities times the values to each row's output.
// A row's arithmetic depends on its own position only: the same bits in a prefill chunk of any size and in
// decode, for any page size and any batch.
#include "attention_block.h"
#include "ops.h"

struct tile {
    int64_t sequence, first_head, num_heads;  // KV heads
    int64_t first_query, num_queries;
    int64_t first_position;  // of the first query in its sequence
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
