// All layers of a decoder in one call, for a rank that works alone: what a CUDA graph is to a GPU.
//
// The arithmetic is that of the single kernels in the order in which engine/models/decoder.py calls them, so the
// result is the same to the bit; what is saved is the way through Python between them.
#include "kv_rows.h"
#include "ops.h"

struct layer {
    const char *input_norm, *post_norm;
    const char *query_norm, *key_norm;  // or null
    struct weight qkv, out;
    struct weight gate_up, down;      // of the expert that all tokens share, where there are others; not packed: none
    struct weight router;
    const struct experts *experts;    // or null
    int64_t window;  // 0: none
};

struct decoder {
    const struct layer *layers;
    const char *final_norm;
    const float *cos_sin;  // [max_positions, head_dim]
    int64_t num_layers, hidden, num_heads, num_kv_heads, head_dim;
    int64_t intermediate;  // the most of any layer
    float eps;
    int dtype, splits;
};

struct step {
    char *residual;            // [num_tokens, hidden]: the embeddings, used up
    char *output;              // [num_rows, hidden]: normed final states of the wanted rows
    const int64_t *positions, *slots;  // [num_tokens]
    const int64_t *rows;       // [num_rows], ascending
    int64_t num_tokens, num_rows;
    char *pool;                // [num_pages, num_layers, 2, num_kv_heads, page_size] rows, contiguous
    int64_t page_size;
    struct attention attention;  // the batch filled in
    int64_t *tile_starts;      // scratch of num_sequences + 1
    char *scratch;             // num_tokens rows of everything in struct buffers
    char *experts_scratch;     // as in baton_experts_sizes
    int64_t first_layer, stop_layer;  // a pass may be cut into several calls, in the order of the layers
};

// Where the intermediate results of a step lie in its scratch.
struct buffers {
    char *x, *qkv, *attended, *gate_up, *activated, *shared;
    float *logits;  // of the router
};

INLINE int64_t element_bytes(const struct decoder *d) { return d->dtype == BF16 ? 2 : 4; }
INLINE int64_t qkv_width(const struct decoder *d) { return (d->num_heads + 2 * d->num_kv_heads) * d->head_dim; }

static struct buffers lay_out(const struct decoder *d, char *scratch, int64_t num_tokens) {
    int64_t token_bytes = num_tokens * element_bytes(d);
    struct buffers b = {.x = scratch};
    b.qkv = b.x + token_bytes * d->hidden;
    b.attended = b.qkv + token_bytes * qkv_width(d);
    b.gate_up = b.attended + token_bytes * d->num_heads * d->head_dim;
    b.activated = b.gate_up + token_bytes * 2 * d->intermediate;
    b.shared = b.activated + token_bytes * d->intermediate;
    b.logits = (float *)(b.shared + token_bytes * d->hidden);
    return b;
}

static void multiply(const struct decoder *d, const struct weight *w, const char *x, char *y, int64_t num_rows, int splits) {
    int64_t size = element_bytes(d);
    multiply_weight(w, x, w->num_inputs * size, y, w->num_columns * size, num_rows, splits, d->dtype, d->dtype);
}

// residual += x, unless x is null; then y = norm(residual).
static void norm(const struct decoder *d, const char *x, char *residual, const char *weight, char *y, int64_t num_rows) {
    int64_t row_bytes = d->hidden * element_bytes(d);
    baton_rms_norm(x, residual, row_bytes, 0, weight, y, row_bytes, 0, num_rows, 1, d->hidden, d->eps, d->dtype, d->dtype);
}

// x -> attended; the layer's keys and values go to their pages.
static void attend(const struct decoder *d, const struct layer *l, const struct step *s, const struct buffers *b, int64_t index) {
    int64_t size = element_bytes(d), head_bytes = d->head_dim * size, stride = qkv_width(d) * size;
    char *query = b->qkv, *key = query + d->num_heads * head_bytes, *value = key + d->num_kv_heads * head_bytes;
    multiply(d, &l->qkv, b->x, b->qkv, s->num_tokens, 1);
    if (l->query_norm) {
        baton_rms_norm(0, query, stride, head_bytes, l->query_norm, query, stride, head_bytes, s->num_tokens, d->num_heads,
                       d->head_dim, d->eps, d->dtype, d->dtype);
        baton_rms_norm(0, key, stride, head_bytes, l->key_norm, key, stride, head_bytes, s->num_tokens, d->num_kv_heads,
                       d->head_dim, d->eps, d->dtype, d->dtype);
    }
    baton_rope(query, stride, head_bytes, d->num_heads, d->cos_sin, s->positions, s->num_tokens, d->head_dim, d->dtype);
    baton_rope(key, stride, head_bytes, d->num_kv_heads, d->cos_sin, s->positions, s->num_tokens, d->head_dim, d->dtype);
    struct attention a = s->attention;
    int64_t row_bytes = row_bytes_of(d->head_dim, d->dtype == BF16, a.row_format);
    a.head_stride = s->page_size * row_bytes;
    a.value_stride = d->num_kv_heads * a.head_stride;
    a.page_stride = d->num_layers * 2 * a.value_stride;
    char *pages = s->pool + index * 2 * a.value_stride;
    baton_store_kv(key, stride, value, stride, pages, a.page_stride, a.value_stride, a.head_stride, row_bytes, s->slots,
                   s->num_tokens, d->num_kv_heads, s->page_size, d->head_dim, d->head_dim, size, a.row_format);
    a.query = query;
    a.query_token = stride;
    a.query_head = head_bytes;
    a.pages = pages;
    a.output = b->attended;
    a.window = l->window;
    baton_attention(&a, s->tile_starts);
}

// Past the last layer's keys and values only the wanted rows matter: move them to the front.
static void keep_rows(const struct decoder *d, const struct step *s, const struct buffers *b) {
    int64_t attended_bytes = d->num_heads * d->head_dim * element_bytes(d), hidden_bytes = d->hidden * element_bytes(d);
    for (int64_t r = 0; r < s->num_rows; r++) {
        memmove(b->attended + r * attended_bytes, b->attended + s->rows[r] * attended_bytes, attended_bytes);
        memmove(s->residual + r * hidden_bytes, s->residual + s->rows[r] * hidden_bytes, hidden_bytes);
    }
}

// x -> x.
static void feed_forward(
    const struct decoder *d, const struct layer *l, const struct step *s, const struct buffers *b, int64_t num_rows) {
    if (l->gate_up.packed) {
        multiply(d, &l->gate_up, b->x, b->gate_up, num_rows, 1);
        baton_gated(b->gate_up, b->activated, num_rows, l->gate_up.num_columns / 2, 1, SILU, 0, 0, d->dtype);
        multiply(d, &l->down, b->activated, l->experts ? b->shared : b->x, num_rows, d->splits);
    }
    if (l->experts) {
        int64_t num_logits = l->router.num_columns;
        multiply_weight(&l->router, b->x, d->hidden * element_bytes(d), (char *)b->logits, num_logits * sizeof(float), num_rows, 1,
                        d->dtype, F32);
        baton_experts(l->experts, b->x, b->logits, num_logits, l->gate_up.packed ? b->shared : 0, b->x, num_rows, s->experts_scratch);
    }
}

// What the callers' declarations are compared with: sizes of attention, layer, decoder and step.
EXPORT void baton_struct_sizes(int64_t *sizes) {
    sizes[0] = sizeof(struct attention);
    sizes[1] = sizeof(struct layer);
    sizes[2] = sizeof(struct decoder);
    sizes[3] = sizeof(struct step);
}

EXPORT void baton_decoder(const struct decoder *d, const struct step *s) {
    struct buffers b = lay_out(d, s->scratch, s->num_tokens);
    int64_t num_rows = s->num_tokens;
    if (s->first_layer == 0)  // else b.x is as the call before has left it
        norm(d, 0, s->residual, d->layers[0].input_norm, b.x, num_rows);
    for (int64_t index = s->first_layer; index < s->stop_layer; index++) {
        const struct layer *l = d->layers + index;
        int is_last = index + 1 == d->num_layers;
        attend(d, l, s, &b, index);
        if (is_last && s->num_rows < s->num_tokens) {
            keep_rows(d, s, &b);
            num_rows = s->num_rows;
        }
        multiply(d, &l->out, b.attended, b.x, num_rows, d->splits);
        norm(d, b.x, s->residual, l->post_norm, b.x, num_rows);
        feed_forward(d, l, s, &b, num_rows);
        norm(d, b.x, s->residual, is_last ? d->final_norm : l[1].input_norm, is_last ? s->output : b.x, num_rows);
    }
}
