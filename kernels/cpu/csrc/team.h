// A team of threads that compute a parallel loop. The loop does not wait for a thread that is not running.
//
// A loop that ends with a barrier, as in OpenMP, waits for every thread. If a thread loses its core to another process,
// such as the scheduler or a client, all threads wait until the operating system runs that thread again. With barriers
// on two cores, a step of the model that usually takes 6 ms took 150 ms if a thread lost its core. `Team` has no
// barriers: the calling thread splits a loop into pieces and computes pieces itself. Helper threads that are running
// take pieces, too. The caller waits only for helpers that are computing a piece or looking for a piece. If this wait
// takes long, the helper has lost its core, and the caller sleeps, so that the operating system can run the helper on
// the caller's core. Sleeping was 1 to 6% faster than yielding, with 8 and 32 streams, and with client and scheduler on
// the same two cores.
//
// Each thread first takes the pieces of one stretch of the loop, in order, so that memory is read in order. A thread
// that has finished its stretch takes pieces of other threads' stretches.
//
// An idle helper spins for as long as a typical pause between two operations of a step of the model, then yields, then
// sleeps. Between two steps of the model, other processes can thus use the helpers' cores.
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
  // Calls piece(i) for each i below `pieces`, on as many threads as torch is set to use. piece(i) must not call run().
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
    asm volatile("isb" ::: "memory");  // on most of these processors `yield` takes no time
#else
    std::this_thread::yield();
#endif
  }

  void grow(int helpers) {
    try {
      for (; num_helpers_ < helpers; ++num_helpers_) std::thread(&Team::help, this, num_helpers_ + 1).detach();
    } catch (const std::system_error&) {
      // If the operating system refuses to start a thread, the team has fewer helpers.
    }
  }

  // If a piece throws an exception, the process ends, because other threads may still be using the caller's objects.
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
      // The order of these operations makes sure of one of two cases. Either this helper sees that the round is closed,
      // or the caller sees that the helper has entered, and waits for the helper.
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

// Minimum number of rows per thread: waking a thread takes 2 to 5 µs, as long as computing 16,384 elements.
inline int64_t rows_a_thread(int64_t row_length) {
  return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, row_length));
}

// Splits [0, count) into consecutive stretches, and calls piece(begin, end) for each stretch. All stretches but the
// last have at least `grain` elements.
template <typename F>
void parallel_for(int64_t count, int64_t grain, const F& piece) {
  // Each thread gets several pieces, so that other threads can take pieces of a thread that is slow or not running.
  const int64_t length = std::max(grain, count / (16 * at::get_num_threads()));
  Team::run((count + length - 1) / length, [&](int64_t i) { piece(i * length, std::min(count, (i + 1) * length)); });
}

}  // namespace pagewire
