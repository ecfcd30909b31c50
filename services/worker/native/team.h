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

// Keeps a thread on a core of its own for one call, where the call has as many threads as this process had cores at its
// first. Else the system may put two of them on one core when it makes room for another process, and all wait for
// milliseconds. A thread whose cores are others by now, because somebody has told it so, is left alone.
class Pin {
 public:
  Pin(int index, int num_threads) : is_pinned_(CPU_COUNT(&own_cores()) == num_threads && has_own_cores()) {
    if (!is_pinned_) {
      return;
    }
    int core = -1;
    for (int left = index; left >= 0; left -= CPU_ISSET(core, &own_cores()) ? 1 : 0) {
      ++core;
    }
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(core, &only);
    sched_setaffinity(0, sizeof only, &only);
  }
  ~Pin() {
    if (is_pinned_) {
      sched_setaffinity(0, sizeof(cpu_set_t), &own_cores());
    }
  }
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;

 private:
  // As they were at the first call. None, where there are more than a set can hold.
  static const cpu_set_t& own_cores() {
    static const cpu_set_t cores = [] {
      cpu_set_t found;
      if (sched_getaffinity(0, sizeof found, &found) != 0) {
        CPU_ZERO(&found);
      }
      return found;
    }();
    return cores;
  }

  static bool has_own_cores() {
    cpu_set_t now;
    return sched_getaffinity(0, sizeof now, &now) == 0 && CPU_EQUAL(&now, &own_cores());
  }

  const bool is_pinned_;
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
    const Pin pin(member.index, member.num_threads);
    work(member);
  }
}

}  // namespace stallfree
