#include "threads.h"

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace deepenough {

static void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#else
    std::this_thread::yield();
#endif
}

Threads::Threads(int count) : count_(count), shares_(count) {
    for (int thread = 1; thread < count; thread++)
        others_.emplace_back([this, thread] { follow(thread); });
}

Threads::~Threads() {
    ends_ = true;
    meet(kFirst);
    for (auto& other : others_) other.join();
}

void Threads::share_out(int tasks) {
    for (int thread = 0; thread < count_; thread++) {
        shares_[thread].next.store(int(int64_t(tasks) * thread / count_), std::memory_order_relaxed);
        shares_[thread].end = int(int64_t(tasks) * (thread + 1) / count_);
    }
}

bool Threads::claim(int thread, int most, int* first, int* last) {
    for (int i = 0; i < count_; i++) {
        Share& share = shares_[(thread + i) % count_];
        if (share.next.load(std::memory_order_relaxed) >= share.end) continue;
        const int begin = share.next.fetch_add(most, std::memory_order_relaxed);
        if (begin >= share.end) continue;
        *first = begin, *last = begin + most < share.end ? begin + most : share.end;
        return true;
    }
    return false;
}

void Threads::meet(int tasks) {
    const unsigned generation = generation_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < count_) {
        wait(generation);
        return;
    }
    arrived_.store(0, std::memory_order_relaxed);
    share_out(tasks == kFirst ? first_tasks_ : tasks);
    generation_.store(generation + 1, std::memory_order_seq_cst);
    if (asleep_.load(std::memory_order_seq_cst) > 0) {
        std::lock_guard<std::mutex> lock(mutex_);
        woken_.notify_all();
    }
}

// Spin while the others can be expected any moment, then give way, then sleep: where other programs
// want the cores, a thread that spins would only keep them from the one it waits for.
void Threads::wait(unsigned generation) {
    const auto moved = [&] { return generation_.load(std::memory_order_acquire) != generation; };
    for (int spin = 0; spin < 4000; spin++) {
        if (moved()) return;
        pause_briefly();
    }
    const auto began = std::chrono::steady_clock::now();
    while (std::chrono::steady_clock::now() - began < std::chrono::microseconds(300)) {
        if (moved()) return;
        std::this_thread::yield();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    asleep_.fetch_add(1, std::memory_order_seq_cst);
    woken_.wait(lock, moved);
    asleep_.fetch_sub(1, std::memory_order_seq_cst);
}

void Threads::run(const std::function<void(int)>& work, int tasks) {
    work_ = work, first_tasks_ = tasks;
    meet(kFirst);  // the others wait for this
    work_(0);
    meet(0);
}

void Threads::follow(int thread) {
    while (true) {
        meet(kFirst);
        if (ends_) return;
        work_(thread);
        meet(0);
    }
}

}  // namespace deepenough
