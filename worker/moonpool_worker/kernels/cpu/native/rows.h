// What happens to one row at a time: norms, rotary embedding.
#pragma once

#include "simd.h"
#include "weights.h"

namespace moonpool {

/// 1 / sqrt(mean of squares + eps).
template <class Element> inline float inverse_rms(const Element *x, int width, float eps) {
    __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
    int column = 0;
    for (; column + 2 * kLanes <= width; column += 2 * kLanes) {
        const __m512 a = load(x + column), b = load(x + column + kLanes);
        even = _mm512_fmadd_ps(a, a, even);
        odd = _mm512_fmadd_ps(b, b, odd);
    }
    for (; column < width; column += kLanes) {
        const __m512 a = load_some(x + column, width - column);
        even = _mm512_fmadd_ps(a, a, even);
    }
    return 1.0f / __builtin_sqrtf(_mm512_reduce_add_ps(_mm512_add_ps(even, odd)) / static_cast<float>(width) + eps);
}

/// Root mean square norm (Zhang and Sennrich, 2019).
template <class From, class To> inline void rms_norm(const From *x, const float *weight, float eps, int width, To *y) {
    const __m512 scale = _mm512_set1_ps(inverse_rms(x, width, eps));
    for (int column = 0; column < width; column += kLanes) {
        const int left = width - column;
        const __m512 scaled = _mm512_mul_ps(load_some(x + column, left), scale);
        store_some(y + column, _mm512_mul_ps(scaled, load_some(weight + column, left)), left);
    }
}

/// Rotate halves of one head of `width` elements; `angle` holds width / 2 cosines and as many sines.
template <class From, class To>
inline void rope(const From *x, const float *cosine, const float *sine, int width, To *y) {
    const int half = width / 2;
    for (int column = 0; column < half; column += kLanes) {
        const int left = half - column;
        const __m512 c = load_some(cosine + column, left), s = load_some(sine + column, left);
        const __m512 a = load_some(x + column, left), b = load_some(x + half + column, left);
        const __m512 first = _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s));
        const __m512 second = _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s));
        store_some(y + column, first, left);
        store_some(y + half + column, second, left);
    }
}

inline int argmax(const float *x, int width) {
    constexpr float kLowest = -__builtin_inff();
    __m512 most = _mm512_set1_ps(kLowest);
    for (int column = 0; column < width; column += kLanes) {
        const __mmask16 lanes = first_lanes(width - column);
        most = _mm512_mask_max_ps(most, lanes, most, _mm512_maskz_loadu_ps(lanes, x + column));
    }
    const __m512 largest = _mm512_set1_ps(_mm512_reduce_max_ps(most));
    for (int column = 0; column < width; column += kLanes) {
        const __mmask16 lanes = first_lanes(width - column);
        const __mmask16 here =
            _mm512_mask_cmp_ps_mask(lanes, _mm512_maskz_loadu_ps(lanes, x + column), largest, _CMP_EQ_OQ);
        if (here) return column + __builtin_ctz(here);
    }
    return 0;
}

template <class From, class To> inline void copy_row(const From *x, int width, To *y) {
    for (int column = 0; column < width; column += kLanes)
        store_some(y + column, load_some(x + column, width - column), width - column);
}

} // namespace moonpool
