// Rows of a table by token id.
#include "ops.h"

#define PART_WORK 65536  // bytes worth a part of their own
#define AHEAD 4          // rows whose first lines are fetched while one is copied

struct lookup {
    const int64_t *token_ids;
    const char *table;
    char *out;
    int64_t num_tokens, row_bytes;
};

static void copy_rows(const void *context, int64_t begin, int64_t end, int thread) {
    const struct lookup *l = context;
    (void)thread;
    for (int64_t t = begin; t < end; t++) {
        int64_t next = l->token_ids[MIN(t + AHEAD, l->num_tokens - 1)];
        for (int64_t byte = 0; byte < MIN(l->row_bytes, 256); byte += 64)
            __builtin_prefetch(l->table + next * l->row_bytes + byte);
        memcpy(l->out + t * l->row_bytes, l->table + l->token_ids[t] * l->row_bytes, l->row_bytes);
    }
}

// table: rows of row_bytes, contiguous; every token id is a row of it. out: [num_tokens, row_bytes].
EXPORT void baton_embedding(
    const int64_t *token_ids, const char *table, char *out, int64_t num_tokens, int64_t row_bytes) {
    struct lookup l = {token_ids, table, out, num_tokens, row_bytes};
    parallel_for(num_tokens, grain_of(row_bytes, PART_WORK), copy_rows, &l);
}
