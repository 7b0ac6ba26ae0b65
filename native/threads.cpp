#include "threads.h"

#include <algorithm>
#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace deepenough {

// Between two looks: at first only a moment passes, then the core is offered to whoever wants it.
class Patience {
public:
    void wait() {
        if (looks_++ > kBrief) {
            std::this_thread::yield();
        } else {
#if defined(__x86_64__)
            _mm_pause();
#endif
        }
    }
    bool is_long() const { return looks_ > kLong; }

private:
    static constexpr int kBrief = 1000, kLong = 1400;
    int looks_ = 0;
};

Threads::Threads(int count) : count_(count), shares_(count), own_(count) {
    for (int thread = 1; thread < count; thread++)
        others_.emplace_back([this, thread] { follow(thread); });
}

Threads::~Threads() {
    ends_ = true;
    generation_.fetch_add(1);
    {
        std::lock_guard<std::mutex> lock(mutex_);
        woken_.notify_all();
    }
    for (auto& other : others_) other.join();
}

static constexpr uint64_t kMask = (uint64_t(1) << 20) - 1;

void Threads::open_phase(uint32_t phase, int tasks) {
    for (int thread = 0; thread < count_; thread++) {
        const uint64_t first = uint64_t(tasks) * thread / count_;
        const uint64_t end = uint64_t(tasks) * (thread + 1) / count_;
        shares_[thread].state.store(packed(phase, first, end));
    }
    total_.store(tasks);
    done_.store(0);
    phase_.store(phase, std::memory_order_release);
}

bool Threads::is_late(int thread) const {
    return phase_.load(std::memory_order_acquire) != own_[thread].phase;
}

bool Threads::claim(int thread, int most, int* first, int* last) {
    Own& own = own_[thread];
    if (own.claimed) done_.fetch_add(own.claimed, std::memory_order_acq_rel);
    own.claimed = 0;
    for (int i = 0; i < count_; i++) {
        Share& share = shares_[(thread + i) % count_];
        uint64_t state = share.state.load(std::memory_order_acquire);
        while (true) {
            if (state >> (2 * kBits) != (own.phase & 0xffffff)) return false;
            const int begin = int(state >> kBits & kMask), end = int(state & kMask);
            if (begin >= end) break;
            const int count = std::min(most - begin % most, end - begin);
            if (!share.state.compare_exchange_weak(state, packed(own.phase, begin + count, end),
                                                   std::memory_order_acq_rel))
                continue;
            *first = begin, *last = begin + count, own.claimed = count;
            return true;
        }
    }
    return false;
}

void Threads::meet(int thread, int tasks) {
    Own& own = own_[thread];
    Patience patience;
    while (phase_.load(std::memory_order_acquire) == own.phase) {
        uint32_t expected = own.phase;
        if (done_.load(std::memory_order_acquire) == total_.load(std::memory_order_relaxed) &&
            opening_.compare_exchange_strong(expected, own.phase + 1)) {
            open_phase(own.phase + 1, tasks);
            break;
        }
        patience.wait();
    }
    own.phase++;
}

void Threads::run(const std::function<void(int)>& work, int tasks) {
    work_ = &work;
    first_phase_ = own_[0].phase = opening_ = phase_.load() + 1;
    open_phase(first_phase_, tasks);
    if (count_ > 1) {
        is_open_.store(true);
        generation_.fetch_add(1);
        if (asleep_.load() > 0) {
            std::lock_guard<std::mutex> lock(mutex_);
            woken_.notify_all();
        }
    }
    work(0);
    meet(0, 0);
    is_open_.store(false);
    Patience patience;
    while (inside_.load() > 0) patience.wait();
}

void Threads::wait_for_work(unsigned seen) {
    const auto has_come = [&] { return generation_.load(std::memory_order_acquire) != seen; };
    for (Patience patience; !patience.is_long(); patience.wait())
        if (has_come()) return;
    std::unique_lock<std::mutex> lock(mutex_);
    asleep_.fetch_add(1);
    woken_.wait(lock, has_come);
    asleep_.fetch_sub(1);
}

void Threads::follow(int thread) {
    unsigned seen = 0;
    while (true) {
        wait_for_work(seen);
        seen = generation_.load(std::memory_order_acquire);
        if (ends_) return;
        inside_.fetch_add(1);
        if (is_open_.load()) {
            own_[thread].phase = first_phase_;
            (*work_)(thread);
        }
        inside_.fetch_sub(1);
    }
}

}  // namespace deepenough
