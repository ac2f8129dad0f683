// Memory that a thread keeps from one tile to the next.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace moonpool {

/// Grows, never shrinks; aligned to 64 bytes; what was in it is lost when it grows.
class Buffer {
public:
    Buffer() = default;
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;
    ~Buffer() { std::free(memory_); }

    template <class Element> Element *of(int64_t count) {
        const int64_t bytes = (count * static_cast<int64_t>(sizeof(Element)) + 63) / 64 * 64;
        if (bytes > size_) {
            std::free(memory_);
            memory_ = std::aligned_alloc(64, bytes);
            if (!memory_) throw std::bad_alloc();
            size_ = bytes;
        }
        return static_cast<Element *>(memory_);
    }

private:
    void *memory_ = nullptr;
    int64_t size_ = 0;
};

/// What one thread of the pool works in.
class Scratch {
public:
    static constexpr int kThreads = 1024;

    static Scratch &of(int thread) {
        static Scratch all[kThreads];
        return all[thread];
    }

    Buffer queries, keys, values, sums, partial;
};

} // namespace moonpool
