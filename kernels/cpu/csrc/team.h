// A team of threads that compute a parallel loop without waiting for a thread that is not running.
//
// At a barrier, as in OpenMP, all threads wait for one that has lost its core to another process. On two cores, a step
// of usually 6 ms then took 150 ms. Here, the caller splits a loop into pieces and computes pieces itself; running
// helpers take pieces, too. The caller waits only for helpers at a piece, and sleeps if the wait gets long, so that a
// helper without a core can run on the caller's. Sleeping was 1 to 6% faster than yielding, with 8 and 32 streams,
// client and scheduler on the same two cores.
//
// Each thread takes the pieces of its stretch in order, so that memory is read in order, then pieces of other
// stretches. An idle helper spins for a typical pause between two operations, then yields, then sleeps, so that other
// processes get its core between steps.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

namespace pagewire {

class Team {
 public:
  // Calls piece(i) for each i below `pieces`, on as many threads as torch may use. piece must not call run().
  template <typename F>
  static void run(int64_t pieces, const F& piece) {
    Team& team = only();
    const int threads = std::min(at::get_num_threads(), kMaxThreads);
    std::unique_lock<std::mutex> lock(team.mutex_, std::defer_lock);
    if (pieces <= 1 || threads <= 1 || !lock.try_lock()) {
      for (int64_t i = 0; i < pieces; ++i) piece(i);
      return;
    }
    team.grow(threads - 1);
    team.call_ = [](const void* context, int64_t i) { (*static_cast<const F*>(context))(i); };
    team.context_ = &piece;
    team.threads_.store(threads, std::memory_order_relaxed);
    for (int i = 0; i < threads; ++i) {
      team.stretches_[i].next.store(pieces * i / threads, std::memory_order_relaxed);
      team.stretches_[i].end = pieces * (i + 1) / threads;
    }
    team.round_.fetch_add(1);  // odd: the round is open
    if (team.asleep_.load() > 0) team.round_.notify_all();
    team.work(0, threads);
    team.round_.fetch_add(1);  // even: the round is closed; a helper that arrives now leaves again
    team.wait_for_helpers();
  }

 private:
  static constexpr int kMaxThreads = 256;
  static constexpr int kSpins = 2000;  // of about 15 ns each
  static constexpr int kYields = 100;

  static Team& only() {
    static Team& team = *new Team;  // never destroyed: its threads may outlive main()
    return team;
  }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");  // `yield` takes no time on most of these processors
#else
    std::this_thread::yield();
#endif
  }

  void grow(int helpers) {
    try {
      for (; num_helpers_ < helpers; ++num_helpers_) std::thread(&Team::help, this, num_helpers_ + 1).detach();
    } catch (const std::system_error&) {
      // Fewer helpers if the operating system refuses a thread.
    }
  }

  // An exception ends the process, because other threads may still use the caller's objects.
  void work(int number, int threads) noexcept {
    for (int i = 0; i < threads; ++i) {
      Stretch& stretch = stretches_[(number + i) % threads];
      for (int64_t piece = stretch.next++; piece < stretch.end; piece = stretch.next++) call_(context_, piece);
    }
  }

  void help(int number) {
    uint32_t seen = 0;
    for (;;) {
      seen = wait_for_another(seen);
      if (seen % 2 == 0) continue;
      // With this order, either the helper sees that the round is closed, or the caller sees the helper, and waits.
      ++inside_;
      if (const int threads = threads_.load(); round_.load() == seen && number < threads) work(number, threads);
      --inside_;
      if (caller_sleeps_.load()) inside_.notify_all();
    }
  }

  void wait_for_helpers() {
    int inside;
    for (int spins = 0; (inside = inside_.load()) > 0; ++spins) {
      if (spins < kSpins) {
        pause();
        continue;
      }
      caller_sleeps_.store(true);
      inside_.wait(inside);
      caller_sleeps_.store(false);
    }
  }

  uint32_t wait_for_another(uint32_t seen) {
    uint32_t round;
    for (int tries = 0; tries < kSpins + kYields; ++tries) {
      if ((round = round_.load()) != seen) return round;
      tries < kSpins ? pause() : std::this_thread::yield();
    }
    ++asleep_;
    while ((round = round_.load()) == seen) round_.wait(seen);
    --asleep_;
    return round;
  }

  struct alignas(64) Stretch {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };

  std::mutex mutex_;
  int num_helpers_ = 0;
  void (*call_)(const void*, int64_t) = nullptr;
  const void* context_ = nullptr;
  Stretch stretches_[kMaxThreads];
  alignas(64) std::atomic<uint32_t> round_{0};
  alignas(64) std::atomic<int> inside_{0};
  std::atomic<bool> caller_sleeps_{false};
  alignas(64) std::atomic<int> asleep_{0};
  std::atomic<int> threads_{0};
};

// Minimum rows of a thread: waking one takes 2 to 5 µs, as long as computing 16,384 elements.
inline int64_t rows_a_thread(int64_t row_length) {
  return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, row_length));
}

// Splits [0, count) into stretches of at least `grain` elements, the last maybe fewer, and calls piece(begin, end).
template <typename F>
void parallel_for(int64_t count, int64_t grain, const F& piece) {
  // Several pieces a thread, so that others can help a thread that is slow or not running.
  const int64_t length = std::max(grain, count / (16 * at::get_num_threads()));
  Team::run((count + length - 1) / length, [&](int64_t i) { piece(i * length, std::min(count, (i + 1) * length)); });
}

}  // namespace pagewire
