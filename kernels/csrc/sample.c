// One token per row of logits: greedy, or Gumbel-max over what top-k, top-p and min-p keep.
//
// 1. The keep set is a threshold on the logit, found by bisection over order-preserving integer keys of
//    the floats: exact, ties included, without a sort.
// 2. Noise for token v is Philox4x32-10 keyed by the seed, counter (v / 4, position, choice), word v % 4:
//    it depends on nothing but (seed, choice, position, v), so a replayed sequence draws the same tokens.
#include "simd.h"

#define NOT_A_TOKEN -1
#define MAX_GUMBEL 16.7f  // -log(-log(1 - 2^-24)), rounded up

struct sampling {
    float temperature;  // 0: greedy
    int32_t top_k;      // 0: off
    float top_p, min_p; // 1 and 0: off
    int64_t seed;
    int32_t choice;
    int64_t position;
};

// Greater floats have greater keys; -0 and +0 share one.
INLINE uint32_t order_key(float value) {
    uint32_t bits;
    value += 0.0f;
    memcpy(&bits, &value, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

INLINE u32x16 order_keys(f32x16 value) {
    u32x16 bits = (u32x16)(value + splat(0.0f));
    u32x16 negative = (u32x16)((i32x16)bits < 0);
    return bits ^ (negative | 0x80000000u);
}

// The first of the largest; NOT_A_TOKEN if any is not a number.
static int64_t argmax(const float *x, int64_t size) {
    f32x16 best = splat(-INFINITY);
    i32x16 nan = {0};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        f32x16 v = load_f32(x + i);
        nan |= v != v;
        best = select_lanes(v > best, v, best);
    }
    float maximum = max_lanes(best);
    int has_nan = max_lanes((f32x16)(nan & 0x3f800000)) > 0;  // all ones where it is: 1.0f there
    for (; i < size; i++) {
        has_nan |= x[i] != x[i];
        maximum = MAX(maximum, x[i]);
    }
    if (has_nan) return NOT_A_TOKEN;
    for (i = 0; i + LANES <= size; i += LANES) {
        i32x16 equal = load_f32(x + i) == splat(maximum);
        if (max_lanes((f32x16)(equal & 0x3f800000)) > 0) break;  // all ones where equal: 1.0f there
    }
    for (; i < size; i++)
        if (x[i] == maximum) return i;
    return 0;
}

// Sum of weight (or the count where weight is null) over {v : key(x[v]) >= key}.
static float mass_from(const float *x, const float *weight, uint32_t key, int64_t size) {
    f32x16 sum = {0};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        i32x16 kept = (i32x16)(order_keys(load_f32(x + i)) >= (key - (u32x16){}));
        sum += select_lanes(kept, weight ? load_f32(weight + i) : splat(1.0f), splat(0.0f));
    }
    float total = sum_lanes(sum);
    for (; i < size; i++)
        if (order_key(x[i]) >= key) total += weight ? weight[i] : 1.0f;
    return total;
}

// The largest key whose mass is still at least `target`.
static uint32_t highest_key(const float *x, const float *weight, float target, int64_t size) {
    uint32_t key = 0;
    for (int bit = 31; bit >= 0; bit--) {
        uint32_t trial = key | 1u << bit;
        if (mass_from(x, weight, trial, size) >= target) key = trial;
    }
    return key;
}

INLINE void philox(uint32_t counter[4], uint32_t key0, uint32_t key1) {
    for (int round = 0; round < 10; round++) {
        uint64_t left = (uint64_t)0xD2511F53u * counter[0], right = (uint64_t)0xCD9E8D57u * counter[2];
        uint32_t next[4] = {(uint32_t)(right >> 32) ^ counter[1] ^ key0, (uint32_t)right,
                            (uint32_t)(left >> 32) ^ counter[3] ^ key1, (uint32_t)left};
        memcpy(counter, next, sizeof next);
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
}

static float gumbel(const struct sampling *s, int64_t token) {
    uint32_t counter[4] = {(uint32_t)(token / 4), (uint32_t)s->position, (uint32_t)s->choice, (uint32_t)(s->position >> 32)};
    philox(counter, (uint32_t)s->seed, (uint32_t)(s->seed >> 32));
    float uniform = ((float)(counter[token % 4] >> 9) + 0.5f) * 0x1p-23f;
    return -logf(-logf(uniform));
}

// exponent: (logit - largest) / temperature, at most 0; weight: scratch. Returns the smallest key of a logit
// that may be drawn.
static uint32_t keep_from(const struct sampling *s, const float *logits, const float *exponent, float *weight, int64_t size) {
    uint32_t key = 0;
    if (s->top_k > 0 && s->top_k < size) key = highest_key(logits, NULL, (float)s->top_k, size);
    if (s->top_p < 1.0f) {
        for (int64_t v = 0; v < size; v++) weight[v] = order_key(logits[v]) >= key ? expf(exponent[v]) : 0.0f;
        key = MAX(key, highest_key(logits, weight, s->top_p * mass_from(logits, weight, key, size), size));
    }
    return key;
}

static int64_t draw(const struct sampling *s, const float *logits, float *exponent, float *weight, int64_t size) {
    int64_t best_token = argmax(logits, size);
    if (best_token == NOT_A_TOKEN) return NOT_A_TOKEN;
    float peak = logits[best_token], inverse_temperature = fminf(1.0f / s->temperature, 3.0e38f);
    for (int64_t v = 0; v < size; v++)
        exponent[v] = logits[v] == peak ? 0.0f : (logits[v] - peak) * inverse_temperature;
    uint32_t key = keep_from(s, logits, exponent, weight, size);
    // Starting from the likeliest token, whatever cannot win even with the largest noise is passed over.
    float best = gumbel(s, best_token), least = s->min_p > 0.0f ? logf(s->min_p) : -INFINITY;
    for (int64_t v = 0; v < size; v++) {
        if (exponent[v] + MAX_GUMBEL < best || exponent[v] < least || order_key(logits[v]) < key) continue;
        float score = exponent[v] + gumbel(s, v);
        if (score > best || (score == best && v < best_token)) {
            best = score;
            best_token = v;
        }
    }
    return best_token;
}

struct rows_to_sample {
    const float *logits;
    ptrdiff_t stride;
    const float *temperature;
    const int32_t *top_k;
    const float *top_p, *min_p;
    const int64_t *seed;
    const int32_t *choice;
    const int64_t *position;
    float *scratch;
    int64_t *tokens, size;
};

static void sample_rows(const void *context, int64_t begin, int64_t end, int thread) {
    const struct rows_to_sample *s = context;
    float *exponent = s->scratch + thread * 2 * s->size;
    for (int64_t r = begin; r < end; r++) {
        const float *logits = s->logits + r * s->stride;
        struct sampling p = {s->temperature[r], s->top_k[r], s->top_p[r], s->min_p[r], s->seed[r], s->choice[r], s->position[r]};
        s->tokens[r] = p.temperature == 0.0f ? argmax(logits, s->size)
                                             : draw(&p, logits, exponent, exponent + s->size, s->size);
    }
}

// logits: [num_rows, size] fp32, rows `stride` floats apart; scratch: [num_threads, 2 * size].
EXPORT void baton_sample(
    const float *logits, ptrdiff_t stride, const float *temperature, const int32_t *top_k, const float *top_p,
    const float *min_p, const int64_t *seed, const int32_t *choice, const int64_t *position, float *scratch,
    int64_t *tokens, int64_t num_rows, int64_t size) {
    struct rows_to_sample s = {
        logits, stride, temperature, top_k, top_p, min_p, seed, choice, position, scratch, tokens, size};
    parallel_for(num_rows, 1, sample_rows, &s);
}
