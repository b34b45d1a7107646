// Vectors of floats and the element types that the kernels read and write.
//
// Everything is written with GCC/Clang vector types of the CPU's own width, so it compiles for any CPU; GCC keeps wider
// vectors in memory. AVX2, AVX-512 and AVX-512 BF16 have paths of their own where an instruction exists. All arithmetic is
// in fp32 and in an order that depends only on the row, never on how many rows share the call, or on the width of the
// CPU's vectors: a token's values do not depend on its batch, nor on the width where CPUs multiply and add in one
// rounding. The compiler fuses no product with a sum, since it might choose differently in two copies of a loop;
// `multiply_add` does.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "threads.h"

#if defined(__AVX512F__)
#define LANES 16  // floats of a vector
#define REGISTERS 32  // vectors
#elif defined(__AVX2__)
#define LANES 8
#define REGISTERS 16
#elif defined(__aarch64__)
#define LANES 4
#define REGISTERS 32
#else
#define LANES 4
#define REGISTERS 16
#endif
#define CHAINS 16  // of a sum along a row, on every CPU
#define VECTORS (CHAINS / LANES)
#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

typedef float f32s __attribute__((vector_size(4 * LANES)));
typedef int32_t i32s __attribute__((vector_size(4 * LANES)));
typedef uint32_t u32s __attribute__((vector_size(4 * LANES)));
typedef uint16_t u16s __attribute__((vector_size(2 * LANES)));
typedef uint16_t bf16;

enum dtype { F32 = 0, BF16 = 1 };

INLINE f32s splat(float value) { return value - (f32s){}; }
INLINE f32s load_f32(const float *p) { f32s v; memcpy(&v, p, sizeof v); return v; }
INLINE void store_f32(float *p, f32s v) { memcpy(p, &v, sizeof v); }

// a * b + c, rounded once where the CPU can.
INLINE f32s multiply_add(f32s a, f32s b, f32s c) {
#if defined(__AVX512F__)
    return (f32s)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8 && defined(__FMA__)
    return (f32s)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif LANES == 4 && defined(__FMA__)
    return (f32s)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c);
#elif defined(__aarch64__)
    return (f32s)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

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

INLINE u32s load_u16(const uint16_t *p) {
    u16s half;
    memcpy(&half, p, sizeof half);
#if LANES == 8
    return (u32s)_mm256_cvtepu16_epi32((__m128i)half);
#else
    return __builtin_convertvector(half, u32s);
#endif
}

INLINE f32s load_bf16(const bf16 *p) { return (f32s)(load_u16(p) << 16); }

INLINE void store_bf16(bf16 *p, f32s v) {
#if defined(__AVX512BF16__)
    __m256bh half = _mm512_cvtneps_pbh((__m512)v);
    memcpy(p, &half, sizeof half);
#elif LANES == 8
    i32s bits = (i32s)v, rounded = bits + 0x7fff + ((u32s)bits >> 16 & 1), is_nan = v != v;
    u32s half = (u32s)((is_nan & (bits | 0x400000)) | (~is_nan & rounded)) >> 16;
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)half, (__m256i)half), 0x08);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(packed));
#else
    for (int i = 0; i < LANES; i++) p[i] = f32_to_bf16(v[i]);
#endif
}

INLINE f32s load_lanes(const void *p, ptrdiff_t index, int is_bf16) {
    return is_bf16 ? load_bf16((const bf16 *)p + index) : load_f32((const float *)p + index);
}

INLINE void store_lanes(void *p, ptrdiff_t index, f32s v, int is_bf16) {
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

// As load_lanes, of the first num_lanes; the others are zeros.
INLINE f32s load_some(const char *x, int64_t index, int64_t num_lanes, int is_bf16) {
    if (num_lanes == LANES) return load_lanes(x, index, is_bf16);
    float lanes[LANES] = {0};
    for (int64_t i = 0; i < num_lanes; i++) lanes[i] = load_one(x, index + i, is_bf16);
    return load_f32(lanes);
}

INLINE void store_some(char *y, int64_t index, f32s v, int64_t num_lanes, int is_bf16) {
    if (num_lanes == LANES) store_lanes(y, index, v, is_bf16);
    else for (int64_t i = 0; i < num_lanes; i++) store_one(y, index + i, v[i], is_bf16);
}

// Codes of E4M3 -> their values, 256 times smaller.
INLINE f32s load_fp8(const char *codes) {
    // The exponent is one of half precision, less 8; conversion from half precision takes denormals at full speed.
#if defined(__AVX512F__) && defined(__AVX512VL__)
    __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)codes));
    words = _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16((short)0xbf80));
    return (f32s)_mm512_cvtph_ps(words);
#elif LANES == 8 && defined(__F16C__)
    __m128i words = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)codes));
    words = _mm_and_si128(_mm_slli_epi16(words, 7), _mm_set1_epi16((short)0xbf80));
    return (f32s)_mm256_cvtph_ps(words);
#else
    f32s values;
    for (int i = 0; i < LANES; i++) {
        int code = codes[i], exponent = code >> 3 & 15, mantissa = code & 7;
        float magnitude = exponent ? ldexpf((float)(8 + mantissa), exponent - 18) : ldexpf((float)mantissa, -17);
        values[i] = code & 128 ? -magnitude : magnitude;
    }
    return values;
#endif
}

// The value as it would be after a round trip through the element type.
INLINE f32s round_to(f32s v, int is_bf16) {
    if (!is_bf16) return v;
    bf16 half[LANES];
    store_bf16(half, v);
    return load_bf16(half);
}

// Always the same tree (upper half onto lower half), so the compiler does not choose the order of a sum.
INLINE float sum_lanes(f32s v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#elif LANES == 8
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
#else
    float lane[LANES];
    memcpy(lane, &v, sizeof lane);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
#endif
}

// The sum of chains: chain i of a row's sum adds the elements i, i + CHAINS, and so on.
INLINE float sum_chains(const f32s chains[VECTORS]) {
    f32s sums[VECTORS];
    memcpy(sums, chains, sizeof sums);
    for (int width = VECTORS / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) sums[i] += sums[i + width];
    return sum_lanes(sums[0]);
}

INLINE float max_lanes(f32s v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#elif LANES == 8
    __m128 most = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    most = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
#else
    float lane[LANES];
    memcpy(lane, &v, sizeof lane);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lane[i] = MAX(lane[i], lane[i + width]);
    return lane[0];
#endif
}

INLINE f32s select_lanes(i32s mask, f32s yes, f32s no) {
    return (f32s)((mask & (i32s)yes) | (~mask & (i32s)no));
}

// exp(x) within 2 ulp for x <= 88; 0 below -87; NaN for a NaN. Cody-Waite reduction, degree-6 polynomial (Cephes expf).
INLINE f32s exp_lanes(f32s x) {
    f32s clamped = select_lanes(x < splat(-87.0f), splat(-87.0f), x);
    clamped = select_lanes(clamped > splat(88.0f), splat(88.0f), clamped);
    // Adding and taking away 1.5 * 2^23 rounds to the nearest integer.
    f32s magic = splat(12582912.0f);
    f32s rounded = multiply_add(clamped, splat(1.44269504088896341f), magic);
    i32s exponent = (i32s)rounded - (i32s)magic;
    f32s n = rounded - magic;
    f32s r = multiply_add(n, splat(-0.693359375f), clamped);
    r = multiply_add(n, splat(2.12194440e-4f), r);
    f32s p = splat(1.9875691500e-4f);
    p = multiply_add(p, r, splat(1.3981999507e-3f));
    p = multiply_add(p, r, splat(8.3334519073e-3f));
    p = multiply_add(p, r, splat(4.1665795894e-2f));
    p = multiply_add(p, r, splat(1.6666665459e-1f));
    p = multiply_add(p, r, splat(5.0000001201e-1f));
    p = multiply_add(p * r, r, r) + splat(1.0f);
    f32s scaled = (f32s)((i32s)p + (exponent << 23));
    f32s result = select_lanes(x < splat(-87.0f), splat(0.0f), scaled);
    return select_lanes(x == x, result, x);  // the shifts make a number of some NaNs
}

// cap * tanh(x / cap).
INLINE f32s soft_cap(f32s x, float cap) {
    f32s exponential = exp_lanes(x * splat(2.0f / cap));
    return splat(cap) * (splat(1.0f) - splat(2.0f) / (splat(1.0f) + exponential));
}
