// The threads of one call, and how they share its work.
#pragma once

#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <vector>

namespace stallfree {

// A counter in a cache line of its own.
struct alignas(64) Counter {
  std::atomic<std::uint64_t> value{0};
};

struct Range {
  int begin;
  int end;
};

// Part `number` of `count` things that are dealt out to `num_parts`.
inline Range part_of(int count, int number, int num_parts) {
  return {static_cast<int>(std::int64_t{count} * number / num_parts),
          static_cast<int>(std::int64_t{count} * (number + 1) / num_parts)};
}

// One thread's view of its team. The team's work is a row of stages, and every thread walks through all of them. A stage
// is a number of tasks, in parts; all are done before the next stage begins. A thread takes the tasks of its own part
// from the front, then what is left of the others' from the back. So a thread that another process keeps from its core
// holds up nothing but the task it has in hand, and passes by what the others have done until it comes back; at the end of
// the call all meet.
class Member {
 public:
  // `counters`, up to `end`: zeros, for each stage one of tasks done and one of tasks taken from each thread's part.
  Member(Counter* counters, const Counter* end, int index, int num_threads)
      : index(index), num_threads(num_threads), counters_(counters), end_(end) {}

  const int index;
  const int num_threads;

  // A stage with a part for each thread: `size_of(part)` tasks each, and `task(part, number)` does one.
  template <class SizeOf, class Task>
  void share_parts(SizeOf&& size_of, Task&& task) {
    share_stage(num_threads, size_of, task);
  }

  // A stage of tasks of about one size: neighbours go to one thread.
  template <class Task>
  void share(int num_tasks, Task&& task) {
    const auto part = [&](int number) { return part_of(num_tasks, number, num_threads); };
    share_parts([&](int number) { return part(number).end - part(number).begin; },
                [&](int number, int place) { task(part(number).begin + place); });
  }

  // The same for small tasks: each thread takes several at once, where there are many.
  template <class Task>
  void share_small(int num_tasks, Task&& task) {
    const int num_at_once = std::clamp(num_tasks / (8 * num_threads), 1, 16);
    share((num_tasks + num_at_once - 1) / num_at_once, [&](int number) {
      const int end = std::min(num_tasks, (number + 1) * num_at_once);
      for (int each = number * num_at_once; each < end; ++each) {
        task(each);
      }
    });
  }

  // A stage of tasks of unequal size, the largest first: one part for all.
  template <class Task>
  void share_one_by_one(int num_tasks, Task&& task) {
    share_stage(1, [=](int) { return num_tasks; }, [&](int, int number) { task(number); });
  }

 private:
  template <class SizeOf, class Task>
  void share_stage(int num_parts, SizeOf&& size_of, Task&& task) {
    if (end_ - counters_ < 1 + num_threads) {
      std::abort();  // more stages than were announced
    }
    Counter& num_done = counters_[0];
    std::uint64_t num_own = 0, num_all = 0;
    for (int turn = 0; turn < num_parts; ++turn) {
      const int part = (index + turn) % num_parts;
      const int size = size_of(part);
      num_all += size;
      for (int number; (number = take(counters_[1 + part], size, turn == 0)) >= 0; ++num_own) {
        task(part, number);
      }
    }
    counters_ += 1 + num_threads;
    if (num_done.value.fetch_add(num_own, std::memory_order_acq_rel) + num_own != num_all) {
      wait(num_done, num_all);
    }
  }

  // The next task of a part, or -1 where all are taken. The low half counts those from the front.
  static int take(Counter& taken, int size, bool is_from_front) {
    const auto is_over = [size](std::uint64_t counts) {
      return static_cast<int>(counts) + static_cast<int>(counts >> 32) >= size;
    };
    if (is_over(taken.value.load(std::memory_order_relaxed))) {
      return -1;
    }
    const std::uint64_t one = is_from_front ? 1 : std::uint64_t{1} << 32;
    const std::uint64_t counts = taken.value.fetch_add(one, std::memory_order_relaxed);
    if (is_over(counts)) {
      return -1;
    }
    return is_from_front ? static_cast<int>(counts) : size - 1 - static_cast<int>(counts >> 32);
  }

  // A step has some hundred stages, some microseconds apart, so waiting spins; where another process has taken the core
  // that the last task needs, spinning would keep it away, so after a while it yields.
  static void wait(const Counter& num_done, std::uint64_t num_all) {
    constexpr int kSpins = 2000;
    for (int turn = 0; num_done.value.load(std::memory_order_acquire) != num_all; ++turn) {
      if (turn < kSpins) {
        __builtin_ia32_pause();
      } else {
        sched_yield();
      }
    }
  }

  Counter* counters_;
  const Counter* const end_;
};

// Keeps a thread on a core of its own for one call, where the call has as many threads as this process had cores at its
// first. Else the system may put two of them on one core when it makes room for another process, and all wait for
// milliseconds. A thread whose cores are others by now, because somebody has told it so, is left alone.
class Pin {
 public:
  // `first_core`: where the call came from, and its thread, which is the first, stays.
  Pin(int index, int num_threads, int first_core)
      : is_pinned_(CPU_COUNT(&own_cores()) == num_threads && has_own_cores() && CPU_ISSET(first_core, &own_cores())) {
    if (!is_pinned_) {
      return;
    }
    int core = first_core;
    for (int other = -1; index > 0; index -= CPU_ISSET(other, &own_cores()) && other != first_core ? 1 : 0) {
      core = ++other;
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

// Calls `work(member)`, which walks through at most `most_stages` stages, in up to `num_threads` threads, fewer where
// OpenMP is told to have fewer.
template <class Work>
void run_together(int num_threads, int most_stages, Work&& work) {
  std::vector<Counter> counters(static_cast<std::size_t>(most_stages) * (1 + num_threads));
  const int core = sched_getcpu();
#pragma omp parallel num_threads(num_threads)
  {
    Member member(counters.data(), counters.data() + counters.size(), omp_get_thread_num(), omp_get_num_threads());
    const Pin pin(member.index, member.num_threads, core);
    work(member);
  }
}

}  // namespace stallfree
