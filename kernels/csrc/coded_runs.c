// Runs of rows from a pool as codes, and back into a pool. The caller's thread does all the work, as in copy_runs.c.
#include "kv_rows.h"
#include "ops.h"

#define MAX_ELEMENT_BYTES 4

// decode_row writes whole vectors, which would leave the row.
INLINE void decode_into(const char *packed, int64_t head_dim, int is_bf16, enum row_format format, char *row) {
    const int64_t padded_dim = (head_dim + LANES - 1) / LANES * LANES;
    if (padded_dim == head_dim) {
        decode_row(packed, head_dim, head_dim, is_bf16, format, row);
        return;
    }
    char padded[padded_dim * MAX_ELEMENT_BYTES];
    decode_row(packed, head_dim, padded_dim, is_bf16, format, padded);
    memcpy(row, padded, row_bytes_of(head_dim, is_bf16, PLAIN_ROWS));
}

// Run n: num_rows rows of head_dim elements from pool + offsets[n] on. packed: all rows as codes, one after another.
EXPORT void baton_encode_runs(
    const char *pool, const int64_t *offsets, int64_t num_runs, int64_t num_rows, int64_t head_dim, int is_bf16,
    int format, char *packed) {
    const int64_t row_bytes = row_bytes_of(head_dim, is_bf16, PLAIN_ROWS);
    for (int64_t run = 0; run < num_runs; run++) {
        const char *row = pool + offsets[run];
        for (int64_t i = 0; i < num_rows; i++, row += row_bytes, packed += head_dim + SCALE_BYTES) {
            if (format == INT8_ROWS) encode_row(row, head_dim, is_bf16, INT8_ROWS, packed);
            else encode_row(row, head_dim, is_bf16, FP8_ROWS, packed);
        }
    }
}

EXPORT void baton_decode_runs(
    char *pool, const int64_t *offsets, int64_t num_runs, int64_t num_rows, int64_t head_dim, int is_bf16,
    int format, const char *packed) {
    const int64_t row_bytes = row_bytes_of(head_dim, is_bf16, PLAIN_ROWS);
    for (int64_t run = 0; run < num_runs; run++) {
        char *row = pool + offsets[run];
        for (int64_t i = 0; i < num_rows; i++, row += row_bytes, packed += head_dim + SCALE_BYTES) {
            if (format == INT8_ROWS) decode_into(packed, head_dim, is_bf16, INT8_ROWS, row);
            else decode_into(packed, head_dim, is_bf16, FP8_ROWS, row);
        }
    }
}
