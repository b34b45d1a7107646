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

// gate_up: [num_rows, 2 * width]; y: [num_rows, width]; both contiguous.
EXPORT void baton_silu_mul(const char *gate_up, char *y, int64_t num_rows, int64_t width, int dtype) {
    int64_t row_bytes = width * (dtype == BF16 ? 2 : 4);
#pragma omp parallel for schedule(static) if (num_rows * width > 32768)
    for (int64_t r = 0; r < num_rows; r++) {
        if (dtype == BF16) silu_row(gate_up + 2 * r * row_bytes, y + r * row_bytes, width, 1);
        else silu_row(gate_up + 2 * r * row_bytes, y + r * row_bytes, width, 0);
    }
}
