// One token per row of logits: greedy, or Gumbel-max over what top-k, top-p and min-p keep.
//
// 1. The keep set is a threshold on the logit, found by bisection over order-preserving integer keys of
//    the floats: exact, ties included, without a sort.
// 2. Noise for token v is Philox4x32-10 keyed by the seed, counter (v / 4, position, choice), word v % 4:
//    it depends on nothing but (seed, choice, position, v), so a replayed sequence draws the same tokens.
// 3. A bit mask may ban tokens of a row. Few allowed tokens are gathered and drawn from; no other one is read.
#include <stdlib.h>

#include "simd.h"

#define NOT_A_TOKEN -1
#define ALL_BANNED -2
#define WORD_BITS 32
#define GATHERED_SHARE 8  // at most one in so many tokens is gathered
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

INLINE u32s order_keys(f32s value) {
    u32s bits = (u32s)(value + splat(0.0f));
    u32s negative = (u32s)((i32s)bits < 0);
    return bits ^ (negative | 0x80000000u);
}

// The first of the largest; NOT_A_TOKEN if any is not a number, ALL_BANNED if all are -inf.
static int64_t argmax(const float *x, int64_t size) {
    f32s best = splat(-INFINITY);
    i32s nan = {0};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        f32s v = load_f32(x + i);
        nan |= v != v;
        best = select_lanes(v > best, v, best);
    }
    float maximum = max_lanes(best);
    int has_nan = max_lanes((f32s)(nan & 0x3f800000)) > 0;  // all ones where it is: 1.0f there
    for (; i < size; i++) {
        has_nan |= x[i] != x[i];
        maximum = MAX(maximum, x[i]);
    }
    if (has_nan) return NOT_A_TOKEN;
    if (maximum == -INFINITY) return ALL_BANNED;
    for (i = 0; i + LANES <= size; i += LANES) {
        i32s equal = load_f32(x + i) == splat(maximum);
        if (max_lanes((f32s)(equal & 0x3f800000)) > 0) break;  // all ones where equal: 1.0f there
    }
    for (; i < size; i++)
        if (x[i] == maximum) return i;
    return 0;
}

// Sum of weight (or the count where weight is null) over {v : key(x[v]) >= key}.
static float mass_from(const float *x, const float *weight, uint32_t key, int64_t size) {
    f32s sums[VECTORS] = {{0}};
    int64_t i = 0;
    for (; i + CHAINS <= size; i += CHAINS)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            i32s kept = (i32s)(order_keys(load_f32(x + i + v * LANES)) >= (key - (u32s){}));
            sums[v] += select_lanes(kept, weight ? load_f32(weight + i + v * LANES) : splat(1.0f), splat(0.0f));
        }
    float total = sum_chains(sums);
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

// ids: the tokens of the logits; null: their places. first: the place of the first of the largest logits.
static int64_t draw(
    const struct sampling *s, const float *logits, const int32_t *ids, int64_t first, float *exponent, float *weight,
    int64_t size) {
    float peak = logits[first], inverse_temperature = fminf(1.0f / s->temperature, 3.0e38f);
    for (int64_t v = 0; v < size; v++)
        exponent[v] = logits[v] == peak ? 0.0f : (logits[v] - peak) * inverse_temperature;
    uint32_t key = keep_from(s, logits, exponent, weight, size);
    // Starting from the likeliest token, whatever cannot win even with the largest noise is passed over.
    int64_t chosen = first;
    float best = gumbel(s, ids ? ids[first] : first), least = s->min_p > 0.0f ? logf(s->min_p) : -INFINITY;
    for (int64_t v = 0; v < size; v++) {
        if (exponent[v] + MAX_GUMBEL < best || exponent[v] < least || order_key(logits[v]) < key) continue;
        float score = exponent[v] + gumbel(s, ids ? ids[v] : v);
        if (score > best || (score == best && v < chosen)) {
            best = score;
            chosen = v;
        }
    }
    return ids ? ids[chosen] : chosen;
}

INLINE void mask_word(float *logits, uint32_t word, int64_t size) {
    if (word == 0)  // nothing is read
        for (int64_t v = 0; v < size; v++) logits[v] = -INFINITY;
    else
        for (int64_t v = 0; v < size; v++) logits[v] = word >> v & 1 ? logits[v] : -INFINITY;
}

static void ban(float *logits, const uint32_t *mask, int64_t size) {
    int64_t whole = size / WORD_BITS;
    for (int64_t w = 0; w < whole; w++)
        if (mask[w] != UINT32_MAX) mask_word(logits + w * WORD_BITS, mask[w], WORD_BITS);
    if (size % WORD_BITS) mask_word(logits + whole * WORD_BITS, mask[whole], size % WORD_BITS);
}

// The number of allowed tokens, or -1 if there are more than `most`; ids: these tokens, ascending.
static int64_t gather(const uint32_t *mask, int64_t size, int32_t *ids, int64_t most) {
    int64_t num_ids = 0;
    for (int64_t w = 0; w * WORD_BITS < size; w++) {
        if (num_ids + __builtin_popcount(mask[w]) > most) return -1;
        for (uint32_t word = mask[w]; word; word &= word - 1) {
            int64_t token = w * WORD_BITS + __builtin_ctz(word);
            if (token < size) ids[num_ids++] = (int32_t)token;
        }
    }
    return num_ids;
}

struct rows_to_sample {
    float *logits;
    ptrdiff_t stride;
    const float *temperature;
    const int32_t *top_k;
    const float *top_p, *min_p;
    const int64_t *seed;
    const int32_t *choice;
    const int64_t *position, *rows;
    const uint32_t *masks;
    float *scratch;
    int64_t num_scratches;
    int64_t *tokens, *peaks, size;
};

static int64_t sample_row(const struct sampling *p, const float *logits, float *scratch, int64_t size, int64_t *peak) {
    *peak = argmax(logits, size);
    if (p->temperature == 0.0f || *peak < 0) return *peak;
    return draw(p, logits, NULL, *peak, scratch, scratch + size, size);
}

// As sample_row of the row without the banned tokens. What top_k and top_p keep is found by sums over places, so
// their rows are not gathered.
static int64_t sample_allowed(
    const struct sampling *p, float *logits, const uint32_t *mask, float *scratch, int64_t size, int64_t *peak) {
    int32_t *ids = (int32_t *)scratch;
    int64_t most = size / GATHERED_SHARE;
    int is_kept_whole = p->temperature > 0.0f && (p->top_k > 0 || p->top_p < 1.0f);
    int64_t num_ids = is_kept_whole ? -1 : gather(mask, size, ids, most);
    if (num_ids > 0) {
        float *allowed = scratch + most, *exponent = allowed + most;
        for (int64_t i = 0; i < num_ids; i++) allowed[i] = logits[ids[i]];
        int64_t first = argmax(allowed, num_ids);
        if (first < 0) return *peak = first;
        *peak = ids[first];
        return p->temperature == 0.0f ? *peak : draw(p, allowed, ids, first, exponent, exponent + most, num_ids);
    }
    ban(logits, mask, size);
    return sample_row(p, logits, scratch, size, peak);
}

static void sample_rows(const void *context, int64_t begin, int64_t end, int thread) {
    const struct rows_to_sample *s = context;
    // More threads may run than when the caller made the scratch.
    float *own = thread < s->num_scratches ? NULL : malloc(2 * s->size * sizeof(float));
    float *scratch = own ? own : s->scratch + thread * 2 * s->size;
    int64_t num_words = (s->size + WORD_BITS - 1) / WORD_BITS;
    for (int64_t i = begin; i < end; i++) {
        int64_t r = s->rows ? s->rows[i] : i;
        if (!own && thread >= s->num_scratches) {  // no memory
            s->tokens[r] = s->peaks[r] = NOT_A_TOKEN;
            continue;
        }
        float *logits = s->logits + r * s->stride;
        struct sampling p = {s->temperature[r], s->top_k[r], s->top_p[r], s->min_p[r], s->seed[r], s->choice[r], s->position[r]};
        s->tokens[r] = s->masks ? sample_allowed(&p, logits, s->masks + i * num_words, scratch, s->size, s->peaks + r)
                                : sample_row(&p, logits, scratch, s->size, s->peaks + r);
    }
    free(own);
}

// logits: [all rows, size] fp32, rows `stride` floats apart; rows: null, or [num_rows], distinct, those to sample;
// masks: null, or [num_rows, words], contiguous: bit v % 32 of word v / 32 allows token v, and logits of other tokens
// may become -inf; scratch: [num_scratches, 2 * size]; tokens, peaks (the first of the largest logits): [all rows].
EXPORT void baton_sample(
    float *logits, ptrdiff_t stride, const float *temperature, const int32_t *top_k, const float *top_p,
    const float *min_p, const int64_t *seed, const int32_t *choice, const int64_t *position, const int64_t *rows,
    const uint32_t *masks, float *scratch, int64_t num_scratches, int64_t *tokens, int64_t *peaks, int64_t num_rows,
    int64_t size) {
    struct rows_to_sample s = {
        logits, stride, temperature, top_k, top_p, min_p, seed, choice,
        position, rows, masks, scratch, num_scratches, tokens, peaks, size};
    parallel_for(num_rows, 1, sample_rows, &s);
}
