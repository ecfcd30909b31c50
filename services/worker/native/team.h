// The threads of one call, and how they share its work.
#pragma once

#include <omp.h>
#include <sched.h>

#include <atomic>
#include <cstdint>

namespace stallfree {

// Where all threads wait for the last. A step has a hundred of these, some microseconds apart, so waiting spins; where
// another process has taken the core that the last one needs, spinning would keep it away, so after a while it yields.
class Barrier {
 public:
  // Before the first thread comes.
  void expect(int num_threads) { num_threads_ = num_threads; }

  void wait() {
    const std::uint32_t round = round_.load(std::memory_order_relaxed);
    if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads_) {
      num_arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int turn = 0; round_.load(std::memory_order_acquire) == round; ++turn) {
      if (turn < kSpins) {
        __builtin_ia32_pause();
      } else {
        sched_yield();
      }
    }
  }

 private:
  static constexpr int kSpins = 2000;
  int num_threads_ = 1;
  alignas(64) std::atomic<int> num_arrived_{0};
  alignas(64) std::atomic<std::uint32_t> round_{0};
};

struct Range {
  int begin;
  int end;
};

// What all threads of a call have in common.
struct Shared {
  Barrier barrier;
  alignas(64) std::atomic<int> next_task[2] = {0, 0};
};

// One thread's view of its team.
class Member {
 public:
  Member(Shared& shared, int index, int num_threads) : index(index), num_threads(num_threads), shared_(shared) {}

  const int index;
  const int num_threads;

  // This thread's part of `count` things, all of one size.
  Range part_of(int count) const {
    return {static_cast<int>(std::int64_t{count} * index / num_threads),
            static_cast<int>(std::int64_t{count} * (index + 1) / num_threads)};
  }

  void wait_for_all() { shared_.barrier.wait(); }

  // Has the threads take tasks one by one, for tasks of unequal size, and waits for all.
  template <class Task>
  void share(int num_tasks, Task&& task) {
    std::atomic<int>& next = shared_.next_task[turn_];
    for (int number = next.fetch_add(1); number < num_tasks; number = next.fetch_add(1)) {
      task(number);
    }
    turn_ ^= 1;
    shared_.barrier.wait();
    // The other counter is in use from here on; this one is set back before it is needed again, a barrier later.
    next.store(0);
  }

 private:
  Shared& shared_;
  int turn_ = 0;
};

// Calls `work(member)` in up to `num_threads` threads, fewer where OpenMP is told to have fewer.
template <class Work>
void run_together(int num_threads, Work&& work) {
  Shared shared;
#pragma omp parallel num_threads(num_threads)
  {
#pragma omp single
    shared.barrier.expect(omp_get_num_threads());
    Member member(shared, omp_get_thread_num(), omp_get_num_threads());
    work(member);
  }
}

}  // namespace stallfree
