// Causal attention of a ragged batch of queries over paged keys and values: decode and prefill alike.
//
// A tile is some queries of one sequence and some KV heads: up to MAX_ROWS rows, which are the KV heads times
// the queries times the query heads of a group. A prefill tile is many queries and one KV head, for the
// arithmetic; a decode tile is one query and many KV heads, which lie side by side in a page, for the memory.
// The keys pass in blocks of 32 that start at multiples of 32 in the sequence, whatever the page size; for
// each block (attention_block.h) the tile
//   1. for each KV head transposes the keys, so that lanes are keys and units (a float, or two bf16) run
//      down the head, and scores them for every row, two vectors that hide each other's latency,
//   2. updates the running maximum and sum of all rows (online softmax),
//   3. for each KV head adds the probabilities times the values to each row's output.
// Meanwhile 1 fetches the next block's keys, and 3 its values.
// A row's arithmetic depends on its own position only: the same bits in a prefill chunk of any size and in
// decode, for any page size and any batch.
#include "attention_block.h"
#include "kv_rows.h"
#include "ops.h"

INLINE int bytes_of(const enum products products) { return products == FLOATS ? 4 : 2; }  // of an element

struct tile {
    int64_t sequence, first_head, num_heads;  // KV heads
    int64_t first_query, num_queries;
    int64_t first_position;  // of the first query in its sequence
};

// One block of keys against a tile.
struct turn {
    int64_t block;                // position of the first key
    int64_t first_row, last_row;  // of a KV head: those that see some key of the block
    const struct tile *next_tile; // what is fetched meanwhile: where the thread works next,
    int64_t next_block;           // as far as it can tell
};

INLINE int64_t last_position(const struct tile *t) { return t->first_position + t->num_queries - 1; }

INLINE int64_t row_bytes(const struct attention *p) { return row_bytes_of(p->head_dim, p->is_bf16, p->row_format); }

INLINE const char *key_pointer(const struct attention *p, const struct tile *t, int64_t kv_head, int64_t position) {
    int64_t page = p->page_table[t->sequence * p->table_stride + (position >> p->page_shift)];
    int64_t offset = position & ((1 << p->page_shift) - 1);
    return p->pages + page * p->page_stride + kv_head * p->head_stride + offset * row_bytes(p);
}

INLINE int64_t first_key(const struct attention *p, int64_t position) {
    return p->window > 0 ? MAX(0, position - p->window + 1) : 0;
}

// Where a run of keys of the next turn lies, perhaps: a hint, nothing is read there.
INLINE const char *run_ahead(const struct attention *p, const struct turn *turn, int64_t h, int half) {
    const struct tile *t = turn->next_tile;
    int64_t kv_head = MIN(t->first_head + h, p->num_kv_heads - 1);
    return key_pointer(p, t, kv_head, MIN(turn->next_block + half * RUN, last_position(t)));
}

// `num_rows` rows of codes from `first` on -> elements. Fetches as many bytes at `ahead` as it reads.
INLINE void decode_run(
    const struct attention *p, const struct tile *t, int64_t kv_head, int64_t first, ptrdiff_t part, int64_t num_rows,
    int is_bf16, const char *ahead, char *out, const enum row_format format) {
    const int64_t bytes = row_bytes(p);
    const int is_one_page = p->page_shift >= 4;
    const char *row = key_pointer(p, t, kv_head, first) + part;
    for (int64_t i = 0; i < num_rows; i++, row += bytes, out += p->padded_dim * (is_bf16 ? 2 : 4)) {
        if (!is_one_page) row = key_pointer(p, t, kv_head, first + i) + part;
        for (int64_t line = i * bytes / 64; line < (i + 1) * bytes / 64; line++) fetch(ahead, line);
        decode_row(row, p->head_dim, p->padded_dim, is_bf16, format, out);
    }
}

// The RUN keys (or values, `part` bytes further on) of the turn's half as consecutive rows of elements: in place
// where one page holds them all, else copied to `spare`, and decoded. Rows past the tile's last query are zeros:
// those slots may hold keys of other sequences. Decoding fetches what the same half of the next turn reads.
INLINE const char *find_run(
    const struct attention *p, const struct tile *t, const struct turn *turn, int64_t h, int half, ptrdiff_t part,
    int is_bf16, char spare[RUN * MAX_HEAD_DIM * 4]) {
    const int64_t kv_head = t->first_head + h, first = turn->block + half * RUN;
    const int64_t num_rows = MAX(0, MIN(RUN, last_position(t) - first + 1));
    if (p->row_format == PLAIN_ROWS && p->page_shift >= 4 && num_rows == RUN && p->padded_dim == p->head_dim)
        return key_pointer(p, t, kv_head, first) + part;
    const int64_t element_bytes = is_bf16 ? 2 : 4, out_bytes = p->padded_dim * element_bytes;
    if (num_rows < RUN || p->padded_dim != p->head_dim) memset(spare, 0, RUN * out_bytes);
    if (num_rows == 0) return spare;
    const char *ahead = run_ahead(p, turn, h, half) + part;
    if (p->row_format == INT8_ROWS) decode_run(p, t, kv_head, first, part, num_rows, is_bf16, ahead, spare, INT8_ROWS);
    else if (p->row_format == FP8_ROWS) decode_run(p, t, kv_head, first, part, num_rows, is_bf16, ahead, spare, FP8_ROWS);
    else
        for (int64_t i = 0; i < num_rows; i++)
            memcpy(spare + i * out_bytes, key_pointer(p, t, kv_head, first + i) + part, p->head_dim * element_bytes);
    return spare;
}

// What a tile works in; one per thread, on its stack. Row h * (rows of a head) + r is row r of KV head h.
struct workspace {
    _Alignas(64) uint32_t units[KEYS][MAX_HEAD_DIM][LANES];
    _Alignas(64) uint32_t values[BLOCK * MAX_HEAD_DIM];
    _Alignas(64) char spare[RUN * MAX_HEAD_DIM * 4];
    _Alignas(64) char padded_query[MAX_ROWS][MAX_HEAD_DIM * 4];
    _Alignas(64) float out[MAX_ROWS][MAX_HEAD_DIM];
    const uint32_t *query[MAX_ROWS];
    f32s scores[MAX_ROWS][KEYS];  // of the block; then its probabilities
    struct softmax state;
    float rescale[MAX_ROWS];
};

// Where the arithmetic fetches lines; those of codes are fetched as rows are decoded.
INLINE const char *lines_ahead(
    const struct attention *p, const struct workspace *w, const struct turn *turn, int64_t h, int half, ptrdiff_t part) {
    return p->row_format == PLAIN_ROWS ? run_ahead(p, turn, h, half) + part : w->spare;
}

// Row r of KV head h of the tile -> its row in query and output.
INLINE int64_t token_of(const struct tile *t, int64_t group, int64_t r) { return t->first_query + r / group; }
INLINE int64_t head_of(const struct tile *t, int64_t group, int64_t h, int64_t r) {
    return (t->first_head + h) * group + r % group;
}

INLINE int64_t first_block(const struct attention *p, const struct tile *t) {
    return first_key(p, t->first_position) / BLOCK * BLOCK;
}

// Earlier queries end before the block, later windows start after it. All KV heads of a tile see the same.
INLINE struct turn take_turn(const struct attention *p, const struct tile *t, int64_t block, const struct tile *next) {
    const int64_t group = p->num_heads / p->num_kv_heads;
    struct turn turn = {block, MAX(0, block - t->first_position) * group, t->num_queries * group, t, block + BLOCK};
    while (turn.last_row > turn.first_row && block + BLOCK <= first_key(p, t->first_position + (turn.last_row - 1) / group))
        turn.last_row -= group;
    if (turn.next_block > last_position(t)) {
        turn.next_tile = next;
        turn.next_block = first_block(p, next);
    }
    return turn;
}

INLINE void score_block(
    const struct attention *p, const struct tile *t, struct workspace *w, const struct turn *turn, int64_t h,
    const enum products products) {
    const int element_bytes = bytes_of(products);
    const int64_t num_units = p->padded_dim * element_bytes / 4, group = p->num_heads / p->num_kv_heads;
    const int64_t block = turn->block, num_rows = t->num_queries * group;
    const char *ahead = lines_ahead(p, w, turn, h, 0, 0);
    for (int half = 0; half < 2; half++) {
        const char *keys = find_run(p, t, turn, h, half, 0, products != FLOATS, w->spare);
        transpose_keys(keys, num_units, ahead + half * num_units / 2 * 64, w->units + half * RUN / LANES);
    }
    const uint32_t *const *query = w->query + h * num_rows;
    f32s(*scores)[KEYS] = w->scores + h * num_rows;
    ahead = lines_ahead(p, w, turn, h, 1, 0);
    IN_GROUPS(r, n, turn->first_row, turn->last_row,
              score_rows(query + r, w->units, num_units, p->scale, ahead, scores + r, n, products))
    for (int64_t r = turn->first_row; r < turn->last_row; r++) {
        int64_t position = t->first_position + r / group, low = first_key(p, position);
        if (p->softcap > 0)
            for (int v = 0; v < KEYS; v++) scores[r][v] = soft_cap(scores[r][v], p->softcap);
        if (block >= low && block + BLOCK <= position + 1) continue;
        for (int v = 0; v < KEYS; v++) scores[r][v] = mask_keys(scores[r][v], block + v * LANES, low, position);
    }
}

INLINE void add_block(
    const struct attention *p, const struct tile *t, struct workspace *w, const struct turn *turn, int64_t h,
    const enum products products) {
    const int element_bytes = bytes_of(products);
    const int64_t head_dim = p->padded_dim, num_units = head_dim * element_bytes / 4;
    const int64_t num_rows = t->num_queries * (p->num_heads / p->num_kv_heads);
    const char *ahead = lines_ahead(p, w, turn, h, 0, p->value_stride);
    for (int half = 0; half < 2; half++) {
        const char *run = find_run(p, t, turn, h, half, p->value_stride, products != FLOATS, w->spare);
        uint32_t *values = w->values + half * RUN * num_units;
        if (products != FLOATS) pair_values((const bf16 *)run, head_dim, ahead + half * num_units / 2 * 64, values);
        else memcpy(values, run, RUN * head_dim * 4);
    }
    ahead = lines_ahead(p, w, turn, h, 1, p->value_stride);
    IN_GROUPS(r, n, h * num_rows + turn->first_row, h * num_rows + turn->last_row,
              add_values(w->out + r, w->scores + r, w->rescale + r, w->values, ahead, head_dim, p->value_dim, n, products))
}

// `wide` may be where the query is.
INLINE const char *widen_query(char *wide, const bf16 *query, int64_t padded_dim) {
    bf16 copy[MAX_HEAD_DIM];
    memcpy(copy, query, padded_dim * sizeof *copy);
    for (int64_t d = 0; d < padded_dim; d += LANES) store_f32((float *)wide + d, load_bf16(copy + d));
    return wide;
}

INLINE void begin_tile(const struct attention *p, const struct tile *t, struct workspace *w, const enum products products) {
    const int element_bytes = bytes_of(products);
    const int64_t group = p->num_heads / p->num_kv_heads, num_rows = t->num_queries * group;
    w->state = (struct softmax){all_rows(-1e30f), all_rows(0)};  // finite, so that no difference is NaN
    for (int64_t h = 0; h < t->num_heads; h++) {
        for (int64_t r = 0; r < num_rows; r++) {
            int64_t row = h * num_rows + r;
            const char *query = p->query + token_of(t, group, r) * p->query_token + head_of(t, group, h, r) * p->query_head;
            if (p->padded_dim != p->head_dim) {
                memset(w->padded_query[row], 0, p->padded_dim * element_bytes);
                query = memcpy(w->padded_query[row], query, p->head_dim * element_bytes);
            }
            if (products == WIDE) query = widen_query(w->padded_query[row], (const bf16 *)query, p->padded_dim);
            w->query[row] = (const uint32_t *)query;
            memset(w->out[row], 0, p->padded_dim * sizeof(float));
            if (p->sinks) {
                set_row(&w->state.maximum, row, p->sinks[head_of(t, group, h, r)]);
                set_row(&w->state.sum, row, 1.0f);
            }
        }
    }
}

INLINE void end_tile(const struct attention *p, const struct tile *t, struct workspace *w, const int is_bf16) {
    const int64_t group = p->num_heads / p->num_kv_heads, num_rows = t->num_queries * group;
    float sums[MAX_ROWS];
    memcpy(sums, &w->state.sum, sizeof sums);
    for (int64_t h = 0; h < t->num_heads; h++)
        for (int64_t r = 0; r < num_rows; r++) {
            const float *out = w->out[h * num_rows + r], sum = sums[h * num_rows + r];
            float inverse = sum > 0 ? 1.0f / sum : 0.0f;
            int64_t row = (token_of(t, group, r) * p->num_heads + head_of(t, group, h, r)) * p->value_dim, d = 0;
            for (; d + LANES <= p->value_dim; d += LANES)
                store_lanes(p->output, row + d, load_f32(out + d) * splat(inverse), is_bf16);
            for (; d < p->value_dim; d++) store_one(p->output, row + d, out[d] * inverse, is_bf16);
        }
}

// `next`: a tile to fetch the beginning of; `t` itself where none is known.
INLINE void run_tile(const struct attention *p, const struct tile *t, const struct tile *next, const enum products products) {
    struct workspace w;
    begin_tile(p, t, &w, products);
    for (int64_t block = first_block(p, t); block <= last_position(t); block += BLOCK) {
        struct turn turn = take_turn(p, t, block, next);
        for (int64_t h = 0; h < t->num_heads; h++) score_block(p, t, &w, &turn, h, products);
        // A tile of several KV heads has one query, and all its rows see the block.
        softmax_block(&w.state, w.scores, turn.first_row, t->num_heads * turn.last_row, w.rescale);
        for (int64_t h = 0; h < t->num_heads; h++) add_block(p, t, &w, &turn, h, products);
    }
    end_tile(p, t, &w, products != FLOATS);
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

struct tiles {
    const struct attention *attention;
    const int64_t *starts;
    int64_t count, decode_heads;
};

// Tile number `index`: sequences in order, their queries in runs, parts of the KV heads innermost.
INLINE struct tile find_tile(const struct tiles *tiles, int64_t index) {
    const struct attention *p = tiles->attention;
    const int64_t *tile_starts = tiles->starts;
    int64_t low = 0, high = p->num_sequences;  // tile_starts[low] <= index < tile_starts[high]
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (tile_starts[middle] <= index) low = middle;
        else high = middle;
    }
    struct cut c = cut_sequence(p, low, tiles->decode_heads);
    int64_t in_sequence = index - tile_starts[low], end = p->query_starts[low + 1];
    struct tile t = {.sequence = low, .first_head = in_sequence % c.num_parts * c.heads};
    t.num_heads = MIN(c.heads, p->num_kv_heads - t.first_head);
    t.first_query = p->query_starts[low] + in_sequence / c.num_parts * c.run;
    t.num_queries = MIN(c.run, end - t.first_query);
    t.first_position = p->context_lens[low] - (end - t.first_query);
    return t;
}

static void run_tiles(const void *context, int64_t begin, int64_t end, int thread) {
    const struct tiles *tiles = context;
    const struct attention *p = tiles->attention;
    (void)thread;
    enum products products = p->is_bf16 ? (cpu_products.widen ? WIDE : PAIRS) : FLOATS;
    unsigned int mode = begin_products(products);
    for (int64_t i = begin; i < end; i++) {
        // The longest contexts of a prefill come last in each sequence; starting there evens the load.
        int64_t index = tiles->count - 1 - i, index_after = index - num_threads();
        struct tile t = find_tile(tiles, index), next = index_after < 0 ? t : find_tile(tiles, index_after);
        if (next.first_position < 0) next = t;  // padding has no keys
        if (products == FLOATS) run_tile(p, &t, &next, FLOATS);
        else if (products == PAIRS) run_tile(p, &t, &next, PAIRS);
        else run_tile(p, &t, &next, WIDE);
    }
    end_products(products, mode);
}

// tile_starts: scratch of num_sequences + 1. head_dim: even, at most MAX_HEAD_DIM. A sequence whose
// context_len is 0 is padding: its rows come out as zeros.
EXPORT void baton_attention(const struct attention *p, int64_t *tile_starts) {
    // All KV heads in one tile where there are sequences enough to keep every thread busy.
    struct tiles tiles = {.attention = p, .starts = tile_starts, .decode_heads = 1};
    int64_t group = p->num_heads / p->num_kv_heads;
    if (p->num_sequences >= 2 * num_threads()) tiles.decode_heads = MAX(1, MIN(p->num_kv_heads, MAX_ROWS / group));
    tile_starts[0] = 0;
    for (int64_t s = 0; s < p->num_sequences; s++) {
        struct cut c = cut_sequence(p, s, tiles.decode_heads);
        tile_starts[s + 1] = tile_starts[s] + c.num_runs * c.num_parts;
    }
    tiles.count = tile_starts[p->num_sequences];
    parallel_for(tiles.count, 1, run_tiles, &tiles);
}
