// Sixteen float lanes and the element types that the kernels read and write.
//
// Everything is written with GCC/Clang vector types, so it compiles for any CPU; AVX-512 BF16 has a path
// of its own where the instruction exists. All arithmetic is in fp32 and in an order that depends only on
// the row, never on how many rows share the call: a token's values do not depend on its batch.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "threads.h"

#define LANES 16
#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint16_t bf16;

enum dtype { F32 = 0, BF16 = 1 };

INLINE f32x16 splat(float value) { return value - (f32x16){}; }
INLINE f32x16 load_f32(const float *p) { f32x16 v; memcpy(&v, p, sizeof v); return v; }
INLINE void store_f32(float *p, f32x16 v) { memcpy(p, &v, sizeof v); }

INLINE float bf16_to_f32(bf16 value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

// Round to nearest even; NaN stays NaN.
INLINE bf16 f32_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (bf16)(bits >> 16 | 0x40);
    return (bf16)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

INLINE f32x16 load_bf16(const bf16 *p) {
    u16x16 half;
    memcpy(&half, p, sizeof half);
    u32x16 bits = __builtin_convertvector(half, u32x16) << 16;
    return (f32x16)bits;
}

INLINE void store_bf16(bf16 *p, f32x16 v) {
#if defined(__AVX512BF16__)
    __m256bh half = _mm512_cvtneps_pbh((__m512)v);
    memcpy(p, &half, sizeof half);
#else
    for (int i = 0; i < LANES; i++) p[i] = f32_to_bf16(v[i]);
#endif
}

INLINE f32x16 load_lanes(const void *p, ptrdiff_t index, int is_bf16) {
    return is_bf16 ? load_bf16((const bf16 *)p + index) : load_f32((const float *)p + index);
}

INLINE void store_lanes(void *p, ptrdiff_t index, f32x16 v, int is_bf16) {
    if (is_bf16) store_bf16((bf16 *)p + index, v);
    else store_f32((float *)p + index, v);
}

INLINE float load_one(const void *p, ptrdiff_t index, int is_bf16) {
    return is_bf16 ? bf16_to_f32(((const bf16 *)p)[index]) : ((const float *)p)[index];
}

INLINE void store_one(void *p, ptrdiff_t index, float value, int is_bf16) {
    if (is_bf16) ((bf16 *)p)[index] = f32_to_bf16(value);
    else ((float *)p)[index] = value;
}

// Sixteen codes of E4M3 -> their values, 256 times smaller.
INLINE f32x16 load_fp8(const char *codes) {
#if defined(__AVX512F__) && defined(__AVX512VL__)
    // The exponent is one of half precision, less 8; conversion from half precision takes denormals at full speed.
    __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)codes));
    words = _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16((short)0xbf80));
    return (f32x16)_mm512_cvtph_ps(words);
#else
    f32x16 values;
    for (int i = 0; i < LANES; i++) {
        int code = codes[i], exponent = code >> 3 & 15, mantissa = code & 7;
        float magnitude = exponent ? ldexpf((float)(8 + mantissa), exponent - 18) : ldexpf((float)mantissa, -17);
        values[i] = code & 128 ? -magnitude : magnitude;
    }
    return values;
#endif
}

// The value as it would be after a round trip through the element type.
INLINE f32x16 round_to(f32x16 v, int is_bf16) {
    if (!is_bf16) return v;
    bf16 half[LANES];
    store_bf16(half, v);
    return load_bf16(half);
}

// Always the same tree (upper half onto lower half), so a sum never depends on the compiler's mood.
INLINE float sum_lanes(f32x16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float lane[LANES];
    memcpy(lane, &v, sizeof lane);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
#endif
}

INLINE float max_lanes(f32x16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float lane[LANES];
    memcpy(lane, &v, sizeof lane);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lane[i] = MAX(lane[i], lane[i + width]);
    return lane[0];
#endif
}

INLINE f32x16 select_lanes(i32x16 mask, f32x16 yes, f32x16 no) {
    return (f32x16)((mask & (i32x16)yes) | (~mask & (i32x16)no));
}

// exp(x) within 2 ulp for x <= 88; 0 below -87. Cody-Waite reduction, degree-6 polynomial (Cephes expf).
INLINE f32x16 exp_lanes(f32x16 x) {
    f32x16 clamped = select_lanes(x < splat(-87.0f), splat(-87.0f), x);
    clamped = select_lanes(clamped > splat(88.0f), splat(88.0f), clamped);
    // Adding and taking away 1.5 * 2^23 rounds to the nearest integer.
    f32x16 magic = splat(12582912.0f);
    f32x16 rounded = clamped * splat(1.44269504088896341f) + magic;
    i32x16 exponent = (i32x16)rounded - (i32x16)magic;
    f32x16 n = rounded - magic;
    f32x16 r = clamped - n * splat(0.693359375f);
    r = r + n * splat(2.12194440e-4f);
    f32x16 p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1.0f);
    f32x16 scaled = (f32x16)((i32x16)p + (exponent << 23));
    return select_lanes(x < splat(-87.0f), splat(0.0f), scaled);
}

// cap * tanh(x / cap).
INLINE f32x16 soft_cap(f32x16 x, float cap) {
    f32x16 exponential = exp_lanes(x * splat(2.0f / cap));
    return splat(cap) * (splat(1.0f) - splat(2.0f) / (splat(1.0f) + exponential));
}
