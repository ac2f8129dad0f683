// bfloat16 and float32 vectors of 16 lanes, and the functions that AVX-512 lacks.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace moonpool {

using bf16 = uint16_t;
using half = uint16_t;

constexpr int kLanes = 16;
constexpr float kLog2E = 1.44269504088896340736f;

inline __m512 load(const float *from) { return _mm512_loadu_ps(from); }
inline void store(float *to, __m512 value) { _mm512_storeu_ps(to, value); }

/// 16 bfloat16 as float32.
inline __m512 load(const bf16 *from) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

/// Rounded to nearest, ties to even.
inline void store(bf16 *to, __m512 value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), (__m256i)_mm512_cvtneps_pbh(value));
}

inline __mmask16 first_lanes(int count) {
    return count >= kLanes ? 0xffff : static_cast<__mmask16>((1u << (count < 0 ? 0 : count)) - 1);
}

inline __mmask32 first_words(int count) { return count >= 32 ? 0xffffffffu : (1u << (count < 0 ? 0 : count)) - 1; }

inline __m512 load_some(const float *from, int count) { return _mm512_maskz_loadu_ps(first_lanes(count), from); }

inline __m512 load_some(const bf16 *from, int count) {
    const __m256i words = _mm256_maskz_loadu_epi16(first_lanes(count), from);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

inline void store_some(float *to, __m512 value, int count) { _mm512_mask_storeu_ps(to, first_lanes(count), value); }

inline void store_some(bf16 *to, __m512 value, int count) {
    _mm256_mask_storeu_epi16(to, first_lanes(count), (__m256i)_mm512_cvtneps_pbh(value));
}

/// Two neighbouring bfloat16 in every lane.
inline __m512bh pair_everywhere(const bf16 *from) {
    int32_t both;
    __builtin_memcpy(&both, from, sizeof both);
    return (__m512bh)_mm512_set1_epi32(both);
}

/// 2 ** x, about 1e-7 relative; 0 for -inf.
inline __m512 exp2(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-200.0f));
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 rest = _mm512_sub_ps(x, whole);
    // Least relative error on [-1/2, 1/2], with 2 ** 0 = 1.
    __m512 value = _mm512_set1_ps(1.535336200e-04f);
    value = _mm512_fmadd_ps(value, rest, _mm512_set1_ps(1.339887467e-03f));
    value = _mm512_fmadd_ps(value, rest, _mm512_set1_ps(9.618437359e-03f));
    value = _mm512_fmadd_ps(value, rest, _mm512_set1_ps(5.550332470e-02f));
    value = _mm512_fmadd_ps(value, rest, _mm512_set1_ps(2.402264791e-01f));
    value = _mm512_fmadd_ps(value, rest, _mm512_set1_ps(6.931472029e-01f));
    value = _mm512_fmadd_ps(value, rest, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(value, whole);
}

/// 2 ** x for x up to 0, about 3e-6 relative: a thousandth of what rounding to bfloat16 does.
inline __m512 exp2_coarse(__m512 x) {
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 rest = _mm512_sub_ps(x, whole);
    __m512 value = _mm512_set1_ps(9.582853103e-03f);
    value = _mm512_fmadd_ps(value, rest, _mm512_set1_ps(5.590642691e-02f));
    value = _mm512_fmadd_ps(value, rest, _mm512_set1_ps(2.402409862e-01f));
    value = _mm512_fmadd_ps(value, rest, _mm512_set1_ps(6.931241931e-01f));
    value = _mm512_fmadd_ps(value, rest, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(value, whole);
}

inline float exp2(float x) { return _mm512_cvtss_f32(exp2(_mm512_set1_ps(x))); }

/// x / (1 + e ** -y)
inline __m512 times_sigmoid(__m512 x, __m512 y) {
    const __m512 decay = exp2(_mm512_min_ps(_mm512_mul_ps(y, _mm512_set1_ps(-kLog2E)), _mm512_set1_ps(126.0f)));
    return _mm512_div_ps(x, _mm512_add_ps(decay, _mm512_set1_ps(1.0f)));
}

inline __m512 silu(__m512 x) { return times_sigmoid(x, x); }

/// GELU's tanh approximation: 0.5 x (1 + tanh(z)) = x / (1 + e ** -2z).
inline __m512 gelu_tanh(__m512 x) {
    const __m512 cube = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.044715f), _mm512_set1_ps(1.0f));
    return times_sigmoid(x, _mm512_mul_ps(_mm512_mul_ps(x, cube), _mm512_set1_ps(1.5957691216057308f)));
}

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

} // namespace moonpool
