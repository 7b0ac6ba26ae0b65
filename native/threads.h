// Threads that make one pass together: they meet between its phases, and share out each phase's tasks.
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

    // Call `work(thread)` on every thread, the caller's included, and wait for all of them.
    void run(const std::function<void(int)>& work, int tasks);

    // Wait until all threads are here; then the next phase has so many tasks.
    void meet(int tasks);

    // Claim up to `most` neighbouring tasks of this phase, of the thread's own share first and then of
    // the others'. Returns false when there are none left.
    bool claim(int thread, int most, int* first, int* last);

private:
    struct alignas(64) Share {
        std::atomic<int> next{0};
        int end = 0;
    };

    static constexpr int kFirst = -1;  // of a new piece of work, whose tasks only its caller knows

    void share_out(int tasks);
    void wait(unsigned generation);
    void follow(int thread);

    const int count_;
    std::vector<Share> shares_;
    std::vector<std::thread> others_;
    std::function<void(int)> work_;
    int first_tasks_ = 0;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<unsigned> generation_{0};
    std::atomic<int> asleep_{0};
    std::atomic<bool> ends_{false};
    std::mutex mutex_;
    std::condition_variable woken_;
};

}  // namespace deepenough
