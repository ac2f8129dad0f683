#include "decoder.h"

#include "product.h"
#include "rows.h"
#include "scratch.h"

namespace moonpool {
namespace {

/// Loops over fewer elements than this are shorter than sharing them would take.
constexpr int64_t kWorthSharing = 16384;

/// work(row, thread) for every row of `width` elements.
template <class Work> void each_row(Pool &pool, int rows, int width, const Work &work) {
    const int together = static_cast<int>(std::max<int64_t>(1, kWorthSharing / width));
    pool.run(ceil_div(rows, together), [&](int tile, int thread) {
        for (int row = tile * together; row < std::min(rows, (tile + 1) * together); ++row) work(row, thread);
    });
}

/// The step's activations.
struct Work {
    Buffer residual, branch, normed, sums, qkv, q, attended, gated;
};

class Run {
public:
    Run(Pool &pool, const Decoder &decoder, const Step &step) : pool_(pool), d_(decoder), step_(step) {
        static Work work;
        const int64_t tokens = step.tokens;
        const int widest = std::max({d_.hidden, d_.ffn, d_.heads * d_.head});
        residual_ = work.residual.of<float>(tokens * d_.hidden);
        branch_ = work.branch.of<float>(tokens * d_.hidden);
        normed_ = work.normed.of<bf16>(tokens * d_.hidden);
        sums_ = work.sums.of<float>(tokens * (widest / kBlock));
        qkv_ = work.qkv.of<float>(tokens * qkv_width());
        q_ = work.q.of<bf16>(tokens * d_.heads * d_.head);
        attended_ = work.attended.of<bf16>(tokens * d_.heads * d_.head);
        gated_ = work.gated.of<bf16>(tokens * d_.ffn);
    }

    void all() {
        const __m512 scale = _mm512_set1_ps(d_.embedding_scale);
        each_row(pool_, step_.tokens, d_.hidden, [&](int row, int) {
            const bf16 *from = d_.embedding + static_cast<int64_t>(step_.ids[row]) * d_.hidden;
            float *to = residual(row);
            for (int column = 0; column < d_.hidden; column += kLanes) {
                const int left = d_.hidden - column;
                store_some(to + column, _mm512_mul_ps(load_some(from + column, left), scale), left);
            }
        });
        for (int number = 0; number < d_.layer_count; ++number) layer(d_.layers[number]);
        logits();
    }

private:
    int qkv_width() const { return (d_.heads + 2 * d_.kv_heads) * d_.head; }
    float *residual(int row) const { return residual_ + static_cast<int64_t>(row) * d_.hidden; }

    void layer(const Layer &layer) {
        const Chunk *chunks = step_.chunks[layer.group];
        const Cache cache{layer.keys,       layer.values, layer.key_stride, layer.value_stride,
                          layer.block_rows, d_.kv_heads,  d_.head};
        norm(layer.input_norm);
        product(pool_, *layer.qkv, false, rows(normed_, d_.hidden), Into<float, false>{qkv_, qkv_width(), *layer.qkv});
        turn(layer, cache, chunks);
        const Attention attention{chunks, step_.chunk_count, d_.heads, layer.window, d_.scale, layer.sinks, q_,
                                  static_cast<int64_t>(d_.heads) * d_.head, attended_};
        attend(pool_, attention, cache);
        add_product(*layer.out, attended_, d_.heads * d_.head, layer.behind_attention);
        norm(layer.post_norm);
        if (d_.activation == Activation::kSilu) gate<Silu>(*layer.gate_up);
        else gate<GeluTanh>(*layer.gate_up);
        add_product(*layer.down, gated_, d_.ffn, layer.behind_feed_forward);
    }

    template <class Function> void gate(const Weights &weights) {
        product(pool_, weights, true, rows(normed_, d_.hidden), IntoGated<Function>{gated_, d_.ffn, weights});
    }

    Rows rows(const bf16 *x, int width) const { return {x, width, sums_, step_.tokens}; }

    void norm(const float *weight) {
        each_row(pool_, step_.tokens, d_.hidden, [&](int row, int) {
            bf16 *to = normed_ + static_cast<int64_t>(row) * d_.hidden;
            rms_norm(residual(row), weight, d_.eps, d_.hidden, to);
            block_sums(to, d_.hidden / kBlock, sums_ + static_cast<int64_t>(row) * (d_.hidden / kBlock));
        });
    }

    /// residual += x Wᵀ, or the norm of it.
    void add_product(const Weights &weights, const bf16 *x, int width, const float *behind) {
        each_row(pool_, step_.tokens, width, [&](int row, int) {
            block_sums(x + static_cast<int64_t>(row) * width, width / kBlock,
                       sums_ + static_cast<int64_t>(row) * (width / kBlock));
        });
        if (!behind) {
            product(pool_, weights, false, rows(x, width), Into<float, true>{residual_, d_.hidden, weights});
            return;
        }
        product(pool_, weights, false, rows(x, width), Into<float, false>{branch_, d_.hidden, weights});
        each_row(pool_, step_.tokens, d_.hidden, [&](int row, int) {
            float *branch = branch_ + static_cast<int64_t>(row) * d_.hidden, *to = residual(row);
            rms_norm(branch, behind, d_.eps, d_.hidden, branch);
            for (int column = 0; column < d_.hidden; column += kLanes) {
                const int left = d_.hidden - column;
                store_some(to + column, _mm512_add_ps(load_some(to + column, left), load_some(branch + column, left)), left);
            }
        });
    }

    /// Queries and keys take their positions; keys and values go to the cache.
    void turn(const Layer &layer, const Cache &cache, const Chunk *chunks) {
        each_row(pool_, step_.tokens, qkv_width(), [&](int row, int) {
            const int position = step_.positions[row];
            const int32_t *table = chunk_of(chunks, row).table;
            const float *cosine = layer.cosines + static_cast<int64_t>(position) * (d_.head / 2);
            const float *sine = layer.sines + static_cast<int64_t>(position) * (d_.head / 2);
            const float *from = qkv_ + static_cast<int64_t>(row) * qkv_width();
            bf16 *q = q_ + static_cast<int64_t>(row) * d_.heads * d_.head;
            bf16 *key = cache.keys + cache.row(cache.key_stride, table, position);
            bf16 *value = cache.values + cache.row(cache.value_stride, table, position);
            for (int head = 0; head < d_.heads; ++head, from += d_.head)
                turn_head(from, layer.q_norm, cosine, sine, q + head * d_.head);
            for (int head = 0; head < d_.kv_heads; ++head, from += d_.head)
                turn_head(from, layer.k_norm, cosine, sine, key + head * d_.head);
            copy_row(from, d_.kv_heads * d_.head, value);
        });
    }

    /// Which chunk a row belongs to; the rows of a chunk follow each other.
    const Chunk &chunk_of(const Chunk *chunks, int row) const {
        int low = 0, high = step_.chunk_count - 1;
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (chunks[middle].row <= row) low = middle;
            else high = middle - 1;
        }
        return chunks[low];
    }

    void turn_head(const float *from, const float *weight, const float *cosine, const float *sine, bf16 *to) const {
        if (!weight) return rope(from, cosine, sine, d_.head, to);
        float normed[kMaxHead];
        rms_norm(from, weight, d_.eps, d_.head, normed);
        rope(normed, cosine, sine, d_.head, to);
    }

    void logits() {
        if (!step_.wanted) return;
        each_row(pool_, step_.wanted, d_.hidden, [&](int number, int) {
            bf16 *to = normed_ + static_cast<int64_t>(number) * d_.hidden;
            rms_norm(residual(step_.rows[number]), d_.norm, d_.eps, d_.hidden, to);
            block_sums(to, d_.hidden / kBlock, sums_ + static_cast<int64_t>(number) * (d_.hidden / kBlock));
        });
        const Rows last{normed_, d_.hidden, sums_, step_.wanted};
        product(pool_, *d_.output, false, last, Into<float, false>{step_.logits, d_.vocabulary, *d_.output});
    }

    Pool &pool_;
    const Decoder &d_;
    const Step &step_;
    float *residual_, *branch_, *sums_, *qkv_;
    bf16 *normed_, *q_, *attended_, *gated_;
};

} // namespace

void run(Pool &pool, const Decoder &decoder, const Step &step) { Run(pool, decoder, step).all(); }

} // namespace moonpool
