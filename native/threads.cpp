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

void Threads::begin(int thread) { own_[thread] = {1, first_tasks_, 0, first_tasks_}; }

bool Threads::is_late(int thread) const {
    return done_.load(std::memory_order_acquire) >= own_[thread].goal;
}

bool Threads::claim(int thread, int most, int* first, int* last) {
    Own& own = own_[thread];
    for (int i = 0; i < count_; i++) {
        const int owner = (thread + i) % count_;
        std::atomic<uint64_t>& share = shares_[owner].state;
        uint64_t state = share.load(std::memory_order_acquire);
        while (true) {
            const uint64_t phase = state >> (2 * kBits);
            if (phase > own.phase) return false;
            const bool is_open = phase == own.phase;
            const int begin = is_open ? int(state >> kBits & kMask) : first_task(owner, own.tasks);
            const int end = is_open ? int(state & kMask) : first_task(owner + 1, own.tasks);
            if (begin >= end) break;
            // Less at a time towards the end, so that nobody waits long for a neighbour's last tasks.
            int wanted = most;
            while (wanted > 2 && wanted * 2 > end - begin) wanted /= 2;
            const int count = std::min(wanted - begin % wanted, end - begin);
            if (!share.compare_exchange_weak(state, packed(own.phase, begin + count, end),
                                             std::memory_order_acq_rel))
                continue;
            *first = begin, *last = begin + count, own.claimed += count;
            return true;
        }
    }
    // One report a phase: the others wait for its end, and for nothing before.
    if (own.claimed) done_.fetch_add(own.claimed, std::memory_order_acq_rel);
    own.claimed = 0;
    return false;
}

void Threads::meet(int thread, int tasks) {
    Own& own = own_[thread];
    for (Patience patience; done_.load(std::memory_order_acquire) < own.goal;) patience.wait();
    own.phase++, own.tasks = tasks, own.goal += tasks;
}

void Threads::run(const std::function<void(int)>& work, int tasks) {
    work_ = &work;
    first_tasks_ = tasks;
    for (Share& share : shares_) share.state.store(0, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    begin(0);
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
            begin(thread);
            (*work_)(thread);
        }
        inside_.fetch_sub(1);
    }
}

}  // namespace deepenough
