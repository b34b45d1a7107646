// One layer's new keys and values into their pages.
#include "ops.h"

#define PART_WORK 65536  // bytes worth a part of their own

struct storing {
    const char *key, *value;
    ptrdiff_t key_stride, value_stride;
    char *pages;
    ptrdiff_t page_stride, kv_stride, head_stride;
    const int64_t *slots;
    int64_t num_kv_heads, page_size, head_bytes;
};

static void store_tokens(const void *context, int64_t begin, int64_t end, int thread) {
    const struct storing *s = context;
    (void)thread;
    for (int64_t t = begin; t < end; t++) {
        int64_t slot = s->slots[t];
        if (slot < 0) continue;
        char *page = s->pages + slot / s->page_size * s->page_stride + slot % s->page_size * s->head_bytes;
        for (int64_t h = 0; h < s->num_kv_heads; h++) {
            memcpy(page + h * s->head_stride, s->key + t * s->key_stride + h * s->head_bytes, s->head_bytes);
            memcpy(page + s->kv_stride + h * s->head_stride, s->value + t * s->value_stride + h * s->head_bytes, s->head_bytes);
        }
    }
}

// key, value: [num_tokens, num_kv_heads, head_bytes], heads contiguous, tokens `stride` bytes apart.
// pages: [num_pages, 2, num_kv_heads, page_size, head_bytes]; slot = page * page_size + offset, -1 is skipped.
EXPORT void baton_store_kv(
    const char *key, ptrdiff_t key_stride, const char *value, ptrdiff_t value_stride, char *pages,
    ptrdiff_t page_stride, ptrdiff_t kv_stride, ptrdiff_t head_stride, const int64_t *slots,
    int64_t num_tokens, int64_t num_kv_heads, int64_t page_size, int64_t head_bytes) {
    struct storing s = {
        key, value, key_stride, value_stride, pages, page_stride, kv_stride, head_stride,
        slots, num_kv_heads, page_size, head_bytes};
    parallel_for(num_tokens, grain_of(2 * num_kv_heads * head_bytes, PART_WORK), store_tokens, &s);
}
