// A whole step of a pre-norm decoder with gated feed-forward layers: from token ids to logits in one call.
//
// The residual stream is float32; what products read is rounded to bfloat16, as are keys and values.
#pragma once

#include "attention.h"
#include "weights.h"

namespace moonpool {

struct Layer {
    const float *input_norm;          // [hidden]
    const Weights *qkv;               // hidden → (heads + 2 kv_heads) * head
    const float *q_norm;              // [head] each, or null
    const float *k_norm;
    const float *sinks;               // [heads], or null
    const Weights *out;               // heads * head → hidden
    const float *behind_attention;    // [hidden], or null: a norm of what attention adds
    const float *post_norm;           // [hidden]
    const Weights *gate_up;           // hidden → 2 * ffn
    const Weights *down;              // ffn → hidden
    const float *behind_feed_forward; // [hidden], or null
    const float *cosines, *sines;     // [positions, head / 2]
    bf16 *keys, *values;
    int64_t key_stride, value_stride; // in elements per block
    int32_t block_rows;
    int32_t group;                    // whose tables it uses
    int32_t window;                   // 0: all of the text
    int32_t pad;
};

enum class Activation : int32_t { kSilu = 0, kGeluTanh = 1 };

struct Decoder {
    int32_t layer_count, hidden, heads, kv_heads, head, ffn, vocabulary;
    Activation activation;
    float eps, scale, embedding_scale;
    int32_t pad;
    const Layer *layers;
    const bf16 *embedding; // [vocabulary, hidden]
    const float *norm;     // [hidden]
    const Weights *output; // hidden → vocabulary
};

struct Step {
    int32_t tokens, chunk_count, wanted, pad;
    const int32_t *ids;         // [tokens]
    const int32_t *positions;   // [tokens]
    const Chunk *const *chunks; // by group
    const int32_t *rows;        // [wanted]: rows whose logits are wanted
    float *logits;              // [wanted, vocabulary]
};

void run(Pool &pool, const Decoder &decoder, const Step &step);

} // namespace moonpool
