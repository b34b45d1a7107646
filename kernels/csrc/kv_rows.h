// A row of a page: the key, or the value, of one token and head. As `row_format` in kv_rows.py.
//
//   PLAIN_ROWS            [head_dim] elements of the model's dtype
//   INT8_ROWS, FP8_ROWS   [head_dim] codes, then their scale in bf16; an element is code * scale
//
// A row depends on its own elements alone, so a page's bytes depend on neither steps nor batches.
#pragma once

#include "simd.h"

enum row_format { PLAIN_ROWS, INT8_ROWS, FP8_ROWS };

#define SCALE_BYTES 2
#define SMALLEST_SCALE 0x1p-126f  // bf16 has fewer bits below

typedef int8_t i8s __attribute__((vector_size(LANES)));

INLINE int64_t row_bytes_of(int64_t head_dim, int is_bf16, enum row_format format) {
    return format == PLAIN_ROWS ? head_dim * (is_bf16 ? 2 : 4) : head_dim + SCALE_BYTES;
}

// Rounded to nearest even; |values| are below 464.
INLINE i32s to_fp8(f32s values) {
    i32s sign = (i32s)values >> 24 & 128, bits = (i32s)values & 0x7fffffff;
    i32s normal = (bits + 0x7ffff + (bits >> 20 & 1) - (120 << 23)) >> 20;
    // Below 2^-6 codes are 2^-9 apart, as are floats from 2^14 on.
    i32s denormal = (i32s)((f32s)bits + splat(16384.0f)) - (i32s)splat(16384.0f);
    i32s is_normal = bits >= 121 << 23;
    return sign | (is_normal & normal) | (~is_normal & denormal);
}

INLINE i32s to_int8(f32s values) {
    // Adding 1.5 * 2^23 rounds to the nearest integer.
    return (i32s)(values + splat(12582912.0f)) - (i32s)splat(12582912.0f);
}

INLINE i8s low_bytes(i32s lanes) {
#if defined(__AVX512F__)
    return (i8s)_mm512_cvtepi32_epi8((__m512i)lanes);
#else
    return __builtin_convertvector(lanes, i8s);
#endif
}

// The largest element gets the largest code, so a row that was decoded in bf16 or fp32 is not rounded any further. A row
// whose scale would be below SMALLEST_SCALE decodes to zeros, and one with an element that is not finite to NaN.
INLINE bf16 scale_of(const char *x, int64_t head_dim, int is_bf16, enum row_format format) {
    i32s largest = {0};
    for (int64_t d = 0; d < head_dim; d += LANES) {
        i32s bits = (i32s)load_some(x, d, MIN(LANES, head_dim - d), is_bf16) & 0x7fffffff;  // ordered as the values, NaN last
        i32s is_larger = bits > largest;
        largest = (is_larger & bits) | (~is_larger & largest);
    }
    int32_t most = 0;
    for (int i = 0; i < LANES; i++) most = MAX(most, largest[i]);
    if (most >= 0x7f800000) return 0x7fc0;
    float scale;
    memcpy(&scale, &most, sizeof scale);
    scale /= format == INT8_ROWS ? 127.0f : 448.0f;
    if (scale < SMALLEST_SCALE) return 0;
    memcpy(&most, &scale, sizeof most);
    return (bf16)((most + 0x8000) >> 16);
}

INLINE void encode_row(const char *x, int64_t head_dim, int is_bf16, enum row_format format, char *row) {
    bf16 stored = scale_of(x, head_dim, is_bf16, format);
    float scale = bf16_to_f32(stored);
    memcpy(row + head_dim, &stored, SCALE_BYTES);
    if (!(scale > 0)) {
        memset(row, 0, head_dim);
        return;
    }
    for (int64_t d = 0; d < head_dim; d += LANES) {
        f32s values = load_some(x, d, MIN(LANES, head_dim - d), is_bf16) / splat(scale);
        i8s codes = low_bytes(format == INT8_ROWS ? to_int8(values) : to_fp8(values));
        memcpy(row + d, &codes, MIN(LANES, head_dim - d));
    }
}

INLINE f32s load_int8(const char *codes) {
#if defined(__AVX512F__)
    return (f32s)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)codes)));
#elif LANES == 8
    return (f32s)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)codes)));
#else
    i8s bytes;
    memcpy(&bytes, codes, sizeof bytes);
    return __builtin_convertvector(__builtin_convertvector(bytes, i32s), f32s);
#endif
}

// -> [padded_dim] elements of the model's dtype, zeros from head_dim on.
INLINE void decode_row(
    const char *row, int64_t head_dim, int64_t padded_dim, int is_bf16, enum row_format format, char *out) {
    bf16 stored;
    memcpy(&stored, row + head_dim, SCALE_BYTES);
    f32s scale = splat(bf16_to_f32(stored) * (format == FP8_ROWS ? 256.0f : 1.0f));
    for (int64_t d = 0; d < padded_dim; d += LANES) {
        char last[LANES] = {0};
        if (d + LANES > head_dim) memcpy(last, row + d, MAX(0, head_dim - d));
        const char *codes = d + LANES > head_dim ? last : row + d;
        store_lanes(out, d, (format == INT8_ROWS ? load_int8(codes) : load_fp8(codes)) * scale, is_bf16);
    }
}
