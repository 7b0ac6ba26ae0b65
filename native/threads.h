// Threads that make one pass together, phase by phase, sharing out each phase's tasks.
//
// A phase is over when its tasks are done, not when all threads have been there: one that the system
// has stopped for a while, because other programs want its core, holds up the others only while it
// has a task in hand. When it comes back it finds its phases over and catches up.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace deepenough {

class Threads {
public:
    explicit Threads(int count);
    ~Threads();
    Threads(const Threads&) = delete;

    int count() const { return count_; }

    // Call `work(thread)`, which begins with a phase of so many tasks, on the caller's thread and on
    // the others as they come; returns when all tasks are done and nobody is at work any more.
    void run(const std::function<void(int)>& work, int tasks);

    // Claim up to `most` neighbouring tasks of the thread's phase, fewer towards the end of a share and
    // up to a multiple of their number, of its own share first and then of the others'. Returns false when there are none left: then those it has
    // claimed are done.
    bool claim(int thread, int most, int* first, int* last);

    // Wait until all tasks of the thread's phase are done; the next phase has so many.
    void meet(int thread, int tasks);

    // The first task of a thread's own share of so many.
    int first_task(int thread, int tasks) const { return int(int64_t(tasks) * thread / count_); }

    // Whether the others have left the thread's phase behind, so that it need not prepare for it.
    bool is_late(int thread) const;

private:
    struct alignas(64) Share {
        // Phase, next task and end in one number, as a thread that is late must never see the end of
        // one phase beside the next task of another. Whoever comes first in a phase opens it.
        std::atomic<uint64_t> state{0};
    };
    static constexpr int kBits = 20;  // of a task's number
    static uint64_t packed(uint64_t phase, uint64_t next, uint64_t end) {
        return phase << (2 * kBits) | next << kBits | end;
    }
    struct alignas(64) Own {
        uint64_t phase = 0;
        int tasks = 0;      // of the phase
        int claimed = 0;    // and not yet reported as done
        int64_t goal = 0;   // tasks of all phases up to this one
    };

    void begin(int thread);
    void follow(int thread);
    void wait_for_work(unsigned seen);

    const int count_;
    std::vector<Share> shares_;
    std::vector<Own> own_;
    std::vector<std::thread> others_;
    alignas(64) std::atomic<int64_t> done_{0};  // tasks of all phases
    // Work that others may join while it is open.
    alignas(64) const std::function<void(int)>* work_ = nullptr;
    int first_tasks_ = 0;
    std::atomic<unsigned> generation_{0};
    std::atomic<bool> is_open_{false}, ends_{false};
    std::atomic<int> inside_{0}, asleep_{0};
    std::mutex mutex_;
    std::condition_variable woken_;
};

}  // namespace deepenough
