// What Python calls: plain C, no exceptions across it. Every call that computes takes the pool for itself.
#include <algorithm>
#include <mutex>

#include "attention.h"
#include "decoder.h"
#include "product.h"
#include "rows.h"

using namespace moonpool;

namespace {



struct Session {
    Session() : pool(Pool::get()), hold(pool.door()) {}
    Pool &pool;
    std::lock_guard<std::mutex> hold;
};

template <class Work> void each_row(Pool &pool, int64_t rows, int64_t width, const Work &work) {
    const int64_t together = std::max<int64_t>(1, 16384 / width);
    pool.run(static_cast<int>((rows + together - 1) / together), [&](int tile, int) {
        for (int64_t row = tile * together; row < std::min(rows, (tile + 1) * together); ++row) work(row);
    });
}

} // namespace

extern "C" {

/// The digest of the sources that this was compiled from.
const char *mp_sources() { return MOONPOOL_SOURCES; }

void mp_set_threads(int threads) { Pool::get().resize(threads); }

int64_t mp_packed_bytes(int kind, int rows, int columns) { return packed_bytes(static_cast<Kind>(kind), rows, columns); }

int mp_pack(int source, const void *from, int kind, uint8_t *to, int first, int rows, int columns) {
    return pack(static_cast<Source>(source), from, static_cast<Kind>(kind), to, first, rows, columns);
}

void mp_linear(const Weights *weights, const bf16 *x, int64_t stride, int rows, bf16 *y) {
    Session session;
    static Buffer memory;
    const int blocks = weights->columns / kBlock;
    float *sums = memory.of<float>(static_cast<int64_t>(rows) * blocks);
    if (weights->kind == Kind::kNibble)
        each_row(session.pool, rows, weights->columns,
                 [&](int64_t row) { block_sums(x + row * stride, blocks, sums + row * blocks); });
    product(session.pool, *weights, false, Rows{x, stride, sums, rows}, Into<bf16, false>{y, weights->rows, *weights});
}

/// y = norm of x; with a residual, of residual + x, which is left in the residual. Weights are float32 when `wide`.
void mp_rms_norm(const bf16 *x, int64_t stride, bf16 *residual, const void *weight, int wide, float eps, int64_t rows,
                 int width, bf16 *y) {
    Session session;
    static Buffer memory;
    float *weights = memory.of<float>(width);
    if (wide) copy_row(static_cast<const float *>(weight), width, weights);
    else copy_row(static_cast<const bf16 *>(weight), width, weights);
    each_row(session.pool, rows, width, [&](int64_t row) {
        const bf16 *from = x + row * stride;
        if (residual) {
            bf16 *total = residual + row * width;
            for (int column = 0; column < width; column += kLanes) {
                const int left = width - column;
                store_some(total + column, _mm512_add_ps(load_some(total + column, left), load_some(from + column, left)),
                           left);
            }
            from = total;
        }
        rms_norm(from, weights, eps, width, y + row * width);
    });
}

/// x [tokens, heads, head], rows `stride` apart; cosines and sines [tokens, head / 2].
void mp_rope(const bf16 *x, int64_t stride, const bf16 *cosines, const bf16 *sines, int64_t tokens, int heads, int head,
             bf16 *y) {
    Session session;
    each_row(session.pool, tokens, static_cast<int64_t>(heads) * head, [&](int64_t token) {
        float cosine[kMaxHead], sine[kMaxHead];
        copy_row(cosines + token * (head / 2), head / 2, cosine);
        copy_row(sines + token * (head / 2), head / 2, sine);
        for (int number = 0; number < heads; ++number)
            rope(x + token * stride + number * head, cosine, sine, head, y + (token * heads + number) * head);
    });
}

/// The place of the largest of each row, the first of equals; 0 where nothing compares.
void mp_argmax(const float *x, int rows, int width, int32_t *found) {
    Session session;
    each_row(session.pool, rows, width, [&](int64_t row) { found[row] = argmax(x + row * width, width); });
}

void mp_silu_mul(const bf16 *x, int64_t tokens, int width, bf16 *y) {
    Session session;
    each_row(session.pool, tokens, width, [&](int64_t token) {
        const bf16 *gate = x + token * 2 * width, *up = gate + width;
        for (int column = 0; column < width; column += kLanes) {
            const int left = width - column;
            store_some(y + token * width + column,
                       _mm512_mul_ps(silu(load_some(gate + column, left)), load_some(up + column, left)), left);
        }
    });
}

/// Rows [tokens, width], `stride` apart, to slots of a plane: block_stride elements per block.
void mp_write_rows(const bf16 *rows, int64_t stride, const int32_t *blocks, const int32_t *offsets, int64_t tokens,
                   int width, bf16 *plane, int64_t block_stride) {
    Session session;
    each_row(session.pool, tokens, width, [&](int64_t token) {
        copy_row(rows + token * stride, width,
                 plane + blocks[token] * block_stride + static_cast<int64_t>(offsets[token]) * width);
    });
}

void mp_attention(const Attention *what, const Cache *cache) {
    Session session;
    attend(session.pool, *what, *cache);
}

void mp_decoder(const Decoder *decoder, const Step *step) {
    Session session;
    run(session.pool, *decoder, *step);
}
}
