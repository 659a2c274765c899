// Shares one op among cores: a few threads that live as long as the process, and counters of pieces.
//
// Each thread computes a row of pieces of its own, so that it reads memory in one sweep, and then helps the others. No
// result depends on which thread computes which piece. The caller computes too and waits for pieces, never for threads:
// a helper that is kept from its core by another process delays only its current piece. After a fork the helpers are
// gone and the caller computes everything.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <linux/futex.h>
#include <memory>
#include <sched.h>
#include <sys/syscall.h>
#include <thread>
#include <type_traits>
#include <unistd.h>
#include <vector>

namespace tandem {

static inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

static inline void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
static inline void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// Waits for a word to change: spins for some microseconds, since the next op usually follows soon, then sleeps. Spins
// without result make later spins shorter, down to 4 us: a process that shares its cores must not waste them.
class Patience {
 public:
  template <class Condition>
  bool spin_until(Condition&& is_met) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(spin_us_);
    do {
      for (int i = 0; i < 32; i++) {
        if (is_met()) {
          spin_us_ = std::min(2 * spin_us_, 64);
          return true;
        }
        pause_briefly();
      }
    } while (std::chrono::steady_clock::now() < end);
    spin_us_ = std::max(spin_us_ / 2, 4);
    return false;
  }

 private:
  int spin_us_ = 64;
};

class ThreadPool {
 public:
  using Piece = void (*)(void* context, int index);

  // `cpus` may be empty; else helper i is pinned to cpus[i]; cpus[0] is the caller's.
  ThreadPool(int num_threads, const std::vector<int>& cpus) : tickets_(num_threads) {
    for (int i = 1; i < num_threads; i++) {
      helpers_.emplace_back([this, i] { help(i); });
      if (cpus.empty()) continue;
      cpu_set_t set;
      CPU_ZERO(&set);
      CPU_SET(cpus[i], &set);
      pthread_setaffinity_np(helpers_.back().native_handle(), sizeof set, &set);
    }
  }

  ~ThreadPool() {
    is_ending_.store(true);
    round_.fetch_add(1);
    wake_all(round_);
    for (auto& helper : helpers_) helper.join();
  }

  int num_threads() const { return (int)helpers_.size() + 1; }

  void run(int num_pieces, Piece piece, void* context) {
    if (helpers_.empty() || num_pieces <= 1) {
      for (int i = 0; i < num_pieces; i++) piece(context, i);
      return;
    }
    piece_ = piece;
    context_ = context;
    num_pieces_ = num_pieces;
    num_done_.store(0, std::memory_order_relaxed);
    const uint64_t all_threads = tickets_.size();
    for (uint64_t i = 0; i < all_threads; i++) {
      const uint64_t begin = num_pieces * i / all_threads, end = num_pieces * (i + 1) / all_threads;
      tickets_[i].next.store(end << 32 | begin, std::memory_order_release);
    }
    round_.fetch_add(1, std::memory_order_seq_cst);
    if (num_asleep_.load(std::memory_order_seq_cst)) wake_all(round_);
    work(0);
    const uint32_t all = num_pieces;
    auto is_done = [&] { return num_done_.load(std::memory_order_acquire) == all; };
    if (is_done() || patience_.spin_until(is_done)) return;
    is_caller_asleep_.store(true, std::memory_order_seq_cst);
    for (uint32_t done; (done = num_done_.load(std::memory_order_seq_cst)) != all;) sleep_while(num_done_, done);
    is_caller_asleep_.store(false, std::memory_order_relaxed);
  }

  // Lets helpers compute pieces between ops, one at a time, after the next op has woken them. No earlier pieces are
  // left, and the pieces' data stays valid until `finish_aside`.
  void begin_aside(int num_pieces, Piece piece, void* context) {
    aside_piece_ = piece;
    aside_context_ = context;
    num_aside_ = num_pieces;
    num_aside_done_.store(0, std::memory_order_relaxed);
    aside_.next.store((uint64_t)num_pieces << 32, std::memory_order_release);
  }

  // Computes the remaining pieces and waits for those that helpers have begun.
  void finish_aside() {
    while (do_one_aside()) {
    }
    for (int i = 0; num_aside_done_.load(std::memory_order_acquire) != num_aside_; i++) {
      if (i < 1024)
        pause_briefly();
      else
        std::this_thread::yield();
    }
  }

 private:
  // A ticket is {where a thread's row of pieces ends, the next one}. A thread that takes one below the end holds up the
  // round until its piece is done, so what it reads of `piece_`, `context_` and `num_pieces_` is of that round.
  struct alignas(64) Ticket {
    std::atomic<uint64_t> next{0};
  };

  void work(int thread) {
    const int num_threads = (int)tickets_.size();
    for (int i = 0; i < num_threads; i++) {
      std::atomic<uint64_t>& next = tickets_[(thread + i) % num_threads].next;
      for (;;) {
        // A load first: a row that is used up costs no write to a line that all threads share.
        const uint64_t seen = next.load(std::memory_order_acquire);
        if ((uint32_t)seen >= seen >> 32) break;
        const uint64_t ticket = next.fetch_add(1, std::memory_order_acq_rel);
        const uint32_t index = (uint32_t)ticket, end = ticket >> 32;
        if (index >= end) break;
        piece_(context_, (int)index);
        const uint32_t all = num_pieces_, done = num_done_.fetch_add(1, std::memory_order_seq_cst) + 1;
        if (done == all && is_caller_asleep_.load(std::memory_order_seq_cst)) wake_all(num_done_);
      }
    }
  }

  // Returns whether a piece was left.
  bool do_one_aside() {
    const uint64_t seen = aside_.next.load(std::memory_order_acquire);
    if ((uint32_t)seen >= seen >> 32) return false;
    const uint64_t ticket = aside_.next.fetch_add(1, std::memory_order_acq_rel);
    const uint32_t index = (uint32_t)ticket, end = ticket >> 32;
    if (index >= end) return false;
    aside_piece_(aside_context_, (int)index);
    num_aside_done_.fetch_add(1, std::memory_order_release);
    return true;
  }

  void help(int thread) {
    Patience patience;
    for (uint32_t seen = 0; !is_ending_.load(std::memory_order_acquire);) {
      auto is_new = [&] { return round_.load(std::memory_order_acquire) != seen; };
      if (!patience.spin_until(is_new)) {
        num_asleep_.fetch_add(1, std::memory_order_seq_cst);
        sleep_while(round_, seen);
        num_asleep_.fetch_sub(1, std::memory_order_seq_cst);
      }
      seen = round_.load(std::memory_order_acquire);
      work(thread);
      while (round_.load(std::memory_order_acquire) == seen && do_one_aside()) {
      }
    }
  }

  std::vector<Ticket> tickets_;  // before the helpers, who use them
  std::vector<std::thread> helpers_;
  Patience patience_;
  Piece piece_ = nullptr;
  void* context_ = nullptr;
  uint32_t num_pieces_ = 0;
  Ticket aside_;
  std::atomic<uint32_t> num_aside_done_{0};
  uint32_t num_aside_ = 0;
  Piece aside_piece_ = nullptr;
  void* aside_context_ = nullptr;
  std::atomic<bool> is_ending_{false};
  alignas(64) std::atomic<uint32_t> round_{0};
  alignas(64) std::atomic<uint32_t> num_done_{0};
  std::atomic<bool> is_caller_asleep_{false};
  alignas(64) std::atomic<uint32_t> num_asleep_{0};
};

// Never destroyed at exit: a helper may still use it.
inline std::unique_ptr<ThreadPool>& threads() {
  static auto* pool = new std::unique_ptr<ThreadPool>(new ThreadPool(1, {}));
  return *pool;
}

// Calls body(0) ... body(num_pieces - 1), each on whichever thread is free.
template <class Body>
static void in_parallel(int num_pieces, Body&& body) {
  using Plain = std::remove_reference_t<Body>;
  threads()->run(num_pieces, [](void* context, int i) { (*static_cast<Plain*>(context))(i); }, (void*)&body);
}

// Calls body(first, end) over [0, num_rows), in pieces of at least kWorthwhile floats.
template <class Body>
static void in_parallel_rows(int64_t num_rows, int64_t floats_per_row, Body&& body) {
  constexpr int64_t kWorthwhile = 16384;  // floats
  const int64_t rows = std::max<int64_t>(1, kWorthwhile / std::max<int64_t>(1, floats_per_row));
  in_parallel((int)((num_rows + rows - 1) / rows),
              [&](int piece) { body(piece * rows, std::min(num_rows, (piece + 1) * rows)); });
}

}  // namespace tandem
