// One layer's new keys and values into their pages.
#include "ops.h"

// key, value: [num_tokens, num_kv_heads, head_bytes], heads contiguous, tokens `stride` bytes apart.
// pages: [num_pages, 2, num_kv_heads, page_size, head_bytes]; slot = page * page_size + offset, -1 is skipped.
EXPORT void baton_store_kv(
    const char *key, ptrdiff_t key_stride, const char *value, ptrdiff_t value_stride, char *pages,
    ptrdiff_t page_stride, ptrdiff_t kv_stride, ptrdiff_t head_stride, const int64_t *slots,
    int64_t num_tokens, int64_t num_kv_heads, int64_t page_size, int64_t head_bytes) {
#pragma omp parallel for schedule(static) if (num_tokens * num_kv_heads * head_bytes > 131072)
    for (int64_t t = 0; t < num_tokens; t++) {
        if (slots[t] < 0) continue;
        char *page = pages + slots[t] / page_size * page_stride + slots[t] % page_size * head_bytes;
        for (int64_t h = 0; h < num_kv_heads; h++) {
            memcpy(page + h * head_stride, key + t * key_stride + h * head_bytes, head_bytes);
            memcpy(page + kv_stride + h * head_stride, value + t * value_stride + h * head_bytes, head_bytes);
        }
    }
}
