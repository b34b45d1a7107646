// The experts of a mixture: each token goes through `top_k` of the feed-forward layers, and their outputs are summed.
//
//   1. route: logits of all experts -> for each token the experts with the highest scores, and their weights
//   2. sort: a row for each token and expert of this rank; the rows of an expert lie together, earlier tokens first
//   3. multiply: gate and up, activation, down; the experts with rows share the threads
//   4. combine: for each token the weighted sum of its rows: of the first half of all experts, then of the second half,
//      both in descending order of the logits
//
// All of it is in fp32 and in an order that depends on the token alone. `down` is cut along its inputs into `splits`
// weights, whose sums are kept apart until 4 has added the experts. So two ranks add the same numbers as one, whether
// they split each expert or have half of the experts each.
#include "ops.h"

// Where the intermediate results lie in the scratch. There are at most R = num_tokens * top_k rows, sorted by expert.
struct plan {
    int64_t *starts;   // [num_here + 1] first row of each expert of this rank
    int64_t *tokens;   // [R] of each row
    int64_t *row_of;   // [num_tokens, top_k] row of each choice; -1: of another rank's expert
    int64_t *chosen;   // [num_tokens, top_k] experts
    float *weights;    // [num_tokens, top_k]
    char *x, *gate_up, *activated;
    float *down;       // [splits, R, num_columns]
};

INLINE char *take(char **rest, int64_t num_bytes) {
    char *piece = *rest;
    *rest += (num_bytes + 63) / 64 * 64;
    return piece;
}

#define TOKENS 1024  // at a time: the rows of a token take much memory, and enough rows share a weight

static int64_t lay_out(const struct experts *e, int64_t num_tokens, char *scratch, struct plan *p) {
    int64_t num_rows = num_tokens * e->top_k, size = e->dtype == BF16 ? 2 : 4;
    char *rest = scratch;
    p->starts = (int64_t *)take(&rest, (e->num_here + 1) * sizeof(int64_t));
    p->tokens = (int64_t *)take(&rest, num_rows * sizeof(int64_t));
    p->row_of = (int64_t *)take(&rest, num_rows * sizeof(int64_t));
    p->chosen = (int64_t *)take(&rest, num_rows * sizeof(int64_t));
    p->weights = (float *)take(&rest, num_rows * sizeof(float));
    p->x = take(&rest, num_rows * e->gate_up.num_inputs * size);
    p->gate_up = take(&rest, num_rows * e->gate_up.num_columns * size);
    p->activated = take(&rest, num_rows * e->gate_up.num_columns / 2 * size);
    p->down = (float *)take(&rest, e->splits * num_rows * e->down[0].num_columns * sizeof(float));
    return rest - scratch;
}

struct routing {
    const struct experts *experts;
    const float *logits;
    int64_t stride;
    const struct plan *plan;
};

// The highest score that is not taken, which then is; of equal ones the first.
INLINE int64_t take_best(const float *scores, char *taken, int64_t count) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; i++)
        if (!taken[i] && (best < 0 || scores[i] > scores[best])) best = i;
    taken[best] = 1;
    return best;
}

INLINE float sigmoid(float logit) { return 1.0f / (1.0f + exp_lanes(splat(-logit))[0]); }

// Takes the experts of all groups but the best ones. A group has the score of its best expert; of sigmoids, those of its best
// two together.
static void take_other_groups(const struct experts *e, const float *scores, char *taken) {
    int64_t size = e->num_experts / e->num_groups;
    float group_scores[e->num_groups];
    char chosen[e->num_groups];
    memset(chosen, 0, e->num_groups);
    for (int64_t g = 0; g < e->num_groups; g++) {
        const float *of_group = scores + g * size;
        char *ranked = taken + g * size;
        group_scores[g] = of_group[take_best(of_group, ranked, size)];
        if (e->uses_sigmoid) group_scores[g] += of_group[take_best(of_group, ranked, size)];
    }
    memset(taken, 1, e->num_experts);
    for (int64_t i = 0; i < e->num_chosen_groups; i++) memset(taken + take_best(group_scores, chosen, e->num_groups) * size, 0, size);
}

// The sum of exp(logit - highest) over all experts.
INLINE float sum_exponentials(const float *logits, float highest, int64_t num_experts) {
    f32s sums[VECTORS] = {{0}};
    for (int64_t i = 0; i < num_experts; i += CHAINS) {
        float chains[CHAINS];
        for (int64_t j = 0; j < CHAINS; j++) chains[j] = i + j < num_experts ? logits[i + j] - highest : -INFINITY;
        for (int v = 0; v < VECTORS; v++) sums[v] += exp_lanes(load_f32(chains + v * LANES));
    }
    return sum_chains(sums);
}

static void route_tokens(const void *context, int64_t begin, int64_t end, int thread) {
    const struct routing *r = context;
    const struct experts *e = r->experts;
    char taken[e->num_experts];
    float biased[e->num_experts];
    (void)thread;
    for (int64_t t = begin; t < end; t++) {
        const float *logits = r->logits + t * r->stride, *scores = e->uses_sigmoid ? biased : logits;
        int64_t *chosen = r->plan->chosen + t * e->top_k;
        float *weights = r->plan->weights + t * e->top_k, total = 0;
        memset(taken, 0, e->num_experts);
        for (int64_t i = 0; e->uses_sigmoid && i < e->num_experts; i++) biased[i] = sigmoid(logits[i]) + (e->bias ? e->bias[i] : 0);
        if (e->num_groups > 1) take_other_groups(e, scores, taken);
        for (int64_t j = 0; j < e->top_k; j++) {
            chosen[j] = take_best(scores, taken, e->num_experts);
            float logit = logits[chosen[j]];
            weights[j] = e->uses_sigmoid ? sigmoid(logit) : exp_lanes(splat(logit - logits[chosen[0]]))[0];
            total += weights[j];
        }
        if (!e->normalises) total = e->uses_sigmoid ? 1 : sum_exponentials(logits, logits[chosen[0]], e->num_experts);
        for (int64_t j = 0; j < e->top_k; j++) weights[j] = weights[j] / total * e->scale;
    }
}

INLINE int is_here(const struct experts *e, int64_t expert) { return expert >= e->first && expert < e->first + e->num_here; }

// A counting sort: rows of an expert in the order of their tokens. Returns the number of rows.
static int64_t sort_rows(const struct experts *e, int64_t num_tokens, const struct plan *p) {
    int64_t next[e->num_here];
    memset(p->starts, 0, (e->num_here + 1) * sizeof(int64_t));
    for (int64_t i = 0; i < num_tokens * e->top_k; i++)
        if (is_here(e, p->chosen[i])) p->starts[p->chosen[i] - e->first + 1]++;
    for (int64_t expert = 0; expert < e->num_here; expert++) {
        p->starts[expert + 1] += p->starts[expert];
        next[expert] = p->starts[expert];
    }
    for (int64_t i = 0; i < num_tokens * e->top_k; i++) {
        p->row_of[i] = is_here(e, p->chosen[i]) ? next[p->chosen[i] - e->first]++ : -1;
        if (p->row_of[i] >= 0) p->tokens[p->row_of[i]] = i / e->top_k;
    }
    return p->starts[e->num_here];
}

struct combining {
    const struct experts *experts;
    const struct routing *routing;
    const char *shared;
    int64_t num_rows;  // of a split in plan.down
    char *y;
    int64_t split_bytes;  // of y, from one split to the next
};

// The rows of one token: [0, middle) of the first half of all experts, [middle, count) of the second half.
struct terms {
    int64_t *rows, middle, count;
    float *weights;
};

static void find_terms(const struct combining *c, int64_t token, struct terms *terms) {
    const struct experts *e = c->experts;
    const struct plan *p = c->routing->plan;
    int64_t num_first_half = (e->num_experts + 1) / 2;
    terms->count = 0;
    for (int half = 0; half < 2; half++) {
        terms->middle = terms->count;
        for (int64_t i = token * e->top_k; i < (token + 1) * e->top_k; i++) {
            if (p->row_of[i] < 0 || (p->chosen[i] >= num_first_half) != half) continue;
            terms->rows[terms->count] = p->row_of[i];
            terms->weights[terms->count++] = p->weights[i];
        }
    }
}

// The sum of the terms [begin, end) of one split, a vector of columns.
INLINE f32s sum_terms(const struct combining *c, const struct terms *terms, int64_t begin, int64_t end, int split, int64_t i, int64_t num_lanes) {
    int64_t width = c->experts->down[0].num_columns;
    f32s sum = {0};
    for (int64_t j = begin; j < end; j++) {
        const char *row = (const char *)(c->routing->plan->down + (split * c->num_rows + terms->rows[j]) * width);
        sum = multiply_add(splat(terms->weights[j]), load_some(row, i, num_lanes, 0), sum);
    }
    return sum;
}

static void combine_tokens(const void *context, int64_t begin, int64_t end, int thread) {
    const struct combining *c = context;
    const struct experts *e = c->experts;
    int64_t width = e->down[0].num_columns, y_bytes = width * (e->y_dtype == BF16 ? 2 : 4), rows[e->top_k];
    float weights[e->top_k];
    struct terms terms = {.rows = rows, .weights = weights};
    (void)thread;
    for (int64_t t = begin; t < end; t++) {
        find_terms(c, t, &terms);
        char *y = c->y + t * y_bytes;
        f32s gate = {0};
        if (c->shared) gate = splat(1.0f) / (splat(1.0f) + exp_lanes(-splat(c->routing->logits[t * c->routing->stride + e->num_experts])));
        for (int64_t i = 0; i < width; i += LANES) {
            int64_t num_lanes = MIN(width - i, LANES);
            f32s total = {0};
            for (int split = 0; split < e->splits; split++) {
                f32s sum = sum_terms(c, &terms, 0, terms.middle, split, i, num_lanes);
                if (c->shared && !split) sum = multiply_add(gate, load_some(c->shared, t * width + i, num_lanes, e->dtype == BF16), sum);
                sum = sum + sum_terms(c, &terms, terms.middle, terms.count, split, i, num_lanes);
                if (e->keeps_splits) store_some(y + split * c->split_bytes, i, sum, num_lanes, e->y_dtype == BF16);
                else total = split ? total + sum : sum;
            }
            if (!e->keeps_splits) store_some(y, i, total, num_lanes, e->y_dtype == BF16);
        }
    }
}

#define ROUTING_WORK 4096  // logits, and
#define COMBINING_WORK 16384  // products worth a part of their own

// What the callers' declaration is compared with, and the scratch for so many tokens.
EXPORT void baton_experts_sizes(const struct experts *e, int64_t num_tokens, int64_t *sizes) {
    struct plan plan;
    sizes[0] = sizeof(struct experts);
    sizes[1] = lay_out(e, MIN(num_tokens, TOKENS), 0, &plan);
}

// From x to the rows of plan.down.
static void multiply_rows(const struct experts *e, const char *x, const struct plan *p, int64_t num_rows, int64_t split_rows) {
    int64_t size = e->dtype == BF16 ? 2 : 4, x_bytes = e->gate_up.num_inputs * size;
    int64_t inner = e->gate_up.num_columns / 2, width = e->down[0].num_columns;
    baton_embedding(p->tokens, x, p->x, num_rows, x_bytes);
    baton_linear_experts(p->x, x_bytes, &e->gate_up, p->starts, e->num_here, p->gate_up, 2 * inner * size, e->dtype, e->dtype);
    baton_gated(p->gate_up, p->activated, num_rows, inner, 1, e->activation.kind, e->activation.alpha, e->activation.limit, e->dtype);
    for (int split = 0; split < e->splits; split++)
        baton_linear_experts(p->activated + split * e->down[0].num_inputs * size, inner * size, e->down + split, p->starts,
                             e->num_here, (char *)(p->down + split * split_rows * width), width * sizeof(float), e->dtype, F32);
}

static void run_tokens(
    const struct experts *e, const char *x, const float *logits, int64_t logits_stride, const char *shared, char *y,
    int64_t split_bytes, int64_t num_tokens, char *scratch) {
    struct plan p;
    lay_out(e, num_tokens, scratch, &p);
    int64_t most_rows = num_tokens * e->top_k;
    struct routing r = {e, logits, logits_stride, &p};
    parallel_for(num_tokens, grain_of(e->num_experts * e->top_k, ROUTING_WORK), route_tokens, &r);
    int64_t num_rows = sort_rows(e, num_tokens, &p);
    if (num_rows) multiply_rows(e, x, &p, num_rows, most_rows);
    struct combining c = {e, &r, shared, most_rows, y, split_bytes};
    parallel_for(num_tokens, grain_of(e->top_k * e->splits * e->down[0].num_columns, COMBINING_WORK), combine_tokens, &c);
}

// x: [num_tokens, num_inputs] of `dtype`; logits: [num_tokens, logits_stride], those of the experts first; y: [num_tokens,
// num_columns] of `y_dtype`, with `keeps_splits` [splits, num_tokens, num_columns]. shared: [num_tokens, num_columns] of
// `dtype`, the output of an expert that all tokens share, which is weighed by the sigmoid of the logit after those of the
// experts; or null. y may be x.
EXPORT void baton_experts(
    const struct experts *e, const char *x, const float *logits, int64_t logits_stride, const char *shared, char *y,
    int64_t num_tokens, char *scratch) {
    int64_t size = e->dtype == BF16 ? 2 : 4, width = e->down[0].num_columns, y_bytes = width * (e->y_dtype == BF16 ? 2 : 4);
    for (int64_t t = 0; t < num_tokens; t += TOKENS)
        run_tokens(e, x + t * e->gate_up.num_inputs * size, logits + t * logits_stride, logits_stride,
                   shared ? shared + t * width * size : 0, y + t * y_bytes, num_tokens * y_bytes, MIN(TOKENS, num_tokens - t), scratch);
}
