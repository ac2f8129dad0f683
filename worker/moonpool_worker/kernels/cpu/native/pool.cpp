#include "pool.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <thread>

namespace moonpool {
namespace {

// About 30 microseconds: longer than the pauses between the loops of a step, shorter than a scheduler's slice.
constexpr int kSpins = 2000;

void sleep_on(uint32_t *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake(uint32_t *word, int count) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0); }

} // namespace

Pool &Pool::get() {
    // Never destroyed: its threads may outlive the end of main.
    static Pool *pool = new Pool;
    return *pool;
}

void Pool::resize(int threads) {
    std::lock_guard<std::mutex> hold(door_);
    threads_ = threads < 1 ? 1 : threads;
    for (; started_ < threads_; ++started_) std::thread([this, thread = started_] { help(thread); }).detach();
}

bool Pool::take(uint32_t epoch, uint32_t &tile) {
    const uint32_t tiles = loops_[epoch % kLoops].tiles.load(std::memory_order_relaxed);
    uint64_t seen = ticket_.load(std::memory_order_acquire);
    while (static_cast<uint32_t>(seen >> 32) == epoch && static_cast<uint32_t>(seen) < tiles) {
        if (ticket_.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) {
            tile = static_cast<uint32_t>(seen);
            return true;
        }
    }
    return false;
}

void Pool::share(int tiles, Call call, const void *context) {
    const uint32_t epoch = static_cast<uint32_t>(ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    Loop &loop = loops_[epoch % kLoops];
    loop.call.store(call, std::memory_order_relaxed);
    loop.context.store(context, std::memory_order_relaxed);
    loop.tiles.store(static_cast<uint32_t>(tiles), std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    ticket_.store(static_cast<uint64_t>(epoch) << 32, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst)) wake(epoch_word(), threads_ - 1);
    for (uint32_t tile; take(epoch, tile);) {
        call(context, static_cast<int>(tile), 0);
        done_.fetch_add(1, std::memory_order_acq_rel);
    }
    wait_for(static_cast<uint32_t>(tiles));
}

void Pool::wait_for(uint32_t tiles) {
    for (int spins = 0; spins < kSpins; ++spins) {
        if (done_.load(std::memory_order_acquire) == tiles) return;
        _mm_pause();
    }
    // A helper was put aside within a tile: it needs a CPU, perhaps this one.
    caller_sleeps_.store(1, std::memory_order_seq_cst);
    for (uint32_t done; (done = done_.load(std::memory_order_seq_cst)) != tiles;)
        sleep_on(reinterpret_cast<uint32_t *>(&done_), done);
    caller_sleeps_.store(0, std::memory_order_relaxed);
}

void Pool::help(int thread) {
    uint32_t known = 0;
    for (;;) {
        uint32_t epoch = static_cast<uint32_t>(ticket_.load(std::memory_order_acquire) >> 32);
        for (int spins = 0; epoch == known && spins < kSpins; ++spins) {
            _mm_pause();
            epoch = static_cast<uint32_t>(ticket_.load(std::memory_order_acquire) >> 32);
        }
        if (epoch == known) {
            sleepers_.fetch_add(1, std::memory_order_seq_cst);
            sleep_on(epoch_word(), known);
            sleepers_.fetch_sub(1, std::memory_order_relaxed);
            continue;
        }
        known = epoch;
        if (thread >= threads_) continue;
        for (uint32_t tile; take(epoch, tile);) {
            // Read after a tile was taken: until it is done the caller starts no other loop.
            const Loop &loop = loops_[epoch % kLoops];
            loop.call.load(std::memory_order_relaxed)(loop.context.load(std::memory_order_relaxed),
                                                       static_cast<int>(tile), thread);
            done_.fetch_add(1, std::memory_order_seq_cst);
            if (caller_sleeps_.load(std::memory_order_seq_cst)) wake(reinterpret_cast<uint32_t *>(&done_), 1);
        }
    }
}

} // namespace moonpool
