#include "attention.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "product.h"
#include "scratch.h"

namespace moonpool {
namespace {

/// Rows (tokens times heads of a group) per tile; a multiple of kTogether.
constexpr int kTileRows = 96;
/// A chunk with no more rows than this is split by segments, so that one long text keeps all threads busy.
constexpr int kSplitRows = 16;
/// Less than any score, and finite: the difference of two of them is 0.
constexpr float kNothing = -1e30f;

/// A running softmax of some rows: weighted values [rows, width], largest exponent and sum of weights [rows].
struct Running {
    float *values;
    float *largest;
    float *sum;
};

/// 16 x 16 dwords, rows become columns.
inline void transpose(__m512i (&r)[16]) {
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
        t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
        r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
        r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
        r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
    }
}

/// Keys of 32 positions as a strip: [head / 2 pairs of elements][32 positions]. Positions from `end` on are zeros.
void pack_keys(const Cache &cache, const int32_t *table, int kv_head, int first, int end, bf16 *strip) {
    const int pairs = cache.head / 2;
    Walk walk(cache, cache.keys, cache.key_stride, table, first, kv_head);
    for (int half = 0; half < 2; ++half) {
        const bf16 *rows[16];
        for (int i = 0; i < 16; ++i) rows[i] = first + 16 * half + i < end ? walk.next() : nullptr;
        for (int pair = 0; pair < pairs; pair += 16) {
            const __mmask16 lanes = first_lanes(pairs - pair);
            __m512i r[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; ++i)
                r[i] = rows[i] ? _mm512_maskz_loadu_epi32(lanes, rows[i] + 2 * pair) : _mm512_setzero_si512();
            transpose(r);
            const int here = std::min(16, pairs - pair);
            for (int i = 0; i < here; ++i) _mm512_store_si512(strip + (pair + i) * 64 + 32 * half, r[i]);
        }
    }
}

/// Values of positions `first` to `last` as strips of 32 elements: [strips][pairs of positions][32 elements].
void pack_values(const Cache &cache, const int32_t *table, int kv_head, int first, int last, bf16 *strips) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                         36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const int width = cache.head;
    Walk walk(cache, cache.values, cache.value_stride, table, first, kv_head);
    for (int position = first; position < last; position += 2) {
        const bf16 *even = walk.next();
        const bf16 *odd = position + 1 < last ? walk.next() : nullptr;
        bf16 *to = strips + (position - first) / 2 * 64;
        for (int column = 0; column < width; column += 32, to += kKeys / 2 * 64) {
            const __mmask32 lanes = first_words(width - column);
            const __m512i a = _mm512_maskz_loadu_epi16(lanes, even + column);
            const __m512i b = odd ? _mm512_maskz_loadu_epi16(lanes, odd + column) : _mm512_setzero_si512();
            _mm512_store_si512(to, _mm512_permutex2var_epi16(a, low, b));
            _mm512_store_si512(to + 32, _mm512_permutex2var_epi16(a, high, b));
        }
    }
}

/// y [R, 32] (+)= x [R, 2 * pairs] times a strip.
template <int R, bool Add>
inline void multiply(const bf16 *x, int64_t x_stride, const bf16 *strip, int pairs, float *y, int64_t y_stride) {
    __m512 low[R], high[R];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        low[r] = Add ? _mm512_load_ps(y + r * y_stride) : _mm512_setzero_ps();
        high[r] = Add ? _mm512_load_ps(y + r * y_stride + 16) : _mm512_setzero_ps();
    }
    PairsOfRows rows(x, x_stride);
    int pair = 0;
    for (; pair + 4 <= pairs; pair += 4, strip += 4 * 64, rows.advance(8)) {
        unrolled<4>([&]<int Next>() __attribute__((always_inline)) {
            rows.template multiply<Next>((__m512bh)_mm512_load_si512(strip + 64 * Next), low);
            rows.template multiply<Next>((__m512bh)_mm512_load_si512(strip + 64 * Next + 32), high);
        });
    }
    for (; pair < pairs; ++pair, strip += 64, rows.advance(2)) {
        rows.template multiply<0>((__m512bh)_mm512_load_si512(strip), low);
        rows.template multiply<0>((__m512bh)_mm512_load_si512(strip + 32), high);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        _mm512_store_ps(y + r * y_stride, low[r]);
        _mm512_store_ps(y + r * y_stride + 16, high[r]);
    }
}

template <bool Add>
inline void multiply_some(int rows, const bf16 *x, int64_t x_stride, const bf16 *strip, int pairs, float *y,
                          int64_t y_stride) {
    with_rows<kTogether>(rows, [&](auto count) {
        multiply<decltype(count)::value, Add>(x, x_stride, strip, pairs, y, y_stride);
    });
}

/// Part of the queries: tokens `first` to `last` of a chunk, for the query heads of some KV heads.
struct Tile {
    const Chunk *chunk;
    int kv_head;
    int kv_end;
    int first;
    int last;
    int segment; // the only one, when the chunk is split; else -1
    int64_t partial; // where its running softmax goes, in floats
    int end;
};

class Worker {
public:
    Worker(const Attention &what, const Cache &cache, int thread)
        : what_(what), cache_(cache), group_(what.heads / cache.kv_heads), width_((cache.head + 31) / 32 * 32),
          scratch_(Scratch::of(thread)) {}

    /// All segments of a tile, and its rows of the output.
    void whole(const Tile &tile) {
        const int rows = load_queries(tile);
        float *all = scratch_.sums.of<float>(floats(tile)), *one = scratch_.partial.of<float>(floats(tile));
        const int begin = seen_from(tile) / kSegment;
        for (int segment = begin; segment * kSegment < tile.end; ++segment) {
            attend(tile, rows, segment, segment == begin ? all : one);
            if (segment != begin) merge(tile, rows, all, one);
        }
        finish(tile, rows, all);
    }

    /// One segment of a tile, into the running softmaxes at its `partial`.
    void part(const Tile &tile, float *partial) {
        const int rows = load_queries(tile);
        attend(tile, rows, tile.segment, partial + tile.partial);
    }

    /// Merge the segments of a tile that was split: `parts` of them, one after the other.
    void gather(const Tile &tile, float *partial, int parts) {
        const int rows = (tile.last - tile.first) * group_;
        float *all = partial + tile.partial;
        for (int part = 1; part < parts; ++part) merge(tile, rows, all, all + part * floats(tile));
        finish(tile, rows, all);
    }

    /// What the running softmaxes of a tile take: one for each KV head.
    int64_t floats(const Tile &tile) const {
        return (tile.kv_end - tile.kv_head) * head_floats((tile.last - tile.first) * group_);
    }

    int seen_from(const Tile &tile) const {
        return what_.window ? std::max(0, tile.chunk->start + tile.first - what_.window + 1) : 0;
    }

private:
    int64_t head_floats(int rows) const { return static_cast<int64_t>(rows + 15) / 16 * 16 * (width_ + 2); }

    Running at(float *memory, int rows, int head) const {
        const int64_t padded = static_cast<int64_t>(rows + 15) / 16 * 16;
        memory += head * head_floats(rows);
        return {memory, memory + padded * width_, memory + padded * (width_ + 1)};
    }

    /// Queries by KV head: [KV heads][rows, head].
    int load_queries(const Tile &tile) {
        const int rows = (tile.last - tile.first) * group_;
        queries_ = scratch_.queries.of<bf16>(static_cast<int64_t>(tile.kv_end - tile.kv_head) * rows * cache_.head);
        bf16 *to = queries_;
        const int64_t size = static_cast<int64_t>(group_) * cache_.head;
        for (int head = tile.kv_head; head < tile.kv_end; ++head) {
            for (int token = tile.first; token < tile.last; ++token, to += size)
                std::memcpy(to, what_.q + (tile.chunk->row + token) * what_.q_stride + head * size, sizeof(bf16) * size);
        }
        return rows;
    }

    void attend(const Tile &tile, int rows, int segment, float *into) {
        const int heads = tile.kv_end - tile.kv_head;
        for (int head = 0; head < heads; ++head) {
            const Running running = at(into, rows, head);
            std::memset(running.values, 0, sizeof(float) * rows * width_);
            std::fill_n(running.largest, rows, kNothing);
            std::fill_n(running.sum, rows, 0.0f);
        }
        const int begin = std::max(segment * kSegment, seen_from(tile) / kKeys * kKeys);
        const int end = std::min((segment + 1) * kSegment, tile.end);
        for (int first = begin; first < end; first += kKeys) {
            touch(tile, first, std::min(first + kKeys, end));
            for (int head = 0; head < heads; ++head)
                block(tile, tile.kv_head + head, queries_ + static_cast<int64_t>(head) * rows * cache_.head, rows, first,
                      std::min(first + kKeys, end), at(into, rows, head));
        }
    }

    /// Read a block's rows in the order of memory: the hardware then runs ahead, which no prefetch instruction achieves.
    void touch(const Tile &tile, int first, int last) const {
        const int width = (tile.kv_end - tile.kv_head) * cache_.head;
        __m512i all = _mm512_setzero_si512();
        for (const bool keys : {true, false}) {
            Walk walk(cache_, keys ? cache_.keys : cache_.values, keys ? cache_.key_stride : cache_.value_stride,
                      tile.chunk->table, first, tile.kv_head);
            for (int position = first; position < last; ++position) {
                const bf16 *row = walk.next();
                for (int column = 0; column < width; column += 32)
                    all = _mm512_or_si512(all, _mm512_maskz_loadu_epi16(first_words(width - column), row + column));
            }
        }
        asm volatile("" ::"v"(all));
    }

    /// A block of keys: packed once, then a few rows at a time, so that all of their sums stay in the nearest cache.
    void block(const Tile &tile, int kv_head, const bf16 *queries, int rows, int first, int last, const Running &into) {
        const int pairs = cache_.head / 2, strips = ceil_div(last - first, 32);
        const int64_t key_strip = static_cast<int64_t>(pairs) * 64, value_strip = kKeys / 2 * 64;
        bf16 *keys = scratch_.keys.of<bf16>(kKeys / 32 * key_strip);
        bf16 *values = scratch_.values.of<bf16>(width_ / 32 * value_strip);
        for (int strip = 0; strip < strips; ++strip)
            pack_keys(cache_, tile.chunk->table, kv_head, first + 32 * strip, last, keys + strip * key_strip);
        pack_values(cache_, tile.chunk->table, kv_head, first, last, values);
        alignas(64) float scores[kTogether * kKeys];
        alignas(64) bf16 chances[kTogether * kKeys];
        for (int row = 0; row < rows; row += kTogether) {
            const int count = std::min(kTogether, rows - row);
            for (int strip = 0; strip < strips; ++strip)
                multiply_some<false>(count, queries + static_cast<int64_t>(row) * cache_.head, cache_.head,
                                     keys + strip * key_strip, pairs, scores + 32 * strip, kKeys);
            for (int r = 0; r < count; ++r) {
                const int position = tile.chunk->start + tile.first + (row + r) / group_;
                const int visible = std::min(last, position + 1) - first;
                const int hidden = what_.window ? std::max(0, position - what_.window + 1 - first) : 0;
                if (visible == kKeys && !hidden)
                    soften<true>(kKeys, 0, scores + r * kKeys, chances + r * kKeys, row + r, into);
                else
                    soften<false>(visible, hidden, scores + r * kKeys, chances + r * kKeys, row + r, into);
            }
            for (int strip = 0; strip < width_ / 32; ++strip)
                multiply_some<true>(count, chances, kKeys, values + strip * value_strip, ceil_div(last - first, 2),
                                    into.values + static_cast<int64_t>(row) * width_ + 32 * strip, width_);
        }
    }

    /// Scores become weights, of the keys from `hidden` to `visible`; the row's sums follow.
    template <bool All>
    void soften(int visible, int hidden, const float *scores, bf16 *chances, int row, const Running &into) {
        constexpr int kVectors = kKeys / kLanes;
        const __m512 scale = _mm512_set1_ps(what_.scale * kLog2E);
        __m512 raw[kVectors];
        __mmask16 seen[kVectors];
        __m512 most = _mm512_set1_ps(kNothing);
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; ++i) {
            seen[i] = All ? 0xffff
                          : static_cast<__mmask16>(first_lanes(visible - kLanes * i) & ~first_lanes(hidden - kLanes * i));
            raw[i] = _mm512_mul_ps(_mm512_load_ps(scores + kLanes * i), scale);
            most = All ? _mm512_max_ps(most, raw[i]) : _mm512_mask_max_ps(most, seen[i], most, raw[i]);
        }
        const float before = into.largest[row];
        const float largest = std::max(before, _mm512_reduce_max_ps(most));
        const __m512 top = _mm512_set1_ps(largest);
        __m512 sum = _mm512_setzero_ps();
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; ++i) {
            __m512 chance = exp2_coarse(_mm512_sub_ps(raw[i], top));
            if (!All) chance = _mm512_maskz_mov_ps(seen[i], chance);
            sum = _mm512_add_ps(sum, chance);
            store(chances + kLanes * i, chance);
        }
        const float more = _mm512_reduce_add_ps(sum);
        if (largest == before) {
            into.sum[row] += more;
            return;
        }
        const float fade = exp2(before - largest);
        into.sum[row] = into.sum[row] * fade + more;
        into.largest[row] = largest;
        fade_row(into.values + static_cast<int64_t>(row) * width_, fade);
    }

    void fade_row(float *values, float fade) const {
        const __m512 by = _mm512_set1_ps(fade);
        for (int column = 0; column < width_; column += 16)
            _mm512_store_ps(values + column, _mm512_mul_ps(_mm512_load_ps(values + column), by));
    }

    void merge(const Tile &tile, int rows, float *all, float *one) const {
        for (int head = 0; head < tile.kv_end - tile.kv_head; ++head) merge_head(rows, at(all, rows, head), at(one, rows, head));
    }

    void merge_head(int rows, const Running &all, const Running &one) const {
        for (int row = 0; row < rows; ++row) {
            const float largest = std::max(all.largest[row], one.largest[row]);
            const float mine = exp2(all.largest[row] - largest), other = exp2(one.largest[row] - largest);
            all.largest[row] = largest;
            all.sum[row] = all.sum[row] * mine + one.sum[row] * other;
            float *to = all.values + static_cast<int64_t>(row) * width_;
            const float *from = one.values + static_cast<int64_t>(row) * width_;
            for (int column = 0; column < width_; column += 16) {
                const __m512 kept = _mm512_mul_ps(_mm512_load_ps(to + column), _mm512_set1_ps(mine));
                _mm512_store_ps(to + column, _mm512_fmadd_ps(_mm512_load_ps(from + column), _mm512_set1_ps(other), kept));
            }
        }
    }

    void finish(const Tile &tile, int rows, float *all) const {
        for (int kv_head = tile.kv_head; kv_head < tile.kv_end; ++kv_head)
            finish_head(tile, kv_head, rows, at(all, rows, kv_head - tile.kv_head));
    }

    void finish_head(const Tile &tile, int kv_head, int rows, const Running &all) const {
        for (int row = 0; row < rows; ++row) {
            const int head = kv_head * group_ + row % group_;
            float sum = all.sum[row], scale = 1.0f;
            if (what_.sinks) {
                // A sink takes part in the softmax and has no value.
                const float sink = what_.sinks[head] * kLog2E, largest = std::max(all.largest[row], sink);
                scale = exp2(all.largest[row] - largest);
                sum = sum * scale + exp2(sink - largest);
            }
            const __m512 by = _mm512_set1_ps(scale / sum);
            const float *from = all.values + static_cast<int64_t>(row) * width_;
            bf16 *to = what_.out + (static_cast<int64_t>(tile.chunk->row + tile.first + row / group_) * what_.heads + head) *
                                       cache_.head;
            for (int column = 0; column < cache_.head; column += 16)
                store_some(to + column, _mm512_mul_ps(load(from + column), by), cache_.head - column);
        }
    }

    const Attention &what_;
    const Cache &cache_;
    const int group_, width_;
    Scratch &scratch_;
    bf16 *queries_ = nullptr;
};

/// What is to be done, in tiles. Splitting changes no result, only who computes it.
struct Tiles {
    std::vector<Tile> wholes; // by themselves
    std::vector<Tile> parts;  // one segment each
    std::vector<Tile> splits; // whose parts are to be merged,
    std::vector<int> counts;  // so many of them
    int64_t floats = 0;       // that the parts take

    void clear() {
        wholes.clear(), parts.clear(), splits.clear(), counts.clear();
        floats = 0;
    }

    void add(const Worker &sizes, Tile tile, bool split) {
        const int begin = sizes.seen_from(tile) / kSegment, end = ceil_div(tile.end, kSegment);
        if (!split || end - begin == 1) return wholes.push_back(tile);
        tile.partial = floats;
        splits.push_back(tile);
        counts.push_back(end - begin);
        for (int segment = begin; segment < end; ++segment) {
            tile.segment = segment;
            tile.partial = floats;
            floats += sizes.floats(tile);
            parts.push_back(tile);
        }
    }
};

void divide(const Attention &what, const Cache &cache, int threads, Tiles &tiles) {
    const Worker sizes(what, cache, 0);
    const int group = what.heads / cache.kv_heads;
    int few = 0;
    for (int number = 0; number < what.chunk_count; ++number) {
        const Chunk &chunk = what.chunks[number];
        if (chunk.count * group <= kSplitRows) few += ceil_div(chunk.start + chunk.count, kSegment);
    }
    for (int number = 0; number < what.chunk_count; ++number) {
        const Chunk &chunk = what.chunks[number];
        const bool split = chunk.count * group <= kSplitRows;
        // All KV heads together read memory in its order, which is several times faster than every third line of it.
        const int heads = split && few >= 2 * threads ? cache.kv_heads : 1;
        const int step = split ? chunk.count : std::max(1, kTileRows / group);
        for (int kv_head = 0; kv_head < cache.kv_heads; kv_head += heads) {
            for (int first = 0; first < chunk.count; first += step) {
                const int last = std::min(chunk.count, first + step);
                tiles.add(sizes, Tile{&chunk, kv_head, kv_head + heads, first, last, -1, 0, chunk.start + last}, split);
            }
        }
    }
    // The longest first: the last tiles to be taken should be short ones.
    std::stable_sort(tiles.wholes.begin(), tiles.wholes.end(), [](const Tile &a, const Tile &b) { return a.end > b.end; });
}

} // namespace

void attend(Pool &pool, const Attention &what, const Cache &cache) {
    // One step at a time, so these keep their memory.
    static Tiles tiles;
    static Buffer memory;
    tiles.clear();
    divide(what, cache, pool.threads(), tiles);
    float *partial = memory.of<float>(tiles.floats);
    const int whole_count = static_cast<int>(tiles.wholes.size());
    pool.run(whole_count + static_cast<int>(tiles.parts.size()), [&](int tile, int thread) {
        Worker worker(what, cache, thread);
        if (tile < whole_count) worker.whole(tiles.wholes[tile]);
        else worker.part(tiles.parts[tile - whole_count], partial);
    });
    pool.run(static_cast<int>(tiles.splits.size()), [&](int tile, int thread) {
        Worker(what, cache, thread).gather(tiles.splits[tile], partial, tiles.counts[tile]);
    });
}

} // namespace moonpool
