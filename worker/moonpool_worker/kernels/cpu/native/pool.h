// Threads that share a loop's tiles.
//
// Whoever is free takes the next tile, so a thread that the kernel put aside holds up nobody but the tile it is in: the
// CPUs are shared with others. Which thread computes a tile never changes its result.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

namespace moonpool {

class Pool {
public:
    /// The process's pool. After a fork the child has no helpers, and the calling thread does everything.
    static Pool &get();

    /// Threads that compute, the calling one included; helpers are started as needed and never ended.
    void resize(int threads);
    int threads() const { return threads_.load(std::memory_order_relaxed); }

    /// Call body(tile, thread) for every tile from 0 to tiles - 1 and return when all are done.
    template <class Body> void run(int tiles, const Body &body) {
        if (tiles <= 0) return;
        if (tiles == 1 || threads() == 1) {
            for (int tile = 0; tile < tiles; ++tile) body(tile, 0);
            return;
        }
        share(tiles, [](const void *context, int tile, int thread) {
            (*static_cast<const Body *>(context))(tile, thread);
        }, &body);
    }

    /// One caller at a time: take it around everything that calls run().
    std::mutex &door() { return door_; }

private:
    using Call = void (*)(const void *, int, int);

    struct Loop {
        std::atomic<Call> call{nullptr};
        std::atomic<const void *> context{nullptr};
        std::atomic<uint32_t> tiles{0};
    };

    void share(int tiles, Call call, const void *context);
    void help(int thread);
    bool take(uint32_t epoch, uint32_t &tile);
    void wait_for(uint32_t tiles);
    uint32_t *epoch_word() { return reinterpret_cast<uint32_t *>(&ticket_) + 1; }

    static constexpr uint32_t kLoops = 8;

    // Upper half: number of the loop; lower half: its next tile. Both change in one step, so a late thread can never
    // take a tile of a loop that it does not know.
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<uint32_t> done_{0};
    alignas(64) std::atomic<uint32_t> sleepers_{0};
    std::atomic<uint32_t> caller_sleeps_{0};
    Loop loops_[kLoops];
    std::atomic<int> threads_{1};
    int started_ = 1;
    std::mutex door_;
};

} // namespace moonpool
