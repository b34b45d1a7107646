// y = activation(gate) * up, for rows that hold gate and up side by side, or activation(gate) for rows of gates; and caps.
#include "ops.h"

// exp_lanes stops at 88, where the quotient would no longer vanish for a huge negative gate.
INLINE f32s silu_lanes(f32s gate) {
    f32s silu = gate / (splat(1.0f) + exp_lanes(-gate));
    return select_lanes(gate < splat(-88.0f), splat(0.0f), silu);
}

// The approximation by tanh: x * (1 + tanh(z)) / 2 is x * sigmoid(2 z).
INLINE f32s gelu_lanes(f32s gate) {
    f32s z2 = splat(1.5957691216057308f) * (gate + splat(0.044715f) * gate * gate * gate);
    f32s gelu = gate / (splat(1.0f) + exp_lanes(-z2));
    return select_lanes(z2 < splat(-88.0f), splat(0.0f), gelu);
}

INLINE f32s clamp_lanes(f32s x, float low, float high) {
    x = select_lanes(x < splat(low), splat(low), x);
    return select_lanes(x > splat(high), splat(high), x);
}

INLINE f32s gated_lanes(f32s gate, f32s up, const struct activation *a, const int is_bf16) {
    if (a->kind == CLAMPED_SWIGLU) {
        gate = clamp_lanes(gate, -INFINITY, a->limit);
        return silu_lanes(gate * splat(a->alpha)) / splat(a->alpha) * (clamp_lanes(up, -a->limit, a->limit) + splat(1.0f));
    }
    return round_to(a->kind == GELU_TANH ? gelu_lanes(gate) : silu_lanes(gate), is_bf16) * up;
}

INLINE void gated_row(
    const char *gate_up, char *y, int64_t width, const struct activation *a, const int has_up, const int is_bf16) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        f32s gate = load_lanes(gate_up, i, is_bf16), up = has_up ? load_lanes(gate_up, width + i, is_bf16) : splat(1.0f);
        store_lanes(y, i, gated_lanes(gate, up, a, is_bf16), is_bf16);
    }
    for (; i < width; i++) {
        f32s gate = splat(load_one(gate_up, i, is_bf16));
        f32s up = splat(has_up ? load_one(gate_up, width + i, is_bf16) : 1.0f);
        store_one(y, i, gated_lanes(gate, up, a, is_bf16)[0], is_bf16);
    }
}

#define PART_WORK 16384  // elements worth a part of their own

struct gating {
    const char *gate_up;
    char *y;
    int64_t width;
    struct activation activation;
    int has_up, dtype;
};

static void gate_rows(const void *context, int64_t begin, int64_t end, int thread) {
    const struct gating *g = context;
    int64_t row_bytes = g->width * (g->dtype == BF16 ? 2 : 4);
    (void)thread;
    for (int64_t r = begin; r < end; r++) {
        const char *gate_up = g->gate_up + (1 + g->has_up) * r * row_bytes;
        if (g->dtype == BF16) gated_row(gate_up, g->y + r * row_bytes, g->width, &g->activation, g->has_up, 1);
        else gated_row(gate_up, g->y + r * row_bytes, g->width, &g->activation, g->has_up, 0);
    }
}

// gate_up: [num_rows, 2 * width], or without up [num_rows, width]; y: [num_rows, width]; both contiguous.
EXPORT void baton_gated(
    const char *gate_up, char *y, int64_t num_rows, int64_t width, int has_up, int kind, float alpha, float limit, int dtype) {
    struct gating g = {gate_up, y, width, {kind, alpha, limit}, has_up, dtype};
    parallel_for(num_rows, grain_of(width, PART_WORK), gate_rows, &g);
}

struct capping {
    float *x;
    int64_t size;
    float cap;
};

static void cap_lanes(const void *context, int64_t begin, int64_t end, int thread) {
    const struct capping *c = context;
    (void)thread;
    for (int64_t i = begin * LANES; i < MIN(end * LANES, c->size); i += LANES) {
        float lanes[LANES] = {0};
        int64_t num_bytes = MIN(c->size - i, LANES) * (int64_t)sizeof(float);
        memcpy(lanes, c->x + i, num_bytes);
        store_f32(lanes, soft_cap(load_f32(lanes), c->cap));
        memcpy(c->x + i, lanes, num_bytes);
    }
}

// x becomes cap * tanh(x / cap), in place.
EXPORT void baton_soft_cap(float *x, int64_t size, float cap) {
    struct capping c = {x, size, cap};
    parallel_for((size + LANES - 1) / LANES, grain_of(LANES, PART_WORK), cap_lanes, &c);
}
