// y = silu(gate) * up, for rows that hold gate and up side by side.
#include "ops.h"

// exp_lanes stops at 88, where the quotient would no longer vanish for a huge negative gate.
INLINE f32x16 silu_lanes(f32x16 gate) {
    f32x16 silu = gate / (splat(1.0f) + exp_lanes(-gate));
    return select_lanes(gate < splat(-88.0f), splat(0.0f), silu);
}

INLINE void silu_row(const char *gate_up, char *y, int64_t width, const int is_bf16) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        f32x16 gate = load_lanes(gate_up, i, is_bf16);
        f32x16 silu = round_to(silu_lanes(gate), is_bf16);
        store_lanes(y, i, silu * load_lanes(gate_up, width + i, is_bf16), is_bf16);
    }
    for (; i < width; i++) {
        float gate = load_one(gate_up, i, is_bf16);
        float silu = silu_lanes(splat(gate))[0];
        if (is_bf16) silu = bf16_to_f32(f32_to_bf16(silu));
        store_one(y, i, silu * load_one(gate_up, width + i, is_bf16), is_bf16);
    }
}

#define PART_WORK 16384  // elements worth a part of their own

struct gating {
    const char *gate_up;
    char *y;
    int64_t width;
    int dtype;
};

static void gate_rows(const void *context, int64_t begin, int64_t end, int thread) {
    const struct gating *g = context;
    int64_t row_bytes = g->width * (g->dtype == BF16 ? 2 : 4);
    (void)thread;
    for (int64_t r = begin; r < end; r++) {
        if (g->dtype == BF16) silu_row(g->gate_up + 2 * r * row_bytes, g->y + r * row_bytes, g->width, 1);
        else silu_row(g->gate_up + 2 * r * row_bytes, g->y + r * row_bytes, g->width, 0);
    }
}

// gate_up: [num_rows, 2 * width]; y: [num_rows, width]; both contiguous.
EXPORT void baton_silu_mul(const char *gate_up, char *y, int64_t num_rows, int64_t width, int dtype) {
    struct gating g = {gate_up, y, width, dtype};
    parallel_for(num_rows, grain_of(width, PART_WORK), gate_rows, &g);
}
