// Rotary position embedding in place: element i of a head turns with element i + head_dim / 2.
#include "ops.h"

INLINE void rotate_head(char *x, const float *cos, const float *sin, int64_t half, const int is_bf16) {
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        f32s c = load_f32(cos + i), s = load_f32(sin + i);
        f32s a = load_lanes(x, i, is_bf16), b = load_lanes(x, half + i, is_bf16);
        store_lanes(x, i, a * c - b * s, is_bf16);
        store_lanes(x, half + i, b * c + a * s, is_bf16);
    }
    for (; i < half; i++) {
        float a = load_one(x, i, is_bf16), b = load_one(x, half + i, is_bf16);
        store_one(x, i, a * cos[i] - b * sin[i], is_bf16);
        store_one(x, half + i, b * cos[i] + a * sin[i], is_bf16);
    }
}

#define PART_WORK 32768  // elements worth a part of their own

struct rotation {
    char *x;
    ptrdiff_t stride, head_stride;
    const float *cos_sin;
    const int64_t *positions;
    int64_t num_heads, head_dim;
    int dtype;
};

static void rotate_tokens(const void *context, int64_t begin, int64_t end, int thread) {
    const struct rotation *r = context;
    int64_t half = r->head_dim / 2;
    (void)thread;
    for (int64_t t = begin; t < end; t++) {
        const float *cos = r->cos_sin + r->positions[t] * r->head_dim;
        for (int64_t h = 0; h < r->num_heads; h++) {
            char *head = r->x + t * r->stride + h * r->head_stride;
            if (r->dtype == BF16) rotate_head(head, cos, cos + half, half, 1);
            else rotate_head(head, cos, cos + half, half, 0);
        }
    }
}

// x: [num_tokens, num_heads, head_dim], tokens `stride` and heads `head_stride` bytes apart;
// cos_sin: [max_positions, head_dim] fp32, cosines first.
EXPORT void baton_rope(
    char *x, ptrdiff_t stride, ptrdiff_t head_stride, int64_t num_heads, const float *cos_sin, const int64_t *positions,
    int64_t num_tokens, int64_t head_dim, int dtype) {
    struct rotation r = {x, stride, head_stride, cos_sin, positions, num_heads, head_dim, dtype};
    parallel_for(num_tokens, grain_of(num_heads * head_dim, PART_WORK), rotate_tokens, &r);
}
