// y = x Wᵀ for bfloat16 rows x and packed weights.
//
// Within a block of 32 columns products are summed in one chain, in the order of the columns; a block's sum is then
// scaled and added to the row's: a row's result does not depend on the rows beside it. Codes become bfloat16 in registers,
// which costs as much as a ninth of the products of 12 rows.
#pragma once

#include <algorithm>

#include "pool.h"
#include "rows_of_x.h"
#include "scratch.h"
#include "weights.h"

namespace moonpool {

/// Rows of x: `sums` holds the sum of each block of 32 columns, [rows, columns / 32]; needed for formats with offsets.
struct Rows {
    const bf16 *x;
    int64_t stride;
    const float *sums;
    int count;
};

/// The sums of a row's blocks of 32.
inline void block_sums(const bf16 *x, int blocks, float *sums) {
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    for (int block = 0; block < blocks; ++block) {
        const __m512bh values = (__m512bh)_mm512_loadu_si512(x + static_cast<int64_t>(block) * kBlock);
        sums[block] = _mm512_reduce_add_ps(_mm512_dpbf16_ps(_mm512_setzero_ps(), values, ones));
    }
}

/// How many rows are multiplied at a time: their sums and those of a block fit into the registers.
constexpr int kTogether = 12;
/// Bytes ahead of what is multiplied; the hardware stops at the end of a page. Past the last panel it is harmless.
constexpr int kAhead = 4096;

/// R rows times one panel, straight from its codes.
template <class Format, int R>
inline void panel_product(const uint8_t *panel, int blocks, const bf16 *x, int64_t stride, const float *sums, __m512 (&total)[R]) {
    const typename Format::Expander expander;
    const uint8_t *codes = panel + scale_area<Format>(blocks);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) total[r] = _mm512_setzero_ps();
    PairsOfRows rows(x, stride);
    for (int block = 0; block < blocks; ++block, codes += Format::kCodeBytes, rows.advance(kBlock)) {
        for (int line = 0; line < Format::kCodeBytes; line += 64) _mm_prefetch(codes + kAhead + line, _MM_HINT_T0);
        __m512 part[R];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) part[r] = _mm512_setzero_ps();
        unrolled<kPairs>([&]<int Pair>() __attribute__((always_inline)) {
            rows.template multiply<Pair>(expander.template vector<Pair>(codes), part);
        });
        if constexpr (Format::kScaled) {
            const __m512 scale = scales<Format>(panel, block);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) total[r] = _mm512_fmadd_ps(part[r], scale, total[r]);
        } else {
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) total[r] = _mm512_add_ps(total[r], part[r]);
        }
        if constexpr (Format::kOffset) {
            const __m512 offset = offsets<Format>(panel, block);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r)
                total[r] = _mm512_fmadd_ps(_mm512_set1_ps(sums[static_cast<int64_t>(r) * blocks + block]), offset, total[r]);
        }
    }
}

/// Calls work(constant R) for a number from 1 to Most.
template <int Most, class Work> inline void with_rows(int rows, const Work &work) {
    if constexpr (Most > 1) {
        if (rows < Most) return with_rows<Most - 1>(rows, work);
    }
    work(std::integral_constant<int, Most>{});
}

/// Rows `from` to `to` times two panels; put(row, unit, low, high) takes 16 outputs of each.
template <class Format, class Put>
void unit_product(const Weights &w, int first, int second, const Rows &rows, int from, int to, int unit, const Put &put) {
    const int blocks = w.columns / kBlock;
    const int64_t size = panel_bytes<Format>(blocks);
    for (int row = from; row < to; row += kTogether) {
        with_rows<kTogether>(std::min(kTogether, to - row), [&](auto count) {
            constexpr int R = decltype(count)::value;
            __m512 low[R], high[R];
            const bf16 *x = rows.x + row * rows.stride;
            const float *sums = rows.sums + static_cast<int64_t>(row) * blocks;
            panel_product<Format, R>(w.data + first * size, blocks, x, rows.stride, sums, low);
            panel_product<Format, R>(w.data + second * size, blocks, x, rows.stride, sums, high);
            for (int r = 0; r < R; ++r) put(row + r, unit, low[r], high[r]);
        });
    }
}

/// The whole product, spread over the pool. A unit is two panels: neighbours, or (`gated`) one of each half of the rows.
template <class Format, class Put>
void product_of(Pool &pool, const Weights &w, bool gated, const Rows &rows, const Put &put) {
    const int units = w.panels / 2, wanted = 4 * pool.threads();
    // Few rows: several units a tile, since one is over in no time. Many: parts of the rows, where units are few.
    const int together = std::max(1, std::min(units / wanted, 64 / rows.count));
    const int groups = ceil_div(units, together);
    const int parts = std::max(1, std::min(wanted / groups, rows.count / (4 * kTogether)));
    const int part = ceil_div(ceil_div(rows.count, parts), kTogether) * kTogether;
    pool.run(groups * parts, [&](int tile, int) {
        const int from = tile % parts * part, to = std::min(rows.count, from + part);
        const int begin = tile / parts * together, end = std::min(units, begin + together);
        for (int unit = begin; unit < end; ++unit) {
            const int first = gated ? unit : 2 * unit, second = gated ? unit + units : 2 * unit + 1;
            unit_product<Format>(w, first, second, rows, from, to, unit, put);
        }
    });
}

template <class Put> void product(Pool &pool, const Weights &w, bool gated, const Rows &rows, const Put &put) {
    switch (w.kind) {
    case Kind::kNibble: return product_of<Nibble>(pool, w, gated, rows, put);
    case Kind::kByte: return product_of<Byte>(pool, w, gated, rows, put);
    case Kind::kPlain: return product_of<Plain>(pool, w, gated, rows, put);
    }
}

/// Puts the 32 outputs of a unit into [rows, stride] of float32 or bfloat16, with the bias.
template <class Element, bool Add> struct Into {
    Element *y;
    int64_t stride;
    const Weights &weights;

    void operator()(int row, int unit, __m512 low, __m512 high) const {
        const int column = 32 * unit;
        one(row, column, low);
        one(row, column + 16, high);
    }

private:
    void one(int row, int column, __m512 value) const {
        const int left = weights.rows - column;
        if (left <= 0) return;
        if (weights.bias) value = _mm512_add_ps(value, load_some(weights.bias + column, left));
        Element *to = y + row * stride + column;
        if constexpr (Add) value = _mm512_add_ps(value, load_some(to, left));
        store_some(to, value, left);
    }
};

struct Silu {
    __m512 operator()(__m512 x) const { return silu(x); }
};

struct GeluTanh {
    __m512 operator()(__m512 x) const { return gelu_tanh(x); }
};

/// act(gate) * up, 16 outputs of each unit.
template <class Function> struct IntoGated {
    bf16 *y;
    int64_t stride;
    const Weights &weights;

    void operator()(int row, int unit, __m512 gate, __m512 up) const {
        if (weights.bias) {
            gate = _mm512_add_ps(gate, load(weights.bias + 16 * unit));
            up = _mm512_add_ps(up, load(weights.bias + weights.rows / 2 + 16 * unit));
        }
        store(y + row * stride + 16 * unit, _mm512_mul_ps(Function()(gate), up));
    }
};

} // namespace moonpool
