// One layer's new keys and values into their pages.
#include "kv_rows.h"
#include "ops.h"

#define PART_WORK 65536  // bytes worth a part of their own

struct storing {
    const char *key, *value;
    ptrdiff_t key_stride, value_stride;
    char *pages;
    ptrdiff_t page_stride, kv_stride, head_stride, row_stride;
    const int64_t *slots;
    int64_t num_kv_heads, page_size, key_dim, value_dim, element_bytes;
    enum row_format format;
};

static void store_head(const struct storing *s, const char *head, int64_t head_dim, char *row) {
    const int is_bf16 = s->element_bytes == 2;
    if (s->format == PLAIN_ROWS) memcpy(row, head, head_dim * s->element_bytes);
    else if (s->format == INT8_ROWS) encode_row(head, head_dim, is_bf16, INT8_ROWS, row);
    else encode_row(head, head_dim, is_bf16, FP8_ROWS, row);
}

static void store_tokens(const void *context, int64_t begin, int64_t end, int thread) {
    const struct storing *s = context;
    const int64_t key_bytes = s->key_dim * s->element_bytes, value_bytes = s->value_dim * s->element_bytes;
    (void)thread;
    for (int64_t t = begin; t < end; t++) {
        int64_t slot = s->slots[t];
        if (slot < 0) continue;
        char *page = s->pages + slot / s->page_size * s->page_stride + slot % s->page_size * s->row_stride;
        for (int64_t h = 0; h < s->num_kv_heads; h++) {
            char *row = page + h * s->head_stride;
            store_head(s, s->key + t * s->key_stride + h * key_bytes, s->key_dim, row);
            store_head(s, s->value + t * s->value_stride + h * value_bytes, s->value_dim, row + s->kv_stride);
        }
    }
}

// key, value: [num_tokens, num_kv_heads, key_dim or value_dim], heads contiguous, tokens `stride` bytes apart.
// pages: the first row for a key; a value goes `kv_stride` bytes further on, or back. slot = page * page_size + offset, -1 is
// skipped. PLAIN_ROWS take any element type of 2 or 4 bytes, other rows bf16 and floats.
EXPORT void baton_store_kv(
    const char *key, ptrdiff_t key_stride, const char *value, ptrdiff_t value_stride, char *pages,
    ptrdiff_t page_stride, ptrdiff_t kv_stride, ptrdiff_t head_stride, ptrdiff_t row_stride, const int64_t *slots,
    int64_t num_tokens, int64_t num_kv_heads, int64_t page_size, int64_t key_dim, int64_t value_dim, int64_t element_bytes,
    int row_format) {
    struct storing s = {
        key, value, key_stride, value_stride, pages, page_stride, kv_stride, head_stride, row_stride,
        slots, num_kv_heads, page_size, key_dim, value_dim, element_bytes, row_format};
    parallel_for(num_tokens, grain_of(num_kv_heads * (key_dim + value_dim) * element_bytes, PART_WORK), store_tokens, &s);
}
