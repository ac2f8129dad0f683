// Causal attention over paged keys and values, for prefills and decodes alike.
//
// Keys are taken in blocks of kKeys positions, and blocks in segments of kSegment, both counted from the beginning of the
// text. A segment is a running softmax (Dao et al., FlashAttention, 2022); segments are merged in their order. A row goes
// through the same sums whatever rows are computed beside it, so a token's result does not depend on how the text was cut
// into chunks. What a row must not see gets the weight 0, which changes no sum.
#pragma once

#include "pool.h"
#include "simd.h"

namespace moonpool {

constexpr int kKeys = 64, kSegment = 256;
constexpr int kMaxHead = 256;

/// A run of new tokens of one text. `table` holds the ids of its blocks.
struct Chunk {
    int32_t row;   // of the step
    int32_t count; // of tokens
    int32_t start; // position of the first
    int32_t pad;
    const int32_t *table;
};

/// A layer's cache: row r of block b of head k begins at b * block_stride + (r * kv_heads + k) * head, in elements.
struct Cache {
    bf16 *keys;
    bf16 *values;
    int64_t key_stride;
    int64_t value_stride;
    int32_t block_rows;
    int32_t kv_heads;
    int32_t head;

    int64_t row(int64_t stride, const int32_t *table, int position) const {
        return table[position / block_rows] * stride + static_cast<int64_t>(position % block_rows) * kv_heads * head;
    }
};

/// The rows of consecutive positions, one after the other, without a division for each.
class Walk {
public:
    Walk(const Cache &cache, const bf16 *base, int64_t stride, const int32_t *table, int position, int kv_head)
        : base_(base + static_cast<int64_t>(kv_head) * cache.head), stride_(stride),
          step_(static_cast<int64_t>(cache.kv_heads) * cache.head),
          block_rows_(cache.block_rows), entry_(table + position / cache.block_rows), left_(position % cache.block_rows) {
        at_ = base_ + *entry_ * stride_ + left_ * step_;
        left_ = block_rows_ - left_;
    }

    const bf16 *next() {
        if (!left_) {
            at_ = base_ + *++entry_ * stride_;
            left_ = block_rows_;
        }
        --left_;
        const bf16 *row = at_;
        at_ += step_;
        return row;
    }

private:
    const bf16 *base_;
    int64_t stride_, step_;
    int block_rows_;
    const int32_t *entry_;
    int left_;
    const bf16 *at_;
};

struct Attention {
    const Chunk *chunks;
    int chunk_count;
    int heads;
    int window;         // 0: all of the text
    float scale;
    const float *sinks; // [heads], or null
    const bf16 *q;      // [tokens, heads, head], rows `q_stride` apart
    int64_t q_stride;
    bf16 *out;          // [tokens, heads * head]
};

void attend(Pool &pool, const Attention &what, const Cache &cache);

} // namespace moonpool
