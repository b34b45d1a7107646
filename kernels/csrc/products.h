// Products of 32-bit units: a unit is one float, or two neighbouring bf16.
//
// Pairs of bf16 are multiplied in one of two ways, which give the same bits. AVX-512 BF16 has an instruction for pairs,
// but on some CPUs (Sapphire Rapids) it takes four times as long as a multiply-add of floats. On these CPUs two
// multiply-adds of widened elements take half as long as the instruction, if one widening serves several rows.
#pragma once

#include "simd.h"

// Floats; pairs of bf16; pairs of bf16 that are widened to floats.
enum products { FLOATS, PAIRS, WIDE };

// Chosen when the library is loaded.
extern struct cpu_products {
    int widen;           // whether WIDE is faster than PAIRS
    int prefetches_few;  // whether a prefetch pays although few rows are multiplied
} cpu_products;

struct wide {
    f32s first, second;  // elements of the pairs
};

INLINE struct wide widen(const void *pairs) {
    u32s bits;
    memcpy(&bits, pairs, sizeof bits);
    return (struct wide){(f32s)(bits << 16), (f32s)(bits & 0xffff0000u)};
}

// acc += a . b, lane by lane. The product of the second elements of two pairs is added first.
INLINE f32s dot_units(f32s acc, uint32_t a_unit, const void *b, int is_bf16) {
    if (!is_bf16) {
        float a;
        memcpy(&a, &a_unit, sizeof a);
        return multiply_add(splat(a), load_f32((const float *)b), acc);
    }
#if defined(__AVX512BF16__)
    return (f32s)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32((int)a_unit), (__m512bh)_mm512_loadu_si512(b));
#else
    struct wide pairs = widen(b);
    acc = multiply_add(splat(bf16_to_f32((bf16)(a_unit >> 16))), pairs.second, acc);
    return multiply_add(splat(bf16_to_f32((bf16)a_unit)), pairs.first, acc);
#endif
}

// A unit of the right side, for products with several rows of the left side.
struct factor {
    const void *units;
    struct wide wide;
};

INLINE struct factor load_factor(const void *units, const enum products products) {
    struct factor factor = {.units = units};
    if (products == WIDE) factor.wide = widen(units);
    return factor;
}

// acc += unit u of the row . factor. A row for WIDE has two floats a unit.
INLINE f32s add_product(f32s acc, const void *row, int64_t u, struct factor factor, const enum products products) {
    if (products != WIDE) return dot_units(acc, ((const uint32_t *)row)[u], factor.units, products == PAIRS);
    const float *elements = (const float *)row + 2 * u;
    acc = multiply_add(splat(elements[1]), factor.wide.second, acc);
    return multiply_add(splat(elements[0]), factor.wide.first, acc);
}

#define FLUSH_DENORMALS 0x8040  // FTZ and DAZ in MXCSR

// Call both around products. The instruction for pairs always flushes denormals. With this mode all other operations
// on bf16 flush them as well, so both ways give the same bits. end_products restores the mode.
INLINE unsigned int begin_products(enum products products) {
#if defined(__SSE2__)
    unsigned int mode = _mm_getcsr();
    if (products != FLOATS) _mm_setcsr(mode | FLUSH_DENORMALS);
    return mode;
#else
    (void)products;
    return 0;
#endif
}

INLINE void end_products(enum products products, unsigned int mode) {
#if defined(__SSE2__)
    if (products != FLOATS) _mm_setcsr(mode);
#else
    (void)products;
    (void)mode;
#endif
}
