// Weights [rows, columns] as the products read them.
//
// Rows go in panels of 16, one vector lane each; columns in blocks of 32, each with a scale (and, for some formats, an
// offset) per row: w = scale * code + offset. A panel is the blocks' scales, padded to 64 bytes, then the blocks' codes.
// Within a block, code vector p holds columns 2p and 2p + 1 of every row: what one dot-product instruction takes.
#pragma once

#include "simd.h"

namespace moonpool {

constexpr int kBlock = 32;
constexpr int kPairs = kBlock / 2;

enum class Kind : int32_t { kNibble = 0, kByte = 1, kPlain = 2 };

struct Weights {
    Kind kind;
    int32_t rows;
    int32_t columns; // a multiple of 32
    int32_t panels;  // an even number; rows beyond `rows` are zeros
    const uint8_t *data;
    const float *bias; // [rows], or null
};

/// 4-bit codes 0 to 15, scale and offset in half precision: GGUF's Q4_0 and Q4_1.
struct Nibble {
    static constexpr bool kScaled = true, kOffset = true;
    static constexpr int kScaleBytes = 64, kCodeBytes = 256;

    struct Expander {
        // Twice, so that the fifth bit of an index, which belongs to the next code, has no influence.
        __m512i table = _mm512_set_epi16(0x4170, 0x4160, 0x4150, 0x4140, 0x4130, 0x4120, 0x4110, 0x4100, 0x40e0, 0x40c0,
                                         0x40a0, 0x4080, 0x4040, 0x4000, 0x3f80, 0x0000, 0x4170, 0x4160, 0x4150, 0x4140,
                                         0x4130, 0x4120, 0x4110, 0x4100, 0x40e0, 0x40c0, 0x40a0, 0x4080, 0x4040, 0x4000,
                                         0x3f80, 0x0000);

        /// Columns 2 Pair and 2 Pair + 1 of a block, of all rows.
        template <int Pair> inline __attribute__((always_inline)) __m512bh vector(const uint8_t *codes) const {
            const __m512i four = _mm512_load_si512(codes + 64 * (Pair / 4));
            return (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(four, 4 * (Pair % 4)), table);
        }
    };
};

/// 8-bit codes -127 to 127 and a scale in half precision: GGUF's Q8_0, and what dense weights are quantised to.
struct Byte {
    static constexpr bool kScaled = true, kOffset = false;
    static constexpr int kScaleBytes = 32, kCodeBytes = 512;

    struct Expander {
        template <int Pair> inline __attribute__((always_inline)) __m512bh vector(const uint8_t *codes) const {
            const __m128i *part = reinterpret_cast<const __m128i *>(codes + 32 * Pair);
            const __m512 even = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(part[0]));
            const __m512 odd = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(part[1]));
            // Small integers are exact in bfloat16: cutting off the lower halves rounds nothing.
            return (__m512bh)_mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(_mm512_castps_si512(even), 16),
                                                     _mm512_castps_si512(odd));
        }
    };
};

/// bfloat16 as it is.
struct Plain {
    static constexpr bool kScaled = false, kOffset = false;
    static constexpr int kScaleBytes = 0, kCodeBytes = 1024;

    struct Expander {
        template <int Pair> inline __attribute__((always_inline)) __m512bh vector(const uint8_t *codes) const {
            return (__m512bh)_mm512_load_si512(codes + 64 * Pair);
        }
    };
};

template <class Format> constexpr int64_t scale_area(int blocks) {
    return (static_cast<int64_t>(blocks) * Format::kScaleBytes + 63) / 64 * 64;
}

template <class Format> constexpr int64_t panel_bytes(int blocks) {
    return scale_area<Format>(blocks) + static_cast<int64_t>(blocks) * Format::kCodeBytes;
}

/// The scales of one block of a panel, [16].
template <class Format> inline __m512 scales(const uint8_t *panel, int block) {
    const uint8_t *from = panel + static_cast<int64_t>(block) * Format::kScaleBytes;
    return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i *>(from)));
}

/// The offsets of one block of a panel, [16].
template <class Format> inline __m512 offsets(const uint8_t *panel, int block) {
    const uint8_t *from = panel + static_cast<int64_t>(block) * Format::kScaleBytes + 32;
    return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i *>(from)));
}

int64_t packed_bytes(Kind kind, int rows, int columns);

/// Where the rows that are packed come from.
enum class Source : int32_t { kQ4_0 = 0, kQ4_1 = 1, kQ8_0 = 2, kBf16 = 3, kF32 = 4 };

/// Pack `rows` rows from `from`, tightly packed, as rows `first` and on of a zeroed `to`. GGUF blocks keep their codes;
/// dense rows become bfloat16 (kPlain) or are rounded to 8 bits per block of 32 (kByte). False for other pairs.
bool pack(Source source, const void *from, Kind kind, uint8_t *to, int first, int rows, int columns);

} // namespace moonpool
