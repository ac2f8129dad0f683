// The left side of a product: rows of bfloat16 that lie a stride apart, one pair of columns of which is multiplied by a
// vector at a time.
#pragma once

#include <utility>

#include "simd.h"

namespace moonpool {

/// Up to 12 rows. An instruction can reach a pointer plus 0, 1 or 2 strides, so four pointers are enough; left to itself
/// the compiler keeps an address for each of the pairs of a block and spends more time on these than on the products.
class PairsOfRows {
public:
    PairsOfRows(const bf16 *x, int64_t stride) : stride_(2 * stride) {
        const char *at = reinterpret_cast<const char *>(x);
        for (int i = 0; i < 4; ++i) base_[i] = at + 3 * i * stride_;
        // What was written to x before must be in memory: the products read it behind the compiler's back.
        asm volatile("" ::: "memory");
    }

    /// To the columns `count` further on.
    void advance(int count) {
        for (int i = 0; i < 4; ++i) base_[i] += 2 * count;
    }

    /// sums[r] += pair `Pair` of row r, times `weights` lane by lane, for R rows.
    template <int Pair, int R> inline __attribute__((always_inline)) void multiply(__m512bh weights, __m512 (&sums)[R]) const {
        multiply<Pair>(weights, sums, std::make_integer_sequence<int, R>());
    }

private:
    template <int Pair, int R, int... Row>
    inline __attribute__((always_inline)) void multiply(__m512bh weights, __m512 (&sums)[R],
                                                        std::integer_sequence<int, Row...>) const {
        (one<4 * Pair, Row % 3>(weights, sums[Row], base_[Row / 3]), ...);
    }

    template <int Offset, int Strides>
    inline __attribute__((always_inline)) void one(__m512bh weights, __m512 &sum, const char *base) const {
        if constexpr (Strides == 0)
            asm("vdpbf16ps %c3(%2)%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "r"(base), "i"(Offset));
        else if constexpr (Strides == 1)
            asm("vdpbf16ps %c3(%2,%4)%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "r"(base), "i"(Offset), "r"(stride_));
        else
            asm("vdpbf16ps %c3(%2,%4,2)%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "r"(base), "i"(Offset), "r"(stride_));
    }

    const char *base_[4];
    int64_t stride_;
};

/// Calls work.operator()<0>(), <1>(), … <Count - 1>().
template <int Count, class Work> inline __attribute__((always_inline)) void unrolled(const Work &work) {
    [&]<int... Number>(std::integer_sequence<int, Number...>) __attribute__((always_inline)) {
        (work.template operator()<Number>(), ...);
    }(std::make_integer_sequence<int, Count>());
}

} // namespace moonpool
