// What the kernels offer to each other; each is described where it is defined.
#pragma once

#include "simd.h"

struct attention {
    const char *query;             // [num_tokens, num_heads, head_dim]
    ptrdiff_t query_token, query_head;  // strides, bytes
    const char *pages;             // [num_pages, num_planes, num_kv_heads, 1 << page_shift] rows of kv_rows.h, the last axis contiguous
    ptrdiff_t page_stride, value_stride, head_stride;  // bytes; value_stride 0: values are a part of the keys
    const int32_t *page_table;     // [num_sequences, table_stride]
    ptrdiff_t table_stride;        // elements
    const int32_t *query_starts;   // [num_sequences + 1], cumulative
    const int32_t *context_lens;   // [num_sequences], keys in the pages, this chunk's included
    char *output;                  // [num_tokens, num_heads, value_dim], contiguous
    int64_t num_sequences, num_heads, num_kv_heads, head_dim, page_shift, window;  // window 0: none
    int64_t padded_dim;            // head_dim rounded up to whole vectors; rows are filled up with zeros
    int64_t value_dim;             // a value is the first so many elements of its row
    const float *sinks;            // [num_heads]: a score beside those of the keys, whose value is zero; or null
    float scale, softcap;          // a score s becomes softcap * tanh(s / softcap); softcap 0: none
    int is_bf16;
    int row_format;                // enum row_format
};

// The elements of a packed weight: of the dtype of x (PLAIN), or codes with scales. Inputs are rounded to 8 bits for the
// last two. As `WeightFormat` in quantised.py.
enum weight_format { PLAIN, INT8, INT4, INT4_ZEROS, FP8, MXFP4, INT8_ROUNDED, INT4_ROUNDED };

// The weight of a linear layer, as the caller has packed it.
struct weight {
    const char *packed;
    const float *bias;  // or null
    int64_t num_columns, num_inputs;
    int64_t group;  // inputs that share a scale; 0: PLAIN
    int64_t format;
};

// The weights of one projection of all experts: each has the same shape.
struct expert_weights {
    const char *const *packed;  // [num_experts]
    const float *bias;          // [num_experts, num_columns] or null
    int64_t num_columns, num_inputs, group, format;
};

void baton_linear_experts(
    const char *x, ptrdiff_t x_stride, const struct expert_weights *w, const int64_t *starts, int64_t num_experts, char *y,
    ptrdiff_t y_stride, int dtype, int y_dtype);
void baton_embedding(const int64_t *token_ids, const char *table, char *out, int64_t num_tokens, int64_t row_bytes);
void baton_rms_norm(
    const char *x, char *rows, ptrdiff_t outer, ptrdiff_t inner, const char *weight, char *y, ptrdiff_t y_outer,
    ptrdiff_t y_inner, int64_t num_outer, int64_t num_inner, int64_t width, float eps, int dtype, int weight_dtype);
void baton_rope(
    char *x, ptrdiff_t stride, ptrdiff_t head_stride, int64_t num_heads, const float *cos_sin, const int64_t *positions,
    int64_t num_tokens, int64_t head_dim, int dtype);
void baton_store_kv(
    const char *key, ptrdiff_t key_stride, const char *value, ptrdiff_t value_stride, char *pages,
    ptrdiff_t page_stride, ptrdiff_t kv_stride, ptrdiff_t head_stride, ptrdiff_t row_stride, const int64_t *slots,
    int64_t num_tokens, int64_t num_kv_heads, int64_t page_size, int64_t key_dim, int64_t value_dim, int64_t element_bytes,
    int row_format);
void baton_attention(const struct attention *p, int64_t *tile_starts);

// The gate of a feed-forward layer; alpha and limit are of CLAMPED_SWIGLU alone.
enum activation_kind { SILU = 0, GELU_TANH = 1, CLAMPED_SWIGLU = 2 };
struct activation {
    int kind;
    float alpha, limit;
};
void baton_gated(
    const char *gate_up, char *y, int64_t num_rows, int64_t width, int has_up, int kind, float alpha, float limit, int dtype);

// y = x @ weight^T + bias. x is of the element type `dtype`, y of `y_dtype`; strides are bytes.
typedef void multiply_fn(
    const struct weight *w, const char *x, ptrdiff_t x_stride, char *y, ptrdiff_t y_stride, int64_t num_rows, int splits,
    int dtype, int y_dtype);
multiply_fn multiply_plain, multiply_codes, multiply_rounded;  // of the formats

INLINE void multiply_weight(
    const struct weight *w, const char *x, ptrdiff_t x_stride, char *y, ptrdiff_t y_stride, int64_t num_rows, int splits,
    int dtype, int y_dtype) {
    multiply_fn *multiply = w->format >= INT8_ROUNDED ? multiply_rounded : w->format ? multiply_codes : multiply_plain;
    multiply(w, x, x_stride, y, y_stride, num_rows, splits, dtype, y_dtype);
}

// A mixture of experts. This rank has the experts [first, first + num_here). y is of the element type `y_dtype`, all else of
// `dtype`.
struct experts {
    struct expert_weights gate_up, down[2];  // the bias of down belongs to down[0]
    int64_t num_experts, first, num_here, top_k;
    int64_t num_groups, num_chosen_groups;  // of experts, and those of which a token's experts are chosen
    const float *bias;  // [num_experts] of the scores by which experts are chosen, or null
    float scale;        // of a token's weights
    int uses_sigmoid;   // scores are sigmoids of the logits, otherwise their softmax
    struct activation activation;
    int splits;
    int keeps_splits;  // y has a sum for each split of down, otherwise their sum
    int normalises, dtype, y_dtype;
};

void baton_experts(
    const struct experts *e, const char *x, const float *logits, int64_t logits_stride, const char *shared, char *y,
    int64_t num_tokens, char *scratch);
