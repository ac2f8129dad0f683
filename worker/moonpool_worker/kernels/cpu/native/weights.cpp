#include "weights.h"

#include <cmath>
#include <cstring>

namespace moonpool {
namespace {

struct Place {
    uint8_t *scales;
    uint8_t *codes;
    int lane;
};

template <class Format> Place place(uint8_t *to, int row, int columns) {
    const int blocks = columns / kBlock;
    uint8_t *panel = to + static_cast<int64_t>(row / kLanes) * panel_bytes<Format>(blocks);
    return {panel, panel + scale_area<Format>(blocks), row % kLanes};
}

void put_half(uint8_t *to, half value) { std::memcpy(to, &value, sizeof value); }

void put_nibbles(const Place &at, int block, half scale, half offset, const uint8_t (&codes)[kBlock]) {
    uint8_t *scales = at.scales + static_cast<int64_t>(block) * Nibble::kScaleBytes + 2 * at.lane;
    put_half(scales, scale);
    put_half(scales + 32, offset);
    for (int quarter = 0; quarter < 4; ++quarter) {
        for (int odd = 0; odd < 2; ++odd) {
            uint16_t word = 0;
            for (int part = 0; part < 4; ++part) word |= codes[2 * (4 * quarter + part) + odd] << (4 * part);
            std::memcpy(at.codes + static_cast<int64_t>(block) * Nibble::kCodeBytes + 64 * quarter + 4 * at.lane + 2 * odd,
                        &word, sizeof word);
        }
    }
}

void put_bytes(const Place &at, int block, half scale, const int8_t (&codes)[kBlock]) {
    put_half(at.scales + static_cast<int64_t>(block) * Byte::kScaleBytes + 2 * at.lane, scale);
    for (int column = 0; column < kBlock; ++column)
        at.codes[static_cast<int64_t>(block) * Byte::kCodeBytes + kLanes * column + at.lane] =
            static_cast<uint8_t>(codes[column]);
}

void put_plain(const Place &at, int block, const bf16 (&values)[kBlock]) {
    for (int column = 0; column < kBlock; ++column)
        std::memcpy(at.codes + static_cast<int64_t>(block) * Plain::kCodeBytes + 64 * (column / 2) + 4 * at.lane +
                        2 * (column % 2),
                    &values[column], sizeof values[column]);
}

// GGUF's 4-bit blocks: the scale, for Q4_1 the offset, then 16 bytes with column i low and column i + 16 high.
void row_of_q4(const uint8_t *from, const Place &at, int blocks, bool with_offset) {
    for (int block = 0; block < blocks; ++block) {
        half scale, offset;
        std::memcpy(&scale, from, 2);
        from += 2;
        if (with_offset) {
            std::memcpy(&offset, from, 2);
            from += 2;
        } else {
            // w = scale * (code - 8): times a power of two, so exact.
            offset = _cvtss_sh(-8.0f * _cvtsh_ss(scale), _MM_FROUND_TO_NEAREST_INT);
        }
        uint8_t codes[kBlock];
        for (int i = 0; i < kBlock / 2; ++i) {
            codes[i] = from[i] & 15;
            codes[i + kBlock / 2] = from[i] >> 4;
        }
        from += kBlock / 2;
        put_nibbles(at, block, scale, offset, codes);
    }
}

void row_of_q8(const uint8_t *from, const Place &at, int blocks) {
    for (int block = 0; block < blocks; ++block, from += 34) {
        half scale;
        int8_t codes[kBlock];
        std::memcpy(&scale, from, 2);
        std::memcpy(codes, from + 2, sizeof codes);
        put_bytes(at, block, scale, codes);
    }
}

float value_of(const float *from) { return *from; }

float value_of(const bf16 *from) {
    const uint32_t bits = static_cast<uint32_t>(*from) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

template <class Element> void row_to_bytes(const Element *from, const Place &at, int blocks) {
    for (int block = 0; block < blocks; ++block, from += kBlock) {
        float largest = 0;
        for (int i = 0; i < kBlock; ++i) largest = std::max(largest, std::fabs(value_of(from + i)));
        const half scale = _cvtss_sh(largest / 127.0f, _MM_FROUND_TO_NEAREST_INT);
        const float step = _cvtsh_ss(scale);
        int8_t codes[kBlock];
        for (int i = 0; i < kBlock; ++i) {
            const float code = step > 0 ? std::nearbyint(value_of(from + i) / step) : 0.0f;
            codes[i] = static_cast<int8_t>(std::fmax(-127.0f, std::fmin(127.0f, code)));
        }
        put_bytes(at, block, scale, codes);
    }
}

template <class Element> void row_to_plain(const Element *from, const Place &at, int blocks) {
    for (int block = 0; block < blocks; ++block, from += kBlock) {
        bf16 values[kBlock];
        for (int i = 0; i < kBlock; i += kLanes) store(values + i, load(from + i));
        put_plain(at, block, values);
    }
}

} // namespace

int64_t packed_bytes(Kind kind, int rows, int columns) {
    const int64_t panels = (rows + 2 * kLanes - 1) / (2 * kLanes) * 2;
    const int blocks = columns / kBlock;
    switch (kind) {
    case Kind::kNibble: return panels * panel_bytes<Nibble>(blocks);
    case Kind::kByte: return panels * panel_bytes<Byte>(blocks);
    case Kind::kPlain: return panels * panel_bytes<Plain>(blocks);
    }
    return 0;
}

bool pack(Source source, const void *from, Kind kind, uint8_t *to, int first, int rows, int columns) {
    const int blocks = columns / kBlock;
    const auto *bytes = static_cast<const uint8_t *>(from);
    const auto *floats = static_cast<const float *>(from);
    const auto *words = static_cast<const bf16 *>(from);
    for (int64_t row = 0; row < rows; ++row) {
        const int target = first + static_cast<int>(row);
        if (kind == Kind::kNibble && source == Source::kQ4_0) {
            row_of_q4(bytes + row * blocks * 18, place<Nibble>(to, target, columns), blocks, false);
        } else if (kind == Kind::kNibble && source == Source::kQ4_1) {
            row_of_q4(bytes + row * blocks * 20, place<Nibble>(to, target, columns), blocks, true);
        } else if (kind == Kind::kByte && source == Source::kQ8_0) {
            row_of_q8(bytes + row * blocks * 34, place<Byte>(to, target, columns), blocks);
        } else if (kind == Kind::kByte && source == Source::kF32) {
            row_to_bytes(floats + row * columns, place<Byte>(to, target, columns), blocks);
        } else if (kind == Kind::kByte && source == Source::kBf16) {
            row_to_bytes(words + row * columns, place<Byte>(to, target, columns), blocks);
        } else if (kind == Kind::kPlain && source == Source::kF32) {
            row_to_plain(floats + row * columns, place<Plain>(to, target, columns), blocks);
        } else if (kind == Kind::kPlain && source == Source::kBf16) {
            row_to_plain(words + row * columns, place<Plain>(to, target, columns), blocks);
        } else {
            return false;
        }
    }
    return true;
}

} // namespace moonpool
